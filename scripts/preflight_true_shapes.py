"""The true 0.8B and 4B models through the compiler of the Radeon 780M: what it makes of their kernels."""

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from true_shapes import PRESETS, presets, say

from specprefill_jax.aot.audit import compile_audited
from specprefill_jax.aot.export import Shapes, export_module, state_tensors
from specprefill_jax.aot.targets import Target, target_for
from specprefill_jax.artifact.locate import embedded
from specprefill_jax.artifact.schedule import schedule_name
from specprefill_jax.cli.kernels import memory, show
from specprefill_jax.errors import SpecPrefillError
from specprefill_jax.preflight.driver import Driver
from specprefill_jax.preflight.gpu import known_gpu
from specprefill_jax.preflight.preflight import Module, check_module
from specprefill_jax.preflight.report import FAIL, Entry, Memory, ModuleReport, Report, Use

GPU = "radeon-780m"
ROLES = {preset: role for role, preset in PRESETS.items()}
ROWS = {"draft": 8, "target": 0}
TUNED, UNTUNED = "as it ships", "projections untuned"
# What matches a projection in the tuning library. Products with a batch keep their tiles in both builds:
# attention does not compile without them.
PROJECTION = re.compile(r"^ *@plain_\w+ -> @annotate,\n", re.MULTILINE)


@dataclass(frozen=True)
class Built:
    """One model in one build, checked.

    Attributes:
        repaired: products whose operands the audit put right.
        seconds: that compiling took.
    """

    build: str
    report: ModuleReport
    memory: Memory
    repaired: int
    products: int
    seconds: float


def main() -> int:
    """0 if the build as it ships passes, 1 if not, 2 if it cannot be tried."""
    options = parse()
    try:
        driver = Driver(known_gpu(GPU), say)
        with tempfile.TemporaryDirectory() as folder:
            targets = builds(target_for(GPU), Path(folder))
            if options.tuned_only:
                del targets[UNTUNED]
            built = [one for name in options.models for one in check_model(name, options, targets, driver)]
    except (SpecPrefillError, OSError) as error:
        print(f"preflight_true_shapes: error: {error}", file=sys.stderr)
        return 2
    for one in built:
        print(f"\n{'=' * 20} {one.report.role}, {one.build}")
        show(
            Report(known_gpu(GPU), driver.version, (one.report,), {}, {one.report.role: one.memory}),
            options.kernels,
        )
    console = Console() if sys.stdout.isatty() else Console(width=150)
    console.print(summary(built, max(options.blocks)))
    pair = {one.report.role: one.memory for one in built if one.build == TUNED}
    together = Report(known_gpu(GPU), driver.version, (), {}, pair)
    console.print(memory(together))
    if options.json:
        options.json.write_text(json.dumps({f"{b.report.role} {b.build}": b.report.to_json() for b in built}))
    return int(together.too_large or any(one.report.failed for one in built if one.build == TUNED))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="preflight_true_shapes", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=ROLES, default=list(ROLES), help="default: both")
    parser.add_argument("--blocks", nargs="+", type=int, default=[256], metavar="T", help="default: 256")
    for role, slots in (("draft", 32768), ("target", 32768)):
        parser.add_argument(
            f"--{role}",
            nargs="+",
            type=int,
            default=[slots],
            metavar="C",
            help=f"capacities (default: {slots})",
        )
    parser.add_argument("--numerics", default="f16", help="of the matrices (default: f16)")
    parser.add_argument(
        "--kernels", type=int, default=12, metavar="N", help="of each entry, 0: all (default 12)"
    )
    parser.add_argument("--tuned-only", action="store_true", help="compile only what ships")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write the modules and schedules there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    return parser.parse_args()


def builds(target: Target, folder: Path) -> dict[str, Target]:
    """The target as it is; and, with a library in `folder`, one that leaves projections to the compiler."""
    (name,) = target.tuning
    text, left_out = PROJECTION.subn("", (embedded("compile") / name).read_text(encoding="utf-8"))
    assert left_out, f"{name} matches no projections"
    library = folder / Path(name).name
    library.write_text(text, encoding="utf-8")
    flags = tuple(flag.replace(f"={name}@", f"={library}@") for flag in target.flags)
    return {UNTUNED: replace(target, flags=flags), TUNED: target}


def check_model(
    name: str, options: argparse.Namespace, targets: dict[str, Target], driver: Driver
) -> Iterator[Built]:
    """A model in each build."""
    role, config = ROLES[name], presets()[name]
    capacities = tuple(sorted(getattr(options, role)))
    shapes = Shapes(tuple(sorted(options.blocks)), capacities, ROWS[role], options.numerics, None)
    say(f"tracing the {role} ({name})")
    text = export_module(role, config, shapes)
    state = sum(t.bytes_at(capacities[-1]) for t in state_tensors(config, options.numerics))
    for build, target in targets.items():
        say(f"compiling the {role} ({name}) {build}")
        began = time.perf_counter()
        audited = compile_audited(text, target, f"{role} for {GPU}")
        seconds = time.perf_counter() - began
        assert audited.schedule is not None, "a Vulkan target"
        if options.keep:
            folder = options.keep / build.replace(" ", "-")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{role}.vmfb").write_bytes(audited.module)
            audited.schedule.write(folder / schedule_name(role))
        module = Module(role, audited.module, audited.schedule, config.num_hidden_layers, options.numerics)
        say(f"compiling {audited.shaders} kernels with {driver.version}")
        report = check_module(module, known_gpu(GPU), driver)
        needed = Memory(sum(shapes.parameter_bytes(config)), state, audited.schedule.most_buffers)
        yield Built(build, report, needed, audited.repaired, audited.products, seconds)


def summary(built: list[Built], block: int) -> Table:
    """A column per model and build, as Markdown."""
    shown = Table(box=box.MARKDOWN)
    shown.add_column(f"{GPU}, whole models, largest cache")
    for one in built:
        shown.add_column(f"{one.report.role} {one.build}", justify="right")
    columns = [facts(one, block) for one in built]
    for label in columns[0]:
        shown.add_row(label, *(column[label] for column in columns))
    return shown


def facts(one: Built, block: int) -> dict[str, str]:
    """What the summary says of one model in one build."""
    kernels = {use.kernel.name: use for use in one.report.uses()}
    numbers = [use.kernel.statistics for use in kernels.values()]
    prefill, decode = last(one.report, f"prefill_T{block}_C"), last(one.report, "decode_C")
    large = [use for use in kernels.values() if is_large(use)]
    return {
        "kernels": str(len(kernels)),
        f"dispatches per layer, block of {block}": f"{prefill.dispatches / prefill.layers:.1f}",
        "dispatches per layer, decode": f"{decode.dispatches / decode.layers:.1f}",
        "spilled VGPRs": str(sum(n.spilled_vgprs for n in numbers)),
        "spilled SGPRs": str(sum(n.spilled_sgprs for n in numbers)),
        "scratch memory, bytes": str(sum(n.scratch for n in numbers)),
        "products that the audit repaired": f"{one.repaired} of {one.products}",
        "kernels with wrong products": str(sum(bool(use.kernel.wrong_products) for use in kernels.values())),
        "large products on the matrix unit": f"{sum(use.kernel.wmma > 0 for use in large)} of {len(large)}",
        f"projections of a block of {block}, predicted ms": f"{prefill.projections_us / 1000:.1f}",
        f"block of {block}, predicted ms": f"{prefill.us / 1000:.1f}",
        "decode, predicted ms": f"{decode.us / 1000:.1f}",
        "weights, GiB": f"{one.memory.weights / 2**30:.2f}",
        "caches and states, GiB": f"{one.memory.state / 2**30:.2f}",
        "buffers of one call, GiB": f"{one.memory.call / 2**30:.2f}",
        "checks that fail": str(sum(finding.level == FAIL for finding in one.report.findings)),
        "compiled in, s": f"{one.seconds:.0f}",
    }


def is_large(use: Use) -> bool:
    """Whether a kernel is a product that belongs onto the matrix unit."""
    product = use.kernel.product
    return product is not None and min(product.m, product.n, product.k) >= 64


def last(report: ModuleReport, kind: str) -> Entry:
    """The entry of a kind with the largest cache."""
    return [entry for entry in report.entries if entry.name.startswith(kind)][-1]


if __name__ == "__main__":
    sys.exit(main())
