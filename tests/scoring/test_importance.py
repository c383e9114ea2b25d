"""Importance: pooling, maxima and the mean."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specprefill_jax.errors import ScoresUnusable, SettingError
from specprefill_jax.scoring import Rows, Scorer, average_pool, check_scorer, importance, max_pool
from specprefill_jax.scoring.heads import PER_HEAD
from specprefill_jax.scoring.scorer import PerHead
from specprefill_jax.settings import Head


def rows(*values: list[Any]) -> np.ndarray:
    """One step's rows as float32 [A, H, M]."""
    return np.array(values, dtype=np.float32)


def asked(*steps: np.ndarray, lookahead: list[np.ndarray] | None = None) -> Rows:
    """Rows of so many prompt tokens and lookahead steps."""
    return Rows(np.stack(steps), np.stack(lookahead) if lookahead else np.stack(steps)[:0])


def test_without_pooling_it_is_the_guides_max_over_heads_and_layers_then_mean_over_steps():
    prompt_row = rows([[0.1, 0.5, 0.2], [0.3, 0.1, 0.1]], [[0.2, 0.2, 0.6], [0.1, 0.4, 0.1]])
    lookahead = rows([[0.5, 0.1, 0.0], [0.0, 0.3, 0.0]], [[0.1, 0.1, 0.2], [0.0, 0.0, 0.1]])
    # Maxima of the prompt's row: .3 .5 .6; of the lookahead's: .5 .3 .2; their means: .4 .4 .4.
    result = importance(asked(prompt_row, lookahead=[lookahead]), Scorer(pool=0))
    np.testing.assert_allclose(result, [0.4, 0.4, 0.4], rtol=1e-6)
    assert result.dtype == np.float32


def test_pooling_divides_by_the_tokens_that_exist_at_the_edges():
    # Over 3 tokens: (3+6)/2, (3+6+0)/3, (6+0+3)/3, (0+3+9)/3, (3+9)/2.
    pooled = average_pool(rows([[3, 6, 0, 3, 9]]), pool=3)
    np.testing.assert_array_equal(pooled, [[[4.5, 3, 3, 4, 6]]])


def test_pooling_wider_than_the_prompt_is_its_mean():
    np.testing.assert_array_equal(average_pool(rows([[3, 6, 0]]), pool=13), [[[3, 3, 3]]])
    np.testing.assert_array_equal(average_pool(rows([[5]]), pool=13), [[[5]]])


def test_pooling_over_thirteen_reaches_six_tokens_each_way():
    spike = np.zeros((1, 1, 40), dtype=np.float32)
    spike[0, 0, 20] = 13
    pooled = average_pool(spike, pool=13)[0, 0]
    np.testing.assert_array_equal(np.flatnonzero(pooled), np.arange(14, 27))
    assert set(pooled[14:27]) == {1.0}


def test_a_pool_of_one_is_no_pooling():
    values = rows([[3, 6, 0]])
    np.testing.assert_array_equal(average_pool(values, 1), average_pool(values, 0))
    np.testing.assert_array_equal(average_pool(values, 0), values)


def test_each_head_is_pooled_before_the_max():
    # Pooled heads: [3 2 3] and [3 2 3]. The max first, [6 0 6], would pool to [3 4 3].
    heads = rows([[6, 0, 0], [0, 0, 6]])
    np.testing.assert_array_equal(
        importance(asked(heads), Scorer(pool=3)), np.array([3, 2, 3], dtype=np.float32)
    )


def test_equal_neighborhoods_pool_to_exactly_equal_values_wherever_they_stand():
    pattern = np.random.default_rng(0).random(31, dtype=np.float32)
    pooled = average_pool(np.tile(pattern, 8)[None, None], pool=13)[0, 0]
    np.testing.assert_array_equal(pooled[31:62], pooled[186:217])


@given(tokens=st.integers(1, 60), half=st.integers(0, 30), data=st.data())
def test_pooling_is_the_plain_mean_of_each_neighborhood(tokens: int, half: int, data: st.DataObject):
    values = data.draw(st.lists(st.integers(0, 1000), min_size=tokens, max_size=tokens))
    pooled = average_pool(rows([values]), pool=2 * half + 1)[0, 0]
    plain = [np.mean(values[max(0, i - half) : i + half + 1]) for i in range(tokens)]
    np.testing.assert_allclose(pooled, plain, rtol=1e-12)


@pytest.mark.parametrize("per_head", PER_HEAD)
def test_a_value_that_is_not_a_number_stays_visible(per_head: PerHead):
    scorer = Scorer(pool=0, per_head=per_head)
    assert np.isnan(importance(asked(rows([[0.5, np.nan, 0.1], [0.2, 0.2, 0.2]])), scorer)[1])


@pytest.mark.parametrize("shape", [(0, 2, 8, 5), (1, 0, 8, 5)])
def test_a_draft_without_rows_is_refused(shape: tuple[int, ...]):
    nothing = np.zeros(shape, dtype=np.float32)
    with pytest.raises(ScoresUnusable, match="no attention rows"):
        importance(Rows(nothing, nothing[:0]), Scorer())


def test_the_last_queries_are_asked_and_older_ones_are_not():
    old, middle, last = rows([[9, 0, 0]]), rows([[0, 4, 0]]), rows([[0, 0, 2]])
    scorer = Scorer(pool=0, queries=2)
    np.testing.assert_array_equal(importance(asked(old, middle, last), scorer), [0, 2, 1])
    np.testing.assert_array_equal(importance(asked(last), scorer), [0, 0, 2])


def test_lookahead_counts_like_one_more_query():
    last, step = rows([[0, 0, 2]]), rows([[4, 0, 0]])
    np.testing.assert_array_equal(importance(asked(last, lookahead=[step]), Scorer(pool=0)), [2, 0, 1])


def test_the_mean_over_heads_hears_them_all():
    heads = rows([[1, 0, 0], [0, 4, 0]], [[1, 0, 0], [1, 0, 1]])
    np.testing.assert_array_equal(
        importance(asked(heads), Scorer(pool=0, across="mean")), np.array([0.75, 1, 0.25], np.float32)
    )


def test_only_the_chosen_heads_count():
    heads = rows([[1, 0, 0], [0, 2, 0]], [[0, 0, 3], [4, 0, 0]])
    chosen = Scorer(pool=0, heads=(Head(0, 1), Head(1, 0)))
    np.testing.assert_array_equal(importance(asked(heads), chosen), [0, 2, 3])
    np.testing.assert_array_equal(heads, rows([[1, 0, 0], [0, 2, 0]], [[0, 0, 3], [4, 0, 0]]))


@pytest.mark.parametrize("head", [Head(2, 0), Head(0, 3)])
def test_a_head_that_the_draft_lacks_is_an_error_that_says_what_it_has(head: Head):
    check_scorer(Scorer(heads=(Head(1, 2),)), layers=2, heads=3, rows=8)
    with pytest.raises(SettingError, match="2 attention layers of 3 heads; layers are from 0 to 1"):
        check_scorer(Scorer(heads=(head,)), layers=2, heads=3, rows=8)


def test_more_queries_than_the_draft_returns_rows_of_is_an_error():
    check_scorer(Scorer(queries=8), layers=2, heads=3, rows=8)
    with pytest.raises(SettingError, match=r"queries=9: .* the rows of 8 tokens"):
        check_scorer(Scorer(queries=9), layers=2, heads=3, rows=8)


def test_sinks_count_for_nothing_and_do_not_weigh_on_the_rest():
    heads = rows([[90, 2, 4], [0, 1, 0]])
    raw = importance(asked(heads), Scorer(pool=0, sinks=1))
    np.testing.assert_array_equal(raw, [0, 2, 4])
    peak = importance(asked(heads), Scorer(pool=0, sinks=1, per_head="peak"))
    np.testing.assert_array_equal(peak, [0, 1, 1])


def test_maximum_pooling_takes_the_largest_neighbor_and_nothing_from_beyond_the_edges():
    pooled = max_pool(rows([[-3, -6, 0, 3, 9]]), pool=3)
    np.testing.assert_array_equal(pooled, [[[-3, 0, 3, 9, 9]]])
    np.testing.assert_array_equal(max_pool(rows([[1, 2]]), pool=0), [[[1, 2]]])


@pytest.mark.parametrize("per_head", sorted(set(PER_HEAD) - {"raw"}))
@given(data=st.data())
def test_heads_are_comparable_once_a_head_may_be_scaled(per_head: PerHead, data: st.DataObject):
    """Twice the attention of one head says nothing new: it is a head like the others."""
    values = data.draw(st.lists(st.integers(50, 1000), min_size=8, max_size=40, unique=True))
    row = np.array([values], dtype=np.float64) / 1024
    once = PER_HEAD[per_head](row)
    np.testing.assert_allclose(PER_HEAD[per_head](row * 2), once, atol=0.02 * max(1, np.abs(once).max()))


@pytest.mark.parametrize(
    ("per_head", "expected"),
    [
        ("raw", [0.1, 0.4, 0.2, 0.2]),
        ("peak", [0.25, 1, 0.5, 0.5]),
        ("rank", [0, 0.75, 0.25, 0.5]),
    ],
)
def test_values_by_hand(per_head: PerHead, expected: list[float]):
    row = np.array([[0.1, 0.4, 0.2, 0.2]])
    np.testing.assert_allclose(PER_HEAD[per_head](row), [expected])


def test_logarithms_are_measured_against_the_heads_own_spread():
    row = np.exp2([[-2.0, -4, -6, -8, -10]])
    above = np.array([[4.0, 2, 0, -2, -4]])  # powers of two above the median, which is the mean too
    np.testing.assert_allclose(PER_HEAD["median"](row), above / 2, atol=0.15)
    np.testing.assert_allclose(PER_HEAD["zscore"](row), above / np.std(above), atol=0.15)


@pytest.mark.parametrize("per_head", PER_HEAD)
def test_a_head_that_says_nothing_says_nothing_and_breaks_nothing(per_head: PerHead):
    flat = PER_HEAD[per_head](np.zeros((1, 6)))
    assert np.isfinite(flat).all()
    if per_head != "rank":  # a rank is a rank: later tokens win among equals
        np.testing.assert_array_equal(flat, np.zeros((1, 6)))
