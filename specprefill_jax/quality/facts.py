"""Facts that a document may state, how they are stated, and how they are asked for."""

from collections.abc import Collection
from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

from specprefill_jax.quality.words import ATTRIBUTES, KEYS, VALUES, Filler

ValueKind = Literal["name", "names", "digits"]
"""What a value is: one invented name, two of them, or a number of three to five digits."""

VALUE_KINDS: tuple[ValueKind, ...] = get_args(ValueKind)


@dataclass(frozen=True)
class Fact:
    """The `attribute` of `key` is said to be `value`; in a program, the variable `key` is."""

    key: str
    attribute: str
    value: str


def make_value(random: Random, kind: ValueKind) -> str:
    """A value of a kind; without a space before it."""
    if kind == "digits":
        first = str(random.randrange(1, 10))
        return first + "".join(str(random.randrange(10)) for _ in range(random.randrange(2, 5)))
    return " ".join(random.sample(VALUES, 2 if kind == "names" else 1))


def make_facts(random: Random, count: int, kinds: Collection[ValueKind] = VALUE_KINDS) -> list[Fact]:
    """Facts about so many different keys."""
    keys, choices = random.sample(KEYS, count), sorted(kinds)
    return [Fact(key, random.choice(ATTRIBUTES), make_value(random, random.choice(choices))) for key in keys]


def stated(random: Random, fact: Fact, filler: Filler) -> str:
    """A sentence or statement of the fact, with the space or line end before it."""
    key, attribute, value = fact.key, fact.attribute, fact.value
    if filler == "prose":
        forms = [
            f" The {attribute} for {key} is {value}.",
            f" Remember that the {attribute} of {key} is {value}.",
            f" For {key} the {attribute} is {value}.",
            f" Note: {key} has the {attribute} {value}.",
        ]
    else:
        forms = [
            f"\nlet {key} = {value}",
            f"\nconst {key} = {value};",
            f"\nset( {key}, {value})",
            f"\n{{ {key}: {value} }},",
        ]
    return random.choice(forms)


def question(fact: Fact, filler: Filler) -> str:
    """What asks for the value."""
    if filler == "prose":
        return f"What is the {fact.attribute} for {fact.key}?"
    return f"What is the value of {fact.key}?"


def opening(fact: Fact, filler: Filler) -> str:
    """The words that the answer begins with; the value follows after a space."""
    return f"The {fact.attribute} for {fact.key} is" if filler == "prose" else f"let {fact.key} ="


def linked(random: Random, fact: Fact, other: str, filler: Filler) -> str:
    """A sentence or statement that the value of `fact` is that of `other`, without the value itself."""
    key, attribute = fact.key, fact.attribute
    if filler == "prose":
        forms = [
            f" The {attribute} for {key} is the same as for {other}.",
            f" Remember that the {attribute} of {key} is that of {other}.",
            f" Note: {key} has the {attribute} of {other}.",
        ]
    else:
        forms = [f"\nlet {key} = {other}", f"\nconst {key} = {other};", f"\nset( {key}, {other})"]
    return random.choice(forms)


def call_question(fact: Fact, filler: Filler) -> str:
    """What asks for a call of a tool, as text, with the value as its argument."""
    what = f"the {fact.attribute} for {fact.key}" if filler == "prose" else f"the value of {fact.key}"
    return f"Call the tool open with {what}."


def call_opening(fact: Fact) -> str:
    """The words that the call begins with; the value, a number, and `}}` follow after a space."""
    return f'{{"name": "open", "arguments": {{"key": "{fact.key}", "code":'
