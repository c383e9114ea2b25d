"""Many long prompts, many conversations by turns, on the demo pair: does memory grow, does the draft run?"""

from __future__ import annotations

import argparse
import random
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int
from rich.table import Table
from subjects import examples
from true_shapes import console, resident, say

from specprefill_jax.chat import Message
from specprefill_jax.cli.load import load_engine
from specprefill_jax.cli.progress import Waiting
from specprefill_jax.engine import Engine, Result
from specprefill_jax.errors import Cancelled, SpecPrefillError
from specprefill_jax.session import Sessions
from specprefill_jax.settings import Settings

PROMPTS, CONVERSATIONS = 50, 200
WARM = 10  # after so many of each, memory is to stay as it is
MOST_GROWTH = 0.02

SHAPES = 10  # conversations come in so many sizes, again and again, so that the tenth and the last are alike
TOGETHER = 5  # conversations that take turns
TURNS, IN_A_ROW = 4, 2  # of each conversation, and of these without another's in between
FIRST, MORE, LATER = 2400, 450, 1200  # characters, of which three are about a token: too many to be pinned
FIT = 2.5  # conversations of the largest caches that the budget holds
PHASES = ("score", "prefill", "decode")

SETTINGS = Settings(mode="sparse", keep=0.3, max_tokens=8)  # what holds 85% of the attention may be all of it


@dataclass(frozen=True)
class Memory:
    """Bytes: resident, of that the process's own, and what the device's allocator has given out."""

    resident: int
    anonymous: int
    device: int

    @classmethod
    def now(cls, engine: Engine) -> Memory:
        """As it is."""
        found, given = resident(), engine.target.device.hal.allocator.statistics
        device = sum(
            given[f"{kind}_bytes_allocated"] - given[f"{kind}_bytes_freed"] for kind in ("host", "device")
        )
        return cls(found["VmRSS"], found["RssAnon"], device)


@dataclass
class Soaked:
    """What came of it.

    Attributes:
        memory: After the tenth and after the last, of prompts and of conversations.
        statuses: How many answers had which.
        counts: Turns that were cancelled, edited, went on from the turn before, or had lost their memory.
        held: Bytes that conversations held at the end.
        last: Status of the last of each.
    """

    memory: dict[str, tuple[Memory, ...]] = field(default_factory=dict)
    statuses: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    held: int = 0
    last: dict[str, str] = field(default_factory=dict)


def main() -> int:
    """0 if every bar is met, 1 if not, 2 if it cannot be tried."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--device", default="cpu", help="default cpu")
    options = parser.parse_args()
    try:
        with Waiting() as waiting:
            engine = load_engine(None, options.device, waiting)
        soaked = Soaked()
        say(f"{PROMPTS} prompts")
        soak_prompts(engine, soaked)
        budget = budget_of(engine)
        say(f"{CONVERSATIONS} conversations, {TOGETHER} at a time, in {megabytes(budget)}")
        soak_conversations(engine, soaked, budget)
    except (SpecPrefillError, OSError) as error:
        print(f"soak: error: {error}", file=sys.stderr)
        return 2
    console().print(table(options.device, soaked))
    print("answers: " + in_words(soaked.statuses))
    print("turns: " + in_words(soaked.counts))
    print(f"held by conversations at the end: {megabytes(soaked.held)} of {megabytes(budget)}")
    missed = bars_missed(soaked)
    for bar in missed:
        print(f"soak: missed: {bar}", file=sys.stderr)
    return 1 if missed else 0


def soak_prompts(engine: Engine, soaked: Soaked) -> None:
    """One long prompt after the other, each another one."""
    assert engine.draft is not None, "the demo pair has one"
    pool = engine.encode(prose(), raw=True)
    longest = engine.draft.largest_capacity - SETTINGS.lookahead
    memory = []
    for number in range(PROMPTS):
        result = engine.generate(long_prompt(pool, longest, number), SETTINGS)
        note(soaked, "prompt", result)
        if number + 1 in (WARM, PROMPTS):
            memory.append(Memory.now(engine))
    soaked.memory["prompt"] = tuple(memory)


def long_prompt(pool: Int[np.ndarray, "K"], longest: int, number: int) -> Int[np.ndarray, "M"]:
    """A part of the pool of at most `longest` tokens and nearly as many, each `number` another."""
    size = longest - number * 37 % 256
    return np.roll(pool, -number * 769)[:size]


def soak_conversations(engine: Engine, soaked: Soaked, budget: int) -> None:
    """Groups of conversations whose turns alternate; a finished one stays until its memory is needed."""
    sessions, text = Sessions(engine, budget), prose()
    memory = []
    for first in range(0, CONVERSATIONS, TOGETHER):
        group = {number: Conversation(number, text) for number in range(first, first + TOGETHER)}
        for _ in range(TURNS // IN_A_ROW):
            for number, conversation in group.items():
                for _ in range(IN_A_ROW):
                    result = take_turn(sessions, number, conversation, soaked.counts)
                    note(soaked, "conversation", result)
        if first + TOGETHER in (WARM, CONVERSATIONS):
            memory.append(Memory.now(engine))
    soaked.memory["conversation"] = tuple(memory)
    soaked.held = sessions.bytes


class Conversation:
    """A conversation as its user sees it. Its number says how long it is, and what happens to it.

    Attributes:
        messages: All of them up to the question that is to be answered next.
        turn: How many turns were answered.
    """

    def __init__(self, number: int, text: str) -> None:
        self._number = number
        self._text = text
        self._random = random.Random(number)
        self.messages: list[Message] = []
        self.turn = 0

    def ask(self) -> bool:
        """Add the next question; whether the one before was edited, too."""
        size = LATER if self.turn else FIRST + MORE * (self._number % SHAPES)
        self.messages.append({"role": "user", "content": self._piece(size)})
        edited = self.turn == 2 and self._number % 3 == 2
        if edited:
            self.messages[2] = {"role": "user", "content": self._piece(LATER)}
        return edited

    @property
    def cancelled_in(self) -> str | None:
        """The phase in which this turn's first try is cancelled; None: it is not."""
        if (self._number + self.turn) % 4 != 1:
            return None
        return PHASES[(self._number // 4) % len(PHASES)]

    def hear(self, answer: str) -> None:
        """The answer becomes a part of it."""
        self.messages.append({"role": "assistant", "content": answer})
        self.turn += 1

    def _piece(self, size: int) -> str:
        start = self._random.randrange(len(self._text) - size)
        return self._text[start : start + size]


def take_turn(sessions: Sessions, number: int, conversation: Conversation, counts: Counter[str]) -> Result:
    """The next turn; one that is cancelled is asked for again."""
    counts["edited"] += conversation.ask()
    session = sessions.open(number)
    if (phase := conversation.cancelled_in) is not None:
        cancel = threading.Event()

        def stop(now: str, _: int, __: int) -> None:
            if now == phase:
                cancel.set()

        try:
            session.generate(conversation.messages, SETTINGS, watch=stop, cancel=cancel)
        except Cancelled:
            counts["cancelled"] += 1
    result = session.generate(conversation.messages, SETTINGS)
    if conversation.turn:
        counts["went on" if result.timings.reused else "began anew"] += 1
    conversation.hear(result.text)
    return result


def budget_of(engine: Engine) -> int:
    """Bytes for fewer conversations than take turns, so that they push each other out."""
    models = [program.model for program in engine.programs.values()]
    return int(
        FIT * sum(model.state_bytes(model.capacities[-1]) + 4 * model.state_bytes(0) for model in models)
    )


def prose() -> str:
    """The documents of the demo pair's examples, without what the template puts around them."""
    return re.sub(r"<\|im_(?:start|end)\|>\w*\n?", "", "\n".join(example["prompt"] for example in examples()))


def note(soaked: Soaked, kind: str, result: Result) -> None:
    """Count an answer."""
    soaked.last[kind] = str(result.timings.status)
    soaked.statuses[soaked.last[kind]] += 1


def grown(before: int, after: int) -> float:
    """By what part; less is a negative number."""
    return (after - before) / before


def growths(soaked: Soaked) -> Iterator[tuple[str, float]]:
    """What could have grown, and by what part it did."""
    for kind, (tenth, last) in soaked.memory.items():
        for name in ("resident", "anonymous", "device"):
            yield f"{name} memory, {kind}s", grown(getattr(tenth, name), getattr(last, name))


def bars_missed(soaked: Soaked) -> list[str]:
    """What grew, and what the draft no longer does; in words."""
    missed = [
        f"{name}: {growth:+.1%} from the tenth to the last, more than {MOST_GROWTH:.0%}"
        for name, growth in growths(soaked)
        if growth > MOST_GROWTH
    ]
    if failed := soaked.statuses["failed_dense"]:
        missed.append(f"the draft failed {failed} times")
    missed += [
        f"the last {kind} has status {status}, not active"
        for kind, status in soaked.last.items()
        if status != "active"
    ]
    return missed


def table(device: str, soaked: Soaked) -> Table:
    """Memory after the tenth and the last of each kind."""
    shown = Table(title=f"demo pair, {device}: memory in MB")
    for header in ("after", "resident", "anonymous", "device"):
        shown.add_column(header, justify="left" if header == "after" else "right")
    for kind, last in (("prompt", PROMPTS), ("conversation", CONVERSATIONS)):
        names = (f"{kind} {WARM}", f"{kind} {last}")
        for name, found in zip(names, soaked.memory[kind], strict=True):
            cells = (found.resident, found.anonymous, found.device)
            shown.add_row(name, *(f"{size / 1e6:,.2f}" for size in cells))
        changes = [growth for name, growth in growths(soaked) if name.endswith(f" {kind}s")]
        shown.add_row("", *(f"{growth:+.2%}" for growth in changes), end_section=True)
    return shown


def in_words(counts: Counter[str]) -> str:
    """How many of what."""
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items()))


def megabytes(size: float) -> str:
    """Bytes in MB."""
    return f"{size / 1e6:.1f} MB"


if __name__ == "__main__":
    sys.exit(main())
