"""What a calibration changes: the settings that are not given, and whether the draft is asked at all."""

import dataclasses
import logging
from typing import Any

import pytest

from specprefill_jax.artifact.calibration import Calibration
from specprefill_jax.artifact.verify import Artifact
from specprefill_jax.engine import Engine
from specprefill_jax.policy import plan_memory, usable
from specprefill_jax.settings import Head, Settings
from tests.engine.fake import CHAT, DEMO, Fake, make, prompt
from tests.policy.pair import make_manifest

AUTO = Settings(break_even=False, max_tokens=1)


def calibration(retention: float = 0.97, **chosen: object) -> Calibration:
    return Calibration("", chosen, 0.95, retention, retention - 0.02, retention + 0.02, 100, depth=2, seed=0)


def read(fake: Fake, settings: Settings = AUTO) -> str:
    return str(fake.engine.generate(prompt(320, needle_at=130), settings).timings.status)


def test_the_calibrated_settings_are_used_where_none_are_given():
    fake = make(calibration=calibration(keep=0.25, lookahead=5, heads=["1.2"]))
    result = fake.engine.generate(prompt(320, needle_at=130), AUTO)
    assert (result.timings.status, result.timings.mode, result.timings.looked_ahead) == ("active", "chunk", 5)
    assert 130 in result.kept
    assert 64 < result.kept.size <= 80


def test_the_callers_settings_win():
    fake = make(calibration=calibration(keep=0.2, lookahead=5))
    given = Settings.resolve({"keep": "0.5", "lookahead": "1", "break_even": "off", "max_tokens": "1"})
    result = fake.engine.generate(prompt(320, needle_at=130), given)
    assert result.timings.looked_ahead == 1
    assert 128 < result.kept.size <= 160


def test_without_calibration_it_is_as_if_there_were_none():
    fake, plain = make(calibration=calibration(keep=0.2, lookahead=5)), make()
    settings = Settings(break_even=False, max_tokens=1, calibration=False)
    kept = [
        each.engine.generate(prompt(320, needle_at=130), settings).kept.tolist() for each in (fake, plain)
    ]
    assert kept[0] == kept[1]


def test_a_draft_that_does_not_keep_what_was_wanted_is_not_run_and_the_reason_says_so():
    fake = make(calibration=calibration(retention=0.91))
    result = fake.engine.generate(prompt(320, needle_at=130), AUTO)
    assert result.timings.status == "skipped_calibration"
    assert "91.0% (89.0 to 93.0) of the facts asked for are kept whole, where 95.0%" in result.timings.reason
    assert result.kept.size == 320
    assert fake.draft.calls == []


@pytest.mark.parametrize(
    "settings",
    [Settings(mode="sparse", max_tokens=1), Settings(calibration=False, break_even=False, max_tokens=1)],
)
def test_it_is_run_all_the_same_where_that_is_asked_for(settings: Settings):
    assert read(make(calibration=calibration(retention=0.61)), settings) == "active"


@pytest.mark.parametrize(
    ("size", "status"), [(4095, "skipped_calibration"), (4096, "active"), (6000, "active")]
)
def test_it_is_run_where_the_target_cannot_hold_the_whole_prompt(size: int, status: str):
    fake = make(calibration=calibration(retention=0.61), draft_capacity=8192, target_capacity=4096)
    result = fake.engine.generate(prompt(size, needle_at=130), AUTO)
    assert result.timings.status == status
    assert result.kept.size == size if status == "skipped_calibration" else result.kept.size <= 2000


def test_it_is_run_where_the_memory_allowed_does_not_hold_the_whole_prompt():
    fake, manifest = make(draft_capacity=32768, target_capacity=32768), make_manifest()
    found = calibration(retention=0.61)
    engine = Engine(Artifact(DEMO, manifest), CHAT, fake.draft, fake.target, calibration=found)
    sparse, _, dense = plan_memory(manifest, 20_000, AUTO).ways
    tokens = prompt(20_000, needle_at=130)
    tight = engine.generate(tokens, dataclasses.replace(AUTO, memory=dense.total - 1))
    assert (tight.timings.status, tight.timings.scoring) == ("active", "continuous")
    assert sparse.total < dense.total
    whole = engine.generate(tokens, dataclasses.replace(AUTO, memory=dense.total))
    assert (whole.timings.status, whole.kept.size) == ("skipped_calibration", 20_000)
    short = dataclasses.replace(AUTO, minimum_tokens=0)
    sparse, dense = plan_memory(manifest, 900, short).ways
    assert dense.total < sparse.total
    least = engine.generate(prompt(900), dataclasses.replace(short, memory=dense.total))
    assert least.timings.status == "skipped_calibration", "not a draft that found no room"


def test_scores_are_calibrated_too():
    calibrated = make(calibration=calibration(heads=["0.0"], lookahead=0)).engine
    scored = calibrated.score(prompt(320, needle_at=130), Settings(heads=(Head(1, 2),)))
    assert scored.importance.argmax() in range(124, 137)


def test_what_scores_say_would_be_kept_is_what_an_answer_keeps():
    calibrated = make(calibration=calibration(keep=0.15, halo=True, normalizer="zscore", chunk=16)).engine
    scored = calibrated.score(prompt(320, needle_at=130), AUTO)
    kept = calibrated.generate(prompt(320, needle_at=130), AUTO).kept
    assert (scored.selection.kept.tolist(), scored.chunk) == (kept.tolist(), 16)
    assert 32 < kept.size <= 48


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"pool": 12}, "pool=12"),
        ({"heads": ["9.9"]}, "heads=9.9: the draft has 2"),
        ({"queries": 9}, "queries=9"),
    ],
)
def test_a_calibration_that_the_engine_or_the_draft_cannot_follow_is_ignored_aloud(
    chosen: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        assert usable(calibration(**chosen), make().draft.model) is None
    assert said in caplog.text
    assert "`specprefill calibrate` calibrates again" in caplog.text


def test_a_calibration_that_can_be_followed_is_used():
    good = calibration(pool=11, heads=["1.2"], queries=2)
    assert usable(good, make().draft.model) == usable(good, None) == good
    assert usable(None, make().draft.model) is None
