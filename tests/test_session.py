"""Conversations on models of a few lines, whose answers follow from every token, position and slot read."""

import contextlib
import dataclasses
import gc
import math
import random
import threading
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from jaxtyping import Int

from specprefill_jax.engine import Result
from specprefill_jax.engine.prompt import Encoded
from specprefill_jax.errors import (
    Cancelled,
    DeadlineExceeded,
    DeviceFailed,
    MemoryTooSmall,
    NotFiniteOutput,
    SessionBusy,
)
from specprefill_jax.pins import Pins
from specprefill_jax.runtime.state import State
from specprefill_jax.session import Session, Sessions
from specprefill_jax.settings import Settings
from tests.engine.fake import NEEDLE, Fake, FakeProgram, from_everything, make, prompt, to_token

SPARSE = Settings(mode="sparse", max_tokens=3, select_mode="chunk", keep=0.3)
DENSE = Settings(mode="dense", max_tokens=3)
FIRST = prompt(320, needle_at=130)


def follow_up(
    result: Result, before: Int[np.ndarray, "M"], size: int, needle_at: int
) -> Int[np.ndarray, "_"]:
    """The next prompt: the last one, its answer, and `size` more tokens with a needle among them."""
    answer = np.array(result.tokens, np.int32)
    return np.concatenate([before, answer, prompt(size, needle_at=needle_at)]).astype(np.int32)


def fresh_answer(result: Result, tokens: Int[np.ndarray, "M"], settings: Settings) -> tuple[int, ...]:
    """What a target says that reads the kept tokens in one go, from nothing."""
    return make().engine.answer_from(tokens, result.kept, settings).tokens


def read(program: FakeProgram) -> int:
    return sum(len(tokens) for tokens, _ in program.of("prefill"))


def next_turn(fake: Fake) -> None:
    """Forget the calls of the turns so far."""
    fake.draft.calls.clear()
    fake.target.calls.clear()


# --- what is read again


def test_a_second_turn_reads_the_answer_and_the_new_tokens_only():
    fake = make()
    session = Session(fake.engine)
    first = session.generate(FIRST, SPARSE)
    next_turn(fake)
    second = follow_up(first, FIRST, 100, needle_at=50)
    result = session.generate(second, SPARSE)
    # The draft read no answer; the target did, but for its last token.
    assert fake.draft.of("prefill") == [(second[320:].tolist(), list(range(320, 423)))]
    (tokens, positions), *_ = fake.target.of("prefill")
    assert positions[0] >= 322
    assert tokens == second[positions].tolist()
    timings = result.timings
    assert (timings.prompt, timings.reused, timings.draft_read, timings.looked_ahead) == (423, 322, 103, 2)


def test_earlier_turns_stay_as_they_were_kept_and_new_tokens_are_selected_beside_them():
    fake = make()
    session = Session(fake.engine)
    first = session.generate(FIRST, SPARSE)
    second = follow_up(first, FIRST, 300, needle_at=150)
    result = session.generate(second, SPARSE)
    assert result.timings.status == "active"
    before = [*first.kept.tolist(), 320, 321]
    assert result.kept[: len(before)].tolist() == before
    new = result.kept[len(before) :]
    assert 320 + 3 + 150 in new.tolist(), "the needle"
    assert new.size < 300
    assert result.tokens == fresh_answer(result, second, SPARSE)


def test_rescoring_selects_among_all_turns_again():
    fake = make()
    session = Session(fake.engine)
    first = session.generate(FIRST, SPARSE)
    second = follow_up(first, FIRST, 300, needle_at=150)
    next_turn(fake)
    result = session.generate(second, dataclasses.replace(SPARSE, history="rescore"))
    assert result.kept.tolist() == make().engine.generate(second, SPARSE).kept.tolist()
    assert read(fake.draft) == 303, "the draft goes on where it was"
    assert result.tokens == fresh_answer(result, second, SPARSE)


def test_the_same_turn_again_takes_no_work_of_the_draft_and_none_but_the_head_of_the_target():
    fake = make()
    session = Session(fake.engine)
    once = session.generate(FIRST, SPARSE)
    next_turn(fake)
    again = session.generate(FIRST, dataclasses.replace(SPARSE, temperature=0.0, seed=5))
    assert fake.draft.calls == []
    assert [name for name, _, _ in fake.target.calls] == ["head", "decode", "decode"]
    assert again.tokens == once.tokens
    assert again.kept.tolist() == once.kept.tolist()
    timings = again.timings
    assert (timings.status, timings.remembered, timings.reused) == ("active", True, 320)


def test_a_prompt_that_was_scored_before_is_not_scored_again_outside_of_a_conversation_either():
    fake = make()
    once = fake.engine.generate(FIRST, SPARSE)
    next_turn(fake)
    again = fake.engine.generate(FIRST, SPARSE)
    assert fake.draft.calls == []
    assert (again.timings.remembered, once.timings.remembered) == (True, False)
    assert again.kept.tolist() == once.kept.tolist()
    fake.engine.generate(FIRST, dataclasses.replace(SPARSE, lookahead=1))
    assert read(fake.draft) == 320, "other settings score otherwise"


def test_an_edited_turn_goes_on_from_what_is_the_same():
    fake = make()
    session = Session(fake.engine)
    first = session.generate(FIRST, SPARSE)
    session.generate(follow_up(first, FIRST, 100, needle_at=50), SPARSE)
    edited = np.concatenate([FIRST, prompt(90, needle_at=20)]).astype(np.int32)
    next_turn(fake)
    result = session.generate(edited, SPARSE)
    assert (read(fake.draft), result.timings.reused) == (90, 320)
    assert result.tokens == fresh_answer(result, edited, SPARSE)


def test_a_token_that_was_left_out_counts_too():
    fake = make()
    session = Session(fake.engine)
    first = session.generate(FIRST, SPARSE)
    dropped = next(i for i in range(320) if i not in first.kept)
    other = FIRST.copy()
    other[dropped] += 1
    result = session.generate(other, SPARSE)
    assert result.timings.reused == 0
    assert result.tokens == fresh_answer(result, other, SPARSE)


def test_a_dense_turn_after_a_sparse_one_reads_everything():
    session = Session(make().engine)
    first = session.generate(FIRST, SPARSE)
    second = follow_up(first, FIRST, 50, needle_at=20)
    result = session.generate(second, DENSE)
    assert result.kept.tolist() == list(range(second.size))
    assert result.tokens == make().engine.generate(second, DENSE).tokens


def test_on_turns_without_it_the_draft_falls_behind_and_catches_up():
    fake = make(minimum=200)
    session = Session(fake.engine)
    auto = dataclasses.replace(SPARSE, mode="auto", break_even=False)
    first = session.generate(FIRST, auto)
    second = follow_up(first, FIRST, 50, needle_at=20)
    next_turn(fake)
    skipped = session.generate(second, auto)
    assert skipped.timings.status == "skipped_min_tokens"
    assert "51 tokens" in skipped.timings.reason, "only what is still to prefill counts"
    assert fake.draft.calls == []
    assert skipped.tokens == fresh_answer(skipped, second, auto)
    third = follow_up(skipped, second, 250, needle_at=20)
    result = session.generate(third, auto)
    assert result.timings.status == "active"
    assert read(fake.draft) == third.size - 320


def test_caches_grow_with_the_conversation():
    fake = make(draft_capacity=(400, 1000), target_capacity=(400, 1000))
    session = Session(fake.engine)
    first = session.generate(FIRST, DENSE)
    session.generate(FIRST, SPARSE)
    second = follow_up(first, FIRST, 300, needle_at=150)
    before = session.bytes
    result = session.generate(second, SPARSE)
    assert session.bytes - before >= 4 * 600
    assert result.tokens == fresh_answer(result, second, SPARSE)


def test_turns_that_no_longer_fit_beside_each_other_are_selected_anew(caplog: pytest.LogCaptureFixture):
    fake = make(target_capacity=340)
    session = Session(fake.engine)
    first = session.generate(FIRST, DENSE)
    second = follow_up(first, FIRST, 300, needle_at=150)
    result = session.generate(second, SPARSE)
    assert result.kept.tolist() == make().engine.generate(second, SPARSE).kept.tolist()
    assert "selected anew" in caplog.text


def test_other_pins_make_it_another_turn():
    session = Session(make().engine)
    first = session.generate(FIRST, SPARSE)
    dropped = next(i for i in range(320) if i not in first.kept)
    pinned = session.generate(FIRST, SPARSE, pins=Pins(tokens=((dropped, dropped + 1),)))
    assert not pinned.timings.remembered or dropped in pinned.kept
    fresh = dataclasses.replace(SPARSE, history="rescore")
    again = session.generate(FIRST, fresh, pins=Pins(tokens=((dropped, dropped + 1),)))
    assert dropped in again.kept
    assert again.tokens == fresh_answer(again, FIRST, SPARSE)


def test_a_draft_that_failed_is_tried_again_with_the_same_turn(monkeypatch: pytest.MonkeyPatch):
    fake = make()
    session = Session(fake.engine)

    def fail(slots: int) -> State:
        raise DeviceFailed("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(fake.draft, "new_state", fail)
    assert session.generate(FIRST, SPARSE).timings.status == "failed_dense"
    monkeypatch.undo()
    again = session.generate(FIRST, dataclasses.replace(SPARSE, history="rescore"))
    assert again.timings.status == "active"


def test_near_the_end_of_the_largest_cache_a_turn_goes_on_from_where_a_block_still_fits():
    """A block of 16 writes 16 slots, however few of its tokens are valid."""
    fake = make(draft_capacity=336, target_capacity=336)
    session = Session(fake.engine)
    session.generate(FIRST[:310], dataclasses.replace(DENSE, max_tokens=1))
    longer = prompt(330, needle_at=130)
    longer[:310] = FIRST[:310]
    near = session.generate(longer, dataclasses.replace(DENSE, max_tokens=2))
    assert near.timings.reused == 310
    last = np.append(longer, np.int32(5))
    result = session.generate(last, dataclasses.replace(DENSE, max_tokens=2))
    assert result.timings.reused == 310, "330 + 16 slots are more than 336"
    assert result.tokens == make().engine.generate(last, dataclasses.replace(DENSE, max_tokens=2)).tokens


def test_a_place_for_which_there_is_no_memory_is_left_out():
    fake = make()
    first = Session(fake.engine)
    first.generate(FIRST, DENSE)
    sessions = Sessions(fake.engine, memory=first.bytes - 1)  # one snapshot too many
    result = sessions.open("a").generate(FIRST, DENSE)
    assert result.tokens == make().engine.generate(FIRST, DENSE).tokens
    assert sessions.open("a").generate(FIRST, DENSE).timings.reused == 0


def test_a_turn_that_must_be_dense_is_dense_from_the_beginning():
    session = Session(make().engine)
    first = session.generate(FIRST, SPARSE)
    assert first.kept.size < 320
    second = follow_up(first, FIRST, 50, needle_at=20)
    strict = dataclasses.replace(SPARSE, tool_guard="strict")
    result = session.generate(second, strict, structured=True)
    assert result.timings.status == "skipped_tool_guard"
    assert result.kept.size == second.size
    assert result.tokens == make().engine.generate(second, DENSE).tokens


def test_a_pin_among_what_was_left_out_goes_back_to_before_it():
    session = Session(make().engine)
    first = session.generate(FIRST, SPARSE)
    dropped = next(i for i in range(320) if i not in first.kept)
    second = follow_up(first, FIRST, 200, needle_at=20)
    result = session.generate(second, SPARSE, pins=Pins(tokens=((dropped, dropped + 1),)))
    assert dropped in result.kept
    assert result.timings.pinned == 1
    assert result.tokens == fresh_answer(result, second, SPARSE)


@pytest.mark.parametrize("changed", [{"deadline": 1e6}, {"max_tokens": 2}, {}])
def test_what_a_stopped_turn_had_begun_to_read_decides_nothing(changed: dict[str, object]):
    settings = dataclasses.replace(SPARSE, keep=0.6)
    whole = make().engine.generate(FIRST, settings)
    session = Session(make().engine)

    def watch(phase: str, done: int, total: int) -> None:
        if (phase, done) == ("prefill", 64):
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        session.generate(FIRST, settings, watch=watch)
    again = session.generate(FIRST, dataclasses.replace(settings, **changed))
    assert again.kept.tolist() == whole.kept.tolist()
    assert again.timings.status == "active"
    assert again.timings.reused > 0


def test_the_same_turn_with_another_keep_is_selected_anew():
    session = Session(make().engine)
    session.generate(FIRST, SPARSE)
    more = dataclasses.replace(SPARSE, keep=0.6)
    result = session.generate(FIRST, more)
    assert result.kept.tolist() == make().engine.generate(FIRST, more).kept.tolist()
    assert result.tokens == fresh_answer(result, FIRST, more)


def test_numbers_that_were_none_once_do_not_stay_in_a_conversation():
    broken = True

    def speak(seen: list[tuple[int, int]]) -> float:
        return math.nan if broken else from_everything(seen)

    session = Session(make(speak=speak).engine)
    with pytest.raises(NotFiniteOutput):
        session.generate(FIRST, DENSE)
    broken = False
    assert session.generate(FIRST, DENSE).tokens == make().engine.generate(FIRST, DENSE).tokens


@pytest.mark.parametrize("settings", [SPARSE, dataclasses.replace(SPARSE, window=0, spec_ctx=640)])
def test_looking_ahead_moves_no_cache(settings: Settings):
    """Of 512 slots the prompt leaves fewer than a block of 16, but nothing is read behind it."""
    fake = make(draft_capacity=(512, 4096))
    Session(fake.engine).generate(prompt(505, needle_at=130), settings)
    assert [state.capacity for state in fake.draft.states] == [512]


# --- whatever happens, an answer follows from what the result says was kept


@given(st.integers(0, 10**9))
@hypothesis_settings(max_examples=25, deadline=None)
def test_every_turn_answers_as_if_its_kept_tokens_had_been_read_in_one_go(seed: int):
    """Turns that go on, that are edited, repeated, cancelled, pinned, dense, sparse, kept or scored again."""
    chance = random.Random(seed)
    fake = make(minimum=chance.choice([1, 60, 400]), draft_capacity=(256, 2048), target_capacity=(256, 2048))
    session = Session(fake.engine)
    tokens = prompt(chance.randint(1, 200), needle_at=0)
    for _ in range(5):
        settings = Settings(
            mode=chance.choice(["auto", "sparse", "sparse", "dense"]),
            history=chance.choice(["keep", "keep", "rescore"]),
            break_even=False,
            max_tokens=chance.randint(1, 4),
            select_mode=chance.choice(["chunk", "mass"]),
            keep=chance.choice([0.2, 0.5, 1.0]),
            max_keep=chance.choice([0, 100]),
            lookahead=chance.randint(0, 2),
            chunk=chance.choice([8, 32]),
        )
        start = chance.randrange(tokens.size)
        pins = Pins(tokens=((start, min(start + 5, tokens.size)),)) if chance.random() < 0.3 else Pins()
        if chance.random() < 0.3:
            stop_after(session, tokens, settings, chance.randint(1, 30))
        result = session.generate(tokens, settings, pins=pins)
        assert result.tokens == fresh_answer(result, tokens, settings)
        if pins.tokens and start >= result.timings.reused:
            assert start in result.kept
        assert result.kept[-1] == tokens.size - 1
        assert (np.diff(result.kept) > 0).all()
        if result.timings.status == "disabled":
            assert result.kept.size == tokens.size
        turn = chance.choice(["go on", "go on", "edit", "repeat", "cut"])
        if turn == "go on":
            tokens = follow_up(result, tokens, chance.randint(1, 200), needle_at=0)
        elif turn == "edit":
            tokens = tokens.copy()
            tokens[chance.randrange(tokens.size)] = 700
        elif turn == "cut":
            tokens = tokens[: chance.randint(1, tokens.size)]


def stop_after(session: Session, tokens: Int[np.ndarray, "M"], settings: Settings, borders: int) -> None:
    heard = 0

    def watch(*_: object) -> None:
        nonlocal heard
        heard += 1
        if heard == borders:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        session.generate(tokens, settings, watch=watch)


# --- cancelling


def test_a_cancelled_turn_goes_on_where_it_was_stopped():
    fake = make()
    session = Session(fake.engine)
    cancel = threading.Event()

    def watch(phase: str, done: int, total: int) -> None:
        if (phase, done) == ("score", 160):
            cancel.set()

    with pytest.raises(Cancelled, match="after 176 of 320 tokens of score"):
        session.generate(FIRST, SPARSE, watch=watch, cancel=cancel)
    next_turn(fake)
    result = session.generate(FIRST, SPARSE)
    assert fake.draft.of("prefill")[0][1] == list(range(176, 320))
    assert result.tokens == make().engine.generate(FIRST, SPARSE).tokens


def test_another_thread_cancels_a_request_and_the_next_is_unaffected():
    fake = make()
    cancel = threading.Event()
    reached = threading.Event()

    def watch(phase: str, done: int, total: int) -> None:
        if (phase, done) == ("prefill", 32):
            reached.set()
            assert cancel.wait(10)

    caught: list[BaseException] = []

    def work() -> None:
        try:
            fake.engine.generate(FIRST, SPARSE, watch=watch, cancel=cancel)
        except Cancelled as error:
            caught.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    assert reached.wait(10)
    cancel.set()
    worker.join(10)
    assert "cancelled after 48 of" in str(caught[0])
    assert fake.engine.generate(FIRST, SPARSE).tokens == make().engine.generate(FIRST, SPARSE).tokens


def test_a_cancelled_request_gives_its_memory_back_at_once():
    """Not when the garbage collector next comes by: a device has no memory to lend that long."""
    fake = make()
    cancel = threading.Event()
    session = Session(fake.engine)

    def watch(phase: str, done: int, total: int) -> None:
        if (phase, done) == ("prefill", 32):
            cancel.set()

    gc.disable()
    try:
        for generate in (fake.engine.generate, session.generate):
            cancel.clear()
            fake.engine.forget()
            with contextlib.suppress(Cancelled):
                generate(FIRST, SPARSE, watch=watch, cancel=cancel)
        session.clear()
        states = [weakref.ref(state) for program in (fake.draft, fake.target) for state in program.states]
        fake.draft.states.clear()
        fake.target.states.clear()
        assert len(states) == 4
        assert [state() for state in states] == [None] * 4
    finally:
        gc.enable()


def test_a_deadline_stops_a_request(monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr("specprefill_jax.engine.clock.time.monotonic", lambda: now)

    def watch(phase: str, done: int, total: int) -> None:
        nonlocal now
        now += 1.0

    fake = make()
    with pytest.raises(DeadlineExceeded, match=r"deadline of 5\.5 s passed after 96 of 320 tokens of score"):
        fake.engine.generate(FIRST, dataclasses.replace(SPARSE, deadline=5.5), watch=watch)
    assert fake.engine.generate(FIRST, dataclasses.replace(SPARSE, deadline=1e6)).finish == "length"


def test_a_device_that_fails_leaves_a_conversation_that_begins_anew():
    fails = False

    def speak(seen: list[tuple[int, int]]) -> float:
        if fails:
            raise DeviceFailed("RESOURCE_EXHAUSTED")
        return 3 + sum(token + position for token, position in seen) % 1000

    fake = make(speak=speak)
    session = Session(fake.engine)
    first = session.generate(FIRST, SPARSE)
    second = follow_up(first, FIRST, 100, needle_at=50)
    fails = True
    with pytest.raises(DeviceFailed):
        session.generate(second, SPARSE)
    assert session.bytes == 0
    fails = False
    result = session.generate(second, SPARSE)
    assert result.timings.reused == 0
    assert result.tokens == make(speak=speak).engine.answer_from(second, result.kept, SPARSE).tokens


def test_a_conversation_answers_one_turn_at_a_time():
    session = Session(make().engine)
    stream = session.stream(FIRST, SPARSE)
    next(stream)
    with pytest.raises(SessionBusy, match="still answering its last turn"):
        session.generate(FIRST, SPARSE)
    del stream
    assert session.generate(FIRST, SPARSE).finish == "length"


# --- several conversations


def one_turn_takes() -> int:
    session = Session(make().engine)
    session.generate(FIRST, SPARSE)
    return session.bytes


def test_conversations_beyond_the_memory_give_way_the_one_used_least_recently_first():
    fake = make()
    sessions = Sessions(fake.engine, memory=2 * one_turn_takes())
    for name in ("a", "b", "a", "c"):
        sessions.open(name).generate(FIRST, SPARSE)
    held = {name: sessions.open(name).bytes > 0 for name in "abc"}
    assert held == {"a": True, "b": False, "c": True}
    assert sessions.bytes <= 2 * one_turn_takes()
    assert sessions.open("b").generate(FIRST, SPARSE).timings.reused == 0


def test_no_conversation_gives_way_for_what_would_not_fit_or_is_not_needed():
    fake = make()
    one = one_turn_takes()
    sessions = Sessions(fake.engine, memory=2 * one - 1)  # but for one place to come back to
    sessions.open("a").generate(FIRST, SPARSE)
    sessions.open("b").generate(FIRST, SPARSE)
    assert sessions.open("a").bytes == one
    huge = Sessions(make(target_capacity=(400, 100_000)).engine, memory=2 * one)
    huge.open("a").generate(FIRST, DENSE)
    with pytest.raises(MemoryTooSmall):
        huge.open("b").generate(prompt(4000), DENSE)
    assert huge.open("a").bytes > 0


def test_a_closed_conversation_that_is_used_again_counts_again():
    sessions = Sessions(make().engine, memory=10**9)
    held = sessions.open("a")
    sessions.close("a")
    held.generate(FIRST, SPARSE)
    assert sessions.bytes == held.bytes > 0


def test_a_conversation_that_does_not_fit_alone_says_so():
    fake = make()
    with pytest.raises(MemoryTooSmall, match="may take 1000"):
        Sessions(fake.engine, memory=1000).open("a").generate(FIRST, SPARSE)


def test_a_draft_that_does_not_fit_leads_to_the_dense_answer():
    fake = make(draft_capacity=100_000)
    session = Sessions(fake.engine, memory=100_000).open("a")
    result = session.generate(FIRST, SPARSE)
    assert result.timings.status == "failed_dense"
    assert "may take 100000" in result.timings.reason
    assert result.kept.size == 320


def test_a_conversation_that_is_answering_is_not_cleared():
    sessions = Sessions(make().engine, memory=one_turn_takes())
    stream = sessions.open("a").stream(FIRST, SPARSE)
    next(stream)
    with pytest.raises(MemoryTooSmall):
        sessions.open("b").generate(FIRST, DENSE)
    assert isinstance(list(stream)[-1], Result)


def test_a_cleared_conversation_remembers_no_prompts():
    fake = make()
    session = Session(fake.engine)
    session.generate(FIRST, SPARSE)
    session.clear()
    assert session.bytes == 0
    assert not session.generate(FIRST, SPARSE).timings.remembered


@pytest.mark.parametrize("capacities", [(340, 1000), (340,)])
def test_a_message_of_any_length_is_read_in_pieces_that_fit_the_cache(
    capacities: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    """The opening of an answer is read by itself: a block of 16 from there on must fit too."""

    def encoded(*_: object, **__: object) -> Encoded:
        return Encoded(prompt(size, needle_at=130), (4, size - 3), np.zeros(size, dtype=bool), None)

    monkeypatch.setattr("specprefill_jax.engine.engine.encode", encoded)
    for size in range(300, 338):
        fake = make(draft_capacity=1000, target_capacity=capacities)
        result = Session(fake.engine).generate("", dataclasses.replace(DENSE, max_tokens=2))
        assert result.kept.size == size


def test_a_closed_conversation_is_forgotten():
    sessions = Sessions(make().engine)
    sessions.open("a").generate(FIRST, SPARSE)
    sessions.close("a")
    sessions.close("never there")
    assert (len(sessions), sessions.bytes) == (0, 0)


def test_names_are_forgotten_after_many(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("specprefill_jax.session.MOST_SESSIONS", 3)
    sessions = Sessions(make().engine)
    for name in range(10):
        sessions.open(name).generate(prompt(8), DENSE)
    assert len(sessions) == 3
    assert sessions.open(9).generate(prompt(8), DENSE).timings.reused == 8


def test_the_draft_finds_the_needle_of_an_earlier_turn():
    """Importance covers the whole conversation, also the part that the draft read long ago."""
    session = Session(make(attend=to_token(NEEDLE)).engine)
    first = session.generate(FIRST, DENSE)
    second = follow_up(first, FIRST, 300, needle_at=150)
    result = session.generate(second, dataclasses.replace(SPARSE, history="rescore"))
    assert {130, 473} <= set(result.kept.tolist())
