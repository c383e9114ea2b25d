"""Selection: from importance per token to the positions that the target reads. Knows no device."""

from specprefill_jax.selection.budget import (
    fewest_kept,
    forced_tokens,
    keeps_everything,
    minimum_kept,
    token_budget,
    turn_budget,
)
from specprefill_jax.selection.scores import boost, chunk_masses, normalize
from specprefill_jax.selection.segments import fixed, segments
from specprefill_jax.selection.select import NO_HISTORY, Bounds, History, Selection, bounds_of, select

__all__ = [
    "NO_HISTORY",
    "Bounds",
    "History",
    "Selection",
    "boost",
    "bounds_of",
    "chunk_masses",
    "fewest_kept",
    "fixed",
    "forced_tokens",
    "keeps_everything",
    "minimum_kept",
    "normalize",
    "segments",
    "select",
    "token_budget",
    "turn_budget",
]
