"""Scoring: which tokens to read together, and what the draft's attention says about each. Knows no device."""

from specprefill_jax.scoring.importance import average_pool, importance
from specprefill_jax.scoring.windows import (
    Window,
    attention_bytes,
    auto_window,
    merge_windows,
    plan_windows,
)

__all__ = [
    "Window",
    "attention_bytes",
    "auto_window",
    "average_pool",
    "importance",
    "merge_windows",
    "plan_windows",
]
