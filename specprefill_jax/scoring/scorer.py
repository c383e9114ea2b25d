"""What a scorer is: how attention rows become one importance per prompt token."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from specprefill_jax.settings import Head, Settings

PerHead = Literal["raw", "peak", "zscore", "rank", "median"]
"""How the rows of different heads are made comparable; see `specprefill_jax.scoring.heads`."""


class Rows(NamedTuple):
    """The draft's attention over the M tokens of a prompt: post-softmax, of A layers and H heads.

    `prompt` is that of the last R prompt tokens, in their order; `lookahead` that of the S tokens after them.
    A row of the lookahead sums to less than 1: its query also attends to the steps before it.
    """

    prompt: Float[np.ndarray, "R A H M"]
    lookahead: Float[np.ndarray, "S A H M"]


@dataclass(frozen=True)
class Scorer:
    """How attention rows become importance.

    Attributes:
        per_head: How the rows of different heads are made comparable.
        across: Whether a token counts as much as in its strongest head, or as in all heads together.
        queries: How many of the last prompt tokens are asked; lookahead tokens are, too.
        pool: Tokens to pool over, per head and before heads are put together; odd, 0 for none.
        pooling: Whether a token gets the mean of the tokens around it, or their largest.
        sinks: How many of the first tokens count for nothing: attention rests there when it has no aim.
        heads: Which heads count, each as (attention layer, head), both from 0; None: all.
    """

    per_head: PerHead = "raw"
    across: Literal["max", "mean"] = "max"
    queries: int = 1
    pool: int = 13
    pooling: Literal["average", "max"] = "average"
    sinks: int = 0
    heads: tuple[Head, ...] | None = None

    @classmethod
    def of(cls, settings: Settings) -> "Scorer":
        """The scorer that settings ask for."""
        return cls(
            per_head=settings.per_head,
            across=settings.across,
            queries=settings.queries,
            pool=settings.pool,
            pooling=settings.pooling,
            sinks=settings.sinks,
            heads=settings.heads,
        )
