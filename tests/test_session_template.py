"""Conversations through Qwen3.5's own chat template, which renders history anew at every turn."""

import dataclasses
from typing import Any

import pytest

from specprefill_jax.chat import Message
from specprefill_jax.engine import Engine
from specprefill_jax.session import Session
from specprefill_jax.settings import Settings
from tests.engine.fake import Fake, make
from tests.qwen_chat import WEATHER, qwen_chat

QWEN = qwen_chat()
DOCUMENT = "one two three four five six seven eight nine ten " * 30
SPARSE = Settings(mode="sparse", max_tokens=5, select_mode="chunk", keep=0.3)
# Room for tool definitions, which take the most of what is kept of this prompt.
HALF = dataclasses.replace(SPARSE, keep=0.7)
SYSTEM: Message = {"role": "system", "content": "Answer in one word."}


def qwen(fake: Fake) -> Engine:
    return Engine(fake.engine.artifact, QWEN, fake.draft, fake.target)


def user(turn: int, text: str = DOCUMENT) -> Message:
    return {"role": "user", "content": f"{text} And {turn}?"}


@pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "no_thinking"])
@pytest.mark.parametrize("tools", [True, False], ids=["tools", "no_tools"])
def test_three_turns_read_the_answer_the_templates_tokens_and_the_new_message(thinking: bool, tools: bool):
    fake = make()
    engine = qwen(fake)
    session = Session(engine)
    variables: dict[str, Any] = {"enable_thinking": thinking} | ({"tools": [WEATHER]} if tools else {})
    messages: list[Message] = [SYSTEM]
    known = 0
    for turn in range(3):
        messages = [*messages, user(turn)]
        fake.draft.calls.clear()
        result = session.generate(messages, HALF, variables=variables)
        tokens = engine.encode(messages, variables=variables)
        read = [position for _, positions in fake.draft.of("prefill") for position in positions]
        # What was the opening of an answer at the turn before is none now, so it is read as it is shown now.
        assert read == list(range(known, tokens.size))
        assert result.timings.draft_read == tokens.size - known
        assert result.timings.reused == known
        assert result.timings.status == "active"
        assert result.tokens == engine.answer_from(tokens, result.kept, HALF).tokens
        opening = QWEN.render(messages, variables=variables)
        without = QWEN.render(messages, variables=variables, add_generation_prompt=False)
        assert opening.startswith(without)
        known = QWEN.encode(without).size
        messages = [*messages, {"role": "assistant", "content": result.text, "reasoning_content": "Hm."}]


def test_a_new_conversation_goes_on_from_the_system_part_and_the_tools():
    fake = make()
    engine = qwen(fake)
    session = Session(engine)
    variables = {"tools": [WEATHER]}
    session.generate([SYSTEM, user(0)], HALF, variables=variables)
    fake.draft.calls.clear()
    other: list[Message] = [SYSTEM, user(1, DOCUMENT[::-1])]
    result = session.generate(other, HALF, variables=variables)
    shared = QWEN.render([SYSTEM, {"role": "user", "content": "@"}], variables=variables).partition("@")[0]
    assert result.timings.reused == QWEN.encode(shared).size
    tokens = engine.encode(other, variables=variables)
    assert result.timings.draft_read == tokens.size - result.timings.reused
    assert result.tokens == engine.answer_from(tokens, result.kept, HALF).tokens


def test_an_edited_message_falls_back_to_the_turn_before_it():
    fake = make()
    engine = qwen(fake)
    session = Session(engine)
    first: list[Message] = [SYSTEM, user(0)]
    answer: Message = {"role": "assistant", "content": session.generate(first, SPARSE).text}
    session.generate([*first, answer, user(1)], SPARSE)
    edited = [*first, answer, user(2, "Something else.")]
    result = session.generate(edited, SPARSE)
    before = QWEN.render(first, add_generation_prompt=False)
    assert result.timings.reused == QWEN.encode(before).size
    tokens = engine.encode(edited)
    assert result.tokens == engine.answer_from(tokens, result.kept, SPARSE).tokens


def test_the_secret_word_of_the_system_message_is_read_in_every_turn():
    """The prefix that is not read again is still there: the target has it in its cache."""
    fake = make()
    engine = qwen(fake)
    session = Session(engine)
    messages: list[Message] = [{"role": "system", "content": "The secret word is plover."}]
    for turn in range(3):
        messages = [*messages, user(turn)]
        result = session.generate(messages, dataclasses.replace(SPARSE, keep=0.2))
        kept = QWEN.decode(engine.encode(messages)[result.kept])
        assert "The secret word is plover." in kept
        messages = [*messages, {"role": "assistant", "content": result.text}]
