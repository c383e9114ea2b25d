"""Whether a request runs sparse by itself: what the draft would save and cost, as far as is known."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from jaxtyping import Int

from specprefill_jax.engine import Engine, Result
from specprefill_jax.runtime.program import Prefilled
from specprefill_jax.runtime.state import State
from specprefill_jax.session import Session
from specprefill_jax.settings import Settings
from tests.engine.fake import BLOCK, CHAT, Fake, FakeProgram, from_everything, make, prompt

TOKENS = prompt(320, needle_at=130)
# 96 of 320 tokens: at 270 tokens/s that saves 830 ms, and 320 tokens at 600 take the draft 533 ms.
THIRD = Settings(keep=0.3, max_tokens=2, chunking="fixed")
MASS = Settings(max_tokens=2)


def status(result: Result) -> str:
    return str(result.timings.status)


def other(seed: int, size: int = 320) -> Int[np.ndarray, "M"]:
    """A prompt that was not scored before."""
    tokens = prompt(size, needle_at=130)
    tokens[0] = 900 + seed
    return tokens


def test_where_nothing_was_measured_the_guides_rates_decide():
    result = make().engine.generate(TOKENS, THIRD)
    assert status(result) == "active"
    assert result.timings.reason == (
        "keeping 96 of 320 tokens saves 830 ms (assumed), more than 1.2 (break_even_safety) times the 533 ms "
        "of the draft for 320 tokens (assumed)"
    )


def test_by_mass_the_budget_is_all_that_is_known_before_anything_was_kept():
    fake = make()
    result = fake.engine.generate(TOKENS, MASS)
    assert status(result) == "skipped_break_even"
    assert "keeping 320 of 320 tokens saves 0 ms" in result.timings.reason
    assert fake.draft.calls == []
    assert result.kept.size == 320


def test_what_was_kept_of_such_prompts_lately_is_expected_of_the_next():
    fake = make()
    first = fake.engine.generate(TOKENS, dataclasses.replace(MASS, mode="sparse", cumulative_mass=0.3))
    result = fake.engine.generate(other(1), MASS)
    assert status(result) == "active"
    assert f"keeping {first.kept.size} of 320 tokens" in result.timings.reason


@pytest.mark.parametrize(
    ("settings", "runs"),
    [
        (dataclasses.replace(THIRD, break_even_safety=1.5), True),
        (dataclasses.replace(THIRD, break_even_safety=1.6), False),
        (dataclasses.replace(THIRD, spec_throughput=300), False),
        (dataclasses.replace(MASS, spec_throughput=10**6), False),
        (dataclasses.replace(MASS, break_even=False), True),
        (dataclasses.replace(MASS, mode="sparse"), True),
    ],
)
def test_settings_move_the_decision_or_take_it_away(settings: Settings, runs: bool):
    assert (status(make().engine.generate(TOKENS, settings)) == "active") == runs


def slow(fake: Fake, monkeypatch: pytest.MonkeyPatch, *, draft_ms: float, target_ms: float) -> None:
    """From here on a block takes each model this long."""
    now = 0.0
    monkeypatch.setattr("specprefill_jax.engine.clock.time.perf_counter", lambda: now)

    def wrap(program: FakeProgram, milliseconds: float) -> None:
        real = program.prefill

        def prefill(state: State, tokens: Int[np.ndarray, "N"], *rest: Any, **more: Any) -> Prefilled:
            nonlocal now
            now += -(-tokens.size // BLOCK) * milliseconds / 1000
            return real(state, tokens, *rest, **more)

        monkeypatch.setattr(program, "prefill", prefill)

    wrap(fake.draft, draft_ms)
    wrap(fake.target, target_ms)


def test_requests_correct_what_was_assumed(monkeypatch: pytest.MonkeyPatch):
    fake = make()
    slow(fake, monkeypatch, draft_ms=10, target_ms=10)
    for seed in range(3):
        assert status(fake.engine.generate(other(10 + seed), THIRD)) == "active", "three are believed"
    # 20 blocks take the draft 200 ms. The 68 tokens kept are too few to say anything of the target.
    for seed in range(3):
        dense = fake.engine.generate(other(20 + seed), dataclasses.replace(THIRD, mode="dense"))
        assert status(dense) == "disabled"
    result = fake.engine.generate(other(2), THIRD)
    assert status(result) == "skipped_break_even"
    assert "keeping 68 of 320 tokens saves 15" in result.timings.reason
    assert "the 200 ms of the draft for 320 tokens (measured)" in result.timings.reason


def test_a_prompt_that_was_scored_before_costs_nothing_to_score(monkeypatch: pytest.MonkeyPatch):
    fake = make()
    sparse = fake.engine.generate(TOKENS, dataclasses.replace(THIRD, mode="sparse"))
    expensive = dataclasses.replace(THIRD, spec_throughput=1)
    assert status(fake.engine.generate(other(1), expensive)) == "skipped_break_even"
    again = fake.engine.generate(TOKENS, expensive)
    assert (status(again), again.timings.remembered) == ("active", True)
    assert again.kept.tolist() == sparse.kept.tolist()


def test_a_prompt_that_fits_only_sparsely_is_not_skipped():
    fake = make(target_capacity=256)
    assert status(fake.engine.generate(TOKENS, dataclasses.replace(THIRD, spec_throughput=1))) == "active"


def test_only_tokens_still_to_prefill_count():
    fake = make(minimum=1)
    session = Session(fake.engine)
    session.generate(TOKENS, dataclasses.replace(THIRD, mode="sparse"))
    longer = prompt(520, needle_at=130)
    longer[:320] = TOKENS
    result = session.generate(longer, dataclasses.replace(THIRD, spec_throughput=1))
    assert status(result) == "skipped_break_even"
    # 520 * 0.3 = 156, of which 68 were kept before.
    assert "keeping 88 of 200 tokens" in result.timings.reason
    assert "for 200 tokens (by spec_throughput=1)" in result.timings.reason


def test_measured_entries_are_believed_before_any_request():
    fake = make()
    capacity = fake.target.largest_capacity
    block = {f"prefill_T{BLOCK}_C{capacity}": 8.0, f"decode_C{capacity}": 1.0, "head": 1.0}
    draft = {**block, f"prefill_rows_T{BLOCK}_C{capacity}": 8.0}
    engine = Engine(fake.engine.artifact, CHAT, fake.draft, fake.target, {"draft": draft, "target": block})
    result = engine.generate(TOKENS, THIRD)
    assert status(result) == "skipped_break_even"
    # 20 blocks less 6; the draft's 20, its head and two steps.
    assert "saves 112 ms (measured)" in result.timings.reason
    assert "the 163 ms of the draft for 320 tokens (measured)" in result.timings.reason
    assert (
        result.tokens
        == make(speak=from_everything).engine.generate(TOKENS, Settings(mode="dense", max_tokens=2)).tokens
    )
