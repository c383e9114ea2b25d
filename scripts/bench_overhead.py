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
from subjects import add_subject, examples, load, name_of, random_tokens, spread
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
    """Milliseconds of each round, and the blocks that the target read, of the two ways."""

    case: Case
    tokens: int
    dense_ms: Sequence[float]
    auto_ms: Sequence[float]
    dense_blocks: int
    auto_blocks: int

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
    parser.add_argument("--rounds", type=int, help="of each prompt (default 100; true shapes: 3)")
    options = parser.parse_args()
    demo = options.true_shapes is None
    try:
        engine = whose_draft_never_pays(load(options))
        cases = demo_cases(engine) if demo else random_cases(engine)
        found = [measure(case, options.rounds or (100 if demo else 3)) for case in cases]
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
        Case("below break-even", dense(longer, options), auto(longer, long_enough), "skipped_break_even"),
        Case("below the minimum", dense(shorter, options), auto(shorter, AUTO), "skipped_min_tokens"),
        Case(
            "first turn of a conversation",
            dense(messages, {}),
            lambda watch: Session(engine).generate(messages, AUTO, watch=watch),
            "skipped_min_tokens",
            bar=False,
        ),
    ]


def measure(case: Case, rounds: int) -> Measured:
    """Both ways in each round, in changing order, after one that counts blocks.

    Raises:
        Unexpected: the draft was not declined as it should be.
    """
    blocks = {}
    for name, ask in (("dense", case.dense), ("auto", case.auto)):
        heard: list[str] = []
        result = ask(lambda phase, _, __, heard=heard: heard.append(phase))
        blocks[name] = heard.count("prefill")
    status = str(result.timings.status)
    if status != case.status:
        raise Unexpected(f"{case.name}: status {status} in place of {case.status}: {result.timings.reason}")
    took: dict[str, list[float]] = {"dense": [], "auto": []}
    say(f"{case.name}: {rounds} rounds")
    for number in range(rounds):
        for name in ("dense", "auto") if number % 2 else ("auto", "dense"):
            took[name].append(timed(case.dense if name == "dense" else case.auto))
    tokens = result.usage.prompt_tokens
    return Measured(case, tokens, took["dense"], took["auto"], blocks["dense"], blocks["auto"])


def timed(ask: Ask) -> float:
    """Milliseconds that a caller waits for an answer of one token."""
    began = time.perf_counter()
    ask(None)
    return (time.perf_counter() - began) * 1000


def bars_missed(found: Sequence[Measured]) -> list[str]:
    """Prompts that take too long, in words."""
    return [
        f'{one.case.name}: "auto" takes {median(one.ratios):.3f} times what "dense" takes, more than {MOST:g}'
        for one in found
        if one.case.bar and median(one.ratios) > MOST
    ]


def table(subject: str, found: Sequence[Measured]) -> Table:
    """A row per case: medians, and the ratio of the two ways with its quartiles."""
    shown = Table(title=f"{subject}: one new token, medians of {len(found[0].auto_ms)} rounds")
    for header in ("prompt", "status", "tokens", "blocks", "dense, ms", "auto, ms", "ratio", "quartiles"):
        shown.add_column(header, justify="left" if header in ("prompt", "status") else "right")
    for one in found:
        low, middle, high = spread(one.ratios)
        shown.add_row(
            one.case.name,
            one.case.status,
            f"{one.tokens:,}",
            f"{one.dense_blocks}, {one.auto_blocks}",
            f"{median(one.dense_ms):,.2f}",
            f"{median(one.auto_ms):,.2f}",
            f"{middle:.3f}",
            f"{low:.3f} {high:.3f}",
        )
    return shown


if __name__ == "__main__":
    sys.exit(main())
