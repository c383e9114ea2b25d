"""What was reported of other implementations (docs/field-reports.md), on models whose calls are recorded."""

import dataclasses
import gc
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jaxtyping import Int

from specprefill_jax.artifact.calibration import Calibration
from specprefill_jax.chat import Chat, Message
from specprefill_jax.engine import Engine
from specprefill_jax.errors import PromptTooLong, SettingError
from specprefill_jax.policy import Status
from specprefill_jax.runtime.state import State
from specprefill_jax.session import Session
from specprefill_jax.settings import Head, Settings, knobs
from tests.engine.fake import BLOCK, NEEDLE, Fake, FakeProgram, FakeState, make, prompt
from tests.qwen_chat import TOKENIZER, WEATHER, qwen_chat

QWEN = qwen_chat()
TOKENS = prompt(320, needle_at=130)
SPARSE = Settings(mode="sparse", max_tokens=3, keep=0.3)
DENSE = Settings(mode="dense", max_tokens=3)
AUTO = Settings(max_tokens=3, break_even=False)
TOOLS: Mapping[str, object] = {"tools": [WEATHER]}
SECRET = 1500

SYSTEM: Message = {"role": "system", "content": "Answer in one word."}


def chatting(chat: Chat = QWEN, **made: Any) -> Fake:
    """An engine that reads conversations as Qwen3.5 does, or by another template."""
    fake = make(**made)
    return dataclasses.replace(fake, engine=Engine(fake.engine.artifact, chat, fake.draft, fake.target))


def hidden_tools(folder: Path) -> Chat:
    """A template that puts the tools before the last message."""
    path = folder / "template.jinja"
    path.write_text(
        "{% for m in messages %}{% if loop.last and tools %}{{ tools | tojson }}{% endif %}"
        "<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    )
    return Chat.load(TOKENIZER, path, stop_ids=[2])


def asked(words: int, word: str = "river") -> Message:
    return {"role": "user", "content": f"{word} " * words}


def called(tokens: int) -> list[Message]:
    """A tool's call, and its answer of so many tokens."""
    call = {"function": {"name": "get_weather", "arguments": {"city": "Sobe"}}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": " r" * tokens},
    ]


def starts(program: FakeProgram) -> list[int]:
    """The first position of each prefill."""
    return [positions[0] for _, positions in program.of("prefill")]


# --- tools, system part, the end of the prompt


def test_what_closes_a_tools_answer_and_opens_the_reply_is_kept_at_every_length():
    ending = QWEN.encode("\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n").size
    lengths = set()
    for tokens in range(300, 332):
        messages = [asked(400), *called(tokens)]
        result = chatting().engine.generate(messages, dataclasses.replace(SPARSE, boost_last_mult=1))
        size = result.timings.prompt
        lengths.add(size % 32)
        assert result.timings.status == "active"
        assert result.kept[-ending:].tolist() == list(range(size - ending, size))
        assert result.kept.size <= -(-3 * size // 10)
    assert len(lengths) == 32


def test_tool_definitions_and_the_system_part_are_read_whole_and_the_rest_sparsely():
    fake = chatting()
    messages = [SYSTEM, asked(3000)]
    result = fake.engine.generate(messages, SPARSE, variables=TOOLS)
    rendered = QWEN.render(messages, variables=TOOLS)
    definitions = QWEN.encode(rendered[: rendered.index("<|im_end|>")]).size
    assert result.timings.status == "active"
    assert result.kept[:definitions].tolist() == list(range(definitions))
    assert definitions < result.timings.pinned < result.kept.size < result.timings.prompt


def test_a_template_that_hides_the_tool_definitions_leads_to_the_dense_answer_and_says_so(tmp_path: Path):
    fake = chatting(hidden_tools(tmp_path))
    result = fake.engine.generate([asked(400)] * 2, SPARSE, variables=TOOLS)
    assert result.timings.status == "skipped_tool_guard"
    assert "hides where the tool definitions are" in result.timings.reason
    assert (fake.draft.calls, result.kept.size) == ([], result.timings.prompt)


def test_strictly_guarded_a_request_with_tools_is_read_whole():
    fake = chatting()
    settings = dataclasses.replace(SPARSE, tool_guard="strict")
    result = fake.engine.generate([asked(400)], settings, variables=TOOLS)
    assert result.timings.status == "skipped_tool_guard"
    assert (fake.draft.calls, result.kept.size) == ([], result.timings.prompt)


def test_a_system_part_beyond_the_budget_leads_to_the_dense_answer_without_running_the_draft():
    fake = chatting()
    messages: list[Message] = [{"role": "system", "content": "river " * 1000}, asked(1000)]
    result = fake.engine.generate(messages, SPARSE)
    assert result.timings.status == "skipped_insufficient_budget"
    assert "leaves no room" in result.timings.reason
    assert fake.draft.calls == []
    assert result.kept.size == result.timings.prompt
    assert len(result.tokens) == 3


# --- conversations


def test_a_second_turn_of_a_chat_begins_exactly_after_the_last_message_of_the_first():
    fake = chatting()
    session = Session(fake.engine)
    first = [SYSTEM, asked(2400)]
    session.generate(first, SPARSE, variables=TOOLS)
    message_end = QWEN.encode(QWEN.render(first, add_generation_prompt=False, variables=TOOLS)).size
    fake.draft.calls.clear()
    second = [*first, {"role": "assistant", "content": "Yes."}, asked(100, "lake")]
    result = session.generate(second, SPARSE, variables=TOOLS)
    assert starts(fake.draft)[0] == message_end
    assert result.timings.reused == message_end
    assert result.timings.draft_read == result.timings.prompt - message_end


def test_another_question_begins_exactly_after_the_same_system_part_and_tools():
    fake = chatting()
    session = Session(fake.engine)
    session.generate([SYSTEM, asked(2400)], SPARSE, variables=TOOLS)
    rendered = QWEN.render([SYSTEM, asked(1)], variables=TOOLS)
    system_end = QWEN.encode(rendered[: rendered.index("river")]).size
    fake.draft.calls.clear()
    result = session.generate([SYSTEM, asked(800, "lake")], SPARSE, variables=TOOLS)
    assert starts(fake.draft)[0] == system_end
    assert (result.timings.status, result.timings.reused) == ("active", system_end)


@pytest.mark.parametrize("history", ["keep", "rescore"])
def test_a_secret_of_the_system_part_is_known_in_every_turn_also_after_a_cancelled_one(history: str):
    class Stop(Exception):
        pass

    def stop(phase: str, done: int, _: int) -> None:
        if phase == "prefill" and done:
            raise Stop

    secret = ("The word is Golaga.", QWEN.encode(" Golaga")[0])

    def speak(read: list[tuple[int, int]]) -> float:
        return SECRET if any(token == secret[1] for token, _ in read) else 40

    session = Session(chatting(speak=speak).engine)
    settings = dataclasses.replace(SPARSE, history=history)
    messages: list[Message] = [{"role": "system", "content": secret[0]}, asked(400)]
    reused = []
    for turn in range(4):
        if turn == 2:
            with pytest.raises(Stop):
                session.generate(messages, settings, watch=stop)
        result = session.generate(messages, settings)
        assert result.tokens[0] == SECRET
        assert result.timings.status == "active"
        reused.append(result.timings.reused)
        messages += [{"role": "assistant", "content": "Yes."}, asked(300, "lake")]
    assert reused[0] == 0
    if history == "keep":  # scored again, other tokens may be kept, and then the target starts over
        assert 0 < reused[1] < reused[2] < reused[3]


def test_without_the_secret_the_target_does_not_know_it():
    """Else the test above shows nothing."""

    def speak(read: list[tuple[int, int]]) -> float:
        return SECRET if any(token == NEEDLE for token, _ in read) else 40

    kept = np.array([0, 1, 319], np.int32)
    assert make(speak=speak).engine.answer_from(TOKENS, kept, SPARSE).tokens[0] == 40


def test_a_dense_request_after_a_sparse_one_that_was_cancelled_anywhere_is_that_of_a_fresh_engine():
    class Stop(Exception):
        pass

    undisturbed = make().engine.generate(TOKENS, DENSE)
    fake = make()
    borders: list[str] = []
    fake.engine.generate(TOKENS, SPARSE, watch=lambda phase, *_: borders.append(phase))
    for number in range(1, len(borders) + 1):
        left = number

        def stop(*_: object) -> None:
            nonlocal left
            left -= 1
            if not left:
                raise Stop

        fake.engine.forget()
        with pytest.raises(Stop):
            fake.engine.generate(TOKENS, SPARSE, watch=stop)
        fake.target.calls.clear()
        assert fake.engine.generate(TOKENS, DENSE).tokens == undisturbed.tokens
        assert fake.target.of("prefill") == [(TOKENS.tolist(), list(range(320)))]


def test_the_progress_of_a_resumed_turn_counts_the_tokens_that_it_reads():
    session = Session(make().engine)
    first = session.generate(TOKENS, SPARSE)
    second = np.concatenate([TOKENS, np.array(first.tokens, np.int32), prompt(200, needle_at=90)])
    heard: dict[str, list[tuple[int, int]]] = {}
    result = session.generate(
        second.astype(np.int32),
        SPARSE,
        watch=lambda phase, done, total: heard.setdefault(phase, []).append((done, total)),
    )
    read = {
        "score": result.timings.draft_read,
        "prefill": np.count_nonzero(result.kept >= result.timings.reused),
        "decode": SPARSE.max_tokens,
    }
    assert result.timings.reused > 0
    for phase, steps in heard.items():
        done = [done for done, _ in steps]
        assert {total for _, total in steps} == {read[phase]}
        assert done == sorted(done)
        assert done[-1] <= read[phase]
    assert heard["score"][0][0] == heard["prefill"][0][0] == 0


# --- speed and memory


def test_after_sparse_prefill_a_token_takes_the_calls_that_it_takes_after_dense_prefill():
    takes = {}
    for settings in (SPARSE, DENSE):
        fake = make()
        fake.engine.generate(TOKENS, dataclasses.replace(settings, max_tokens=6))
        calls = [(name, len(tokens)) for name, tokens, _ in fake.target.calls]
        takes[settings.mode] = calls[1:]  # behind the prefill
    assert takes["sparse"] == takes["dense"] == [("head", 0), *[("decode", 1)] * 5]


def measured(tokens: Int[np.ndarray, "M"]) -> tuple[Fake, Status]:
    """What becomes of a prompt where a block takes the draft 1 ms and the target 4, a step of lookahead 50.

    Of 2,048 tokens 512 are kept at most: saved are 96 blocks of the target, 384 ms, and the draft costs 228.
    """
    fake = make()
    target = {f"prefill_T{BLOCK}_C4096": 4.0, "decode_C4096": 50.0, "head": 0.25}
    draft = target | {f"prefill_rows_T{BLOCK}_C4096": 1.0, f"prefill_T{BLOCK}_C4096": 1.0}
    times = {"draft": draft, "target": target}
    engine = Engine(fake.engine.artifact, fake.engine.chat, fake.draft, fake.target, times)
    return fake, engine.generate(tokens, Settings(max_tokens=1, max_keep=512)).timings.status


def test_a_draft_that_would_not_pay_by_the_measured_times_is_not_run():
    fake, status = measured(prompt(512, needle_at=130))
    assert (status, fake.draft.calls) == ("skipped_break_even", [])
    fake, status = measured(prompt(2048, needle_at=130))
    assert status == "active"
    assert fake.draft.calls


def counting_states(program: FakeProgram, monkeypatch: pytest.MonkeyPatch) -> "weakref.WeakSet[State]":
    """The states of a program that something still holds."""
    alive: weakref.WeakSet[State] = weakref.WeakSet()

    def new_state(slots: int) -> State:
        state = FakeState(program.capacity_for(slots))
        alive.add(state)
        return state

    monkeypatch.setattr(program, "new_state", new_state)
    return alive


def test_ten_long_prompts_one_after_the_other_hold_no_memory_and_stay_sparse(monkeypatch: pytest.MonkeyPatch):
    fake = make()
    of_draft, of_target = (counting_states(program, monkeypatch) for program in (fake.draft, fake.target))
    together: list[int] = []
    for number in range(10):
        tokens = prompt(3000 + number, needle_at=130)
        result = fake.engine.generate(
            tokens, SPARSE, watch=lambda *_: together.append(len(of_draft) + len(of_target))
        )
        assert result.timings.status == "active"
        gc.collect()
        assert (len(of_draft), len(of_target)) == (0, 0)
    assert set(together) == {1}, "the draft's cache makes room for the target's"


def test_a_conversation_of_ten_turns_holds_one_state_of_each_model(monkeypatch: pytest.MonkeyPatch):
    fake = make()
    alive = [counting_states(program, monkeypatch) for program in (fake.draft, fake.target)]
    session = Session(fake.engine)
    tokens, held = TOKENS, []
    for _ in range(10):
        result = session.generate(tokens, SPARSE)
        assert result.timings.status == "active"
        answer = np.array(result.tokens, np.int32)
        tokens = np.concatenate([tokens, answer, prompt(200, needle_at=90)]).astype(np.int32)
        gc.collect()
        assert [len(states) for states in alive] == [1, 1]
        held.append(session.bytes)
    assert len(set(held[4:])) == 1, "snapshots are bounded too"


# --- settings, statuses, refusals


OTHER_VALUES: dict[str, Any] = {
    "memory": 10**12,
    "lookahead": 4,
    "spec_ctx": 2048,
    "window": 600,
    "calibration": False,
    "pool": 5,
    "pooling": "max",
    "per_head": "rank",
    "across": "mean",
    "queries": 2,
    "sinks": 8,
    "heads": (Head(0, 0), Head(1, 2)),
    "select_mode": "chunk",
    "cumulative_mass": 0.5,
    "keep": 0.1,
    "max_keep": 100,
    "chunk": 8,
    "chunking": "fixed",
    "halo": True,
    "normalizer": "clip",
    "boost_first_mult": 3.0,
    "boost_first_n": 8,
    "boost_last_mult": 3.0,
    "boost_last_n": 8,
    "pin_roles": ("system",),
    "tool_guard": "off",
    "break_even": False,
    "spec_throughput": 1e9,
    "break_even_safety": 0.01,
    "history": "rescore",
    "deadline": 1e6,
    "temperature": 1.0,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.1,
    "seed": 7,
    "max_tokens": 2,
}


def test_no_other_knob_switches_the_draft_on():
    assert set(knobs()) == {"enabled", "mode", "minimum_tokens", *OTHER_VALUES}
    off = (
        (Settings(enabled=False, max_tokens=3), "disabled"),
        (DENSE, "disabled"),
        (Settings(minimum_tokens=41, max_tokens=3), "skipped_min_tokens"),
    )
    fake = make(minimum=20)
    for name, value in OTHER_VALUES.items():
        assert getattr(Settings(), name) != value
        for settings, status in off:
            result = fake.engine.generate(TOKENS[:40], dataclasses.replace(settings, **{name: value}))
            assert (result.timings.status, fake.draft.calls) == (status, []), name


def nothing_read(attended: list[int]) -> np.ndarray:
    return np.full(len(attended), 0.25, np.float32)


POOR = Calibration("", {}, 0.95, 0.61, 0.5, 0.7, 100, depth=2, seed=0)


def test_every_status_has_a_reason():
    fake = make()
    without_draft = Engine(
        fake.engine.artifact, fake.engine.chat, None, fake.target, no_draft="out of memory"
    )
    results = [
        fake.engine.generate(TOKENS, AUTO),
        fake.engine.generate(TOKENS, dataclasses.replace(AUTO, keep=1.0)),
        fake.engine.generate(TOKENS, dataclasses.replace(AUTO, cumulative_mass=1.0, max_keep=0)),
        fake.engine.generate(TOKENS, DENSE),
        fake.engine.generate(TOKENS[:199], AUTO),
        make().engine.generate(TOKENS, Settings(max_tokens=1, spec_throughput=1.0)),
        chatting().engine.generate(
            [asked(400)], dataclasses.replace(AUTO, tool_guard="strict"), variables=TOOLS
        ),
        fake.engine.generate(TOKENS, dataclasses.replace(AUTO, max_keep=36)),
        make(attend=nothing_read).engine.generate(TOKENS, AUTO),
        make(calibration=POOR).engine.generate(TOKENS, AUTO),
        without_draft.generate(TOKENS, AUTO),
    ]
    assert {result.timings.status for result in results} == set(Status)
    for result in results:
        detail = result.to_json()["timings"]["specprefill_detail"]
        assert len(detail["reason"]) > 10 or detail["reason"] == "out of memory"
    assert results[-1].timings.reason == "out of memory"


@pytest.mark.parametrize(
    "drawing",
    [
        {"temperature": 4.0},
        {"temperature": 4.0, "top_k": 2},
        {"temperature": 4.0, "top_p": 0.05},
        {"temperature": 4.0, "min_p": 0.5},
        {"temperature": 0.0},
    ],
)
def test_sampling_settings_act_after_sparse_prefill_as_after_dense(drawing: dict[str, float]):
    """The models' logits are the same whatever is read; so what differs would be how tokens are drawn."""
    drawn: dict[str, Any] = {"max_tokens": 12, "seed": 7, **drawing}
    fake = make(speak=lambda _: 40)
    sparse, dense = (
        fake.engine.generate(TOKENS, dataclasses.replace(settings, **drawn)) for settings in (SPARSE, DENSE)
    )
    assert sparse.timings.status == "active"
    assert sparse.tokens == dense.tokens
    only_the_likeliest = drawing.keys() & {"top_p", "min_p"} or drawing["temperature"] == 0
    assert (set(sparse.tokens) == {40}) == bool(only_the_likeliest)


@pytest.mark.parametrize(
    ("size", "keep", "status", "kept"),
    [
        (199, 0.0, "skipped_min_tokens", 199),
        (200, 0.0, "active", 20),  # the least that is kept; unset it would be by mass
        (201, 0.0, "active", 20),
        (199, 1.0, "skipped_min_tokens", 199),
        (200, 1.0, "kept_all", 200),
        (201, 1.0, "kept_all", 201),
    ],
)
def test_fractions_of_0_and_1_and_thresholds_hold_to_the_token(
    size: int, keep: float, status: str, kept: int
):
    settings = dataclasses.replace(AUTO, keep=keep, chunk=8)
    timings = make(minimum=200).engine.generate(prompt(size, needle_at=100), settings).timings
    assert (timings.status, timings.kept) == (status, kept)


@pytest.mark.parametrize(
    ("made", "knobs", "error", "message"),
    [
        ({}, {"window": 5000, "spec_ctx": 8192}, SettingError, "window=5000"),
        ({}, {"lookahead": 4096}, SettingError, "lookahead=4096"),
        ({}, {"max_tokens": 2**18}, PromptTooLong, "as many positions"),
        (
            {"target_capacity": 90},
            {"keep": 0.5},
            PromptTooLong,
            "at least 113 tokens kept of 320 and max_tok",
        ),
        ({}, {"max_tokens": 4090}, PromptTooLong, r"lower max_tokens \(--max-tokens\) to 4047"),
    ],
)
def test_what_cannot_be_answered_is_refused_before_the_draft_reads(
    made: dict[str, Any], knobs: dict[str, Any], error: type[Exception], message: str
):
    fake = make(**made)
    with pytest.raises(error, match=message):
        fake.engine.generate(TOKENS, dataclasses.replace(SPARSE, **knobs))
    assert fake.draft.calls == fake.target.calls == []


def test_tokens_that_a_model_does_not_know_are_refused_before_the_draft_reads():
    fake = make()
    with pytest.raises(ValueError, match="outside 0"):
        fake.engine.generate([5, 10**6], SPARSE)
    assert fake.draft.calls == []


def test_the_same_request_to_another_engine_keeps_and_says_the_same():
    drawn = dataclasses.replace(SPARSE, temperature=2.0, seed=3, max_tokens=8)
    one, two = (make().engine.generate(TOKENS, drawn) for _ in range(2))
    assert one.kept.tolist() == two.kept.tolist()
    assert one.tokens == two.tokens
