"""Importance made comparable across a prompt: normalized, boosted, and summed by chunk."""

import math

import numpy as np
from jaxtyping import Float, Int

from specprefill_jax.errors import ScoresUnusable
from specprefill_jax.settings import Settings


def normalize(importance: Float[np.ndarray, "M"]) -> Float[np.ndarray, "M"]:
    """Importance moved linearly to [0, 1], float64.

    Raises:
        ScoresUnusable: a value is not finite, or all are equal, so that nothing is ranked.
    """
    if not np.isfinite(importance).all():
        bad = np.count_nonzero(~np.isfinite(importance))
        raise ScoresUnusable(f"{bad} of {importance.size} importance scores are not finite numbers")
    low, high = float(importance.min()), float(importance.max())
    if low == high:
        raise ScoresUnusable(f"all {importance.size} importance scores are {low:g}, so they rank nothing")
    return (importance.astype(np.float64) - low) / (high - low)


def boost(scores: Float[np.ndarray, "M"], settings: Settings) -> Float[np.ndarray, "M"]:
    """Scores times the boost of the first tokens (system prompt) and of the last (question), or of both."""
    boosted = scores.copy()
    boosted[: settings.boost_first_n] *= settings.boost_first_mult
    boosted[max(0, scores.size - settings.boost_last_n) :] *= settings.boost_last_mult
    return boosted


def chunk_masses(scores: Float[np.ndarray, "M"], chunk: int) -> Float[np.ndarray, "K"]:
    """Sum of each chunk's scores, rounded once: chunks of the same scores tie in whatever order they come."""
    return np.array([math.fsum(scores[start : start + chunk]) for start in range(0, scores.size, chunk)])


def chunk_sizes(tokens: int, chunk: int) -> Int[np.ndarray, "K"]:
    """Tokens in each chunk: `chunk`, and in the last one what is left."""
    return np.minimum(chunk, tokens - np.arange(0, tokens, chunk))
