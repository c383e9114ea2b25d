"""Pins: what a caller wants kept becomes a mask over the prompt's tokens."""

import numpy as np
import pytest

from specprefill_jax.errors import PinError
from specprefill_jax.outline import Outline, outline
from specprefill_jax.pins import LAST_USER_MOST, Pins, pinned_tokens
from specprefill_jax.settings import ROLES, Settings
from tests.qwen_chat import WEATHER, qwen_chat

QWEN = qwen_chat()
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "The code is 4711. The other code is 0815."},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": "Which code is it?"},
]
PROMPT = outline(QWEN, MESSAGES, roles=ROLES)
TEXT = QWEN.render(MESSAGES)
NOTHING = np.zeros(PROMPT.tokens.size, dtype=bool)


def pinned_text(mask: np.ndarray, prompt: Outline = PROMPT) -> list[str]:
    """The texts of runs of pinned tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return [QWEN.decode(prompt.tokens[start:end]) for start, end in edges.reshape(-1, 2)]


def test_without_pins_nothing_is_pinned():
    np.testing.assert_array_equal(pinned_tokens(Pins(), PROMPT), NOTHING)


def test_a_span_of_tokens_is_pinned_as_it_is():
    mask = pinned_tokens(Pins(tokens=((0, 2), (5, 6))), PROMPT)
    assert np.flatnonzero(mask).tolist() == [0, 1, 5]


def test_of_characters_every_token_that_has_one_is_pinned():
    start = TEXT.index("4711") + 1
    mask = pinned_tokens(Pins(characters=((start, start + 2),)), PROMPT)
    assert pinned_text(mask) == ["71"]  # a digit is a token
    middle = TEXT.index("Which") + 2
    mask = pinned_tokens(Pins(characters=((middle, middle + 1),)), PROMPT)
    assert pinned_text(mask)[0] in "Which"
    assert mask.sum() == 1


def test_every_occurrence_of_a_text_is_pinned():
    assert pinned_text(pinned_tokens(Pins(texts=("code is",)), PROMPT)) == [" code is"] * 3


def test_occurrences_that_overlap_are_pinned_together():
    prompt = Outline.of_text(QWEN, "1 2 1 2 1 2")
    assert pinned_text(pinned_tokens(Pins(texts=("1 2 1",)), prompt), prompt) == ["1 2 1 2 1"]


def test_roles_pin_their_spans():
    assert pinned_text(pinned_tokens(Pins(roles=("last_user",)), PROMPT)) == ["Which code is it?"]
    assert pinned_text(pinned_tokens(Pins(roles=("user", "assistant")), PROMPT)) == [
        "The code is 4711. The other code is 0815.",
        "Noted.",
        "Which code is it?",
    ]
    assert not pinned_tokens(Pins(roles=("tool",)), PROMPT).any()


def test_pins_of_every_kind_add_up():
    pins = Pins(tokens=((0, 1),), characters=((0, 1),), texts=("Noted",), roles=("last_user",))
    alone = [
        Pins(tokens=pins.tokens),
        Pins(characters=pins.characters),
        Pins(texts=pins.texts),
        Pins(roles=pins.roles),
    ]
    expected = np.any([pinned_tokens(one, PROMPT) for one in alone], axis=0)
    np.testing.assert_array_equal(pinned_tokens(pins, PROMPT), expected)


def test_by_default_the_system_part_the_tools_and_a_short_last_message_are_pinned():
    prompt = outline(QWEN, MESSAGES, variables={"tools": [WEATHER]}, roles=ROLES)
    system, question = pinned_text(pinned_tokens(Pins(), prompt, Settings().pin_roles), prompt)
    assert "get_weather" in system
    assert system.endswith("Be brief.<|im_end|>\n<|im_start|>user\n")
    assert question == "Which code is it?"


@pytest.mark.parametrize(("tokens", "pinned"), [(LAST_USER_MOST, True), (LAST_USER_MOST + 1, False)])
def test_a_long_last_message_is_pinned_only_when_it_is_named(tokens: int, pinned: bool):
    digits = "7" * tokens  # a token each
    prompt = outline(QWEN, [{"role": "user", "content": digits}], roles=["last_user"])
    by_default = pinned_tokens(Pins(), prompt, ("last_user",))
    assert pinned_text(by_default, prompt) == ([digits] if pinned else [])
    assert pinned_text(pinned_tokens(Pins(roles=("last_user",)), prompt), prompt) == [digits]


def test_a_default_role_that_this_prompt_lacks_pins_nothing():
    raw = Outline.of_text(QWEN, "river")
    assert not pinned_tokens(Pins(), raw, ROLES).any()


@pytest.mark.parametrize("span", [(0, 0), (3, 2), (-1, 2), (0, 1000), (1000, 1001)])
def test_a_span_outside_the_prompt_is_refused_with_its_size(span: tuple[int, int]):
    size = PROMPT.tokens.size
    with pytest.raises(
        PinError, match=rf"^tokens {span[0]} to {span[1]} cannot be pinned; .* ends at {size} or"
    ):
        pinned_tokens(Pins(tokens=(span,)), PROMPT)
    with pytest.raises(PinError, match=rf"^characters {span[0]} to {span[1]} .* ends at {len(TEXT)} or"):
        pinned_tokens(Pins(characters=(span,)), PROMPT)


def test_spans_that_end_with_the_prompt_are_taken():
    size = PROMPT.tokens.size
    assert pinned_tokens(Pins(tokens=((0, size),)), PROMPT).all()
    assert pinned_tokens(Pins(characters=((0, len(TEXT)),)), PROMPT).all()


def test_a_text_that_does_not_occur_is_named_but_not_at_length():
    with pytest.raises(PinError, match=r"^'code was' is pinned, but does not occur"):
        pinned_tokens(Pins(texts=("code is", "code was")), PROMPT)
    with pytest.raises(PinError) as error:
        pinned_tokens(Pins(texts=("x" * 5000,)), PROMPT)
    assert len(str(error.value)) < 200
    with pytest.raises(PinError, match="empty text"):
        pinned_tokens(Pins(texts=("",)), PROMPT)


def test_an_unknown_role_is_refused_with_the_known_ones():
    with pytest.raises(PinError, match="'users' is no role that can be pinned; known are system, tools"):
        pinned_tokens(Pins(roles=("users",)), PROMPT)


def test_a_role_whose_place_is_not_known_is_refused_when_it_is_named():
    with pytest.raises(PinError, match="'last_user' is pinned, but its place in this prompt is not known"):
        pinned_tokens(Pins(roles=("last_user",)), Outline.of_text(QWEN, "river"))


def test_a_prompt_of_tokens_has_no_text_to_pin():
    prompt = Outline.of_tokens(PROMPT.tokens)
    assert pinned_tokens(Pins(tokens=((0, 1),)), prompt).sum() == 1
    for pins in (Pins(texts=("code",)), Pins(characters=((0, 1),))):
        with pytest.raises(PinError, match="given as tokens"):
            pinned_tokens(pins, prompt)
