"""What a run gives the shell, and what it keeps of steps that could not run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu.plan import Plan
from gpu.record import Check, Record
from gpu_check import run_step

from tests.gpu import works

ROOT = Path(__file__).parents[2]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--run", "nowhere"), "No such file or directory: 'nowhere/plan.json'"),
        (("--steps", "tempo"), "no step is called tempo"),
        (("--target", "cpu"), "cpu is no device of Vulkan's"),
        (("--target", "abacus"), "unknown device 'abacus'"),
        (("--run", "nowhere", "--layers", "4"), "--run checks what was built: layers is of --build"),
        (("--resume",), "--resume goes on from the file of --json"),
    ],
)
def test_what_cannot_start_exits_with_2_and_says_why(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.vulkan
def test_a_step_without_what_was_built_for_it_fails_and_the_others_go_on(tmp_path: Path) -> None:
    Plan(target="vulkan").write(tmp_path)
    results, page = tmp_path / "results.json", tmp_path / "page.md"
    done = run(
        *("--run", tmp_path, "--work", tmp_path / "work", "--steps", "facts", "kernels"),
        *("--json", results, "--markdown", page),
    )
    assert done.returncode == 1, done.stderr
    steps = json.loads(results.read_text())["steps"]
    assert {check["result"] for check in steps["facts"]["checks"]} == {"passed"}
    (check,) = steps["kernels"]["checks"]
    assert (check["name"], check["result"]) == ("kernels to its end", "failed")
    assert check["detail"].startswith("FileNotFoundError")
    assert "- device: llvmpipe" in page.read_text()


def test_a_step_that_has_no_time_left_fails_without_being_started() -> None:
    record, shown = Record(None, {}), []
    record.begin("facts")
    run_step("facts", works.well, (), 0.0, record, lambda name, check: shown.append((name, check)))
    wanted = Check("facts to its end", "failed", "the budget was spent before")
    assert record.steps["facts"].checks == [wanted]
    assert shown == [("facts", wanted)]
