"""Policy: whether the draft is worth running, and the status that says so. Knows no device."""

from specprefill_jax.policy.decision import Decision, Status, decide
from specprefill_jax.policy.pace import (
    DRAFT_TOKENS_PER_S,
    TARGET_TOKENS_PER_S,
    Estimate,
    KeptFractions,
    Known,
    Pace,
    break_even,
)

__all__ = [
    "DRAFT_TOKENS_PER_S",
    "TARGET_TOKENS_PER_S",
    "Decision",
    "Estimate",
    "KeptFractions",
    "Known",
    "Pace",
    "Status",
    "break_even",
    "decide",
]
