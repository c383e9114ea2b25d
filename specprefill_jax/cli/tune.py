"""`specprefill tune`: measures an artifact's entries on its device, so that break-even rests on its speed."""

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from specprefill_jax.artifact.beside import RATES_NAME, check_writable, manifest_digest
from specprefill_jax.artifact.rates import EntryTimes, Rates, write_rates
from specprefill_jax.cli.load import load_engine
from specprefill_jax.cli.progress import Waiting
from specprefill_jax.engine.forecast import Forecast, forecasts
from specprefill_jax.errors import ArtifactError, SettingError
from specprefill_jax.runtime.tune import REPEATS, measure, measured_device
from specprefill_jax.settings import Settings


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command line of this verb."""
    parser = verbs.add_parser(
        "tune",
        help="measure an artifact on its device",
        description="Measure how long each entry of an artifact's models takes on its device, note that in "
        "its rates.json, and show from which prompt length on the draft pays. Settings are those of SP_* "
        "variables.",
        allow_abbrev=False,
    )
    parser.add_argument("artifact", metavar="ARTIFACT", help="a compiled artifact: its directory or its name")
    parser.add_argument("--device", metavar="NAME", help="the device it must be for (default: its own)")
    parser.add_argument(
        "--repeats",
        type=int,
        default=REPEATS,
        metavar="N",
        help=f"calls of each entry; the median counts (default: {REPEATS})",
    )
    parser.add_argument("--json", action="store_true", help="print what was measured and follows as JSON")
    parser.set_defaults(verb=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, write the file, print what was measured and where break-even lies."""
    if arguments.repeats < 1:
        raise SettingError(f"--repeats={arguments.repeats}: repeats must be a whole number, 1 or more")
    settings = Settings.resolve(environ=os.environ)
    with Waiting() as waiting:
        engine = load_engine(arguments.artifact, arguments.device, waiting)
        if engine.draft is None:
            raise ArtifactError(f"no draft can pay where there is none: {engine.no_draft}")
        check_writable(engine.artifact.directory / RATES_NAME)
        times = {
            role: measure(
                program,
                repeats=arguments.repeats,
                progress=lambda done, total: waiting("measure", done, total),
            )
            for role, program in engine.programs.items()
        }
    artifact = engine.artifact
    rates = Rates(measured_device(engine.target.device), manifest_digest(artifact.manifest), times)
    path = write_rates(artifact.directory, rates)
    found = forecasts(engine.draft, engine.target, times, settings)
    if arguments.json:
        print(json.dumps(_document(path, rates, found), ensure_ascii=False))
        return 0
    screen = Console(file=sys.stdout)
    screen.print(f"{rates.device.description}: {path}", markup=False, highlight=False, soft_wrap=True)
    screen.print(_times_table(times))
    screen.print(_forecast_table(found))
    screen.print(_verdict(found, settings), markup=False, highlight=False, soft_wrap=True)
    return 0


def _document(path: Path, rates: Rates, found: Sequence[Forecast]) -> dict[str, object]:
    forecast = [dataclasses.asdict(row) for row in found]
    return {"file": str(path), **dataclasses.asdict(rates), "break_even": forecast}


def _times_table(times: Mapping[str, EntryTimes]) -> Table:
    table = Table("model", "entry")
    for heading in ("ms", "tokens/s"):
        table.add_column(heading, justify="right")
    for role, entries in times.items():
        for entry, milliseconds in entries.items():
            tokens = _tokens(entry)
            speed = f"{tokens * 1000 / milliseconds:,.0f}" if tokens else ""
            table.add_row(role, entry, f"{milliseconds:.3f}", speed)
    return table


def _tokens(entry: str) -> int:
    """How many tokens one call reads; `head` reads none."""
    block = re.search(r"_T(\d+)_", entry)
    return int(block[1]) if block else int(entry.startswith("decode"))


def _forecast_table(found: Sequence[Forecast]) -> Table:
    table = Table()
    for heading in ("prompt", "kept", "scoring ms", "dense ms", "sparse ms"):
        table.add_column(heading, justify="right")
    table.add_column("the draft pays")
    for row in found:
        times = (f"{value:,.0f}" for value in (row.scoring_ms, row.dense_ms, row.sparse_ms))
        table.add_row(f"{row.tokens:,}", f"{row.kept:,}", *times, "yes" if row.pays else "no")
    return table


def _verdict(found: Sequence[Forecast], settings: Settings) -> str:
    """From which of the lengths on the draft pays at every one."""
    paying: list[Forecast] = []
    for row in reversed(found):
        if not row.pays:
            break
        paying.append(row)
    margin = f"savings must be more than {settings.break_even_safety:g} times the cost"
    if not paying:
        return f"If this much is kept, the draft does not pay even for the longest prompt: {margin}."
    return f"If this much is kept, the draft pays from {paying[-1].tokens:,} tokens on: {margin}."
