"""Selection: which tokens are kept.

Most examples have no boost and 10 chunks of 4 tokens, all of a chunk with the same value: 40 tokens, of which
at least 4 are kept, and 8 are forced: chunk 0 (the first 4) and chunk 9 (the last).
"""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specprefill_jax.errors import BudgetTooSmall, ScoresUnusable
from specprefill_jax.selection import (
    Selection,
    bounds_of,
    fewest_kept,
    fixed,
    forced_tokens,
    minimum_kept,
    select,
    token_budget,
)
from specprefill_jax.settings import Settings


def plain(**knobs: Any) -> Settings:
    """Settings without boost and with chunks of 4."""
    return Settings(**{"boost_first_n": 0, "boost_last_n": 0, "chunk": 4, **knobs})


def by_chunk(*values: float, chunk: int = 4) -> np.ndarray:
    """Importance in which all tokens of a chunk have the chunk's value."""
    return np.repeat(np.array(values, dtype=np.float32), chunk)


def kept_chunks(selection: Selection) -> list[int]:
    """Indices of the chunks that are kept, all of which must be whole."""
    chunks, counts = np.unique(
        np.searchsorted(selection.edges, selection.kept, side="right") - 1, return_counts=True
    )
    np.testing.assert_array_equal(counts, np.diff(selection.edges)[chunks])
    return chunks.tolist()


MIXED = by_chunk(0, 5, 3, 9, 1, 7, 2, 8, 4, 6)


class TestFixedFraction:
    def test_the_best_chunks_fill_what_the_forced_ones_leave(self):
        # Budget 0.5 * 40 = 20, 8 forced, so three more chunks: values 9 (3), 8 (7), 7 (5).
        selection = select(MIXED, plain(keep=0.5))
        assert kept_chunks(selection) == [0, 3, 5, 7, 9]
        assert (selection.budget, selection.forced, selection.mode) == (20, 8, "chunk")
        assert selection.kept.dtype == np.int32

    @pytest.mark.parametrize(("keep", "count"), [(0.51, 20), (0.59, 24), (0.6, 24), (0.61, 24), (0.3, 12)])
    def test_a_chunk_that_does_not_fit_whole_is_left_out(self, keep: float, count: int):
        # Budgets 21, 24, 24, 25, 12: the largest multiples of 4 in them.
        assert select(MIXED, plain(keep=keep)).kept.size == count

    def test_the_first_chunk_that_does_not_fit_ends_it_even_if_a_cheaper_one_would_fit(self):
        # 5 chunks of 8, forced 0-3 and 32-39: 12. Budget 0.4 * 40 = 16. Chunk 0 lacks 4 tokens, others 8.
        cheap_first = select(by_chunk(9, 1, 8, 2, 0, chunk=8), plain(keep=0.4, chunk=8))
        assert cheap_first.kept.tolist() == [*range(8), *range(32, 40)]
        cheap_second = select(by_chunk(8, 1, 9, 2, 0, chunk=8), plain(keep=0.4, chunk=8))
        assert cheap_second.kept.tolist() == [*range(4), *range(32, 40)]

    def test_of_equal_chunks_the_earlier_is_kept(self):
        # Budget 16: two of the equal chunks.
        assert kept_chunks(select(by_chunk(0, 5, 5, 5, 5, 5, 5, 5, 5, 0), plain(keep=0.4))) == [0, 1, 2, 9]

    def test_chunks_of_the_same_scores_in_another_order_are_equal(self):
        # Divided by the largest, 7, and summed left to right in floating point, 1 2 4 3 is above 1 2 3 4.
        scores = by_chunk(0, 0, 0, 0, 0, 0, 0, 0, 0, 7)
        for third, sixth in (([1, 2, 3, 4], [1, 2, 4, 3]), ([1, 2, 4, 3], [1, 2, 3, 4])):
            scores[12:16], scores[24:28] = third, sixth
            assert kept_chunks(select(scores, plain(keep=0.3))) == [0, 3, 9]

    @pytest.mark.parametrize("keep", [0.0, 1e-9])
    def test_keeping_nothing_keeps_the_minimum(self, keep: float):
        # 100 tokens: minimum 10; forced 0-3 and the last chunk 96-99; no chunk of 32 fits, so the best one's
        # first two tokens.
        importance = by_chunk(1, 3, 2, 0, chunk=32)[:100]
        selection = select(importance, plain(keep=keep, chunk=32))
        assert selection.kept.tolist() == [0, 1, 2, 3, 32, 33, 96, 97, 98, 99]
        assert selection.budget == 10

    def test_a_budget_of_all_tokens_is_kept_all(self):
        # ceil(0.99 * 40) = ceil(39.6) = 40.
        selection = select(MIXED, plain(keep=0.99))
        assert selection.kept_all
        assert selection.kept.tolist() == list(range(40))

    def test_an_explicit_fraction_above_the_cap_is_capped_with_a_warning_naming_both(
        self, caplog: pytest.LogCaptureFixture
    ):
        selection = select(MIXED, plain(keep=0.5, max_keep=16))
        assert kept_chunks(selection) == [0, 3, 7, 9]
        assert caplog.messages == [
            "keep=0.5 asks for 20 of 40 tokens; max_keep=16 (SP_MAX_KEEP) caps it, and 0 lifts the cap"
        ]

    @pytest.mark.parametrize(
        "knobs", [{"keep": 0.5, "max_keep": 20}, {"select_mode": "chunk", "max_keep": 10}]
    )
    def test_a_cap_that_does_not_bind_or_a_fraction_not_asked_for_is_silent(
        self, knobs: dict[str, Any], caplog: pytest.LogCaptureFixture
    ):
        select(MIXED, plain(**knobs))
        assert not caplog.messages


class TestMass:
    @pytest.mark.parametrize(
        ("mass", "chunks"),
        [
            # Chunk values in rank order 10, 4, 3, 2, 1, of 20 together.
            (0.5, [1]),  # 10 of 20 reach it exactly
            (0.51, [1, 2]),
            (0.7, [1, 2]),  # 14, exactly
            (0.85, [1, 2, 3]),  # 17, exactly
            (0.86, [1, 2, 3, 4]),
            (0.96, [1, 2, 3, 4, 5]),
            (1.0, [1, 2, 3, 4, 5]),  # chunks without any mass are not needed
            (1e-9, [1]),  # at least one chunk is ranked
        ],
    )
    def test_chunks_are_kept_up_to_the_one_that_reaches_the_share(self, mass: float, chunks: list[int]):
        selection = select(by_chunk(0, 10, 4, 3, 2, 1, 0, 0, 0, 0), plain(cumulative_mass=mass))
        assert kept_chunks(selection) == [0, *chunks, 9]
        assert selection.mode == "mass"
        assert selection.budget == 40

    def test_a_share_met_exactly_on_paper_is_met(self):
        # 7 + 2 is 0.9 of 10; divided by 7 and multiplied by 4 in floating point, it falls short by one bit.
        selection = select(by_chunk(0, 7, 2, 1, 0, 0, 0, 0, 0, 0), plain(cumulative_mass=0.9))
        assert kept_chunks(selection) == [0, 1, 2, 9]

    def test_a_short_last_chunk_is_ranked_by_its_own_mean(self):
        # 38 tokens. The last chunk, two tokens of 10, is before chunk 1, four of 8; its 20 of 52 are enough.
        importance = by_chunk(0, 8, 0, 0, 0, 0, 0, 0, 0, 10)[:38]
        selection = select(importance, plain(cumulative_mass=0.38))
        assert selection.kept.tolist() == [0, 1, 2, 3, 36, 37]

    @pytest.mark.parametrize(("mass", "chunks"), [(0.5, []), (0.51, [1]), (0.76, [1, 2])])
    def test_a_forced_chunk_counts_when_its_turn_comes(self, mass: float, chunks: list[int]):
        # Rank order 10 (chunk 9, forced), 5, 2, 2, 1 of 20 together.
        selection = select(by_chunk(0, 5, 2, 2, 1, 0, 0, 0, 0, 10), plain(cumulative_mass=mass))
        assert kept_chunks(selection) == [0, *chunks, 9]

    def test_a_forced_chunk_whose_turn_does_not_come_does_not_count(self):
        # 4 (chunk 0, forced) stands behind 6; half of 20 needs 6 and 5.
        selection = select(by_chunk(4, 6, 5, 3, 2, 0, 0, 0, 0, 0), plain(cumulative_mass=0.5))
        assert kept_chunks(selection) == [0, 1, 2, 9]

    def test_it_ends_at_the_cap(self):
        # All 45 of MIXED would need more than 16 tokens; 8 are forced, then 9 (3) and 8 (7).
        selection = select(MIXED, plain(max_keep=16))
        assert kept_chunks(selection) == [0, 3, 7, 9]
        assert selection.budget == 16

    def test_short_of_the_minimum_it_goes_on_with_whole_chunks_and_then_first_tokens(self):
        # 205 tokens: minimum 20; forced 0-3, 203, 204. Token 204 is the last chunk, is ranked first and has
        # the share alone. So 14 more come by rank: chunks 10, 20, 30 and two tokens of 40.
        importance = np.zeros(205, dtype=np.float32)
        importance[204] = 100
        for chunk, value in ((10, 9), (20, 8), (30, 7), (40, 6)):
            importance[4 * chunk : 4 * chunk + 4] = value
        selection = select(importance, plain(cumulative_mass=0.1))
        expected = [*range(4), *range(40, 44), *range(80, 84), *range(120, 124), 160, 161, 203, 204]
        assert selection.kept.tolist() == expected

    def test_the_minimum_stays_inside_the_cap(self):
        # As above with room for 9: the forced 6 and three tokens of chunk 10, which does not fit whole.
        importance = np.zeros(205, dtype=np.float32)
        importance[40:44] = 9
        selection = select(importance, plain(max_keep=9))
        assert selection.kept.tolist() == [0, 1, 2, 3, 40, 41, 42, 203, 204]


class TestPins:
    def test_pinned_tokens_are_kept_and_take_the_place_of_others(self):
        # Budget 20, 8 forced, 6 pinned (chunk 4 and half of 6): one chunk more fits, that of 9 (3).
        pinned = np.zeros(40, dtype=bool)
        pinned[16:20] = pinned[24:26] = True
        selection = select(MIXED, plain(keep=0.5), pinned)
        assert selection.kept.tolist() == [*range(4), *range(12, 20), 24, 25, *range(36, 40)]
        assert (selection.budget, selection.forced, selection.pinned) == (20, 14, 6)

    def test_pinned_tokens_that_are_forced_anyway_cost_nothing(self):
        pinned = forced_tokens(fixed(40, 4), 4)
        selection = select(MIXED, plain(keep=0.5), pinned)
        assert kept_chunks(selection) == [0, 3, 5, 7, 9]
        assert (selection.forced, selection.pinned) == (8, 8)

    def test_the_rest_of_a_chunk_that_is_pinned_in_part_is_cheaper(self):
        # Budget 16, 8 forced, 3 pinned of the best chunk (3): its last token makes it 12, so 8 (7) fits.
        pinned = np.zeros(40, dtype=bool)
        pinned[12:15] = True
        assert kept_chunks(select(MIXED, plain(keep=0.4), pinned)) == [0, 3, 7, 9]

    def test_in_mass_mode_a_pinned_chunk_counts_when_its_turn_comes(self):
        # Rank order 10, 4, 3, 2, 1 of 20; 17 reach 0.85, the pinned chunk of 3 among them.
        importance = by_chunk(0, 10, 4, 3, 2, 1, 0, 0, 0, 0)
        pinned = by_chunk(0, 0, 0, 1, 0, 0, 0, 0, 1, 0) == 1
        assert kept_chunks(select(importance, plain(), pinned)) == [0, 1, 2, 3, 8, 9]

    def test_no_pins_change_nothing(self):
        without, empty = (
            select(MIXED, plain(keep=0.5)),
            select(MIXED, plain(keep=0.5), np.zeros(40, dtype=bool)),
        )
        np.testing.assert_array_equal(without.kept, empty.kept)
        np.testing.assert_array_equal(without.chunk_scores, empty.chunk_scores)
        assert without.pinned == 0

    def test_pins_of_a_prompt_that_is_kept_whole_are_counted(self):
        selection = select(MIXED, plain(keep=1.0), np.arange(40) < 6)
        assert selection.kept_all
        assert (selection.forced, selection.pinned) == (10, 6)

    def test_a_prompt_that_is_pinned_whole_is_kept_whole_where_the_budget_allows(self):
        assert select(MIXED, plain(), np.ones(40, dtype=bool)).kept_all

    def test_pins_that_leave_no_room_are_refused_with_their_number_and_what_helps(self):
        with pytest.raises(BudgetTooSmall) as error:
            select(MIXED, plain(keep=0.3), np.arange(40) < 8)
        assert str(error.value) == (
            "12 of 40 tokens are always kept (the first 4, the last 2, the last chunk and 8 that are pinned)"
            ", which leaves no room in a budget of 12; "
            "raise keep (SP_KEEP_PCT=0.3), lower chunk (SP_CHUNK=4) or pin less"
        )


class TestBoost:
    def test_a_boosted_chunk_overtakes_a_better_one(self):
        # Chunks of 32. Chunk 1 (tokens 32-63): 0.7 * 1.5 = 1.05; chunk 4: 1. Budget 96: 36 forced, one chunk.
        importance = by_chunk(0, 0.7, 0, 0, 1, 0, 0, 0, 0, 0, chunk=32)
        ends = {*range(4), *range(288, 320)}
        assert set(select(importance, Settings(keep=0.3)).kept.tolist()) == ends | {*range(32, 64)}
        unboosted = select(importance, Settings(keep=0.3, boost_first_mult=1.0))
        assert set(unboosted.kept.tolist()) == ends | {*range(128, 160)}

    def test_a_boost_that_makes_chunks_equal_leaves_it_to_their_order(self):
        # 0.5 * 1.5 = 0.75 exactly; the largest of all, in the forced last chunk, makes 1.
        importance = by_chunk(0, 0.5, 0, 0, 0.75, 0, 0, 0, 0, 1, chunk=32)
        selection = select(importance, Settings(keep=0.3))
        assert selection.chunk_scores[1] == selection.chunk_scores[4] == 0.75
        assert 32 in selection.kept
        assert 128 not in selection.kept


class TestEverything:
    @pytest.mark.parametrize("mode", ["mass", "chunk"])
    def test_keep_1_keeps_all_whatever_the_cap_and_the_scores(self, mode: str):
        selection = select(np.zeros(50, dtype=np.float32), plain(keep=1.0, select_mode=mode, max_keep=10))
        assert selection.kept_all
        assert selection.kept.tolist() == list(range(50))

    @pytest.mark.parametrize("tokens", [1, 2, 3, 4])
    def test_a_prompt_not_above_the_minimum_is_kept_whole(self, tokens: int):
        selection = select(np.ones(tokens, dtype=np.float32), Settings())
        assert selection.kept_all
        assert selection.kept.tolist() == list(range(tokens))
        assert selection.chunk_scores.size == 0


class TestRefusals:
    def test_a_fraction_that_the_forced_tokens_use_up_is_refused_with_the_knobs_that_help(self):
        # 64 tokens: budget 6 (the minimum); forced 4 + 32.
        with pytest.raises(BudgetTooSmall) as error:
            select(np.arange(64, dtype=np.float32), Settings(keep=0.0))
        assert str(error.value) == (
            "36 of 64 tokens are always kept (the first 4, the last 2 and the last chunk), which leaves no "
            "room in a budget of 6; raise keep (SP_KEEP_PCT=0) or lower chunk (SP_CHUNK=32)"
        )

    @pytest.mark.parametrize("max_keep", [1, 8])
    def test_a_cap_without_room_for_one_more_is_refused(self, max_keep: int):
        with pytest.raises(
            BudgetTooSmall, match=rf"raise max_keep \(SP_MAX_KEEP={max_keep}\) or lower chunk"
        ):
            select(MIXED, plain(max_keep=max_keep))

    def test_a_prompt_that_is_forced_whole_does_not_exceed_the_budget_either(self):
        # One chunk of 32, all of it forced; budget ceil(0.3 * 32) = 10.
        with pytest.raises(BudgetTooSmall, match="32 of 32 tokens"):
            select(np.arange(32, dtype=np.float32), Settings(keep=0.3))

    def test_a_cap_with_room_for_one_more_is_not(self):
        assert kept_chunks(select(MIXED, plain(max_keep=9))) == [0, 9]

    def test_scores_that_rank_nothing_are_refused(self):
        with pytest.raises(ScoresUnusable, match="rank nothing"):
            select(np.ones(40, dtype=np.float32), plain())
        with pytest.raises(ScoresUnusable, match="not finite"):
            select(np.where(np.arange(40) == 7, np.nan, MIXED).astype(np.float32), plain())


def test_the_scores_shown_are_the_means_of_normalized_boosted_chunks():
    # (value - 0) / 9, and 1.5 times that in the first chunk.
    selection = select(by_chunk(3, 5, 9, 0), Settings(chunk=4, boost_first_n=4, boost_last_n=0))
    np.testing.assert_allclose(selection.chunk_scores, [1.5 * 3 / 9, 5 / 9, 1, 0], rtol=1e-12)


@pytest.mark.parametrize("tokens", range(512, 512 + 33))
def test_every_length_modulo_the_chunk_keeps_its_tail_and_its_budget(tokens: int):
    importance = np.random.default_rng(tokens).random(tokens, dtype=np.float32)
    selection = select(importance, Settings(keep=0.3))
    assert set(range((tokens - 1) // 32 * 32, tokens)) | {tokens - 2} <= set(selection.kept.tolist())
    assert minimum_kept(tokens) <= selection.kept.size <= selection.budget == -(-3 * tokens // 10)


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, dict[str, Any]]:
    """Importance with many ties, and settings of either mode."""
    tokens = draw(st.integers(1, 300))
    values = draw(st.lists(st.integers(0, 5), min_size=tokens, max_size=tokens))
    knobs = {
        "select_mode": draw(st.sampled_from(["mass", "chunk"])),
        "keep": draw(st.floats(0, 1)),
        "cumulative_mass": draw(st.floats(0.01, 1)),
        "max_keep": draw(st.integers(0, 320)),
        "chunk": draw(st.integers(1, 40)),
    }
    return np.array(values, dtype=np.float32), knobs


@given(cases())
@example((np.array([1], dtype=np.float32), {}))
@settings(max_examples=300, deadline=None)
def test_whatever_the_scores_the_promises_hold(case: tuple[np.ndarray, dict[str, Any]]):
    importance, knobs = case
    chosen = Settings(**knobs)
    forced = np.flatnonzero(forced_tokens(fixed(importance.size, chosen.chunk), chosen.chunk))
    try:
        selection = select(importance, chosen)
    except BudgetTooSmall as error:
        assert token_budget(importance.size, chosen) <= forced.size
        with pytest.raises(BudgetTooSmall, match=re.escape(str(error))):
            bounds_of(importance.size, chosen)
        return
    except ScoresUnusable:
        assert importance.min() == importance.max()
        return
    kept = selection.kept
    assert (np.diff(kept) > 0).all()
    assert 0 <= kept[0] <= kept[-1] < importance.size
    assert np.isin(forced, kept).all()
    assert kept.size <= selection.budget
    assert kept.size >= min(minimum_kept(importance.size), selection.budget)
    assert kept.size >= fewest_kept(importance.size, chosen)
    bounds_of(importance.size, chosen)
    assert selection.kept_all == (kept.size == importance.size)
    if not selection.kept_all and kept.size > minimum_kept(importance.size):
        free = np.setdiff1d(kept, forced)
        whole = np.isin(free // chosen.chunk * chosen.chunk, kept)
        assert whole.all()  # above the minimum, a kept chunk is kept from its first token on
    np.testing.assert_array_equal(select(importance.copy(), Settings(**knobs)).kept, kept)


@given(cases(), st.data())
@settings(max_examples=300, deadline=None)
def test_whatever_is_pinned_is_kept_within_the_budget(
    case: tuple[np.ndarray, dict[str, Any]], data: st.DataObject
):
    importance, knobs = case
    chosen = Settings(**knobs)
    size = importance.size
    pinned = np.zeros(size, dtype=bool)
    for _ in range(data.draw(st.integers(0, 3))):
        start = data.draw(st.integers(0, size - 1))
        pinned[start : data.draw(st.integers(start + 1, min(size, start + 60)))] = True
    forced = forced_tokens(fixed(size, chosen.chunk), chosen.chunk) | pinned
    try:
        selection = select(importance, chosen, pinned)
    except BudgetTooSmall as error:
        assert token_budget(size, chosen) <= forced.sum()
        with pytest.raises(BudgetTooSmall, match=re.escape(str(error))):
            bounds_of(size, chosen, pinned)
        return
    except ScoresUnusable:
        assert importance.min() == importance.max()
        return
    kept = selection.kept
    assert np.isin(np.flatnonzero(forced), kept).all()
    assert kept.size <= selection.budget
    assert kept.size >= min(minimum_kept(size), selection.budget)
    assert (selection.forced, selection.pinned) == (forced.sum(), pinned.sum())
    again = select(importance.copy(), Settings(**knobs), pinned.copy())
    np.testing.assert_array_equal(again.kept, kept)
