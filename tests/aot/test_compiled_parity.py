"""Compiled modules against transformers on each device: every entry of every bucket.

What these tests protect from: code that compiles and computes something else, above all a donated state
buffer that is read after it was overwritten. That shows only in a block of several chunks that starts from a
state other than zero.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from specprefill_jax.runtime.program import Program
from tests.aot.conftest import CAPACITIES, LONG, SHORT, Built
from tests.models.reference import (
    CAPACITY,
    ROWS,
    TOLERANCE,
    Case,
    Pair,
    Tensors,
    compare,
    expected,
    spans,
    used_slots,
)

# Largest difference from transformers in f32, as a part of the largest value. Matrices and the inputs
# of their products are rounded to 8 bits (bf16) or 11 bits (f16): 4e-3 or 5e-4 each; four layers add up
# (bf16: 9e-2 measured, in logits after decode).
BF16, F16 = 1.2e-1, 1e-2

every_build = pytest.mark.parametrize(
    ("device", "numerics", "tolerance"),
    [
        pytest.param("cpu", "f32", TOLERANCE),
        pytest.param("cpu", "bf16", BF16),
        pytest.param("cpu-portable", "f32", TOLERANCE),
        pytest.param("vulkan", "f32", TOLERANCE, marks=(pytest.mark.vulkan, pytest.mark.slow)),
        pytest.param("llvmpipe", "f32", TOLERANCE, marks=(pytest.mark.vulkan, pytest.mark.slow)),
        pytest.param("llvmpipe-f16", "f16", F16, marks=(pytest.mark.vulkan, pytest.mark.slow)),
    ],
)


Piece = tuple[int, int]  # block length, valid tokens in it

# Prompts with gaps; the last block holds at least `ROWS` tokens.
ONE_LONG = Case("", "", spans((0, 4), (32, 96), (320, 384), (640, 741), (930, 931)), LONG, decoded=2)
SHORT_THEN_LONG = Case("", "", spans((0, 12), (40, 190), (700, 750)), LONG, decoded=2)
SHORT_ONES = Case("", "", spans((0, 20), (50, 67)), LONG, decoded=2)

# Name -> prompt, capacity, pieces.
DRAFT: dict[str, tuple[Case, int, list[Piece]]] = {
    "one long block": (ONE_LONG, CAPACITIES["draft"][0], [(LONG, 234)]),
    "a long block from a state": (SHORT_THEN_LONG, CAPACITIES["draft"][1], [(SHORT, 16), (LONG, 196)]),
    "short blocks, small cache": (SHORT_ONES, CAPACITIES["draft"][0], [(SHORT, 16), (SHORT, 14), (SHORT, 7)]),
    "short blocks, large cache": (SHORT_ONES, CAPACITIES["draft"][1], [(SHORT, 5), (SHORT, 16), (SHORT, 16)]),
}
TARGET_PIECES: list[Piece] = [(SHORT, 16), (SHORT, 14), (SHORT, 7)]


def call(program: Program, case: Case, capacity: int, pieces: list[Piece], entry: str) -> Tensors:
    """What the entry, the head and the decode entry of a capacity make of a prompt cut in pieces."""
    read = program.device.transfer.read
    state = program.state_of_capacity(capacity)
    tokens, positions = case.tokens[: case.length], np.asarray(case.positions, np.int32)
    assert sum(count for _, count in pieces) == case.length
    results = []
    for length, count in pieces:
        part = slice(state.length, state.length + count)
        results = program._prefill(entry, state, tokens[part], positions[part], length)
    tensors: Tensors = {"logits": program.head(read(results[0])), **used_slots(state.read(), case.length)}
    if entry == "prefill_rows":
        tensors["rows"] = fitted(read(results[1]), case.length)
    for i in range(case.decoded):
        slot = case.length + i
        decoded = program.decode(state, int(case.tokens[slot]), case.positions[-1] + 1 + i)
        tensors[f"decode.{i}.logits"] = decoded.logits
        if decoded.rows is not None:
            tensors[f"decode.{i}.rows"] = fitted(decoded.rows, slot + 1)
    after = used_slots(state.read(), case.length + case.decoded)
    return tensors | {f"decoded.{name}": tensor for name, tensor in after.items()}


def fitted(rows: np.ndarray, used: int) -> np.ndarray:
    """Rows at the reference's capacity; slots past those in use must be zero."""
    assert not rows[..., used:].any()
    return rows[..., :CAPACITY]


def without_rows(tensors: Tensors, ending: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(ending)}


@every_build
@pytest.mark.parametrize("name", DRAFT)
def test_the_drafts_entries_compute_what_transformers_computes(
    name: str,
    device: str,
    numerics: str,
    tolerance: float,
    built: Callable[[str, str], Built],
    pairs: Callable[[str], Pair],
) -> None:
    case, capacity, pieces = DRAFT[name]
    assert pieces[-1][1] >= ROWS
    wanted = expected(pairs("draft").reference, case)
    program = built(device, numerics).draft
    with_rows = call(program, case, capacity, pieces, "prefill_rows")
    worst = compare(wanted, with_rows, tolerance)
    bare = call(program, case, capacity, pieces, "prefill")
    wanted.pop("rows")
    worst = max(worst, compare(wanted, bare, tolerance))
    print(f"{device} {numerics}, {name}: {worst:.1e} of {tolerance:g}")


@every_build
def test_the_targets_entries_compute_what_transformers_computes(
    device: str,
    numerics: str,
    tolerance: float,
    built: Callable[[str, str], Built],
    pairs: Callable[[str], Pair],
) -> None:
    wanted = without_rows(expected(pairs("target").reference, SHORT_ONES), "rows")
    program = built(device, numerics).target
    got = call(program, SHORT_ONES, CAPACITIES["target"][0], TARGET_PIECES, "prefill")
    print(f"{device} {numerics}, target: {compare(wanted, got, tolerance):.1e} of {tolerance:g}")


def test_the_cases_call_every_entry_of_the_draft(built: Callable[[str, str], Built]) -> None:
    program = built("cpu", "f32").draft
    called = {f"decode_C{capacity}" for _, capacity, _ in DRAFT.values()} | {"head"}
    for _, capacity, pieces in DRAFT.values():
        called |= {
            f"{kind}_T{length}_C{capacity}" for kind in ("prefill", "prefill_rows") for length, _ in pieces
        }
    assert called == program._functions.keys()
