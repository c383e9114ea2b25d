"""Policy: whether the draft is worth running, what memory that takes, and the status. Knows no device."""

from specprefill_jax.policy.calibrated import unfit, usable
from specprefill_jax.policy.decision import Decision, Status, decide
from specprefill_jax.policy.memory import SNAPSHOTS, MemoryPlan, Way, plan_memory, require_memory
from specprefill_jax.policy.pace import (
    DRAFT_TOKENS_PER_S,
    TARGET_TOKENS_PER_S,
    Estimate,
    KeptFractions,
    Known,
    Pace,
    break_even,
)
from specprefill_jax.policy.tool_guard import OPENING_TOKENS, guard, guarded_roles

__all__ = [
    "DRAFT_TOKENS_PER_S",
    "OPENING_TOKENS",
    "SNAPSHOTS",
    "TARGET_TOKENS_PER_S",
    "Decision",
    "Estimate",
    "KeptFractions",
    "Known",
    "MemoryPlan",
    "Pace",
    "Status",
    "Way",
    "break_even",
    "decide",
    "guard",
    "guarded_roles",
    "plan_memory",
    "require_memory",
    "unfit",
    "usable",
]
