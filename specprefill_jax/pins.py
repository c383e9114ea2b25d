"""What a caller wants kept whatever its importance."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool

from specprefill_jax.errors import PinError
from specprefill_jax.outline import Outline, Span, check_roles, tokens_over

LAST_USER_MOST = 256
"""Tokens of a last user message that is pinned by default. A longer one is taken for a pasted document, which
is what selection is for; only a caller who names it in `Pins` pins it whole."""


@dataclass(frozen=True)
class Pins:
    """Parts of a prompt that are always kept.

    Attributes:
        tokens: Spans of tokens, start and end.
        characters: Spans of the rendered prompt's characters; every token that has one of them is kept.
        texts: Every occurrence of these texts in the rendered prompt.
        roles: Parts of a conversation, named as in `settings.ROLES`.
    """

    tokens: tuple[tuple[int, int], ...] = ()
    characters: tuple[tuple[int, int], ...] = ()
    texts: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()


def pinned_tokens(pins: Pins, prompt: Outline, default_roles: Sequence[str] = ()) -> Bool[np.ndarray, "M"]:
    """Mask of the tokens that `pins` keep, and those that `default_roles` keep where the prompt has them.

    The outline must have been made for the roles of both.

    Raises:
        PinError: a span is empty or outside the prompt, a text does not occur, a role of `pins` is unknown or
            has no known place in this prompt, or characters of a prompt of tokens are pinned.
    """
    check_roles((*pins.roles, *default_roles))
    size = prompt.tokens.size
    spans = [_checked(span, size, "tokens") for span in pins.tokens]
    if pins.characters or pins.texts:
        if prompt.text is None:
            raise PinError("the prompt was given as tokens and has no text; pin spans of its tokens")
        characters = [_checked(span, len(prompt.text), "characters") for span in pins.characters]
        for text in pins.texts:
            characters += _occurrences(text, prompt.text)
        spans += [tokens_over(prompt.offsets, span) for span in characters]
    for role in pins.roles:
        if role not in prompt.spans:
            raise PinError(
                f"role {role!r} is pinned, but its place in this prompt is not known: the prompt is no "
                "conversation, or its template hides it; pin its text"
            )
        spans += prompt.spans[role]
    for role in default_roles:
        most = LAST_USER_MOST if role == "last_user" else size
        spans += [span for span in prompt.spans.get(role, ()) if span.end - span.start <= most]
    mask = np.zeros(size, dtype=bool)
    for start, end in spans:
        mask[start:end] = True
    return mask


def _checked(span: tuple[int, int], size: int, unit: str) -> Span:
    start, end = span
    if not 0 <= start < end <= size:
        raise PinError(
            f"{unit} {start} to {end} cannot be pinned; a span starts at 0 or later, ends after its start, "
            f"and ends at {size} or before, the {unit} of this prompt"
        )
    return Span(start, end)


def _occurrences(text: str, prompt: str) -> list[Span]:
    if not text:
        raise PinError("an empty text cannot be pinned; give at least one character")
    found = []
    start = prompt.find(text)
    while start >= 0:
        found.append(Span(start, start + len(text)))
        start = prompt.find(text, start + 1)
    if not found:
        raise PinError(
            f"{_shortened(text)!r} is pinned, but does not occur in the prompt; give it as it stands there"
        )
    return found


def _shortened(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
