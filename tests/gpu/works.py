"""Steps that end in all the ways in which a step can end, for processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from gpu.record import Check

FIRST = Check("first", "passed", "")


def well() -> Iterator[Check]:
    yield FIRST
    yield Check("second", "not offered", "no such unit")


def raising() -> Iterator[Check]:
    yield FIRST
    raise RuntimeError("the device was lost")


def crashing() -> Iterator[Check]:
    yield FIRST
    os.kill(os.getpid(), signal.SIGSEGV)


def hanging(note: Path) -> Iterator[Check]:
    """With a process of its own, whose number goes to `note`."""
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    note.write_text(str(sleeper.pid))
    yield FIRST
    time.sleep(600)
