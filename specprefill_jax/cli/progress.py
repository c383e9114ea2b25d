"""Progress on standard error: for people, and only when they have waited for a second."""

import sys
import threading
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

DELAY_S = 1.0

NAMES = {
    "check": "Checking files (bytes)",
    "load": "Loading the models",
    "test": "Testing a model on this device",
    "measure": "Measuring the entries of a model",
    "score": "Scoring",
    "prefill": "Prefill",
    "decode": "Answering",
    "read": "Reading prompts with the draft",
    "heads": "Trying each head alone",
    "scorers": "Trying scorers",
    "prompts": "Answering prompts",
}


class Waiting:
    """Shows what is going on, from a second after it began until it ends. A context manager.

    On a terminal it is a line that disappears; elsewhere each step that `say` names is printed.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task("Working", total=None)
        self._lock = threading.Lock()
        self._ended = False
        self._timer = threading.Timer(DELAY_S, self._show)
        self._timer.daemon = True

    def __enter__(self) -> "Waiting":
        if self._console.is_terminal:
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def __call__(self, phase: str, done: int, total: int) -> None:
        """A `Watch`: how far a phase has come."""
        self._progress.update(
            self._task, description=NAMES.get(phase, phase), completed=done, total=total or None
        )

    def say(self, step: str) -> None:
        """Name a step whose length is not known."""
        if self._console.is_terminal:
            self._progress.update(self._task, description=step, completed=0, total=None)
        else:
            self._console.print(step, markup=False, highlight=False, soft_wrap=True)

    def end(self) -> None:
        """Take the line away; what is printed next has the terminal for itself."""
        self._timer.cancel()
        with self._lock:
            self._ended = True
            if self._progress.live.is_started:
                self._progress.stop()

    def _show(self) -> None:
        with self._lock:
            if not self._ended:
                self._progress.start()
