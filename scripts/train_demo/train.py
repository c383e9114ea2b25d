"""Trains one model of the demo pair; `scripts/train_demo/run` says how."""

from __future__ import annotations

import argparse
import json
import os
import time
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from data import ANSWER, FIRST, Source, Stage
from model import Parameters, initial, logits, step_bias
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from specprefill_jax.models.config import TextConfig

HERE = Path(__file__).resolve().parent
SHOWN_EVERY = 50
SAVED_EVERY = 200


def main() -> None:
    parser = argparse.ArgumentParser(prog="train_demo", description=__doc__)
    parser.add_argument("role", help="a table of stages.toml: draft, target, ..")
    parser.add_argument(
        "out", type=Path, help="folder for the checkpoint; training goes on from what lies there"
    )
    parser.add_argument("--plan", type=Path, default=HERE / "stages.toml")
    options = parser.parse_args()
    plan = tomllib.loads(options.plan.read_text(encoding="utf-8"))[options.role]
    train(plan, options.plan.parent, options.out)


def train(plan: dict, folder: Path, out: Path) -> None:
    """Trains by a plan, or goes on from the last step that `out` has."""
    config_file = folder / plan["config"]
    config = TextConfig.from_hf(json.loads(config_file.read_text(encoding="utf-8")))
    source = Source(Tokenizer.from_file(str(folder / plan["tokenizer"])))
    stages = [Stage(**stage) for stage in plan["stages"]]
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.98),
        optax.add_decayed_weights(plan["decay"], mask=lambda p: {n: w.ndim == 2 for n, w in p.items()}),
    )
    parameters = initial(config, plan["seed"], plan["memory"], plan["sharpness"])
    state = optimizer.init(parameters)
    done, parameters, state = resumed(out, parameters, state)
    step = make_step(config, optimizer)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_bytes(config_file.read_bytes())
    print(f"{sum(p.size for p in parameters.values()):,} parameters, from step {done}", flush=True)
    start, shown, seen, first, tokens = time.monotonic(), [], 0, 0, 0
    rate = plan["rate"]
    for number, stage in enumerate(stages):
        for index in range(stage.steps):
            current = first + index
            if current < done:
                continue
            if index == 0:
                parameters = set_anew(parameters, stage)
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
        first, rate = first + stage.steps, stage.rate
    save(out, first, parameters, state)


def make_step(config: TextConfig, optimizer: optax.GradientTransformation):
    """The compiled step: parameters and optimizer state in and out, and what was measured on the batch."""

    def loss(parameters, ids, weights):
        found = logits(config, parameters, ids[:, :-1])
        wanted, weight = ids[:, 1:], weights[:, 1:]
        chosen = jnp.take_along_axis(found, wanted[..., None], axis=-1)[..., 0]
        cost = jax.nn.logsumexp(found, axis=-1) - chosen
        right = chosen >= jnp.max(found, axis=-1)
        first, answer = weight == FIRST, weight >= ANSWER
        share = lambda x, where: jnp.sum(x * where) / jnp.maximum(jnp.sum(where), 1)
        other = (weight > 0) & ~answer
        measured = (share(cost, answer), share(right, first), share(right, answer), share(cost, other))
        return jnp.sum(cost * weight) / jnp.sum(weight), measured

    def step(parameters, state, ids, weights, rate):
        (total, measured), gradient = jax.value_and_grad(loss, has_aux=True)(parameters, ids, weights)
        updates, state = optimizer.update(gradient, state, parameters)
        parameters = {name: p - rate * updates[name] for name, p in parameters.items()}
        return parameters, state, (total, *measured)

    return jax.jit(step, donate_argnums=(0, 1))


def show(number, stage, step, rate, tokens, seconds, shown) -> None:
    total, nll, first, answer, other = np.mean(shown, axis=0)
    print(
        f"stage {number} step {step} T{stage.tokens} {seconds:.0f}s {tokens / seconds:.0f} tok/s rate {rate:.5f} "
        f"loss {total:.3f} answers: nll {nll:.3f} first {first:.3f} all {answer:.3f}; others {other:.3f}",
        flush=True,
    )


def set_anew(parameters: Parameters, stage: Stage) -> Parameters:
    """Delta layers that forget after 1/dt tokens and attention as sharp as the stage begins with."""
    new = dict(parameters)
    for name, p in parameters.items():
        if stage.memory and name.endswith("A_log"):
            new[name] = jnp.zeros_like(p)
        if stage.memory and name.endswith("dt_bias"):
            new[name] = jnp.asarray(step_bias(p.size, stage.memory), jnp.float32)
        if stage.sharpness and name.endswith(("q_norm.weight", "k_norm.weight")):
            new[name] = jnp.full_like(p, stage.sharpness)
    return new


def save(out: Path, step: int, parameters: Parameters, state) -> None:
    """The checkpoint, and beside it what training needs to go on; whole or not at all."""
    rest = {str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    write(out / "training.safetensors", rest, {"step": str(step)})
    write(out / "model.safetensors", {n: np.asarray(p) for n, p in parameters.items()}, {"format": "pt"})


def write(path: Path, arrays: dict, metadata: dict[str, str]) -> None:
    partial = path.with_suffix(".partial")
    save_file(arrays, partial, metadata=metadata)
    os.replace(partial, path)


def resumed(out: Path, parameters: Parameters, state):
    """The step that was reached, its parameters and its optimizer state."""
    if not (out / "training.safetensors").exists():
        return 0, parameters, state
    from safetensors import safe_open

    with safe_open(out / "training.safetensors", "numpy") as file:
        step = int(file.metadata()["step"])
        leaves = [jnp.asarray(file.get_tensor(str(i))) for i in range(len(file.keys()))]
    parameters = {n: jnp.asarray(p) for n, p in load_file(out / "model.safetensors").items()}
    return step, parameters, jax.tree.unflatten(jax.tree.structure(state), leaves)


if __name__ == "__main__":
    main()
