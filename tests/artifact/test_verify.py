"""Files that are not the ones the manifest was written for are refused; large ones are hashed once."""

import os
from pathlib import Path

import pytest

from specprefill_jax.artifact import verify
from specprefill_jax.artifact.locate import cache_folder
from specprefill_jax.artifact.verify import open_artifact
from specprefill_jax.errors import FileMissing, HashMismatch
from tests.artifact.sample import CONTENT, write_artifact


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_artifact(tmp_path / "artifact")
    return tmp_path / "artifact"


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files hashed; files over 50 bytes (the parameter archive) count as large."""
    names: list[str] = []
    real = verify.sha256_of

    def note(path: Path, on_bytes: object = None) -> str:
        names.append(path.name)
        return real(path, on_bytes)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(verify, "sha256_of", note)
    monkeypatch.setattr(verify, "STAMPED_ABOVE_BYTES", 50)
    return names


def test_an_intact_artifact_opens(directory: Path):
    artifact = open_artifact(directory)
    assert artifact.manifest.name == "sample"
    assert artifact.path("target.vmfb").read_bytes() == CONTENT["target.vmfb"]


@pytest.mark.parametrize("name", CONTENT)
def test_each_file_that_is_missing_is_named(name: str, directory: Path):
    (directory / name).unlink()
    with pytest.raises(FileMissing, match=f"{name} is missing, .*'sample' lists it.*specprefill compile"):
        open_artifact(directory)


@pytest.mark.parametrize("name", CONTENT)
def test_each_file_with_another_content_is_named(name: str, directory: Path):
    content = bytearray(CONTENT[name])
    content[-1] ^= 1
    (directory / name).write_bytes(content)
    with pytest.raises(HashMismatch, match=rf"{name} has sha256 \w{{64}}, but its manifest says \w{{64}}\."):
        open_artifact(directory)


def test_a_truncated_file_is_refused_by_its_size(directory: Path, hashed: list[str]):
    (directory / "target.irpa").write_bytes(CONTENT["target.irpa"][:-1])
    with pytest.raises(HashMismatch, match=r"target\.irpa has 99 bytes, but its manifest says 100\."):
        open_artifact(directory)
    assert hashed == []


def test_a_large_file_is_hashed_once_and_the_small_ones_always(directory: Path, hashed: list[str]):
    open_artifact(directory)
    assert sorted(hashed) == sorted(CONTENT)
    hashed.clear()
    open_artifact(directory)
    assert sorted(hashed) == sorted(set(CONTENT) - {"target.irpa"})


def test_a_large_file_that_was_touched_is_hashed_again(directory: Path, hashed: list[str]):
    open_artifact(directory)
    hashed.clear()
    os.utime(directory / "target.irpa", ns=(1, 1))
    open_artifact(directory)
    assert "target.irpa" in hashed


def test_a_large_file_replaced_under_the_same_name_and_time_is_noticed(directory: Path, hashed: list[str]):
    open_artifact(directory)
    path, times = directory / "target.irpa", (directory / "target.irpa").stat()
    other = directory / "other"
    other.write_bytes(b"x" * 100)
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    os.replace(other, path)
    with pytest.raises(HashMismatch):
        open_artifact(directory)


def test_a_manifest_that_wants_another_hash_is_not_satisfied_by_the_stamp(directory: Path, hashed: list[str]):
    open_artifact(directory)
    path = directory / "manifest.json"
    wanted = open_artifact(directory).manifest.files["target.irpa"].sha256
    path.write_text(path.read_text().replace(wanted, "0" * 64))
    with pytest.raises(HashMismatch, match=r"target\.irpa"):
        open_artifact(directory)


def test_a_spoiled_stamp_only_costs_another_hashing(directory: Path, hashed: list[str]):
    open_artifact(directory)
    (stamp,) = (cache_folder() / "verified").iterdir()
    stamp.write_text("{")
    hashed.clear()
    open_artifact(directory)
    assert "target.irpa" in hashed


def test_a_cache_that_cannot_be_written_is_a_warning_only(
    directory: Path, hashed: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "cache").write_text("a file where the cache folder would be")
    open_artifact(directory)
    assert "cannot note in" in caplog.text


def test_progress_hears_all_bytes_to_be_hashed(directory: Path):
    heard: list[tuple[int, int]] = []
    open_artifact(directory, lambda done, total: heard.append((done, total)))
    total = sum(len(content) for content in CONTENT.values())
    assert heard[-1] == (total, total)
    assert [done for done, _ in heard] == sorted(done for done, _ in heard)
