"""What a calibration changes: the settings that are not given, and whether the draft is asked at all."""

import logging

import pytest

from specprefill_jax.artifact.calibration import Calibration
from specprefill_jax.engine import engine as module
from specprefill_jax.settings import Head, Settings
from tests.engine.fake import Fake, make, prompt

AUTO = Settings(break_even=False, max_tokens=1)


def calibration(retention: float = 0.97, **chosen: object) -> Calibration:
    return Calibration("", chosen, 0.95, retention, 0.9, 0.99, 100, plain=0.8, depth=2, seed=0)


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
    fake = make(calibration=calibration(retention=379 / 400))
    result = fake.engine.generate(prompt(320, needle_at=130), AUTO)
    assert result.timings.status == "skipped_calibration"
    assert "94.8% of the facts asked for are kept whole, where 95.0% were wanted" in result.timings.reason
    assert result.kept.size == 320
    assert fake.draft.calls == []


@pytest.mark.parametrize(
    "settings",
    [Settings(mode="sparse", max_tokens=1), Settings(calibration=False, break_even=False, max_tokens=1)],
)
def test_it_is_run_all_the_same_where_that_is_asked_for(settings: Settings):
    assert read(make(calibration=calibration(retention=0.61)), settings) == "active"


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
    chosen: dict[str, object], said: str, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        assert module._usable(calibration(**chosen), make().draft) is None
    assert said in caplog.text
    assert "`specprefill calibrate` calibrates again" in caplog.text


def test_a_calibration_that_can_be_followed_is_used():
    good = calibration(pool=11, heads=["1.2"], queries=2)
    assert module._usable(good, make().draft) == module._usable(good, None) == good
    assert module._usable(None, make().draft) is None
