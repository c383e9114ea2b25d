"""Importance made comparable across a prompt: normalized, boosted, and summed by chunk."""

import math
from itertools import pairwise
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from specprefill_jax.errors import ScoresUnusable
from specprefill_jax.settings import Settings

CLIPPED = (1, 99)
"""Percentiles of importance that `clip` takes for the smallest and the largest of all."""


def normalize(
    importance: Float[np.ndarray, "M"], normalizer: Literal["minmax", "clip", "zscore"] = "minmax"
) -> Float[np.ndarray, "M"]:
    """Importance as scores of 0 or more, float64.

    `minmax` moves it linearly to [0, 1]. `clip` does so from the first percentile to the 99th, and what is
    outside them is 0 or 1; where both are the same, it is `minmax`. `zscore` gives by how many standard
    deviations it is above the mean, and 0 to what is below.

    Raises:
        ScoresUnusable: a value is not finite, or all are equal, so that nothing is ranked.
    """
    if not np.isfinite(importance).all():
        bad = np.count_nonzero(~np.isfinite(importance))
        raise ScoresUnusable(f"{bad} of {importance.size} importance scores are not finite numbers")
    low, high = float(importance.min()), float(importance.max())
    if low == high:
        raise ScoresUnusable(f"all {importance.size} importance scores are {low:g}, so they rank nothing")
    scores = (importance.astype(np.float64) - low) / (high - low)
    if normalizer == "zscore":
        return np.maximum((scores - scores.mean()) / scores.std(), 0)
    if normalizer == "clip":
        low, high = np.percentile(scores, CLIPPED)
        return np.clip((scores - low) / (high - low), 0, 1) if low < high else scores
    return scores


def boost(scores: Float[np.ndarray, "M"], settings: Settings) -> Float[np.ndarray, "M"]:
    """Scores times the boost of the first tokens (system prompt) and of the last (question), or of both."""
    boosted = scores.copy()
    boosted[: settings.boost_first_n] *= settings.boost_first_mult
    boosted[max(0, scores.size - settings.boost_last_n) :] *= settings.boost_last_mult
    return boosted


def chunk_masses(scores: Float[np.ndarray, "M"], edges: Int[np.ndarray, "B"]) -> Float[np.ndarray, "K"]:
    """Sum of each chunk's scores, rounded once: chunks of the same scores tie in whatever order they come."""
    return np.array([math.fsum(scores[start:end]) for start, end in pairwise(edges.tolist())])


def peaks_at_borders(
    scores: Float[np.ndarray, "M"], edges: Int[np.ndarray, "B"], reach: int
) -> tuple[Bool[np.ndarray, "K"], Bool[np.ndarray, "K"]]:
    """Whether each chunk has its largest score in its first `reach` tokens, and whether in its last.

    Where several of its tokens have that score, any of them counts. The prompt's own ends are no borders.
    """
    starts, sizes = edges[:-1], np.diff(edges)
    peak = scores == np.repeat(np.maximum.reduceat(scores, starts), sizes)
    place = np.arange(scores.size)
    near_start = place - np.repeat(starts, sizes) < reach
    near_end = np.repeat(edges[1:], sizes) - place <= reach
    first = np.logical_or.reduceat(peak & near_start, starts)
    last = np.logical_or.reduceat(peak & near_end, starts)
    first[0] = last[-1] = False
    return first, last
