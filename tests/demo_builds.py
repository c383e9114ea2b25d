"""The demo pair as tests build it, once for all of them: an artifact for each device in `SHAPES`.

Also a program, for another checkout to build the same: `python -m tests.demo_builds DEVICE OUT`.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import NamedTuple

import specprefill_jax
from specprefill_jax.aot.build import build_artifact
from specprefill_jax.aot.recipe import ModelRecipe, read_recipe
from specprefill_jax.artifact.locate import embedded


class Shape(NamedTuple):
    """What the pair is compiled for: one cache, and f32 where two ways of computing the same must agree."""

    blocks: tuple[int, ...]
    capacity: int
    numerics: str


SHAPES = {
    # For the longest of the examples, and two ways of cutting it into blocks.
    "cpu-portable": Shape((128, 256), 4608, "f32"),
    # For the shortest of the examples: lavapipe takes its time.
    "vulkan": Shape((256,), 1024, "f32"),
    "radeon-780m": Shape((256,), 4608, "f16"),
}


def build_demo(device: str, out: Path) -> Path:
    """An artifact of the pair for a device of `SHAPES`, built by the package that is imported."""
    blocks, capacity, numerics = SHAPES[device]

    def shaped(model: ModelRecipe) -> ModelRecipe:
        return dataclasses.replace(model, blocks=blocks, capacities=(capacity,), numerics=numerics)

    recipe = read_recipe(embedded("compile/demo.toml"))
    recipe = dataclasses.replace(recipe, draft=shaped(recipe.draft), target=shaped(recipe.target))
    return build_artifact(recipe, device, out, lambda step: print(f"{device}: {step}"))


if __name__ == "__main__":
    print(f"built by {specprefill_jax.__file__}")
    build_demo(sys.argv[1], Path(sys.argv[2]))
