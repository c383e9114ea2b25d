"""From the draft's attention rows to one importance per prompt token."""

import numpy as np
from jaxtyping import Float

from specprefill_jax.errors import ScoresUnusable, SettingError
from specprefill_jax.scoring.heads import PER_HEAD
from specprefill_jax.scoring.scorer import Rows, Scorer


def importance(rows: Rows, scorer: Scorer) -> Float[np.ndarray, "M"]:
    """Importance of each prompt token, float32.

    Per head: sinks removed, made comparable, pooled. Then the strongest head (or the mean of all), and the
    mean over the queries: the last prompt tokens (as many of those asked for as there are) and lookahead.

    With the defaults and no pooling it is the rule of the SpecPrefill guide v3.1, "Token Importance"; the
    pooling is that of Liu et al. (arXiv:2502.02789).

    Args:
        scorer: One that `check_scorer` found to fit.

    Raises:
        ScoresUnusable: the draft gave no rows.
    """
    asked = [*rows.prompt[max(0, len(rows.prompt) - scorer.queries) :], *rows.lookahead]
    if not asked or 0 in asked[0].shape:
        raise ScoresUnusable("the draft returned no attention rows, so no token can be ranked")
    pool = {"average": average_pool, "max": max_pool}[scorer.pooling]
    total = np.zeros(asked[0].shape[-1])
    for query in asked:
        heads = _chosen(query, scorer).astype(np.float64)
        heads[:, : scorer.sinks] = 0
        pooled = pool(PER_HEAD[scorer.per_head](heads), scorer.pool)
        total += pooled.max(axis=0) if scorer.across == "max" else pooled.mean(axis=0)
    return (total / len(asked)).astype(np.float32)


def average_pool(rows: Float[np.ndarray, "*heads M"], pool: int) -> Float[np.ndarray, "*heads M"]:
    """Mean over the `pool` tokens around each token, float64; at the prompt's edges, over those that exist.

    A fact's attention peaks on one token; averaging keeps its neighbors across a chunk boundary with it.
    """
    rows = rows.astype(np.float64)
    if pool <= 1:
        return rows
    half = pool // 2
    sums = _around(rows, half, 0.0).sum(axis=-1)
    index = np.arange(rows.shape[-1])
    present = np.minimum(index, half) + 1 + np.minimum(index[::-1], half)
    return sums / present


def max_pool(rows: Float[np.ndarray, "*heads M"], pool: int) -> Float[np.ndarray, "*heads M"]:
    """The largest of the `pool` tokens around each token, float64."""
    rows = rows.astype(np.float64)
    return rows if pool <= 1 else _around(rows, pool // 2, -np.inf).max(axis=-1)


def _around(
    rows: Float[np.ndarray, "*heads M"], half: int, beyond: float
) -> Float[np.ndarray, "*heads M pool"]:
    """Each token with `half` others on each side; there is `beyond` beyond the edges."""
    padding = [(0, 0)] * (rows.ndim - 1) + [(half, half)]
    padded = np.pad(rows, padding, constant_values=beyond)
    return np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1, axis=-1)


def check_scorer(scorer: Scorer, *, layers: int, heads: int, rows: int) -> None:
    """Whether a draft can be asked so: before it reads a prompt for nothing.

    Args:
        layers, heads: Its full-attention layers, and the query heads of each.
        rows: How many of the last tokens' attention rows it returns.

    Raises:
        SettingError: a head is named, or more queries are asked for, than it has.
    """
    for layer, head in scorer.heads or ():
        if layer >= layers or head >= heads:
            raise SettingError(
                f"heads={layer}.{head}: the draft has {layers} attention layers of {heads} heads; "
                f"layers are from 0 to {layers - 1} and heads from 0 to {heads - 1}"
            )
    if scorer.queries > rows:
        raise SettingError(
            f"queries={scorer.queries}: the draft was compiled to return the rows of {rows} tokens; ask for "
            f"{rows} or fewer, or compile it with larger `rows`"
        )


def _chosen(query: Float[np.ndarray, "A H M"], scorer: Scorer) -> Float[np.ndarray, "heads M"]:
    """The rows of the heads that count (a copy)."""
    if scorer.heads is None:
        return query.reshape(-1, query.shape[-1]).copy()
    return query[tuple(np.transpose(scorer.heads))]
