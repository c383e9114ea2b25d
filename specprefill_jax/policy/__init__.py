"""Policy: whether the draft is worth running, and the status that says so. Knows no device."""

from specprefill_jax.policy.decision import Decision, Status, decide
from specprefill_jax.policy.tool_guard import OPENING_TOKENS, guard, guarded_roles

__all__ = ["OPENING_TOKENS", "Decision", "Status", "decide", "guard", "guarded_roles"]
