"""Trains one model of the demo pair; `scripts/train_demo/run` says how."""

from __future__ import annotations

import argparse
import json
import os
import time
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from train_demo.data import ANSWER, FIRST, Source, Stage
from train_demo.model import Parameters, initial, logits, step_bias

from specprefill_jax.models.config import TextConfig

HERE = Path(__file__).resolve().parent
SHOWN_EVERY = 50
SAVED_EVERY = 200

Step = Callable[..., tuple[Parameters, optax.OptState, tuple[Array, ...]]]
"""From parameters, optimizer state, tokens, weights and rate to the first two and what was measured."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="train_demo", description=__doc__)
    parser.add_argument("role", help="a table of stages.toml: draft, target, ..")
    parser.add_argument(
        "out", type=Path, help="folder for the checkpoint; training goes on from what lies there"
    )
    parser.add_argument("--plan", type=Path, default=HERE / "stages.toml")
    options = parser.parse_args()
    plans = tomllib.loads(options.plan.read_text(encoding="utf-8"))
    if options.role not in plans:
        parser.error(f"no table {options.role!r} in {options.plan}; there are {', '.join(plans)}")
    train(plans[options.role], options.plan.parent, options.out)


def train(plan: dict[str, Any], folder: Path, out: Path) -> None:
    """Trains by a plan, or goes on from the last step that `out` has."""
    config_file = folder / plan["config"]
    config = TextConfig.from_hf(json.loads(config_file.read_text(encoding="utf-8")))
    source = Source(Tokenizer.from_file(str(folder / plan["tokenizer"])))
    stages = [Stage(**stage) for stage in plan["stages"]]
    parameters = initial(config, plan["seed"], plan["memory"], plan["sharpness"])
    state = adam(plan["decay"]).init(parameters)
    done, parameters, state = resumed(out, parameters, state)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_bytes(config_file.read_bytes())
    print(f"{sum(p.size for p in parameters.values()):,} parameters, from step {done}", flush=True)
    start, shown, first, tokens = time.monotonic(), [], 0, 0
    rate, layers = plan["rate"], stages[0].layers
    for number, stage in enumerate(stages):
        step = make_step(config, plan["decay"], stage.layers)
        for index in range(stage.steps):
            current = first + index
            if current < done:
                continue
            if index == 0:
                parameters = set_anew(parameters, stage, layers)
            ids, weights = source.batch(stage, f"{plan['seed']}/{current}")
            now = rate + (stage.rate - rate) * index / stage.steps
            parameters, state, measured = step(parameters, state, ids, weights, now)
            shown.append(jax.device_get(measured))
            tokens += ids.size
            if (current + 1) % SHOWN_EVERY == 0:
                show(number, stage, current + 1, now, tokens, time.monotonic() - start, shown)
                shown = []
            if (current + 1) % SAVED_EVERY == 0:
                save(out, current + 1, parameters, state)
        first, rate, layers = first + stage.steps, stage.rate, stage.layers
    save(out, first, parameters, state)


def adam(decay: float) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.98),
        optax.add_decayed_weights(decay, mask=matrices),
    )


def matrices(parameters: Any) -> dict[str, bool]:
    """Which parameters decay."""
    return {name: p.ndim == 2 for name, p in parameters.items()}


@cache
def make_step(config: TextConfig, decay: float, layers: int | None) -> Step:
    """The compiled step: parameters and optimizer state in and out, and what was measured on the batch."""
    optimizer = adam(decay)

    def loss(parameters: Parameters, ids: Array, weights: Array) -> tuple[Array, tuple[Array, ...]]:
        found = logits(config, parameters, ids[:, :-1], layers=layers)
        wanted, weight = ids[:, 1:], weights[:, 1:]
        chosen = jnp.take_along_axis(found, wanted[..., None], axis=-1)[..., 0]
        cost = jax.nn.logsumexp(found, axis=-1) - chosen
        hit = (chosen >= jnp.max(found, axis=-1)).astype(jnp.float32)
        first, answer = weight == FIRST, weight >= ANSWER
        other = (weight > 0) & ~answer
        measured = (share(cost, answer), share(hit, first), share(hit, answer), share(cost, other))
        return jnp.sum(cost * weight) / jnp.sum(weight), measured

    def share(x: Array, where: Array) -> Array:
        counted = where.astype(jnp.float32)
        return jnp.sum(x * counted) / jnp.maximum(jnp.sum(counted), 1)

    def step(
        parameters: Parameters, state: optax.OptState, ids: Array, weights: Array, rate: Array
    ) -> tuple[Parameters, optax.OptState, tuple[Array, ...]]:
        (total, measured), gradient = jax.value_and_grad(loss, has_aux=True)(parameters, ids, weights)
        updates: Any
        updates, state = optimizer.update(gradient, state, parameters)
        parameters = {name: p - rate * updates[name] for name, p in parameters.items()}
        return parameters, state, (total, *measured)

    return jax.jit(step, donate_argnums=(0, 1))


def show(
    number: int, stage: Stage, step: int, rate: float, tokens: int, seconds: float, shown: list[Any]
) -> None:
    total, nll, first, answer, other = np.mean(shown, axis=0)
    print(
        f"stage {number} step {step} T{stage.tokens} {seconds:.0f}s {tokens / seconds:.0f} tok/s "
        f"rate {rate:.5f} loss {total:.3f} answers: nll {nll:.3f} first {first:.3f} all {answer:.3f}; "
        f"others {other:.3f}",
        flush=True,
    )


def set_anew(parameters: Parameters, stage: Stage, before: int | None) -> Parameters:
    """What a stage begins with: how soon delta layers forget, how sharp attention is, how many layers.

    Args:
        before: The layers of the stage before.
    """
    new = dict(parameters)
    for name, p in parameters.items():
        if stage.memory and name.endswith("A_log"):
            new[name] = jnp.zeros_like(p)
        if stage.memory and name.endswith("dt_bias"):
            new[name] = jnp.asarray(step_bias(p.size, stage.memory), jnp.float32)
        if stage.sharpness and name.endswith(("q_norm.weight", "k_norm.weight")):
            new[name] = jnp.full_like(p, stage.sharpness)
        if before and before != stage.layers and layer_of(name) >= before and name.endswith(OUTPUTS):
            new[name] = p * QUIET
    return new


OUTPUTS = ("out_proj.weight", "o_proj.weight", "down_proj.weight")
QUIET = 0.1
"""What the outputs of new layers are multiplied with, so that the model is at first what it was without."""


def layer_of(name: str) -> int:
    """The layer of a parameter; -1 for one that belongs to none."""
    return int(name.split(".")[2]) if name.startswith("model.layers.") else -1


MODEL = "model/"
"""What the names of parameters begin with among the rest that training needs."""


def save(out: Path, step: int, parameters: Parameters, state: optax.OptState) -> None:
    """The checkpoint, and beside it all that training needs to go on."""
    model = {name: np.asarray(p) for name, p in parameters.items()}
    rest = {str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    rest |= {MODEL + name: p for name, p in model.items()}  # a stop between the files must not mix two steps
    write(out / "training.safetensors", rest, {"step": str(step)})
    write(out / "model.safetensors", model, {"format": "pt"})


def write(path: Path, arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    """A file, whole or not at all."""
    partial = path.with_suffix(".partial")
    save_file(arrays, partial, metadata=metadata)
    os.replace(partial, path)


def resumed(
    out: Path, parameters: Parameters, state: optax.OptState
) -> tuple[int, Parameters, optax.OptState]:
    """The step that was reached, its parameters and its optimizer state."""
    path = out / "training.safetensors"
    if not path.exists():
        return 0, parameters, state
    with safe_open(path, "numpy") as file:
        step = int(file.metadata()["step"])
    saved = {name: jnp.asarray(array) for name, array in load_file(path).items()}
    parameters = {n.removeprefix(MODEL): p for n, p in saved.items() if n.startswith(MODEL)}
    leaves = [saved[str(i)] for i in range(len(saved) - len(parameters))]
    return step, parameters, jax.tree.unflatten(jax.tree.structure(state), leaves)


if __name__ == "__main__":
    main()
