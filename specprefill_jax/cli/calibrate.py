"""`specprefill calibrate`: finds out how an artifact's draft is best asked, and how much must be kept."""

import argparse
import dataclasses
import json
import sys

from rich.console import Console

from specprefill_jax.artifact.beside import CALIBRATION_NAME, check_writable
from specprefill_jax.artifact.calibration import write_calibration
from specprefill_jax.cli.load import load_engine
from specprefill_jax.cli.options import read_names
from specprefill_jax.cli.progress import Waiting
from specprefill_jax.errors import SettingError
from specprefill_jax.quality.calibration import calibrate, calibration_plan, check_wanted
from specprefill_jax.quality.facts import VALUE_KINDS, ValueKind
from specprefill_jax.report.calibration import calibration_report

RETENTION = 0.95
COUNT = 20


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command line of this verb."""
    parser = verbs.add_parser(
        "calibrate",
        help="find out how the draft is best asked",
        description="Have the draft read prompts whose facts are known; find the heads and the way of "
        "reading their attention that keep most facts whole, and the least to keep for a wanted share of "
        "them. Half of the prompts choose, the others say how good the choice is. That is noted in the "
        "artifact's calibration.json, and from then on stands in for settings that are not given.",
        allow_abbrev=False,
    )
    parser.add_argument("artifact", metavar="ARTIFACT", help="a compiled artifact: its directory or its name")
    parser.add_argument("--device", metavar="NAME", help="the device it must be for (default: its own)")
    parser.add_argument(
        "--retention",
        type=float,
        default=RETENTION,
        metavar="X",
        help=f"share of prompts whose facts are to be kept whole (default: {RETENTION})",
    )
    parser.add_argument("--values", metavar="A,B", help=f"what facts say (default: {','.join(VALUE_KINDS)})")
    parser.add_argument(
        "--count", type=int, default=COUNT, metavar="N", help=f"prompts of each kind (default: {COUNT})"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    parser.set_defaults(verb=run)


def run(arguments: argparse.Namespace) -> int:
    """Calibrate, write the file, print what was found. That the draft falls short is no error."""
    check_wanted(arguments.retention)
    if arguments.count < 2:
        raise SettingError(f"--count={arguments.count}: count must be 2 or more, to choose and to check")
    values: tuple[ValueKind, ...] = read_names("values", arguments.values, VALUE_KINDS, VALUE_KINDS)
    with Waiting() as waiting:
        engine = load_engine(arguments.artifact, arguments.device, waiting)
        check_writable(engine.artifact.directory / CALIBRATION_NAME)
        plan = calibration_plan(engine, arguments.count, arguments.seed, values)
        found = calibrate(engine, plan, arguments.retention, waiting)
    path = write_calibration(engine.artifact.directory, found.calibration)
    if arguments.json:
        print(json.dumps({"file": str(path), **dataclasses.asdict(found)}, ensure_ascii=False))
        return 0
    screen = Console(file=sys.stdout)
    screen.print(calibration_report(found), highlight=False)
    screen.print(str(path), markup=False, highlight=False, soft_wrap=True)
    return 0
