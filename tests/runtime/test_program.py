"""Programs on each device, against the toy model in NumPy. Its numbers are whole, so everything is exact."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import iree.runtime
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specprefill_jax.artifact.self_test import SelfTest
from specprefill_jax.artifact.verify import Artifact, open_artifact
from specprefill_jax.errors import (
    ArtifactError,
    DeviceFailed,
    EmptyPrompt,
    PromptTooLong,
    SelfTestFailed,
    Unproven,
)
from specprefill_jax.runtime.device import Device
from specprefill_jax.runtime.program import Prefilled, Program, by_query
from specprefill_jax.runtime.self_test import run_self_test
from tests.runtime import toy
from tests.runtime.toy import ToyReference, ids

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
GAPPED = [0, 1, 2, 5, 6, 9, 12, 13, 14, 20, 31]


def test_prefill_and_head_agree_with_the_reference_across_blocks(target: Program):
    reference = ToyReference(16)
    state = target.new_state(12)
    prefilled = target.prefill(state, ids(TOKENS), ids(GAPPED))
    hidden = reference.read(TOKENS, GAPPED)
    np.testing.assert_array_equal(prefilled.hidden, hidden)
    np.testing.assert_array_equal(target.head(prefilled.hidden), toy.head(hidden))
    assert prefilled.rows is None
    assert state.length == 11
    np.testing.assert_array_equal(state.read()["layers.0.k"][:, :11], reference.keys[:, :11])
    np.testing.assert_array_equal(state.read()["layers.1.matrix"], reference.delta)


def test_slots_in_place_of_the_true_positions_give_another_result(target: Program):
    true = target.prefill(target.new_state(12), ids(TOKENS), ids(GAPPED)).hidden
    slots = target.prefill(target.new_state(12), ids(TOKENS), ids(list(range(11)))).hidden
    assert (true != slots).all()


def test_decode_goes_on_at_the_next_slot_with_its_own_position(target: Program):
    reference = ToyReference(16)
    state = target.new_state(14)
    target.prefill(state, ids(TOKENS), ids(GAPPED))
    reference.read(TOKENS, GAPPED)
    for token, position in ((7, 32), (8, 33), (9, 34)):
        decoded = target.decode(state, token, position)
        np.testing.assert_array_equal(decoded.logits, toy.head(reference.read([token], [position])))
        assert decoded.rows is None
    assert state.length == 14


def test_rows_go_by_query_and_those_after_the_valid_ones_are_zero():
    returned = np.arange(1.0, 25.0, dtype=np.float32).reshape(1, 2, 3, 4)  # a layer, two heads, three queries
    rows = by_query(returned, 2)
    assert rows.shape == (3, 1, 2, 4)
    np.testing.assert_array_equal(rows[1, 0], [[5.0, 6.0, 7.0, 8.0], [17.0, 18.0, 19.0, 20.0]])
    assert not rows[2].any()


def test_rows_are_those_of_the_last_queries_oldest_first(draft: Program):
    reference = ToyReference(16)
    prefilled = draft.prefill(draft.new_state(12), ids(TOKENS), ids(GAPPED), rows=True)
    reference.read(TOKENS, GAPPED)
    assert prefilled.rows_valid == 3
    assert prefilled.rows is not None
    np.testing.assert_array_equal(prefilled.rows, reference.rows[-3:])


def test_unused_rows_are_zero_when_there_are_fewer_tokens_than_rows(draft: Program):
    reference = ToyReference(16)
    prefilled = draft.prefill(draft.new_state(12), ids([3, 4]), ids([0, 1]), rows=True)
    reference.read([3, 4], [0, 1])
    assert prefilled.rows_valid == 2
    assert prefilled.rows is not None
    np.testing.assert_array_equal(prefilled.rows[:2], reference.rows)
    assert not prefilled.rows[2].any()


def test_decode_of_the_draft_returns_the_row_of_its_token(draft: Program):
    reference = ToyReference(16)
    state = draft.new_state(12)
    draft.prefill(state, ids(TOKENS), ids(GAPPED))
    reference.read([*TOKENS, 8], [*GAPPED, 40])
    decoded = draft.decode(state, 8, 40)
    assert decoded.rows is not None
    np.testing.assert_array_equal(decoded.rows, reference.rows[-1])


def test_rows_asked_of_a_model_without_them_are_refused(target: Program):
    with pytest.raises(ValueError, match="returns no attention rows"):
        target.prefill(target.new_state(12), ids([1]), ids([0]), rows=True)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=28),
    st.lists(st.integers(0, 28), max_size=3),
    st.sampled_from([16, 32]),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_way_of_splitting_a_prompt_gives_the_same_state(
    draft: Program, tokens: list[int], cuts: list[int], capacity: int
):
    """Cut anywhere, each part in its own call: the same as one token after another."""
    if len(tokens) > capacity - 4:
        return
    reference = ToyReference(capacity)
    hidden = reference.read(tokens, list(range(len(tokens))))
    state = draft.state_of_capacity(capacity)
    edges = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    found = None
    for begin, end in itertools.pairwise(edges):
        found = draft.prefill(state, ids(tokens[begin:end]), ids(list(range(begin, end)))).hidden
    np.testing.assert_array_equal(found, hidden)
    filled = slice(len(tokens))
    np.testing.assert_array_equal(state.read()["layers.0.k"][:, filled], reference.keys[:, filled])
    np.testing.assert_array_equal(state.read()["layers.1.matrix"], reference.delta)


def test_state_is_updated_in_the_buffers_that_were_allocated_once(draft: Program, device: Device):
    state = draft.new_state(16)
    views = state.views
    draft.prefill(state, ids([1, 2]), ids([0, 1]))
    draft.decode(state, 3, 2)
    before = device.hal.allocator.statistics
    draft.decode(state, 4, 3)
    after = device.hal.allocator.statistics
    assert state.views is views
    assert state.read()["layers.1.matrix"].tolist() == [10, 20, 30, 40]
    kept = [s["device_bytes_allocated"] - s["device_bytes_freed"] for s in (before, after)]
    # Results (50 logits, 64 row values) may stay alive; another state (528 bytes) must not.
    assert kept[1] - kept[0] < state.bytes


def test_a_module_that_does_not_donate_its_state_is_refused(device: Device, tmp_path: Path):
    toy.make_artifact(tmp_path, device.name, roles=("target",), donate=False)
    program = Program.load(open_artifact(tmp_path), "target", device, self_test=False)
    with pytest.raises(ArtifactError, match=r"does not update state 'layers.1.matrix' in place"):
        program.prefill(program.new_state(16), ids([1]), ids([0]))


def test_the_smallest_capacity_that_holds_the_slots_is_taken(draft: Program):
    assert [draft.new_state(slots).capacity for slots in (1, 16, 17, 32)] == [16, 16, 32, 32]
    assert draft.largest_capacity == 32
    with pytest.raises(PromptTooLong, match=r"33 slots are needed, .* for 32 at most: .*--max-tokens"):
        draft.new_state(33)


def test_the_cache_can_be_filled_to_its_last_slot_and_no_further(target: Program):
    state = target.new_state(16)
    target.prefill(state, ids([1] * 15), ids(list(range(15))))
    target.decode(state, 1, 15)
    assert state.length == 16
    with pytest.raises(PromptTooLong, match=r"slots 16..16, but the cache has 16"):
        target.decode(state, 1, 16)
    with pytest.raises(PromptTooLong):
        target.prefill(state, ids([1]), ids([16]))
    assert state.length == 16


def test_a_block_whose_padding_leaves_the_cache_is_refused_before_it_runs(target: Program):
    state = target.new_state(16)
    target.prefill(state, ids([1] * 13), ids(list(range(13))))
    before = state.read()
    with pytest.raises(PromptTooLong, match=r"slots 13..16, but the cache has 16"):
        target.prefill_block(state, ids([1]), ids([13]), length=4)
    with pytest.raises(PromptTooLong, match="need 17 slots"):
        target.prefill(state, ids([1]), ids([13]))
    np.testing.assert_array_equal(state.read()["layers.0.k"], before["layers.0.k"])


@pytest.mark.parametrize(
    ("tokens", "positions", "message"),
    [
        ([1, 50], [0, 1], r"token id is outside 0\.\.49"),
        ([-1], [0], r"token id is outside 0\.\.49"),
        ([1], [-1], r"position is outside 0\.\.262143"),
        ([1], [2**18], r"position is outside 0\.\.262143"),
        ([1, 2], [4, 4], "must rise"),
        ([1, 2], [4, 3], "must rise"),
    ],
)
def test_values_out_of_range_are_refused_before_anything_runs(
    target: Program, tokens: list[int], positions: list[int], message: str
):
    state = target.new_state(16)
    with pytest.raises(ValueError, match=message):
        target.prefill(state, ids(tokens), ids(positions))
    assert state.length == 0


def test_decode_refuses_values_out_of_range(target: Program):
    state = target.new_state(16)
    with pytest.raises(ValueError, match="token id"):
        target.decode(state, 50, 0)
    with pytest.raises(ValueError, match="position"):
        target.decode(state, 1, -1)
    assert state.length == 0


def test_a_block_takes_one_token_to_its_length(target: Program):
    state = target.new_state(16)
    for tokens, length in (([1] * 5, 4), ([], 4), ([1], 5)):
        with pytest.raises(ValueError, match="the blocks are"):
            target.prefill_block(state, ids(tokens), ids(list(range(len(tokens)))), length=length)


def test_no_tokens_are_an_error(target: Program):
    with pytest.raises(EmptyPrompt):
        target.prefill(target.new_state(16), ids([]), ids([]))


def test_progress_hears_every_block_and_can_cancel_between_blocks(target: Program):
    heard: list[tuple[int, int]] = []

    def cancel_at_the_second(done: int, total: int) -> None:
        heard.append((done, total))
        if done:
            raise KeyboardInterrupt

    state = target.new_state(16)
    with pytest.raises(KeyboardInterrupt):
        target.prefill(state, ids(TOKENS), ids(GAPPED), before_block=cancel_at_the_second)
    assert heard == [(0, 11), (8, 11)]
    assert state.length == 8
    # The next request on the same state, after a reset, is unaffected.
    state.reset()
    found = target.prefill(state, ids(TOKENS), ids(GAPPED)).hidden
    np.testing.assert_array_equal(found, ToyReference(16).read(TOKENS, GAPPED))


def test_draft_and_target_states_do_not_touch_each_other(draft: Program, target: Program):
    one, two = draft.new_state(16), target.new_state(16)
    draft.prefill(one, ids([1, 2, 3]), ids([0, 1, 2]))
    target.prefill(two, ids([9]), ids([0]))
    assert one.read()["layers.1.matrix"].tolist() == [6, 12, 18, 24]
    assert two.read()["layers.1.matrix"].tolist() == [9, 18, 27, 36]


def copied(artifact: Artifact, directory: Path) -> Artifact:
    """The artifact in another directory, to be changed without its manifest being told."""
    for name in artifact.manifest.files:
        (directory / name).write_bytes(artifact.path(name).read_bytes())
    return Artifact(directory, artifact.manifest)


def with_self_test(artifact: Artifact, directory: Path, test: SelfTest) -> Artifact:
    """The artifact with another self-test for its target."""
    copy = copied(artifact, directory)
    test.write(directory / "target.self_test.json")
    return copy


def self_test_of(artifact: Artifact, role: str = "target") -> SelfTest:
    model = artifact.manifest.models[role]
    assert model.self_test is not None
    return SelfTest.read(artifact.path(model.self_test), model)


def test_the_self_test_runs_every_entry_of_every_bucket(artifact: Artifact, device: Device):
    for role in ("draft", "target"):
        program = Program.load(artifact, role, device, self_test=False)
        outcomes = list(program.test(artifact))
        assert sorted(outcome.entry for outcome in outcomes) == sorted(program.entries)
        assert all(outcome.passed for outcome in outcomes)
        # Whole numbers: what is left is the rounding of what was recorded, to 6 digits.
        assert max(outcome.difference for outcome in outcomes) < 3e-6


@pytest.mark.parametrize(
    ("stage", "tensor", "entry"),
    [
        ("prefilled", "hidden", "prefill_T4_C16"),
        ("prefilled", "layers.0.k", "prefill_T4_C16"),
        ("prefilled", "layers.1.matrix", "prefill_T4_C16"),
        ("prefilled", "logits", "head"),
        ("decoded", "logits", "decode_C16"),
        ("decoded", "layers.0.k", "decode_C16"),
    ],
)
def test_loading_names_the_entry_and_the_tensor_that_differ(
    stage: str, tensor: str, entry: str, artifact: Artifact, device: Device, tmp_path: Path
):
    test = self_test_of(artifact)
    expected = dict(getattr(test, stage))
    off = tuple(1.01 * value for value in expected[tensor].projections)
    expected[tensor] = dataclasses.replace(expected[tensor], projections=off)
    wrong = with_self_test(artifact, tmp_path, dataclasses.replace(test, **{stage: expected}))
    text = rf"the target of artifact 'toy' computes wrong results .* after {entry}, {tensor} differs by 0\.0"
    with pytest.raises(SelfTestFailed, match=text):
        Program.load(wrong, "target", device)


def test_a_difference_within_the_tolerance_passes(artifact: Artifact, device: Device, tmp_path: Path):
    test = self_test_of(artifact)
    logits = test.prefilled["logits"]
    loose = dataclasses.replace(
        logits, projections=tuple(1.01 * x for x in logits.projections), tolerance=0.02
    )
    near = dataclasses.replace(test, prefilled={**test.prefilled, "logits": loose})
    Program.load(with_self_test(artifact, tmp_path, near), "target", device)


def test_rows_that_stand_where_nothing_may_fail_the_self_test(artifact: Artifact, device: Device):
    """One query row more than the test has, and the row beyond the valid ones is no longer blank."""
    test = self_test_of(artifact, "draft")
    program = Program.load(artifact, "draft", device, self_test=False)
    real = program.prefill_block

    def spill(*args: Any, **kwargs: Any) -> Prefilled:
        result = real(*args, **kwargs)
        if result.rows is not None:
            result.rows[..., -1] = 1e-9
        return result

    program.prefill_block = spill
    failed = [outcome for outcome in run_self_test(program, test) if not outcome.passed]
    assert {outcome.entry.partition("_T")[0] for outcome in failed} == {"prefill_rows"}
    assert {outcome.tensor for outcome in failed} == {"rows"}


def test_a_result_that_is_not_a_number_fails_the_self_test(
    artifact: Artifact, device: Device, tmp_path: Path
):
    spoiled = copied(artifact, tmp_path)
    weight = np.array([1, 2, np.nan, 4], np.float32)
    iree.runtime.save_archive_file({"model.norm.weight": weight}, tmp_path / "model.irpa")
    with pytest.raises(SelfTestFailed, match="differs by nan"):
        Program.load(spoiled, "target", device)


def test_a_self_test_that_passed_is_not_repeated_until_something_changes(artifact: Artifact, device: Device):
    heard: list[tuple[int, int]] = []

    def load(changed: Artifact = artifact, on: Device = device) -> int:
        heard.clear()
        Program.load(changed, "target", on, progress=lambda done, total: heard.append((done, total)))
        return len(heard)

    assert load() == 7  # four prefill entries, two decode entries, the head
    assert heard[-1] == (7, 7)
    assert load() == 0
    renamed = dataclasses.replace(artifact.manifest, name="other")
    assert load(Artifact(artifact.directory, renamed)) == 7
    assert load(on=dataclasses.replace(device, description=f"{device.description}, another one")) == 7


def test_a_self_test_that_failed_is_not_taken_for_passed(artifact: Artifact, device: Device, tmp_path: Path):
    test = self_test_of(artifact)
    bad = with_self_test(artifact, tmp_path, dataclasses.replace(test, next_token=test.next_token + 1))
    for _ in range(2):
        with pytest.raises(SelfTestFailed, match="after decode_C16"):
            Program.load(bad, "target", device)


def test_a_cache_that_cannot_be_written_costs_only_another_self_test(
    artifact: Artifact, device: Device, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "cache").write_text("a file where the cache folder would be")
    heard: list[int] = []
    for _ in range(2):
        Program.load(artifact, "target", device, progress=lambda done, total: heard.append(done))
    assert heard == [1, 2, 3, 4, 5, 6, 7] * 2
    assert "cannot note in" in caplog.text


def test_the_self_test_can_be_left_out(artifact: Artifact, device: Device, tmp_path: Path):
    test = self_test_of(artifact)
    bad = with_self_test(artifact, tmp_path, dataclasses.replace(test, next_token=test.next_token + 1))
    Program.load(bad, "target", device, self_test=False)


def test_an_artifact_without_proof_is_refused_with_its_reason(artifact: Artifact, device: Device):
    unproven = dataclasses.replace(
        artifact.manifest,
        proof=dataclasses.replace(artifact.manifest.proof, kind="none", reason="f16 unaudited"),
    )
    with pytest.raises(Unproven, match="nothing proves that it computes right: f16 unaudited"):
        Program.load(Artifact(artifact.directory, unproven), "draft", device)


def test_a_role_that_the_artifact_lacks_is_named(artifact: Artifact, device: Device):
    only = dataclasses.replace(artifact.manifest, models={"target": artifact.manifest.models["target"]})
    with pytest.raises(ArtifactError, match="has no draft model, only target"):
        Program.load(Artifact(artifact.directory, only), "draft", device)


def test_entries_that_the_module_lacks_are_named(artifact: Artifact, device: Device):
    changed = toy.with_model(artifact.manifest, "target", capacities=(16, 64))
    with pytest.raises(ArtifactError, match=r"lacks entries .*: decode_C64, prefill_T4_C64, prefill_T8_C64"):
        Program.load(Artifact(artifact.directory, changed), "target", device)


def test_a_file_that_is_no_module_is_refused(artifact: Artifact, device: Device, tmp_path: Path):
    for name in artifact.manifest.files:
        (tmp_path / name).write_bytes(artifact.path(name).read_bytes())
    (tmp_path / "target.vmfb").write_bytes(b"not a module" * 100)
    with pytest.raises(ArtifactError, match="the target of artifact 'toy' cannot be loaded"):
        Program.load(Artifact(tmp_path, artifact.manifest), "target", device)


def test_a_parameter_that_the_archive_lacks_is_named(artifact: Artifact, device: Device, tmp_path: Path):
    for name in artifact.manifest.files:
        (tmp_path / name).write_bytes(artifact.path(name).read_bytes())
    iree.runtime.save_archive_file({"model.other": toy.WEIGHT}, tmp_path / "model.irpa")
    with pytest.raises(ArtifactError, match=r"cannot be loaded .*model\.norm\.weight"):
        Program.load(Artifact(tmp_path, artifact.manifest), "target", device)


@pytest.mark.parametrize(
    "text",
    [
        "Error creating vm context: DATA_LOSS; [vkWaitSemaphores] VK_ERROR_DEVICE_LOST; while invoking ..",
        "Error creating vm context: DATA_LOSS; while invoking native function hal.fence.await; ..",
        "Error creating vm context: RESOURCE_EXHAUSTED; no memory; while invoking ..",
    ],
)
def test_a_device_that_fails_while_a_module_is_loaded_is_not_taken_for_a_bad_artifact(
    text: str, artifact: Artifact, device: Device, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(iree.runtime, "VmContext", fail)
    with pytest.raises(DeviceFailed, match="loading the draft of artifact 'toy' failed on the device: Error"):
        Program.load(artifact, "draft", device)


class LostContext:
    def invoke(self, *_: object) -> None:
        raise RuntimeError("Error invoking function: RESOURCE_EXHAUSTED; \n[ 0] bytecode model@1:164")


def test_a_call_that_fails_on_the_device_names_the_entry_and_what_may_help(
    target: Program, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(target, "_context", LostContext())
    expected = r"head of the target of artifact 'toy' failed on the device: .*EXHAUSTED\. If memory ran out"
    with pytest.raises(DeviceFailed, match=expected):
        target.head(np.zeros(target.model.hidden, np.float32))
