"""The proof that a loaded program computes right on this device: each entry of each bucket, and its state."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from jaxtyping import Float, Shaped

from specprefill_jax.artifact.self_test import Expected, Piece, SelfTest, by_head, rows_by_head, signs
from specprefill_jax.errors import PromptTooLong, SelfTestFailed
from specprefill_jax.runtime.blocks import Block, plan_blocks
from specprefill_jax.runtime.state import State

if TYPE_CHECKING:
    from specprefill_jax.runtime.program import Program

Tensors: TypeAlias = Mapping[str, Shaped[np.ndarray, "groups values"]]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one entry did: the tensor that came closest to its limit, or is beyond it.

    `difference` and `allowed` are in units of the tensor's own norm.
    """

    entry: str
    tensor: str
    difference: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Written so that a difference that is not a number fails."""
        return self.difference <= self.allowed

    @property
    def share(self) -> float:
        """The difference as a part of what is allowed."""
        return self.difference / self.allowed if np.isfinite(self.difference) else float("inf")


def run_self_test(program: "Program", test: SelfTest) -> Iterator[Outcome]:
    """Run the inputs of `test` through each entry of each bucket, and say how each did.

    One state at a time is held.

    Raises:
        DeviceFailed: the device ran out of memory, or was lost.
        ArtifactError: an entry does not update its state in place.
    """
    model = program.model
    kinds = (False, True) if model.rows else (False,)
    hidden = None
    for capacity in model.capacities:
        state = None
        for length in (length for length in model.blocks if length <= capacity):
            for rows in kinds:
                state = None  # its memory goes before the next one is made
                state = program.state_of_capacity(capacity)
                hidden, found = _read(program, state, test, length, rows=rows)
                kind = "prefill_rows" if rows else "prefill"
                yield _worst(f"{kind}_T{length}_C{capacity}", test.prefilled, found)
        if state is not None:
            yield _worst(f"decode_C{capacity}", test.decoded, _decode(program, state, test))
    assert hidden is not None, "the smallest block fits the smallest capacity"
    yield _worst("head", test.prefilled, {"logits": program.head(hidden)[None]})
    signs.cache_clear()


def require_passed(outcome: Outcome, *, program: str, device: str) -> None:
    """Refuse a program by the outcome of one entry; `program` and `device` name them in the message.

    Raises:
        SelfTestFailed: it failed.
    """
    if not outcome.passed:
        raise SelfTestFailed(
            f"{program} computes wrong results on {device}: after {outcome.entry}, {outcome.tensor} differs "
            f"by {outcome.difference:.3g} of its size from what was recorded, and {outcome.allowed:.3g} is "
            "allowed. Compile the artifact again for this machine; if that does not help, use another device"
        )


def _read(
    program: "Program", state: State, test: SelfTest, length: int, *, rows: bool
) -> tuple[Float[np.ndarray, "D"], Tensors]:
    """The pieces in blocks of one length, the last by the entry with rows where asked."""
    tokens = np.array([token for piece in test.pieces for token in piece.tokens], np.int32)
    positions = np.array([position for piece in test.pieces for position in piece.positions], np.int32)
    plan = _plan(test.pieces, length, state.capacity, program.model.rows)
    for block in plan[:-1]:
        part = slice(block.slot, block.slot + block.count)
        program.prefill_block(state, tokens[part], positions[part], length=length)
    last = slice(plan[-1].slot, None)
    result = program.prefill_block(state, tokens[last], positions[last], length=length, rows=rows)
    found = {"hidden": result.hidden[None], **_state(program, state)}
    if result.rows is not None:
        wanted = min(program.model.rows, len(test.pieces[-1].tokens))
        found["rows"] = rows_by_head(_rows(result.rows, result.rows_valid, wanted, state.length))
    return result.hidden, found


def _plan(pieces: tuple[Piece, ...], length: int, capacity: int, rows: int) -> list[Block]:
    """Blocks for one piece after the other, or for all at once where the cache is too small for that."""
    try:
        plan: list[Block] = []
        start = 0
        for piece in pieces:
            count = len(piece.tokens)
            plan += plan_blocks(count, lengths=(length,), capacity=capacity, start=start, rows=rows)
            start += count
        return plan
    except PromptTooLong:
        count = sum(len(piece.tokens) for piece in pieces)
        return list(plan_blocks(count, lengths=(length,), capacity=capacity, rows=rows))


def _rows(
    rows: Float[np.ndarray, "R A H C"], valid: int, wanted: int, slots: int
) -> Float[np.ndarray, "r A H n"]:
    """The last valid rows over the slots in use; NaN if anything stands where nothing may."""
    shown = rows[valid - wanted : valid, ..., :slots]
    blank = not rows[valid:].any() and not rows[..., slots:].any()
    return shown if blank else np.full_like(shown, np.nan)


def _decode(program: "Program", state: State, test: SelfTest) -> Tensors:
    result = program.decode(state, test.next_token, test.pieces[-1].positions[-1] + 1)
    found = {"logits": result.logits[None], **_state(program, state)}
    if result.rows is not None:
        found["rows"] = rows_by_head(_rows(result.rows[None], 1, 1, state.length))
    return found


def _state(program: "Program", state: State) -> dict[str, Shaped[np.ndarray, "groups values"]]:
    values = state.read_slots(state.length)
    return {tensor.name: by_head(tensor, values[tensor.name]) for tensor in program.model.state}


def _worst(entry: str, expected: Mapping[str, Expected], found: Tensors) -> Outcome:
    """Of all tensors the one whose difference is the largest part of what is allowed."""
    outcomes = []
    for name, values in found.items():
        wanted = expected[name]
        outcomes.append(Outcome(entry, name, wanted.difference(values), wanted.tolerance))
    return max(outcomes, key=lambda outcome: outcome.share)
