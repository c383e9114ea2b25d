"""Loops of a disassembly, and their turns."""

from __future__ import annotations

import pytest

from specprefill_jax.preflight.isa import Loop, parse, with_turns
from tests.preflight.sample import WMMA_LOOP


def loops(assembly: str) -> list[tuple[int | None, int]]:
    """Turns and instructions of each loop."""
    return [(loop.turns, len(list(loop.instructions()))) for loop in parse(assembly).loops()]


def counted(start: str, step: str, compare: str) -> str:
    return f"""
BB0:
	{start}
BB1:
	{step}
	v_add_f32_e32 v1, v2, v3
	{compare}
	s_cbranch_scc0 BB1
BB2:
	s_endpgm
"""


def test_a_branch_back_encloses_a_loop() -> None:
    program = parse(WMMA_LOOP)
    assert len(list(program.instructions())) == 11
    (loop,) = program.loops()
    first, *_, last = loop.instructions()
    assert (first.name, last.name) == ("s_add_u32", "s_cbranch_scc0")


@pytest.mark.parametrize(
    ("start", "step", "compare", "turns"),
    [
        ("s_mov_b32 s6, 0", "s_add_u32 s6, s6, 32", "s_cmpk_ge_i32 s6, 0x3e0", 31),
        ("s_movk_i32 s6, 0x40", "s_add_i32 s6, s6, 64", "s_cmp_lt_u32 s6, 0x100", 3),
        ("s_mov_b32 s6, 0", "s_addk_i32 s6, 0x30", "s_cmpk_ge_i32 s6, 0x100", 6),
        ("v_mov_b32_e32 v9, v0", "v_add_nc_u32_e32 v9, 64, v9", "v_cmpx_le_i32_e32 0x80, v9", 2),
        ("v_mov_b32_e32 v9, v0", "v_add_nc_u32_e32 v9, 0x100, v9", "v_cmp_gt_i32_e32 vcc_lo, 0x1000, v9", 16),
        ("s_mov_b32 s6, 0", "s_add_u32 s6, s6, 32", "s_cmp_ge_i32 s6, s7", None),
        ("s_mov_b32 s6, 0", "s_add_u32 s6, s6, s7", "s_cmpk_ge_i32 s6, 0x3e0", None),
        ("s_mov_b32 s6, 0", "s_add_u32 s5, s5, 32", "s_cmpk_ge_i32 s6, 0x3e0", None),
    ],
)
def test_the_turns_follow_from_start_step_and_limit(
    start: str, step: str, compare: str, turns: int | None
) -> None:
    assert loops(counted(start, step, compare)) == [(turns, 4)]


NESTED = """
BB0:
	s_mov_b32 s1, 0
BB1:
	v_mov_b32_e32 v9, v2
BB2:
	v_cmpx_le_i32_e32 16, v9
	s_cbranch_scc0 BB4
BB3:
	v_add_nc_u32_e32 v9, 4, v9
	s_branch BB2
BB4:
	s_add_u32 s1, s1, 16
	s_cmpk_ge_i32 s1, 0x100
	s_cbranch_scc0 BB1
BB5:
	s_endpgm
"""


def test_an_inner_loop_keeps_its_own_counter() -> None:
    assert loops(NESTED) == [(16, 8), (4, 4)]
    program = parse(NESTED)
    (outer,) = [item for item in program.body if isinstance(item, Loop)]
    assert len([item for item in outer.body if isinstance(item, Loop)]) == 1


def test_loops_that_overlap_are_one_around_the_other() -> None:
    crossing = """
BB0:
	v_nop
BB1:
	s_cbranch_scc0 BB0
BB2:
	s_cbranch_scc1 BB1
"""
    assert [length for _, length in loops(crossing)] == [3, 2]


def test_what_is_no_instruction_is_not_counted() -> None:
    text = """
BB0:
	s_nop 0                            ; bf800000
	(then repeated 10 times)
	(invalid instruction)              ; 7f041505
	(invalid instruction)              ; bf041505
	; a comment
"""
    assert [i.name for i in parse(text).instructions()] == ["s_nop", "v_unknown"]


def test_a_driver_without_disassembly_is_named() -> None:
    with pytest.raises(ValueError, match="no disassembly"):
        parse("")


def test_turns_that_only_a_call_decides_can_be_given() -> None:
    program = parse(counted("s_mov_b32 s6, 0", "s_add_u32 s6, s6, 32", "s_cmp_ge_i32 s6, s7"))
    given = with_turns(program, 80)
    assert [loop.turns for loop in given.loops()] == [80]
    assert list(given.instructions()) == list(program.instructions())
    with pytest.raises(ValueError, match="the kernel has 2 loops, not one"):
        with_turns(parse(NESTED), 80)
