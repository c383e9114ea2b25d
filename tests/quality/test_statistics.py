"""Intervals compared with published ones, and with what follows from their definition."""

import pytest

from specprefill_jax.quality.statistics import paired_difference, wilson

PUBLISHED = 1e-4
"""Published bounds have four decimals; one of table III is cut off rather than rounded."""


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        # Newcombe, Statistics in Medicine 17 (1998), 857-872, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_intervals_are_the_published_ones(successes: int, trials: int, low: float, high: float):
    found = wilson(successes, trials)
    assert found.value == successes / trials
    assert found[1:] == pytest.approx((low, high), abs=PUBLISHED)


@pytest.mark.parametrize(
    ("pairs", "low", "high"),
    [
        # Newcombe, Statistics in Medicine 17 (1998), 2635-2650, table III, method 10.
        ((36, 12, 2, 0), 0.0569, 0.3404),
        ((20, 12, 2, 16), 0.0562, 0.3292),
        ((18, 12, 2, 18), 0.0562, 0.3290),
        ((36, 14, 0, 0), 0.1528, 0.4167),
        ((35, 14, 0, 1), 0.1461, 0.4175),
        ((18, 14, 0, 18), 0.1441, 0.3963),
        ((2, 97, 1, 0), 0.8721, 0.9854),
        ((1, 97, 1, 1), 0.8736, 0.9850),
        ((0, 30, 0, 0), 0.8395, 1.0),
        ((54, 0, 0, 0), -0.0664, 0.0664),
        ((30, 0, 0, 24), -0.0358, 0.0358),
        # Fagerland, Lydersen and Laake, Statistical Analysis of Contingency Tables, chapter 8.
        ((59, 6, 16, 80), -0.1186, -0.0046),
    ],
)
def test_intervals_of_paired_differences_are_the_published_ones(
    pairs: tuple[int, int, int, int], low: float, high: float
):
    both, first, second, neither = pairs
    found = paired_difference(both, first, second, neither)
    assert found.value == (first - second) / sum(pairs)
    assert found[1:] == pytest.approx((low, high), abs=PUBLISHED)


def test_a_difference_turned_around_has_its_bounds_turned_around():
    value, low, high = paired_difference(20, 12, 2, 16)
    assert paired_difference(20, 2, 12, 16) == pytest.approx((-value, -high, -low))


def test_nothing_is_said_of_no_trials():
    with pytest.raises(ValueError, match="0 successes of 0 trials"):
        wilson(0, 0)
    with pytest.raises(ValueError, match="no counts of pairs"):
        paired_difference(0, 0, 0, 0)
    with pytest.raises(ValueError, match="no counts of pairs"):
        paired_difference(3, -1, 0, 0)


def test_bounds_stay_between_no_success_and_all():
    assert wilson(0, 7).low == 0
    assert wilson(7, 7).high == 1
