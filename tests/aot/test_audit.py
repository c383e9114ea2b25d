"""What the compiler makes of f16 products for gfx1103, and what the audit makes of that."""

from __future__ import annotations

import io
import re
import zipfile
from functools import cache

import jax
import jax.numpy as jnp
import pytest

from specprefill_jax.aot.audit import audit, compile_audited
from specprefill_jax.aot.compiler import compile_module
from specprefill_jax.aot.executables import read_executables
from specprefill_jax.aot.lower import Entry, module_text
from specprefill_jax.aot.spirv import Shader
from specprefill_jax.aot.targets import target_for
from specprefill_jax.errors import CompileError

RADEON = target_for("radeon-780m")
F16_TO_F32 = frozenset({("f16", "f16", "f32")})


@cache
def program(dtype: str) -> str:
    """x wᵀ and silu of it, whose sizes fit cooperative matrices."""

    def product(_: tuple[()], x: jax.Array, w: jax.Array, state: tuple[()]) -> tuple[jax.Array, jax.Array]:
        y = jnp.einsum("tk,nk->tn", x, w, preferred_element_type=jnp.float32)
        return y, jax.nn.silu(y)

    x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((64, 128), (256, 128)))
    return module_text("gemm", [], [Entry("product", product, (x, w), ())])


@cache
def unaudited() -> bytes:
    return compile_module(program("float16"), RADEON.flags, "gemm")


def shaders(module: bytes) -> dict[str, Shader]:
    """By the name of their entry in the module."""
    archive = zipfile.ZipFile(io.BytesIO(module))
    found = {}
    for entry in archive.namelist():
        if entry.endswith("_vulkan_spirv_fb.fb"):
            data = archive.read(entry)
            start = data.index(b"\x03\x02\x23\x07")
            words = int.from_bytes(data[start - 4 : start], "little")
            found[entry] = Shader.from_bytes(data[start : start + 4 * words])
    return found


def operand_types(module: bytes) -> set[tuple[str, ...]]:
    return {product.types for shader in shaders(module).values() for product in shader.products()}


def test_the_compiler_still_multiplies_f32_matrices_which_no_gpu_has() -> None:
    """If this fails, iree-org/iree issue 24817 is fixed in the pinned version: the repair can go."""
    assert operand_types(unaudited()) == {("f32", "f32", "f32", "f32")}


def test_the_audit_puts_the_operands_right() -> None:
    audited = audit(unaudited(), F16_TO_F32, "gemm")
    assert operand_types(audited.module) == {("f16", "f16", "f32", "f32")}
    assert audited.products == audited.repaired > 0
    assert audited.shaders == len(shaders(unaudited()))


def test_a_repaired_shader_has_no_conversion_left_and_keeps_its_length() -> None:
    repaired = shaders(audit(unaudited(), F16_TO_F32, "gemm").module)
    changed = 0
    for name, before in shaders(unaudited()).items():
        if before.products():
            after = repaired[name]
            converts = [sum(i.opcode == 115 for i in shader.instructions) for shader in (before, after)]
            assert converts[0] > converts[1] == 0
            assert len(after.words) == len(before.words)
            changed += 1
        else:
            assert repaired[name].words == before.words
    assert changed


def test_the_repaired_module_is_a_whole_archive() -> None:
    module = audit(unaudited(), F16_TO_F32, "gemm").module
    assert zipfile.ZipFile(io.BytesIO(module)).testzip() is None
    assert len(module) == len(unaudited())


def test_a_right_module_passes_unchanged() -> None:
    repaired = audit(unaudited(), F16_TO_F32, "gemm")
    again = audit(repaired.module, F16_TO_F32, "gemm")
    assert (again.module, again.products, again.repaired) == (repaired.module, repaired.products, 0)


def test_a_product_that_no_repair_helps_fails_the_compile_and_names_its_kernel() -> None:
    text = (
        r"gemm: product_dispatch_0_matmul\S* multiplies cooperative matrices f32 x f32 \+ f32 -> f32, "
        r"but the products of this target are: bf16 x bf16 -> f32\."
    )
    with pytest.raises(CompileError, match=text):
        audit(unaudited(), frozenset({("bf16", "bf16", "f32")}), "gemm")
    with pytest.raises(CompileError, match=r"products of this target are: none\."):
        audit(unaudited(), frozenset(), "gemm")


def test_compiling_for_the_radeon_audits() -> None:
    audited = compile_audited(program("float16"), RADEON, "gemm")
    assert audited.repaired > 0
    assert operand_types(audited.module) == {("f16", "f16", "f32", "f32")}


REDUCTION = """
func.func @sums(%x: tensor<4x2560xf32>) -> tensor<4xf32> {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %square = stablehlo.multiply %x, %x : tensor<4x2560xf32>
  %sum = stablehlo.reduce(%square init: %zero) applies stablehlo.add across dimensions = [1]
    : (tensor<4x2560xf32>, tensor<f32>) -> tensor<4xf32>
  return %sum : tensor<4xf32>
}"""


def test_iree_still_leaves_the_size_of_a_subgroup_to_the_driver_and_the_audit_refuses_that() -> None:
    module = compile_module(REDUCTION, RADEON.flags, "sums")
    (kernel,) = read_executables(module, "sums")
    assert (kernel.subgroup, kernel.shader.joins_lanes()) == (0, True)
    with pytest.raises(
        CompileError, match=f"sums: {kernel.name} joins the lanes of a subgroup and asks for no"
    ):
        audit(module, RADEON.cooperative, "sums")


@pytest.mark.parametrize(
    ("device", "size"), [("radeon-780m", 32), ("rdna2", 32), ("rdna3", 32), ("nvidia", 32)]
)
def test_our_reductions_ask_for_the_size_that_they_are_made_for(device: str, size: int) -> None:
    (kernel,) = read_executables(compile_audited(REDUCTION, target_for(device), "sums").module, "sums")
    assert (kernel.subgroup, kernel.shader.joins_lanes()) == (size, True)


@pytest.mark.parametrize("device", ["radeon-780m", "vulkan"])
def test_f32_modules_have_shaders_and_no_cooperative_products(device: str) -> None:
    audited = compile_audited(program("float32"), target_for(device), "gemm")
    assert audited.shaders > 0
    assert audited.products == 0


def test_a_cpu_module_has_no_shaders() -> None:
    target = target_for("cpu-portable")
    audited = compile_audited(program("float32"), target, "gemm")
    assert (audited.module, audited.shaders) == (compile_module(program("float32"), target.flags, "gemm"), 0)


def test_a_module_without_shaders_is_not_taken_for_an_audited_one() -> None:
    module = compile_module(program("float32"), target_for("cpu-portable").flags, "gemm")
    with pytest.raises(CompileError, match="gemm: the audit finds no shader in the module"):
        audit(module, F16_TO_F32, "gemm")


def replaced(module: bytes, entry: str, data: bytes) -> bytes:
    """The archive with another content of one entry."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(module)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            new.writestr(info, data if info.filename == entry else old.read(info))
    return out.getvalue()


@pytest.mark.parametrize(
    ("at", "word", "text"),
    [
        (0, 0x08230203, "the audit finds no shader in it"),
        # Behind the header of five words: an instruction of no words, one that is longer than the shader.
        (5, 0, "cannot read its shader: the instruction at word 5 has 0 words"),
        (5, 0xFFFF0011, "cannot read its shader: the instruction at word 5 has 65535 words"),
    ],
)
def test_a_shader_that_cannot_be_read_is_named(at: int, word: int, text: str) -> None:
    entry = next(iter(shaders(unaudited())))
    data = bytearray(zipfile.ZipFile(io.BytesIO(unaudited())).read(entry))
    start = data.index(b"\x03\x02\x23\x07") + 4 * at
    data[start : start + 4] = word.to_bytes(4, "little")
    with pytest.raises(CompileError, match=f"gemm: {re.escape(entry)}: .*{text}"):
        audit(replaced(unaudited(), entry, bytes(data)), F16_TO_F32, "gemm")


@pytest.mark.parametrize(
    ("device", "dtype", "features"),
    [
        ("vulkan", "float32", set()),
        ("rdna2", "float32", set()),
        ("radeon-780m", "float16", {"cooperativeMatrix", "shaderFloat16"}),
        ("rdna2", "float16", {"shaderFloat16"}),
    ],
)
def test_what_shaders_need_of_a_device_is_said(device: str, dtype: str, features: set[str]) -> None:
    assert compile_audited(program(dtype), target_for(device), "gemm").features == features


def test_a_capability_that_nobody_knows_fails_the_compile() -> None:
    """The first instruction of a shader declares a capability: word 5 says that, word 6 which."""
    entry = next(iter(shaders(unaudited())))
    data = bytearray(zipfile.ZipFile(io.BytesIO(unaudited())).read(entry))
    start = data.index(b"\x03\x02\x23\x07") + 4 * 6
    data[start : start + 4] = (9999).to_bytes(4, "little")
    with pytest.raises(
        CompileError, match=r"gemm: product_dispatch\S* needs the SPIR-V capabilities \[9999\]"
    ):
        audit(replaced(unaudited(), entry, bytes(data)), F16_TO_F32, "gemm")
