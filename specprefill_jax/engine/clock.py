"""What goes on while a request runs: how long each phase takes, who listens, and who may stop it."""

import threading
import time
from collections.abc import Callable

from specprefill_jax.errors import Cancelled, DeadlineExceeded

Watch = Callable[[str, int, int], None]
"""Hears a phase, and the tokens done and in all, before each block and each decode step.

It may raise to cancel the request: its exception reaches the caller as it is, and the next request is
unaffected.
"""


class Clock:
    """Times one request, in milliseconds. At any time one phase runs, so phases add up to what has passed."""

    def __init__(self, phase: str) -> None:
        self._phases = {phase: 0.0}
        self._phase: str | None = phase
        self._since = time.perf_counter()

    @property
    def phases(self) -> dict[str, float]:
        """Milliseconds of each phase so far, in the order in which they began."""
        self._count()
        return dict(self._phases)

    def enter(self, phase: str) -> None:
        """From here on it is `phase` that runs; one that is entered again goes on."""
        self._count()
        self._phase = phase
        self._phases.setdefault(phase, 0.0)

    def pause(self) -> None:
        """What happens until the next `enter` is not the request's."""
        self._count()
        self._phase = None

    def _count(self) -> None:
        now = time.perf_counter()
        if self._phase is not None:
            self._phases[self._phase] += (now - self._since) * 1000
        self._since = now


class Watcher:
    """Tells a `Watch` how far a request has come, and stops the request where it is to stop.

    Args:
        watch: Who listens; None: nobody.
        cancel: Another thread may set it: the request stops at the next block or decode step.
        deadline: Seconds from now after which it stops there; None: never.
    """

    def __init__(
        self,
        watch: Watch | None = None,
        cancel: threading.Event | None = None,
        deadline: float | None = None,
    ) -> None:
        self._watch = watch
        self._cancel = cancel
        self._deadline = deadline
        self._end = None if deadline is None else time.monotonic() + deadline
        # Its identity alone: the error holds frames, these hold the request's state, and that would stay.
        self._raised: int | None = None

    def __call__(self, phase: str, done: int, total: int) -> None:
        try:
            if self._cancel is not None and self._cancel.is_set():
                raise Cancelled(f"the request was cancelled after {done} of {total} tokens of {phase}")
            if self._end is not None and time.monotonic() >= self._end:
                raise DeadlineExceeded(
                    f"the deadline of {self._deadline:g} s passed after {done} of {total} tokens of {phase}: "
                    "shorten the prompt, or allow more time (--deadline)"
                )
            if self._watch is not None:
                self._watch(phase, done, total)
        except BaseException as error:
            self._raised = id(error)
            raise

    def stopped_by(self, error: BaseException) -> bool:
        """Whether `error` is somebody's wish to stop the request, so that it is no failure of ours."""
        return id(error) == self._raised
