"""Sequences to train on, made on the fly: a batch is a function of its stage, the seed and the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from random import Random

import numpy as np
from jaxtyping import Float, Int
from tokenizers import Tokenizer

from specprefill_jax.quality.document import Count, make_document
from specprefill_jax.quality.facts import (
    Fact,
    ValueKind,
    call_opening,
    call_question,
    make_facts,
    make_value,
    opening,
    question,
    stated,
)
from specprefill_jax.quality.words import FILLERS, Filler, filler_sentence, split_line

USER, ASSISTANT, SYSTEM, END = (
    "<|im_start|>user\n",
    "<|im_start|>assistant\n",
    "<|im_start|>system\n",
    "<|im_end|>",
)

OTHER, ANSWER, FIRST = 0.1, 1.0, 3.0
"""What tokens weigh in the loss: those of questions and documents, of answers, and the first of an answer."""

PREFIXED = 0.9
"""Share of the answers that begin with the words of the question."""


@dataclass(frozen=True)
class Stage:
    """One stage of training.

    Attributes:
        steps: Batches in it.
        tokens: Length of a sequence.
        batch: Sequences in a batch.
        kinds: What share of the sequences is of which kind (see `MAKERS`).
        facts: Fewest and most facts in a sequence.
        values: Kinds of values that facts have.
        rate: Learning rate; between the stages' rates it moves linearly over the steps of the stage.
        memory: Delta layers' range of time steps, set anew at the start of the stage.
        sharpness: Norms of queries and keys above their 1, set anew at the start of the stage.
        layers: The first so many layers are there; those that were not there before begin with little to say.
    """

    steps: int
    tokens: int
    batch: int
    kinds: Mapping[str, float]
    facts: tuple[int, int]
    values: tuple[ValueKind, ...]
    rate: float
    memory: tuple[float, float] | None = None
    sharpness: float | None = None
    layers: int | None = None


Piece = tuple[str, bool]
"""Text, and whether it is an answer."""


@dataclass(frozen=True)
class Maker:
    """What the kinds of sequences are made with."""

    random: Random
    stage: Stage
    count: Count

    def filler(self) -> Filler:
        return self.random.choice(FILLERS)

    def facts(self, most: int = 1 << 30) -> list[Fact]:
        low, high = self.stage.facts
        return make_facts(self.random, min(self.random.randint(low, high), most), self.stage.values)

    def reply(self, prefix: str, value: str) -> list[Piece]:
        """The assistant's turn: as a rule the words of the question are given, and the value follows."""
        shown = prefix if self.random.random() < PREFIXED else ""
        return [(END + "\n" + ASSISTANT + shown, False), (f" {value}{END}", True)]


def restated(make: Maker) -> list[Piece]:
    """Facts stated again and again, some of them asked for: there is an answer every few tokens."""
    random, filler = make.random, make.filler()
    pool, known, noise = make.facts(), set(), random.random() * 0.3
    pieces: list[Piece] = [(USER, False)]
    used = make.count(USER)
    while used < make.stage.tokens:
        if random.random() < noise:
            new: list[Piece] = [(filler_sentence(random, filler), False)]
        else:
            fact = random.choice(pool)
            text = stated(random, fact, filler)
            if fact not in known:
                new = [(text, False)]
            elif random.random() < 0.25:
                asked = ("\n" + question(fact, filler), False)
                new = [asked, *make.reply(opening(fact, filler), fact.value), ("\n" + USER, False)]
            else:
                start = text.rindex(f" {fact.value}")
                end = start + len(fact.value) + 1
                new = [(text[:start], False), (text[start:end], True), (text[end:], False)]
            known.add(fact)
        pieces += new
        used += sum(make.count(text) for text, _ in new)
    return pieces


def conversation(
    make: Maker, filler: Filler, sentences: list[str], turns: list[tuple[str, list[Piece]]]
) -> list[Piece]:
    """A document in which the sentences lie at random depths, and questions about it with their answers."""
    random, asked = make.random, ""
    pieces: list[Piece] = []
    for index, (text, reply) in enumerate(turns):
        asked = "\n\n" if index == 0 else "\n" + USER
        pieces += [(asked + text, False), *reply]
    used = make.count(USER) + sum(make.count(text) for text, _ in pieces)
    depths = [random.random() for _ in sentences]
    document = make_document(random, filler, sentences, depths, make.stage.tokens - used, make.count)
    return [(USER + document.text, False), *pieces]


def asked(make: Maker) -> list[Piece]:
    """Facts in filler, and questions about some of them."""
    random, filler = make.random, make.filler()
    facts = make.facts(most=max(1, make.stage.tokens // 40))
    most = min(8, len(facts), max(1, (make.stage.tokens - 60) // 45))
    chosen = random.sample(facts, random.randint(1, most))
    turns = [(question(f, filler), make.reply(opening(f, filler), f.value)) for f in chosen]
    return conversation(make, filler, [stated(random, f, filler) for f in facts], turns)


def called(make: Maker) -> list[Piece]:
    """Numbers in filler, some of them asked for as the argument of a tool's call."""
    random, filler = make.random, make.filler()
    count = random.randint(1, min(4, max(1, make.stage.tokens // 80)))
    facts = make_facts(random, count, ("digits",))
    chosen = random.sample(facts, random.randint(1, count))
    turns = [(call_question(f, filler), make.reply(call_opening(f), f.value + "}}")) for f in chosen]
    return conversation(make, filler, [stated(random, f, filler) for f in facts], turns)


def quoted(make: Maker) -> list[Piece]:
    """Sentences of the document, asked for by their first words."""
    random, filler = make.random, make.filler()
    sentences = [filler_sentence(random, filler) for _ in range(max(2, make.stage.tokens // 200))]
    turns = []
    for sentence in random.sample(sentences, min(len(sentences), 4)):
        begin, rest = split_line(sentence)
        turns.append((f"Quote the line that begins with: {begin}", make.reply(begin, rest)))
    return conversation(make, filler, sentences, turns)


def secret(make: Maker) -> list[Piece]:
    """A word in the system message, asked for after the document."""
    random, filler = make.random, make.filler()
    word = make_value(random, random.choice(make.stage.values))
    system = (f"{SYSTEM}The secret word is {word}.{END}\n", False)
    facts = make.facts(most=max(1, make.stage.tokens // 80))
    turns = [(question(f, filler), make.reply(opening(f, filler), f.value)) for f in facts[:2]]
    turns.append(("What is the secret word?", make.reply("The secret word is", word)))
    random.shuffle(turns)
    return [system, *conversation(make, filler, [stated(random, f, filler) for f in facts], turns)]


MAKERS: dict[str, Callable[[Maker], list[Piece]]] = {
    "restated": restated,
    "asked": asked,
    "called": called,
    "quoted": quoted,
    "secret": secret,
}
"""How each kind of sequences is made."""


class Source:
    """Batches of a tokenizer's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        word = lru_cache(1 << 16)(lambda text: len(tokenizer.encode(text).ids))
        # A space begins a token, so that the words' tokens add up.
        self.count = lambda text: sum(word(" " + each) for each in text.split(" ") if each)

    def batch(self, stage: Stage, seed: str) -> tuple[Int[np.ndarray, "B T+1"], Float[np.ndarray, "B T+1"]]:
        """Tokens, and what predicting each weighs; unused ends weigh nothing."""
        length = stage.tokens + 1
        ids = np.zeros((stage.batch, length), np.int32)
        weights = np.zeros((stage.batch, length), np.float32)
        random = Random(seed)
        kinds = random.choices(list(stage.kinds), list(stage.kinds.values()), k=stage.batch)
        maker = Maker(random, stage, self.count)
        for row, kind in enumerate(kinds):
            found, weight = self.encode(MAKERS[kind](maker))
            used = min(length, len(found))
            ids[row, :used], weights[row, :used] = found[:used], weight[:used]
        return ids, weights

    def encode(self, pieces: list[Piece]) -> tuple[list[int], list[float]]:
        """Tokens of the text, and their weights by the piece that each begins in."""
        encoding = self.tokenizer.encode("".join(text for text, _ in pieces))
        ends = np.cumsum([len(text) for text, _ in pieces])
        starts = np.array([start for start, _ in encoding.offsets])
        piece = np.searchsorted(ends, starts, side="right")
        answer = np.array([answer for _, answer in pieces])[piece]
        space = np.array(
            [text == "\u0120" for text in encoding.tokens]
        )  # numbers have it as a token of its own
        begins = np.diff(piece, prepend=-1) != 0
        first = answer & ~space & (begins | np.roll(begins & space, 1))
        return encoding.ids, np.where(first, FIRST, np.where(answer, ANSWER, OTHER)).tolist()
