"""Importance: pooling, maxima and the mean."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specprefill_jax.errors import ScoresUnusable
from specprefill_jax.scoring import average_pool, importance


def rows(*values: list[Any]) -> np.ndarray:
    """One step's rows as float32 [A, H, M]."""
    return np.array(values, dtype=np.float32)


def test_without_pooling_it_is_the_guides_max_over_heads_and_layers_then_mean_over_steps():
    prompt_row = rows([[0.1, 0.5, 0.2], [0.3, 0.1, 0.1]], [[0.2, 0.2, 0.6], [0.1, 0.4, 0.1]])
    lookahead = rows([[0.5, 0.1, 0.0], [0.0, 0.3, 0.0]], [[0.1, 0.1, 0.2], [0.0, 0.0, 0.1]])
    # Maxima of the prompt's row: .3 .5 .6; of the lookahead's: .5 .3 .2; their means: .4 .4 .4.
    result = importance([prompt_row, lookahead], pool=0)
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
    np.testing.assert_array_equal(importance([heads], pool=3), np.array([3, 2, 3], dtype=np.float32))


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


def test_a_value_that_is_not_a_number_stays_visible():
    assert np.isnan(importance([rows([[0.5, np.nan, 0.1], [0.2, 0.2, 0.2]])], pool=0)[1])


@pytest.mark.parametrize("steps", [[], [np.zeros((0, 8, 5), dtype=np.float32)]])
def test_a_draft_without_rows_is_refused(steps: list[np.ndarray]):
    with pytest.raises(ScoresUnusable, match="no attention rows"):
        importance(steps, pool=13)
