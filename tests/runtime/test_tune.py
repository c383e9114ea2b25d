"""How entries are measured: all of them, on half a cache, the median after a call that does not count."""

import dataclasses
import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from jaxtyping import Float, Int

from specprefill_jax.artifact.manifest import Model
from specprefill_jax.runtime import tune
from specprefill_jax.runtime.device import Device
from specprefill_jax.runtime.program import Decoded, Prefilled, Program
from specprefill_jax.runtime.state import State
from specprefill_jax.runtime.tune import measure, measured_device
from tests.engine.fake import FakeState
from tests.runtime import toy


class Called(NamedTuple):
    """A call: of what, the slots in use before, and the tokens read."""

    entry: str
    length: int
    tokens: int


class Recording(Program):
    """Notes what is asked of it, and computes nothing."""

    def __init__(self, model: Model) -> None:
        self.label = "recording"
        self.model = model
        self.calls: list[Called] = []
        self.last = lambda: None

    def state_of_capacity(self, capacity: int) -> State:
        assert self.last() is None, "the state before is still held"
        state = FakeState(capacity)
        self.last = weakref.ref(state)
        return state

    def prefill_block(
        self,
        state: State,
        tokens: Int[np.ndarray, "N"],
        positions: Int[np.ndarray, "N"],
        *,
        length: int,
        rows: bool = False,
    ) -> Prefilled:
        assert len(set(tokens.tolist())) == len(tokens), "each token has a row of its own"
        assert set(tokens.tolist()) <= set(range(self.model.vocabulary))
        assert positions.tolist() == list(range(state.length, state.length + len(tokens)))
        kind = "prefill_rows" if rows else "prefill"
        self._note(f"{kind}_T{length}_C{state.capacity}", state, len(tokens))
        return Prefilled(np.zeros(1, np.float32), None, 0)

    def decode(self, state: State, token: int, position: int) -> Decoded:
        self._note(f"decode_C{state.capacity}", state, 1)
        return Decoded(np.zeros(1, np.float32), None)

    def head(self, hidden: Float[np.ndarray, "D"]) -> Float[np.ndarray, "V"]:
        assert hidden.shape == (self.model.hidden,)
        self.calls.append(Called("head", 0, 0))
        return hidden

    def _note(self, entry: str, state: State, count: int) -> None:
        self.calls.append(Called(entry, state.length, count))
        state.length += count
        assert state.length <= state.capacity


def _with(**changes: Any) -> Model:
    return dataclasses.replace(toy.model("draft"), **changes)


def test_every_entry_of_a_loaded_program_is_measured(draft: Program, target: Program):
    for program in (draft, target):
        times = measure(program, repeats=1)
        assert set(times) == set(program.entries)
        assert all(milliseconds > 0 for milliseconds in times.values())


def test_each_entry_is_called_once_more_than_it_counts():
    program = Recording(toy.model("draft"))
    times = measure(program, repeats=3)
    assert Counter(call.entry for call in program.calls) == dict.fromkeys(times, 4)


def test_a_whole_block_is_read_into_a_cache_that_is_half_full():
    program = Recording(toy.model("draft"))
    measure(program, repeats=2)
    assert set(program.calls) == {
        *(Called(f"{kind}_T4_C16", 8, 4) for kind in ("prefill", "prefill_rows")),
        *(Called(f"{kind}_T8_C16", 8, 8) for kind in ("prefill", "prefill_rows")),
        *(Called(f"{kind}_T4_C32", 16, 4) for kind in ("prefill", "prefill_rows")),
        *(Called(f"{kind}_T8_C32", 16, 8) for kind in ("prefill", "prefill_rows")),
        Called("decode_C16", 8, 1),
        Called("decode_C32", 16, 1),
        Called("head", 0, 0),
    }


def test_a_block_as_long_as_the_cache_is_read_from_its_beginning():
    program = Recording(_with(blocks=(1, 16), capacities=(1, 16)))
    measure(program, repeats=1)
    assert Called("prefill_T16_C16", 0, 16) in program.calls
    assert Called("prefill_T1_C1", 0, 1) in program.calls
    assert Called("decode_C1", 0, 1) in program.calls


def test_the_median_counts_and_the_first_call_does_not(monkeypatch: pytest.MonkeyPatch):
    seconds = [100.0, 0.001, 0.0090004, 0.0023456]
    ticks = iter([tick for took in seconds * 5 for tick in (0.0, took)])
    monkeypatch.setattr(tune, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    times = measure(Recording(_with(blocks=(4,), capacities=(16,), rows=0)), repeats=3)
    assert times == dict.fromkeys(("prefill_T4_C16", "decode_C16", "head"), 2.346)


def test_progress_hears_each_entry(target: Program):
    heard: list[tuple[int, int]] = []
    times = measure(target, repeats=1, progress=lambda done, total: heard.append((done, total)))
    assert heard == [(done, len(times)) for done in range(1, len(times) + 1)]


def test_no_repeats_are_refused(target: Program):
    with pytest.raises(ValueError, match="repeats 0: at least one call"):
        measure(target, repeats=0)


def test_rates_hold_for_a_device_its_driver_and_the_runtime(device: Device):
    found = measured_device(device)
    assert (found.driver, found.description) == (device.driver, device.description)
    assert found.driver_version == ("" if device.facts is None else device.facts.driver)
    assert found.runtime == toy.INSTALLED


def test_a_program_goes_on_right_after_it_was_measured(target: Program):
    before = target.prefill(target.new_state(12), toy.ids([3, 1]), toy.ids([0, 1])).hidden
    measure(target, repeats=1)
    after = target.prefill(target.new_state(12), toy.ids([3, 1]), toy.ids([0, 1])).hidden
    np.testing.assert_array_equal(before, after)
