"""Compiled modules against transformers on each device: every entry of every bucket.

What these tests protect from: code that compiles and computes something else, above all a donated state
buffer that is read after it was overwritten. That shows only in a block of several chunks that starts from a
state other than zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from specprefill_jax.aot.build import build_artifact
from tests.aot.child import Child, Piece
from tests.aot.conftest import CAPACITIES, LONG, SHORT, recipe_of
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

# Largest difference from transformers in f32, as a part of the largest value. Matrices and the inputs of
# their products are rounded to 8 bits (bf16) or 11 bits (f16): 4e-3 or 5e-4 each. Four layers of random
# weights make more of it, most in the attention rows (bf16: 1.7e-1 measured, in a row of decode).
TOLERANCES = {"f32": TOLERANCE, "bf16": 2e-1, "f16": 2.5e-2}


@dataclass(frozen=True)
class Built:
    """The tiny pair built for a device in a number format, in the process that runs it."""

    device: str
    numerics: str
    tolerance: float
    child: Child


LAVAPIPE = (pytest.mark.vulkan, pytest.mark.slow)


@pytest.fixture(
    scope="module",
    ids="-".join,
    params=[
        ("cpu", "f32"),
        pytest.param(("cpu", "bf16"), marks=pytest.mark.deep),
        pytest.param(("cpu-portable", "f32"), marks=pytest.mark.deep),
        pytest.param(("vulkan", "f32"), marks=LAVAPIPE),
        pytest.param(("llvmpipe", "f32"), marks=(*LAVAPIPE, pytest.mark.deep)),
        pytest.param(("llvmpipe-f16", "f16"), marks=(*LAVAPIPE, pytest.mark.deep)),
    ],
)
def built(
    request: pytest.FixtureRequest, pairs: Callable[[str], Pair], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Built]:
    """One build at a time: an open device of lavapipe keeps two threads busy, whether it works or not."""
    device, numerics = request.param
    out = tmp_path_factory.mktemp("tiny") / device
    with Child(build_artifact(recipe_of(pairs, numerics), device, out, print), device) as child:
        yield Built(device, numerics, TOLERANCES[numerics], child)


Cut = list[tuple[int, int]]  # block length, valid tokens in it

# Prompts with gaps; the last block holds at least `ROWS` tokens.
ONE_LONG = Case("", "", spans((0, 4), (32, 64), (320, 352), (640, 680), (930, 931)), LONG, decoded=2)
SHORT_THEN_LONG = Case("", "", spans((0, 12), (40, 100), (700, 730)), LONG, decoded=2)
SHORT_ONES = Case("", "", spans((0, 20), (50, 67)), LONG, decoded=2)
LONG_ONES = Case("", "", spans((0, 50), (300, 340), (700, 730)), LONG, decoded=2)

# Name -> prompt, capacity, blocks.
DRAFT: dict[str, tuple[Case, int, Cut]] = {
    "one long block": (ONE_LONG, CAPACITIES["draft"][0], [(LONG, 109)]),
    "a long block from a state": (SHORT_THEN_LONG, CAPACITIES["draft"][1], [(SHORT, 16), (LONG, 86)]),
    "short blocks, small cache": (SHORT_ONES, CAPACITIES["draft"][0], [(SHORT, 16), (SHORT, 14), (SHORT, 7)]),
    "short blocks, large cache": (SHORT_ONES, CAPACITIES["draft"][1], [(SHORT, 5), (SHORT, 16), (SHORT, 16)]),
}
TARGET: tuple[Case, int, Cut] = (LONG_ONES, CAPACITIES["target"][0], [(LONG, 50), (LONG, 70)])


def call(child: Child, role: str, case: Case, capacity: int, cut: Cut, entry: str) -> Tensors:
    """What the entry, the head and the decode entry of a capacity make of a prompt cut in blocks."""
    tokens, positions = case.tokens[: case.length], np.asarray(case.positions, np.int32)
    ends = np.cumsum([count for _, count in cut])
    assert ends[-1] == case.length
    pieces = [
        Piece(tokens[end - count : end], positions[end - count : end], length)
        for (length, count), end in zip(cut, ends, strict=True)
    ]
    then = [(int(case.tokens[case.length + i]), case.positions[-1] + 1 + i) for i in range(case.decoded)]
    called = child.call(role, entry, capacity, pieces, then)
    tensors: Tensors = {"logits": called.logits, **used_slots(called.state, case.length)}
    if called.rows is not None:
        tensors["rows"] = fitted(called.rows, case.length)
    for i, decoded in enumerate(called.decoded):
        tensors[f"decode.{i}.logits"] = decoded.logits
        if decoded.rows is not None:
            tensors[f"decode.{i}.rows"] = fitted(decoded.rows, case.length + i + 1)
    after = used_slots(called.decoded_state, case.length + case.decoded)
    return tensors | {f"decoded.{name}": tensor for name, tensor in after.items()}


def fitted(rows: np.ndarray, used: int) -> np.ndarray:
    """Rows at the reference's capacity; slots past those in use must be zero."""
    assert not rows[..., used:].any()
    missing = max(0, CAPACITY - rows.shape[-1])
    return np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, missing)])[..., :CAPACITY]


def without_rows(tensors: Tensors, ending: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(ending)}


@pytest.mark.parametrize("name", DRAFT)
def test_the_drafts_entries_compute_what_transformers_computes(
    name: str, built: Built, pairs: Callable[[str], Pair]
) -> None:
    case, capacity, cut = DRAFT[name]
    assert cut[-1][1] >= ROWS
    wanted = expected(pairs("draft").reference, case)
    with_rows = call(built.child, "draft", case, capacity, cut, "prefill_rows")
    worst = compare(wanted, with_rows, built.tolerance)
    bare = call(built.child, "draft", case, capacity, cut, "prefill")
    wanted.pop("rows")
    worst = max(worst, compare(wanted, bare, built.tolerance))
    print(f"{built.device} {built.numerics}, {name}: {worst:.1e} of {built.tolerance:g}")


def test_the_targets_entries_compute_what_transformers_computes(
    built: Built, pairs: Callable[[str], Pair]
) -> None:
    case, capacity, cut = TARGET
    wanted = without_rows(expected(pairs("target").reference, case), "rows")
    got = call(built.child, "target", case, capacity, cut, "prefill")
    worst = compare(wanted, got, built.tolerance)
    print(f"{built.device} {built.numerics}, target: {worst:.1e} of {built.tolerance:g}")


def test_the_cases_call_every_entry(built: Built) -> None:
    for role, cases, kinds in (
        ("draft", [*DRAFT.values()], ("prefill", "prefill_rows")),
        ("target", [TARGET], ("prefill",)),
    ):
        called = {f"decode_C{capacity}" for _, capacity, _ in cases} | {"head"}
        for _, capacity, cut in cases:
            called |= {f"{kind}_T{length}_C{capacity}" for kind in kinds for length, _ in cut}
        assert called == built.child.entries(role)
