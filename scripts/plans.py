"""Which prompts a script about quality asks: its options, and the plan that they make."""

import argparse

from specprefill_jax.cli.options import read_names
from specprefill_jax.errors import SettingError
from specprefill_jax.quality.evaluation import Plan
from specprefill_jax.quality.facts import VALUE_KINDS
from specprefill_jax.quality.tasks import SUITES
from specprefill_jax.quality.words import FILLERS


def add_plan_options(parser: argparse.ArgumentParser, *, lengths: str, count: int) -> None:
    """The options that `read_plan` reads, with these defaults."""
    parser.add_argument("--suites", default="facts", metavar="A,B")
    parser.add_argument("--fillers", default=",".join(FILLERS), metavar="A,B")
    parser.add_argument("--values", default=",".join(VALUE_KINDS), metavar="A,B")
    parser.add_argument("--lengths", default=lengths, metavar="N,N")
    parser.add_argument(
        "--count", type=int, default=count, metavar="N", help=f"prompts of each kind ({count})"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")


def read_plan(options: argparse.Namespace) -> Plan:
    """The plan; nothing is said about ways, which are the script's own.

    Raises:
        SettingError: a value is bad, or there are no such prompts.
    """
    if options.count < 1:
        raise SettingError(f"--count={options.count}: count must be a whole number, 1 or more")
    plan = Plan(
        suites=read_names("suites", options.suites, SUITES, ()),
        fillers=read_names("fillers", options.fillers, FILLERS, ()),
        lengths=_lengths(options.lengths),
        ways=(),
        count=options.count,
        seed=options.seed,
        values=read_names("values", options.values, VALUE_KINDS, ()),
    )
    if not plan.cells:
        raise SettingError(
            f"--fillers={options.fillers}: {', '.join(plan.suites)} has no prompts with that filler"
        )
    return plan


def _lengths(given: str) -> tuple[int, ...]:
    try:
        lengths = tuple(dict.fromkeys(int(length) for length in given.split(",")))
    except ValueError:
        lengths = (0,)
    if min(lengths) < 1:
        raise SettingError(
            f"--lengths={given}: lengths must be numbers of tokens, 1 or more, with commas between them"
        )
    return lengths
