"""Artifacts without their weights, which are too large to be carried: written anew where they are needed.

The manifest holds their hash, so that weights that came out otherwise are refused.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from true_shapes import PRESETS, make_checkpoint, say, write_recipe

from gpu.plan import Plan
from specprefill_jax.artifact.locate import embedded
from specprefill_jax.artifact.manifest import MANIFEST_NAME, Manifest
from specprefill_jax.cli.compile import build
from specprefill_jax.models.config import write_config

Checkpoints = Mapping[str, Path]


def demo_checkpoints() -> Checkpoints:
    """Those of the embedded pair."""
    return {role: embedded(f"artifacts/demo/{role}") for role in PRESETS}


def random_checkpoints(plan: Plan, work: Path, layers: int) -> Checkpoints:
    """Where those of a pair of `layers` layers (0: all) are, made or not."""
    depth = f"{layers}-layers" if layers else "whole"
    size = "tiny" if plan.tiny else "true"
    return {role: work / f"{size}-{role}-{depth}-seed-{plan.seed}" for role in PRESETS}


def make_random(plan: Plan, role: str, layers: int, directory: Path) -> None:
    """The random weights of a model, unless they are there.

    Raises:
        OSError: they could not be made.
    """
    shape = directory.with_name(f"{directory.name}-shape")
    shape.mkdir(parents=True, exist_ok=True)
    write_config(plan.config(role, layers), shape, "bfloat16")
    make_checkpoint(directory, "--config", str(shape / "config.json"), "--seed", str(plan.seed))


def build_pair(plan: Plan, name: str, checkpoints: Checkpoints, capacities: Mapping[str, list[int]]) -> Path:
    """The artifact of random models for the plan's target, beside their checkpoints, which must be there."""
    work = checkpoints["draft"].parent
    names = {role: path.name for role, path in checkpoints.items()}
    recipe = write_recipe(work / f"{name}.toml", names, capacities, plan.block)
    build(recipe, plan.target, work / "run" / name, say)
    return work / "run" / name


def pack(artifact: Path, out: Path) -> None:
    """Everything of an artifact but its weights."""
    weights = {model.parameters for model in Manifest.read(artifact).models.values()}
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(artifact, out, ignore=lambda _, names: weights & set(names))


def unpack(packed: Path, out: Path) -> None:
    """The same where weights can be put; those that are there already stay, while the rest is the same."""
    if (out / MANIFEST_NAME).is_file():
        if (out / MANIFEST_NAME).read_bytes() == (packed / MANIFEST_NAME).read_bytes():
            return
        shutil.rmtree(out)
    shutil.copytree(packed, out)


def write_weights(artifact: Path, role: str, checkpoint: Path) -> None:
    """A model's archive from its checkpoint, as the build wrote it, unless it is there.

    Needs JAX, for the shapes alone, and no compiler.
    """
    from specprefill_jax.aot.export import Shapes
    from specprefill_jax.aot.targets import target_for
    from specprefill_jax.aot.weights import write_archive
    from specprefill_jax.models.config import read_config

    manifest = Manifest.read(artifact)
    model = manifest.models[role]
    out = artifact / model.parameters
    if out.is_file() and out.stat().st_size == manifest.files[model.parameters].bytes:
        return
    tile = target_for(manifest.device.name).tile(model.numerics)
    shapes = Shapes(model.blocks, model.capacities, model.rows, model.numerics, tile)
    part = out.with_name(f".{out.name}-part")
    write_archive(checkpoint, read_config(checkpoint), shapes, part, say)
    os.replace(part, out)
