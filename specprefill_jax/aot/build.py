"""A recipe and a device -> an artifact: modules, archives, tokenizer, template, manifest."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from specprefill_jax.aot.audit import compile_audited
from specprefill_jax.aot.export import Shapes, export_module, state_tensors
from specprefill_jax.aot.recipe import ModelRecipe, Recipe
from specprefill_jax.aot.self_test import make_self_test
from specprefill_jax.aot.targets import Target, target_for
from specprefill_jax.aot.weights import write_archive
from specprefill_jax.artifact.hashing import describe_files
from specprefill_jax.artifact.manifest import SCHEMA, Build, Manifest, Model
from specprefill_jax.artifact.schedule import schedule_name
from specprefill_jax.errors import FileMissing, RecipeError
from specprefill_jax.models.config import TextConfig, read_config
from specprefill_jax.models.layers import POSITIONS

TOOLS = ("jax", "jaxlib", "iree-base-compiler", "iree-base-runtime", "numpy", "ml_dtypes")


def build_artifact(recipe: Recipe, device: str, out: Path, say: Callable[[str], None]) -> Path:
    """Builds the artifact of `recipe` for `device` into the new directory `out`; `say` hears each step.

    The same recipe, device, tools and checkpoint give the same bytes.

    Raises:
        DeviceError, RecipeError, ConfigError, CheckpointError, FileMissing: bad input.
        CompileError: the compiler refuses a module.
    """
    target = target_for(device)
    configs = {role: read_config(model.checkpoint) for role, model in _models(recipe).items()}
    _check_pair(configs["draft"], configs["target"])
    out.mkdir(parents=True)
    for source, name in ((recipe.tokenizer, "tokenizer.json"), (recipe.chat_template, "chat_template.jinja")):
        if not source.is_file():
            raise FileMissing(f"no {name} at {source}, which the recipe names")
        shutil.copyfile(source, out / name)
    models, texts, features = {}, {}, set()
    for role, model in _models(recipe).items():
        models[role], texts[role], used = _build_model(role, model, configs[role], target, out, say)
        features |= used
    say("hashing the files")
    manifest = Manifest(
        schema=SCHEMA,
        name=recipe.name,
        device=replace(target.device, features=tuple(sorted(features))),
        proof=target.proof,
        minimum_tokens=recipe.minimum_tokens,
        tokenizer="tokenizer.json",
        chat_template="chat_template.jinja",
        stop_ids=tuple(configs["target"].eos_token_ids),
        models=models,
        files=describe_files(out),
        build=describe_build(recipe, target, texts),
    )
    manifest.write(out)
    return out


def describe_build(recipe: Recipe, target: Target, texts: Mapping[str, str]) -> Build:
    """What the bytes follow from beside the checkpoints; `texts` are the exported programs by role."""
    return Build(
        recipe=json.loads(json.dumps(recipe.source)),
        tools={tool: importlib.metadata.version(tool) for tool in TOOLS},
        flags={"iree-compile": list(target.flags), "tuning": dict(target.tuning)},
        stablehlo={role: hashlib.sha256(text.encode()).hexdigest() for role, text in texts.items()},
    )


def _models(recipe: Recipe) -> dict[str, ModelRecipe]:
    return {"draft": recipe.draft, "target": recipe.target}


def _check_pair(draft: TextConfig, target: TextConfig) -> None:
    if draft.vocab_size != target.vocab_size:
        raise RecipeError(
            f"the draft has {draft.vocab_size} vocabulary rows and the target {target.vocab_size}: they must "
            "share one tokenizer"
        )


def module_shapes(model: ModelRecipe, target: Target) -> Shapes:
    """What a model of a recipe is compiled for on a target."""
    numerics = target.number_format(model.numerics)
    return Shapes(model.blocks, model.capacities, model.rows, numerics, target.tile(numerics))


def _build_model(
    role: str, model: ModelRecipe, config: TextConfig, target: Target, out: Path, say: Callable[[str], None]
) -> tuple[Model, str, frozenset[str]]:
    """Writes the module, the archive and the self-test; the program's text, and what it needs of a device."""
    shapes = module_shapes(model, target)
    write_archive(model.checkpoint, config, shapes, out / f"{role}.irpa", say)
    say(f"tracing the {role}")
    text = export_module(role, config, shapes)
    say(f"compiling the {role} for {target.device.name}")
    audited = compile_audited(text, target, f"{role} for {target.device.name}")
    (out / f"{role}.vmfb").write_bytes(audited.module)
    if audited.schedule is not None:
        audited.schedule.write(out / schedule_name(role))
    say(f"computing the {role}'s self-test")
    make_self_test(model.checkpoint, config, shapes).write(out / f"{role}.self_test.json")
    described = Model(
        module=f"{role}.vmfb",
        parameters=f"{role}.irpa",
        numerics=shapes.numerics,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        positions=POSITIONS,
        attention_layers=len(config.attention_layers),
        query_heads=config.num_attention_heads,
        rows=model.rows,
        blocks=tuple(model.blocks),
        capacities=tuple(model.capacities),
        state=state_tensors(config, shapes.numerics),
        largest_parameter=max(shapes.parameter_bytes(config)),
        largest_buffer=audited.schedule.largest_buffer if audited.schedule else 0,
        self_test=f"{role}.self_test.json",
    )
    return described, text, audited.features
