"""Selection in a conversation: earlier turns stay as they were, new tokens are ranked against everything.

Chunks of 4, all tokens of a chunk alike, no boost. Of 40 tokens the first 20 are of earlier turns.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Float, Int

from specprefill_jax.errors import BudgetTooSmall
from specprefill_jax.selection import History, bounds_of, minimum_kept, select, turn_budget
from specprefill_jax.settings import Settings


def plain(**knobs: Any) -> Settings:
    return Settings(**{"boost_first_n": 0, "boost_last_n": 0, "chunk": 4, **knobs})


def by_chunk(*values: float) -> Float[np.ndarray, "M"]:
    return np.repeat(np.array(values, dtype=np.float32), 4)


def earlier(*chunks: int, prompt: int = 20) -> History:
    """The first `prompt` tokens, of which these chunks were kept."""
    return History(prompt, np.concatenate([np.arange(4 * i, 4 * i + 4) for i in chunks]).astype(np.int32))


def new_chunks(kept: Int[np.ndarray, "N"]) -> list[int]:
    return sorted({int(token) // 4 for token in kept if token >= 20})


RISING = by_chunk(0, 1, 2, 3, 4, 5, 6, 7, 8, 9)


def test_earlier_turns_stay_as_they_were_kept_however_they_rank_now():
    selection = select(RISING, plain(keep=0.6), history=earlier(0, 1))
    assert selection.kept[:8].tolist() == list(range(8))
    assert new_chunks(selection.kept) == [6, 7, 8, 9], "24 in all, 8 of them kept before"
    assert selection.budget == 24


def test_what_was_left_out_before_is_not_taken_now_and_takes_no_budget():
    falling = RISING[::-1].copy()
    selection = select(falling, plain(keep=0.4), history=earlier(1))
    # 16 in all, 4 kept before, so 12 for the new: the last chunk is forced, and the best two of the others.
    assert selection.kept.tolist() == [*range(4, 8), *range(20, 28), *range(36, 40)]


def test_by_mass_new_chunks_that_rank_low_in_the_whole_conversation_are_left_out():
    # The old chunks have 40 of 50 parts of the mass, so that 0.8 of it is reached with them alone.
    scores = by_chunk(8, 8, 8, 8, 8, 2, 2, 2, 2, 2)
    selection = select(scores, plain(cumulative_mass=0.8), history=earlier(0, 1))
    assert new_chunks(selection.kept) == [9], "the last chunk, which is forced"
    alone = select(scores[20:] + by_chunk(1, 0, 0, 0, 0), plain(cumulative_mass=0.8))
    assert alone.kept.size > 4


def test_forced_and_pinned_tokens_are_those_of_the_new_turn():
    pinned = np.zeros(40, dtype=bool)
    pinned[[2, 21]] = True
    selection = select(RISING, plain(keep=0.5), pinned, history=earlier(1))
    assert (selection.forced, selection.pinned) == (5, 1)
    assert 21 in selection.kept
    assert 2 not in selection.kept, "it was left out when that could still be changed"
    assert 0 not in selection.kept


def test_a_turn_of_few_tokens_is_kept_whole():
    selection = select(RISING, plain(keep=0.1), history=earlier(0, prompt=36))
    assert selection.kept.tolist() == [*range(4), *range(36, 40)]


def test_new_tokens_that_rank_nothing_beside_each_other_still_have_a_budget():
    with pytest.raises(BudgetTooSmall, match="4 of 20 tokens are always kept"):
        select(RISING, plain(keep=0.1), history=earlier(0, 1, 2, 3, 4))


class TestBudget:
    def test_without_history_it_is_that_of_the_prompt(self):
        assert turn_budget(1000, 0, 0, Settings(keep=0.3)) == 300
        assert turn_budget(3000, 0, 0, Settings()) == 2000

    def test_it_is_what_earlier_turns_left(self):
        assert turn_budget(1000, 500, 100, Settings(keep=0.3)) == 200

    def test_it_is_at_least_what_the_new_tokens_would_have_alone(self):
        assert turn_budget(1000, 500, 500, Settings(keep=0.3)) == 150

    def test_it_is_at_most_all_of_them_and_the_cap(self):
        assert turn_budget(1000, 900, 0, Settings(keep=0.9)) == 100
        assert turn_budget(1000, 500, 0, Settings(keep=0.9, max_keep=40)) == 40
        assert turn_budget(1000, 500, 300, Settings(max_keep=0)) == 500


@given(st.data())
def test_whatever_the_turns_the_promises_hold(data: st.DataObject):
    size = data.draw(st.integers(2, 400))
    before = data.draw(st.integers(0, size - 1))
    keep = data.draw(st.sampled_from([0.1, 0.3, 0.7]))
    chance = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    scores = chance.random(size, dtype=np.float32)
    kept = np.flatnonzero(chance.random(before) < chance.random()).astype(np.int32)
    pinned = chance.random(size) < 0.02
    knobs = plain(keep=keep, select_mode=data.draw(st.sampled_from(["mass", "chunk"])), chunk=8)
    history = History(before, kept)
    budget = kept.size + turn_budget(size, before, kept.size, knobs)
    try:
        selection = select(scores, knobs, pinned, history)
    except BudgetTooSmall:
        with pytest.raises(BudgetTooSmall):
            bounds_of(size, knobs, pinned, history)
        return
    bounds_of(size, knobs, pinned, history)
    found = selection.kept
    assert found[found < before].tolist() == kept.tolist()
    assert set(np.flatnonzero(pinned & (np.arange(size) >= before))) <= set(found.tolist())
    assert found[-1] == size - 1
    new = size - before
    assert found.size <= max(budget, kept.size + (new if new <= minimum_kept(new) else 0))
    again = select(scores, knobs, pinned, history)
    assert again.kept.tolist() == found.tolist()
