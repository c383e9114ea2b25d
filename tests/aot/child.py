"""Calls of an artifact's entries in a process of its own.

A driver that loses its device, or crashes, then fails the tests of one build, and no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from specprefill_jax.artifact.verify import open_artifact
from specprefill_jax.errors import DeviceFailed
from specprefill_jax.runtime.program import Decoded, Program, by_query
from specprefill_jax.runtime.target import open_device_for

State = dict[str, np.ndarray]


@dataclass(frozen=True)
class Piece:
    """Tokens that one call reads, in a block of `length`."""

    tokens: np.ndarray
    positions: np.ndarray
    length: int


@dataclass(frozen=True)
class Called:
    """What came of a prompt's pieces, and of the tokens decoded after them."""

    logits: np.ndarray
    rows: np.ndarray | None
    state: State
    decoded: list[Decoded]
    decoded_state: State


class Child:
    """One artifact on its device, in a process that starts with the first call.

    Lavapipe of Mesa 22.3.6 loses its device now and then while IREE's runtime loads parameters, on a busy
    machine and with an empty shader cache: another process is tried then. What a test compares is not
    touched by it.
    """

    def __init__(self, directory: Path, device: str) -> None:
        self._where = (directory, device)
        self._starts_left = 3
        self._start()

    def _start(self) -> None:
        self._starts_left -= 1
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))

    def _load(self, role: str) -> None:
        try:
            self._pool.submit(_load, *self._where, role).result()
        except DeviceFailed as error:
            if not self._starts_left:
                raise
            print(f"once more, in another process: {error}")
            self._pool.shutdown()
            self._start()
            self._load(role)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def call(
        self, role: str, entry: str, capacity: int, pieces: Sequence[Piece], then: Sequence[tuple[int, int]]
    ) -> Called:
        """The pieces through a prefill entry from an empty state, then (token, position)s through decode."""
        self._load(role)
        return self._pool.submit(_call, *self._where, role, entry, capacity, pieces, then).result()

    def entries(self, role: str) -> frozenset[str]:
        """The names of the module's functions."""
        self._load(role)
        return self._pool.submit(_entries, *self._where, role).result()


@cache
def _program(directory: Path, device: str, role: str) -> Program:
    artifact = open_artifact(directory)
    return Program.load(artifact, role, open_device_for(artifact.manifest, device))


def _load(directory: Path, device: str, role: str) -> None:
    _program(directory, device, role)


def _entries(directory: Path, device: str, role: str) -> frozenset[str]:
    return frozenset(_program(directory, device, role)._functions)


def _call(
    directory: Path,
    device: str,
    role: str,
    entry: str,
    capacity: int,
    pieces: Sequence[Piece],
    then: Sequence[tuple[int, int]],
) -> Called:
    program = _program(directory, device, role)
    read = program.device.transfer.read
    state = program.state_of_capacity(capacity)
    results = []
    for piece in pieces:
        results = program._prefill(entry, state, piece.tokens, piece.positions, piece.length)
    logits = program.head(read(results[0]))
    valid = min(program.model.rows, len(pieces[-1].tokens))
    rows = by_query(read(results[1]), valid) if entry == "prefill_rows" else None
    before = state.read()
    decoded = [program.decode(state, token, position) for token, position in then]
    return Called(logits, rows, before, decoded, state.read())
