"""Compile targets: flags, number formats, tiles, what the manifest asks of the device."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from specprefill_jax.aot.audit import compile_audited
from specprefill_jax.aot.compiler import compile_module
from specprefill_jax.aot.export import Shapes, export_module
from specprefill_jax.aot.targets import make_target, target_for
from specprefill_jax.artifact.host import cpu_flags
from specprefill_jax.artifact.targets import known_target, known_targets
from specprefill_jax.errors import CompileError, DeviceError, RecipeError
from specprefill_jax.models.matrix import TileShape
from tests.aot.test_lower import CONFIG

# Targets that tests/aot/test_compiled_parity.py compiles for and runs, and one that tests/preflight checks.
BUILT_ELSEWHERE = ("cpu", "cpu-portable", "vulkan", "llvmpipe", "llvmpipe-f16", "radeon-780m")
DOUBLE = """
func.func @double(%x: tensor<8xf32>) -> tensor<8xf32> {
  %y = stablehlo.add %x, %x : tensor<8xf32>
  return %y : tensor<8xf32>
}
"""
NO_TUNING = """
module attributes { transform.with_named_sequence } {
  transform.named_sequence @__kernel_config(%variant: !transform.any_op {transform.consumed}) {
    transform.yield
  }
}
"""


def test_an_unknown_device_is_refused_with_the_known_ones() -> None:
    known = ", ".join(known_targets())
    with pytest.raises(DeviceError, match=rf"^unknown device 'gpu'; the known ones are {known}$"):
        target_for("gpu")


@pytest.mark.parametrize("name", known_targets())
def test_every_known_device_can_be_compiled_for(name: str) -> None:
    target, known = target_for(name), known_target(name)
    assert (target.device.name, target.device.driver, target.device.target) == (
        name,
        known.driver,
        known.target,
    )
    assert target.proof.kind == ("none" if known.unproven else "self-test")
    assert target.proof.reason == known.unproven


def test_of_the_hosts_features_those_of_this_machine_are_needed() -> None:
    assert set(target_for("cpu").device.cpu_features) == set(known_target("cpu").cpu_features) & cpu_flags()


def test_a_tuning_becomes_a_flag_by_its_relative_path_with_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two checkouts then record the same."""
    (tmp_path / "tuning").mkdir()
    (tmp_path / "tuning" / "gpu.mlir").write_text("module {}")
    monkeypatch.setattr("specprefill_jax.aot.targets.embedded", lambda name: tmp_path)
    known = known_target("vulkan")
    target = make_target(replace(known, tuning="tuning/gpu.mlir"))
    assert target.flags == (
        *known.flags,
        "--iree-codegen-transform-dialect-library=tuning/gpu.mlir@__kernel_config",
        "--mlir-disable-threading",  # IREE 3.13 may wait for itself otherwise, forever
    )
    assert target.tuning == {"tuning/gpu.mlir": hashlib.sha256(b"module {}").hexdigest()}
    assert (make_target(known).flags, make_target(known).tuning) == (known.flags, {})


def test_a_tuning_is_found_beside_the_targets_from_any_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*target_for("vulkan").flags, "--iree-codegen-transform-dialect-library=gpu.mlir@__kernel_config"]
    monkeypatch.setattr("specprefill_jax.aot.compiler.embedded", lambda name: tmp_path / name)
    (tmp_path / "compile").mkdir()
    with pytest.raises(CompileError, match=r"failed to open transform file: .* 'gpu\.mlir'"):
        compile_module(DOUBLE, flags, "double")
    (tmp_path / "compile" / "gpu.mlir").write_text(NO_TUNING)
    assert compile_module(DOUBLE, flags, "double")


@pytest.mark.parametrize(
    "name",
    [
        # rdna2 and rdna3 take the paths of nvidia and the Radeon.
        pytest.param(name, marks=[pytest.mark.deep] if name.startswith("rdna") else [])
        for name in known_targets()
        if name not in BUILT_ELSEWHERE
    ],
)
def test_a_tiny_model_compiles_for_targets_that_no_test_can_run(name: str) -> None:
    target = target_for(name)
    numerics = target.number_format(None)
    text = export_module(
        "tiny",
        replace(CONFIG, intermediate_size=48),
        Shapes((16,), (32,), 4, numerics, target.tile(numerics)),
    )
    audited = compile_audited(text, target, name)
    assert audited.module
    assert (audited.shaders > 0) == (target.device.driver == "vulkan")


@pytest.mark.parametrize(
    ("name", "own", "others"),
    [
        ("cpu", "bf16", ["f32"]),
        ("cpu-portable", "bf16", ["f32"]),
        ("vulkan", "f32", []),
        ("llvmpipe", "f32", ["f16"]),
        ("llvmpipe-f16", "f16", ["f32"]),
        ("radeon-780m", "f16", ["f32"]),
        ("rdna2", "f16", ["f32"]),
        ("rdna3", "f16", ["f32"]),
        ("nvidia", "f16", ["f32"]),
    ],
)
def test_a_target_has_its_own_number_format_and_takes_some_others(
    name: str, own: str, others: list[str]
) -> None:
    target = target_for(name)
    assert target.number_format(None) == own
    assert [target.number_format(other) for other in others] == others


@pytest.mark.parametrize(
    ("name", "asked", "text"),
    [
        ("cpu", "f16", "cpu builds matrices in bf16 or f32, the recipe asks for f16"),
        ("vulkan", "f16", "vulkan builds matrices in f32, the recipe asks for f16"),
        ("llvmpipe", "bf16", "llvmpipe builds matrices in f32 or f16, the recipe asks for bf16"),
    ],
)
def test_a_format_that_the_target_lacks_is_refused(name: str, asked: str, text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        target_for(name).number_format(asked)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("features", "numerics", "tile"),
    [
        (("avx2", "fma"), "f32", TileShape(8, 1)),
        (("avx2", "fma"), "bf16", TileShape(8, 1)),
        (("avx2", "avx512f"), "f32", TileShape(16, 1)),
        (("avx2", "avx512f"), "bf16", TileShape(16, 1)),
        (("avx512_bf16", "avx512f"), "f32", TileShape(16, 1)),
        (("avx512_bf16", "avx512f"), "bf16", TileShape(16, 2)),
    ],
)
def test_tiles_follow_the_cpus_features(features: tuple[str, ...], numerics: str, tile: TileShape) -> None:
    target = target_for("cpu")
    assert replace(target, device=replace(target.device, cpu_features=features)).tile(numerics) == tile


def test_the_portable_cpu_has_the_same_tile_on_every_machine() -> None:
    target = target_for("cpu-portable")
    assert target.device.cpu_features == ("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
    assert target.tile("bf16") == TileShape(8, 1)


@pytest.mark.parametrize("name", ["vulkan", "llvmpipe", "llvmpipe-f16", "radeon-780m"])
def test_vulkan_builds_keep_matrices_plain(name: str) -> None:
    assert target_for(name).tile("f32") is None


def test_cooperative_products_are_those_with_sums_in_f32() -> None:
    products = {name: target_for(name).cooperative for name in known_targets()}
    for name in ("radeon-780m", "rdna3", "nvidia"):
        assert products.pop(name) == {("f16", "f16", "f32")}
    assert not any(products.values())
