"""Selection on chunks of any size: what is forced, the budget, the halo, and a conversation."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Bool, Float, Int

from specprefill_jax.errors import BudgetTooSmall, ScoresUnusable
from specprefill_jax.selection import (
    History,
    bounds_of,
    fewest_kept,
    fixed,
    forced_tokens,
    keeps_everything,
    minimum_kept,
    segments,
    select,
    turn_budget,
)
from specprefill_jax.settings import Settings

EDGES = np.array([0, 6, 10, 16, 19, 25, 30, 34, 40])
"""Chunks of 3 to 6 tokens. Forced are 0-3 and 34-39, the last chunk: 10 tokens."""


def plain(**knobs: Any) -> Settings:
    return Settings(**{"boost_first_n": 0, "boost_last_n": 0, "chunk": 4, **knobs})


def by_chunk(*values: float) -> Float[np.ndarray, "M"]:
    return np.repeat(np.array(values, dtype=np.float32), np.diff(EDGES))


def test_chunks_are_ranked_by_their_means_and_kept_whole():
    # The chunk of 3 (16-18) has the highest mean, not the highest sum; then that of 6 (10-15). Budget 20.
    selection = select(by_chunk(0, 1, 8, 9, 2, 1, 1, 0), plain(keep=0.5), edges=EDGES)
    assert selection.kept.tolist() == [*range(4), *range(10, 19), *range(34, 40)]
    np.testing.assert_allclose(selection.chunk_scores * 9, [0, 1, 8, 9, 2, 1, 1, 0])
    assert selection.edges is EDGES


def test_the_first_chunk_that_does_not_fit_ends_it():
    # Budget 20: the chunk of 6 that ranks second does not fit behind two, though that of 3 would.
    selection = select(by_chunk(0, 7, 8, 1, 6, 1, 1, 0), plain(keep=0.5), edges=EDGES)
    assert selection.kept.tolist() == [*range(4), *range(6, 16), *range(34, 40)]


def test_no_edges_are_those_of_the_fixed_size():
    importance = np.random.default_rng(0).random(41, dtype=np.float32)
    without = select(importance, plain(keep=0.5))
    given_ = select(importance, plain(keep=0.5), edges=fixed(41, 4))
    np.testing.assert_array_equal(without.kept, given_.kept)
    np.testing.assert_array_equal(without.edges, given_.edges)


def test_the_last_chunk_is_forced_whole_but_at_most_half_as_much_again_of_the_size():
    np.testing.assert_array_equal(np.flatnonzero(forced_tokens(EDGES, 4)), [*range(4), *range(34, 40)])
    long = np.array([0, 6, 40])
    np.testing.assert_array_equal(np.flatnonzero(forced_tokens(long, 4)), [*range(4), *range(34, 40)])


@pytest.mark.parametrize("edges", [[], [0], [0, 39], [0, 41], [1, 40], [0, 8, 8, 40], [0, 9, 5, 40]], ids=str)
def test_edges_that_do_not_lead_through_the_prompt_are_refused(edges: list[int]):
    found = np.array(edges, dtype=np.int64)
    with pytest.raises(ValueError, match="ascend from 0 to 40"):
        select(np.arange(40, dtype=np.float32), plain(), edges=found)
    with pytest.raises(ValueError, match="ascend from 0 to 40"):
        bounds_of(40, plain(), edges=found)


class Case(NamedTuple):
    importance: Float[np.ndarray, "M"]
    knobs: Settings
    pinned: Bool[np.ndarray, "M"]
    history: History
    edges: Int[np.ndarray, "B"]


def a_case(data: st.DataObject) -> Case:
    """Any prompt, cut by its borders, or anywhere at all; half of them are later turns of a conversation."""
    draw = data.draw
    size, chunk = draw(st.integers(2, 300)), draw(st.integers(1, 40))
    chance = np.random.default_rng(draw(st.integers(0, 2**32)))
    before = draw(st.one_of(st.just(0), st.integers(0, size - 1)))
    by_text = draw(st.booleans())
    if by_text:
        edges = segments(chance.choice(3, size, p=[0.85, 0.1, 0.05]).astype(np.int8), chunk)
    else:
        edges = np.array([0, *np.flatnonzero(chance.random(size - 1) < 0.1) + 1, size])
    knobs = Settings(
        chunking="text" if by_text else "fixed",
        chunk=chunk,
        halo=draw(st.booleans()),
        normalizer=draw(st.sampled_from(["minmax", "clip", "zscore"])),
        select_mode=draw(st.sampled_from(["mass", "chunk"])),
        keep=draw(st.floats(0, 1)),
        cumulative_mass=draw(st.floats(0.01, 1)),
        max_keep=draw(st.integers(0, 320)),
    )
    return Case(
        importance=chance.integers(0, draw(st.sampled_from([2, 5, 1000])), size).astype(np.float32),
        knobs=knobs,
        pinned=chance.random(size) < draw(st.sampled_from([0.0, 0.02, 0.2])),
        history=History(before, np.flatnonzero(chance.random(before) < chance.random()).astype(np.int32)),
        edges=edges,
    )


@given(st.data())
@settings(max_examples=500, deadline=None)
def test_whatever_the_chunks_the_promises_hold(data: st.DataObject):
    case = a_case(data)
    importance, knobs, pinned, history, edges = case
    size, before = importance.size, history.prompt
    new = np.arange(size) >= before
    forced = (forced_tokens(edges, knobs.chunk) | pinned) & new
    budget = turn_budget(size, before, history.kept.size, knobs)
    try:
        selection = select(*case)
    except BudgetTooSmall:
        assert budget <= forced.sum()
        with pytest.raises(BudgetTooSmall):
            bounds_of(size, knobs, pinned, history, edges)
        return
    except ScoresUnusable:
        assert importance.min() == importance.max()
        return
    bounds_of(size, knobs, pinned, history, edges)
    kept = selection.kept
    assert kept[kept < before].tolist() == history.kept.tolist()
    assert np.isin(np.flatnonzero(forced), kept).all()
    fresh = kept.size - history.kept.size
    if keeps_everything(size - before, knobs):
        assert fresh == size - before
    else:
        assert fresh <= budget
        assert fresh >= min(minimum_kept(size - before), budget)
    if before == 0 and knobs.chunking == "text":
        assert kept.size >= fewest_kept(size, knobs)
    np.testing.assert_array_equal(select(*case).kept, kept)
