"""The real driver and the real demo pair, once for all tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from specprefill_jax.aot.build import build_artifact
from specprefill_jax.aot.recipe import ModelRecipe, read_recipe
from specprefill_jax.artifact.locate import embedded
from specprefill_jax.preflight.driver import Driver
from specprefill_jax.preflight.preflight import preflight
from specprefill_jax.preflight.report import Report
from tests.preflight.sample import GPU


@pytest.fixture(scope="session")
def driver() -> Driver:
    """RADV's null device. Mesa is downloaded into the user's cache where it is not there, as by the verb."""
    return Driver(GPU, print)


@pytest.fixture(scope="session")
def demo_artifact(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The demo pair compiled for the Radeon in a number format, with the larger of its caches only."""

    @cache
    def build(numerics: str) -> Path:
        def one_cache(model: ModelRecipe) -> ModelRecipe:
            return replace(model, capacities=model.capacities[-1:], numerics=numerics)

        recipe = read_recipe(embedded("compile/demo.toml"))
        recipe = replace(recipe, draft=one_cache(recipe.draft), target=one_cache(recipe.target))
        return build_artifact(recipe, GPU.name, tmp_path_factory.mktemp("demo") / numerics, print)

    return build


@pytest.fixture(scope="session")
def report(demo_artifact: Callable[[str], Path]) -> Report:
    """What preflight finds in the demo pair in f16, and for a prompt of 1,000 tokens."""
    return preflight(demo_artifact("f16"), GPU.name, 1000, print)
