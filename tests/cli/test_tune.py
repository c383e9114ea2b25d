"""`specprefill tune`: what it measures, writes and prints."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from specprefill_jax.artifact.rates import EntryTimes, read_rates
from specprefill_jax.engine.forecast import Forecast
from specprefill_jax.runtime.device import open_device
from specprefill_jax.runtime.program import Program
from specprefill_jax.runtime.tune import measured_device
from tests.cli.conftest import Run
from tests.engine.fake import Fake, make
from tests.engine.test_forecast import times_at

MEASURED = times_at(4096)


@pytest.fixture
def repeats() -> list[int]:
    """How often the entries of each model were called."""
    return []


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, repeats: list[int]) -> Fake:
    """The engine that is loaded: its artifact in a directory of its own, each of its calls of known time."""
    made = make()
    (tmp_path / "artifact").mkdir()
    made.engine.artifact = dataclasses.replace(made.engine.artifact, directory=tmp_path / "artifact")
    made.target.device = open_device("cpu")

    def measure(program: Program, *, repeats: int, progress: Callable[[int, int], None]) -> EntryTimes:
        called.append(repeats)
        progress(1, 1)
        return MEASURED["draft" if program is made.draft else "target"]

    called = repeats
    monkeypatch.setattr("specprefill_jax.cli.tune.measure", measure)
    monkeypatch.setattr("specprefill_jax.cli.tune.load_engine", lambda *_: made.engine)
    return made


def test_what_was_measured_is_found_again(tuned: Fake, specprefill: Run, repeats: list[int]):
    ran = specprefill("tune", "mine")
    assert (ran.status, ran.err) == (0, "")
    artifact = tuned.engine.artifact
    device = measured_device(tuned.target.device)
    assert read_rates(artifact.directory, artifact.manifest, device) == MEASURED
    assert repeats == [5, 5]


def test_the_table_shows_each_entry_and_its_speed(tuned: Fake, specprefill: Run):
    lines = specprefill("tune", "mine").out.splitlines()
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if "│" in line]
    assert ["draft", "prefill_rows_T16_C4096", "1.000", "16,000"] in rows
    assert ["target", "prefill_T16_C4096", "4.000", "4,000"] in rows
    assert ["target", "decode_C4096", "50.000", "20"] in rows
    assert ["target", "head", "0.250", ""] in rows


def test_the_table_shows_where_break_even_lies(tuned: Fake, specprefill: Run):
    out = specprefill("tune", "mine").out
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if "│" in line]
    assert ["1,024", "308", "164", "256", "80", "no"] in rows
    assert ["2,048", "615", "228", "512", "156", "yes"] in rows
    assert out.splitlines()[-1] == (
        "If this much is kept, the draft pays from 2,048 tokens on: savings must be more than 1.2 times "
        "the cost."
    )


def test_a_draft_that_never_pays_is_said(tuned: Fake, specprefill: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SP_BREAK_EVEN_SAFETY", "9")
    last = specprefill("tune", "mine").out.splitlines()[-1]
    assert last.startswith("If this much is kept, the draft does not pay even for the longest prompt")
    assert "9 times" in last


def test_a_length_that_pays_below_one_that_does_not_is_no_break_even(
    tuned: Fake, specprefill: Run, monkeypatch: pytest.MonkeyPatch
):
    rows = [Forecast(tokens, 1, 1.0, 1.0, 1.0, pays) for tokens, pays in ((1, True), (2, False), (3, True))]
    monkeypatch.setattr("specprefill_jax.cli.tune.forecasts", lambda *_: rows)
    assert "pays from 3 tokens on" in specprefill("tune", "mine").out


def test_json_holds_the_same(tuned: Fake, specprefill: Run, repeats: list[int]):
    ran = specprefill("tune", "mine", "--json", "--repeats", "2")
    document = json.loads(ran.out)
    assert list(document) == ["file", "device", "manifest", "milliseconds", "break_even"]
    assert document["milliseconds"] == MEASURED
    assert document["break_even"][2] == {
        "tokens": 2048,
        "kept": 615,
        "scoring_ms": 228.25,
        "dense_ms": 512.0,
        "sparse_ms": 156.0,
        "pays": True,
    }
    assert Path(document["file"]).is_file()
    assert repeats == [2, 2]


def test_a_directory_that_cannot_be_written_is_said_before_anything_is_measured(
    tuned: Fake, specprefill: Run, repeats: list[int]
):
    tuned.engine.artifact.directory.rmdir()
    ran = specprefill("tune", "mine")
    assert ran.status == 2
    assert "rates.json cannot be written: No such file or directory" in ran.err
    assert repeats == []


@pytest.mark.parametrize("value", ["0", "-3", "many", "1.5"])
def test_a_number_of_repeats_that_cannot_be_is_bad_input(
    tuned: Fake, specprefill: Run, repeats: list[int], value: str
):
    ran = specprefill("tune", "mine", f"--repeats={value}")
    assert ran.status == 2
    assert "--repeats" in ran.err
    assert repeats == []


def test_an_artifact_that_is_not_there_is_named(specprefill: Run):
    ran = specprefill("tune", "nothing")
    assert ran.status == 2
    assert "no artifact named 'nothing'" in ran.err
