"""The self-test of a model: inputs that are the same in every build, and what JAX computes for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from specprefill_jax.aot.export import DTYPES, Shapes, state_tensors
from specprefill_jax.artifact.self_test import Expected, Piece, SelfTest, by_head, expect, rows_by_head
from specprefill_jax.models import qwen35
from specprefill_jax.models.checkpoint import load_parameters
from specprefill_jax.models.config import TextConfig
from specprefill_jax.models.parameters import Block, Model, ModelState

# Two pieces: the second starts from a state, and crosses a chunk of the delta rule where the smallest cache
# has room for it. Gaps follow the first piece and tokens of the second; far positions, where every rotary
# frequency has turned.
FIRST = 7
CHUNK = 64
SECOND = CHUNK + 2
GAPS = {FIRST: 600, FIRST + 3: 9000, FIRST + 5: 40000}
# Sums in f32 in another order: 2e-5 and less is measured (`specprefill verify` shows it).
LEAST_TOLERANCE = 2e-4
# How far rounding may go astray, in units of what leaving it out changes: two builds that round in the same
# places differ by less than one that rounds from one that does not.
ROUNDING = 4.0

Tensors: TypeAlias = dict[str, np.ndarray]
"""Tensors by name, each as groups of values."""


class _OneAtATime(tuple[Block, ...]):
    """Layers of NumPy arrays; each becomes JAX's when an iteration reaches it, and is let go of after it."""

    def __iter__(self) -> Iterator[Block]:
        return (jax.tree.map(self.convert, layer) for layer in super().__iter__())

    @staticmethod
    def convert(array: np.ndarray) -> jax.Array:
        return jnp.asarray(array)


class _OneAtATimeInF32(_OneAtATime):
    """The same numbers in f32: products then do not round their inputs to the matrices' format."""

    @staticmethod
    def convert(array: np.ndarray) -> jax.Array:
        return jnp.asarray(array).astype(jnp.float32)


def make_self_test(checkpoint: Path, config: TextConfig, shapes: Shapes) -> SelfTest:
    """Fixed tokens with gaps between their positions, and what a model must make of them in any buckets.

    The reference runs operation by operation, layer by layer from the mapped checkpoint, so that it needs
    little memory. In a format that rounds, a second run without the rounding says how much it matters.
    """
    pieces, next_token = _inputs(config, shapes.capacities[0])
    model = load_parameters(checkpoint, config, DTYPES[shapes.numerics])
    exact = _run(config, _lazy(model, _OneAtATime), pieces, next_token, shapes.rows, shapes.numerics)
    rough = exact
    if shapes.numerics != "f32":
        rough = _run(config, _lazy(model, _OneAtATimeInF32), pieces, next_token, shapes.rows, "f32")
    prefilled, decoded = (
        {name: _expected(values, other[name]) for name, values in tensors.items()}
        for tensors, other in zip(exact, rough, strict=True)
    )
    return SelfTest(pieces, next_token, prefilled, decoded)


def _inputs(config: TextConfig, capacity: int) -> tuple[tuple[Piece, ...], int]:
    """Two pieces that leave a slot for the decoded token, and that token."""
    count = min(FIRST + SECOND, capacity - 1)
    generator = np.random.default_rng(0)
    tokens = [int(token) for token in generator.integers(0, config.vocab_size, count + 1)]
    positions = np.cumsum([GAPS.get(i, 1) for i in range(count)]) - 1
    cut = (slice(0, FIRST), slice(FIRST, count))
    pieces = tuple(Piece(tuple(tokens[part]), tuple(int(p) for p in positions[part])) for part in cut)
    return pieces, tokens[-1]


def _lazy(model: Model, layers: type[_OneAtATime]) -> Model:
    return replace(
        model,
        embed_tokens=jnp.asarray(model.embed_tokens),
        layers=layers(model.layers),
        norm=jnp.asarray(model.norm),
        lm_head=None if model.lm_head is None else jnp.asarray(model.lm_head),
    )


def _run(
    config: TextConfig, model: Model, pieces: tuple[Piece, ...], next_token: int, rows: int, numerics: str
) -> tuple[Tensors, Tensors]:
    """Everything after the pieces, and after the decoded token; rows are those of the last piece.

    `numerics` is the format of the layers' matrices.
    """
    slots = sum(len(piece.tokens) for piece in pieces)
    # One length for all pieces: JAX compiles each operation for its shapes.
    block = _block(max(len(piece.tokens) for piece in pieces))
    state = qwen35.initial_state(config, slots + block, DTYPES[numerics])
    slot, hidden, returned = 0, None, None
    with jax.disable_jit():
        for piece in pieces:
            count = len(piece.tokens)
            tokens, positions = _padded(piece.tokens, block), _padded(piece.positions, block)
            shown = min(rows, count) if piece is pieces[-1] else 0
            hidden, returned, state = qwen35.prefill(
                config, model, tokens, positions, jnp.int32(count), jnp.int32(slot), state, rows=shown
            )
            slot += count
        assert hidden is not None
        prefilled = {"hidden": _vector(hidden), "logits": _vector(qwen35.head(model, hidden))}
        prefilled |= _rows(returned, rows, slots) | _state(config, state, slots)
        position = jnp.int32(pieces[-1].positions[-1] + 1)
        logits, returned, state = qwen35.decode(
            config, model, jnp.int32(next_token), position, jnp.int32(slots), state, rows=rows > 0
        )
    decoded = {"logits": _vector(logits)} | _rows(returned, rows, slots + 1)
    return prefilled, decoded | _state(config, state, slots + 1)


def _vector(values: jax.Array) -> np.ndarray:
    return np.asarray(values)[None]


def _rows(returned: Any, rows: int, slots: int) -> Tensors:
    if rows == 0:
        return {}
    shown = np.asarray(returned)[..., :slots]  # [A, H, R, slots] of prefill, [A, H, slots] of decode
    by_layer_and_head = shown.reshape(*shown.shape[:2], -1, shown.shape[-1])
    return {"rows": rows_by_head(by_layer_and_head.transpose(2, 0, 1, 3))}


def _state(config: TextConfig, state: ModelState, slots: int) -> Tensors:
    """The state by the manifest's names, of keys and values the slots in use."""
    found: Tensors = {}
    for tensor, leaf in zip(state_tensors(config, "f32"), jax.tree.leaves(state), strict=True):
        values = np.asarray(leaf, np.float32)
        if tensor.grows:
            values = values.take(np.arange(slots), axis=tensor.shape.index("C"))
        found[tensor.name] = by_head(tensor, values)
    return found


def _expected(values: np.ndarray, rough: np.ndarray) -> Expected:
    """The values as they must be, and how far off they may be."""
    strict = expect(values, LEAST_TOLERANCE)
    noise = strict.difference(rough) if rough is not values else 0.0
    return replace(strict, tolerance=float(f"{max(LEAST_TOLERANCE, ROUNDING * noise):.3g}"))


def _block(count: int) -> int:
    """A block length for `count` tokens."""
    step = CHUNK if count > CHUNK else 16
    return -(-count // step) * step


def _padded(values: tuple[int, ...], block: int) -> Int[jax.Array, " T"]:
    return jnp.asarray(np.pad(np.array(values, np.int32), (0, block - len(values))))
