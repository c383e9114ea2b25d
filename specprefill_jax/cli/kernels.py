"""The tables of `specprefill preflight`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

from rich import box
from rich.console import Console
from rich.table import Table

from specprefill_jax.artifact.schedule import LOADING
from specprefill_jax.preflight.model import waves_per_simd
from specprefill_jax.preflight.report import (
    FAIL,
    REALISTIC,
    Entry,
    Finding,
    ModuleReport,
    Prompt,
    Report,
    Use,
)

WIDTH = 168  # columns that the tables take when nobody watches
# Header of a column of numbers, and what it says of a kernel; nothing where there is nothing. A column of
# nothing is left out.
COLUMNS: tuple[tuple[str, Callable[[Use], object]], ...] = (
    ("count", lambda use: use.dispatch.count),
    ("us each", lambda use: f"{use.prediction.us:.1f}"),
    ("limit", lambda use: use.prediction.limit),
    ("groups", lambda use: use.workgroups),
    ("of", lambda use: "x".join(str(size) for size in use.kernel.local if size > 1) or "1"),
    ("wave", lambda use: use.kernel.subgroup),
    ("VGPR", lambda use: use.kernel.statistics.vgprs),
    ("spilled V", lambda use: use.kernel.statistics.spilled_vgprs),
    ("spilled S", lambda use: use.kernel.statistics.spilled_sgprs),
    ("scratch", lambda use: use.kernel.statistics.scratch),
    ("LDS", lambda use: use.kernel.statistics.lds),
    ("waves", lambda use: f"{waves_per_simd(use.kernel, use.gpu):.3g}"),
    ("instr.", lambda use: use.kernel.statistics.instructions),
    ("WMMA", lambda use: use.kernel.wmma),
    ("hot", lambda use: use.wmma_in_hot_loop),
    ("conv.", lambda use: use.converts_per_wmma and f"{use.converts_per_wmma:.1f}"),
    ("loops", lambda use: " ".join(str(loop.turns or "?") for loop in use.kernel.program.loops())),
    ("weights", lambda use: use.prediction.rereads and f"{use.prediction.rereads:g}x"),
)


def show(report: Report, most: int) -> None:
    """Print a report; of the slowest entry of each kind the `most` kernels that take longest (0: all)."""
    out = Console(file=sys.stdout) if sys.stdout.isatty() else Console(file=sys.stdout, width=WIDTH)
    for module in report.modules:
        for entry in slowest_of_each_kind(module):
            out.print(kernels(module, entry, most))
        out.print(entries(module))
        for note in module.notes:
            out.print(f"{module.role}: {note}", highlight=False)
        if module.findings:
            out.print(findings(module))
    out.print(memory(report))
    for role, prompt in report.prompts.items():
        out.print(prompt_words(role, prompt), highlight=False)
    low, high = REALISTIC
    verdict = "fails" if report.failed else "passes"
    out.print(
        f"{report.gpu.name} {verdict}. Kernels compiled by {report.driver} without the GPU; times are "
        f"predictions that rank kernels: realistic = predicted / {low}..{high}, launches not counted.",
        highlight=False,
    )


def slowest_of_each_kind(module: ModuleReport) -> list[Entry]:
    """Of `prefill_T64_C2048` and `prefill_T256_C16384` the second. What is dispatched at load has no kind."""
    slowest: dict[str, Entry] = {}
    for entry in module.entries:
        kind = re.sub(r"(_[TC]\d+)+$", "", entry.name)
        if entry.name != LOADING and entry.us >= (slowest[kind].us if kind in slowest else 0.0):
            slowest[kind] = entry
    return list(slowest.values())


def kernels(module: ModuleReport, entry: Entry, most: int) -> Table:
    """An entry's kernels, those first that take longest in one call of it."""
    uses = sorted(entry.uses, key=lambda use: -use.us)
    first, rest = (uses[:most], uses[most:]) if most else (uses, [])
    title = f"{module.role} {entry.name}: {entry.us / 1000:.2f} ms predicted"
    shown = table(title)
    shown.add_column("kernel", overflow="fold", min_width=20)
    columns = [(header, tell) for header, tell in COLUMNS if any(tell(use) for use in first)]
    for header, _ in columns:
        shown.add_column(header, justify="left" if header == "limit" else "right", no_wrap=True)
    for use in first:
        shown.add_row(use.kernel.operation, *(str(tell(use) or "") for _, tell in columns))
    if rest:
        count, us = sum(use.dispatch.count for use in rest), sum(use.us for use in rest)
        shown.caption = f"{len(rest)} other kernels in {count} dispatches: {us / 1000:.2f} ms"
    return shown


def table(title: str) -> Table:
    """An empty table of the kind used here."""
    return Table(
        title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )


def entries(module: ModuleReport) -> Table:
    """A line per entry."""
    shown = table(f"{module.role}, {module.numerics}: one call of each entry")
    shown.add_column("entry")
    for header in ("dispatches", "per layer", "predicted ms", "of which products with weights"):
        shown.add_column(header, justify="right")
    for entry in module.entries:
        per_layer = f"{entry.dispatches / entry.layers:.1f}" if entry.layers else ""
        times = (f"{entry.us / 1000:.2f}", f"{entry.projections_us / 1000:.2f}")
        shown.add_row(entry.name, str(entry.dispatches), per_layer, *times)
    return shown


def findings(module: ModuleReport) -> Table:
    """What the checks say, slow kernels first: a line per failure, and one for all warnings of a check."""
    shown = table(f"{module.role}: what the checks say")
    shown.add_column("")
    shown.add_column("check", no_wrap=True)
    shown.add_column("finding", overflow="fold")
    shown.add_column("where", overflow="fold")
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for found in module.findings:
        detail = (found.text,) if found.level == FAIL else ()
        groups.setdefault((found.level, found.check, *detail), []).append(found)
    for first, *others in groups.values():
        more = f" and {len(others)} more" if others else ""
        level = "FAIL" if first.level == FAIL else "warning"
        shown.add_row(level, first.check, first.text, first.where + more)
    return shown


def memory(report: Report) -> Table:
    """What the device must hold, and whether it can."""
    shown = table("device memory in GiB, with the largest caches")
    shown.add_column("model")
    for header in ("weights", "caches and states", "one call"):
        shown.add_column(header, justify="right")
    for role, needed in report.memory.items():
        sizes = (needed.weights, needed.state, needed.call)
        shown.add_row(role, *(f"{size / 2**30:.2f}" for size in sizes))
    verdict = "FAIL: more than" if report.too_large else "of"
    shown.caption = (
        f"together, one call at a time: {report.bytes / 2**30:.2f} {verdict} {report.gpu.memory / 2**30:g}"
    )
    return shown


def prompt_words(role: str, prompt: Prompt) -> str:
    """The time of a prompt."""
    if prompt.us is None:
        return f"{role}: no cache holds the blocks of a prompt of {prompt.tokens} tokens in one pass"
    calls = " + ".join(f"{count} x {name}" for name, count in prompt.calls.items() if count)
    low, high = (prompt.us / 1e6 / share for share in reversed(REALISTIC))
    seconds = f"{prompt.us / 1e6:.3g} s predicted, {low:.3g} to {high:.3g} s realistic"
    return f"{role}: {prompt.tokens} tokens = {calls}: {seconds}"
