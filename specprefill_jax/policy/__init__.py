"""Policy: whether the draft is worth running, and the status that says so. Knows no device."""

from specprefill_jax.policy.decision import Decision, Status, decide

__all__ = ["Decision", "Status", "decide"]
