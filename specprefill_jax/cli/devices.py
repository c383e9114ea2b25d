"""`specprefill devices`: the device names, and what this machine has for them."""

import argparse
import json
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from specprefill_jax.artifact.targets import known_targets
from specprefill_jax.runtime.device import FoundDevice, list_devices


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command line of this verb."""
    parser = verbs.add_parser(
        "devices",
        help="list the devices of this machine",
        description="List the device names and what this machine has for them.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.set_defaults(verb=run)


def run(arguments: argparse.Namespace) -> int:
    """Print a row for each known name."""
    found = list_devices()
    if arguments.json:
        print(json.dumps({"devices": _rows(found), "faults": _faults(found)}, ensure_ascii=False))
        return 0
    table = Table("device", "driver", "for", "found here")
    for row in _rows(found):
        table.add_row(row["name"], row["driver"], row["about"], row["found"] or "-")
    Console(file=sys.stdout).print(table)
    for fault in _faults(found):
        print(fault)
    return 0


def _rows(found: Sequence[FoundDevice]) -> list[dict[str, str]]:
    """Each known name with the first device here that it means, the one it would open; "" where none."""
    return [
        {
            "name": name,
            "driver": known.driver,
            "about": known.about,
            "found": next((device.description for device in found if name in device.names), ""),
        }
        for name, known in known_targets().items()
    ]


def _faults(found: Sequence[FoundDevice]) -> list[str]:
    return [device.fault for device in found if device.fault]
