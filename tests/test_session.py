"""Conversations on models of a few lines, whose answers follow from every token, position and slot read."""

import contextlib
import dataclasses
import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from jaxtyping import Int

from specprefill_jax.errors import (
    DeviceFailed,
    NotFiniteOutput,
)
from specprefill_jax.pins import Pins
from specprefill_jax.runtime.program import Prefilled
from specprefill_jax.runtime.state import State
from specprefill_jax.session import Session, Sessions
from specprefill_jax.settings import Settings
from tests.engine.fake import Fake, from_everything, make, prompt
from tests.turns import DENSE, FIRST, SPARSE, follow_up, fresh_answer, next_turn, read

# --- what is read again


def asking_eight(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """A draft whose tokens before the last one find another needle than the last, each less strongly."""
    fake = make()
    real = fake.draft.prefill

    def prefill(*given: Any, **more: Any) -> Prefilled:
        found = real(*given, **more)
        if found.rows is not None:
            found.rows[:-1, 1, 2, 200] = 0.1
            found.rows[-1, 1, 2, 400] = 0.5
        return found

    monkeypatch.setattr(fake.draft, "prefill", prefill)
    return fake


EIGHT = Settings(
    mode="sparse", max_tokens=3, keep=0.1, queries=8, chunking="fixed", boost_last_n=0, pin_roles=()
)
LONG: list[dict[str, str]] = [
    {"role": "user", "content": " ".join(f"word{number}" for number in range(120))},
]


@pytest.mark.parametrize("before", [None, 1], ids=["at once", "after a turn that asked one"])
def test_a_conversation_asks_as_many_of_the_last_tokens_as_a_single_request(
    before: int | None, monkeypatch: pytest.MonkeyPatch
):
    fake = asking_eight(monkeypatch)
    session = Session(fake.engine)
    if before is not None:
        session.generate(LONG, dataclasses.replace(EIGHT, queries=before))
    fresh = asking_eight(monkeypatch).engine
    turn = session.generate(LONG, dataclasses.replace(EIGHT, history="rescore"))
    assert turn.kept.tolist() == fresh.generate(LONG, EIGHT).kept.tolist()
    assert 223 in turn.kept.tolist(), (
        "0.7 of seven queries, and 0.5 of the last; the opening of the answer has but two and the last"
    )


def test_asking_more_of_the_last_tokens_costs_the_next_turn_no_more_than_these(
    monkeypatch: pytest.MonkeyPatch,
):
    fake = asking_eight(monkeypatch)
    session = Session(fake.engine)
    first = session.generate(LONG, EIGHT)
    more = [*LONG, {"role": "assistant", "content": "No."}, {"role": "user", "content": "Why? " * 40}]
    tokens = fake.engine.encode(more)
    second = session.generate(more, EIGHT)
    assert second.timings.draft_read <= tokens.size - first.timings.prompt + 8


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
    settings = dataclasses.replace(SPARSE, chunking="fixed")  # room for more than a last chunk
    fake = make()
    session = Session(fake.engine)
    first = session.generate(FIRST, settings)
    session.generate(follow_up(first, FIRST, 100, needle_at=50), settings)
    edited = np.concatenate([FIRST, prompt(90, needle_at=20)]).astype(np.int32)
    next_turn(fake)
    result = session.generate(edited, settings)
    assert (read(fake.draft), result.timings.reused) == (90, 320)
    assert result.tokens == fresh_answer(result, edited, settings)


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
