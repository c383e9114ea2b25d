"""What goes on while a request runs: how long each phase takes, and who listens."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Watch = Callable[[str, int, int], None]
"""Hears a phase, and the tokens done and in all, before each block and each decode step.

It may raise to cancel the request: its exception reaches the caller as it is, and the next request is
unaffected, since the state of this one is dropped.
"""


class Clock:
    """Times one request, in milliseconds. Phases do not overlap; one that is entered again goes on."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._phases: dict[str, float] = {}

    @property
    def phases(self) -> dict[str, float]:
        """Milliseconds of each phase so far, in the order in which they began."""
        return dict(self._phases)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what runs inside as time of phase `name`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            spent = (time.perf_counter() - begin) * 1000
            self._phases[name] = self._phases.get(name, 0.0) + spent

    def elapsed(self) -> float:
        """Milliseconds since the request began."""
        return (time.perf_counter() - self._start) * 1000


class Watcher:
    """Calls a `Watch`, and knows afterwards whether an exception was that one's wish to cancel."""

    def __init__(self, watch: Watch | None) -> None:
        self._watch = watch
        self._raised: BaseException | None = None

    def __call__(self, phase: str, done: int, total: int) -> None:
        if self._watch is None:
            return
        try:
            self._watch(phase, done, total)
        except BaseException as error:
            self._raised = error
            raise

    def cancelled_by(self, error: BaseException) -> bool:
        """Whether the listener raised `error`, so that it is no failure of ours."""
        return error is self._raised
