"""Compile targets: names, number formats, tiles, and what the manifest asks of the device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specprefill_jax.aot.targets import target_for
from specprefill_jax.errors import DeviceError, RecipeError
from specprefill_jax.models.matrix import TileShape
from specprefill_jax.runtime.device import KNOWN_DEVICES


def test_an_unknown_device_is_refused_with_the_known_ones() -> None:
    known = "cpu, cpu-portable, vulkan, llvmpipe, llvmpipe-f16, radeon-780m"
    with pytest.raises(DeviceError, match=rf"^unknown device 'gpu'; the known ones are {known}$"):
        target_for("gpu")


@pytest.mark.parametrize("name", sorted(KNOWN_DEVICES))
def test_every_device_that_can_be_opened_can_be_compiled_for(name: str) -> None:
    device = target_for(name).device
    assert device.name == name
    assert device.driver == ("local-task" if name.startswith("cpu") else "vulkan")


@pytest.mark.parametrize(
    ("name", "own", "others"),
    [
        ("cpu", "bf16", ["f32"]),
        ("cpu-portable", "bf16", ["f32"]),
        ("vulkan", "f32", []),
        ("llvmpipe", "f32", ["f16"]),
        ("llvmpipe-f16", "f16", ["f32"]),
        ("radeon-780m", "f16", ["f32"]),
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


def test_cooperative_products_are_those_of_the_radeon_with_sums_in_f32() -> None:
    products = {name: target_for(name).cooperative for name in KNOWN_DEVICES}
    assert products.pop("radeon-780m") == {("f16", "f16", "f32")}
    assert not any(products.values())
