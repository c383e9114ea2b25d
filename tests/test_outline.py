"""Outlines: where the parts of a rendered conversation are, whatever the template."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specprefill_jax.chat import Chat, Message
from specprefill_jax.errors import PinError, TemplateError
from specprefill_jax.outline import Outline, Span, outline, tokens_before, tokens_over
from specprefill_jax.settings import ROLES
from tests.qwen_chat import TOKENIZER, WEATHER, qwen_chat

QWEN = qwen_chat()
SYSTEM = {"role": "system", "content": "Answer in one word."}
TOOLS = {"tools": [WEATHER]}


def said(role: str, content: object, **more: object) -> Message:
    return {"role": role, "content": content, **more}


QUESTIONS = ("What swims in the river?", "And in the lake?", "In the sea?")
ANSWERS = ("Fish.", "Frogs.")


def turn(last: int, *, system: bool = True, question: str | None = None) -> list[Message]:
    """A conversation up to the user message of turn `last`, with what was thought in turns before."""
    messages: list[Message] = [SYSTEM] if system else []
    for index in range(last):
        messages.append(said("user", QUESTIONS[index]))
        messages.append(said("assistant", ANSWERS[index], reasoning_content="What could it be?"))
    return [*messages, said("user", question or QUESTIONS[last])]


def begins(prompt: Outline) -> list[str]:
    """The text before each boundary."""
    assert prompt.text is not None
    return [prompt.text[: prompt.offsets[count, 0]] for count in prompt.boundaries]


def texts(prompt: Outline, role: str) -> list[str]:
    """The text of each span of a role."""
    assert prompt.text is not None
    offsets = prompt.offsets
    return [prompt.text[offsets[start, 0] : offsets[end - 1, 1]] for start, end in prompt.spans[role]]


def chat_with(template: str, folder: Path) -> Chat:
    path = folder / "template.jinja"
    path.write_text(template)
    return Chat.load(TOKENIZER, path, stop_ids=[2])


def starts_with(tokens: np.ndarray, first: np.ndarray) -> bool:
    return tokens[: first.size].tolist() == first.tolist()


# --- Qwen3.5's template: what a conversation can continue from

EVERY_WAY = pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "no_thinking"])
EVERY_OPENING = pytest.mark.parametrize(
    ("system", "tools"),
    [(True, True), (True, False), (False, True), (False, False)],
    ids=["system_and_tools", "system", "tools", "neither"],
)


def variables(thinking: bool, tools: bool) -> dict[str, Any]:
    return {"enable_thinking": thinking} | (TOOLS if tools else {})


@EVERY_WAY
@EVERY_OPENING
def test_the_next_turn_begins_with_all_up_to_the_last_user_message(thinking: bool, system: bool, tools: bool):
    known = variables(thinking, tools)
    turns = [outline(QWEN, turn(last, system=system), variables=known) for last in range(3)]
    for now, following in pairwise(turns):
        boundary = now.boundaries[-1]
        assert begins(now)[-1].endswith("?<|im_end|>\n")
        assert starts_with(following.tokens, now.tokens[:boundary])
        # What follows it, the opening of the answer with its think block, is not rendered again.
        assert not starts_with(following.tokens, now.tokens)


@EVERY_WAY
@EVERY_OPENING
def test_the_first_boundary_is_shared_with_every_conversation_of_the_same_system_part(
    thinking: bool, system: bool, tools: bool
):
    known = variables(thinking, tools)
    here = outline(QWEN, turn(2, system=system), variables=known)
    for question in ("Why?", "\n\nWhy?", "<tool_response>", "\ufffd", "What?"):
        there = outline(QWEN, turn(0, system=system, question=question), variables=known)
        assert there.boundaries[0] == here.boundaries[0]
        assert starts_with(there.tokens, here.tokens[: here.boundaries[0]])
    assert begins(here)[0].endswith("<|im_start|>user\n")
    assert ("Answer in one word." in begins(here)[0]) is system
    assert ("get_weather" in begins(here)[0]) is tools


def test_another_system_part_shares_no_boundary():
    here, there = (
        outline(QWEN, [said("system", content), *turn(0, system=False)]) for content in ("One.", "Two.")
    )
    assert not starts_with(there.tokens, here.tokens[: here.boundaries[0]])


def called(city: str, thought: str) -> list[Message]:
    """One step with a tool: the call and what the tool said."""
    call = {"function": {"name": "get_weather", "arguments": {"city": city}}}
    return [
        said("assistant", "", tool_calls=[call], reasoning_content=thought),
        said("tool", f"Rain in {city}."),
    ]


def test_of_a_turn_with_tools_the_next_one_keeps_all_up_to_its_user_message():
    asked = [SYSTEM, said("user", "Where does it rain?")]
    steps = [asked, [*asked, *called("Sobe", "Try Sobe.")]]
    steps.append([*steps[1], *called("Golaga", "And there.")])
    outlines = [outline(QWEN, messages, variables=TOOLS) for messages in steps]
    question = outlines[0].boundaries[-1]
    for step, step_outline in enumerate(outlines):
        expected = [step_outline.boundaries[0], question]
        assert list(step_outline.boundaries[:2]) == expected
        assert len(step_outline.boundaries) == (2 if step == 0 else 3)
    # Within the turn thoughts stay, so each step goes on from the end of the one before.
    assert starts_with(outlines[2].tokens, outlines[1].tokens[: outlines[1].boundaries[-1]])
    # With the next user message they go, so that of the turn's steps nothing can be continued.
    after = [*steps[2], said("assistant", "In both."), said("user", "Thanks.")]
    following = outline(QWEN, after, variables=TOOLS)
    assert starts_with(following.tokens, outlines[2].tokens[:question])
    assert not starts_with(following.tokens, outlines[2].tokens[: outlines[2].boundaries[-1]])


# --- Qwen3.5's template: spans


def test_spans_are_contents_without_what_the_template_puts_around_them():
    messages = [SYSTEM, said("user", "  One?\n"), said("assistant", "Yes."), said("user", "Two?")]
    prompt = outline(QWEN, [*messages, *called("Sobe", "Hm.")], variables=TOOLS, roles=ROLES)
    assert texts(prompt, "user") == ["One?", "Two?"]
    assert texts(prompt, "last_user") == ["Two?"]
    assert texts(prompt, "assistant") == ["Yes."]  # the call has no content
    assert texts(prompt, "tool") == ["Rain in Sobe."]
    assert prompt.spans["system"] == prompt.spans["tools"] == (Span(0, prompt.boundaries[0]),)


def test_a_role_that_the_conversation_lacks_has_no_spans():
    prompt = outline(QWEN, [said("user", "One?")], roles=ROLES)
    assert prompt.spans["tools"] == prompt.spans["assistant"] == prompt.spans["tool"] == ()
    assert outline(QWEN, [SYSTEM, said("user", "One?")], variables={"tools": []}, roles=["tools"]).spans == {
        "tools": ()
    }


def test_only_spans_that_were_asked_for_are_there():
    assert set(outline(QWEN, turn(1), roles=["user"]).spans) == {"user"}
    assert outline(QWEN, turn(1)).spans == {}


def test_a_content_of_several_parts_is_one_span():
    parts = [{"type": "text", "text": "One "}, {"type": "text", "text": "two?"}]
    assert texts(outline(QWEN, [said("user", parts)], roles=["user"]), "user") == ["One two?"]


def test_a_thought_written_into_the_content_is_no_part_of_its_span():
    messages = [*turn(0), said("assistant", "<think>\nHm.\n</think>\n\nFish."), said("user", "Sure?")]
    assert texts(outline(QWEN, messages, roles=["assistant"]), "assistant") == ["Fish."]


@given(st.text())
@settings(deadline=None)
def test_whatever_the_user_writes_its_span_holds_exactly_its_tokens(content: str):
    prompt = outline(QWEN, [said("user", content)], roles=["user"])
    first = len("<|im_start|>user\n")
    last = first + len(content.strip())
    inside = [i for i, (start, end) in enumerate(prompt.offsets) if start < last and end > first]
    assert [i for span in prompt.spans["user"] for i in range(*span)] == inside


def test_a_prefix_belongs_to_the_prompt_and_moves_nothing():
    plain, begun = (outline(QWEN, turn(1), prefix=prefix, roles=ROLES) for prefix in ("", "Fi"))
    assert begun.text == f"{plain.text}Fi"
    assert begun.boundaries == plain.boundaries
    assert begun.spans == plain.spans
    assert starts_with(begun.tokens, plain.tokens)


@pytest.mark.parametrize(
    ("messages", "opening"),
    [
        (turn(1), "<|im_end|>\n<|im_start|>assistant\n<think>\nFi"),
        (
            [*turn(0), *called("Sobe", "")],
            "\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\nFi",
        ),
    ],
    ids=["user", "tool"],
)
def test_behind_the_last_content_comes_what_closes_its_message_and_opens_the_answer(
    messages: list[Message], opening: str
):
    prompt = outline(QWEN, messages, prefix="Fi")
    assert QWEN.decode(prompt.tokens[prompt.opening :]) == opening


def test_the_tokens_are_those_of_the_text():
    prompt = outline(QWEN, turn(2), variables=TOOLS)
    text = QWEN.render(turn(2), variables=TOOLS)
    assert prompt.text == text
    assert prompt.tokens.tolist() == QWEN.encode(text).tolist()


@pytest.mark.parametrize(
    ("messages", "roles", "renderings"),
    [
        (turn(2), (), 4),
        (turn(2), ("system", "tools", "last_user"), 4),
        (turn(2), ("user", "last_user"), 6),
        ([*turn(0), *called("Sobe", "")], ("last_user",), 6),
        ([said("user", "long " * 8000)], ("system", "tools", "last_user"), 4),
    ],
)
def test_an_outline_costs_few_renderings_and_one_encoding(
    messages: list[Message],
    roles: tuple[str, ...],
    renderings: int,
    monkeypatch: pytest.MonkeyPatch,
):
    calls: list[str] = []

    def counted(name: str) -> None:
        original = getattr(Chat, name)
        monkeypatch.setattr(
            Chat, name, lambda *args, **kwargs: calls.append(name) or original(*args, **kwargs)
        )

    for name in ("render", "encode", "encode_with_offsets"):
        counted(name)
    outline(QWEN, messages, roles=roles)
    assert calls.count("render") == renderings
    assert calls.count("encode") + calls.count("encode_with_offsets") == 1


# --- other templates


def test_a_boundary_inside_a_token_moves_back_to_its_start(tmp_path: Path):
    # The space before the content is the first letter of " river".
    chat = chat_with("Q:{% for m in messages %} {{ m.content }}{% endfor %} A:", tmp_path)
    prompt = outline(chat, [said("user", "river")])
    assert begins(prompt) == ["Q:"]


def test_a_template_without_a_system_part_has_no_boundary_there(tmp_path: Path):
    chat = chat_with("{% for m in messages %}{{ m.content }}\n{% endfor %}", tmp_path)
    prompt = outline(chat, [said("user", "river")], roles=["system", "tools"])
    assert prompt.boundaries == ()
    assert prompt.spans == {"system": (), "tools": ()}


def test_a_template_that_puts_tools_later_hides_them_rather_than_misplacing_them(tmp_path: Path):
    chat = chat_with(
        "{% for m in messages %}{% if loop.last and tools %}{{ tools | tojson }}{% endif %}"
        "<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
        tmp_path,
    )
    many = outline(chat, turn(1, system=False), variables=TOOLS, roles=["system", "tools", "user"])
    assert set(many.spans) == {"user"}
    one = outline(chat, turn(0, system=False), variables=TOOLS, roles=["system", "tools"])
    assert texts(one, "tools") == ['[{"type": "function", ' + texts(one, "tools")[0][22:]]
    assert texts(one, "tools")[0].endswith("<|im_start|>")


def test_a_template_that_refuses_parts_of_a_conversation_gives_no_boundary(tmp_path: Path):
    chat = chat_with(
        "{% if not add_generation_prompt or messages | length < 2 %}{{ raise_exception('no') }}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}",
        tmp_path,
    )
    prompt = outline(chat, [SYSTEM, said("user", "river")], roles=["system", "user"])
    assert prompt.boundaries == ()
    assert "system" not in prompt.spans
    assert texts(prompt, "user") == ["river"]


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }} and again: {{ messages[0].content }}",
        "{{ messages[0].content | length }} {{ messages[0].content }}.",
        "{% if messages[0].content != 'river' %}{{ raise_exception('no') }}{% endif %}river",
        "never said",
    ],
    ids=["said_twice", "more_than_the_content_changes", "refused", "left_out"],
)
def test_a_content_that_cannot_be_placed_is_hidden(template: str, tmp_path: Path):
    prompt = outline(chat_with(template, tmp_path), [said("user", "river")], roles=["user"])
    assert prompt.spans == {}
    assert prompt.opening == prompt.tokens.size


def test_a_content_that_the_template_rewrites_is_placed_where_it_was_rewritten(tmp_path: Path):
    chat = chat_with("<|im_start|>{{ messages[0].content | tojson }}<|im_end|>", tmp_path)
    assert texts(outline(chat, [said("user", 'a "b"')], roles=["user"]), "user") == [r"a \"b\""]


def test_a_template_that_reads_only_lists_of_parts_is_asked_with_lists(tmp_path: Path):
    chat = chat_with("Q:\n{% for m in messages %}{{ m.content[0]['text'] }}\nA:{% endfor %}", tmp_path)
    prompt = outline(chat, [said("user", [{"type": "text", "text": "river"}])], roles=["user"])
    assert texts(prompt, "user") == ["river"]
    assert begins(prompt) == ["Q:\n"]


def test_a_letter_that_looks_like_the_mark_does_no_harm():
    content = "\ue000 river \ue001"
    assert texts(outline(QWEN, [said("user", content)], roles=["user"]), "user") == [content]


# --- refusals and other prompts


def test_messages_that_the_template_refuses_are_refused():
    with pytest.raises(TemplateError, match="No user query found"):
        outline(QWEN, [SYSTEM])


def test_an_unknown_role_is_refused_with_the_known_ones():
    with pytest.raises(
        PinError, match=r"^'developer' is no role .* system, tools, last_user, user, assistant, "
    ):
        outline(QWEN, turn(0), roles=["user", "developer"])


def test_of_a_raw_text_only_its_tokens_are_known():
    prompt = Outline.of_text(QWEN, "<|im_start|>river")
    assert prompt.tokens.tolist() == QWEN.encode("<|im_start|>river").tolist()
    assert prompt.offsets[0].tolist() == [0, 12]
    assert (prompt.boundaries, prompt.spans) == ((), {})


@given(st.text(min_size=1), st.data())
@settings(deadline=None)
def test_tokens_over_characters_are_those_that_overlap_them(text: str, data: st.DataObject):
    _, offsets = QWEN.encode_with_offsets(text)
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start + 1, len(text)))
    overlapping = [i for i, (first, last) in enumerate(offsets) if first < end and last > start]
    assert list(range(*tokens_over(offsets, Span(start, end)))) == overlapping
    assert tokens_before(offsets, start) == sum(bool(last <= start) for _, last in offsets)
