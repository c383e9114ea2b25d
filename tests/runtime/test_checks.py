"""All checks of an artifact, in order, with what each found."""

import dataclasses
from pathlib import Path

import pytest

from specprefill_jax.artifact.hashing import describe_files
from specprefill_jax.artifact.self_test import SelfTest
from specprefill_jax.artifact.verify import Artifact
from specprefill_jax.runtime.checks import Check, run_checks

ENTRIES = {
    "draft": [
        *("prefill_T4_C16", "prefill_rows_T4_C16", "prefill_T8_C16", "prefill_rows_T8_C16", "decode_C16"),
        *("prefill_T4_C32", "prefill_rows_T4_C32", "prefill_T8_C32", "prefill_rows_T8_C32", "decode_C32"),
        "head",
    ],
    "target": [
        *("prefill_T4_C16", "prefill_T8_C16", "decode_C16", "prefill_T4_C32", "prefill_T8_C32", "decode_C32"),
        "head",
    ],
}


@pytest.fixture
def copy(artifact: Artifact, tmp_path: Path) -> Artifact:
    """The artifact in a directory of its own, to be spoiled."""
    directory = tmp_path / "copy"
    directory.mkdir()
    for name in (*artifact.manifest.files, "manifest.json"):
        (directory / name).write_bytes(artifact.path(name).read_bytes())
    return Artifact(directory, artifact.manifest)


def checks(artifact: Artifact, device: str | None = None, *, files_only: bool = False) -> list[Check]:
    return list(run_checks(artifact.directory, device, files_only=files_only))


def failures(found: list[Check]) -> dict[str, str]:
    return {check.name: check.detail for check in found if check.result == "failed"}


def not_run(found: list[Check]) -> list[str]:
    return [check.name for check in found if check.result == "not run"]


def test_everything_is_checked_and_each_entry_is_measured(artifact: Artifact):
    found = checks(artifact)
    assert {check.result for check in found} == {"passed"}
    names = ["manifest", "files", "IREE", "proof", "device"]
    for role, entries in ENTRIES.items():
        names += [f"{role} loads", *(f"{role} {entry}" for entry in entries)]
    assert [check.name for check in found] == names
    measured = [check for check in found if check.difference is not None]
    assert len(measured) == sum(map(len, ENTRIES.values()))
    assert all(0 <= (check.difference or 0) < (check.allowed or 0) for check in measured)


def test_files_alone_can_be_checked(copy: Artifact):
    assert [check.name for check in checks(copy, files_only=True)] == ["manifest", "files"]


def test_without_a_manifest_there_is_nothing_else_to_check(tmp_path: Path):
    (found,) = run_checks(tmp_path, None, files_only=False)
    assert (found.name, found.result) == ("manifest", "failed")
    assert "has no manifest.json" in found.detail


def test_a_spoiled_file_is_named_and_nothing_is_run(copy: Artifact):
    (copy.directory / "tokenizer.json").write_text("[]")
    found = checks(copy)
    assert "tokenizer.json has sha256" in failures(found)["files"]
    assert not_run(found) == ["self-test of the draft", "self-test of the target"]


def test_a_file_is_hashed_even_where_it_was_noted_as_checked(copy: Artifact, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("specprefill_jax.artifact.verify.STAMPED_ABOVE_BYTES", 0)
    stamp = {"sha256": copy.manifest.files["model.irpa"].sha256}
    monkeypatch.setattr("specprefill_jax.artifact.verify._read_stamp", lambda path: stamp)
    monkeypatch.setattr("specprefill_jax.artifact.verify._stamp", lambda path, sha256: stamp)
    path = copy.directory / "model.irpa"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert "model.irpa has sha256" in failures(checks(copy, files_only=True))["files"]


def test_a_device_asked_for_by_another_name_fails_and_files_are_still_checked(artifact: Artifact):
    found = checks(artifact, "radeon-780m")
    assert list(failures(found)) == ["device"]
    assert next(check.result for check in found if check.name == "files") == "passed"
    assert not_run(found) == ["self-test of the draft", "self-test of the target"]


def test_an_artifact_without_proof_fails_with_its_reason(copy: Artifact):
    proof = dataclasses.replace(copy.manifest.proof, kind="none", reason="never run here")
    dataclasses.replace(copy.manifest, proof=proof).write(copy.directory)
    found = checks(copy)
    assert "never run here" in failures(found)["proof"]
    assert len(not_run(found)) == 2


def test_another_version_of_iree_fails(copy: Artifact):
    tools = {**copy.manifest.build.tools, "iree-base-runtime": "3.12.1"}
    build = dataclasses.replace(copy.manifest.build, tools=tools)
    dataclasses.replace(copy.manifest, build=build).write(copy.directory)
    found = checks(copy)
    assert "made with iree-base-runtime 3.12.1" in failures(found)["IREE"]
    assert len(not_run(found)) == 2


def test_each_entry_that_computes_wrong_is_listed(copy: Artifact):
    path, model = copy.directory / "target.self_test.json", copy.manifest.models["target"]
    test = SelfTest.read(path, model)
    dataclasses.replace(test, next_token=test.next_token + 1).write(path)
    dataclasses.replace(copy.manifest, files=describe_files(copy.directory)).write(copy.directory)
    found = checks(copy)
    assert list(failures(found)) == ["target decode_C16", "target decode_C32"]
    wrong = next(check for check in found if check.result == "failed")
    assert (wrong.difference or 0) > (wrong.allowed or 0)
