"""Artifacts of tiny random checkpoints, built once for each device and number format."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from specprefill_jax.aot.build import build_artifact
from specprefill_jax.aot.recipe import ModelRecipe, Recipe
from tests.models.reference import DEMO, ROWS, Pair, random_pair

# Head sizes 32/32 as the demo pair's, and 64/128 with twice as many value heads as key heads.
ROLES = {"draft": "equal heads", "target": "wide heads"}
# A long block has two chunks of the delta rule. The draft's capacities hold one of each length from
# slot 0, and a long block after a short one; the target's hold two long blocks. Not every tiny shape
# compiles: with blocks [16, 192] and capacity 256 IREE 3.13 refuses a draft for llvmpipe ("failed to
# legalize operation 'memref.alloc'").
SHORT, LONG = 16, 128
BLOCKS = {"draft": (SHORT, LONG), "target": (LONG,)}
CAPACITIES = {"draft": (LONG, LONG + SHORT), "target": (2 * LONG,)}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """The checkpoint of a role, loaded by transformers and by us."""
    return cache(lambda role: random_pair(tmp_path_factory.mktemp("checkpoint"), ROLES[role]))


def recipe_of(pairs: Callable[[str], Pair], numerics: str) -> Recipe:
    def model(role: str) -> ModelRecipe:
        rows = ROWS if role == "draft" else 0
        return ModelRecipe(pairs(role).directory, BLOCKS[role], CAPACITIES[role], rows, numerics)

    return Recipe(
        name="tiny",
        minimum_tokens=64,
        tokenizer=DEMO / "tokenizer.json",
        chat_template=DEMO / "chat_template.jinja",
        draft=model("draft"),
        target=model("target"),
        source={"name": "tiny"},
    )


@pytest.fixture(scope="session")
def smallest_recipe(pairs: Callable[[str], Pair]) -> Recipe:
    """One block and one capacity: the smallest artifact there is."""

    def model(role: str, rows: int) -> ModelRecipe:
        return ModelRecipe(pairs(role).directory, (16,), (32,), rows, "f32")

    return Recipe(
        name="smallest",
        minimum_tokens=64,
        tokenizer=DEMO / "tokenizer.json",
        chat_template=DEMO / "chat_template.jinja",
        draft=model("draft", ROWS),
        target=model("target", 0),
        source={"name": "smallest", "draft": {"blocks": [16]}},
    )


@pytest.fixture(scope="session")
def smallest(smallest_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The smallest artifact, for the CPU, and what was said while it was built."""
    said: list[str] = []
    return build_artifact(
        smallest_recipe, "cpu", tmp_path_factory.mktemp("smallest") / "cpu", said.append
    ), said
