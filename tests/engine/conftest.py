"""The demo pair, compiled for the CPU once for all tests."""

import dataclasses
from pathlib import Path

import pytest

from specprefill_jax.aot.build import build_artifact
from specprefill_jax.aot.recipe import read_recipe
from specprefill_jax.artifact.locate import embedded
from specprefill_jax.engine import Engine


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of the pair in f32, where two ways of computing the same agree closely.

    It has two block lengths, and one capacity, which is enough for the longest of the examples.
    """
    recipe = read_recipe(embedded("compile/demo.toml"))
    draft, target = (
        dataclasses.replace(model, blocks=(128, 256), capacities=(4608,), numerics="f32")
        for model in (recipe.draft, recipe.target)
    )
    directory = tmp_path_factory.mktemp("demo") / "cpu"
    return build_artifact(dataclasses.replace(recipe, draft=draft, target=target), "cpu", directory, print)


@pytest.fixture(scope="session")
def engine(demo: Path) -> Engine:
    return Engine.load(demo, "cpu")
