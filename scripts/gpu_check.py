"""What this project compiles, checked on a real GPU: kernels, artifacts, true shapes, speed."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gpu.child import Work, run_limited
from gpu.demo import build_demo, run_demo
from gpu.facts import run_facts
from gpu.kernels import build_kernels, run_kernels
from gpu.plan import LIMITS, STEPS, Plan, built_for, limit_of, select
from gpu.record import COLORS, Check, OtherRun, Record, markdown, table, totals
from gpu.shapes import build_shapes, run_shapes, run_weights
from gpu.speed import run_speed
from rich.console import Console
from rich.markup import escape
from true_shapes import say

from specprefill_jax.artifact.locate import cache_folder
from specprefill_jax.artifact.targets import known_target
from specprefill_jax.errors import SpecPrefillError

BUILD_LIMIT_S = 4 * 3600
TITLE = "What was checked on a GPU"


def main() -> int:
    """0 if no check failed, 1 if one did, 2 if it could not start."""
    options = parse()
    try:
        plan, steps = read_plan(options), select(options.steps)
        work: Path = options.work or cache_folder() / "gpu-check"
        folder: Path = options.run or options.build or work / "bundle"
        record = Record(options.json, dataclasses.asdict(plan), resume=options.resume)
        if options.run is None and not build_all(plan, steps, folder, work, options):
            return 2
    except (SpecPrefillError, OtherRun, OSError, ValueError) as error:
        print(f"gpu_check: error: {error}", file=sys.stderr)
        return 2
    if options.build is not None:
        print(folder)
        return 0
    run_all(plan, steps, folder, work, record, options)
    title = f"{TITLE}: {plan.target}"
    console = Console() if sys.stdout.isatty() else Console(width=150)
    console.print(table(record, title))
    console.print(totals(record))
    if options.markdown is not None:
        options.markdown.write_text(markdown(record, title, facts_of(record)), encoding="utf-8")
    return record.status


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__, allow_abbrev=False)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--build", type=Path, metavar="DIR", help="only build, into DIR; needs no GPU")
    where.add_argument("--run", type=Path, metavar="DIR", help="only check, with what was built into DIR")
    parser.add_argument("--steps", nargs="+", metavar="STEP", help=f"some of: {', '.join(STEPS)}")
    parser.add_argument("--work", type=Path, metavar="DIR", help="for weights, 40 GB (default: in the cache)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write each check there as it comes")
    parser.add_argument("--resume", action="store_true", help="leave out steps that FILE of --json holds")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the summary there")
    parser.add_argument("--budget", type=float, metavar="S", help="seconds for all checks together")
    parser.add_argument("--scale", type=float, default=1.0, help="of the steps' time limits (default 1)")
    parser.add_argument("--rounds", type=int, default=3, help="of measuring speed (default 3)")
    parser.add_argument("--jobs", type=int, default=default_jobs(), help="for making weights")
    built = parser.add_argument_group("what is built (not with --run, which takes it from DIR)")
    built.add_argument("--target", metavar="NAME", help="device that artifacts are for (default nvidia)")
    built.add_argument("--kernels", metavar="NAME", help="device of the single kernels (default radeon-780m)")
    built.add_argument("--tokens", nargs="+", type=int, metavar="M", help="prompts (default 4096 10000)")
    built.add_argument("--keeps", nargs="+", type=float, metavar="X", help="shares kept (default 0.3 0.15)")
    built.add_argument("--layers", type=int, metavar="N", help="of the whole models (default 0: all)")
    built.add_argument("--questions", type=int, metavar="N", help="of the demo pair (default 40)")
    built.add_argument("--seed", type=int, metavar="N", help="of random weights (default 0)")
    built.add_argument("--tiny", action="store_true", default=None, help="tiny models, to try the steps")
    options = parser.parse_args()
    if options.resume and options.json is None:
        parser.error("--resume goes on from the file of --json; name it")
    if options.run is not None and asked_of_plan(options):
        parser.error(f"--run checks what was built: {', '.join(asked_of_plan(options))} is of --build")
    return options


def default_jobs() -> int:
    """A model's weights take about 4 GB of memory while they are written; there are four."""
    return max(1, min(4, (os.cpu_count() or 1) // 2))


def asked_of_plan(options: argparse.Namespace) -> dict[str, Any]:
    """Options that a plan is made of, those that were given."""
    fields = (field.name for field in dataclasses.fields(Plan))
    given = {name: getattr(options, name) for name in fields if getattr(options, name) is not None}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def read_plan(options: argparse.Namespace) -> Plan:
    """That of what was built, or a new one.

    Raises:
        SpecPrefillError, OSError, ValueError: there is none, or it names what is not known.
    """
    plan = Plan.read(options.run) if options.run is not None else Plan(**asked_of_plan(options))
    for name in (plan.target, plan.kernels):
        if known_target(name).driver != "vulkan":
            raise ValueError(f"{name} is no device of Vulkan's, and this checks Vulkan")
    return plan


def build_all(
    plan: Plan, steps: tuple[str, ...], folder: Path, work: Path, options: argparse.Namespace
) -> bool:
    """Everything that the steps need, in processes of their own; whether all of it was built."""
    folder.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    plan.write(folder)
    for name in built_for(steps):
        begin = time.monotonic()
        limit_s = BUILD_LIMIT_S * options.scale
        fault = run_limited(build_one, (name, plan, folder / name, work), limit_s, print)
        if fault:
            print(f"gpu_check: error: building {name}: {fault}", file=sys.stderr)
            return False
        say(f"built {name} in {time.monotonic() - begin:.0f} s")
    return True


def build_one(name: str, plan: Plan, folder: Path, work: Path) -> Iterator[Check]:
    """What a step needs; it finds nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    if name == "kernels":
        build_kernels(plan, folder)
    elif name == "demo":
        build_demo(plan, folder, work)
    else:
        build_shapes(plan, folder, work)
    return iter(())


def works(
    plan: Plan, folder: Path, work: Path, options: argparse.Namespace
) -> Mapping[str, tuple[Work, tuple[Any, ...]]]:
    """What each step runs."""
    shapes = folder / "shapes"
    return {
        "facts": (run_facts, (plan,)),
        "kernels": (run_kernels, (plan, folder / "kernels")),
        "demo": (run_demo, (plan, folder / "demo", work)),
        "weights": (run_weights, (plan, shapes, work, options.jobs)),
        "shapes": (run_shapes, (plan, shapes, work)),
        "speed": (run_speed, (plan, work, options.rounds)),
    }


def run_all(
    plan: Plan,
    steps: tuple[str, ...],
    folder: Path,
    work: Path,
    record: Record,
    options: argparse.Namespace,
) -> None:
    """One step after the other; each prints what it finds."""
    began = time.monotonic()
    todo = works(plan, folder, work, options)
    for name in steps:
        # What it is about is looked up each time.
        if name != "facts" and name in record.steps and record.steps[name].good:
            say(f"{name}: done before")
            continue
        limit = limit_of(name, options.scale, options.budget, time.monotonic() - began)
        run_step(name, *todo[name], limit, record, print_check)


def run_step(
    name: str,
    work: Work,
    args: tuple[Any, ...],
    limit_s: float,
    record: Record,
    show: Callable[[str, Check], None],
) -> None:
    """A step within its time; what ends it otherwise is a failed check of its own."""

    def keep(check: Check) -> None:
        record.add(name, check)
        show(name, check)

    record.begin(name)
    begin = time.monotonic()
    say(f"{name}: at most {max(limit_s, 0):.0f} s of {LIMITS[name]}")
    fault = "the budget was spent before" if limit_s <= 0 else run_limited(work, args, limit_s, keep)
    if fault:
        keep(Check(f"{name} to its end", "failed", fault))
    record.end(name, time.monotonic() - begin)


def print_check(step: str, check: Check) -> None:
    """One line."""
    color = COLORS[check.result]
    words = f"{step}: {escape(check.name)}: [{color}]{check.result}[/]: {escape(check.detail)}"
    Console(soft_wrap=True, highlight=False).print(words)


def facts_of(record: Record) -> Mapping[str, str]:
    """Date, device and driver for the page."""
    facts = {"date": datetime.date.today().isoformat()}
    for step, check in record.rows():
        if step == "facts" and "device" in check.found:
            facts |= {"device": check.found["device"], "driver": check.found.get("driver", "not known")}
    return facts


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    if multiprocessing.active_children():
        os._exit(status)  # a process that hangs in a driver cannot be waited for
    sys.exit(status)
