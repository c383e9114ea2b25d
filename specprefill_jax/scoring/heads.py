"""One head's attention made comparable with another's, each in a few lines.

A head that always looks at the same few tokens has large values and says little; raw maxima listen to it
alone. None of the public implementations of SpecPrefill does more than the raw maximum.
"""

from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import Float

from specprefill_jax.scoring.scorer import PerHead

FLOOR = 1e-3
"""Share of the mean attention, 1/M, below which a logarithm does not tell one token from another."""


def raw(rows: Float[np.ndarray, "*heads M"]) -> Float[np.ndarray, "*heads M"]:
    """The attention itself: the guide's rule."""
    return rows


def peak(rows: Float[np.ndarray, "*heads M"]) -> Float[np.ndarray, "*heads M"]:
    """As a share of the head's own largest: every head has one token of 1."""
    largest = rows.max(axis=-1, keepdims=True)
    return rows / np.where(largest == 0, 1, largest)


def zscore(rows: Float[np.ndarray, "*heads M"]) -> Float[np.ndarray, "*heads M"]:
    """The logarithm in standard deviations above the head's mean."""
    logs = _log(rows)
    deviation = logs.std(axis=-1, keepdims=True)
    return (logs - logs.mean(axis=-1, keepdims=True)) / np.where(deviation == 0, 1, deviation)


def rank(rows: Float[np.ndarray, "*heads M"]) -> Float[np.ndarray, "*heads M"]:
    """The share of the prompt's tokens that the head attends to less; of equals the later has more."""
    order = np.argsort(rows, axis=-1, kind="stable")
    ranks = np.empty(rows.shape)
    np.put_along_axis(ranks, order, np.arange(rows.shape[-1]) / rows.shape[-1], axis=-1)
    return np.where(np.isfinite(rows), ranks, np.nan)


def median(rows: Float[np.ndarray, "*heads M"]) -> Float[np.ndarray, "*heads M"]:
    """The logarithm above the head's median, in median absolute deviations."""
    logs = _log(rows)
    above = logs - np.median(logs, axis=-1, keepdims=True)
    spread = np.median(np.abs(above), axis=-1, keepdims=True)
    return above / np.where(spread == 0, 1, spread)


def _log(rows: Float[np.ndarray, "*heads M"]) -> Float[np.ndarray, "*heads M"]:
    return np.log(rows + FLOOR / rows.shape[-1])


PER_HEAD: Mapping[PerHead, Callable[[np.ndarray], np.ndarray]] = {
    "raw": raw,
    "peak": peak,
    "zscore": zscore,
    "rank": rank,
    "median": median,
}
