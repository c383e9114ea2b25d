"""Products of the true 0.8B and 4B models on the Radeon 780M, beside llama.cpp's: tiles and static times."""

import argparse
import importlib.metadata
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from llama_matmul import SDIST, VARIANTS, Shaders, find_compiler, find_shaders
from preflight_true_shapes import GPU, TUNED, UNTUNED, builds
from rich import box
from rich.console import Console
from rich.table import Table
from true_shapes import PRESETS, presets, say

from specprefill_jax.aot.audit import compile_audited
from specprefill_jax.aot.executables import read_executables
from specprefill_jax.aot.lower import Entry, module_text
from specprefill_jax.aot.targets import Target, target_for
from specprefill_jax.errors import SpecPrefillError
from specprefill_jax.models.checkpoint import parameter_specs
from specprefill_jax.models.config import TextConfig
from specprefill_jax.models.matrix import linear
from specprefill_jax.preflight.driver import Driver
from specprefill_jax.preflight.gpu import Gpu, known_gpu
from specprefill_jax.preflight.kernel import Kernel
from specprefill_jax.preflight.model import Prediction, waves_per_simd
from specprefill_jax.preflight.preflight import Module, check_module
from specprefill_jax.preflight.tiles import weight_tiles

MODELS = tuple(PRESETS.values())
NAMES = {
    TUNED: "ours, tuned",
    UNTUNED: "ours, untuned",
}  # the second is IREE's default, repaired by the audit


@dataclass(frozen=True)
class Shape:
    """Products of one shape in a block: which, how many in all layers, outputs and inputs of each."""

    model: str
    names: tuple[str, ...]
    count: int
    outputs: int
    inputs: int

    @property
    def key(self) -> str:
        """A name for an entry of a module."""
        return f"{'_or_'.join(self.names)}_{self.outputs}x{self.inputs}"


@dataclass(frozen=True)
class Found:
    """What is known of one kernel at one shape.

    Attributes:
        build: whose kernel it is.
        tile: tokens x outputs of a workgroup; "?" where it cannot be read.
        parts: into how many the sum is cut.
    """

    shape: Shape
    tokens: int
    build: str
    tile: str
    parts: int
    workgroups: int
    kernel: Kernel
    prediction: Prediction

    @property
    def tflops(self) -> float:
        """Operations in the predicted time."""
        return 2e-6 * self.tokens * self.shape.outputs * self.shape.inputs / self.prediction.us

    @property
    def wmma(self) -> int:
        """WMMA instructions in a turn of the hot loop."""
        return round(self.kernel.hot_cost.wmma) if self.kernel.hot else 0

    @property
    def fails(self) -> bool:
        """Whether it spills, or leaves the matrix unit out."""
        numbers = self.kernel.statistics
        return bool(numbers.spilled_vgprs or numbers.spilled_sgprs or numbers.scratch) or not self.wmma

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return {
            **asdict(self.shape),
            "tokens": self.tokens,
            "build": self.build,
            "tile": self.tile,
            "parts": self.parts,
            "workgroups": self.workgroups,
            "threads": self.kernel.threads,
            "subgroup": self.kernel.subgroup,
            **asdict(self.kernel.statistics),
            "waves_per_simd": waves_per_simd(self.kernel, known_gpu(GPU)),
            "wmma_in_hot_loop": self.wmma,
            **asdict(self.prediction),
            "tflops": self.tflops,
        }


def main() -> int:
    """0 if no kernel of ours spills and all use the matrix unit, 1 if not, 2 if it cannot be tried."""
    options = parse()
    try:
        gpu = known_gpu(GPU)
        driver = Driver(gpu, say)
        folder = find_shaders(options.llama_cpp, say)
        compiler, glslc = find_compiler(folder, say)
        theirs = Shaders(folder, compiler, driver, gpu)
        shapes = [shape for name in options.models for shape in shapes_of(name, presets()[name])]
        with tempfile.TemporaryDirectory() as libraries:
            targets = builds(target_for(GPU), Path(libraries))
            found = [
                one
                for tokens in options.tokens
                for one in compare(shapes, tokens, targets, driver, gpu, theirs)
            ]
    except (SpecPrefillError, OSError) as error:
        print(f"preflight_gemms: error: {error}", file=sys.stderr)
        return 2
    iree = importlib.metadata.version("iree-base-compiler")
    source = str(options.llama_cpp or SDIST)
    print(f"{driver.version}; IREE {iree}; llama.cpp of {source}; {glslc}")
    console = Console() if sys.stdout.isatty() else Console(width=200)
    for tokens in options.tokens:
        console.print(times([one for one in found if one.tokens == tokens]))
    console.print(kernels(found))
    if options.json:
        versions = {"driver": driver.version, "iree": iree, "llama.cpp": source, "glslc": glslc}
        said = {"versions": versions, "gemms": [one.to_json() for one in found]}
        options.json.write_text(json.dumps(said, indent=1))
    return int(any(one.fails for one in found if one.build == NAMES[TUNED]))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="preflight_gemms", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: both")
    parser.add_argument("--tokens", nargs="+", type=int, default=[256], metavar="T", help="default: 256")
    parser.add_argument(
        "--llama-cpp", type=Path, metavar="DIR", help=f"sources of llama.cpp (default: those of {SDIST})"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    return parser.parse_args()


def shapes_of(model: str, config: TextConfig) -> list[Shape]:
    """The products with weights of a block's tokens, those of one shape together.

    Without `in_proj_ba`: its 32 or 64 outputs become gates in the kernel that makes them.
    """
    names: dict[tuple[int, int], list[str]] = {}
    for spec in parameter_specs(config):
        name = str(spec.path[-1])
        if spec.kind == "matrix" and spec.path[0] == "layers" and name != "in_proj_ba":
            names.setdefault((spec.shape[0], spec.shape[1]), []).append(name)
    return [
        Shape(model, tuple(dict.fromkeys(found)), len(found), outputs, inputs)
        for (outputs, inputs), found in names.items()
    ]


def compare(
    shapes: Sequence[Shape],
    tokens: int,
    targets: Mapping[str, Target],
    driver: Driver,
    gpu: Gpu,
    theirs: Shaders,
) -> Iterator[Found]:
    """Every shape by each of our builds and each of llama.cpp's shaders."""
    for build, target in targets.items():
        name = NAMES[build]
        for model in dict.fromkeys(shape.model for shape in shapes):
            say(f"compiling the products of the {model} for {tokens} tokens, {name}")
            yield from ours([s for s in shapes if s.model == model], tokens, name, target, driver, gpu)
    say(f"compiling llama.cpp's products for {tokens} tokens")
    for variant in VARIANTS:
        for shape in shapes:
            how, kernel, said = theirs.predicted(variant, shape.outputs, tokens, shape.inputs)
            x, y, z = how.workgroups
            tile = f"{how.tile.tokens}x{how.tile.outputs}"
            yield Found(shape, tokens, kernel.name, tile, how.parts, x * y * z, kernel, said)


def ours(
    shapes: Sequence[Shape], tokens: int, name: str, target: Target, driver: Driver, gpu: Gpu
) -> Iterator[Found]:
    """Each product alone, as an entry of one module, with f16 inputs and weights and f32 results."""
    audited = compile_audited(program(shapes, tokens), target, f"products for {GPU}")
    assert audited.schedule is not None, "a Vulkan target"
    report = check_module(Module("products", audited.module, audited.schedule, 0, "f16"), gpu, driver)
    shaders = {one.name: one.shader for one in read_executables(audited.module, "products")}
    uses = {entry.name: entry.uses for entry in report.entries}
    for shape in shapes:
        (use,) = uses[shape.key]
        ((binding, _),) = use.dispatch.weights.items()
        x, y, z = use.dispatch.workgroups
        tiles = weight_tiles(shaders[use.kernel.name], int(binding), (x, y, z))
        tile = "?"
        if tiles is not None:
            tile = f"{tokens * tiles.count // use.workgroups}x{shape.outputs // tiles.count}"
        yield Found(shape, tokens, name, tile, 1, use.workgroups, use.kernel, use.prediction)


def program(shapes: Sequence[Shape], tokens: int) -> str:
    """A module with an entry for each product."""

    def product(index: int) -> Entry:
        def call(weights: tuple[jax.Array, ...], x: jax.Array, state: tuple[()]) -> tuple[jax.Array]:
            return (linear(x, weights[index]),)

        shape = shapes[index]
        return Entry(shape.key, call, (jax.ShapeDtypeStruct((tokens, shape.inputs), jnp.float16),), ())

    weights = [(f"{s.key}.weight", jax.ShapeDtypeStruct((s.outputs, s.inputs), jnp.float16)) for s in shapes]
    return module_text("products", weights, [product(index) for index in range(len(shapes))])


def times(found: Sequence[Found]) -> Table:
    """Microseconds, TFLOPS and what limits them by shape, then all products of a block of each model."""
    columns = list(dict.fromkeys(one.build for one in found))
    by_place = {(one.shape, one.build): one for one in found}
    shown = Table(box=box.MARKDOWN)
    shown.add_column(f"{found[0].tokens} tokens: predicted us (TFLOPS, limit)")
    shown.add_column("outputs x inputs", justify="right")
    for name in columns:
        shown.add_column(name, justify="right")
    shapes = list(dict.fromkeys(one.shape for one in found))
    for shape in shapes:
        row = (by_place[shape, name] for name in columns)
        cells = (f"{one.prediction.us:.0f} ({one.tflops:.1f}, {one.prediction.limit})" for one in row)
        shown.add_row(f"{shape.model} {', '.join(shape.names)}", f"{shape.outputs} x {shape.inputs}", *cells)
    for model in dict.fromkeys(shape.model for shape in shapes):
        own = [shape for shape in shapes if shape.model == model]
        sums = (sum(s.count * by_place[s, name].prediction.us for s in own) / 1000 for name in columns)
        count = sum(shape.count for shape in own)
        shown.add_row(f"{model}, all {count} of a block, ms", "", *(f"{total:.1f}" for total in sums))
    return shown


def kernels(found: Sequence[Found]) -> Table:
    """What the driver's compiler makes of each kernel and tile; of several shapes, the worst."""
    shown = Table(box=box.MARKDOWN)
    labels = ("tile (tokens x outputs)", "uses", "threads", "lanes of a wave", "VGPRs", "spilled")
    shown.add_column("kernel")
    for label in (*labels, "local memory, bytes", "waves per SIMD", "WMMA per turn"):
        shown.add_column(label, justify="right")
    groups: dict[tuple[str, str], list[Found]] = {}
    for one in found:
        groups.setdefault((one.build, one.tile), []).append(one)
    for (name, tile), group in groups.items():
        made = [one.kernel for one in group]
        numbers = (
            len(group),
            max(kernel.threads for kernel in made),
            max(kernel.subgroup for kernel in made),
            max(kernel.statistics.vgprs for kernel in made),
            max(kernel.statistics.spilled_vgprs for kernel in made),
            max(kernel.statistics.lds for kernel in made),
            min(waves_per_simd(kernel, known_gpu(GPU)) for kernel in made),
            min(one.wmma for one in group),
        )
        shown.add_row(name, tile, *(f"{number:.10g}" for number in numbers))
    return shown


if __name__ == "__main__":
    sys.exit(main())
