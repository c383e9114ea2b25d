"""The gated delta rule: by hand, against its definition in f64, and on the keys of trained weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float
from tokenizers import Tokenizer
from transformers.models.qwen3_5 import modeling_qwen3_5

from specprefill_jax.models import delta
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
        heads = np.concatenate([self.query, self.key, self.value], axis=1)
        parts = (self.matrix, heads.transpose(1, 0, 2), self.g, self.beta)
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


def worst(inputs: Inputs, rule: Callable[..., Any]) -> float:
    """Largest difference of a rule's outputs and matrix from the definition, as a part of their scale."""
    pairs = zip(rule(*inputs.arrays()), by_definition(inputs), strict=True)
    return max(float(np.abs(np.asarray(got) - want).max() / np.abs(want).max()) for got, want in pairs)


def test_one_step_by_hand() -> None:
    # Halved, rows (1, 2) and (3, 4) read 0.5 and 1.5 under the key; written is half of what lacks, (2, 1).
    out, matrix = delta.one_step(
        matrix=jnp.array([[[1.0, 2.0], [3.0, 4.0]]]),
        heads=jnp.array([[[1.0, 1.0]], [[1.0, 0.0]], [[4.5, 3.5]]]),  # query, key, value
        g=jnp.log(jnp.array([[0.5]])),
        beta=jnp.array([[0.5]]),
    )
    np.testing.assert_allclose(matrix, [[[2.5, 1.0], [2.5, 2.0]]], rtol=1e-6)
    np.testing.assert_allclose(out, [[[3.5, 4.5]]], rtol=1e-6)


def test_a_key_written_twice_within_a_chunk_is_corrected_not_added() -> None:
    # Token 1 stores 8 under the key in full. Token 2 wants 4 there, at strength one half: 8 + (4 - 8) / 2.
    out, matrix = delta.chunked(
        matrix=jnp.zeros((1, 2, 2)),
        heads=jnp.array([[[1.0, 1.0]] * 2, [[0.0, 1.0]] * 2, [[8.0, 0.0], [4.0, 0.0]]]),
        g=jnp.zeros((2, 1)),
        beta=jnp.array([[1.0], [0.5]]),
    )
    np.testing.assert_allclose(out, [[[8.0, 0.0]], [[6.0, 0.0]]], rtol=1e-6)
    np.testing.assert_allclose(matrix, [[[0.0, 6.0], [0.0, 0.0]]], rtol=1e-6)


@pytest.mark.parametrize("steps", [2, 8, 16, 32, 48, 64, 128, 256])
def test_chunks_follow_the_definition(steps: int) -> None:
    assert worst(random_inputs(steps), jax.jit(delta.chunked)) < 1e-5


def test_one_step_at_a_time_equals_chunks() -> None:
    inputs = random_inputs(128)
    matrix, heads, g, beta = inputs.arrays()
    one_step = jax.jit(delta.one_step)
    outputs = []
    for t in range(128):
        out, matrix = one_step(matrix, heads[:, t : t + 1], g[t : t + 1], beta[t : t + 1])
        outputs.append(out)
    chunked_out, chunked_matrix = jax.jit(delta.chunked)(*inputs.arrays())
    np.testing.assert_allclose(jnp.concatenate(outputs), chunked_out, atol=1e-5)
    np.testing.assert_allclose(matrix, chunked_matrix, atol=1e-5)


@pytest.mark.parametrize("rule", [delta.one_step, delta.chunked], ids=["one step", "chunks"])
def test_tokens_without_decay_and_write_leave_the_matrix_bit_for_bit(rule: Callable[..., Any]) -> None:
    steps = 1 if rule is delta.one_step else 128
    inputs = random_inputs(steps)
    matrix, heads, g, beta = inputs.arrays()
    _, after = jax.jit(rule)(matrix, heads, jnp.zeros_like(g), jnp.zeros_like(beta))
    np.testing.assert_array_equal(after, matrix)


def test_convolution_reads_the_inputs_before_the_block() -> None:
    weight = jnp.array([[1.0], [10.0], [100.0]])  # oldest input first
    inputs = jnp.array([[1.0], [2.0], [3.0], [4.0]])  # two before the block, two in it
    np.testing.assert_array_equal(delta.causal_conv(weight, inputs), [[321.0], [432.0]])


@pytest.mark.parametrize(
    ("count", "tail"),
    [(1, [2.0, 3.0, 4.0]), (2, [3.0, 4.0, 5.0]), (5, [6.0, 7.0, 8.0])],
    ids=["one token: two stay from before", "two tokens", "a full block"],
)
def test_the_next_block_gets_the_last_three_valid_inputs(count: int, tail: list[float]) -> None:
    inputs = jnp.arange(1.0, 9.0)[:, None]  # three before the block, five in it
    got = delta.conv_tail(inputs, jnp.int32(count), 3)
    np.testing.assert_array_equal(got[:, 0], tail)


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


def test_chunks_keep_their_digits_on_trained_weights(trained: list[Inputs]) -> None:
    chunked = jax.jit(delta.chunked)
    assert max(worst(inputs, chunked) for inputs in trained) < TOLERANCE


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
