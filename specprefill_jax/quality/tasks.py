"""Prompts whose right answers are known, by suite.

The texts are those that the demo pair is trained on (`scripts/train_demo`), but never the same prompts: each
is a function of its seed, and seeds begin with what the prompts are for, `eval/` or `calibrate/`; those of
training do not.
"""

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from specprefill_jax.chat import Message, ask_about
from specprefill_jax.errors import SettingError
from specprefill_jax.quality.confusable import confusable_example
from specprefill_jax.quality.document import Count, Document, make_document
from specprefill_jax.quality.facts import (
    Fact,
    ValueKind,
    call_opening,
    call_question,
    linked,
    make_facts,
    make_value,
    opening,
    question,
    stated,
)
from specprefill_jax.quality.words import FILLERS, Filler, filler_sentence, split_line

FACTS = 4
"""Most facts in a document that has a few."""

DISTRACTORS = 16
"""Facts with the attribute that is asked for, of other keys."""

NEAR = 0.03
"""A prompt may be this share shorter than wanted: the length of a sentence or two."""

TRIES = 8


class Span(NamedTuple):
    """Characters `start` to `end - 1` of the content of message `message`."""

    message: int
    start: int
    end: int


@dataclass(frozen=True)
class Task:
    """A prompt and its right answer.

    Attributes:
        suite: What it tests.
        filler: What its document is filled with.
        messages: The conversation; the last message is the user's.
        prefix: What the answer begins with; it is part of the prompt.
        answer: What is to follow, after a space.
        spans: The text that the answer follows from.
        depth: Where in the document that was wanted: 0 the start, 1 the end.
        tokens: Of the prompt, template and prefix included, at most.
    """

    suite: str
    filler: Filler
    messages: tuple[Message, ...]
    prefix: str
    answer: str
    spans: tuple[Span, ...]
    depth: float
    tokens: int


@dataclass(frozen=True)
class Wanted:
    """What a suite is asked for.

    Attributes:
        filler: What the document is filled with.
        tokens: About as many in the messages and the prefix.
        depth: Where in the document the fact lies.
        values: Kinds of values that facts have; the suite `tool` always has numbers.
        count: Counts tokens.
    """

    filler: Filler
    tokens: int
    depth: float
    values: Collection[ValueKind]
    count: Count


@dataclass(frozen=True)
class Suite:
    """How the prompts of a suite are made, with which fillers, and what they test."""

    make: Callable[[Random, Wanted], Task]
    tests: str
    fillers: tuple[Filler, ...] = FILLERS


def make_task(suite: str, wanted: Wanted, seed: str, measure: Callable[[Task], int]) -> Task:
    """The prompt of a seed. It is never longer than wanted, and as a rule at most `NEAR` shorter.

    Args:
        measure: Tokens of the whole prompt, template included.

    Raises:
        SettingError: the suite's facts and question alone take more than `wanted.tokens`.
        EvaluationMissing: the suite needs a package that is not installed.
    """
    room, best, longest, shortest = wanted.tokens, None, 0, 0
    for _ in range(TRIES):
        # From the same seed: the same facts, with more or less around them.
        task = SUITES[suite].make(Random(seed), dataclasses.replace(wanted, tokens=max(room, 0)))
        size = measure(task)
        shortest = size if best is None else shortest
        if longest < size <= wanted.tokens:
            best, longest = task, size
        if wanted.tokens * (1 - NEAR) <= size <= wanted.tokens or (size > wanted.tokens and room <= 0):
            break
        # A prompt grows by whole sentences: one that is a token too long has to lose more than that.
        room += wanted.tokens - size - (wanted.tokens // 100 + 1 if size > wanted.tokens else 0)
    if best is None:
        raise SettingError(
            f"lengths={wanted.tokens}: without any filler a prompt of suite {suite} has about {shortest} "
            "tokens; give larger lengths (--lengths), or leave the suite out (--suites)"
        )
    return dataclasses.replace(best, tokens=wanted.tokens)


# --- the suites


def _needle(random: Random, wanted: Wanted) -> Task:
    return _asked(random, wanted, "needle", _facts(random, 1, wanted.values))


def _several(random: Random, wanted: Wanted) -> Task:
    return _asked(random, wanted, "facts", _facts(random, random.randint(1, FACTS), wanted.values))


def _distractors(random: Random, wanted: Wanted) -> Task:
    facts = _alike(_facts(random, 1 + DISTRACTORS, wanted.values))
    return _asked(random, wanted, "distractors", facts)


def _hops(random: Random, wanted: Wanted) -> Task:
    """Two chains of two statements: of one key the value, of another that it has the same."""
    filler = wanted.filler
    first, other, end, other_end = _alike(_facts(random, 4, wanted.values))
    sentences = [
        stated(random, first, filler),
        linked(random, end, first.key, filler),
        stated(random, other, filler),
        linked(random, other_end, other.key, filler),
    ]
    asked = dataclasses.replace(end, value=first.value)
    asks, begins = question(asked, filler), opening(asked, filler)
    return _about(random, wanted, "hops", sentences, (asks, begins, asked.value), needed=2)


def _tool(random: Random, wanted: Wanted) -> Task:
    facts = _facts(random, FACTS, ("digits",))
    sentences = [stated(random, fact, wanted.filler) for fact in facts]
    asks, begins = call_question(facts[0], wanted.filler), call_opening(facts[0])
    return _about(random, wanted, "tool", sentences, (asks, begins, facts[0].value + "}}"))


def _quote(random: Random, wanted: Wanted) -> Task:
    while True:
        sentence = filler_sentence(random, wanted.filler)
        begin, rest = split_line(sentence)
        asks = f"Quote the line that begins with: {begin}"
        task = _about(random, wanted, "quote", [sentence], (asks, begin, rest))
        (span,), content = task.spans, str(task.messages[0]["content"])
        if content.count(begin) == 2:  # once in the document, once in the question
            end = span.start + len(f"{begin} {rest}")
            return dataclasses.replace(task, spans=(span._replace(end=end),))


def _secret(random: Random, wanted: Wanted) -> Task:
    word = make_value(random, random.choice(sorted(wanted.values)))
    said = f"The secret word is {word}."
    others = _facts(random, FACTS, wanted.values)
    while any(word in fact.value for fact in others):  # also as a part of it
        others = _facts(random, FACTS, wanted.values)
    facts = [stated(random, fact, wanted.filler) for fact in others]
    room = dataclasses.replace(wanted, tokens=wanted.tokens - wanted.count(said), depth=random.random())
    turn = ("What is the secret word?", "The secret word is", word)
    task = _about(random, room, "secret", facts, turn)
    system: Message = {"role": "system", "content": said}
    return dataclasses.replace(
        task, messages=(system, *task.messages), spans=(Span(0, 0, len(said)),), depth=0.0
    )


def _confusable(random: Random, wanted: Wanted) -> Task:
    found = confusable_example(random, wanted.tokens, wanted.count)
    start = found.text.index(found.sentence)
    return Task(
        suite="confusable",
        filler="prose",
        messages=({"role": "user", "content": found.text},),
        prefix=found.prefix,
        answer=found.answer,
        spans=(Span(0, start, start + len(found.sentence)),),
        depth=start / len(found.text),
        tokens=wanted.tokens,
    )


SUITES: dict[str, Suite] = {
    "needle": Suite(_needle, "one fact"),
    "facts": Suite(_several, f"1 to {FACTS} facts, of which one is asked for"),
    "distractors": Suite(_distractors, f"a fact among {DISTRACTORS} with the same attribute"),
    "hops": Suite(_hops, "a value stated for another name, and that both have the same"),
    "tool": Suite(_tool, "a tool call, as text, whose argument is a number of the document"),
    "quote": Suite(_quote, "a line of the document, word for word"),
    "secret": Suite(_secret, "a word of the system message, asked for after a document"),
    "confusable": Suite(_confusable, "hard-needle's facts about projects of similar names", ("prose",)),
}
"""Every suite by its name."""

OWN_SUITES = tuple(name for name in SUITES if name != "confusable")
"""Those that need nothing but this package."""


def _asked(random: Random, wanted: Wanted, suite: str, facts: list[Fact]) -> Task:
    """The value of the first fact is asked for."""
    sentences = [stated(random, fact, wanted.filler) for fact in facts]
    asks, begins = question(facts[0], wanted.filler), opening(facts[0], wanted.filler)
    return _about(random, wanted, suite, sentences, (asks, begins, facts[0].value))


def _about(
    random: Random,
    wanted: Wanted,
    suite: str,
    sentences: list[str],
    turn: tuple[str, str, str],
    needed: int = 1,
) -> Task:
    """A document with `sentences`, and a turn about it: question, first words of the answer, the rest of it.

    The first sentence lies at the depth wanted, the others anywhere; the first `needed` must be kept.
    """
    asks, begins, answer = turn
    depths = [wanted.depth, *(random.random() for _ in sentences[1:])]
    room = wanted.tokens - wanted.count(asks) - wanted.count(begins)
    document = make_document(random, wanted.filler, sentences, depths, room, wanted.count)
    return Task(
        suite=suite,
        filler=wanted.filler,
        messages=({"role": "user", "content": ask_about(document.text, asks)},),
        prefix=begins,
        answer=answer,
        spans=tuple(_of_words(document, index) for index in range(needed)),
        depth=wanted.depth,
        tokens=wanted.tokens,
    )


def _of_words(document: Document, index: int) -> Span:
    """Where a sentence lies, without the space or line end before it."""
    start, end = document.spans[index]
    text = document.text[start:end]
    return Span(0, end - len(text.lstrip()), end)


def _facts(random: Random, count: int, values: Collection[ValueKind]) -> list[Fact]:
    """Facts with as many different values, so that no other's is right by chance."""
    while True:
        facts = make_facts(random, count, values)
        if len({fact.value for fact in facts}) == count:
            return facts


def _alike(facts: list[Fact]) -> list[Fact]:
    """The facts with the attribute of the first."""
    return [dataclasses.replace(fact, attribute=facts[0].attribute) for fact in facts]
