"""What the benchmarks run on: the demo pair, or random models of the true 0.8B and 4B shapes on the CPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from jaxtyping import Int
from true_shapes import PRESETS, make_checkpoint, say, slots, write_recipe

from specprefill_jax.artifact.locate import embedded
from specprefill_jax.cli.load import load_engine
from specprefill_jax.cli.progress import Waiting
from specprefill_jax.engine import Engine
from specprefill_jax.settings import Settings

CONVERSATION = 4000  # tokens of the first prompt
NEW = 100  # tokens of the second turn after the answer
ANSWER = 8  # tokens, at most
KEEP = 0.3


def add_subject(parser: argparse.ArgumentParser) -> None:
    """The options that name a subject."""
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--device", default="cpu", help="run the demo pair there (default cpu)")
    one.add_argument(
        "--true-shapes",
        type=Path,
        metavar="WORKDIR",
        help="run random 0.8B and 4B models on the CPU; 40 GB of disk, kept for the next run",
    )


def whole_rounds(text: str) -> int:
    """A number of rounds from the command line."""
    if (rounds := int(text)) < 1:
        raise argparse.ArgumentTypeError("one round or more, please")
    return rounds


def load(options: argparse.Namespace) -> Engine:
    """The engine of the subject, which is made and compiled first if need be.

    Raises:
        OSError: a random checkpoint could not be made.
        and all that `load_engine` and `compile_for_cpu` raise.
    """
    artifact = None if options.true_shapes is None else true_pair(options.true_shapes)
    if artifact is not None:
        say(f"opening {artifact}: checking the files, mapping the weights, self-tests")
    with Waiting() as waiting:
        if artifact is None:
            return load_engine(None, options.device, waiting)
        return Engine.load(artifact, "cpu", watch=waiting)


def name_of(options: argparse.Namespace) -> str:
    """The subject as titles name it."""
    return f"demo pair, {options.device}" if options.true_shapes is None else "true shapes, cpu"


def true_pair(workdir: Path) -> Path:
    """The artifact of the random models, of one block length and the caches that a second turn needs."""
    # Here and not above: it needs JAX, which would count as memory of those that run without it.
    from check_true_shapes import compile_for_cpu

    workdir.mkdir(parents=True, exist_ok=True)
    for name in PRESETS.values():
        make_checkpoint(workdir / name, "--preset", name)
    tokens = CONVERSATION + ANSWER + NEW
    capacities = {
        "draft": [slots(tokens + Settings().lookahead)],
        "target": [max(2048, slots(KEEP * tokens + ANSWER))],
    }
    recipe = write_recipe(workdir / "conversation.toml", PRESETS, capacities)
    compile_for_cpu(recipe, workdir / "conversation")
    return workdir / "conversation"


def examples(at_least: int = 0, less_than: int = 1 << 30) -> list[dict[str, Any]]:
    """The demo pair's questions about documents of so many tokens, in their order."""
    lines = embedded("artifacts/demo/examples.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return [example for example in found if at_least <= example["tokens"] < less_than]


def random_tokens(engine: Engine, count: int, seed: int) -> Int[np.ndarray, "M"]:
    """A prompt of no meaning."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, engine.chat.vocabulary, count, np.int32)


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median, and the upper quartile."""
    low, high = np.quantile(values, (0.25, 0.75))
    return float(low), median(values), float(high)
