"""calibration.json: beside the artifact and no part of it, of use to one build only."""

import dataclasses
import json
from pathlib import Path

import pytest

from specprefill_jax.artifact.beside import manifest_digest
from specprefill_jax.artifact.calibration import (
    Calibration,
    read_calibration,
    write_calibration,
)
from specprefill_jax.artifact.hashing import describe_files
from specprefill_jax.artifact.manifest import Manifest
from specprefill_jax.errors import ArtifactError
from tests.artifact.sample import write_artifact

CHOSEN = {"heads": ["0.1", "1.2"], "lookahead": 0, "pool": 7, "keep": 0.15}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_artifact(tmp_path / "artifact")
    return tmp_path / "artifact"


@pytest.fixture
def manifest(directory: Path) -> Manifest:
    return Manifest.read(directory)


@pytest.fixture
def found(manifest: Manifest) -> Calibration:
    return calibration(manifest_digest(manifest))


def calibration(digest: str = "") -> Calibration:
    return Calibration(
        manifest=digest,
        settings=CHOSEN,
        wanted=0.95,
        retention=0.97,
        lower=0.94,
        upper=0.99,
        prompts=120,
        depth=2,
        seed=0,
    )


def test_what_is_written_is_read_back(directory: Path, manifest: Manifest, found: Calibration):
    path = write_calibration(directory, found)
    assert path == directory / "calibration.json"
    assert read_calibration(directory, manifest) == found


def test_an_artifact_is_the_same_with_it_and_without(directory: Path, manifest: Manifest, found: Calibration):
    write_calibration(directory, found)
    assert describe_files(directory) == manifest.files


def test_an_artifact_without_it_is_silent(
    directory: Path, manifest: Manifest, caplog: pytest.LogCaptureFixture
):
    assert read_calibration(directory, manifest) is None
    assert caplog.messages == []


def test_that_of_another_build_is_ignored_aloud(
    directory: Path, manifest: Manifest, caplog: pytest.LogCaptureFixture
):
    write_calibration(directory, calibration("of another"))
    assert read_calibration(directory, manifest) is None
    assert "of another build" in caplog.text
    assert "specprefill calibrate" in caplog.text


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "[]",
        '{"schema": 2}',
        '{"schema": 1, "calibration": {}}',
        "[" * 5000,
    ],
)
def test_a_damaged_file_is_ignored_aloud(
    directory: Path, manifest: Manifest, caplog: pytest.LogCaptureFixture, damage: str
):
    (directory / "calibration.json").write_text(damage)
    assert read_calibration(directory, manifest) is None
    assert "specprefill calibrate" in caplog.text


def test_it_says_whether_what_was_wanted_is_reached():
    """A little less of the prompts put aside may be chance; clearly less is not."""
    assert calibration().reached
    assert dataclasses.replace(calibration(), retention=0.94, upper=0.96).reached
    assert not dataclasses.replace(calibration(), retention=0.9, upper=0.94).reached


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path):
    with pytest.raises(ArtifactError, match=r"calibration\.json cannot be written"):
        write_calibration(tmp_path / "none", calibration())


def test_a_person_can_read_the_file(directory: Path, found: Calibration):
    document = json.loads(write_calibration(directory, found).read_text())
    assert document["calibration"]["settings"]["heads"] == ["0.1", "1.2"]
