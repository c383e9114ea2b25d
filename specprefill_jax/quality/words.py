"""The words that the quality suites are made of, and filler sentences of them."""

import tomllib
from importlib.resources import files
from random import Random
from typing import Literal, get_args

Filler = Literal["prose", "code"]
"""What a document is filled with: sentences, or lines of a program."""

FILLERS: tuple[Filler, ...] = get_args(Filler)

_WORDS: dict[str, list[str]] = tomllib.loads(
    files("specprefill_jax.quality").joinpath("words.toml").read_text(encoding="utf-8")
)
KEYS, VALUES, ATTRIBUTES = _WORDS["keys"], _WORDS["values"], _WORDS["attributes"]
_NAMES = KEYS + VALUES
_SYLLABLES = [c + v for c in "bcdfgklmnprstvz" for v in "aeiou"]


def filler_sentence(random: Random, filler: Filler) -> str:
    """One sentence or statement that says nothing of any fact, with the space or line end before it."""
    return _prose(random) if filler == "prose" else _code(random)


def split_line(sentence: str) -> tuple[str, str]:
    """A statement's first line, or a sentence: its first words, and what follows after a space."""
    words = sentence.strip().split("\n")[0].split(" ")
    cut = max(1, len(words) // 2)
    return " ".join(words[:cut]), " ".join(words[cut:]) or words[0]


def _prose(random: Random) -> str:
    def of(kind: str) -> str:
        return random.choice(_WORDS[kind])

    noun, adjective, verb, adverb = "nouns", "adjectives", "verbs", "adverbs"
    match random.randrange(8):
        case 0:
            found = f" The {of(adjective)} {of(noun)} {of(verb)} the {of(noun)}"
            return f"{found} near the {of(adjective)} {of(noun)}."
        case 1:
            return f" {random.choice(_NAMES)} {of(verb)} a {of(adjective)} {of(noun)} {of(adverb)}."
        case 2:
            return (
                f" In {random.randrange(1800, 2030)} the {of(noun)} and the {of(noun)} were {of(adjective)}."
            )
        case 3:
            count = random.randrange(2, 99)
            found = f" We {of(verb)} {count} {of(adjective)} {of(noun)}s {of(adverb)}"
            return f"{found}, but the {of(noun)} was {of(adjective)}."
        case 4:
            found = f" {of(adverb).capitalize()}, a {of(noun)} {of(verb)} every {of(noun)}"
            return f"{found} in the {of(adjective)} {of(noun)}."
        case 5:
            return f" {random.choice(_NAMES)} and {random.choice(_NAMES)} {of(verb)} the {of(noun)}."
        case 6:
            return f" The {of(noun)} is {of(adjective)} and the {of(noun)} is {of(adjective)}."
        case _:
            return (
                f" Nobody {of(verb)} the {of(adjective)} {of(noun)} of {random.choice(_NAMES)} {of(adverb)}."
            )


def _code(random: Random) -> str:
    def variable() -> str:
        return random.choice(_WORDS["variables"])

    def function() -> str:
        return random.choice(_WORDS["functions"])

    def name() -> str:
        return random.choice(_SYLLABLES) + random.choice(_SYLLABLES)

    match random.randrange(7):
        case 0:
            return (
                f"\ndef {function()}_{name()}({variable()}, {variable()}):"
                f"\n    {variable()} = {variable()} + {random.randrange(100)}\n    return {variable()}"
            )
        case 1:
            loop = f"\nfor {variable()} in range({random.randrange(10, 99)}):"
            return f"{loop}\n    {variable()} = {function()}({variable()}, {name()})"
        case 2:
            test = f"\nif {variable()} > {random.randrange(100)}:"
            return f"{test}\n    {function()}_{name()}({variable()})\nelse:\n    {function()}({variable()})"
        case 3:
            return f"\n{name()} = {function()}({variable()}, {variable()})"
        case 4:
            nouns = _WORDS["nouns"]
            return f"\n# {function()} the {random.choice(nouns)} {variable()} and {random.choice(nouns)}"
        case 5:
            return f"\n{variable()}.{function()}({random.randrange(1000)}, {name()}[{variable()}])"
        case _:
            return f"\nwhile {variable()} < len({name()}):\n    {variable()} += {random.randrange(9)}"
