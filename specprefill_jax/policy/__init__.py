"""Policy: whether the draft is worth running, what memory that takes, and the status. Knows no device."""

from specprefill_jax.policy.decision import Decision, Status, decide
from specprefill_jax.policy.memory import MemoryPlan, Way, plan_memory, require_memory

__all__ = ["Decision", "MemoryPlan", "Status", "Way", "decide", "plan_memory", "require_memory"]
