"""compile/tuning: what it says is what a kernel is configured by."""

from __future__ import annotations

from pathlib import Path

import pytest

from specprefill_jax.aot.audit import audit, compile_audited
from specprefill_jax.aot.compiler import compile_module
from specprefill_jax.aot.targets import TUNING_FLAG, target_for

TARGET = target_for("radeon-780m")


def product(m: int, n: int, k: int) -> str:
    """x times weights stored [out, in], as the models multiply."""
    return f"""
    func.func @product(%x: tensor<{m}x{k}xf16>, %w: tensor<{n}x{k}xf16>) -> tensor<{m}x{n}xf32> {{
      %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [1]
        : (tensor<{m}x{k}xf16>, tensor<{n}x{k}xf16>) -> tensor<{m}x{n}xf32>
      return %y : tensor<{m}x{n}xf32>
    }}"""


def configured(text: str, folder: Path) -> str:
    """The kernel as it goes into code generation."""
    compile_module(text, (*TARGET.flags, f"--iree-hal-dump-executable-configurations-to={folder}"), "x")
    (kernel,) = folder.glob("configured_*.mlir")
    return kernel.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("shape", "tiles", "threads"),
    [
        ((256, 8192, 1024), "[[128, 128], [64, 32], [0, 0, 32], [16, 16, 16]]", "[128, 2, 1]"),
        ((64, 8192, 1024), "[[64, 128], [32, 64], [0, 0, 32], [16, 16, 16]]", "[64, 2, 1]"),
    ],
    ids=["a block of 256 tokens", "a block of 64"],
)
def test_a_projection_gets_the_tile_of_the_library(
    shape: tuple[int, int, int], tiles: str, threads: str, tmp_path: Path
) -> None:
    kernel = configured(product(*shape), tmp_path)
    assert f"lowering_config<tile_sizes = {tiles}>" in kernel
    assert f"workgroup_size = {threads} subgroup_size = 32" in kernel
    assert "transpose-workgroup=true" in kernel  # weights are read once per block
    assert "fold-cast-into-contract=true" in kernel  # operands stay f16


def test_a_product_that_no_tile_divides_keeps_the_compilers_own_pipeline(tmp_path: Path) -> None:
    kernel = configured(product(48, 8192, 1024), tmp_path)
    assert "spirv_pipeline<CooperativeMatrixVectorize>" in kernel


def test_tuned_products_need_no_repair() -> None:
    audited = compile_audited(product(256, 8192, 1024), TARGET, "x")
    assert (audited.products > 0, audited.repaired) == (True, 0)


def test_without_the_library_they_would() -> None:
    flags = tuple(flag for flag in TARGET.flags if not flag.startswith(TUNING_FLAG))
    assert len(flags) == len(TARGET.flags) - 1
    module = compile_module(product(256, 8192, 1024), flags, "x")
    assert audit(module, TARGET.cooperative, "x").repaired > 0
