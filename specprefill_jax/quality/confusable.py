"""Prompts of the package hard-needle: facts about projects that are easily confused."""

from importlib.metadata import version
from random import Random
from typing import NamedTuple

from specprefill_jax.errors import EvaluationMissing
from specprefill_jax.quality.document import Count

NEEDLES = 6
"""Facts in a document, all of one kind; the package has names for at most 8."""

_QUESTION_END = "\nAnswer:"


class Confusable(NamedTuple):
    """A text with its question, what the answer begins with, the answer, and the sentence that states it."""

    text: str
    prefix: str
    answer: str
    sentence: str


def check_present() -> str:
    """The version of hard-needle that is installed.

    Raises:
        EvaluationMissing: it is not.
    """
    try:
        import hard_needle  # noqa: F401
    except ModuleNotFoundError as error:
        raise EvaluationMissing(
            'the suite confusable needs the package hard-needle: pip install "specprefill-jax[eval]"'
        ) from error
    return version("hard-needle")


def confusable_example(random: Random, tokens: int, count: Count) -> Confusable:
    """A prompt of about `tokens` tokens.

    Raises:
        EvaluationMissing: hard-needle is not installed.
    """
    check_present()
    from hard_needle import generate_hard_example

    seed = random.getrandbits(32)
    # The package counts characters: how many make a token shows from a first text.
    characters = max(1, 4 * tokens)
    first = generate_hard_example(NEEDLES, characters, seed=seed)["prompt"]
    characters = max(1, characters * tokens // max(1, count(first)))
    found = generate_hard_example(NEEDLES, characters, seed=seed)
    (sentence,) = (
        record["sentence"] for record in found["needle_records"] if record["entity"] == found["target_entity"]
    )
    text = found["prompt"].removesuffix(_QUESTION_END)
    return Confusable(text, _QUESTION_END.strip(), found["target"], sentence)
