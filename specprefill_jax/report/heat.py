"""Importance as a few levels that an eye can tell apart."""

import numpy as np
from jaxtyping import Bool, Float, Int

from specprefill_jax.engine import Scored

LEVELS = 10


def levels(importance: Float[np.ndarray, "M"]) -> Int[np.ndarray, "M"]:
    """0 (least important) to LEVELS - 1, per token.

    By the square root: attention is so peaked that on a linear scale all but a few tokens would look alike.
    """
    low, high = float(importance.min()), float(importance.max())
    if not high > low:
        return np.zeros(importance.size, np.int64)
    scaled = np.sqrt((importance.astype(np.float64) - low) / (high - low))
    return np.minimum((scaled * LEVELS).astype(np.int64), LEVELS - 1)


def kept_mask(scored: Scored) -> Bool[np.ndarray, "M"]:
    """Which tokens are kept."""
    mask = np.zeros(scored.tokens.size, dtype=bool)
    mask[scored.selection.kept] = True
    return mask


def runs(marks: Int[np.ndarray, "M"]) -> list[tuple[int, int]]:
    """The longest spans [start, end) over which `marks` does not change, in order."""
    borders = (np.flatnonzero(np.diff(marks)) + 1).tolist()
    return list(zip([0, *borders], [*borders, marks.size], strict=True))
