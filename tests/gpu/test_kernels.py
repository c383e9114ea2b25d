"""Single kernels: compiled for one device, and run as they are on another that offers what they need."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gpu import kernels
from gpu.facts import Described, Product
from gpu.kernels import Kernel, build_kernels, kernels_of, read_kernels, run_kernels
from gpu.plan import Plan

from specprefill_jax.runtime.device import open_device

GEMM = Kernel("gemm", (64, 64), (128, 64), "tk,nk->tn")
TINY = Plan(target="llvmpipe-f16", kernels="llvmpipe-f16", tiny=True)


@pytest.fixture(autouse=True)
def one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "kernels_of", lambda plan: [GEMM])


def test_every_projection_of_both_models_is_among_them() -> None:
    found = {kernel.name: kernel for kernel in kernels_of(Plan())}
    assert found["target gate_up_proj, block of 256"].left == (256, 2560)
    assert found["target gate_up_proj, block of 256"].right == (2 * 9216, 2560)
    for role in ("draft", "target"):
        for kind in ("gate_up_proj", "down_proj", "in_proj_qkvz", "in_proj_ba", "qk_proj", "v_proj"):
            assert f"{role} {kind}, block of 256" in found
    assert len({kernel.file for kernel in found.values()}) == len(found)


def test_a_kernel_of_the_780m_asks_for_its_matrix_unit_and_subgroups_of_32(tmp_path: Path) -> None:
    build_kernels(replace(TINY, kernels="radeon-780m"), tmp_path)
    (kernel,) = read_kernels(tmp_path)
    assert kernel.product == Product(16, 16, 16, ("f16", "f16", "f32"))
    assert kernel.subgroups == (32,)


@pytest.mark.vulkan
def test_a_kernel_of_the_780m_is_not_run_where_the_device_lacks_its_unit(tmp_path: Path) -> None:
    build_kernels(replace(TINY, kernels="radeon-780m"), tmp_path)
    (check,) = run_kernels(TINY, tmp_path)
    assert check.result == "not offered"
    assert check.detail == "the device has no subgroups of 32, cooperative 16x16x16 f16->f32"


@pytest.mark.vulkan
def test_a_kernel_that_reduces_over_subgroups_of_32_is_not_run_on_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Kernel("row", (1, 2560), (512, 2560), "tk,nk->tn")
    monkeypatch.setattr(kernels, "kernels_of", lambda plan: [row])
    build_kernels(replace(TINY, kernels="radeon-780m"), tmp_path)
    (kernel,) = read_kernels(tmp_path)
    assert (kernel.subgroups, kernel.product) == ((32,), None)
    (check,) = run_kernels(TINY, tmp_path)
    assert (check.result, check.detail) == ("not offered", "the device has no subgroups of 32")


@pytest.mark.vulkan
def test_a_kernel_is_compared_with_the_product_in_f64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_kernels(TINY, tmp_path)
    (kernel,) = read_kernels(tmp_path)
    device, described = open_device("llvmpipe-f16"), Described("", "", (8, 8), ())
    assert kernels.run_kernel(kernel, tmp_path, device, described).result == "passed"
    reference = kernels.reference

    def off_by_one_element(kernel: Kernel, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        wanted = reference(kernel, x, w)
        wanted[5, 7] = 0.0
        return wanted

    monkeypatch.setattr(kernels, "reference", off_by_one_element)
    assert kernels.run_kernel(kernel, tmp_path, device, described).result == "failed"
