"""The demo pair, compiled once for all tests."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from specprefill_jax.aot.build import build_artifact
from specprefill_jax.aot.recipe import read_recipe
from specprefill_jax.artifact.locate import embedded
from specprefill_jax.engine import Engine
from specprefill_jax.errors import DeviceFailed


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of the pair for the CPU, for the longest of the examples, with two block lengths."""
    return build_demo(tmp_path_factory.mktemp("demo") / "cpu", "cpu", blocks=(128, 256), capacity=4608)


def build_demo(directory: Path, device: str, *, blocks: tuple[int, ...], capacity: int) -> Path:
    """An artifact of the pair in f32, where two ways of computing the same agree closely."""
    recipe = read_recipe(embedded("compile/demo.toml"))
    draft, target = (
        dataclasses.replace(model, blocks=blocks, capacities=(capacity,), numerics="f32")
        for model in (recipe.draft, recipe.target)
    )
    return build_artifact(dataclasses.replace(recipe, draft=draft, target=target), device, directory, print)


@pytest.fixture(scope="session")
def engine(demo: Path) -> Engine:
    return Engine.load(demo, "cpu")


@pytest.fixture(scope="session")
def vulkan_engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The pair on Vulkan, for the shortest of the examples."""
    directory = tmp_path_factory.mktemp("demo") / "vulkan"
    build_demo(directory, "vulkan", blocks=(256,), capacity=1024)
    # Lavapipe of Mesa 22.3.6 loses its device now and then while parameters are loaded (tests/aot/child.py).
    for _ in range(2):
        try:
            return Engine.load(directory, "vulkan")
        except DeviceFailed as error:
            print(f"once more: {error}")
    return Engine.load(directory, "vulkan")
