"""What a kernel's name, shader and program say."""

from __future__ import annotations

import pytest

from specprefill_jax.preflight.cost import Cost
from specprefill_jax.preflight.kernel import (
    Product,
    lanes_differ,
    local_size,
    product_of,
    wrong_products,
)
from tests.preflight.sample import GEMM, WMMA_LOOP, kernel, shader

F16_TO_F32 = frozenset({("f16", "f16", "f32")})
FLOAT, MATRIX, PRODUCT, CONSTANT, CONVERT, UNDEF = 22, 4456, 4459, 43, 115, 1


@pytest.mark.parametrize(
    ("operation", "product"),
    [
        ("matmul_like_256x6144x1024_f16xf16xf32", ("matmul", 1, 256, 6144, 1024, "f16xf16xf32")),
        ("matmul_like_2x16x4x64x32x128_f32", ("matmul", 128, 64, 32, 128, "f32")),
        ("batch_matmul_8x64x32x128_f16xf16xf32", ("matmul", 8, 64, 32, 128, "f16xf16xf32")),
        ("matmul_transpose_b_64x32x128_f32", ("matmul", 1, 64, 32, 128, "f32")),
        ("matvec_like_248320x1024_f16xf16xf32", ("matvec", 1, 1, 248320, 1024, "f16xf16xf32")),
        ("elementwise_broadcast_256x1024_i32xf16", None),
        ("softmax_2x4x256x4096xf32_dispatch_tensor_store", None),
        ("slow_memcpy", None),
    ],
)
def test_a_name_says_which_product_a_kernel_is(operation: str, product: tuple[object, ...] | None) -> None:
    expected = None if product is None else Product(*product)  # type: ignore[arg-type]
    assert product_of(f"prefill_T256_C4096_dispatch_12_{operation}") == expected


def test_the_operation_is_the_name_without_entry_and_number() -> None:
    assert kernel(GEMM).operation == "matmul_like_256x6144x1024_f16xf16xf32"
    assert kernel("decode_C4096_dispatch_0").operation == "scalars"


def test_waves_of_a_workgroup_are_rounded_up() -> None:
    assert (kernel(local=(64, 2, 1)).threads, kernel(local=(64, 2, 1)).waves) == (128, 4)
    assert kernel(local=(48, 1, 1), subgroup=64).waves == 1


def test_the_hot_loop_is_the_one_with_the_products() -> None:
    made = kernel()
    assert made.wmma == 2
    assert made.hot is not None
    assert (made.hot.turns, made.hot_cost) == (31, Cost(valu=64, lds=4, wmma=2))


def test_of_nested_loops_with_products_the_inner_one_is_hot_without_the_longest() -> None:
    turn = "v_add_f32_e32 v0, v0, v1"
    text = "BB0:\n {a}\nBB1:\n {b}\n s_cbranch_scc0 BB1\nBB2:\n s_cbranch_scc0 BB0\n"
    with_wmma = kernel(assembly=text.format(a=turn, b="v_wmma_f32_16x16x16_f16 v0"))
    assert with_wmma.hot is not None
    assert len(list(with_wmma.hot.instructions())) == 2
    without = kernel(assembly=text.format(a=turn, b=turn))
    assert without.hot is not None
    assert len(list(without.hot.instructions())) == 4


def test_costs_count_every_turn() -> None:
    # 31 turns of 64 cycles; one load of 512 bytes before, one store behind.
    assert kernel().cost == Cost(valu=31 * 64, lds=31 * 4, vmem=16, loaded=512, stored=512, wmma=62)


def test_a_loop_without_a_known_counter_counts_eight_times() -> None:
    unknown = WMMA_LOOP.replace("s_cmpk_ge_i32 s6, 0x3e0", "s_cmp_ge_i32 s6, s7")
    assert kernel(assembly=unknown).cost.wmma == 16


def test_the_workgroup_size_is_read_from_the_shader() -> None:
    assert local_size(shader((16, 4, 17, 64, 2, 1))) == (64, 2, 1)
    with pytest.raises(ValueError, match="how large a workgroup is"):
        local_size(shader())


def test_lanes_that_meet_and_lanes_that_know_themselves() -> None:
    group_add = (350, 1, 5, 6, 0, 7)
    assert shader(group_add).joins_lanes()
    assert not shader((128, 1, 5, 6, 7)).joins_lanes()
    assert lanes_differ(shader((71, 2, 11, 27)))  # LocalInvocationId
    assert not lanes_differ(shader((71, 2, 11, 26)))  # WorkgroupId
    # A product that all lanes of a subgroup share never asks for a lane's number.
    assert lanes_differ(shader(*product_of_matrices(16, 16, 32)))


def product_of_matrices(a: int, b: int, result: int) -> tuple[tuple[int, ...], ...]:
    """A cooperative product of matrices whose elements are floats of these widths."""
    widths = {a, b, result}
    types = [(FLOAT, width, width) for width in widths]
    types += [(MATRIX, 100 + width, width, 1, 2, 3, 4) for width in widths]
    values = [(UNDEF, 100 + width, id) for width, id in ((a, 201), (b, 202), (result, 203))]
    return (*types, *values, (PRODUCT, 100 + result, 204, 201, 202, 203))


def test_products_that_the_target_lacks_are_named_once() -> None:
    right, wrong = product_of_matrices(16, 16, 32), product_of_matrices(32, 32, 32)
    assert wrong_products(shader(*right), F16_TO_F32) == ()
    assert wrong_products(shader(*wrong, wrong[-1]), F16_TO_F32) == ("f32 x f32 + f32 -> f32",)
