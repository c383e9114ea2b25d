"""Templates render as transformers renders them, and streamed text is never broken or lost."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.normalizers import NFC
from tokenizers.processors import ByteLevel
from transformers.utils.chat_template_utils import render_jinja_template

from specprefill_jax.chat import Chat, ask_about
from specprefill_jax.errors import ArtifactError, FileMissing, TemplateError
from tests.qwen_chat import TEMPLATE, WEATHER, qwen_chat

DEMO = Path(__file__).parent.parent / "artifacts" / "demo"
TOKENIZER = DEMO / "tokenizer.json"
DEMO_CHAT = Chat.load(TOKENIZER, DEMO / "chat_template.jinja", stop_ids=[2])
HELLO = [{"role": "user", "content": "Hello"}]


def chat_with(template: str, folder: Path) -> Chat:
    path = folder / "template.jinja"
    path.write_text(template)
    return Chat.load(TOKENIZER, path, stop_ids=[2])


# --- the demo pair's template


def test_a_user_turn_is_followed_by_the_opening_of_the_answer() -> None:
    assert DEMO_CHAT.render(HELLO) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_no_answer_is_opened_when_none_is_asked_for() -> None:
    assert DEMO_CHAT.render(HELLO, add_generation_prompt=False) == "<|im_start|>user\nHello<|im_end|>\n"


def test_a_prefix_begins_the_answer() -> None:
    assert DEMO_CHAT.render(HELLO, prefix="The code is").endswith("<|im_start|>assistant\nThe code is")


def test_a_conversation_renders_turn_by_turn() -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": " A\n"}, {"type": "text", "text": "B "}]},
        {"role": "assistant", "content": "C"},
    ]
    assert DEMO_CHAT.render(turns, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n A\nB <|im_end|>\n"
        "<|im_start|>assistant\nC<|im_end|>\n"
    )


def test_a_question_stands_a_blank_line_below_its_text() -> None:
    assert ask_about(" text\n\n", "Why?") == " text\n\nWhy?"
    assert ask_about("\ntext", "Why?") == "\ntext\n\nWhy?"


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "at least one message"),
        ([{"role": "tool", "content": "x"}], "unexpected message role: tool"),
        ([{"role": "user", "content": [{"type": "image"}]}], "unexpected content part: image"),
        ([{"role": "user", "content": None}], "cannot render"),
    ],
)
def test_messages_that_the_template_refuses_are_named(messages: list[dict], complaint: str) -> None:
    with pytest.raises(TemplateError, match=complaint):
        DEMO_CHAT.render(messages)


def test_a_prefix_without_an_answer_to_begin_is_refused() -> None:
    with pytest.raises(TemplateError, match="opens no answer"):
        DEMO_CHAT.render(HELLO, add_generation_prompt=False, prefix="x")


# --- Qwen3.5's template


STEPS = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": [{"type": "text", "text": " Rain in Sobe?"}]},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Ask.",
        "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Sobe", "days": [1, 2]}}}],
    },
    {"role": "tool", "content": "Rain."},
    {"role": "tool", "content": "More rain."},
]
CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nSobe\n</parameter>\n<parameter=days>\n[1, 2]\n"
    "</parameter>\n</function>\n</tool_call><|im_end|>\n"
)
RESPONSES = (
    "<|im_start|>user\n<tool_response>\nRain.\n</tool_response>\n"
    "<tool_response>\nMore rain.\n</tool_response><|im_end|>\n"
)
ASKED = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nRain in Sobe?<|im_end|>\n"


@pytest.mark.parametrize(
    ("variables", "opening"),
    [
        ({}, "<think>\n"),
        ({"enable_thinking": True}, "<think>\n"),
        ({"enable_thinking": False}, "<think>\n\n</think>\n\n"),
    ],
)
def test_qwen_thinks_unless_told_not_to(variables: dict[str, object], opening: str) -> None:
    assert qwen_chat().render(STEPS[:2], variables=variables) == f"{ASKED}<|im_start|>assistant\n{opening}"


def test_qwen_sees_the_calls_the_thoughts_and_the_answers_of_tools_of_this_turn() -> None:
    assert qwen_chat().render(STEPS) == (
        f"{ASKED}<|im_start|>assistant\n<think>\nAsk.\n</think>\n\n{CALL}{RESPONSES}"
        "<|im_start|>assistant\n<think>\n"
    )


def test_qwen_forgets_the_thoughts_of_earlier_turns() -> None:
    text = qwen_chat().render(
        [*STEPS, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Oh."}]
    )
    assert text == (
        f"{ASKED}<|im_start|>assistant\n{CALL}{RESPONSES}<|im_start|>assistant\nYes.<|im_end|>\n"
        "<|im_start|>user\nOh.<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


def test_qwen_reads_tool_definitions_before_the_system_message() -> None:
    text = qwen_chat().render(STEPS[:2], variables={"tools": [WEATHER]})
    head, _, rest = text.partition("\n</tools>")
    assert head.endswith(f"<tools>\n{json.dumps(WEATHER)}")
    assert rest.partition("</IMPORTANT>")[2].startswith("\n\nBe brief.<|im_end|>\n<|im_start|>user\n")


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("tools", [None, [WEATHER]])
def test_qwen_is_rendered_as_by_transformers(thinking: bool, tools: list[Any] | None) -> None:
    variables = {"enable_thinking": thinking, "tools": tools}
    (reference,), _ = render_jinja_template(
        [STEPS],
        tools,
        chat_template=TEMPLATE.read_text(),
        add_generation_prompt=True,
        enable_thinking=thinking,
    )
    assert qwen_chat().render(STEPS, variables=variables) == reference


# --- the rules templates are written for


def test_blocks_take_their_own_lines_away(tmp_path: Path) -> None:
    template = "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\nend"
    assert chat_with(template, tmp_path).render(HELLO) == "Hello\nend"


def test_loops_can_be_left(tmp_path: Path) -> None:
    template = "{% for n in [1, 2, 3] %}{% if n == 3 %}{% break %}{% endif %}{{ n }}{% endfor %}"
    assert chat_with(template, tmp_path).render(HELLO) == "12"


def test_json_keeps_markup_and_letters_as_they_are(tmp_path: Path) -> None:
    template = "{{ {'b': '<é>', 'a': 1} | tojson }}"
    assert chat_with(template, tmp_path).render(HELLO) == '{"b": "<é>", "a": 1}'


def test_a_template_reads_the_date(tmp_path: Path) -> None:
    year = chat_with("{{ strftime_now('%Y') }}", tmp_path).render(HELLO)
    assert year.isdigit()
    assert len(year) == 4


def test_a_template_reads_variables_and_knows_tools_when_there_are_none(tmp_path: Path) -> None:
    chat = chat_with("{{ tools is none }} {{ enable_thinking }}", tmp_path)
    assert chat.render(HELLO, variables={"enable_thinking": False}) == "True False"


def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="unsafe"):
        chat_with("{{ ''.__class__.__mro__ }}", tmp_path).render(HELLO)
    with pytest.raises(TemplateError, match="unsafe"):
        chat_with("{{ messages.append(1) }}", tmp_path).render(HELLO)


def test_a_template_with_a_fault_is_refused_when_loaded(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="not a valid chat template"):
        chat_with("{% for m in messages %}", tmp_path)


def test_without_a_template_the_way_out_is_named() -> None:
    with pytest.raises(TemplateError, match="--raw"):
        Chat.load(TOKENIZER, None, stop_ids=[2]).render(HELLO)


# --- loading


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileMissing, match=r"nowhere\.json does not exist"):
        Chat.load(tmp_path / "nowhere.json", None, stop_ids=[])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": 1}', "\x00"])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(ArtifactError, match="is not a tokenizer"):
        Chat.load(path, None, stop_ids=[])


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(TOKENIZER.read_text()) | {"decoder": {"type": "Fuse"}}))
    with pytest.raises(ArtifactError, match="decodes by Fuse"):
        Chat.load(path, None, stop_ids=[])


def test_a_stop_id_that_stands_for_no_token_is_refused() -> None:
    with pytest.raises(ArtifactError, match=r"stop ids \[1664\] .* end at 1663"):
        Chat.load(TOKENIZER, None, stop_ids=[2, 1664])


def test_the_demo_tokenizer_has_its_control_tokens_and_size() -> None:
    assert DEMO_CHAT.special_ids == {0, 1, 2}
    assert DEMO_CHAT.stop_ids == {2}
    assert DEMO_CHAT.vocabulary == 1664


def test_a_tokenizer_files_own_truncation_and_padding_are_switched_off(tmp_path: Path) -> None:
    codec = Tokenizer.from_file(str(TOKENIZER))
    codec.enable_truncation(2)
    codec.enable_padding(length=8)
    codec.save(str(tmp_path / "tokenizer.json"))
    chat = Chat.load(tmp_path / "tokenizer.json", None, stop_ids=[])
    assert chat.encode("The old river.").tolist() == DEMO_CHAT.encode("The old river.").tolist()


# --- tokens


def test_control_tokens_in_a_text_become_their_ids_and_none_are_added() -> None:
    ids = DEMO_CHAT.encode("<|im_start|>user\n")
    assert ids.dtype == np.int32
    assert ids[0] == 1
    assert (ids > 2).sum() == len(ids) - 1
    assert DEMO_CHAT.decode(ids) == "<|im_start|>user\n"
    assert DEMO_CHAT.decode(ids, keep_special=False) == "user\n"


def test_an_empty_text_has_no_tokens() -> None:
    assert DEMO_CHAT.encode("").shape == (0,)


@given(st.text())
def test_any_text_comes_back_from_its_tokens(text: str) -> None:
    assert DEMO_CHAT.decode(DEMO_CHAT.encode(text)) == text


@pytest.mark.parametrize("normalizer", [None, NFC()], ids=["as_written", "nfc"])
@given(st.text())
@settings(deadline=None)
def test_offsets_of_tokens_cover_the_text_in_order(normalizer: NFC | None, text: str) -> None:
    chat = Chat.load(TOKENIZER, None, stop_ids=[2])
    chat.tokenizer.normalizer = normalizer
    ids, offsets = chat.encode_with_offsets(text)
    assert ids.tolist() == chat.encode(text).tolist()
    assert offsets.shape == (ids.size, 2)
    starts, ends = offsets.T
    assert (starts < ends).all()
    assert (np.diff(starts) >= 0).all()
    assert (np.diff(ends) >= 0).all()
    assert (starts[1:] <= ends[:-1]).all()
    if text:
        assert (starts[0], ends[-1]) == (0, len(text))


def test_offsets_count_characters_and_tokens_of_one_character_share_it() -> None:
    assert DEMO_CHAT.encode_with_offsets("<|im_end|>😀")[1].tolist() == [[0, 10], *[[10, 11]] * 4]


def test_a_tokenizer_file_that_trims_offsets_does_not_leave_spaces_out(tmp_path: Path) -> None:
    codec = Tokenizer.from_file(str(TOKENIZER))
    codec.post_processor = ByteLevel(trim_offsets=True)
    codec.save(str(tmp_path / "tokenizer.json"))
    chat = Chat.load(tmp_path / "tokenizer.json", None, stop_ids=[])
    for mine, plain in zip(
        chat.encode_with_offsets("The old \n 0"), DEMO_CHAT.encode_with_offsets("The old \n 0"), strict=True
    ):
        np.testing.assert_array_equal(mine, plain)


# --- where lines and sentences end


def ends(text: str, chat: Chat = DEMO_CHAT) -> list[tuple[str, int]]:
    """The text, cut behind each token that ends a line (2) or a sentence (1)."""
    found, since = [], 0
    tokens = chat.encode(text)
    for place, kind in enumerate(chat.borders(tokens).tolist(), start=1):
        if kind:
            found.append((chat.decode(tokens[since:place]), kind))
            since = place
    return [*found, (chat.decode(tokens[since:]), 0)] if since < tokens.size else found


def test_sentences_and_lines_end_where_they_do() -> None:
    assert ends("It rains. Does it? Yes!\nNo") == [
        ("It rains.", 1),
        (" Does it?", 1),
        (" Yes!", 1),
        ("\n", 2),
        ("No", 0),
    ]


def test_the_point_of_a_number_a_name_or_an_address_ends_no_sentence() -> None:
    text = "Pi is 3.14 in a.py at x.org/y?q=1, v2.0.1"
    assert ends(text) == [(text, 0)]
    assert ends("It is 3. So")[0] == ("It is 3.", 1)


def test_the_last_token_may_end_a_sentence() -> None:
    assert ends("It rains.") == [("It rains.", 1)]


def test_what_closes_a_quotation_belongs_to_its_sentence() -> None:
    assert ends('"It rains." (So it does.) **Yes!** \u201cNo.\u201d') == [
        ('"It rains."', 1),
        (" (So it does.)", 1),
        (" **Yes!**", 1),
        (" \u201cNo.\u201d", 1),
    ]


def test_chinese_and_japanese_sentences_need_no_space_and_many_tokens_make_one_sign() -> None:
    assert DEMO_CHAT.encode("。").size == 3
    assert ends("今天下雨。明天呢？「晴。」好") == [  # noqa: RUF001
        ("今天下雨。", 1),
        ("明天呢？", 1),  # noqa: RUF001
        ("「晴。」", 1),
        ("好", 0),
    ]


def test_lines_of_code_end_and_blank_ones_below_go_with_them() -> None:
    assert ends("if (x) {\r\n  f(a.b);\n}\n\n  \n\ny = 1") == [
        ("if (x) {\r\n", 2),
        ("  f(a.b);\n", 2),
        ("}\n\n  \n\n", 2),
        ("y = 1", 0),
    ]


def test_ids_that_stand_for_nothing_end_nothing() -> None:
    assert DEMO_CHAT.borders(np.array([1664, 10**6], dtype=np.int32)).tolist() == [0, 0]
    assert DEMO_CHAT.borders(np.array([], dtype=np.int32)).size == 0


@given(st.text(alphabet='a1 .!?。"\n\r\t)'))
def test_every_border_is_the_end_of_a_line_or_a_sentence(text: str) -> None:
    tokens = DEMO_CHAT.encode(text)
    borders = DEMO_CHAT.borders(tokens)
    for place, kind in enumerate(borders.tolist(), start=1):
        before, behind = DEMO_CHAT.decode(tokens[:place]), DEMO_CHAT.decode(tokens[place:])
        stripped = before.rstrip('")')
        if before.endswith(("\n", "\r")):
            assert kind == (0 if behind.lstrip(" \t").startswith(("\n", "\r")) else 2)
        elif stripped.endswith("。"):
            goes_on = ("。", '"', ")") if before.endswith("。") else ('"', ")")
            assert kind == (0 if behind.startswith(goes_on) else 1)
        elif stripped.endswith((".", "!", "?")):
            assert kind == (1 if not behind or behind[0] in " \n\r\t" else 0)
        else:
            assert kind == 0


# --- streaming


def test_a_character_of_four_tokens_appears_when_it_is_whole() -> None:
    ids = DEMO_CHAT.encode("😀").tolist()
    assert len(ids) == 4
    stream = DEMO_CHAT.detokenizer()
    assert [stream.push(token) for token in ids] == ["", "", "", "😀"]
    assert stream.flush() == ""


def test_half_a_character_at_the_end_is_not_lost() -> None:
    stream = DEMO_CHAT.detokenizer()
    assert [stream.push(token) for token in DEMO_CHAT.encode("a😀").tolist()[:3]] == ["a", "", ""]
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_half_a_character_in_the_middle_does_not_swallow_what_follows() -> None:
    broken = [DEMO_CHAT.encode("😀").tolist()[0], *DEMO_CHAT.encode("ok").tolist()]
    stream = DEMO_CHAT.detokenizer()
    assert "".join(stream.push(token) for token in broken) + stream.flush() == "\ufffdok"


def test_ids_beyond_the_vocabulary_stand_for_nothing() -> None:
    stream = DEMO_CHAT.detokenizer()
    assert stream.push(1664) == ""
    assert stream.push(10**6) == ""
    assert stream.flush() == ""


def test_control_tokens_can_be_hidden_from_a_stream() -> None:
    ids = DEMO_CHAT.encode("<|im_start|>user\n").tolist()
    hidden, shown = DEMO_CHAT.detokenizer(keep_special=False), DEMO_CHAT.detokenizer()
    assert "".join(map(hidden.push, ids)) == "user\n"
    assert "".join(map(shown.push, ids)) == "<|im_start|>user\n"


@given(st.lists(st.integers(0, 1700), max_size=40), st.booleans())
def test_streamed_pieces_join_to_what_decoding_at_once_gives(ids: list[int], keep_special: bool) -> None:
    stream = DEMO_CHAT.detokenizer(keep_special=keep_special)
    pieces = [stream.push(token) for token in ids] + [stream.flush()]
    assert "".join(pieces) == DEMO_CHAT.decode(ids, keep_special=keep_special)


@given(st.text(min_size=1))
def test_streaming_a_text_never_shows_a_broken_character(text: str) -> None:
    stream = DEMO_CHAT.detokenizer()
    shown = ""
    for token in DEMO_CHAT.encode(text).tolist():
        shown += stream.push(token)
        assert text.startswith(shown)
    assert shown + stream.flush() == text
