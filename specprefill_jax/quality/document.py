"""A document of filler in which sentences stand at chosen depths."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from specprefill_jax.quality.words import Filler, filler_sentence

Count = Callable[[str], int]
"""Tokens of a piece of text; of pieces that follow one another, about the sum."""


@dataclass(frozen=True)
class Document:
    """A text, and where in it the sentences that were put in lie: the first character, one past the last."""

    text: str
    spans: tuple[tuple[int, int], ...]


def make_document(
    random: Random,
    filler: Filler,
    sentences: Sequence[str],
    depths: Sequence[float],
    tokens: int,
    count: Count,
) -> Document:
    """About `tokens` tokens of filler with each of `sentences` at its depth, 0 the start and 1 the end."""
    room = tokens - sum(count(sentence) for sentence in sentences)
    fillers: list[str] = []
    while True:
        sentence = filler_sentence(random, filler)
        room -= count(sentence)
        if room < 0:
            break
        fillers.append(sentence)
    order = sorted(range(len(sentences)), key=lambda i: depths[i])
    places = {i: round(depths[i] * len(fillers)) for i in order}
    text, spans, waiting = "", {}, list(order)
    for index in range(len(fillers) + 1):
        while waiting and places[waiting[0]] <= index:
            i = waiting.pop(0)
            spans[i] = (len(text), len(text) + len(sentences[i]))
            text += sentences[i]
        if index < len(fillers):
            text += fillers[index]
    return Document(text, tuple(spans[i] for i in range(len(sentences))))
