"""`specprefill verify`: all checks of an artifact."""

import argparse
import dataclasses
import json
import math
import sys

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specprefill_jax.artifact.locate import find_artifact
from specprefill_jax.cli.progress import Waiting
from specprefill_jax.runtime.checks import Check, run_checks

_COLORS = {"passed": "green", "failed": "red", "not run": "yellow"}


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command line of this verb."""
    parser = verbs.add_parser(
        "verify",
        help="check an artifact and test it on its device",
        description="Check an artifact: its manifest, every file, the version of IREE, the device, and every "
        "entry of its models on that device. The status is 0 only if all of it passed.",
        allow_abbrev=False,
    )
    parser.add_argument("artifact", metavar="ARTIFACT", help="a compiled artifact: its directory or its name")
    parser.add_argument("--device", metavar="NAME", help="the device it must be for (default: its own)")
    parser.add_argument("--files-only", action="store_true", help="check manifest and files, run nothing")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    parser.set_defaults(verb=run)


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each check; 0 if all passed, else 1."""
    directory = find_artifact(arguments.artifact)
    with Waiting() as waiting:
        checks = list(
            run_checks(
                directory,
                arguments.device,
                files_only=arguments.files_only,
                progress=lambda done, total: waiting("check", done, total),
            )
        )
    passed = all(check.result == "passed" for check in checks)
    if arguments.json:
        print(json.dumps({"passed": passed, "checks": [_row(check) for check in checks]}, ensure_ascii=False))
    else:
        Console(file=sys.stdout).print(_table(checks))
    return 0 if passed else 1


def _row(check: Check) -> dict[str, object]:
    """A check for JSON, which has no number for a difference that is none: null."""
    row = dataclasses.asdict(check)
    if check.difference is not None and not math.isfinite(check.difference):
        row["difference"] = None
    return row


def _table(checks: list[Check]) -> Table:
    table = Table("check", "result", "detail", "difference", "allowed")
    for check in checks:
        numbers = ("" if value is None else f"{value:.1e}" for value in (check.difference, check.allowed))
        result = f"[{_COLORS[check.result]}]{check.result}[/]"
        table.add_row(escape(check.name), result, escape(check.detail), *numbers)
    return table
