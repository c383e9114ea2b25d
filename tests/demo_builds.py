"""The demo pair as tests build it, once for all of them: an artifact for each device in `SHAPES`.

Also a program, for another checkout to build the same: `python -m tests.demo_builds DEVICE OUT`.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import specprefill_jax
from specprefill_jax.aot.build import build_artifact
from specprefill_jax.aot.recipe import ModelRecipe, read_recipe
from specprefill_jax.artifact.locate import embedded

ROOT = Path(__file__).parents[1]


class Shape(NamedTuple):
    """What the pair is compiled for: one cache, and f32 where two ways of computing the same must agree."""

    blocks: tuple[int, ...]
    capacity: int
    numerics: str


SHAPES = {
    # For the longest of the examples.
    "cpu-portable": Shape((256,), 4608, "f32"),
    # For the shortest of the examples: lavapipe takes its time.
    "vulkan": Shape((256,), 1024, "f32"),
    "radeon-780m": Shape((256,), 4608, "f16"),
}


def build_demo(device: str, out: Path) -> None:
    """An artifact of the pair for a device of `SHAPES`, built by the package that is imported."""
    blocks, capacity, numerics = SHAPES[device]

    def shaped(model: ModelRecipe) -> ModelRecipe:
        return dataclasses.replace(model, blocks=blocks, capacities=(capacity,), numerics=numerics)

    recipe = read_recipe(embedded("compile/demo.toml"))
    recipe = dataclasses.replace(recipe, draft=shaped(recipe.draft), target=shaped(recipe.target))
    build_artifact(recipe, device, out, lambda step: print(f"{device}: {step}"))


class Builds:
    """Builds in processes of their own, two at a time: much of a build keeps one core busy only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(2)
        self._begun: dict[tuple[Path, str], Future[Path]] = {}

    def begin(self, device: str, checkout: Path = ROOT) -> Future[Path]:
        """The artifact that a checkout builds for a device, to come; each is built once."""
        key = checkout, device
        if key not in self._begun:
            out = self._folder / f"{len(self._begun)}" / device
            self._begun[key] = self._pool.submit(_build, device, out, checkout)
        return self._begun[key]

    def end(self) -> None:
        """Wait for the builds that run; those that have not begun never will."""
        self._pool.shutdown(cancel_futures=True)


def _build(device: str, out: Path, checkout: Path) -> Path:
    out.parent.mkdir(parents=True)
    environment = {**os.environ, "PYTHONPATH": str(checkout), "XDG_CACHE_HOME": str(out.parent / "cache")}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tests.demo_builds", device, str(out)],
        capture_output=True,
        text=True,
        check=False,
        cwd=out.parent,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert f"built by {checkout}" in done.stdout
    return out


if __name__ == "__main__":
    print(f"built by {specprefill_jax.__file__}")
    build_demo(sys.argv[1], Path(sys.argv[2]))
