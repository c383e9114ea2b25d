"""The second turn of a conversation: where both models go on from the first, and from nothing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from jaxtyping import Int
from rich.table import Table
from subjects import (
    ANSWER,
    CONVERSATION,
    KEEP,
    NEW,
    add_subject,
    examples,
    load,
    name_of,
    random_tokens,
    spread,
    whole_rounds,
)
from true_shapes import console, say

from specprefill_jax.engine import Engine, Result
from specprefill_jax.errors import SpecPrefillError
from specprefill_jax.session import Session
from specprefill_jax.settings import Settings

LEAST_RATIO = 5.0  # of the first token of turn 1 to that of turn 2
SETTINGS = Settings(mode="sparse", keep=KEEP, max_keep=0, max_tokens=ANSWER)


@dataclass(frozen=True)
class Turn:
    """What one turn took.

    Attributes:
        first_ms: to the first token.
        draft_read, target_read: tokens that each model read of the prompt, lookahead apart.
        phases: ms of each.
        status: what became of it.
    """

    first_ms: float
    draft_read: int
    target_read: int
    phases: Mapping[str, float]
    status: str

    @classmethod
    def of(cls, result: Result) -> Turn:
        """Of what the engine returned."""
        timings = result.timings
        before = int(np.searchsorted(result.kept, timings.reused))
        return cls(
            timings.first_token,
            timings.draft_read,
            result.kept.size - before,
            timings.phases,
            str(timings.status),
        )


@dataclass(frozen=True)
class Round:
    """Both turns of a conversation, and turn 2 in a new one; `added`: tokens of the answer and new ones."""

    first: Turn
    cold: Turn
    resumed: Turn
    added: int


def main() -> int:
    """0 if every bar is met, 1 if not, 2 if it cannot be tried."""
    parser = argparse.ArgumentParser(prog="bench_turns", description=__doc__)
    add_subject(parser)
    parser.add_argument("--rounds", type=whole_rounds, help="that count (default 7; true shapes: 3)")
    options = parser.parse_args()
    demo = options.true_shapes is None
    count = options.rounds or (7 if demo else 3)
    try:
        engine = load(options)
        conversation, new = demo_turns(engine) if demo else random_turns(engine)
        rounds = []
        # Minutes a round leave nothing to warm up with the true shapes.
        for number in range(0 if demo else 1, count + 1):
            say(f"round {number} of {count}" if number else "warming up")
            found = run_round(engine, conversation, new, cold_first=number % 2 == 0)
            if number:
                rounds.append(found)
    except (SpecPrefillError, OSError) as error:
        print(f"bench_turns: error: {error}", file=sys.stderr)
        return 2
    report(name_of(options), rounds)
    missed = bars_missed(rounds)
    for bar in missed:
        print(f"bench_turns: missed: {bar}", file=sys.stderr)
    return 1 if missed else 0


def demo_turns(engine: Engine) -> tuple[Int[np.ndarray, "M"], Int[np.ndarray, "_"]]:
    """The beginning of a long document, and the end of another with a question about that."""
    one, other = (
        engine.encode(example["prompt"], raw=True) for example in examples(at_least=CONVERSATION)[:2]
    )
    return one[:CONVERSATION], other[-NEW:]


def random_turns(engine: Engine) -> tuple[Int[np.ndarray, "M"], Int[np.ndarray, "_"]]:
    """Tokens of no meaning, for models that know none."""
    return random_tokens(engine, CONVERSATION, 0), random_tokens(engine, NEW, 1)


def run_round(
    engine: Engine, conversation: Int[np.ndarray, "M"], new: Int[np.ndarray, "_"], *, cold_first: bool
) -> Round:
    """Every way once; the cold turn 2 before the one that goes on, or after it."""
    session = Session(engine)
    first = session.generate(conversation, SETTINGS)
    second = np.concatenate([conversation, np.array(first.tokens, np.int32), new])
    ways = {"cold": Session(engine), "resumed": session}
    found = {
        name: Turn.of(ways[name].generate(second, SETTINGS)) for name in sorted(ways, reverse=not cold_first)
    }
    return Round(Turn.of(first), found["cold"], found["resumed"], second.size - conversation.size)


def bars_missed(rounds: Sequence[Round]) -> list[str]:
    """What turn 2 read beside the new tokens, and what it took too long for; in words."""
    missed = []
    for found in rounds:
        if found.resumed.draft_read != found.added:
            missed.append(
                f"turn 2: the draft read {found.resumed.draft_read} tokens, not the {found.added} of the "
                "answer and the new ones"
            )
        for name, turn in (("turn 1", found.first), ("turn 2", found.resumed)):
            if turn.status != "active":
                missed.append(f"{name}: status {turn.status} in place of active")
    ratio = median(found.first.first_ms / found.resumed.first_ms for found in rounds)
    if ratio < LEAST_RATIO:
        missed.append(f"turn 2 is {ratio:.1f} times as fast as turn 1, not {LEAST_RATIO:g} times")
    return missed


def report(subject: str, rounds: Sequence[Round]) -> None:
    """What each way took and read: medians, and the ratios of each round."""
    ways = {
        "turn 1, cold": [found.first for found in rounds],
        "turn 2, cold": [found.cold for found in rounds],
        "turn 2, resumed": [found.resumed for found in rounds],
    }
    shown = Table(title=f"{subject}: medians of {len(rounds)} rounds")
    shown.add_column("")
    for way in ways:
        shown.add_column(way, justify="right")
    last = [turns[-1] for turns in ways.values()]
    prompts = (CONVERSATION, *[CONVERSATION + rounds[-1].added] * 2)
    shown.add_row("prompt, tokens", *(f"{tokens:,}" for tokens in prompts))
    shown.add_row("draft read, tokens", *(f"{turn.draft_read:,}" for turn in last))
    shown.add_row("target read, tokens", *(f"{turn.target_read:,}" for turn in last))
    shown.add_row(
        "first token, ms",
        *(milliseconds(turn.first_ms for turn in turns) for turns in ways.values()),
        end_section=True,
    )
    for phase in last[0].phases:
        shown.add_row(
            f"{phase}, ms",
            *(milliseconds(turn.phases.get(phase, 0.0) for turn in turns) for turns in ways.values()),
        )
    console().print(shown)
    for way in list(ways)[:2]:
        pairs = zip(ways[way], ways["turn 2, resumed"], strict=True)
        low, middle, high = spread([other.first_ms / resumed.first_ms for other, resumed in pairs])
        print(
            f"turn 2, resumed: first token {middle:.1f} times as fast as {way} "
            f"(half of the rounds: {low:.1f} to {high:.1f})"
        )


def milliseconds(values: Iterable[float]) -> str:
    """Their median, in as many digits as tell something."""
    middle = median(values)
    return f"{middle:,.0f}" if middle >= 100 else f"{middle:.1f}"


if __name__ == "__main__":
    sys.exit(main())
