"""Policy: when the draft is run."""

from typing import Any

import pytest

from specprefill_jax.policy import Status, decide
from specprefill_jax.settings import Settings


@pytest.mark.parametrize(("tokens", "run"), [(511, False), (512, True), (513, True)])
def test_a_prompt_exactly_at_the_minimum_runs(tokens: int, run: bool):
    decision = decide(tokens, Settings(), manifest_minimum=512)
    assert decision.run is run
    assert decision.status is (None if run else Status.SKIPPED_MIN_TOKENS)


def test_a_skip_says_the_number_the_limit_and_the_knob():
    decision = decide(511, Settings(), manifest_minimum=512)
    assert decision.reason == "511 tokens are fewer than the minimum of 512 (minimum_tokens)"


def test_a_minimum_in_the_settings_wins_over_the_manifests_even_if_zero():
    assert decide(1, Settings(minimum_tokens=0), manifest_minimum=512).run
    assert not decide(600, Settings(minimum_tokens=601), manifest_minimum=512).run


def test_mode_sparse_skips_the_minimum():
    assert decide(1, Settings(mode="sparse"), manifest_minimum=8192).run


@pytest.mark.parametrize(
    "knobs", [{"mode": "dense"}, {"enabled": False}, {"enabled": False, "mode": "sparse"}]
)
def test_dense_mode_and_the_switch_disable_it(knobs: dict[str, Any]):
    decision = decide(100_000, Settings(**knobs), manifest_minimum=512)
    assert decision.status is Status.DISABLED
    assert not decision.run


def test_a_draft_that_calibration_found_unfit_is_not_run_unless_that_is_asked_for():
    decision = decide(100_000, Settings(), 512, unfit="it keeps 61%")
    assert (decision.status, decision.reason) == (Status.SKIPPED_CALIBRATION, "it keeps 61%")
    assert decide(100_000, Settings(calibration=False), 512, unfit="it keeps 61%").run
    assert decide(100_000, Settings(mode="sparse"), 512, unfit="it keeps 61%").run


def test_statuses_are_the_guides_strings():
    guides = {
        "active",
        "skipped_tool_guard",
        "skipped_break_even",
        "kept_all",
        "disabled",
        "skipped_min_tokens",
    }
    ours = {"skipped_insufficient_budget", "skipped_calibration", "failed_dense"}
    assert {f"{status}" for status in Status} == guides | ours
    assert Status("skipped_break_even") is Status.SKIPPED_BREAK_EVEN
    assert Status("skipped_tool_guard") is Status.SKIPPED_TOOL_GUARD
