"""Cycles and bytes of single instructions."""

from __future__ import annotations

import pytest

from specprefill_jax.preflight.cost import Cost, cost_of, instruction_cost
from specprefill_jax.preflight.isa import Instruction


@pytest.mark.parametrize(
    ("name", "wave", "cost"),
    [
        ("v_wmma_f32_16x16x16_f16", 32, Cost(valu=32, wmma=1)),
        ("v_add_f32_e32", 32, Cost(valu=1)),
        ("v_add_f32_e32", 64, Cost(valu=1)),  # both halves at once
        ("v_add_nc_u32_e32", 64, Cost(valu=2)),
        ("v_dual_mov_b32", 32, Cost(valu=1)),
        ("v_mul_lo_u32", 32, Cost(valu=4)),
        ("v_cvt_f32_f16_e32", 32, Cost(valu=1, converts=1)),
        ("v_readlane_b32", 32, Cost(valu=1, lanes=1)),
        ("ds_load_b128", 32, Cost(lds=4)),
        ("ds_load_u16_d16", 32, Cost(lds=1)),
        ("ds_store_2addr_b32", 64, Cost(lds=4)),
        ("ds_bpermute_b32", 32, Cost(lds=1)),
        ("buffer_load_b128", 32, Cost(vmem=8, loaded=512)),
        ("buffer_store_b16", 64, Cost(vmem=2, stored=128)),
        ("scratch_load_b32", 32, Cost(vmem=2, loaded=128, scratch=1)),
        ("s_add_u32", 32, Cost()),
        ("s_waitcnt", 32, Cost()),
    ],
)
def test_an_instruction_costs(name: str, wave: int, cost: Cost) -> None:
    assert instruction_cost(name, wave) == cost


def test_costs_of_several_add_up() -> None:
    names = ("ds_load_b128", "ds_load_b128", "v_add_f32_e32", "scratch_load_b32")
    total = cost_of((Instruction(name, name) for name in names), 32)
    assert total == Cost(valu=1, lds=8, vmem=2, loaded=128, scratch=1)
