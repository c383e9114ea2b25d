"""Intervals for proportions, of one way and of the difference between two on the same prompts."""

import math
from typing import NamedTuple

Z95 = 1.959963984540054
"""The normal distribution's two-sided 95% point."""


class Interval(NamedTuple):
    """An estimate and the bounds of its 95% confidence interval."""

    value: float
    low: float
    high: float


def wilson(successes: int, trials: int) -> Interval:
    """A proportion with Wilson's score interval (1927).

    Raises:
        ValueError: there are no trials, or more successes than trials.
    """
    if not 0 <= successes <= trials or trials == 0:
        raise ValueError(f"{successes} successes of {trials} trials are no proportion")
    share, square = successes / trials, Z95**2
    center = successes + square / 2
    half = Z95 * math.sqrt(successes * (1 - share) + square / 4)
    whole = trials + square
    # At 0 and at 1 the bound is the share itself, which rounding would miss.
    low = 0.0 if successes == 0 else (center - half) / whole
    high = 1.0 if successes == trials else (center + half) / whole
    return Interval(share, low, high)


def paired_difference(both: int, first: int, second: int, neither: int) -> Interval:
    """The first proportion minus the second, of pairs in which both, only one or neither succeeded.

    Newcombe's method 10 (Statistics in Medicine 17, 1998, 2635-2650): the distances of both Wilson intervals,
    squared and added, with their correlation phi taken toward 0 by a continuity correction.

    Raises:
        ValueError: there are no pairs, or a count is negative.
    """
    pairs = both + first + second + neither
    if min(both, first, second, neither) < 0 or pairs == 0:
        raise ValueError(f"{both}, {first}, {second} and {neither} are no counts of pairs")
    p1, l1, u1 = wilson(both + first, pairs)
    p2, l2, u2 = wilson(both + second, pairs)
    phi = _phi(both, first, second, neither)
    below = _added(p1 - l1, u2 - p2, phi)
    above = _added(u1 - p1, p2 - l2, phi)
    difference = (first - second) / pairs
    return Interval(difference, difference - below, difference + above)


def _phi(both: int, first: int, second: int, neither: int) -> float:
    """Correlation of the two successes; 0 where one of them is constant, or where it may be chance."""
    margins = (both + first) * (second + neither) * (both + second) * (first + neither)
    if margins == 0:
        return 0.0
    product = both * neither - first * second
    if product > 0:
        product = max(product - (both + first + second + neither) / 2, 0)
    return product / math.sqrt(margins)


def _added(one: float, other: float, phi: float) -> float:
    # Rounding may leave a square that should be 0 just below it.
    return math.sqrt(max(one**2 - 2 * phi * one * other + other**2, 0.0))
