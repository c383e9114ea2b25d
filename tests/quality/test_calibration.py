"""Calibration: it finds the head that looks at the fact, keeps as little as will do, says where it fails."""

import dataclasses
from functools import cache

import numpy as np
import pytest

from specprefill_jax.engine import Engine
from specprefill_jax.errors import ArtifactError, SettingError
from specprefill_jax.quality import calibration as module
from specprefill_jax.quality.calibration import (
    CHEAP,
    KEEPS,
    Found,
    calibrate,
    calibration_plan,
    check_wanted,
    choose,
    halves,
    retention,
    written,
)
from specprefill_jax.quality.evaluation import Plan, task_of
from specprefill_jax.quality.retention import Seen
from specprefill_jax.scoring import Rows
from specprefill_jax.selection import segments
from specprefill_jax.settings import Head, Settings
from tests.engine.fake import Attend
from tests.quality.oracle import from_values, oracle, to_values


def plan(count: int = 4) -> Plan:
    made = calibration_plan(oracle().engine, count, 0, ("name",))
    return dataclasses.replace(made, suites=("needle",), fillers=("code",), lengths=(500,))


@cache
def found(attend: Attend = to_values, wanted: float = 0.95) -> Found:
    """What comes out for a fake draft of 2 layers and 3 heads, whose last head alone looks at anything."""
    return calibrate(oracle(attend).engine, plan(), wanted)


def test_the_head_that_looks_at_the_fact_is_the_best_and_the_others_keep_nothing():
    head, share = found().heads[0]
    assert head == Head(1, 2)
    assert share > 0.5
    assert [share for _, share in found().heads[1:]] == [0.0] * 5


def test_what_was_wanted_is_reached_with_as_little_as_will_do():
    made = found().calibration
    assert made.reached
    rows = {row.keep: row for row in found().retention}
    least = min(keep for keep, row in rows.items() if row.chosen >= 0.95)
    assert made.settings["keep"] == least
    assert made.retention == rows[least].chosen
    assert made.lower < made.retention <= made.upper
    assert made.prompts == 2


def test_the_chosen_settings_keep_no_less_than_the_default():
    for row in found().retention:
        assert row.chosen >= row.default


def test_a_draft_that_looks_elsewhere_does_not_reach_it_and_says_so():
    made = found(from_values).calibration
    assert not made.reached
    assert made.settings["keep"] == KEEPS[-1]


def test_it_is_deterministic():
    again = calibrate(oracle().engine, plan(), 0.95)
    assert again == found()


def test_its_settings_are_settings_and_belong_to_this_build():
    made = found().calibration
    assert Settings().with_defaults(made.settings).keep == made.settings["keep"]
    assert made.manifest == module.manifest_digest(oracle().engine.artifact.manifest)


def test_progress_is_told_of_every_phase():
    told: list[tuple[str, int, int]] = []
    calibrate(oracle().engine, plan(2), 0.95, lambda *step: told.append(step))
    assert list(dict.fromkeys(phase for phase, _, _ in told)) == ["read", "heads", "scorers"]
    assert all(0 <= done < total for _, done, total in told)


def test_its_prompts_are_none_of_an_evaluations():
    made = plan()
    assert made.purpose == "calibrate"
    other = dataclasses.replace(made, purpose="eval")
    chat = oracle().engine.chat
    assert task_of(chat, made, made.cells[0], 0) != task_of(chat, other, made.cells[0], 0)


# --- what is chosen


def seen(rows: np.ndarray, *needed: int) -> Seen:
    """A prompt of one query, without lookahead, of lines of 8 tokens."""
    tokens = rows.shape[-1]
    borders = np.where(np.arange(tokens) % 8 == 7, 2, 0).astype(np.int8)
    none = np.zeros((module.LOOKAHEAD, *rows.shape), np.float32)
    return Seen(Rows(rows[None], none), np.array(needed), np.zeros(tokens, bool), borders)


def test_a_loud_head_that_sees_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch):
    """Its attention is the largest everywhere, so that the raw maximum is its noise."""
    monkeypatch.setattr(module, "ROUNDS", 1)
    random = np.random.default_rng(0)
    prompts = []
    for place in range(160, 480, 40):
        rows = np.zeros((1, 2, 640), np.float32)
        rows[0, 0] = random.random(640) * 50
        rows[0, 1, place] = 1
        prompts.append(seen(rows, place))
    ranked = [(Head(0, 1), 1.0), (Head(0, 0), 0.1)]
    chosen = choose(prompts, ranked, rows=1, progress=lambda *_: None)
    assert chosen.heads == (Head(0, 1),)
    assert retention(prompts, chosen)[KEEPS.index(0.1)] == 1
    assert retention(prompts, CHEAP)[KEEPS.index(0.1)] < 0.5


def test_where_everything_is_as_good_the_cheap_defaults_stay():
    rows = np.zeros((1, 1, 640), np.float32)
    rows[0, 0, 200] = 1
    chosen = choose([seen(rows, 200)] * 4, [(Head(0, 0), 1.0)], rows=8, progress=lambda *_: None)
    assert chosen == CHEAP
    assert written(chosen, 0.2) == {"lookahead": 0, "keep": 0.2}


def test_more_queries_than_the_draft_returns_are_not_tried():
    rows = np.zeros((1, 1, 640), np.float32)
    rows[0, 0, 200] = 1
    chosen = choose([seen(rows, 200)], [(Head(0, 0), 1.0)], rows=1, progress=lambda *_: None)
    assert chosen.queries == 1


@pytest.mark.parametrize("chunk", [32, 64])
def test_chunks_are_those_that_the_settings_ask_for(chunk: int):
    one = seen(np.zeros((1, 1, 640), np.float32), 1)
    by_text = dataclasses.replace(CHEAP, chunk=chunk, chunking="text")
    np.testing.assert_array_equal(one.edges(by_text), segments(one.borders, chunk))
    np.testing.assert_array_equal(
        one.edges(dataclasses.replace(by_text, chunking="fixed")), np.arange(0, 641, chunk)
    )


TWO_AXES = (({"sinks": 0}, {"sinks": 4}), ({"per_head": "raw"}, {"per_head": "peak"}))


def test_what_a_later_choice_makes_needless_goes_back(monkeypatch: pytest.MonkeyPatch):
    """At first sinks help; with the head that is then chosen they do not."""
    monkeypatch.setattr(
        module, "AXES", (({"sinks": 0}, {"sinks": 4}), ({"per_head": "raw"}, {"per_head": "peak"}))
    )

    def worth(_: object, settings: Settings) -> float:
        return 0.9 if settings.per_head == "peak" else 0.5 if settings.sinks else 0.1

    monkeypatch.setattr(module, "mean_retention", worth)
    none = seen(np.zeros((1, 1, 640), np.float32), 1)
    chosen = choose([none] * 20, [(Head(0, 0), 1.0)], rows=8, progress=lambda *_: None)
    assert (chosen.per_head, chosen.sinks) == ("peak", 0)


def test_a_group_is_tried_again_after_another_changed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        module, "AXES", (({"sinks": 0}, {"sinks": 4}), ({"per_head": "raw"}, {"per_head": "peak"}))
    )

    def worth(_: object, settings: Settings) -> float:
        if settings.per_head == "raw":
            return 0.5 - settings.sinks / 100
        return 0.6 + settings.sinks / 100

    monkeypatch.setattr(module, "mean_retention", worth)
    none = seen(np.zeros((1, 1, 640), np.float32), 1)
    chosen = choose([none] * 20, [(Head(0, 0), 1.0)], rows=8, progress=lambda *_: None)
    assert (chosen.per_head, chosen.sinks) == ("peak", 4)


def test_both_halves_have_prompts_of_every_cell():
    prompts = [seen(np.zeros((1, 1, 640), np.float32), cell) for _ in range(4) for cell in range(6)]
    for half in halves(prompts, 6):
        assert sorted(int(one.needed[0]) for one in half) == sorted([*range(6)] * 2)


# --- bad input


def test_without_a_draft_there_is_nothing_to_calibrate():
    made = oracle().engine
    alone = Engine(made.artifact, made.chat, None, made.target, no_draft="this artifact has no draft")
    with pytest.raises(ArtifactError, match="only a draft has attention"):
        calibrate(alone, plan(), 0.95)


@pytest.mark.parametrize("wanted", [0.0, -1.0, 1.01, float("nan")])
def test_a_retention_that_is_no_share_is_refused(wanted: float):
    with pytest.raises(SettingError, match="give a share"):
        check_wanted(wanted)


def test_prompts_are_as_long_as_the_caches_allow():
    assert calibration_plan(oracle().engine, 2, 0, ("name",)).lengths == (1000, 2000)
