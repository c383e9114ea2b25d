"""`specprefill plan`: what memory a prompt would take, before anything is loaded."""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from specprefill_jax.artifact.calibration import read_calibration
from specprefill_jax.artifact.locate import find_artifact
from specprefill_jax.artifact.manifest import Manifest
from specprefill_jax.cli import options
from specprefill_jax.policy import plan_memory, unfit, usable
from specprefill_jax.report.memory import memory_table

ALLOWED = ("mode", "minimum_tokens", "calibration", "memory", "max_tokens")
READING = ("lookahead", "spec_ctx", "window")
KEEPING = ("select_mode", "keep", "max_keep")


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command line of this verb."""
    parser = verbs.add_parser(
        "plan",
        help="say what memory a prompt takes, and how it would be read in what there is",
        description="Say what device memory a prompt takes with an artifact, and how it would be read: in "
        "one pass, by windows or densely. Reads the manifest and the calibration, and loads nothing. The "
        "status is 1 if nothing fits.",
        allow_abbrev=False,
    )
    parser.add_argument("artifact", metavar="ARTIFACT", help="a compiled artifact: its directory or its name")
    parser.add_argument("--prompt", type=int, required=True, metavar="N", help="tokens of the prompt")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON; sizes in bytes")
    parser.add_argument("--settings", type=Path, metavar="FILE", help="settings from a TOML file")
    options.add_knobs(parser, "settings that count", (*ALLOWED, *READING, *KEEPING))
    parser.set_defaults(verb=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; 0 if there is a way that fits, else 1."""
    settings = options.read_settings(arguments)
    directory = find_artifact(arguments.artifact)
    manifest = Manifest.read(directory)
    calibration = usable(read_calibration(directory, manifest), manifest.models.get("draft"))
    if calibration is not None and settings.calibration:
        settings = settings.with_defaults(calibration.settings)
    plan = plan_memory(manifest, arguments.prompt, settings, unfit=unfit(calibration))
    if arguments.json:
        print(json.dumps(plan.to_json(settings.memory), ensure_ascii=False))
    else:
        Console(file=sys.stdout).print(memory_table(plan, settings.memory), highlight=False)
    return 1 if plan.fitting(settings.memory) is None else 0
