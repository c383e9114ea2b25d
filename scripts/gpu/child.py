"""A step in a process of its own, with a time limit.

A lost device, a crash or a hang then fails that step alone.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from gpu.record import Check

Work = Callable[..., Iterator[Check]]
ENDING_S = 10  # for a killed process to be gone; one that hangs in a driver never is


def run_limited(work: Work, args: tuple[Any, ...], limit_s: float, hear: Callable[[Check], None]) -> str:
    """Run `work(*args)` elsewhere and hear each check as it comes; why it did not end well, or ""."""
    context = get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(writer, work, args), daemon=True)
    process.start()
    writer.close()
    try:
        return _listen(reader, process, time.monotonic() + limit_s, hear) or ""
    except TimeoutError:
        return f"not done within {limit_s:.0f} s"
    finally:
        reader.close()
        _end(process)


def _listen(
    reader: Connection, process: BaseProcess, deadline: float, hear: Callable[[Check], None]
) -> str | None:
    while True:
        if not reader.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        try:
            kind, value = reader.recv()
        except EOFError:
            process.join(ENDING_S)
            code = process.exitcode
            died = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with {code}"
            return f"its process ended {died}"
        if kind != "check":
            return value
        hear(value)


def _run(writer: Connection, work: Work, args: tuple[Any, ...]) -> None:
    """In the new process: a group of its own, so that what it starts can be ended with it."""
    os.setsid()
    try:
        for check in work(*args):
            writer.send(("check", check))
        writer.send(("done", None))
    except BaseException as error:
        traceback.print_exc()
        writer.send(("failed", f"{type(error).__name__}: {error}"))


def _end(process: BaseProcess) -> None:
    """End the process and all that it started; give up on what cannot be ended."""
    process.join(0.5)
    if process.pid is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():
        process.kill()
        process.join(ENDING_S)
