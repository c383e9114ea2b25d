"""The 780M's products in numbers, without the GPU: the same passes, scaled to lavapipe's matrix units.

Every kind of product of the true models is compiled with the tuning library of the 780M, its units of
16x16x16 and subgroups of 32 scaled to the 8x8x8 and 8 of Mesa 26's lavapipe (`coop_library.py`), audited, run
there, and compared with NumPy. That these are the products of the true build is read off its own kernels.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax
import numpy as np
from coop_kernels import OURS, Kernel, compiled
from coop_kinds import Expected, Kind, Values, kinds
from coop_library import SCALED_LANES, passes, scaled, sizes_of, tiles, written_down
from preflight_true_shapes import ROLES, ROWS
from rich import box
from rich.console import Console
from rich.table import Table
from true_shapes import presets, say

from specprefill_jax.aot.export import Shapes, export_module
from specprefill_jax.aot.lower import Entry, module_text
from specprefill_jax.aot.targets import TUNING_FLAG, Target, target_for
from specprefill_jax.artifact.locate import embedded
from specprefill_jax.errors import CompileError, DeviceFailed, SpecPrefillError
from specprefill_jax.models.config import TextConfig
from specprefill_jax.preflight.driver import driver_version
from specprefill_jax.preflight.mesa import LAVAPIPE, Installed, installed_driver

DEVICE = "radeon-780m"
BLOCKS, CAPACITY = (64, 256), 4096  # blocks as in compile/qwen3.5.toml
LAYERS = 4  # three of the delta rule and one of attention: all that a model has
RUN_LIMIT_S = 900
ENTRY = "product"
WIDTH = 175  # columns that the table takes when nobody watches
_CHILD = Path(__file__).with_name("coop_run.py")

OK, WRONG = "ok", "WRONG"


@dataclass(frozen=True)
class Build:
    """The target with its library as it ships, and a folder for others."""

    target: Target
    library: str
    folder: Path

    @property
    def passes(self) -> str:
        """The library's list of them."""
        return passes(self.library)

    def with_library(self, library: str) -> Target:
        """The target with this library."""
        path = self.folder / f"{zlib.crc32(library.encode()):08x}.mlir"
        path.write_text(library, encoding="utf-8")
        flag = f"{TUNING_FLAG}={path}@__kernel_config"
        flags = (flag if each.startswith(TUNING_FLAG) else each for each in self.target.flags)
        return replace(self.target, flags=tuple(flags))


@dataclass(frozen=True)
class Row:
    """What became of one kind.

    Attributes:
        tokens: that it reads; 1 is decode.
        product: batch x M x N x K.
        tile: the library's name for it, or whose pipeline it is; `scaled`: its sizes here.
        products: cooperative multiply-adds in the shader, all f16; `repaired`: how many by the audit.
        error: the largest; `bound`: what the worst value may be off; `worst`: the share that it is.
        status: `OK` or `WRONG`; `note`: what is wrong, or worth to know.
    """

    model: str
    kind: str
    tokens: int
    product: str = ""
    tile: str = ""
    scaled: str = ""
    products: int = 0
    repaired: int = 0
    error: float | None = None
    bound: float | None = None
    worst: float | None = None
    status: str = WRONG
    note: str = ""


def main() -> int:
    """0 if all products are right, 1 if not, 2 if it cannot be tried."""
    options = parse()
    try:
        driver, version = installed_driver(
            LAVAPIPE, lambda installed: driver_version(installed, "llvmpipe"), say
        )
        say(f"lavapipe of {version}")
        with tempfile.TemporaryDirectory(prefix="specprefill-") as folder:
            target = target_for(DEVICE)
            (path,) = target.tuning
            library = (embedded("compile") / path).read_text(encoding="utf-8")
            build = Build(target, library, Path(folder))
            rows = [row for name in options.models for row in check_model(name, options, build, driver)]
    except (SpecPrefillError, OSError) as error:
        print(f"coop_check: error: {error}", file=sys.stderr)
        return 2
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    console.print(f"lavapipe of {version}, cache of {CAPACITY}", highlight=False)
    console.print(table(rows))
    for line in notes(rows):
        console.print(line, highlight=False, soft_wrap=True)
    if options.json:
        shown = {"mesa": version, "capacity": CAPACITY, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(shown, indent=1))
    return int(any(row.status == WRONG for row in rows))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="coop_check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=ROLES, default=list(ROLES), help="default: both")
    shown = " ".join(map(str, BLOCKS))
    parser.add_argument(
        "--blocks", nargs="+", type=int, choices=BLOCKS, default=list(BLOCKS), help=f"default: {shown}"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="kinds with this in their name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    return parser.parse_args()


def check_model(name: str, options: argparse.Namespace, build: Build, driver: Installed) -> Iterator[Row]:
    """Every kind of a model, and the products of the true build that are no kind."""
    config = presets()[name]
    say(f"compiling {LAYERS} layers of the {name} model for {DEVICE}, to see which products it has")
    true = true_products(name, config, options.blocks, build)
    seen: set[Key] = set()
    for tokens, kind in kinds(config, options.blocks, CAPACITY):
        if options.only in kind.name:
            say(f"{name}, {tokens} tokens: {kind.name}")
            yield check_kind(Row(name, kind.name, tokens), kind, true, seen, build, driver)
    for key in (key for key in true if not options.only and key not in seen):
        note = "the true build has this product, and no kind here is the same"
        yield Row(name, "?", 0, sizes(key[0]), tile(true[key], build.library), note=note)


Key = tuple[str, tuple[str, ...]]
"""What two kernels share that do the same: operation and sizes, axes, and what follows."""


def true_products(name: str, config: TextConfig, blocks: Sequence[int], build: Build) -> dict[Key, Kernel]:
    """The kernels of the build that ships which multiply on matrix units."""
    config = replace(config, layer_types=config.layer_types[:LAYERS])
    role = ROLES[name]
    text = export_module(role, config, Shapes(tuple(blocks), (CAPACITY,), ROWS[role], "f16", None))
    _, kernels = compiled(text, build.target, name, build.passes)
    return {(kernel.operation, kernel.body): kernel for kernel in kernels if kernel.products}


def check_kind(
    row: Row, kind: Kind, true: Mapping[Key, Kernel], seen: set[Key], build: Build, driver: Installed
) -> Row:
    """Compile, look at the kernel, run, compare; adds to `seen` what the kind is of the true build."""
    text, library = program(kind), scaled(build.library)
    try:
        module, kernels = compiled(text, build.with_library(library), kind.name, build.passes)
        kernel = contraction(kernels)
        key = kernel.operation, kernel.body
        seen.add(key)
        original = true.get(key)
        if original and kernel.tiles == original.tiles and kernel.pipeline == original.pipeline != OURS:
            library = scaled(with_compilers_choice(build.library, kernel))
            module, kernels = compiled(text, build.with_library(library), kind.name, build.passes)
            kernel = contraction(kernels)
        row = described(row, kernel, library)
        why = fault(kernels, original, library, build.library)
        if why:
            return replace(row, note=why)
        inputs = draw(kind)
        results = run(module, kind, inputs, driver)
    except (CompileError, DeviceFailed) as error:
        return replace(row, note=str(error))
    return compared(row, results, kind.expected(*(values.astype(np.float64) for values in inputs)))


def contraction(kernels: Sequence[Kernel]) -> Kernel:
    """The kernel with the product.

    Raises:
        CompileError: there is none, or several.
    """
    found = [kernel for kernel in kernels if kernel.is_contraction]
    if len(found) != 1:
        raise CompileError(f"{len(found)} kernels with products instead of one")
    return found[0]


def with_compilers_choice(library: str, kernel: Kernel) -> str:
    """The library with what the compiler chose for a kernel that the library does not match."""
    *_, m, n, _ = sizes(kernel.operation).split("x")
    return written_down(
        library,
        pipeline=kernel.pipeline,
        tiles=kernel.tiles,
        workgroup=kernel.workgroup,
        options=kernel.options,
        shape=f"{m}x{n}",
    )


def described(row: Row, kernel: Kernel, library: str) -> Row:
    """The row with what is known of the kernel before it runs."""
    note = ""
    if kernel.pipeline != OURS:
        note = (
            f"IREE's own pipeline ({kernel.pipeline}), as in the true build, its tiles scaled like ours; "
            f"the audit repaired {kernel.repaired} of {kernel.products} multiply-adds"
        )
    return replace(
        row,
        product=sizes(kernel.operation),
        tile=tile(kernel, library),
        scaled=scaled_tile(kernel),
        products=kernel.products,
        repaired=kernel.repaired,
        note=note,
    )


def fault(kernels: Sequence[Kernel], true: Kernel | None, library: str, true_library: str) -> str:
    """Why the kernels of a kind do not show what they should; "" if they do.

    Lavapipe computes products with f32 operands right, which the GPU does not: only the shader itself tells.
    """
    kernel = contraction(kernels)
    if true is None:
        return "the true build has no such kernel (other sizes, axes or operations behind the product)"
    if kernel.pipeline != true.pipeline or tile(kernel, library) != tile(true, true_library):
        return f"the true build has the tile {tile(true, true_library)}, this has {tile(kernel, library)}"
    if not kernel.products:
        return "no cooperative product in the shader"
    if kernel.pipeline == OURS and (kernel.repaired or true.repaired):
        return "the compiler converts the operands to f32"
    if kernel.subgroup != SCALED_LANES:
        return f"the kernel asks for subgroups of {kernel.subgroup}"
    # Only a kernel that asks for its subgroup size is certain to get it.
    unsafe = [other for other in kernels if other is not kernel and "Subgroup" in other.pipeline]
    return f"{unsafe[0].operation} depends on a subgroup size that it does not ask for" if unsafe else ""


def program(kind: Kind) -> str:
    """The module with the kind as its only entry."""

    def product(_: tuple[()], *inputs: jax.Array) -> tuple[jax.Array, ...]:
        results = kind.spelled(*inputs[:-1])  # the last one is the state, of which there is none
        return results if isinstance(results, tuple) else (results,)

    shapes = tuple(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in kind.inputs)
    return module_text("coop", [], [Entry(ENTRY, product, shapes, ())])


def draw(kind: Kind) -> list[Values]:
    """Random operands, the same in every run."""
    random = np.random.default_rng(zlib.crc32(kind.name.encode()))
    return [each.draw(random) for each in kind.inputs]


def run(module: bytes, kind: Kind, inputs: Sequence[Values], driver: Installed) -> list[Values]:
    """The results of a kind on lavapipe.

    Raises:
        DeviceFailed: it does not run there; with the reason.
    """
    with tempfile.TemporaryDirectory(prefix="specprefill-") as folder:
        place = Path(folder)
        (place / "module.vmfb").write_bytes(module)
        np.savez(place / "inputs.npz", *inputs)
        names = (place / "module.vmfb", ENTRY, place / "inputs.npz", place / "outputs.npz")
        try:
            done = subprocess.run(
                [*driver.command, "-P", str(_CHILD), *map(str, names)],
                env=dict(driver.environment),
                capture_output=True,
                text=True,
                timeout=RUN_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise DeviceFailed(f"{kind.name}: lavapipe does not end within {RUN_LIMIT_S} s") from error
        if done.returncode:
            words = done.stderr.strip().splitlines() or ["no reason given"]
            raise DeviceFailed(f"{kind.name}: lavapipe ends with {done.returncode} ({words[-1]})")
        with np.load(place / "outputs.npz") as results:
            return [results[name] for name in results.files]


def compared(row: Row, results: Sequence[Values], expected: Sequence[Expected]) -> Row:
    """The row with its errors, of the result with the value that is worst in terms of its bound."""
    for result, right in zip(results, expected, strict=True):
        error = np.abs(result.astype(np.float64) - right.value)
        share = np.where(np.isfinite(error), error / right.bound, np.inf)
        at = np.unravel_index(np.argmax(share), share.shape)
        if row.worst is None or share[at] > row.worst:
            row = replace(row, error=float(error.max()), bound=float(right.bound[at]), worst=float(share[at]))
    assert row.worst is not None
    return replace(row, status=OK) if row.worst <= 1.0 else replace(row, note="errors exceed their bound")


def sizes(operation: str) -> str:
    """Batch, M, N and K out of a kernel's name."""
    return next((part for part in operation.split("_") if part[:1].isdigit()), operation)


def tile(kernel: Kernel, library: str) -> str:
    """The library's name of a kernel's configuration, or that it is the compiler's."""
    return tiles(library).get(kernel.tiles, "?") if kernel.pipeline == OURS else "IREE's own"


def scaled_tile(kernel: Kernel) -> str:
    """What a workgroup takes at a time here, and the unit."""
    workgroup, _, along_k, unit = sizes_of(kernel.tiles)
    return "x".join(map(str, (*workgroup[-2:], along_k[-1]))) + f" by {unit[-1]}s"


def table(rows: Sequence[Row]) -> Table:
    """A line for each kind."""
    shown = Table(box=box.MARKDOWN)
    for header in ("model", "kind", "tokens", "batch x M x N x K", "tile", "here"):
        shown.add_column(header)
    for header in ("MulAdds", "max error", "worst, of its bound", "share"):
        shown.add_column(header, justify="right")
    shown.add_column("status")
    for row in rows:
        shown.add_row(
            row.model,
            row.kind,
            str(row.tokens),
            row.product,
            row.tile,
            row.scaled,
            str(row.products),
            *errors(row),
            row.status,
        )
    return shown


def errors(row: Row) -> tuple[str, str, str]:
    """The largest error; and the one that is the largest share of its bound."""
    if row.error is None or row.bound is None or row.worst is None:
        return "", "", ""
    return f"{row.error:.1e}", f"{row.worst * row.bound:.1e} of {row.bound:.1e}", f"{row.worst:.0%}"


def notes(rows: Sequence[Row]) -> list[str]:
    """What the table has no room for."""
    said = [
        f"{row.model}, {row.tokens} tokens, {row.kind} {row.product}: {row.status}: {row.note}"
        for row in rows
        if row.note
    ]
    right = sum(row.status == OK for row in rows)
    return [*said, f"{right} of {len(rows)} products are compiled as in the true build, ran, and are right"]


if __name__ == "__main__":
    sys.exit(main())
