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
from specprefill_jax.selection.select import NO_HISTORY, History, Selection, require_room, select

__all__ = [
    "NO_HISTORY",
    "History",
    "Selection",
    "boost",
    "chunk_masses",
    "fewest_kept",
    "forced_tokens",
    "keeps_everything",
    "minimum_kept",
    "normalize",
    "require_room",
    "select",
    "token_budget",
    "turn_budget",
]
