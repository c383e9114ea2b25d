"""State on the device: reset, snapshot, restore."""

import numpy as np
import pytest

from specprefill_jax.artifact.manifest import StateTensor
from specprefill_jax.errors import PromptTooLong
from specprefill_jax.runtime.device import Device
from specprefill_jax.runtime.program import Program
from specprefill_jax.runtime.state import State
from tests.runtime.toy import ToyReference, ids


def test_a_new_state_is_empty_and_zero(draft: Program):
    state = draft.new_state(16)
    assert (state.length, state.capacity) == (0, 16)
    tensors = state.read()
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        "layers.0.k": (2, 16, 4),
        "layers.1.matrix": (4,),
    }
    assert not any(tensor.any() for tensor in tensors.values())
    assert state.bytes == (2 * 16 * 4 + 4) * 4


def test_tensors_take_the_number_format_of_the_build(device: Device):
    tensors = (StateTensor("k", (2, "C"), "f16"), StateTensor("v", ("C", 3), "bf16"))
    state = State(tensors, 8, device.transfer)
    assert [view.byte_length for view in state.views] == [2 * 8 * 2, 8 * 3 * 2]
    assert not any(tensor.any() for tensor in state.read().values())


def test_reset_empties_a_used_state(draft: Program):
    state = draft.new_state(16)
    draft.prefill(state, ids([5, 6]), ids([0, 1]))
    assert state.read()["layers.1.matrix"].any()
    state.reset()
    assert state.length == 0
    assert not any(tensor.any() for tensor in state.read().values())


def test_restore_returns_bit_for_bit_below_the_length(draft: Program):
    state = draft.new_state(16)
    draft.prefill(state, ids([5, 6, 7]), ids([0, 1, 2]))
    before = state.read()
    snapshot = draft.snapshot(state)
    draft.decode(state, 9, 3)
    draft.decode(state, 8, 4)
    assert state.length == 5
    draft.restore(state, snapshot)
    after = state.read()
    assert state.length == 3
    np.testing.assert_array_equal(after["layers.1.matrix"], before["layers.1.matrix"])
    np.testing.assert_array_equal(after["layers.0.k"][:, :3], before["layers.0.k"][:, :3])


def test_after_restore_the_program_goes_on_as_if_nothing_had_happened(draft: Program):
    reference = ToyReference(16)
    state = draft.new_state(16)
    draft.prefill(state, ids([5, 6, 7]), ids([0, 1, 2]))
    reference.read([5, 6, 7], [0, 1, 2])
    snapshot = draft.snapshot(state)
    draft.decode(state, 9, 3)
    draft.restore(state, snapshot)
    found = draft.prefill(state, ids([4, 3]), ids([5, 8])).hidden
    np.testing.assert_array_equal(found, reference.read([4, 3], [5, 8]))


def test_a_snapshot_can_be_restored_more_than_once(draft: Program):
    state = draft.new_state(16)
    draft.prefill(state, ids([5]), ids([0]))
    snapshot = draft.snapshot(state)
    first = draft.decode(state, 9, 1).logits
    draft.restore(state, snapshot)
    second = draft.decode(state, 9, 1).logits
    draft.restore(state, snapshot)
    third = draft.decode(state, 9, 1).logits
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, third)


def test_a_snapshot_whose_slots_were_overwritten_is_refused(draft: Program):
    state = draft.new_state(16)
    draft.prefill(state, ids([5]), ids([0]))
    early = draft.snapshot(state)
    draft.prefill(state, ids([6, 7]), ids([1, 2]))
    late = draft.snapshot(state)
    draft.restore(state, early)
    draft.restore(state, late)
    draft.restore(state, early)
    draft.decode(state, 9, 1)
    with pytest.raises(
        ValueError, match="snapshot of 3 slots cannot be restored: slots from 1 on were written"
    ):
        draft.restore(state, late)
    draft.restore(state, early)
    assert state.length == 1


def test_the_slots_in_use_can_be_read_without_the_others(draft: Program):
    state = draft.new_state(16)
    draft.prefill(state, ids([5, 6, 7]), ids([0, 2, 9]))
    whole, used = state.read(), state.read_slots(3)
    np.testing.assert_array_equal(used["layers.0.k"], whole["layers.0.k"][:, :3])
    np.testing.assert_array_equal(used["layers.1.matrix"], whole["layers.1.matrix"])


def test_a_snapshot_does_not_outlive_a_reset(draft: Program):
    state = draft.new_state(16)
    draft.prefill(state, ids([5]), ids([0]))
    snapshot = draft.snapshot(state)
    state.reset()
    with pytest.raises(ValueError, match="reset after it"):
        draft.restore(state, snapshot)


def test_a_snapshot_of_another_state_is_refused(draft: Program):
    one, two = draft.new_state(16), draft.new_state(16)
    with pytest.raises(ValueError, match="belongs to another state"):
        draft.restore(two, draft.snapshot(one))


# --- growing


def test_a_state_grows_and_goes_on_as_if_its_cache_had_been_large_from_the_beginning(draft: Program):
    reference = ToyReference(32)
    state = draft.new_state(16)
    draft.prefill(state, ids([5, 6, 7]), ids([0, 1, 2]))
    reference.read([5, 6, 7], [0, 1, 2])
    draft.grow(state, 17)
    assert (state.length, state.capacity) == (3, 32)
    assert {name: tensor.shape for name, tensor in state.read().items()} == {
        "layers.0.k": (2, 32, 4),
        "layers.1.matrix": (4,),
    }
    found = draft.prefill(state, ids([4, 3]), ids([5, 8])).hidden
    np.testing.assert_array_equal(found, reference.read([4, 3], [5, 8]))
    assert state.bytes == draft.new_state(32).bytes


def test_growing_keeps_what_is_below_the_length_and_clears_what_is_above(draft: Program):
    state = draft.new_state(16)
    draft.prefill(state, ids([5, 6, 7]), ids([0, 1, 2]))
    before = state.read()["layers.0.k"]
    draft.grow(state, 32)
    after = state.read()["layers.0.k"]
    np.testing.assert_array_equal(after[:, :3], before[:, :3])
    assert not after[:, 16:].any()


def test_a_snapshot_outlives_growing(draft: Program):
    state = draft.new_state(16)
    draft.prefill(state, ids([5, 6, 7]), ids([0, 1, 2]))
    snapshot = draft.snapshot(state)
    expected = draft.decode(state, 9, 3).logits
    draft.grow(state, 32)
    draft.restore(state, snapshot)
    np.testing.assert_array_equal(draft.decode(state, 9, 3).logits, expected)


def test_an_empty_state_can_grow(draft: Program):
    state = draft.new_state(16)
    draft.grow(state, 32)
    assert (state.length, state.capacity) == (0, 32)
    assert not any(tensor.any() for tensor in state.read().values())


def test_a_cache_does_not_grow_to_what_it_is_or_beyond_what_is_compiled(draft: Program):
    state = draft.new_state(16)
    with pytest.raises(ValueError, match="a cache of 16 slots does not grow to 16"):
        draft.grow(state, 10)
    with pytest.raises(PromptTooLong, match="33 slots are needed"):
        draft.grow(state, 33)


def test_a_snapshot_takes_the_memory_of_what_does_not_grow(draft: Program):
    assert draft.snapshot(draft.new_state(16)).bytes == draft.model.state_bytes(0) == 4 * 4
