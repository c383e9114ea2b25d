"""`specprefill score`: shows what would be kept of a prompt."""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from specprefill_jax.cli import options
from specprefill_jax.cli.load import load_engine
from specprefill_jax.cli.progress import Waiting
from specprefill_jax.engine import Scored
from specprefill_jax.errors import FileMissing
from specprefill_jax.report.html import heat_map
from specprefill_jax.report.terminal import kept_text, phases_table, selection_line


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command line of this verb."""
    parser = verbs.add_parser(
        "score",
        help="show what would be kept of a prompt",
        description="Show what would be kept of a prompt: in color, as a page, or as JSON.",
        usage=options.USAGE.format("score"),
        allow_abbrev=False,
    )
    options.add_prompt(parser)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print positions and scores as JSON")
    output.add_argument("--html", type=Path, metavar="FILE", help="write a heat map to FILE")
    parser.add_argument("-v", "--verbose", action="store_true", help="phases on standard error")
    options.add_knobs(parser, "how the draft scores tokens", (*options.SCORING, "calibration"))
    options.add_knobs(parser, "what its attention heads say together", options.SCORER)
    options.add_knobs(parser, "what is kept", options.SELECTING)
    parser.set_defaults(verb=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the prompt with what is kept set off, or JSON, or write a page."""
    settings = options.read_settings(arguments)
    prompt = options.read_prompt(arguments)
    with Waiting() as waiting:
        engine = load_engine(
            arguments.artifact, arguments.device, waiting, self_test=not arguments.skip_self_test
        )
        scored = engine.score(prompt, settings, watch=waiting, **options.prompt_options(arguments))
    note = Console(file=sys.stderr)
    if arguments.json:
        print(json.dumps(scored.to_json(), ensure_ascii=False))
    elif arguments.html is not None:
        _write_page(arguments.html, scored)
        note.print(f"{selection_line(scored.selection)}; {arguments.html}", markup=False, highlight=False)
    else:
        screen = Console(file=sys.stdout, soft_wrap=True)
        screen.print(kept_text(scored, color=screen.color_system is not None))
        note.print(selection_line(scored.selection), markup=False, highlight=False)
    if arguments.verbose:
        note.print(phases_table(scored.phases))
    return 0


def _write_page(path: Path, scored: Scored) -> None:
    try:
        path.write_text(heat_map(scored), encoding="utf-8")
    except OSError as error:
        raise FileMissing(f"--html: {path} cannot be written: {error.strerror}") from error
