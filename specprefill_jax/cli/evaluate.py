"""`specprefill eval`: right answers, densely and sparsely."""

import argparse
import json
import os
import sys
from pathlib import Path

from rich.console import Console

from specprefill_jax.cli import options
from specprefill_jax.cli.load import load_engine
from specprefill_jax.cli.progress import Waiting
from specprefill_jax.engine import Engine
from specprefill_jax.errors import FileMissing, SettingError
from specprefill_jax.quality.confusable import check_present
from specprefill_jax.quality.evaluation import (
    Cell,
    Outcome,
    Plan,
    check_lengths,
    evaluate,
    longest_prompt,
    make_ways,
)
from specprefill_jax.quality.facts import VALUE_KINDS, ValueKind
from specprefill_jax.quality.record import to_json
from specprefill_jax.quality.summary import summarize
from specprefill_jax.quality.tasks import OWN_SUITES, SUITES
from specprefill_jax.quality.words import FILLERS, Filler
from specprefill_jax.report.evaluation import cell_table
from specprefill_jax.report.plot import check_plot, write_plot
from specprefill_jax.settings import Settings, knobs

LONGEST = "longest"
LENGTHS = ("1000", "2000", "4000")
KEEP = "0.5,0.3,0.15,0.1"

# What is kept is said by --keep and --mass, and bounded by nothing else.
SELECTING = tuple(
    name for name in options.SELECTING if name not in ("select_mode", "cumulative_mass", "keep", "max_keep")
)


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command line of this verb."""
    parser = verbs.add_parser(
        "eval",
        help="ask questions with known answers, densely and sparsely",
        description="Ask an artifact questions whose answers are known, densely and with less of the prompt "
        "kept, and print how many answers are right, with intervals. After Ctrl-C, what was answered by then "
        "is shown and written.",
        allow_abbrev=False,
    )
    parser.add_argument("--artifact", metavar="NAME", help="a compiled artifact (default: the demo pair)")
    parser.add_argument("--device", metavar="NAME", help="default: the artifact's; cpu for the demo pair")
    parser.add_argument("--settings", type=Path, metavar="FILE", help="settings from a TOML file")
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument(
        "--suites", metavar="A,B", help=f"of {', '.join(SUITES)} (default: all but the last)"
    )
    prompts.add_argument(
        "--lengths",
        metavar="N,N",
        help="tokens of a prompt; longest: as the artifact's caches allow (default: those of "
        f"{', '.join(LENGTHS)} that they allow)",
    )
    prompts.add_argument("--fillers", metavar="A,B", help=f"default: {','.join(FILLERS)}")
    prompts.add_argument("--values", metavar="A,B", help=f"what facts say (default: {','.join(VALUE_KINDS)})")
    prompts.add_argument(
        "--count", type=int, default=40, metavar="N", help="prompts of each kind (default: 40)"
    )
    prompts.add_argument("--seed", type=int, default=0, dest="prompt_seed", metavar="N", help="default: 0")
    ways = parser.add_argument_group("how they are read, beside densely")
    ways.add_argument(
        "--keep",
        dest="keep_rates",
        metavar="X,X",
        help=f"fractions of tokens to keep (default: {KEEP}, unless --mass is given)",
    )
    ways.add_argument("--mass", dest="mass_shares", metavar="X,X", help="shares of attention to keep")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", type=Path, metavar="FILE", help="write all outcomes and their summary to FILE"
    )
    output.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw accuracy over tokens kept (png, svg, pdf)"
    )
    options.add_knobs(parser, "how the draft scores tokens", (*options.SCORING, "calibration"))
    options.add_knobs(parser, "what its attention heads say together", options.SCORER)
    options.add_knobs(parser, "what is kept", SELECTING)
    parser.set_defaults(verb=run)


def run(arguments: argparse.Namespace) -> int:
    """Print a table for each cell when it is done; 1 if a budget was exceeded, else 0."""
    settings = options.read_settings(arguments)
    suites = options.read_names("suites", arguments.suites, SUITES, OWN_SUITES)
    fillers: tuple[Filler, ...] = options.read_names("fillers", arguments.fillers, FILLERS, FILLERS)
    values: tuple[ValueKind, ...] = options.read_names("values", arguments.values, VALUE_KINDS, VALUE_KINDS)
    keep_rates = arguments.keep_rates
    if keep_rates is None and arguments.mass_shares is None:
        keep_rates = KEEP
    ways = make_ways(
        settings,
        _numbers("keep", "keep", keep_rates),
        _numbers("mass", "cumulative_mass", arguments.mass_shares),
    )
    if arguments.count < 1:
        raise SettingError(f"--count={arguments.count}: count must be a whole number, 1 or more")
    if "confusable" in suites:
        check_present()
    if arguments.plot is not None:
        check_plot(arguments.plot)
    for flag in ("json", "plot"):
        _check_writable(flag, vars(arguments)[flag])
    with Waiting() as waiting:
        engine = load_engine(arguments.artifact, arguments.device, waiting)
    lengths = _lengths(arguments.lengths, engine, settings)
    plan = Plan(suites, fillers, lengths, ways, arguments.count, arguments.prompt_seed, values)
    if not plan.cells:
        raise SettingError(
            f"--fillers={arguments.fillers}: {', '.join(suites)} has no prompts with that filler"
        )
    outcomes: list[Outcome] = []
    try:
        for cell in plan.cells:
            _answer(engine, plan, cell, outcomes)
    finally:
        if outcomes:
            _write(arguments, engine, plan, outcomes)
    return 1 if any(row.over_budget for row in summarize(outcomes)) else 0


def _answer(engine: Engine, plan: Plan, cell: Cell, outcomes: list[Outcome]) -> None:
    """Add a cell's outcomes, and print those there are, however it ends."""
    before = len(outcomes)
    try:
        with Waiting() as waiting:
            waiting.say(str(cell))
            for number, found in enumerate(evaluate(engine, plan, cell), start=1):
                outcomes += found
                waiting(str(cell), number, plan.count)
    finally:
        if rows := summarize(outcomes[before:]):
            Console(file=sys.stdout).print(cell_table(rows), highlight=False)


def _write(arguments: argparse.Namespace, engine: Engine, plan: Plan, outcomes: list[Outcome]) -> None:
    if arguments.json is not None:
        text = json.dumps(to_json(engine, plan, outcomes), ensure_ascii=False, indent=1)
        try:
            arguments.json.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise FileMissing(f"--json: {arguments.json} cannot be written: {error.strerror}") from error
    if arguments.plot is not None:
        write_plot(summarize(outcomes), arguments.plot)


def _numbers(flag: str, knob: str, given: str | None) -> list[float]:
    """Numbers separated by commas, each within the limits of a setting, each once."""
    if given is None:
        return []
    kind = knobs()[knob].kind
    try:
        return list(dict.fromkeys(kind.read(part.strip()) for part in given.split(",")))
    except ValueError:
        raise SettingError(f"--{flag}={given}: each is {kind.limits}, with commas between them") from None


def _lengths(given: str | None, engine: Engine, settings: Settings) -> tuple[int, ...]:
    """Lengths separated by commas, ascending, each once."""
    longest = longest_prompt(engine, settings, in_one_pass=True)
    if given is None:
        return tuple(int(length) for length in LENGTHS if int(length) <= longest) or (longest,)
    try:
        lengths = {longest if part.strip() == LONGEST else int(part) for part in given.split(",")}
    except ValueError:
        raise SettingError(
            f"--lengths={given}: lengths must be numbers of tokens or {LONGEST}, with commas between them"
        ) from None
    check_lengths(sorted(lengths), longest_prompt(engine, settings, in_one_pass=False))
    return tuple(sorted(lengths))


def _check_writable(flag: str, path: Path | None) -> None:
    """Find out whether a file could be written, before hours are spent on what it is to hold."""
    if path is None:
        return
    folder = path.parent
    writable = os.access(path if path.exists() else folder, os.W_OK)
    if path.is_dir() or not folder.is_dir() or not writable:
        raise FileMissing(f"--{flag}: {path} cannot be written; name a file in a folder that is there")
