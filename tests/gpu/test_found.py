"""How what was measured becomes passed, failed or not offered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from check_demo import Outcome
from gpu.demo import kept_as_on_cpu
from gpu.facts import Described, Product
from gpu.kernels import difference_of
from gpu.plan import Plan
from gpu.shapes import parity, parity_inputs
from gpu.speed import Measured, summed_up

F16 = Product(16, 16, 16, ("f16", "f16", "f32"))


@pytest.mark.parametrize(
    ("sizes", "products", "lacking"),
    [
        ((32, 32), (F16,), ""),
        ((32, 64), (F16,), ""),
        ((8, 8), (F16,), "subgroups of 32"),
        ((32, 32), (Product(8, 8, 8, F16.types),), "cooperative 16x16x16 f16->f32"),
        ((64, 64), (), "subgroups of 32, cooperative 16x16x16 f16->f32"),
    ],
)
def test_a_kernel_runs_only_where_its_product_and_subgroups_are_offered(
    sizes: tuple[int, int], products: tuple[Product, ...], lacking: str
) -> None:
    assert Described("GPU", "driver 1", sizes, products).lacks(F16, frozenset({32})) == lacking


def test_a_kernel_without_cooperative_products_needs_its_subgroups_alone() -> None:
    bare = Described("GPU", "driver 1", (32, 32), ())
    assert bare.lacks(None, frozenset()) == ""
    assert bare.lacks(None, frozenset({64})) == "subgroups of 64"


def test_a_difference_is_in_units_of_what_is_wanted() -> None:
    wanted = np.full((2, 2), 2.0)
    assert difference_of(wanted.copy(), wanted) == 0.0
    assert difference_of(wanted * 1.5, wanted) == pytest.approx(0.5)
    assert difference_of(wanted[0], wanted) == float("inf")
    assert difference_of(np.array([[2.0, np.nan], [2.0, 2.0]]), wanted) == float("inf")


def outcome(*kept: int) -> Outcome:
    return Outcome("active", 100, np.array(kept, np.int32), True, False)


def test_kept_tokens_may_differ_by_two_in_a_hundred_as_is_promised() -> None:
    same, almost = list(range(50)), [*range(49), 60]
    assert kept_as_on_cpu([outcome(*same)], [same]).result == "passed"
    found = kept_as_on_cpu([outcome(*same), outcome(*same)], [same, almost])
    assert (found.result, found.found["same"], found.found["least"]) == ("passed", 1, 0.98)
    assert kept_as_on_cpu([outcome(*same)], [[*range(48), 60, 61]]).result == "failed"


def result(first_ms: float, kept: int, status: str, prefill_ms: float) -> dict[str, Any]:
    """As `specprefill run --json` prints it."""
    return {
        "usage": {"completion_tokens": 11},
        "timings": {
            "specprefill": status,
            "specprefill_detail": {
                "draft_read": 1000,
                "kept": kept,
                "phases": {"target_prefill": prefill_ms},
            },
            "time_to_first_token_ms": first_ms,
            "decode_ms": 100.0,
        },
    }


def test_speeds_are_medians_and_ratios_are_of_runs_that_took_turns() -> None:
    dense = Measured.of([result(ms, 1000, "disabled", ms / 2) for ms in (1000.0, 2000.0, 9000.0)])
    sparse = Measured.of([result(ms, 300, "active", ms / 2) for ms in (500.0, 400.0, 3000.0)])
    checks = list(summed_up(1000, {1.0: dense, 0.3: sparse}))
    assert [check.name for check in checks] == [
        "1,000 tokens, dense",
        "1,000 tokens, keep 0.3",
        "decode after 1,000 tokens",
    ]
    assert "first token 2.000 s, 500 tokens/s (target_prefill 1,000 ms, 1,000 tokens/s" in checks[0].detail
    # 1000/500, 2000/400 and 9000/3000: the median is 3, and not 2000/500.
    assert "3.00 times as fast as dense; 300 kept (target_prefill 250 ms, 1,200 tokens/s" in checks[1].detail
    assert checks[2].detail == "100.0 tokens/s after 1,000 tokens"


def test_a_sparse_run_that_was_none_fails_in_place_of_giving_a_speed() -> None:
    dense = Measured.of([result(1000.0, 1000, "disabled", 500.0)])
    fell_back = Measured.of([result(500.0, 1000, "failed-dense", 250.0)])
    check = list(summed_up(1000, {1.0: dense, 0.3: fell_back}))[1]
    assert (check.result, check.detail) == ("failed", "status failed-dense in place of active")


def test_parity_reads_whole_blocks_and_a_padded_one_with_gaps() -> None:
    tokens, positions = parity_inputs(Plan(tiny=True), "draft")
    assert tokens.shape == positions.shape == (160,)
    assert (np.diff(positions) > 0).all()
    assert np.diff(positions).max() > 1


@pytest.mark.parametrize(("error", "results"), [(0.0, ["passed", "passed"]), (1e-2, ["failed", "failed"])])
def test_parity_compares_every_logit_and_row(error: float, results: list[str]) -> None:
    logits, rows = np.arange(8, dtype=np.float32), np.ones((2, 1, 1, 160), np.float32)

    def prefill(*_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(hidden=None, rows=np.pad(rows * (1 + error), [(0, 0)] * 3 + [(0, 96)]))

    program: Any = SimpleNamespace(
        model=SimpleNamespace(rows=2),
        new_state=lambda slots: None,
        prefill=prefill,
        head=lambda hidden: logits * (1 + error),
    )
    wanted = {"draft.logits": logits, "draft.rows": rows}
    wanted |= {f"draft.{name} allowed": np.array(1e-3) for name in ("logits", "rows")}
    checks = list(parity(Plan(tiny=True), "draft", program, wanted))
    assert [check.result for check in checks] == results
    assert checks[0].detail.endswith("the likeliest token is the same")
