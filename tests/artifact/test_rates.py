"""rates.json: beside the artifact and no part of it, for several devices, of use to one build only."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from specprefill_jax.artifact import beside
from specprefill_jax.artifact.beside import RATES_NAME, check_writable, manifest_digest
from specprefill_jax.artifact.hashing import describe_files
from specprefill_jax.artifact.manifest import Manifest
from specprefill_jax.artifact.rates import MeasuredDevice, Rates, read_rates, write_rates
from specprefill_jax.artifact.verify import open_artifact
from specprefill_jax.errors import ArtifactError
from tests.artifact.sample import write_artifact

CPU = MeasuredDevice("local-task", "Some CPU", "", "3.13.0")
GPU = MeasuredDevice("vulkan", "AMD Radeon 780M (RADV)", "radv Mesa 25.0.7", "3.13.0")
TIMES = {"draft": {"prefill_T256_C4096": 12.5, "head": 1}, "target": {"decode_C4096": 0.5}}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_artifact(tmp_path / "artifact")
    return tmp_path / "artifact"


@pytest.fixture
def manifest(directory: Path) -> Manifest:
    return Manifest.read(directory)


def of(manifest: Manifest, device: MeasuredDevice, milliseconds: float = 12.5) -> Rates:
    return Rates(device, manifest_digest(manifest), {"draft": {"head": milliseconds}})


# --- beside the artifact


def test_an_artifact_is_the_same_with_rates_and_without(directory: Path, manifest: Manifest):
    before = open_artifact(directory)
    write_rates(directory, of(manifest, CPU))
    assert open_artifact(directory) == before
    assert describe_files(directory) == manifest.files
    (directory / "rates.json").write_text("damaged")
    assert open_artifact(directory) == before


def test_an_artifact_without_rates_is_silent(
    directory: Path, manifest: Manifest, caplog: pytest.LogCaptureFixture
):
    assert read_rates(directory, manifest, CPU) == {}
    assert caplog.messages == []


# --- what is written is read back


def test_what_was_written_is_read_back(directory: Path, manifest: Manifest):
    path = write_rates(directory, Rates(CPU, manifest_digest(manifest), TIMES))
    assert path == directory / "rates.json"
    assert read_rates(directory, manifest, CPU) == TIMES


def test_each_device_has_its_own_and_writing_keeps_the_others(
    directory: Path, manifest: Manifest, caplog: pytest.LogCaptureFixture
):
    for device, milliseconds in ((GPU, 1.0), (CPU, 2.0), (GPU, 3.0)):
        write_rates(directory, of(manifest, device, milliseconds))
    assert read_rates(directory, manifest, GPU) == {"draft": {"head": 3.0}}
    assert read_rates(directory, manifest, CPU) == {"draft": {"head": 2.0}}
    assert read_rates(directory, manifest, dataclasses.replace(CPU, description="Another")) == {}
    assert caplog.messages == []


def test_the_order_of_writing_leaves_no_trace(directory: Path, manifest: Manifest):
    texts = set()
    for devices in ((CPU, GPU), (GPU, CPU)):
        for device in devices:
            write_rates(directory, of(manifest, device))
        texts.add((directory / "rates.json").read_text())
        (directory / "rates.json").unlink()
    assert len(texts) == 1


def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(
    directory: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
):
    write_rates(directory, of(manifest, CPU, 1.0))
    before = {path.name: path.read_bytes() for path in directory.iterdir()}

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(beside.os, "replace", fail)
    with pytest.raises(ArtifactError, match=r"rates\.json cannot be written: No space left on device"):
        write_rates(directory, of(manifest, CPU, 2.0))
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before


def test_a_new_file_has_the_permissions_of_any_new_file(directory: Path, manifest: Manifest):
    path = write_rates(directory, of(manifest, CPU))
    plain = directory / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode


# --- rates that are of no use


def test_rates_of_another_build_are_ignored_and_said_with_the_command(
    directory: Path, manifest: Manifest, caplog: pytest.LogCaptureFixture
):
    write_rates(directory, of(dataclasses.replace(manifest, minimum_tokens=1), CPU))
    assert read_rates(directory, manifest, CPU) == {}
    (message,) = caplog.messages
    assert message == (
        f"{directory}/rates.json is of another build of the artifact and is ignored; "
        f"`specprefill tune {directory}` measures again"
    )


@pytest.mark.parametrize("changes", [{"driver_version": "radv Mesa 26.0.0"}, {"runtime": "3.14.0"}])
def test_rates_of_another_driver_or_runtime_are_ignored_and_said(
    changes: dict[str, str], directory: Path, manifest: Manifest, caplog: pytest.LogCaptureFixture
):
    write_rates(directory, of(manifest, GPU))
    assert read_rates(directory, manifest, dataclasses.replace(GPU, **changes)) == {}
    (message,) = caplog.messages
    assert "with another driver or IREE and is ignored; `specprefill tune" in message


DAMAGED = {
    "empty": "",
    "half": '{"schema": 1, "dev',
    "a list": "[]",
    "another schema": '{"schema": 2, "devices": []}',
    "no devices": '{"schema": 1}',
    "a device without its fields": '{"schema": 1, "devices": [{}]}',
    "bytes": "\x00\udcff",
    "brackets without end": "[" * 100_000,
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_ignored_with_its_name_and_the_command_that_mends_it(
    text: str, directory: Path, manifest: Manifest, caplog: pytest.LogCaptureFixture
):
    (directory / "rates.json").write_bytes(text.encode(errors="surrogateescape"))
    assert read_rates(directory, manifest, CPU) == {}
    (message,) = caplog.messages
    assert message.startswith("the rates are damaged and are ignored; ")
    assert f"`specprefill tune {directory}` measures again" in message
    assert f"{directory}/rates.json" in message


@pytest.mark.parametrize(
    "value", ["0", "-1", "NaN", "Infinity", "1e999", "9" * 400, "9" * 5000, '"fast"', "true", "null"]
)
def test_a_time_that_cannot_be_is_damage(
    value: str, directory: Path, manifest: Manifest, caplog: pytest.LogCaptureFixture
):
    path = write_rates(directory, of(manifest, CPU, 12.5))
    path.write_text(path.read_text().replace("12.5", value))
    assert read_rates(directory, manifest, CPU) == {}
    assert len(caplog.messages) == 1


def test_a_file_that_cannot_be_opened_stops_nothing(
    directory: Path, manifest: Manifest, caplog: pytest.LogCaptureFixture
):
    (directory / "rates.json").mkdir()
    assert read_rates(directory, manifest, CPU) == {}
    assert "Is a directory" in caplog.text


def test_writing_mends_a_damaged_file(directory: Path, manifest: Manifest, caplog: pytest.LogCaptureFixture):
    (directory / "rates.json").write_text("{")
    write_rates(directory, of(manifest, CPU))
    assert "the damaged rates are replaced" in caplog.text
    assert read_rates(directory, manifest, CPU) == {"draft": {"head": 12.5}}


# --- a directory that cannot be written


UNWRITABLE = r"rates\.json cannot be written: .*make that writable, or"


def test_a_directory_that_cannot_be_written_is_found_out_before_and_while_writing(
    tmp_path: Path, directory: Path, manifest: Manifest
):
    (directory / "rates.json").mkdir()
    for place in (directory, tmp_path / "none"):
        for attempt in (
            lambda at: check_writable(at / RATES_NAME),
            lambda at: write_rates(at, of(manifest, CPU)),
        ):
            with pytest.raises(
                ArtifactError, match=r"rates\.json cannot be written: .*make that writable, or"
            ):
                attempt(place)


def test_finding_out_leaves_nothing_behind(directory: Path):
    before = sorted(os.listdir(directory))
    check_writable(directory / RATES_NAME)
    assert sorted(os.listdir(directory)) == before


def test_the_file_can_be_read_by_a_person(directory: Path, manifest: Manifest):
    document = json.loads(write_rates(directory, of(manifest, GPU)).read_text())
    assert document["schema"] == 1
    assert document["devices"][0]["device"]["description"] == "AMD Radeon 780M (RADV)"
