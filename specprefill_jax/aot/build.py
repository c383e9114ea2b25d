"""A recipe and a device -> an artifact: modules, archives, tokenizer, template, manifest."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from specprefill_jax.aot.audit import compile_audited
from specprefill_jax.aot.export import DTYPES, Shapes, export_module, state_tensors
from specprefill_jax.aot.recipe import ModelRecipe, Recipe
from specprefill_jax.aot.targets import Target, target_for
from specprefill_jax.aot.weights import write_archive
from specprefill_jax.artifact.hashing import describe_files
from specprefill_jax.artifact.manifest import SCHEMA, Build, Manifest, Model, SelfTest
from specprefill_jax.artifact.schedule import schedule_name
from specprefill_jax.errors import FileMissing, RecipeError
from specprefill_jax.models import qwen35
from specprefill_jax.models.checkpoint import load_parameters
from specprefill_jax.models.config import TextConfig, read_config
from specprefill_jax.models.layers import POSITIONS
from specprefill_jax.models.parameters import Block

TOOLS = ("jax", "jaxlib", "iree-base-compiler", "iree-base-runtime", "numpy", "ml_dtypes")
# Largest difference to the JAX reference in units of the largest logit, by format of the matrices: the
# rounding of f32 sums in another order, and of activations to bf16 or f16 in other places. A wrong target is
# off by 1.
TOLERANCE = {"f32": 1e-3, "f16": 2e-2, "bf16": 8e-2}


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
    models, texts = {}, {}
    for role, model in _models(recipe).items():
        models[role], texts[role] = _build_model(role, model, configs[role], target, out, say)
    say("hashing the files")
    manifest = Manifest(
        schema=SCHEMA,
        name=recipe.name,
        device=target.device,
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
        flags={"iree-compile": list(target.flags)},
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
) -> tuple[Model, str]:
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
        state=state_tensors(config),
        self_test=self_test(model.checkpoint, config, shapes),
    )
    return described, text


class _OneAtATime(tuple[Block, ...]):
    """Layers of NumPy arrays; each becomes JAX's when an iteration reaches it, and is let go of after it."""

    def __iter__(self) -> Iterator[Block]:
        return (jax.tree.map(jnp.asarray, layer) for layer in super().__iter__())


def self_test(checkpoint: Path, config: TextConfig, shapes: Shapes) -> SelfTest:
    """Fixed tokens at positions with gaps, and the logits that JAX computes for them.

    The reference runs operation by operation, layer by layer from the mapped checkpoint, so that it needs
    little memory.
    """
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, config.vocab_size, 6)
    count, next_token = len(tokens) - 1, int(tokens[-1])
    positions = (0, 1, 5, 6, 40)
    picked = sorted(
        int(i) for i in generator.choice(config.vocab_size, min(16, config.vocab_size), replace=False)
    )
    model = load_parameters(checkpoint, config, DTYPES[shapes.numerics])
    model = replace(
        model,
        embed_tokens=jnp.asarray(model.embed_tokens),
        layers=_OneAtATime(model.layers),
        norm=jnp.asarray(model.norm),
        lm_head=None if model.lm_head is None else jnp.asarray(model.lm_head),
    )
    scalar = jnp.int32
    state = qwen35.initial_state(config, shapes.blocks[0])
    with jax.disable_jit():
        hidden, _, state = qwen35.prefill(
            config, model, _padded(tokens[:count]), _padded(positions), scalar(count), scalar(0), state
        )
        prefilled = np.asarray(qwen35.head(model, hidden))
        decoded, _, _ = qwen35.decode(
            config, model, scalar(next_token), scalar(positions[-1] + 1), scalar(count), state
        )
    return SelfTest(
        tokens=tuple(int(token) for token in tokens[:count]),
        positions=positions,
        block=shapes.blocks[0],
        capacity=shapes.capacities[0],
        next_token=next_token,
        logits_index=tuple(picked),
        prefill_logits=tuple(float(prefilled[i]) for i in picked),
        decode_logits=tuple(float(decoded[i]) for i in picked),
        tolerance=TOLERANCE[shapes.numerics],
    )


def _padded(values: object) -> jax.Array:
    """The values and padding up to a block of 16."""
    given = np.asarray(values, np.int32)
    return jnp.asarray(np.pad(given, (0, 16 - len(given))))
