"""Scores: normalized, boosted, summed."""

import math
from typing import Literal

import numpy as np
import pytest

from specprefill_jax.errors import ScoresUnusable
from specprefill_jax.selection import boost, chunk_masses, fixed, normalize
from specprefill_jax.settings import Settings


def test_normalizing_moves_the_smallest_to_0_and_the_largest_to_1():
    scores = normalize(np.array([2, 6, 4, 3], dtype=np.float32))
    np.testing.assert_array_equal(scores, [0, 1, 0.5, 0.25])  # (x - 2) / 4
    assert scores.dtype == np.float64


def test_normalizing_survives_the_smallest_and_largest_numbers():
    np.testing.assert_array_equal(normalize(np.array([0, 1e-45, 0], dtype=np.float32)), [0, 1, 0])
    np.testing.assert_array_equal(normalize(np.array([-3e38, 0, 3e38], dtype=np.float32)), [0, 0.5, 1])


ONE_OUTLIER = np.array([*range(100), 10_000], dtype=np.float32)
"""101 values, so that the first and the 99th percentile are values of their own: 1 and 99."""


def test_clipping_scales_what_lies_between_the_first_and_the_99th_percentile():
    scores = normalize(ONE_OUTLIER, "clip")
    np.testing.assert_allclose(scores, [0, *np.arange(99) / 98, 1], rtol=1e-9)
    assert normalize(ONE_OUTLIER)[99] < 0.01, "without clipping one outlier leaves the others nothing"


def test_where_the_percentiles_coincide_nothing_is_clipped():
    needle = np.zeros(300, dtype=np.float32)
    needle[[7, 9]] = [1, 2]
    np.testing.assert_array_equal(normalize(needle, "clip"), normalize(needle))


def test_z_scores_count_deviations_above_the_mean_and_nothing_below_it():
    # The mean is 4.
    scores = normalize(np.array([2, 2, 3, 4, 5, 8, 4, 4], dtype=np.float32), "zscore")
    deviation = np.sqrt((4 + 4 + 1 + 0 + 1 + 16 + 0 + 0) / 8)
    np.testing.assert_allclose(scores, [0, 0, 0, 0, 1 / deviation, 4 / deviation, 0, 0], atol=1e-12)


@pytest.mark.parametrize("normalizer", ["clip", "zscore"])
def test_other_normalizers_survive_extremes_and_refuse_the_same(normalizer: Literal["clip", "zscore"]):
    for extreme in ([0, 1e-45, 0], [-3e38, 0, 3e38]):
        scores = normalize(np.array(extreme, dtype=np.float32), normalizer)
        assert np.isfinite(scores).all()
        assert scores.min() == 0 < scores.max()
    with pytest.raises(ScoresUnusable, match="not finite"):
        normalize(np.array([1, math.nan], dtype=np.float32), normalizer)
    with pytest.raises(ScoresUnusable, match="rank nothing"):
        normalize(np.ones(3, dtype=np.float32), normalizer)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite_are_refused(bad: float):
    with pytest.raises(ScoresUnusable, match=r"^1 of 3 importance scores are not finite numbers$"):
        normalize(np.array([0.1, bad, 0.3], dtype=np.float32))


@pytest.mark.parametrize("value", [0.0, 0.25])
def test_zero_or_constant_scores_are_refused(value: object):
    with pytest.raises(
        ScoresUnusable, match=rf"^all 3 importance scores are {value:g}, so they rank nothing$"
    ):
        normalize(np.full(3, value, dtype=np.float32))


def test_the_first_64_count_half_again_and_the_last_128_three_tenths_more():
    boosted = boost(np.ones(300), Settings())
    np.testing.assert_array_equal(boosted[:64], 1.5)
    np.testing.assert_array_equal(boosted[64:172], 1.0)  # 300 - 128 = 172
    np.testing.assert_array_equal(boosted[172:], 1.3)


def test_a_token_that_is_both_first_and_last_gets_both_boosts():
    settings = Settings(boost_first_n=3, boost_last_n=2, boost_first_mult=2.0, boost_last_mult=3.0)
    np.testing.assert_array_equal(boost(np.ones(4), settings), [2, 2, 6, 3])
    np.testing.assert_array_equal(boost(np.ones(1), settings), [6])


def test_boosting_no_tokens_changes_nothing_and_boosting_leaves_its_input_alone():
    scores = np.array([0.0, 0.5, 1.0])
    np.testing.assert_array_equal(boost(scores, Settings(boost_first_n=0, boost_last_n=0)), scores)
    boost(scores, Settings())
    np.testing.assert_array_equal(scores, [0, 0.5, 1])


def test_chunks_are_summed_and_the_last_may_be_short():
    np.testing.assert_array_equal(chunk_masses(np.array([1.0, 2, 3, 4, 5, 6, 7]), fixed(7, 3)), [6, 15, 7])


def test_the_order_of_tokens_in_a_chunk_does_not_change_its_sum():
    # Left to right in floating point, 0.1 + 0.2 + 0.3 is 0.6000000000000001 and 0.3 + 0.2 + 0.1 is 0.6.
    first, second = chunk_masses(np.array([0.1, 0.2, 0.3, 0.3, 0.2, 0.1]), fixed(6, 3))
    assert first == second
