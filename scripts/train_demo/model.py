"""Qwen3.5 text for training: batches of whole sequences, and a gradient that a CPU computes fast.

The serving model (`specprefill_jax.models`) reads one sequence in blocks from a state; here is no state.
Parameters are a dict under the checkpoint's own names, in its shapes, so that saving is writing them down.
`tests/test_train_demo.py` holds this model against the serving one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specprefill_jax.models.config import TextConfig

Parameters = dict[str, Array]

CHUNK = 32  # tokens that the delta rule solves for at once
SOLVED = 16  # of which a series solves; longer, it cancels in f32
QUERIES = 256  # attention works on so many queries at once where a sequence is longer


def initial(config: TextConfig, seed: int, memory: tuple[float, float], sharpness: float) -> Parameters:
    """Fresh parameters.

    Args:
        memory: The range of the delta layers' time steps dt; a head forgets over about 1/dt tokens.
        sharpness: What the norms of queries and keys start from, above their 1.
    """
    random, parameters = np.random.default_rng(seed), {}
    for name, shape in shapes(config).items():
        end = name.split(".", 3)[-1]
        if end.endswith(("q_norm.weight", "k_norm.weight")):
            value = np.full(shape, sharpness)
        elif end == "linear_attn.norm.weight":
            value = np.ones(shape)
        elif end == "linear_attn.A_log":
            value = np.zeros(shape)
        elif end == "linear_attn.dt_bias":
            value = step_bias(shape[0], memory)
        elif end == "linear_attn.conv1d.weight":
            value = random.standard_normal(shape) * 0.3
            value[..., -1] += 0.7
        elif len(shape) == 1:
            value = np.zeros(shape)
        else:
            value = random.standard_normal(shape) * shape[1] ** -0.5
            if end.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
                value *= (2 * config.num_hidden_layers) ** -0.5
            if end == "linear_attn.in_proj_a.weight":
                value *= 0.3
        parameters[name] = jnp.asarray(value, jnp.float32)
    return parameters


def step_bias(heads: int, memory: tuple[float, float]) -> np.ndarray:
    """The bias with which softplus gives time steps spread over a range."""
    low, high = np.log(memory)
    return np.log(np.expm1(np.exp(np.linspace(low, high, heads))))


def shapes(config: TextConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's shape by its name in the checkpoint."""
    width, head = config.hidden_size, config.head_dim
    found = {"model.embed_tokens.weight": (config.vocab_size, width), "model.norm.weight": (width,)}
    for index, kind in enumerate(config.layer_types):
        layer = f"model.layers.{index}."
        found[layer + "input_layernorm.weight"] = (width,)
        found[layer + "post_attention_layernorm.weight"] = (width,)
        found[layer + "mlp.gate_proj.weight"] = (config.intermediate_size, width)
        found[layer + "mlp.up_proj.weight"] = (config.intermediate_size, width)
        found[layer + "mlp.down_proj.weight"] = (width, config.intermediate_size)
        if kind == "full_attention":
            mixer, queries = layer + "self_attn.", config.num_attention_heads * head
            found[mixer + "q_proj.weight"] = (2 * queries, width)
            found[mixer + "k_proj.weight"] = (config.num_key_value_heads * head, width)
            found[mixer + "v_proj.weight"] = (config.num_key_value_heads * head, width)
            found[mixer + "o_proj.weight"] = (width, queries)
            found[mixer + "q_norm.weight"] = found[mixer + "k_norm.weight"] = (head,)
        else:
            mixer, heads = layer + "linear_attn.", config.linear_num_value_heads
            found[mixer + "in_proj_qkv.weight"] = (config.conv_channels, width)
            found[mixer + "in_proj_z.weight"] = (config.value_dim, width)
            found[mixer + "in_proj_b.weight"] = found[mixer + "in_proj_a.weight"] = (heads, width)
            found[mixer + "conv1d.weight"] = (config.conv_channels, 1, config.linear_conv_kernel_dim)
            found[mixer + "A_log"] = found[mixer + "dt_bias"] = (heads,)
            found[mixer + "norm.weight"] = (config.linear_value_head_dim,)
            found[mixer + "out_proj.weight"] = (width, config.value_dim)
    return found


@dataclass(frozen=True)
class Gaps:
    """What delta layers do where positions have gaps; the default is what the serving model does: nothing.

    Attributes:
        decay: How many times the head's mean decay of a token a skipped one counts.
        cut: Whether the convolution reads zeros from before a gap.
    """

    decay: float = 0.0
    cut: bool = False


NO_GAPS = Gaps()


def logits(
    config: TextConfig,
    parameters: Parameters,
    tokens: Int[Array, "B T"],
    *,
    layers: int | None = None,
    positions: Int[Array, "B T"] | None = None,
    gaps: Gaps = NO_GAPS,
) -> Float[Array, "B T V"]:
    """Next-token logits at every position, by the first `layers` layers (None: all).

    T is a multiple of `CHUNK`, and of `QUERIES` where it is longer. `positions` are ascending; None: 0..T-1.
    """
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    embedding = parameters["model.embed_tokens.weight"]
    x = embedding[tokens]
    for index, kind in enumerate(config.layer_types[:layers]):
        layer = part(parameters, f"model.layers.{index}.")
        normed = rms_norm(x, layer["input_layernorm.weight"], config.rms_norm_eps)
        if kind == "full_attention":
            x = x + attention(config, part(layer, "self_attn."), normed, positions)
        else:
            x = x + delta(config, part(layer, "linear_attn."), normed, positions, gaps)
        normed = rms_norm(x, layer["post_attention_layernorm.weight"], config.rms_norm_eps)
        gate, up = normed @ layer["mlp.gate_proj.weight"].T, normed @ layer["mlp.up_proj.weight"].T
        x = x + (jax.nn.silu(gate) * up) @ layer["mlp.down_proj.weight"].T
    return rms_norm(x, parameters["model.norm.weight"], config.rms_norm_eps) @ embedding.T


def part(parameters: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    """What lies under a prefix, without it."""
    return {name.removeprefix(prefix): p for name, p in parameters.items() if name.startswith(prefix)}


def rms_norm(x: Float[Array, "*batch d"], weight: Float[Array, " d"], eps: float) -> Float[Array, "*batch d"]:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * (1 + weight)


def rotated(
    config: TextConfig, x: Float[Array, "B T h d"], positions: Int[Array, "B T"]
) -> Float[Array, "B T h d"]:
    """Rotary positions on the first part of each head."""
    half = config.rotary_dim // 2
    frequencies = config.rope_theta ** -(jnp.arange(half, dtype=jnp.float32) / half)
    angles = (positions.astype(jnp.float32)[..., None] * frequencies)[:, :, None]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def attention(
    config: TextConfig, p: dict[str, Array], x: Float[Array, "B T D"], positions: Int[Array, "B T"]
) -> Float[Array, "B T D"]:
    """Gated full attention."""
    batch, steps, _ = x.shape
    size, keys, heads = config.head_dim, config.num_key_value_heads, config.num_attention_heads
    q, gate = jnp.split((x @ p["q_proj.weight"].T).reshape(batch, steps, heads, 2 * size), 2, axis=-1)
    k = (x @ p["k_proj.weight"].T).reshape(batch, steps, keys, size)
    v = (x @ p["v_proj.weight"].T).reshape(batch, steps, keys, size).transpose(0, 2, 1, 3)
    q = rotated(config, rms_norm(q, p["q_norm.weight"], config.rms_norm_eps), positions) * size**-0.5
    k = rotated(config, rms_norm(k, p["k_norm.weight"], config.rms_norm_eps), positions).transpose(0, 2, 1, 3)
    q = q.reshape(batch, steps, keys, -1, size).transpose(0, 2, 3, 1, 4)

    def some(queries: Array, start: int, end: int) -> Array:
        """What queries [start, end) take from the tokens up to them; those after `end` are not even read."""
        scores = jnp.einsum("bkgtd,bksd->bkgts", queries, k[:, :, :end])
        seen = np.arange(end)[None, :] <= np.arange(start, end)[:, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
        return jnp.einsum("bkgts,bksd->bkgtd", weights, v[:, :, :end])

    count = min(steps, QUERIES)
    lean = some if steps <= count else jax.checkpoint(some, static_argnums=(1, 2))
    found = [lean(q[:, :, :, i : i + count], i, i + count) for i in range(0, steps, count)]
    out = jnp.concatenate(found, axis=3).transpose(0, 3, 1, 2, 4).reshape(batch, steps, heads, size)
    return (out * jax.nn.sigmoid(gate)).reshape(batch, steps, -1) @ p["o_proj.weight"].T


def delta(
    config: TextConfig,
    p: dict[str, Array],
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    gaps: Gaps,
) -> Float[Array, "B T D"]:
    """The gated delta rule over chunks of tokens (see `specprefill_jax.models.delta`)."""
    batch, steps, _ = x.shape
    size, heads, key_heads = (
        config.linear_value_head_dim,
        config.linear_num_value_heads,
        config.linear_num_key_heads,
    )
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    joined = jnp.concatenate([p[f"{name}.weight"] for name in names])
    ends = np.cumsum([config.conv_channels, config.value_dim, heads]).tolist()
    qkv, z, b, a = jnp.split(x @ joined.T, ends, axis=-1)
    qkv = convolved(p["conv1d.weight"], qkv, positions if gaps.cut else None)
    q, k, v = jnp.split(qkv, [config.key_dim, 2 * config.key_dim], axis=-1)
    q, k = (unit(each.reshape(batch, steps, key_heads, -1)) for each in (q, k))
    q, k = (jnp.repeat(each, heads // key_heads, axis=2) for each in (q * q.shape[-1] ** -0.5, k))
    strength = jax.nn.sigmoid(b)
    decay = -jnp.exp(p["A_log"]) * jax.nn.softplus(a + p["dt_bias"])
    if gaps.decay:
        skipped = (jnp.diff(positions, axis=1, prepend=-1) - 1).astype(jnp.float32)
        decay = decay + gaps.decay * skipped[..., None] * decay.mean(axis=1, keepdims=True)

    def by_chunk(each: Array) -> Array:
        split = each.reshape(batch, steps // CHUNK, CHUNK, heads, -1)
        return split.transpose(1, 0, 3, 2, 4)  # [chunk, B, head, token, *]

    q, k, v = by_chunk(q), by_chunk(k), by_chunk(v.reshape(batch, steps, heads, size))
    out = over_chunks(q, k, v, by_chunk(strength), by_chunk(decay)[..., 0])
    out = out.transpose(1, 0, 3, 2, 4).reshape(batch, steps, heads, size)
    out = out * jax.lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + config.rms_norm_eps)
    out = out * p["norm.weight"] * jax.nn.silu(z.reshape(batch, steps, heads, size))
    return out.reshape(batch, steps, -1) @ p["out_proj.weight"].T


def convolved(
    weight: Float[Array, "ch 1 K"], x: Float[Array, "B T ch"], positions: Int[Array, "B T"] | None
) -> Float[Array, "B T ch"]:
    """Depthwise causal convolution and SiLU; with `positions`, zeros are read from before a gap."""
    kernel, steps = weight.shape[-1], x.shape[1]
    padded = jnp.pad(x, ((0, 0), (kernel - 1, 0), (0, 0)))
    total = jnp.zeros_like(x)
    for i in range(kernel):
        tap, back = padded[:, i : i + steps], kernel - 1 - i
        if positions is not None and back:
            before = jnp.pad(positions, ((0, 0), (back, 0)), constant_values=-1)[:, :steps]
            tap = tap * (positions - before == back).astype(jnp.float32)[..., None]
        total = total + tap * weight[:, 0, i]
    return jax.nn.silu(total)


def unit(x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def over_chunks(
    q: Float[Array, "N B h t d"],
    k: Float[Array, "N B h t d"],
    v: Float[Array, "N B h t d"],
    strength: Float[Array, "N B h t 1"],
    g: Float[Array, "N B h t"],
) -> Float[Array, "N B h t d"]:
    """Outputs of the rule from zero state; `g` is the logarithm of the decay."""
    size = v.shape[-1]
    sums = jnp.cumsum(g, axis=-1)
    lower = np.tril(np.ones((CHUNK, CHUNK), bool))
    since = jnp.where(lower, sums[..., :, None] - sums[..., None, :], 0.0)
    decay = jnp.where(lower, jnp.exp(since), 0.0)
    turned, written = jnp.swapaxes(k, -1, -2), k * strength
    a = jnp.where(np.tril(lower, -1), -(written @ turned) * decay, 0.0)
    into = jnp.exp(sums)[..., None]
    solved = inverse(a) @ jnp.concatenate([v * strength, written * into], axis=-1)
    overlap = (q @ turned) * decay
    left = jnp.swapaxes(k * jnp.exp(sums[..., -1:] - sums)[..., None], -1, -2)
    whole = jnp.exp(sums[..., -1])[..., None, None]

    def step(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        solved, overlap, query, left, whole = chunk
        read = jnp.concatenate([solved[..., size:], query], axis=-2) @ state
        writes = solved[..., :size] - read[..., :CHUNK, :]
        return state * whole + left @ writes, read[..., CHUNK:, :] + overlap @ writes

    state = jnp.zeros((*q.shape[1:3], q.shape[-1], size), jnp.float32)
    return jax.lax.scan(step, state, (solved, overlap, q * into, left, whole))[1]


@jax.custom_vjp
def inverse(a: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    """(I - a)^-1 of a strictly lower triangular matrix: a series in blocks, substitution between them."""
    found = jnp.zeros_like(a)
    for start in range(0, a.shape[-1], SOLVED):
        rows = slice(start, start + SOLVED)
        block = series(a[..., rows, rows])
        found = found.at[..., rows, rows].set(block)
        if start:
            between = a[..., rows, :start] @ found[..., :start, :start]
            found = found.at[..., rows, :start].set(block @ between)
    return found


def series(a: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    """I + a + a^2 + .. + a^(n-1), doubling the terms."""
    found, power, terms = jnp.eye(a.shape[-1], dtype=a.dtype) + a, a, 2
    while terms < a.shape[-1]:
        power = power @ power
        found, terms = found + found @ power, 2 * terms
    return found


def _inverse_forward(a: Array) -> tuple[Array, Array]:
    found = inverse(a)
    return found, found


def _inverse_backward(found: Array, gradient: Array) -> tuple[Array]:
    turned = jnp.swapaxes(found, -1, -2)
    return (turned @ gradient @ turned,)


inverse.defvjp(_inverse_forward, _inverse_backward)
