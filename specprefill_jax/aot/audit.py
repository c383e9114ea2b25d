"""Every shader of a Vulkan module, read after the compiler is done with it.

IREE 3.13 converts the f16 operands of cooperative matrix products to f32 and multiplies those
(iree-org/iree issue 24817). The GPU has no such products: its driver accepts the shader and computes garbage.
So each operand is looked at; where the known conversion stands between, the product reads from before it.
A shader that reduces over the lanes of a subgroup must ask for the size that it was made for (`compiler.py`).
"""

from __future__ import annotations

import struct
import tempfile
import zipfile
import zlib
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path

from specprefill_jax.aot.compiler import compile_module
from specprefill_jax.aot.executables import ENTRY, read_executables
from specprefill_jax.aot.schedule import read_schedule
from specprefill_jax.aot.spirv import MAGIC, Shader
from specprefill_jax.aot.targets import Products, Target
from specprefill_jax.artifact.schedule import Schedule
from specprefill_jax.errors import CompileError

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")  # the file format's own layout: APPNOTE.TXT 4.3.7
_LOCAL_CRC, _CENTRAL_CRC = 14, 16

# What a shader's capabilities ask of a device, in the words in which IREE describes one; "" for what every
# device of IREE's Vulkan driver has, and for 16-bit and 64-bit numbers, which IREE does not tell (a driver
# without them refuses the shader).
_FEATURES = {
    0: "",  # Matrix
    1: "",  # Shader
    9: "shaderFloat16",
    10: "",  # Float64
    11: "",  # Int64
    22: "",  # Int16
    39: "shaderInt8",
    61: "subgroupBasic",
    62: "subgroupVote",
    63: "subgroupArithmetic",
    64: "subgroupBallot",
    65: "subgroupShuffle",
    66: "subgroupShuffleRelative",
    67: "subgroupClustered",
    4433: "storageBuffer16BitAccess",
    4434: "storageBuffer16BitAccess",
    4448: "storageBuffer8BitAccess",
    4449: "storageBuffer8BitAccess",
    5116: "shaderBFloat16Type",
    5117: "shaderBFloat16DotProduct",
    5118: "shaderBFloat16CooperativeMatrix",
    5345: "",  # VulkanMemoryModel
    5347: "bufferDeviceAddress",
    6016: "shaderIntegerDotProduct",
    6017: "shaderIntegerDotProduct",
    6018: "shaderIntegerDotProduct",
    6019: "shaderIntegerDotProduct",
    6022: "cooperativeMatrix",
}


@dataclass(frozen=True)
class Audited:
    """A module whose shaders have been read.

    Attributes:
        module: its bytes, repaired.
        shaders: how many it holds.
        products: cooperative matrix products in them.
        repaired: products whose operands were put right.
        features: what the shaders need of a device, in IREE's words.
        schedule: what its entries dispatch; None for a CPU, and where only the module is known.
    """

    module: bytes
    shaders: int
    products: int
    repaired: int
    features: frozenset[str]
    schedule: Schedule | None = None


def compile_audited(text: str, target: Target, name: str) -> Audited:
    """Compile a program for a target, and audit what comes out where it consists of shaders.

    Raises:
        CompileError: the compiler refuses the program, or the audit its result; names `name`.
    """
    if target.device.driver != "vulkan":
        return Audited(compile_module(text, target.flags, name), 0, 0, 0, frozenset())
    with tempfile.TemporaryDirectory(prefix="specprefill-") as folder:
        module = compile_module(text, target.flags, name, subgroup=target.reduction_size, phases=Path(folder))
        schedule = read_schedule(Path(folder), name)
    return replace(audit(module, target.cooperative, name), schedule=schedule)


def audit(module: bytes, products: Products, name: str) -> Audited:
    """Read every shader of a Vulkan module, and repair the known fault.

    Args:
        products: the cooperative products that the target's devices have.

    Raises:
        CompileError: a product is none of `products` and cannot be repaired, a subgroup may have any size, or
            a shader cannot be read; the message names the shader.
    """
    archive, repaired_module = zipfile.ZipFile(BytesIO(module)), bytearray(module)
    shaders = total = repaired = 0
    features: set[str] = set()
    for index, entry in enumerate(archive.infolist()):
        if not entry.filename.endswith(ENTRY):
            continue
        data = archive.read(entry)
        for start, shader in _find_shaders(data, f"{name}: {entry.filename}"):
            features |= _needed(shader, name)
            faults = len(shader.products_beside(products))
            if faults:
                fixed = _repaired(shader, products, name).to_bytes()
                data = data[:start] + fixed + data[start + len(fixed) :]
            shaders, total, repaired = shaders + 1, total + len(shader.products()), repaired + faults
        _replace(repaired_module, archive, index, data)
    if not shaders:
        raise CompileError(f"{name}: the audit finds no shader in the module")
    _check_subgroups(module, name)
    return Audited(bytes(repaired_module), shaders, total, repaired, frozenset(features))


def _check_subgroups(module: bytes, name: str) -> None:
    """Refuse a shader whose result depends on the size of a subgroup, and which does not ask for one."""
    for kernel in read_executables(module, name):
        if not kernel.subgroup and kernel.shader.joins_lanes():
            raise CompileError(
                f"{name}: {kernel.name} joins the lanes of a subgroup and asks for no size of it: a device "
                "whose own is another would compute wrong numbers without an error"
            )


def _needed(shader: Shader, name: str) -> set[str]:
    """Features of a device that the shader declares to use."""
    unknown = sorted(shader.capabilities() - _FEATURES.keys())
    if unknown:
        raise CompileError(
            f"{name}: {shader.name} needs the SPIR-V capabilities {unknown}, and the audit does not know "
            "what they ask of a device"
        )
    return {_FEATURES[capability] for capability in shader.capabilities()} - {""}


def _repaired(shader: Shader, products: Products, name: str) -> Shader:
    """The shader, its products among `products`."""
    fixed = shader.without_conversions()
    if fixed.products_beside(products):
        a, b, c, result = shader.products_beside(products)[0]
        known = ", ".join(f"{a} x {b} -> {result}" for a, b, result in sorted(products)) or "none"
        raise CompileError(
            f"{name}: {shader.name} multiplies cooperative matrices {a} x {b} + {c} -> {result}, but the "
            f"products of this target are: {known}. A device would compute wrong numbers without an error, "
            "and no repair is known. Build the model with another `numerics`"
        )
    return fixed


def _find_shaders(data: bytes, name: str) -> list[tuple[int, Shader]]:
    """The SPIR-V of a flatbuffer and where it starts: a vector of words, its length in the word before it."""
    found, at, magic = [], 0, struct.pack("<I", MAGIC)
    while (at := data.find(magic, at)) >= 4:
        (count,) = struct.unpack_from("<I", data, at - 4)
        end = at + 4 * count
        try:
            shader = Shader.from_bytes(data[at:end])
        except ValueError as error:
            raise CompileError(f"{name}: the audit cannot read its shader: {error}") from error
        found.append((at, shader))
        at = end
    if not found:
        raise CompileError(f"{name}: the audit finds no shader in it")
    return found


def _replace(module: bytearray, archive: zipfile.ZipFile, index: int, data: bytes) -> None:
    """Overwrite an entry of the archive by data of the same length, checksums included."""
    entry = archive.infolist()[index]
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != len(data):
        raise CompileError(f"the audit cannot write {entry.filename}: the module is no plain archive")
    header = _LOCAL_HEADER.unpack_from(module, entry.header_offset)
    start = entry.header_offset + _LOCAL_HEADER.size + header[9] + header[10]
    module[start : start + len(data)] = data
    checksum = struct.pack("<I", zlib.crc32(data))
    at = entry.header_offset + _LOCAL_CRC
    module[at : at + 4] = checksum
    at = _central_header(module, archive, index) + _CENTRAL_CRC
    module[at : at + 4] = checksum


def _central_header(module: bytearray, archive: zipfile.ZipFile, index: int) -> int:
    """Where the archive's directory describes an entry."""
    at = archive.start_dir
    for _ in range(index):
        name, extra, comment = struct.unpack_from("<3H", module, at + 28)
        at += 46 + name + extra + comment
    return at
