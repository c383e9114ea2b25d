"""The static model, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specprefill_jax.artifact.schedule import Dispatch, Traffic
from specprefill_jax.preflight.kernel import Kernel
from specprefill_jax.preflight.model import predict, resident_workgroups, waves_per_simd
from specprefill_jax.preflight.tiles import Tiles
from tests.preflight.sample import GEMM, GPU, kernel

NOTHING = Traffic(reads=0, writes=0)
# 64x128 tiles of 256x6144: 4 rows of 48.
TILED = (192, 1, 1)
WEIGHTS = 6144 * 1024 * 2
OPERANDS = Traffic(reads=WEIGHTS + 256 * 1024 * 2, writes=256 * 6144 * 4)


def dispatch(workgroups: tuple[int, int, int], weights: int = 0) -> Dispatch:
    return Dispatch(GEMM, workgroups, {"1": weights} if weights else {}, 1)


def busy(instruction: str, times: int, **changes: object) -> Kernel:
    """A kernel of one instruction, again and again."""
    return kernel(GEMM, "BB0:\n" + f"\t{instruction}\n" * times, **changes)


@pytest.mark.parametrize(
    ("vgprs", "lds", "subgroup", "workgroups", "waves"),
    [
        (128, 0, 32, 8, 8.0),  # 1024 registers: 8 waves per SIMD, 32 per processor, of 4 each
        (208, 0, 32, 4, 4.0),  # 1024 // 208 = 4
        (256, 0, 64, 4, 2.0),  # a wave of 64 lanes takes two of 32's registers: 512 // 256
        (16, 0, 32, 16, 16.0),  # never more than 16 waves
        (16, 30720, 32, 4, 4.0),  # 128 KiB of local memory hold four workgroups of 30 KiB
        (200, 65536, 32, 2, 2.0),
    ],
)
def test_registers_local_memory_and_slots_limit_workgroups(
    vgprs: int, lds: int, subgroup: int, workgroups: int, waves: float
) -> None:
    made = kernel(vgprs=vgprs, lds=lds, subgroup=subgroup)
    assert resident_workgroups(made, GPU) == workgroups
    assert waves_per_simd(made, GPU) == waves


def test_a_busy_vector_unit_takes_the_time_of_all_its_waves() -> None:
    # 12 workgroups of 4 waves on 6 processors of 4 SIMDs: two waves per SIMD, 32000 cycles each.
    said = predict(busy("v_wmma_f32_16x16x16_f16 v0", 1000), dispatch((12, 1, 1)), NOTHING, None, GPU)
    assert said.us == pytest.approx(64000 / 2700)
    assert said.limit == "valu"


def test_workgroups_beyond_those_that_fit_wait() -> None:
    program = busy("v_wmma_f32_16x16x16_f16 v0", 1000, vgprs=256)  # 4 workgroups per processor, 24 at once
    one, two = (predict(program, dispatch((n, 1, 1)), NOTHING, None, GPU).us for n in (24, 48))
    assert two == pytest.approx(2 * one)
    # A last batch of one workgroup per processor keeps a SIMD with one wave in place of four.
    assert predict(program, dispatch((30, 1, 1)), NOTHING, None, GPU).us == pytest.approx(1.25 * one)


def test_local_memory_is_shared_by_two_simds() -> None:
    # Two workgroups of four waves on a processor: four waves per CU, 4 cycles per instruction.
    said = predict(busy("ds_load_b128 v0", 1000), dispatch((12, 1, 1)), NOTHING, None, GPU)
    assert said.us == pytest.approx(16000 / 2700)
    assert said.limit == "lds"


def test_one_wave_that_waits_is_limited_by_latency() -> None:
    program = busy("buffer_load_b32 v0\n\ts_waitcnt vmcnt(0)", 10)
    said = predict(program, dispatch((1, 1, 1)), NOTHING, None, GPU)
    assert said.limit == "latency"
    assert said.us == pytest.approx(10 * (2 + 600 + 1) / 2700)


def test_no_kernel_is_faster_than_memory() -> None:
    program = busy("buffer_load_b128 v0", 100)
    said = predict(program, dispatch((1000, 1, 1)), Traffic(reads=7_500_000, writes=0), None, GPU)
    assert (said.limit, said.bytes) == ("dram", 7_500_000)
    assert said.us == pytest.approx(100)


def test_of_a_table_only_what_is_asked_for_is_moved() -> None:
    program = busy("buffer_load_b32 v0", 1)  # 4 waves of 128 bytes
    said = predict(program, dispatch((10, 1, 1)), Traffic(reads=508559360, writes=0), None, GPU)
    assert said.bytes == 10 * 4 * 128


def test_tokens_fastest_streams_weights_once() -> None:
    """Source of the two: the findings on the order of workgroups in docs/radeon-780m.md."""
    by_weight = predict(kernel(), dispatch(TILED, WEIGHTS), OPERANDS, Tiles(48, True), GPU)
    by_token = predict(kernel(), dispatch(TILED, WEIGHTS), OPERANDS, Tiles(48, False), GPU)
    # 48 workgroups at once are one row of tiles; each of the four rows streams all weights.
    assert resident_workgroups(kernel(), GPU) * GPU.wgps == 48
    assert (by_weight.rereads, by_token.rereads) == (4, 1)
    stored = 192 * 4 * 512
    assert by_weight.bytes - by_token.bytes == 3 * WEIGHTS
    assert by_token.bytes == stored + OPERANDS.reads


def test_weights_that_stay_in_the_cache_are_read_once() -> None:
    small = replace(OPERANDS, reads=1 << 20)
    said = predict(kernel(), dispatch(TILED, 1 << 20), small, Tiles(48, True), GPU)
    assert said.rereads == 1


def test_without_known_tiles_nothing_is_said_about_rereads() -> None:
    assert predict(kernel(), dispatch(TILED, WEIGHTS), OPERANDS, None, GPU).rereads == 0
