"""The gated delta rule: by hand, against its definition in f64, and on the keys of trained weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float
from tokenizers import Tokenizer
from transformers.models.qwen3_5 import modeling_qwen3_5

from specprefill_jax.models import delta
from specprefill_jax.models.layers import Block
from tests.models.reference import DEMO, TOLERANCE, Reference, load_pair


@dataclass(frozen=True)
class Inputs:
    """Arguments of the rule, f32: unit keys, queries scaled by dk^-1/2."""

    matrix: Float[np.ndarray, "Hv dv dk"]
    query: Float[np.ndarray, "T Hv dk"]
    key: Float[np.ndarray, "T Hv dk"]
    value: Float[np.ndarray, "T Hv dv"]
    g: Float[np.ndarray, "T Hv"]
    beta: Float[np.ndarray, "T Hv"]

    def arrays(self) -> tuple[Array, ...]:
        """Matrix; heads: queries and keys by turns, then values; gates: strengths, then decays g."""
        steps, heads, size = self.key.shape
        pairs = np.stack([self.query, self.key], axis=2).reshape(steps, 2 * heads, size)
        gates = np.concatenate([self.beta, self.g], axis=1).T
        parts = (self.matrix, np.concatenate([pairs, self.value], axis=1).transpose(1, 0, 2), gates)
        return tuple(jnp.asarray(part, jnp.float32) for part in parts)


def random_inputs(steps: int, *, heads: int = 2, size: int = 8) -> Inputs:
    rng = np.random.default_rng(steps)
    query, key, value = rng.standard_normal((3, steps, heads, size)).astype(np.float32)
    return Inputs(
        matrix=rng.standard_normal((heads, size, size)).astype(np.float32),
        query=unit(query) * np.float32(size**-0.5),
        key=unit(key),
        value=value,
        g=-rng.exponential(0.2, (steps, heads)).astype(np.float32),
        beta=rng.uniform(0, 1, (steps, heads)).astype(np.float32),
    )


def unit(x: Float[np.ndarray, "*batch d"]) -> Float[np.ndarray, "*batch d"]:
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + np.float32(1e-6))


def by_definition(inputs: Inputs) -> tuple[Float[np.ndarray, "T Hv dv"], Float[np.ndarray, "Hv dv dk"]]:
    """S <- e^g S;  S <- S + beta (v - S k) k^T;  o = S q, token by token in f64."""
    state = inputs.matrix.astype(np.float64)
    outputs = []
    parts = (inputs.query, inputs.key, inputs.value, inputs.g, inputs.beta)
    for query, key, value, g, beta in zip(*(part.astype(np.float64) for part in parts), strict=True):
        state = state * np.exp(g)[:, None, None]
        read = np.einsum("hvk,hk->hv", state, key)
        write = (value - read) * beta[:, None]
        state = state + write[:, :, None] * key[:, None, :]
        outputs.append(np.einsum("hvk,hk->hv", state, query))
    return np.stack(outputs), state


F32, F16 = np.dtype(np.float32), np.dtype(np.float16)
chunked = partial(jax.jit(delta.chunked, static_argnames=("products", "chunk")), products=F32)


def worst(inputs: Inputs, rule: Callable[..., Any]) -> float:
    """Largest difference of a rule's outputs and matrix from the definition, as a part of their scale."""
    out, matrix = rule(*inputs.arrays())
    pairs = zip((out.transpose(1, 0, 2), matrix), by_definition(inputs), strict=True)
    return max(float(np.abs(np.asarray(got) - want).max() / np.abs(want).max()) for got, want in pairs)


def test_one_step_by_hand() -> None:
    # Halved, rows (1, 2) and (3, 4) read 0.5 and 1.5 under the key; written is half of what lacks, (2, 1).
    out, matrix = delta.one_step(
        matrix=jnp.array([[[1.0, 2.0], [3.0, 4.0]]]),
        heads=jnp.array([[[1.0, 1.0]], [[1.0, 0.0]], [[4.5, 3.5]]]),  # query, key, value
        gates=jnp.array([[0.5], [0.5]]),  # write strength, decay
    )
    np.testing.assert_allclose(matrix, [[[2.5, 1.0], [2.5, 2.0]]], rtol=1e-6)
    np.testing.assert_allclose(out, [[[3.5, 4.5]]], rtol=1e-6)


def test_a_key_written_twice_within_a_chunk_is_corrected_not_added() -> None:
    # Token 1 stores 8 under the key in full. Token 2 wants 4 there, at strength one half: 8 + (4 - 8) / 2.
    out, matrix = chunked(
        jnp.zeros((1, 2, 2)),
        jnp.array([[[1.0, 1.0]] * 2, [[0.0, 1.0]] * 2, [[8.0, 0.0], [4.0, 0.0]]]),
        jnp.array([[1.0, 0.5], [0.0, 0.0]]),
    )
    np.testing.assert_allclose(out, [[[8.0, 0.0], [6.0, 0.0]]], rtol=1e-6)
    np.testing.assert_allclose(matrix, [[[0.0, 6.0], [0.0, 0.0]]], rtol=1e-6)


@pytest.mark.parametrize("steps", [2, 8, 16, 32, 48, 64, 128, 256])
def test_chunks_follow_the_definition(steps: int) -> None:
    assert worst(random_inputs(steps), chunked) < 1e-5


@pytest.mark.parametrize(("steps", "chunk"), [(128, 128), (192, 192), (256, 256), (320, 64), (512, 256)])
def test_so_do_the_larger_chunks_of_devices_with_matrix_units(steps: int, chunk: int) -> None:
    assert worst(random_inputs(steps), partial(chunked, chunk=chunk)) < 1e-5


def test_f16_products_stay_within_their_rounding() -> None:
    # 2^-11 is the rounding of one operand; 7.6e-4 is measured.
    assert worst(random_inputs(512, heads=4, size=32), partial(chunked, products=F16)) < 4e-3


def test_one_step_at_a_time_equals_chunks() -> None:
    inputs = random_inputs(128)
    matrix, heads, gates = inputs.arrays()
    value_heads = len(gates) // 2
    steps = jnp.concatenate([gates[:value_heads], jnp.exp(gates[value_heads:])])
    one_step = jax.jit(delta.one_step)
    outputs = []
    for t in range(128):
        out, matrix = one_step(matrix, heads[:, t : t + 1], steps[:, t : t + 1])
        outputs.append(out.reshape(value_heads, 1, -1))
    chunked_out, chunked_matrix = chunked(*inputs.arrays())
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), chunked_out, atol=1e-5)
    np.testing.assert_allclose(matrix, chunked_matrix, atol=1e-5)


@pytest.mark.parametrize("products", [F32, F16], ids=str)
def test_tokens_without_decay_and_write_leave_the_matrix_bit_for_bit(products: np.dtype) -> None:
    matrix, heads, gates = random_inputs(128).arrays()
    _, after = chunked(matrix, heads, jnp.zeros_like(gates), products=products)
    np.testing.assert_array_equal(after, matrix)


def test_one_token_without_decay_and_write_does_too() -> None:
    matrix, heads, gates = random_inputs(1).arrays()
    untouched = jnp.concatenate([jnp.zeros_like(gates[:2]), jnp.ones_like(gates[2:])])
    _, after = jax.jit(delta.one_step)(matrix, heads, untouched)
    np.testing.assert_array_equal(after, matrix)


def test_convolution_reads_the_inputs_before_the_block() -> None:
    weight = jnp.array([[1.0], [10.0], [100.0]])  # oldest input first
    # Two before the block, two in it; beside them z, which the convolution does not read.
    inputs = jnp.array([[1.0, 7.0], [2.0, 7.0], [3.0, 7.0], [4.0, 7.0]])
    got = delta.convolved_heads(weight, inputs, size=1)
    np.testing.assert_allclose(got, [[[321.0], [432.0]]])  # of such numbers SiLU is the identity


@pytest.mark.parametrize(
    ("count", "kept"),
    [(0, [1.0, 2.0, 3.0]), (1, [2.0, 3.0, 4.0]), (2, [3.0, 4.0, 5.0]), (5, [6.0, 7.0, 8.0])],
    ids=["none: all stay", "one token: two stay from before", "two tokens", "a full block"],
)
def test_the_next_block_gets_the_last_three_valid_inputs(count: int, kept: list[float]) -> None:
    inputs = jnp.arange(1.0, 9.0)[:, None]  # three before the block, five in it
    table = jnp.zeros((5, 1))
    valid = jnp.arange(5) < count
    block = Block(valid, jnp.int32(count), jnp.int32(0), mask=table, cos=table, sin=table, rows=0)
    got = delta.kept_inputs(inputs, inputs[:3], block)
    np.testing.assert_array_equal(got[:, 0], kept)


@pytest.fixture(scope="module")
def trained() -> list[Inputs]:
    """What the delta layers of the demo target are given on an example's first 448 tokens, layer by layer."""
    example = json.loads((DEMO / "examples.jsonl").read_text().splitlines()[7])
    ids = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(example["prompt"]).ids[:448]
    return list(recorded(np.array(ids)))


def recorded(ids: np.ndarray) -> Iterator[Inputs]:
    calls: list[tuple[np.ndarray, ...]] = []
    original = modeling_qwen3_5.torch_chunk_gated_delta_rule

    def record(query: Any, key: Any, value: Any, g: Any, beta: Any, **options: Any) -> Any:
        calls.append(tuple(x[0].numpy().copy() for x in (query, key, value, g, beta)))
        return original(query, key, value, g=g, beta=beta, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", record)
        Reference(load_pair(DEMO / "target").reference).feed(ids, np.arange(len(ids)))
    assert len(calls) == 6
    for query, key, value, g, beta in calls:
        _, heads, size = key.shape
        zero = np.zeros((heads, value.shape[-1], size), np.float32)
        yield Inputs(zero, unit(query) * np.float32(size**-0.5), unit(key), value, g, beta)


@pytest.mark.parametrize("chunk", [64, 448])
def test_chunks_keep_their_digits_on_trained_weights(trained: list[Inputs], chunk: int) -> None:
    assert max(worst(inputs, partial(chunked, chunk=chunk)) for inputs in trained) < TOLERANCE


def test_f16_products_keep_theirs_too(trained: list[Inputs]) -> None:
    # 2^-11 is the rounding of one operand; 3.9e-3 is measured.
    assert max(worst(inputs, partial(chunked, products=F16)) for inputs in trained) < 1e-2


def test_doubling_over_a_whole_chunk_would_lose_them(trained: list[Inputs]) -> None:
    """Why the delta rule solves a chunk's 64x64 system block by block; random weights hide the difference.

    (I - A)^-1 = (I + A)(I + A^2)(I + A^4).. holds for exact numbers. On trained weights the powers of A are
    so large before they cancel that in f32 the inverse is wrong by many times its largest element.
    """

    def error(inputs: Inputs) -> float:
        exact = np.linalg.inv(np.eye(64) - chunk_systems(inputs))
        power = chunk_systems(inputs).astype(np.float32)
        inverse = np.eye(64, dtype=np.float32) + power
        for _ in range(5):
            power = power @ power
            inverse = inverse + inverse @ power
        return float(np.abs(inverse - exact).max() / np.abs(exact).max())

    assert error(random_inputs(448, size=32)) < TOLERANCE
    assert max(error(inputs) for inputs in trained) > 1.0


def chunk_systems(inputs: Inputs) -> Float[np.ndarray, "chunks Hv 64 64"]:
    """A of each chunk in f64: -beta_i e^(G_i - G_j) k_i.k_j for j < i, G being g summed up to a token."""
    steps, heads, size = inputs.key.shape
    key = inputs.key.astype(np.float64).reshape(steps // 64, 64, heads, size).transpose(0, 2, 1, 3)
    beta, g = (
        x.astype(np.float64).reshape(steps // 64, 64, heads).transpose(0, 2, 1)
        for x in (inputs.beta, inputs.g)
    )
    total = np.cumsum(g, axis=-1)
    decay = np.exp(np.minimum(total[..., :, None] - total[..., None, :], 0.0))
    return np.tril(-beta[..., :, None] * decay * (key @ key.transpose(0, 1, 3, 2)), -1)
