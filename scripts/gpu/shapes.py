"""Random models of the true shapes on the device: the self-test of the whole ones, parity of shallow ones.

The whole models are proven by their self-test: every entry, bucket and state tensor against JAX, by
fingerprints, over 73 tokens. Parity is the other way about: one period of layers (three of the delta rule,
one of attention) at true widths, but over several blocks of scattered positions, and every single logit and
attention row compared. JAX, operation by operation in two formats, would take far longer for the same of all
layers than a build may.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from true_shapes import PRESETS, say, slots

from gpu.artifacts import (
    build_pair,
    make_random,
    pack,
    random_checkpoints,
    unpack,
    write_weights,
)
from gpu.kernels import difference_of
from gpu.plan import PERIOD, Plan
from gpu.record import Check
from specprefill_jax.artifact.verify import Artifact, open_artifact
from specprefill_jax.errors import SpecPrefillError
from specprefill_jax.runtime.device import Device
from specprefill_jax.runtime.program import Program
from specprefill_jax.runtime.target import open_device_for

WHOLE, SHALLOW = "whole", "shallow"
REFERENCE = "shallow.npz"
BLOCKS = 2.5  # of tokens that parity reads: the last block is padded
APART = 3  # mean step between their positions


def layers_of(plan: Plan, name: str) -> int:
    """Layers of a pair; 0: as many as the released models have."""
    return PERIOD if name == SHALLOW else plan.layers


def parity_inputs(plan: Plan, role: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and their positions, with gaps."""
    count = int(BLOCKS * plan.block)
    generator = np.random.default_rng(1)
    vocabulary = plan.config(role, PERIOD).vocab_size
    tokens = generator.integers(0, vocabulary, count, np.int32)
    steps = generator.integers(1, 2 * APART, count)
    return tokens, np.cumsum(steps).astype(np.int32)


def build_shapes(plan: Plan, folder: Path, work: Path) -> None:
    """Both pairs without their weights, and what the shallow one must give."""
    shallow = [slots(BLOCKS * plan.block, plan.block)]
    caches = {WHOLE: plan.capacities(), SHALLOW: dict.fromkeys(PRESETS, shallow)}
    for name in (WHOLE, SHALLOW):
        checkpoints = random_checkpoints(plan, work, layers_of(plan, name))
        for role, checkpoint in checkpoints.items():
            make_random(plan, role, layers_of(plan, name), checkpoint)
        pack(build_pair(plan, name, checkpoints, caches[name]), folder / name)
    say("computing by JAX what the shallow pair must give")
    checkpoints = random_checkpoints(plan, work, PERIOD)
    wanted = {role: by_jax(plan, role, checkpoint) for role, checkpoint in checkpoints.items()}
    arrays: dict[str, Any] = {
        f"{role}.{key}": value for role in wanted for key, value in wanted[role].items()
    }
    np.savez_compressed(folder / REFERENCE, **arrays)


def by_jax(plan: Plan, role: str, checkpoint: Path) -> Mapping[str, np.ndarray]:
    """Logits and attention rows after the last token, in the build's number format, and what is allowed.

    Operation by operation, since a compiler could leave out roundings. As in the self-test, what leaving them
    out altogether changes, times 4, is allowed.
    """
    from specprefill_jax.aot.self_test import LEAST_TOLERANCE, ROUNDING
    from specprefill_jax.aot.targets import target_for

    numerics = target_for(plan.target).number_format(None)
    exact = _read_by_jax(plan, role, checkpoint, numerics, numerics)
    rough = _read_by_jax(plan, role, checkpoint, numerics, "f32")
    allowed = {
        f"{name} allowed": np.array(max(LEAST_TOLERANCE, ROUNDING * difference_of(rough[name], values)))
        for name, values in exact.items()
    }
    return {**exact, **allowed}


def _read_by_jax(
    plan: Plan, role: str, checkpoint: Path, stored: str, computed: str
) -> dict[str, np.ndarray]:
    """The weights as `stored` rounds them; products in the format `computed`."""
    import jax
    import jax.numpy as jnp

    from specprefill_jax.aot.export import DTYPES
    from specprefill_jax.models import qwen35
    from specprefill_jax.models.checkpoint import load_parameters

    config, rows = plan.config(role, PERIOD), 8 if role == "draft" else 0
    loaded = load_parameters(checkpoint, config, DTYPES[stored])

    def converted(array: np.ndarray) -> jax.Array:
        return jnp.asarray(array).astype(DTYPES[computed] if array.dtype == DTYPES[stored] else array.dtype)

    model = jax.tree.map(converted, loaded)
    tokens, positions = parity_inputs(plan, role)
    length = -(-len(tokens) // plan.block) * plan.block
    state = qwen35.initial_state(config, length, DTYPES[computed])
    hidden, returned = None, None
    with jax.disable_jit():
        for at in range(0, len(tokens), plan.block):
            count = min(plan.block, len(tokens) - at)
            padding = (0, plan.block - count)
            block_tokens, places = (np.pad(part[at : at + count], padding) for part in (tokens, positions))
            shown = rows if at + count == len(tokens) else 0
            hidden, returned, state = qwen35.prefill(
                config,
                model,
                jnp.asarray(block_tokens),
                jnp.asarray(places),
                jnp.int32(count),
                jnp.int32(at),
                state,
                rows=shown,
            )
        assert hidden is not None
        found = {"logits": np.asarray(qwen35.head(model, hidden))}
    if rows:
        found["rows"] = np.asarray(returned).transpose(2, 0, 1, 3)[..., : len(tokens)]
    return found


def run_weights(plan: Plan, folder: Path, work: Path, jobs: int) -> Iterator[Check]:
    """The weights of both pairs, from the seed; opening the artifacts checks that they are the build's."""

    def make(role: str, layers: int, names: Sequence[str]) -> None:
        checkpoint = random_checkpoints(plan, work, layers)[role]
        make_random(plan, role, layers, checkpoint)
        for name in names:
            write_weights(work / "run" / name, role, checkpoint)

    by_depth: dict[int, list[str]] = {}
    for name in (WHOLE, SHALLOW):
        unpack(folder / name, work / "run" / name)
        by_depth.setdefault(layers_of(plan, name), []).append(name)
    with ThreadPoolExecutor(jobs) as pool:
        made = [
            pool.submit(make, role, layers, names)
            for layers, names in by_depth.items()
            for role in ("target", "draft")  # the largest first
        ]
    for one in made:
        one.result()
    for name in (WHOLE, SHALLOW):
        files = open_artifact(work / "run" / name).manifest.files
        size = sum(entry.bytes for entry in files.values())
        yield Check(f"{name} pair", "passed", f"{size / 1e9:.2f} GB, as hashed when it was built")


def run_shapes(plan: Plan, folder: Path, work: Path) -> Iterator[Check]:
    """The self-tests of both pairs, and the parity of the shallow one."""
    with np.load(folder / REFERENCE) as wanted:
        references = dict(wanted)
    for name in (SHALLOW, WHOLE):
        artifact = open_artifact(work / "run" / name)
        device = open_device_for(artifact.manifest, plan.target)
        for role in PRESETS:
            program, check = tested(artifact, name, role, device)
            yield check
            if program is not None and name == SHALLOW:
                yield from parity(plan, role, program, references)


def tested(artifact: Artifact, name: str, role: str, device: Device) -> tuple[Program | None, Check]:
    """A model with its self-test, entry by entry; the entry that came closest to its limit."""
    title = f"self-test of the {name} {role}"
    try:
        program = Program.load(artifact, role, device, self_test=False)
        outcomes = list(program.test(artifact))
    except SpecPrefillError as error:
        return None, Check(title, "failed", str(error))
    worst = max(outcomes, key=lambda outcome: outcome.share)
    layers = artifact.manifest.models[role].layers
    words = (
        f"{len(outcomes)} entries, {layers} layers; closest to its limit: {worst.tensor} of {worst.entry}, "
        f"{worst.difference:.1e} of {worst.allowed:.1e}"
    )
    passed = all(outcome.passed for outcome in outcomes)
    return program, Check.of(title, passed, words, difference=worst.difference, allowed=worst.allowed)


def parity(plan: Plan, role: str, program: Program, wanted: Mapping[str, np.ndarray]) -> Iterator[Check]:
    """Every logit, and every attention row of a draft, after several blocks."""
    tokens, positions = parity_inputs(plan, role)
    state = program.new_state(len(tokens))
    result = program.prefill(state, tokens, positions, rows=program.model.rows > 0)
    found = {"logits": program.head(result.hidden)}
    if result.rows is not None:
        found["rows"] = result.rows[..., : len(tokens)]
    for name, values in found.items():
        reference, allowed = wanted[f"{role}.{name}"], float(wanted[f"{role}.{name} allowed"])
        difference = difference_of(values, reference)
        words = f"{len(tokens)} tokens; differs by {difference:.1e} of its size, {allowed:.1e} is allowed"
        if name == "logits":
            same = int(values.argmax()) == int(reference.argmax())
            words += f"; the likeliest token is {'the same' if same else 'another'}"
        passed = difference <= allowed
        yield Check.of(f"{name} of the {role}, {PERIOD} layers", passed, words, difference=difference)
