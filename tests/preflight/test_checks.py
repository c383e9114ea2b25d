"""Each check finds its fault, and nothing in a kernel without one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specprefill_jax.preflight.checks import Build, judge
from specprefill_jax.preflight.report import FAIL, WARN, Entry, Finding
from tests.preflight.sample import GEMM, MATVEC, WMMA_LOOP, entry, kernel, use

F16, F32 = Build(matrix_unit=True), Build(matrix_unit=False)
PLAIN_LOOP = WMMA_LOOP.replace("v_wmma_f32_16x16x16_f16", "v_add_f32_e32").replace(
    "ds_load_b128", "v_add_f32_e32"
)


def found(*entries: Entry, build: Build = F16) -> list[tuple[str, str]]:
    return [(finding.level, finding.check) for finding in judge(entries, build)]


def in_loop(instruction: str) -> str:
    return WMMA_LOOP.replace("\tds_load_b128", f"\t{instruction}\n\tds_load_b128")


def test_a_kernel_without_fault_passes_all_checks() -> None:
    assert found(entry(use(kernel()))) == []


def test_a_product_that_the_gpu_lacks_fails() -> None:
    wrong = kernel(wrong_products=("f32 x f32 + f32 -> f32",))
    assert found(entry(use(wrong))) == [(FAIL, "products")]


def test_scratch_fails_even_outside_of_loops() -> None:
    assert found(entry(use(kernel(scratch=256)))) == [(FAIL, "scratch")]


def test_spills_fail_where_a_loop_pays_for_them() -> None:
    spilled = kernel(assembly=in_loop("scratch_load_b32 v1, off, s2"), spilled_vgprs=3, scratch=0)
    assert found(entry(use(spilled))) == [(FAIL, "spills")]
    scalars = kernel(assembly=in_loop("v_readlane_b32 s1, v31, 0"), spilled_sgprs=2)
    assert found(entry(use(scalars))) == [(FAIL, "spills")]


def test_spills_outside_of_loops_and_lanes_moved_for_another_reason_pass() -> None:
    assert found(entry(use(kernel(spilled_vgprs=3)))) == []
    assert found(entry(use(kernel(assembly=in_loop("v_readlane_b32 s1, v31, 0"))))) == []


def test_lanes_that_meet_must_be_as_many_as_the_shader_was_made_for() -> None:
    chosen = kernel(MATVEC, PLAIN_LOOP, required=0, subgroup=64)
    assert found(entry(use(chosen))) == [(FAIL, "subgroup")]
    assert found(entry(use(replace(chosen, joins_lanes=False)))) == []


def test_a_loop_in_one_lane_fails() -> None:
    alone = kernel("decode_C4096_dispatch_9_reduction_248320", PLAIN_LOOP, local=(1, 1, 1))
    assert found(entry(use(alone, workgroups=1, us=1.0))) == [(FAIL, "one lane")]
    same = kernel("decode_C4096_dispatch_9_reduction_248320", PLAIN_LOOP, lanes_differ=False)
    assert found(entry(use(same))) == [(FAIL, "one lane")]


def test_one_lane_without_a_loop_passes() -> None:
    scalars = kernel(
        "prefill_T256_C4096_dispatch_0", "BB0:\n\ts_endpgm\n", local=(1, 1, 1), lanes_differ=False
    )
    assert found(entry(use(scalars, workgroups=1, us=0.3))) == []


def test_a_large_product_without_wmma_fails_in_an_f16_build_only() -> None:
    vector = kernel(GEMM.replace("256x6144x1024_f16xf16xf32", "64x64x64x64_f32"), PLAIN_LOOP)
    assert found(entry(use(vector))) == [(FAIL, "no WMMA")]
    assert found(entry(use(vector)), build=F32) == []


@pytest.mark.parametrize("sizes", ["63x6144x1024", "256x63x1024", "256x6144x63"])
def test_a_product_with_one_small_side_may_do_without(sizes: str) -> None:
    assert found(entry(use(kernel(GEMM.replace("256x6144x1024", sizes), PLAIN_LOOP)))) == []


@pytest.mark.parametrize(("name", "faults"), [("decode_C4096", 1), ("head", 1), ("prefill_T256_C4096", 0)])
def test_a_matvec_per_token_must_be_a_subgroup_reduction(name: str, faults: int) -> None:
    rows = kernel(MATVEC, PLAIN_LOOP, joins_lanes=False)
    assert found(entry(use(rows), name=name)) == [(FAIL, "matvec")] * faults
    assert found(entry(use(replace(rows, joins_lanes=True)), name=name)) == []


def test_local_memory_that_outlasts_the_vector_units_warns() -> None:
    # Two SIMDs share it: 2 x 28 cycles to 64 are 87 %, 2 x 32 are 100 %.
    some, more = ("ds_load_b128 v[0:3], v9\n\t" * n for n in (6, 7))
    assert found(entry(use(kernel(assembly=in_loop(some.strip()))))) == []
    assert found(entry(use(kernel(assembly=in_loop(more.strip()))))) == [(WARN, "local memory")]


def test_fewer_than_two_waves_per_simd_warn() -> None:
    assert found(entry(use(kernel(lds=65536)))) == []
    assert found(entry(use(kernel(lds=65537)))) == [(WARN, "waves")]


@pytest.mark.parametrize(
    ("workgroups", "us", "warns"), [(11, 50.1, True), (12, 50.1, False), (11, 50.0, False)]
)
def test_a_long_kernel_of_few_workgroups_warns(workgroups: int, us: float, warns: bool) -> None:
    assert found(entry(use(kernel(), workgroups=workgroups, us=us))) == [(WARN, "workgroups")] * warns


def test_weights_that_are_streamed_more_than_twice_warn() -> None:
    assert found(entry(use(kernel(), rereads=2))) == []
    assert found(entry(use(kernel(), rereads=3))) == [(WARN, "re-reads")]


def test_many_registers_warn_at_128_threads() -> None:
    assert found(entry(use(kernel(vgprs=208)))) == []
    assert found(entry(use(kernel(vgprs=224)))) == [(WARN, "registers")]
    assert found(entry(use(kernel(vgprs=224, local=(256, 1, 1))))) == []


def test_more_than_one_conversion_per_wmma_warns() -> None:
    # Two WMMA in a turn.
    two, three = ("v_cvt_f32_f16_e32 v0, v1\n\t" * n for n in (2, 3))
    assert found(entry(use(kernel(assembly=in_loop(two.strip()))))) == []
    assert found(entry(use(kernel(assembly=in_loop(three.strip()))))) == [(WARN, "conversions")]


@pytest.mark.parametrize(
    ("name", "per_layer", "warns"),
    [
        ("prefill_T256_C4096", 25, False),
        ("prefill_T256_C4096", 26, True),
        ("prefill_rows_T256_C4096", 26, True),
        ("decode_C4096", 14, False),
        ("decode_C4096", 15, True),
    ],
)
def test_too_many_dispatches_per_layer_warn(name: str, per_layer: int, warns: bool) -> None:
    made = entry(use(kernel(), count=24 * per_layer), name=name, layers=24)
    assert found(made) == [(WARN, "dispatches")] * warns


def test_the_head_has_no_layers_to_count_by() -> None:
    assert found(entry(use(kernel(), count=1000), name="head", layers=0)) == []


def test_what_a_kernel_does_in_two_entries_is_one_finding() -> None:
    slow = use(kernel(scratch=64))
    (finding,) = judge([entry(slow), entry(slow, name="prefill_rows_T256_C4096")], F16)
    assert finding == Finding(
        level=FAIL,
        check="scratch",
        where=GEMM,
        text="uses 64 bytes of scratch memory, 0 VGPRs spilled",
        entries=("prefill_T256_C4096", "prefill_rows_T256_C4096"),
    )


def test_failures_come_first_and_slow_kernels_before_fast_ones() -> None:
    fast, slow = (kernel(GEMM.replace("_7_", f"_{n}_"), vgprs=256) for n in (8, 9))
    uses = (use(fast, us=1.0), use(slow, us=2.0), use(kernel(scratch=4), us=0.5))
    names = [finding.where for finding in judge([entry(*uses)], F16)]
    assert names == [GEMM, slow.name, fast.name]
