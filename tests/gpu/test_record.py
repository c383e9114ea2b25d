"""What is kept of a run, and what another run takes over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gpu.record import Check, OtherRun, Record, markdown, totals

GOOD = Check("loads", "passed", "in 3 s", {"seconds": 3.0})
BAD = Check("rows", "failed", "differ")
LACKING = Check("gemm", "not offered", "no subgroups of 32")
ABOUT = {"target": "nvidia", "tokens": (4096,)}


def record_with(path: Path | None, **steps: Check) -> Record:
    record = Record(path, ABOUT)
    for name, check in steps.items():
        record.begin(name)
        record.add(name, check)
        record.end(name, 1.25)
    return record


def test_every_check_is_in_the_file_as_soon_as_it_is_there(tmp_path: Path) -> None:
    record = Record(tmp_path / "new" / "r.json", ABOUT)
    record.begin("demo")
    record.add("demo", GOOD)
    step = json.loads((tmp_path / "new" / "r.json").read_text())["steps"]["demo"]
    assert (step["checks"][0]["detail"], step["ended"]) == ("in 3 s", False)


def test_a_run_goes_on_from_steps_that_ended_without_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    record = record_with(path, facts=GOOD, kernels=LACKING, demo=BAD)
    record.begin("shapes")
    record.add("shapes", GOOD)
    again = Record(path, ABOUT, resume=True)
    assert {name: step.good for name, step in again.steps.items()} == {
        "facts": True,
        "kernels": True,
        "demo": False,
        "shapes": False,
    }
    assert again.steps["facts"].checks == [GOOD]
    again.begin("demo")
    assert again.steps["demo"].checks == []


def test_without_resume_nothing_is_taken_over(tmp_path: Path) -> None:
    record_with(tmp_path / "r.json", facts=GOOD)
    assert Record(tmp_path / "r.json", ABOUT).steps == {}


def test_results_for_something_else_are_not_taken_over(tmp_path: Path) -> None:
    record_with(tmp_path / "r.json", facts=GOOD)
    with pytest.raises(OtherRun, match="results for another target; name another file"):
        Record(tmp_path / "r.json", {**ABOUT, "target": "rdna3"}, resume=True)


@pytest.mark.parametrize("content", ["", "[1]", '{"about": {}}', '{"about": {}, "steps": {"demo": {}}}'])
def test_a_file_that_holds_no_results_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(OtherRun, match=r"r\.json holds no results that can be gone on from"):
        Record(tmp_path / "r.json", ABOUT, resume=True)


def test_only_a_failure_fails_the_run() -> None:
    assert record_with(None, facts=GOOD, kernels=LACKING).status == 0
    assert record_with(None, facts=GOOD, kernels=BAD).status == 1


def test_what_is_not_offered_counts_as_neither() -> None:
    assert totals(record_with(None, a=GOOD, b=LACKING, c=LACKING)) == "1 passed, 0 failed, 2 not offered"


def test_the_page_has_a_row_for_each_check_and_no_broken_cells() -> None:
    record = record_with(None, demo=Check("a | b", "failed", "first\nsecond"))
    page = markdown(record, "Checked", {"date": "2026-12-01", "device": "some GPU"})
    assert page.splitlines() == [
        "## Checked",
        "",
        "- date: 2026-12-01",
        "- device: some GPU",
        "- 0 passed, 1 failed, 0 not offered",
        "",
        "| step | check | result | found |",
        "|---|---|---|---|",
        "| demo | a \\| b | failed | first second |",
    ]
