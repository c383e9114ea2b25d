"""llama.cpp's Vulkan matrix products as it runs them on a Radeon 780M: shaders, tiles, grids.

For scripts/preflight_gemms.py, which puts them beside our own. All that is said here of llama.cpp was read in
the copy that llama-cpp-python 0.3.36 carries, in ggml/src/ggml-vulkan: ggml-vulkan.cpp and
vulkan-shaders/vulkan-shaders-gen.cpp. Each function names the one that it follows.

In llama.cpp's words a product has m outputs, n tokens and sums over k. The device is AMD's third RDNA through
RADV: vendor AMD, cooperative matrices of 16x16x16, subgroups of 64 lanes unless a pipeline asks for 32.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from specprefill_jax.aot.executables import Executable
from specprefill_jax.artifact.locate import cache_folder
from specprefill_jax.artifact.schedule import Dispatch, Traffic
from specprefill_jax.errors import CompileError, FileMissing
from specprefill_jax.preflight.debian import LIBRARIES, LOADER, Packages, unpacked
from specprefill_jax.preflight.driver import Compiled, Driver
from specprefill_jax.preflight.gpu import Gpu
from specprefill_jax.preflight.isa import parse, with_turns
from specprefill_jax.preflight.kernel import Kernel, Product
from specprefill_jax.preflight.model import Prediction, predict
from specprefill_jax.preflight.tiles import Tiles

SDIST = "llama-cpp-python==0.3.36"
SHADERS = Path("ggml/src/ggml-vulkan/vulkan-shaders")
CUS_PER_WGP = 2
RDNA3, Q4_K = 4, 12  # in vk_device_architecture and ggml_type
# What the program does where a tile reaches past the product, which it never does here. The static model
# counts every path of a program once, so its three ways to write a tile would count together.
EDGES = re.compile(r"(const bool (?:is_aligned|is_in_bounds) = )[^;]+;")
_BINDINGS, _PUSH_CONSTANTS = ((0, 1, 2),), 17 * 4  # vk_mat_mat_push_constants
_TIME_LIMIT_S = 600

# Debian 12's shaderc (2023.2) does not know GL_KHR_cooperative_matrix, Debian 13's does.
_GLSLC = Packages(
    name="glslc",
    folder="glslc-debian13",
    wanted=("glslc",),
    holds=Path("usr/bin/glslc"),
    megabytes=6,
    otherwise="Where the system's own glslc knows cooperative matrices, nothing is downloaded",
)


@dataclass(frozen=True)
class Tile:
    """What a workgroup makes: outputs x tokens, and the words that specialize the shader to it."""

    outputs: int
    tokens: int
    words: tuple[int, ...]


@dataclass(frozen=True)
class Variant:
    """One of llama.cpp's shaders for products.

    Attributes:
        tiles: its tiles by size: s, m, l.
        more: words that follow those of the tile.
        subgroup: the subgroup size.
        step: how much of k a turn of its loop takes.
        weight_bits, input_bits: of a number, scales included.
    """

    name: str
    source: str
    defines: Mapping[str, str]
    tiles: Mapping[str, Tile]
    more: tuple[int, ...]
    subgroup: int
    step: int
    weight_bits: float
    input_bits: float


@dataclass(frozen=True)
class Launch:
    """How a product is dispatched: its tile, into how many parts k is cut, and the grid."""

    tile: Tile
    parts: int
    part: int
    workgroups: tuple[int, int, int]


def _tiles(*words: tuple[int, ...]) -> dict[str, Tile]:
    return {size: Tile(row[1], row[2], row) for size, row in zip("sml", words, strict=True)}


# `ggml_vk_load_shaders`, the warptiles: threads, BM, BN, BK, WM, WN, WMITER, TM, TN, TK, WARP. The f16 shader
# takes 32 for BK whatever the word says; both large tiles are those of "chip specific tuning" for AMD.
_UNIT = (16, 16, 16)
_F16_TILES = _tiles(
    (64, 32, 32, 16, 32, 32, 2, *_UNIT, 64),
    (128, 64, 64, 16, 64, 32, 2, *_UNIT, 64),
    (256, 128, 128, 16, 64, 64, 2, *_UNIT, 64),
)
_QUANT_TILES = _tiles(
    (64, 32, 32, 32, 32, 32, 2, *_UNIT, 64),
    (128, 64, 64, 32, 64, 32, 2, *_UNIT, 64),
    (256, 128, 128, 32, 64, 64, 2, *_UNIT, 64),
)
# `*_warptile_mmq_cm1_int`, for waves of 32 lanes.
_INT_TILES = _tiles(
    (32, 32, 32, 32, 32, 32, 2, *_UNIT, 32),
    (128, 64, 64, 32, 32, 32, 2, *_UNIT, 32),
    (512, 128, 128, 32, 32, 32, 2, *_UNIT, 32),
)
# vulkan-shaders-gen.cpp, `matmul_shaders(fp16, .., coopmat, .., f16acc=false)`.
_BASE = {
    "FLOAT16": "1",
    "COOPMAT": "1",
    "ACC_TYPE": "float",
    "ACC_TYPEV2": "vec2",
    "ACC_TYPE_VEC4": "vec4",
    "FLOAT_TYPE": "float16_t",
    "FLOAT_TYPEV2": "f16vec2",
    "FLOAT_TYPEV4": "f16vec4",
    "FLOAT_TYPEV8": "f16mat2x4",
    "D_TYPE": "float",
}
_F16_INPUT = {
    "LOAD_VEC_B": "8",
    "B_TYPE": "f16mat2x4",
    "B_TYPE_SCALAR": "float16_t",
    "B_TYPEV4": "f16vec4",
}
_ALIGNED = 1
VARIANTS = (
    Variant(  # matmul_f16
        "f16",
        "mul_mm.comp",
        _BASE | _F16_INPUT | {"DATA_A_F16": "1", "LOAD_VEC_A": "8"},
        _F16_TILES,
        (_ALIGNED,),
        subgroup=64,
        step=32,
        weight_bits=16,
        input_bits=16,
    ),
    Variant(  # matmul_quant_f16: weights become f16 on their way to local memory
        "q4_K",
        "mul_mm.comp",
        _BASE | _F16_INPUT | {"MULMAT_QUANT": "1"},
        _QUANT_TILES,
        (_ALIGNED, Q4_K),
        subgroup=64,
        step=32,
        weight_bits=4.5,
        input_bits=16,
    ),
    Variant(  # matmul_q4_k_q8_1: what it takes for q4_K on this GPU by itself, with inputs rounded to 8 bits
        "q4_K int8",
        "mul_mmq_cm1.comp",
        _BASE | {"DATA_A_Q4_K": "1", "D_TYPE_VEC4": "vec4"},
        _INT_TILES,
        (RDNA3,),
        subgroup=32,
        step=128,
        weight_bits=4.5,
        input_bits=9,
    ),
)


def tile_size(outputs: int, tokens: int) -> str:
    """`device->matmul_tile_selector` of `ggml_vk_load_shaders`, where all three sizes are there."""
    if outputs <= 32 or tokens <= 32:
        return "s"
    return "m" if outputs <= 64 or tokens <= 64 else "l"


def parts_of(k: int, tile: Tile, outputs: int, tokens: int, cores: int) -> int:
    """`ggml_vk_guess_split_k`: a long sum is cut into parts where its tiles leave most cores idle."""
    tiles = -(-outputs // tile.outputs) * -(-tokens // tile.tokens)
    if tokens < tile.tokens or k < 2048:
        return 1
    if tiles <= cores // 2:
        parts = min(cores // tiles, 8)
    else:
        parts = 3 if tiles <= cores * 2 // 3 else 1
    while parts > 1 and part_size(k, parts) * (parts - 1) >= k:
        parts -= 1
    return parts


def part_size(k: int, parts: int) -> int:
    """`ggml_vk_matmul`: the parts of a sum are multiples of 256."""
    whole = -(-k // parts)
    return k if parts == 1 else -(-whole // 256) * 256


def launch(variant: Variant, outputs: int, tokens: int, k: int, cores: int) -> Launch:
    """`ggml_vk_matmul`: x goes over the tiles of outputs, then over the parts of k; y over those of tokens.

    The int8 shader numbers its tiles anew, in groups of up to 32 of outputs. Where there are more, a group is
    larger than the 780M's cache too, so for memory it is the same order.
    """
    tile = variant.tiles[tile_size(outputs, tokens)]
    parts = parts_of(k, tile, outputs, tokens, cores)
    workgroups = (-(-outputs // tile.outputs) * parts, -(-tokens // tile.tokens), 1)
    return Launch(tile, parts, part_size(k, parts), workgroups)


class Shaders:
    """llama.cpp's shaders through a driver: each variant and tile is compiled once."""

    def __init__(self, folder: Path, compiler: list[str], driver: Driver, gpu: Gpu) -> None:
        self._folder, self._compiler, self._driver, self._gpu = folder, compiler, driver, gpu
        self._compiled: dict[tuple[str, Tile], tuple[Compiled, Compiled]] = {}

    def predicted(
        self, variant: Variant, outputs: int, tokens: int, k: int
    ) -> tuple[Launch, Kernel, Prediction]:
        """A product: how it is dispatched, its kernel, and the static model's time.

        Parts of a sum are added up by another kernel, for which only its memory traffic counts here.

        Raises:
            CompileError: its source is not what is known, or does not compile.
            KernelRefused: the driver refuses it.
        """
        how = launch(variant, outputs, tokens, k, CUS_PER_WGP * self._gpu.wgps)
        kernel = self._kernel(variant, how, Product("matmul", 1, tokens, outputs, k, variant.name))
        weights = round(outputs * k * variant.weight_bits / 8)
        sums = how.parts * outputs * tokens * 4
        traffic = Traffic(weights + round(tokens * k * variant.input_bits / 8), sums)
        tiles = Tiles(how.workgroups[0], next_workgroup_next_tile=True)
        dispatch = Dispatch(kernel.name, how.workgroups, {"0": weights}, 1)
        said = predict(kernel, dispatch, traffic, tiles, self._gpu)
        if how.parts > 1:
            adding = sums + outputs * tokens * 4
            us = said.us + 1e6 * adding / self._gpu.bandwidth
            said = Prediction(us, said.limit, said.bytes + adding, said.rereads)
        return how, kernel, said

    def _kernel(self, variant: Variant, how: Launch, product: Product) -> Kernel:
        """Registers and local memory are those of the shader as it is, the program is that of whole tiles."""
        plain, whole = self._driven(variant, how.tile)
        if plain.subgroup != variant.subgroup:
            raise CompileError(f"llama.cpp's {variant.name} runs with subgroups of {plain.subgroup} here")
        try:
            program = with_turns(parse(whole.assembly), -(-how.part // variant.step))
        except ValueError as error:
            raise CompileError(f"llama.cpp's {variant.name}: {error}") from error
        return Kernel(
            name=f"llama.cpp {variant.name}",
            product=product,
            local=(how.tile.words[0], 1, 1),
            subgroup=plain.subgroup,
            statistics=plain.statistics,
            program=program,
            wrong_products=(),
            required=plain.subgroup,
            joins_lanes=False,
            lanes_differ=True,
        )

    def _driven(self, variant: Variant, tile: Tile) -> tuple[Compiled, Compiled]:
        """The shader as it is, and for whole tiles only."""
        key = (variant.name, tile)
        if key not in self._compiled:
            constants = dict(enumerate((*tile.words, *variant.more)))
            plain, whole = (
                self._driver.compile(
                    (
                        Executable(
                            "main",
                            self._spirv(variant, edges=edges),
                            variant.subgroup,
                            _BINDINGS,
                            _PUSH_CONSTANTS,
                            constants,
                        ),
                    ),
                    f"llama.cpp {variant.name}",
                )["main"]
                for edges in (True, False)
            )
            self._compiled[key] = plain, whole
        return self._compiled[key]

    def _spirv(self, variant: Variant, *, edges: bool) -> bytes:
        """`string_to_spv_func` of vulkan-shaders-gen.cpp, which optimizes no cooperative matrices."""
        text = (self._folder / variant.source).read_text(encoding="utf-8")
        if not edges and variant.source == "mul_mm.comp":
            text, found = EDGES.subn(r"\1true;", text)
            if found != 2:
                raise CompileError(f"{variant.source} of this llama.cpp is not as {SDIST} has it")
        defines = [f"-D{name}={value}" for name, value in variant.defines.items()]
        with tempfile.TemporaryDirectory(prefix="specprefill-") as scratch:
            source, compiled = Path(scratch) / variant.source, Path(scratch) / "shader.spv"
            source.write_text(text, encoding="utf-8")
            options = ["-fshader-stage=compute", "--target-env=vulkan1.2", "-I", str(self._folder)]
            run([*self._compiler, *options, *defines, str(source), "-o", str(compiled)])
            return compiled.read_bytes()


def find_shaders(given: Path | None, say: Callable[[str], None]) -> Path:
    """The folder of llama.cpp's shaders: below `given`, its sources or llama-cpp-python's, or of the sdist.

    Raises:
        FileMissing: they are not below `given`.
        CompileError: the sdist cannot be downloaded.
    """
    root = given or cache_folder() / SDIST.replace("==", "-")
    if given is None and not root.is_dir():
        say(f"downloading {SDIST} into {root} (77 MB, once)")
        download(root)
    for below in (Path(), Path("vendor/llama.cpp")):
        if (root / below / SHADERS).is_dir():
            return root / below / SHADERS
    raise FileMissing(f"no {SHADERS} in {root}; name llama.cpp's sources with --llama-cpp, or leave it out")


def download(root: Path) -> None:
    """Put the shaders of the sdist at `root`, in one move."""
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".llama-cpp-", dir=root.parent) as scratch:
        name = SDIST.partition("==")[0]
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        run([*pip, "--no-deps", "--no-binary", name, "--dest", scratch, SDIST])
        (archive,) = Path(scratch).glob("*.tar.gz")
        made = Path(scratch) / "made"
        with tarfile.open(archive) as packed:
            for member in packed:
                if member.isfile() and f"/{SHADERS}/" in member.name and ".." not in member.name:
                    path = made.joinpath(*Path(member.name).parts[1:])
                    path.parent.mkdir(parents=True, exist_ok=True)
                    data = packed.extractfile(member)
                    assert data is not None, "a file"
                    path.write_bytes(data.read())
        made.rename(root)


def find_compiler(shaders: Path, say: Callable[[str], None]) -> tuple[list[str], str]:
    """A glslc that knows cooperative matrices, by llama.cpp's own test for it, and its version.

    Raises:
        DeviceError: there is none, and Debian's cannot be unpacked here.
        CompileError: what was unpacked does not start.
    """
    test = [str(shaders / "feature-tests" / "coopmat.comp"), "-o", "-"]
    command = ["glslc"]
    if shutil.which("glslc") is None or subprocess.run([*command, *test], capture_output=True).returncode:
        prefix = unpacked(_GLSLC, say)
        libraries = ["--library-path", str(prefix / LIBRARIES)]
        command = [str(prefix / LOADER), *libraries, str(prefix / _GLSLC.holds)]
        run([*command, *test])
    return command, run([*command, "--version"]).splitlines()[0]


def run(command: list[str]) -> str:
    """What a command prints.

    Raises:
        CompileError: it fails; with its words.
    """
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIME_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"{command[0]} did not end within {_TIME_LIMIT_S} s") from error
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise CompileError(f"{' '.join(command[:3])}: {words[-1]}")
    return done.stdout.decode(errors="replace")
