"""The driver's process: what comes back, and what a kernel that it cannot compile leads to."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest

from specprefill_jax.aot.audit import audit
from specprefill_jax.aot.compiler import compile_module
from specprefill_jax.aot.executables import Executable, read_executables
from specprefill_jax.aot.targets import target_for
from specprefill_jax.errors import KernelRefused
from specprefill_jax.preflight.driver import Driver
from specprefill_jax.preflight.isa import parse
from tests.preflight.gemm import program
from tests.preflight.sample import shader


@cache
def gemm() -> Executable:
    target = target_for("radeon-780m")
    module = compile_module(program("float16"), target.flags, "gemm")
    (kernel,) = read_executables(audit(module, target.cooperative, "gemm").module, "gemm")
    return kernel


def test_the_driver_is_of_the_pinned_series(driver: Driver) -> None:
    assert re.match(r"Mesa 25\.", driver.version)


def test_a_kernel_comes_back_with_numbers_and_instructions(driver: Driver) -> None:
    compiled = driver.compile((gemm(),), "gemm")[gemm().name]
    assert compiled.subgroup == 32
    assert 0 < compiled.statistics.vgprs <= 256
    assert compiled.statistics.lds > 0
    names = [instruction.name for instruction in parse(compiled.assembly).instructions()]
    assert "v_wmma_f32_16x16x16_f16" in names
    # ACO counts pseudo instructions that are no line of the text.
    assert abs(len(names) - compiled.statistics.instructions) <= 0.05 * len(names)


def test_the_required_subgroup_size_reaches_the_driver(driver: Driver) -> None:
    wide = replace(gemm(), subgroup=64)
    assert driver.compile((wide,), "gemm")[wide.name].subgroup == 64


def constant_writer() -> Executable:
    """Writes its specialization constant 7, which is 1 by default, to its buffer."""
    void, function, main, uint, array, block, to_block, buffer, to_uint, zero, seven, label, element = range(
        1, 14
    )
    name = tuple(int.from_bytes(word, "little") for word in (b"main", b"\0\0\0\0"))
    storage = 12
    words = shader(
        (17, 1),  # the capability Shader
        (14, 0, 1),  # logical addresses, GLSL450
        (15, 5, main, *name, buffer),
        (16, main, 17, 32, 1, 1),  # workgroups of 32
        (71, seven, 1, 7),
        *((71, array, 6, 4), (72, block, 0, 35, 0), (71, block, 2), (71, buffer, 34, 0), (71, buffer, 33, 0)),
        *((19, void), (33, function, void), (21, uint, 32, 0), (29, array, uint), (30, block, array)),
        *((32, to_block, storage, block), (32, to_uint, storage, uint), (59, to_block, buffer, storage)),
        *((43, uint, zero, 0), (50, uint, seven, 1)),
        *((54, void, main, 0, function), (248, label), (65, to_uint, element, buffer, zero, zero)),
        *((62, element, seven), (253,), (56,)),
    )
    return Executable("main", words.to_bytes(), 0, ((0,),), 0)


def test_specialization_constants_reach_the_driver(driver: Driver) -> None:
    plain = driver.compile((constant_writer(),), "plain")["main"].assembly
    special = replace(constant_writer(), specialization={7: 1234, 8: 5})
    assert "0x4d2" in driver.compile((special,), "special")["main"].assembly, "1234, in the store's operand"
    assert "0x4d2" not in plain


def test_a_crash_names_the_kernel(driver: Driver) -> None:
    words = gemm().spirv[:20] + b"\xff" * 400
    broken = replace(gemm(), name="broken_dispatch_0", spirv=words)
    with pytest.raises(KernelRefused, match=r"gemm: the driver \(Mesa .*\) ends with .*broken_dispatch_0"):
        driver.compile((gemm(), broken, gemm()), "gemm")


def test_a_driver_that_does_not_end_names_the_kernel(driver: Driver) -> None:
    with pytest.raises(KernelRefused, match=rf"does not end within 0.001 s while it compiles {gemm().name}"):
        driver.compile((gemm(),), "gemm", limit_s=0.001)
