"""What a self-test records: the same as transformers computes, with tolerances that follow the rounding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from specprefill_jax.aot.export import Shapes, state_tensors
from specprefill_jax.aot.self_test import LEAST_TOLERANCE, make_self_test
from specprefill_jax.artifact.self_test import SelfTest, by_head, rows_by_head
from tests.models.reference import ROWS, Pair, Reference

pytestmark = pytest.mark.deep

Pairs = Callable[[str], Pair]


def made(pair: Pair, *, capacity: int = 256, rows: int = ROWS, numerics: str = "f32") -> SelfTest:
    shapes = Shapes((16,), (capacity,), rows, numerics, None)
    return make_self_test(pair.directory, pair.config, shapes)


@pytest.mark.parametrize("capacity", [32, 256])
def test_it_records_what_transformers_computes(capacity: int, pairs: Pairs) -> None:
    """In a cache of 32 slots the second piece is cut short."""
    pair = pairs("draft")
    test = made(pair, capacity=capacity)
    reference = Reference(pair.reference)
    fed = [reference.feed(np.array(piece.tokens), np.array(piece.positions)) for piece in test.pieces]
    logits, rows = fed[-1]
    check(pair, test.prefilled, logits[-1], rows[-min(ROWS, len(test.pieces[-1].tokens)) :], reference)
    last = np.array([test.pieces[-1].positions[-1] + 1])
    logits, rows = reference.feed(np.array([test.next_token]), last)
    check(pair, test.decoded, logits[-1], rows, reference)


def check(pair: Pair, expected: object, logits: np.ndarray, rows: np.ndarray, reference: Reference) -> None:
    """All that transformers gives, each within half of what an f32 build may be off.

    It has no name for what our convolution keeps beside its inputs.
    """
    assert isinstance(expected, dict)
    state = reference.state()
    tensors = [tensor for tensor in state_tensors(pair.config, "f32") if not tensor.name.endswith(".conv")]
    found = {tensor.name: by_head(tensor, state[tensor.name]) for tensor in tensors}
    found |= {"logits": logits[None], "rows": rows_by_head(rows)}
    kept = {name for name in expected if name.endswith(".conv")}
    assert expected.keys() - {"hidden"} - kept == found.keys()
    off = {name: expected[name].difference(values.astype(np.float32)) for name, values in found.items()}
    assert max(off.values()) < LEAST_TOLERANCE / 2, off


def test_pieces_have_gaps_far_positions_and_cross_a_chunk(pairs: Pairs) -> None:
    first, second = made(pairs("draft")).pieces
    positions = np.array([*first.positions, *second.positions])
    assert second.positions[0] - first.positions[-1] > 1
    assert len(second.tokens) > 64
    assert positions[-1] > 40000
    assert (np.diff(positions) > 1).sum() == 3


def test_it_fits_the_smallest_cache(pairs: Pairs) -> None:
    assert made(pairs("target"), capacity=16, rows=0).slots == 15


def test_a_target_has_no_rows(pairs: Pairs) -> None:
    assert "rows" not in made(pairs("target"), capacity=16, rows=0).decoded


def test_tolerances_are_tight_in_f32_and_follow_the_rounding_of_other_formats(pairs: Pairs) -> None:
    """bf16 rounds 8 times as coarsely as f16."""
    worst = {}
    for numerics in ("f32", "f16", "bf16"):
        test = made(pairs("draft"), capacity=32, numerics=numerics)
        worst[numerics] = [values.tolerance for values in (*test.prefilled.values(), *test.decoded.values())]
    assert set(worst["f32"]) == {LEAST_TOLERANCE}
    assert LEAST_TOLERANCE < np.median(worst["f16"]) < 1e-2
    assert 4 < np.median(worst["bf16"]) / np.median(worst["f16"]) < 16
    assert max(worst["bf16"]) < 0.5


def test_the_same_model_gives_the_same_self_test(pairs: Pairs) -> None:
    assert made(pairs("draft"), capacity=32) == made(pairs("draft"), capacity=32)
