"""`specprefill calibrate`: what it prints and writes."""

import json
from pathlib import Path

import pytest

from specprefill_jax.artifact.manifest import Manifest
from specprefill_jax.artifact.verify import Artifact
from specprefill_jax.quality import calibration as module
from tests.cli.conftest import Run
from tests.engine.fake import Attend, Fake
from tests.quality.oracle import from_values, oracle, to_values

FEW = ("calibrate", "somewhere", "--count", "2", "--values", "name")


def loaded(monkeypatch: pytest.MonkeyPatch, folder: Path, attend: Attend) -> Fake:
    """The engine that is loaded: a fake pair whose artifact lies in `folder`; prompts are short."""
    made = oracle(attend)
    manifest: Manifest = made.engine.artifact.manifest
    made.engine.artifact = Artifact(folder, manifest)
    monkeypatch.setattr("specprefill_jax.cli.calibrate.load_engine", lambda *_: made.engine)
    monkeypatch.setattr(module, "LENGTHS", (600,))
    monkeypatch.setattr(module, "AXES", module.AXES[-1:])
    return made


@pytest.fixture
def seeing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fake:
    return loaded(monkeypatch, tmp_path, to_values)


def test_what_was_found_is_printed_and_written(seeing: Fake, specprefill: Run, tmp_path: Path):
    ran = specprefill(*FEW)
    assert ran.status == 0
    assert "1.2" in ran.out
    assert "chosen:" in ran.out
    assert "guide's rule" in ran.out
    written = json.loads((tmp_path / "calibration.json").read_text())["calibration"]
    assert written["wanted"] == 0.95
    assert str(tmp_path / "calibration.json") in ran.out


def test_a_draft_that_falls_short_is_said_and_is_no_error(
    monkeypatch: pytest.MonkeyPatch, specprefill: Run, tmp_path: Path
):
    loaded(monkeypatch, tmp_path, from_values)
    ran = specprefill(*FEW)
    assert ran.status == 0
    assert "The draft does not reach that" in ran.out
    assert "skipped_calibration" in ran.out


def test_json_has_everything(seeing: Fake, specprefill: Run, tmp_path: Path):
    found = json.loads(specprefill(*FEW, "--json").out)
    assert found["file"] == str(tmp_path / "calibration.json")
    assert found["calibration"]["prompts"] == 4
    assert found["heads"][0][0] == [1, 2]
    assert {"keep", "chosen", "default", "plain"} == set(found["retention"][0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--count", "1"), "count must be 2 or more"),
        (("--retention", "0"), "give a share of prompts"),
        (("--values", "poems"), "values must be names separated by commas"),
    ],
)
def test_bad_input_is_refused_before_anything_is_read(
    seeing: Fake, specprefill: Run, arguments: tuple[str, ...], message: str
):
    ran = specprefill(*FEW, *arguments)
    assert ran.status == 2
    assert message in ran.err
    assert seeing.draft.calls == []
