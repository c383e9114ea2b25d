"""`specprefill verify`: a line for each check, and a status that says whether all passed."""

import json
from pathlib import Path

import pytest

from specprefill_jax.runtime.checks import Check
from tests.artifact.sample import write_artifact
from tests.cli.conftest import Run

CHECKS = [
    Check("manifest", "passed", "'demo' for 'cpu'"),
    Check("draft head", "passed", "logits", 1.5e-6, 2e-4),
]
FAILED = Check("draft decode_C512", "failed", "rows [0]", float("nan"), 2e-4)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Check]:
    checks = list(CHECKS)
    monkeypatch.setattr("specprefill_jax.cli.verify.run_checks", lambda *_, **__: iter(checks))
    return checks


def test_the_status_is_0_only_if_every_check_passed(found: list[Check], specprefill: Run):
    assert specprefill("verify", "./mine").status == 0
    found.append(Check("device", "not run", "a check above failed"))
    assert specprefill("verify", "./mine").status == 1
    found[-1] = FAILED
    assert specprefill("verify", "./mine").status == 1


def test_a_line_for_each_check_shows_what_was_measured(found: list[Check], specprefill: Run):
    found.append(FAILED)
    lines = specprefill("verify", "./mine").out.splitlines()
    assert any("draft head" in line and "1.5e-06" in line and "2.0e-04" in line for line in lines)
    assert any("rows [0]" in line and "failed" in line and "nan" in line for line in lines)


def test_json_holds_the_same_and_is_json(found: list[Check], specprefill: Run):
    found.append(FAILED)
    document = json.loads(specprefill("verify", "./mine", "--json").out, parse_constant=pytest.fail)
    assert document["passed"] is False
    assert document["checks"][1] == {
        "name": "draft head",
        "result": "passed",
        "detail": "logits",
        "difference": 1.5e-6,
        "allowed": 2e-4,
    }
    assert document["checks"][2]["difference"] is None


def test_files_alone_are_checked_on_request(specprefill: Run):
    write_artifact(Path("sample"))
    ran = specprefill("verify", "./sample", "--files-only", "--json")
    assert ran.status == 0
    assert [check["name"] for check in json.loads(ran.out)["checks"]] == ["manifest", "files"]
    (Path("sample") / "target.vmfb").write_bytes(b"other!")
    assert specprefill("verify", "./sample", "--files-only").status == 1


def test_an_artifact_that_is_not_there_is_named(specprefill: Run):
    ran = specprefill("verify", "nothing")
    assert ran.status == 2
    assert "no artifact named 'nothing'" in ran.err
