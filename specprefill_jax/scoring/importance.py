"""From the draft's attention rows to one importance per prompt token."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from specprefill_jax.errors import ScoresUnusable


def importance(rows: Sequence[Float[np.ndarray, "A H M"]], pool: int) -> Float[np.ndarray, "M"]:
    """Importance of each prompt token, float32: max over heads and layers of pooled rows, mean over steps.

    Args:
        rows: One entry per step: post-softmax attention over the M prompt tokens, of the prompt's last token
            and then of each lookahead token.
        pool: Tokens to average over, per head and before any max; odd, 0 for none (the guide's rule).

    Source: SpecPrefill guide v3.1, "Token Importance"; the pooling is Liu et al. (arXiv:2502.02789).

    Raises:
        ScoresUnusable: the draft gave no rows.
    """
    if not rows or 0 in rows[0].shape:
        raise ScoresUnusable("the draft returned no attention rows, so no token can be ranked")
    strongest = [average_pool(step, pool).max(axis=(0, 1)) for step in rows]
    return np.mean(strongest, axis=0).astype(np.float32)


def average_pool(rows: Float[np.ndarray, "A H M"], pool: int) -> Float[np.ndarray, "A H M"]:
    """Mean over the `pool` tokens around each token, float64; at the prompt's edges, over those that exist.

    A fact's attention peaks on one token; averaging keeps its neighbors across a chunk boundary with it.
    """
    rows = rows.astype(np.float64)
    if pool <= 1:
        return rows
    half = pool // 2
    padded = np.pad(rows, ((0, 0), (0, 0), (half, half)))
    sums = np.lib.stride_tricks.sliding_window_view(padded, pool, axis=-1).sum(axis=-1)
    index = np.arange(rows.shape[-1])
    present = np.minimum(index, half) + 1 + np.minimum(index[::-1], half)
    return sums / present
