"""The gated delta rule: one mixer, in a chunked form for blocks and a one-step form for decode.

Per head, with state S [value, key], decay a = exp(g), write strength beta:
    S <- a S;  S <- S + beta (v - S k) k^T;  o = S q
Source: Yang et al., "Gated Delta Networks" (arXiv 2412.06464); transformers 5.24
`torch_chunk_gated_delta_rule`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specprefill_jax.models.config import TextConfig
from specprefill_jax.models.layers import Block, scale_to_unit
from specprefill_jax.models.matrix import linear
from specprefill_jax.models.parameters import Delta, DeltaState

CHUNK = 64
# Doubling (I + A)(I + A^2)(I + A^4).. cancels in f32 beyond this size on trained weights; substitution
# outside.
SAFE = 16


def delta(
    config: TextConfig, p: Delta, state: DeltaState, x: Float[Array, "T D"], block: Block
) -> tuple[Float[Array, "T D"], DeltaState]:
    """Gated delta mixer.

    Padding leaves the state untouched: decay 1, write strength 0, tail taken at `count`.
    """
    steps = x.shape[0]
    valid = jnp.where(block.valid, 1.0, 0.0)[:, None]
    raw = linear(x, p.in_proj_qkv)
    z = linear(x, p.in_proj_z)
    beta = jax.nn.sigmoid(linear(x, p.in_proj_b)) * valid
    g = -jnp.exp(p.A_log)[None] * softplus(linear(x, p.in_proj_a) + p.dt_bias[None]) * valid

    inputs = jnp.concatenate([state.conv, raw], axis=0)
    mixed = jax.nn.silu(causal_conv(p.conv1d, inputs))
    query, key, value = split_heads(config, mixed)
    rule = one_step if steps == 1 else chunked
    out, matrix = rule(state.matrix, query, key, value, g, beta)

    gate = jax.nn.silu(z.reshape(out.shape))
    gated = scale_to_unit(out, config.rms_norm_eps) * p.norm[None, None] * gate
    out = linear(gated.reshape(steps, config.value_dim), p.out_proj)
    return out, DeltaState(conv=conv_tail(inputs, block.count, state.conv.shape[0]), matrix=matrix)


def causal_conv(
    weight: Float[Array, "kernel channels"], inputs: Float[Array, "window channels"]
) -> Float[Array, "window-kernel+1 channels"]:
    """Depthwise causal convolution; the first kernel-1 inputs are those before the block."""
    kernel = weight.shape[0]
    steps = inputs.shape[0] - kernel + 1
    return sum(
        (inputs[i : i + steps] * weight[i : i + 1] for i in range(1, kernel)), inputs[:steps] * weight[:1]
    )


def conv_tail(
    inputs: Float[Array, "window channels"], count: Int[Array, ""], keep: int
) -> Float[Array, "{keep} channels"]:
    """The last `keep` inputs up to `count`."""
    zero = jnp.zeros((), jnp.int32)
    return jax.lax.dynamic_slice(inputs, (count, zero), (keep, inputs.shape[1]), allow_negative_indices=False)


def split_heads(
    config: TextConfig, mixed: Float[Array, "T channels"]
) -> tuple[Float[Array, "T Hv dk"], Float[Array, "T Hv dk"], Float[Array, "T Hv dv"]]:
    """Unit query (scaled by dk^-1/2) and key, repeated for the value heads, and value.

    The channels are parted as heads, not as columns: a slice of columns costs a copy on the device.
    """
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    size = config.linear_key_head_dim
    heads = mixed.reshape(mixed.shape[0], 2 * key_heads + value_heads, size)
    norm = jax.lax.rsqrt(jnp.sum(heads * heads, axis=-1, keepdims=True) + 1e-6)
    repeats = value_heads // key_heads
    query = jnp.repeat((heads * (norm * size**-0.5))[:, :key_heads], repeats, axis=1)
    key = jnp.repeat((heads * norm)[:, key_heads : 2 * key_heads], repeats, axis=1)
    return query, key, heads[:, 2 * key_heads :]


def one_step(
    matrix: Float[Array, "Hv dv dk"],
    query: Float[Array, "1 Hv dk"],
    key: Float[Array, "1 Hv dk"],
    value: Float[Array, "1 Hv dv"],
    g: Float[Array, "1 Hv"],
    beta: Float[Array, "1 Hv"],
) -> tuple[Float[Array, "1 Hv dv"], Float[Array, "Hv dv dk"]]:
    """One token. Every reduction is over the last axis (see `DeltaState`).

    One reduction reads the state, for the key and for the query at once, and the write depends on it: the new
    state overwrites the donated buffer of the old one. The output then follows as
    a S q + beta (v - a S k) (k . q).
    """
    decayed = matrix * jnp.exp(g[0])[:, None, None]
    k, q = key[0], query[0]
    read = jnp.sum(decayed[:, None] * jnp.stack([k, q], axis=1)[:, :, None, :], axis=-1)  # [Hv, 2, dv]
    write = (value[0] - read[:, 0]) * beta[0][:, None]
    out = read[:, 1] + write * jnp.sum(k * q, axis=-1, keepdims=True)
    return out[None], decayed + write[:, :, None] * k[:, None, :]


def chunked(
    matrix: Float[Array, "Hv dv dk"],
    query: Float[Array, "T Hv dk"],
    key: Float[Array, "T Hv dk"],
    value: Float[Array, "T Hv dv"],
    g: Float[Array, "T Hv"],
    beta: Float[Array, "T Hv"],
) -> tuple[Float[Array, "T Hv dv"], Float[Array, "Hv dv dk"]]:
    """The same rule over chunks of 64 tokens; unrolled, since a loop would return to the host between chunks.

    Within a chunk the writes solve (I - A) [U | W] = beta [v | k e^G]; across chunks the state moves by
    S' = e^G S + (U - W S^T)^T K~ = e^G S - S (W^T K~) + U^T K~, so that one product per chunk is serial and
    the rest is batched over chunks. Names ending in `_t` are held transposed: every product is then a plain
    [m, k] x [k, n].
    """
    steps, heads = g.shape
    size = min(CHUNK, steps)
    chunks = steps // size

    def rows(x: Float[Array, "T Hv d"]) -> Float[Array, "chunks Hv size d"]:
        return x.reshape(chunks, size, heads, -1).transpose(0, 2, 1, 3)

    def columns(x: Float[Array, "T Hv d"]) -> Float[Array, "chunks Hv d size"]:
        return x.reshape(chunks, size, heads, -1).transpose(0, 2, 3, 1)

    k, k_t, q_t, v_t = rows(key), columns(key), columns(query), columns(value)
    upper = jnp.asarray(np.triu(np.ones((size, size), np.float32)))  # [earlier, later]
    write = columns(beta[..., None])  # [chunks, Hv, 1, size]
    total = columns(g[..., None]) @ upper  # G: g summed up to each token
    total_t = upper.T @ rows(g[..., None])
    decay_t = upper[None, None] * jnp.exp(jnp.minimum(total - total_t, 0.0))

    solved_t = solve_upper(k @ k_t * decay_t, write)
    u_t = v_t @ solved_t
    w_t = (k_t * jnp.exp(total)) @ solved_t

    last = total[..., -1:]
    left = k * jnp.exp(last - total_t)
    lost = w_t @ left
    gain = u_t @ left
    entering = [matrix]
    for i in range(chunks - 1):
        entering.append(jnp.exp(last[i]) * entering[i] - entering[i] @ lost[i] + gain[i])

    # One product reads the entering states, and the state that leaves depends on it: the leaving state
    # overwrites the donated buffer of the entering one, and the compiler does not see that they are the same
    # memory.
    read_t = jnp.stack(entering) @ jnp.concatenate([w_t, q_t], axis=-1)
    written_t = u_t - read_t[..., :size]
    out_t = read_t[..., size:] * jnp.exp(total) + written_t @ (k @ q_t * decay_t)
    leaving = jnp.exp(last[-1]) * entering[-1] + written_t[-1] @ left[-1]
    return out_t.transpose(0, 3, 1, 2).reshape(steps, heads, -1), leaving


def solve_upper(
    m: Float[Array, "*batch size size"], write: Float[Array, "*batch 1 size"]
) -> Float[Array, "*batch size size"]:
    """X with Xᵀ = (I + diag(write) L)^-1 diag(write), L the strict lower part of mᵀ: [earlier, later].

    Doubling inside blocks of 16, substitution between blocks: doubling over all of a chunk of 64 loses every
    digit in f32 on trained weights (slow decay, repeated keys). Blocks are masks on full products, not
    slices, which would each cost a copy on the device. Round i of the substitution makes block column i
    final.
    """
    size = m.shape[-1]
    block = np.arange(size) // SAFE
    strict = np.triu(np.ones((size, size), np.float32), 1)
    same = strict * (block[:, None] == block[None, :])
    power = m * (-write * same[None, None])
    inverse, reach = jnp.eye(size)[None, None] + power, 2
    while reach < min(size, SAFE):
        power = power @ power
        inverse = inverse + power @ inverse
        reach *= 2
    diagonal = inverse * write.swapaxes(-1, -2)
    if size <= SAFE:
        return diagonal
    between = (m * (same - strict)[None, None]) @ diagonal
    solved = diagonal
    for _ in range(1, -(-size // SAFE)):
        solved = diagonal + solved @ between
    return solved


def softplus(x: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    return jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
