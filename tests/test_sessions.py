"""Conversations that are stopped, that fail, and that share a device's memory; on models of a few lines."""

import contextlib
import dataclasses
import gc
import threading
import weakref

import numpy as np
import pytest

from specprefill_jax.engine import Result
from specprefill_jax.engine.prompt import Encoded
from specprefill_jax.errors import (
    Cancelled,
    DeadlineExceeded,
    DeviceFailed,
    MemoryTooSmall,
    SessionBusy,
)
from specprefill_jax.session import Session, Sessions
from tests.engine.fake import NEEDLE, make, prompt, to_token
from tests.turns import DENSE, FIRST, SPARSE, follow_up, next_turn

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
