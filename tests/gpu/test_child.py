"""However a step ends, what it found before is kept and the next one can run."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from gpu.child import Work, run_limited
from gpu.record import Check

from tests.gpu import works


def run(work: Work, *args: Any, limit_s: float = 60) -> tuple[str, list[Check]]:
    heard: list[Check] = []
    return run_limited(work, args, limit_s, heard.append), heard


def test_checks_are_heard_in_their_order() -> None:
    fault, heard = run(works.well)
    assert (fault, [check.name for check in heard]) == ("", ["first", "second"])


@pytest.mark.parametrize(
    ("work", "fault"),
    [
        (works.raising, "RuntimeError: the device was lost"),
        (works.crashing, "its process ended by SIGSEGV"),
    ],
)
def test_a_step_that_breaks_says_why_and_keeps_what_it_found(work: Work, fault: str) -> None:
    assert run(work) == (fault, [works.FIRST])


def test_a_step_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    fault, heard = run(works.hanging, tmp_path / "note", limit_s=6)
    assert (fault, heard) == ("not done within 6 s", [works.FIRST])
    sleeper = int((tmp_path / "note").read_text())
    deadline = time.monotonic() + 10
    while is_running(sleeper) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(sleeper)


def is_running(pid: int) -> bool:
    """A process that nobody has waited for is no longer one that runs."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
