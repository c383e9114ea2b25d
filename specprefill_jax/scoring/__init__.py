"""Scoring: which tokens to read together, and what the draft's attention says about each. Knows no device."""

from specprefill_jax.scoring.importance import average_pool, check_scorer, importance, max_pool
from specprefill_jax.scoring.scorer import Rows, Scorer
from specprefill_jax.scoring.windows import (
    Window,
    attention_bytes,
    auto_window,
    merge_windows,
    plan_windows,
)

__all__ = [
    "Rows",
    "Scorer",
    "Window",
    "attention_bytes",
    "auto_window",
    "average_pool",
    "check_scorer",
    "importance",
    "max_pool",
    "merge_windows",
    "plan_windows",
]
