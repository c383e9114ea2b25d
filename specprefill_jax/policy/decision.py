"""Whether the draft is run for a prompt, and what became of it in the end."""

from dataclasses import dataclass
from enum import StrEnum

from specprefill_jax.settings import Settings


class Status(StrEnum):
    """What SpecPrefill did for a request; the strings appear in `timings.specprefill`."""

    ACTIVE = "active"
    KEPT_ALL = "kept_all"
    DISABLED = "disabled"
    SKIPPED_MIN_TOKENS = "skipped_min_tokens"
    SKIPPED_TOOL_GUARD = "skipped_tool_guard"
    SKIPPED_CALIBRATION = "skipped_calibration"
    SKIPPED_BREAK_EVEN = "skipped_break_even"
    SKIPPED_INSUFFICIENT_BUDGET = "skipped_insufficient_budget"
    FAILED_DENSE = "failed_dense"


@dataclass(frozen=True)
class Decision:
    """Whether to run the draft; `status` is None exactly if so, because the outcome is then still open."""

    status: Status | None
    reason: str

    @property
    def run(self) -> bool:
        """Whether the draft is to be run."""
        return self.status is None


def decide(
    tokens: int,
    settings: Settings,
    manifest_minimum: int,
    *,
    guard: Decision | None = None,
    unfit: str = "",
) -> Decision:
    """Decides for a prompt with `tokens` still to prefill; exactly the minimum is enough.

    Args:
        manifest_minimum: The artifact's own minimum of tokens, which the settings may replace.
        guard: What forbids the draft, whatever it would save; None: nothing does.
        unfit: Why the draft is no guide to what matters, as calibration found; "": nothing speaks against it.
    """
    if not settings.enabled:
        return Decision(Status.DISABLED, "enabled is off")
    if settings.mode == "dense":
        return Decision(Status.DISABLED, "mode is dense")
    if guard is not None:
        return guard
    if settings.mode == "sparse":
        return Decision(None, "mode is sparse, which skips thresholds")
    if unfit and settings.calibration:
        return Decision(Status.SKIPPED_CALIBRATION, unfit)
    minimum = manifest_minimum if settings.minimum_tokens is None else settings.minimum_tokens
    if tokens < minimum:
        reason = f"{tokens} tokens are fewer than the minimum of {minimum} (minimum_tokens)"
        return Decision(Status.SKIPPED_MIN_TOKENS, reason)
    return Decision(None, f"{tokens} tokens reach the minimum of {minimum} (minimum_tokens)")
