"""Artifacts of tiny random checkpoints, built once for each device and number format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from specprefill_jax.aot.build import build_artifact
from specprefill_jax.aot.recipe import ModelRecipe, Recipe
from specprefill_jax.artifact.verify import open_artifact
from specprefill_jax.runtime.program import Program
from specprefill_jax.runtime.target import open_device_for
from tests.models.reference import DEMO, ROWS, Pair, random_pair

ROLES = {"draft": "twice the value heads", "target": "equal heads"}
# A long block has four chunks of the delta rule. The draft's capacities hold one of each length from
# slot 0, and a long block after a short one. Not every tiny shape compiles: with blocks [16, 192] and
# capacity 256 IREE 3.13 refuses the draft for llvmpipe ("failed to legalize operation 'memref.alloc'").
SHORT, LONG = 16, 256
BLOCKS = {"draft": (SHORT, LONG), "target": (SHORT,)}
CAPACITIES = {"draft": (LONG, LONG + SHORT), "target": (LONG,)}


@dataclass(frozen=True)
class Built:
    """An artifact's models on their device."""

    draft: Program
    target: Program


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
def built(
    pairs: Callable[[str], Pair], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Built]:
    """Builds for a device and number format, proves both models there and keeps them."""

    @cache
    def build(device: str, numerics: str) -> Built:
        out = tmp_path_factory.mktemp("tiny") / device
        artifact = open_artifact(build_artifact(recipe_of(pairs, numerics), device, out, print))
        opened = open_device_for(artifact.manifest, device)
        return Built(*(Program.load(artifact, role, opened) for role in ("draft", "target")))

    return build
