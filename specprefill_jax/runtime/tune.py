"""Measures how long each entry of a model takes on its device."""

import dataclasses
import importlib.metadata
import time
from collections.abc import Callable, Iterator
from statistics import median

import numpy as np

from specprefill_jax.artifact.manifest import RUNTIME, Model
from specprefill_jax.artifact.rates import MeasuredDevice
from specprefill_jax.runtime.device import Device
from specprefill_jax.runtime.program import Program
from specprefill_jax.runtime.state import State

REPEATS = 5


@dataclasses.dataclass(frozen=True)
class _Call:
    """An entry, the capacity of its state (0: it has none), and the tokens that it reads."""

    entry: str
    capacity: int
    tokens: int


def measured_device(device: Device) -> MeasuredDevice:
    """What rates measured on `device` hold for."""
    version = "" if device.facts is None else device.facts.driver
    return MeasuredDevice(device.driver, device.description, version, importlib.metadata.version(RUNTIME))


def measure(
    program: Program, *, repeats: int = REPEATS, progress: Callable[[int, int], None] | None = None
) -> dict[str, float]:
    """Milliseconds of one call of each entry, results read back: the median of `repeats`, after one more.

    An entry reads as many tokens as it takes into a cache that is half full. One state at a time is held.

    Args:
        repeats: at least 1.
        progress: hears entries measured, and entries in all.

    Raises:
        DeviceFailed: the device ran out of memory, or was lost.
    """
    if repeats < 1:
        raise ValueError(f"repeats {repeats}: at least one call must be measured")
    calls = list(_calls(program.model))
    times: dict[str, float] = {}
    state = None
    for done, call in enumerate(calls, start=1):
        if call.capacity and (state is None or state.capacity != call.capacity):
            state = None  # its memory goes before the next one is made
            state = program.state_of_capacity(call.capacity)
        _milliseconds(program, state, call)  # the first call also waits for what drivers put off until then
        found = median(_milliseconds(program, state, call) for _ in range(repeats))
        times[call.entry] = float(f"{found:.4g}")  # more digits are noise
        if progress is not None:
            progress(done, len(calls))
    return times


def _calls(model: Model) -> Iterator[_Call]:
    """Every entry that the manifest promises, those of one capacity one after the other."""
    kinds = ("prefill", "prefill_rows") if model.rows else ("prefill",)
    for capacity in model.capacities:
        for length in (length for length in model.blocks if length <= capacity):
            for kind in kinds:
                yield _Call(f"{kind}_T{length}_C{capacity}", capacity, length)
        yield _Call(f"decode_C{capacity}", capacity, 1)
    yield _Call("head", 0, 0)


def _milliseconds(program: Program, state: State | None, call: _Call) -> float:
    """One call. Times do not depend on values, so the slots before it need no tokens of their own."""
    model = program.model
    if state is None or not call.capacity:
        hidden = np.ones(model.hidden, np.float32)
        begin = time.perf_counter()
        program.head(hidden)
        return (time.perf_counter() - begin) * 1000
    state.length = min(call.capacity // 2, call.capacity - call.tokens)
    positions = np.arange(state.length, state.length + call.tokens)
    # Far apart, so that each token has a row of the embedding of its own, as in a text.
    tokens = positions * 7919 % model.vocabulary
    rows = call.entry.startswith("prefill_rows")
    begin = time.perf_counter()
    if call.entry.startswith("decode"):
        program.decode(state, int(tokens[0]), int(positions[0]))
    else:
        program.prefill_block(state, tokens, positions, length=call.tokens, rows=rows)
    return (time.perf_counter() - begin) * 1000
