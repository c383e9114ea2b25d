"""When one wave waits, worked out by hand."""

from __future__ import annotations

from specprefill_jax.preflight.isa import Instruction
from specprefill_jax.preflight.replay import (
    BARRIER,
    LDS_LATENCY,
    SCRATCH_LATENCY,
    SMEM_LATENCY,
    VMEM_LATENCY,
    replay,
)


def cycles(*lines: str, wave: int = 32, repeated: bool = False) -> float:
    return replay([Instruction(line.split()[0], line) for line in lines], wave, repeated=repeated)


def test_arithmetic_issues_one_after_the_other() -> None:
    assert cycles("v_add_f32_e32", "v_add_f32_e32", "v_wmma_f32_16x16x16_f16") == 34


def test_a_load_that_is_not_waited_for_costs_its_issue() -> None:
    assert cycles("buffer_load_b128 v[0:3]") == 1


def test_a_wait_takes_until_the_value_is_there() -> None:
    # The cache is busy for 8 cycles, the value arrives 600 later; the wait itself is one more.
    assert cycles("buffer_load_b128 v[0:3]", "s_waitcnt vmcnt(0)") == 8 + VMEM_LATENCY + 1


def test_arithmetic_hides_latency() -> None:
    work = ("v_add_f32_e32",) * 1000
    assert cycles("buffer_load_b128 v[0:3]", *work, "s_waitcnt vmcnt(0)") == 1 + 1000 + 1


def test_a_wait_for_all_but_the_last_returns_with_the_first() -> None:
    loads = ("ds_load_b128 v[0:3]", "ds_load_b128 v[4:7]")
    assert cycles(*loads, "s_waitcnt lgkmcnt(1)") == 4 + LDS_LATENCY + 1
    assert cycles(*loads, "s_waitcnt lgkmcnt(0)") == 8 + LDS_LATENCY + 1


def test_scalar_loads_and_scratch_and_stores_have_their_own_waits() -> None:
    assert cycles("s_load_b128 s[0:3]", "s_waitcnt lgkmcnt(0)") == SMEM_LATENCY + 1
    assert cycles("scratch_load_b32 v0", "s_waitcnt vmcnt(0)") == 2 + SCRATCH_LATENCY + 1
    assert cycles("buffer_store_b32 v0", "s_waitcnt vmcnt(0)") == 2
    assert cycles("buffer_store_b32 v0", "s_waitcnt_vscnt null, 0x0") == 2 + VMEM_LATENCY + 1


def test_a_barrier_costs_its_own() -> None:
    assert cycles("s_barrier") == BARRIER


def test_of_a_loop_a_later_turn_counts() -> None:
    # Each turn waits for the load of the turn before: 600 cycles of latency in every turn but the first.
    turn = ("s_waitcnt vmcnt(0)", "buffer_load_b128 v[0:3]")
    assert cycles(*turn) == 2
    assert cycles(*turn, repeated=True) == VMEM_LATENCY + 8 + 1
