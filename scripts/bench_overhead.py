"""What the engine takes in mode "auto" for prompts whose draft is declined, beside mode "dense"."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from rich.table import Table
from subjects import add_subject, examples, load, name_of, random_tokens, spread, whole_rounds
from true_shapes import console, say

from specprefill_jax.engine import Engine, Prompt, PromptOptions, Result, Watch
from specprefill_jax.errors import SpecPrefillError
from specprefill_jax.session import Session
from specprefill_jax.settings import Settings

MOST = 1.02  # of "auto" to "dense"
DENSE = Settings(mode="dense", max_tokens=1)
AUTO = Settings(max_tokens=1)
RANDOM = 500  # tokens of the true shapes' prompts: two blocks
SHORT = 2000  # characters of a message, about as many tokens of their tokenizer: it knows bytes alone

Ask = Callable[[Watch | None], Result]
"""Answers a case's prompt with one token."""


@dataclass(frozen=True)
class Case:
    """A prompt that is read whole in both ways; `status` is what "auto" is to say of it."""

    name: str
    dense: Ask
    auto: Ask
    status: str
    bar: bool = True


@dataclass(frozen=True)
class Measured:
    """Milliseconds of each round, those of them in which it was decided what to read, and blocks read."""

    case: Case
    tokens: int
    dense_ms: Sequence[float]
    auto_ms: Sequence[float]
    decide_ms: tuple[float, float] = (0.0, 0.0)
    blocks: tuple[int, int] = (0, 0)

    @property
    def ratios(self) -> list[float]:
        """Of each round."""
        return [auto / dense for auto, dense in zip(self.auto_ms, self.dense_ms, strict=True)]


class Unexpected(Exception):
    """A prompt whose draft was to be declined was not, or for another reason."""


def main() -> int:
    """0 if the bar is met, 1 if not, 2 if it cannot be tried."""
    parser = argparse.ArgumentParser(prog="bench_overhead", description=__doc__)
    add_subject(parser)
    parser.add_argument("--rounds", type=whole_rounds, help="of each prompt (default 200; true shapes: 3)")
    options = parser.parse_args()
    demo = options.true_shapes is None
    try:
        engine = whose_draft_never_pays(load(options))
        cases = demo_cases(engine) if demo else random_cases(engine)
        found = [measure(case, options.rounds or (200 if demo else 3)) for case in cases]
    except (SpecPrefillError, OSError, Unexpected) as error:
        print(f"bench_overhead: error: {error}", file=sys.stderr)
        return 2
    console().print(table(name_of(options), found))
    missed = bars_missed(found)
    for bar in missed:
        print(f"bench_overhead: missed: {bar}", file=sys.stderr)
    return 1 if missed else 0


def whose_draft_never_pays(engine: Engine) -> Engine:
    """The same models, with rates by which the draft takes hours: break-even has all its work to do."""
    times = {
        role: dict.fromkeys(program.entries, 1.0 if role == "target" else 1e9)
        for role, program in engine.programs.items()
    }
    return Engine(engine.artifact, engine.chat, engine.draft, engine.target, times)


def demo_cases(engine: Engine) -> list[Case]:
    """Documents with their questions: one that is long enough for the draft, and one that is not."""
    (longer, *_), (shorter, *_) = examples(at_least=1000), examples(less_than=500)
    whole: PromptOptions = {"raw": True}
    return cases(engine, longer["prompt"], shorter["prompt"], shorter["prompt"], whole, AUTO)


def random_cases(engine: Engine) -> list[Case]:
    """The same with tokens of no meaning; what is long enough is told by a setting."""
    tokens = random_tokens(engine, RANDOM, 0)
    return cases(engine, tokens, tokens, "x" * SHORT, {}, dataclasses.replace(AUTO, minimum_tokens=1))


def cases(
    engine: Engine,
    longer: Prompt,
    shorter: Prompt,
    message: str,
    options: PromptOptions,
    long_enough: Settings,
) -> list[Case]:
    """A prompt below break-even, one below the minimum, and a first turn below the minimum."""

    def dense(prompt: Prompt, options: PromptOptions) -> Ask:
        return lambda watch: engine.generate(prompt, DENSE, watch=watch, **options)

    def auto(prompt: Prompt, settings: Settings) -> Ask:
        return lambda watch: engine.generate(prompt, settings, watch=watch, **options)

    messages: Prompt = [{"role": "user", "content": message}]
    return [
        Case("one prompt", dense(longer, options), auto(longer, long_enough), "skipped_break_even"),
        Case("one prompt", dense(shorter, options), auto(shorter, AUTO), "skipped_min_tokens"),
        Case(
            "first turn",
            dense(messages, {}),
            lambda watch: Session(engine).generate(messages, AUTO, watch=watch),
            "skipped_min_tokens",
            bar=False,
        ),
    ]


def measure(case: Case, rounds: int) -> Measured:
    """Both ways in each round, in changing order, after runs that count blocks and warm up.

    Raises:
        Unexpected: the draft was not declined as it should be.
    """
    ways = {"dense": case.dense, "auto": case.auto}
    blocks = {name: count_blocks(ask) for name, ask in ways.items()}
    timings = case.auto(None).timings
    if timings.status != case.status:
        raise Unexpected(f"{case.name}: status {timings.status} in place of {case.status}: {timings.reason}")
    took: dict[str, list[float]] = {name: [] for name in ways}
    deciding: dict[str, list[float]] = {name: [] for name in ways}
    say(f"{case.name}, {case.status}: {rounds} rounds")
    for number in range(rounds):
        for name in sorted(ways, reverse=number % 2 == 1):
            began = time.perf_counter()
            result = ways[name](None)
            took[name].append((time.perf_counter() - began) * 1000)
            deciding[name].append(result.timings.phases["decide"])
    return Measured(
        case,
        timings.prompt,
        took["dense"],
        took["auto"],
        (median(deciding["dense"]), median(deciding["auto"])),
        (blocks["dense"], blocks["auto"]),
    )


def count_blocks(ask: Ask) -> int:
    """How many blocks the target reads for an answer."""
    heard: list[str] = []
    ask(lambda phase, _, __: heard.append(phase))
    return heard.count("prefill")


def bars_missed(found: Sequence[Measured]) -> list[str]:
    """Prompts that take too long, in words."""
    return [
        f'{one.case.status}: "auto" takes {ratio:.3f} times as long as "dense", more than {MOST:g}'
        for one in found
        if one.case.bar and (ratio := median(one.ratios)) > MOST
    ]


def table(subject: str, found: Sequence[Measured]) -> Table:
    """A row per case: medians, and the ratio of the two ways with its quartiles; pairs are dense and auto."""
    shown = Table(title=f"{subject}: one new token, medians of {len(found[0].auto_ms)} rounds")
    for header in (
        "prompt",
        "status",
        "tokens",
        "blocks",
        "decide, ms",
        "dense, ms",
        "auto, ms",
        "ratio",
        "quartiles",
    ):
        shown.add_column(header, justify="left" if header in ("prompt", "status") else "right", no_wrap=True)
    for one in found:
        low, middle, high = spread(one.ratios)
        shown.add_row(
            one.case.name,
            one.case.status,
            f"{one.tokens:,}",
            f"{one.blocks[0]}, {one.blocks[1]}",
            f"{one.decide_ms[0]:.2f}, {one.decide_ms[1]:.2f}",
            f"{median(one.dense_ms):,.2f}",
            f"{median(one.auto_ms):,.2f}",
            f"{middle:.3f}",
            f"{low:.2f} {high:.2f}",
        )
    return shown


if __name__ == "__main__":
    sys.exit(main())
