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
# Series (I + A)(I + A^2)(I + A^4).. over more tokens than this cancel in f32 on trained weights.
SAFE = 8


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
    heads = mixed.reshape(steps, -1, config.linear_key_head_dim).transpose(1, 0, 2)
    rule = one_step if steps == 1 else chunked
    out, matrix = rule(state.matrix, unit_heads(config, heads), g, beta)

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


def unit_heads(config: TextConfig, heads: Float[Array, "E T d"]) -> Float[Array, "E T d"]:
    """Queries and keys at unit length, queries times dk^-1/2 as well; values as they are."""
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    size = config.linear_key_head_dim
    factor = np.repeat([size**-0.5, 1.0, 0.0], [key_heads, key_heads, value_heads]).astype(np.float32)
    untouched = np.where(factor == 0.0, 1.0, 0.0).astype(np.float32)
    norm = jax.lax.rsqrt(jnp.sum(heads * heads, axis=-1, keepdims=True) + 1e-6)
    return heads * (norm * factor[:, None, None] + untouched[:, None, None])


def one_step(
    matrix: Float[Array, "Hv dv dk"],
    heads: Float[Array, "E 1 d"],
    g: Float[Array, "1 Hv"],
    beta: Float[Array, "1 Hv"],
) -> tuple[Float[Array, "1 Hv dv"], Float[Array, "Hv dv dk"]]:
    """One token. Every reduction is over the last axis (see `DeltaState`).

    One reduction reads the state, for the query and for the key at once, and the write depends on it: the new
    state overwrites the donated buffer of the old one. The output then follows as
    a S q + beta (v - a S k) (k . q).
    """
    value_heads, size, _ = matrix.shape
    key_heads = (heads.shape[0] - value_heads) // 2
    grouped = (key_heads, value_heads // key_heads)
    q_k = heads[: 2 * key_heads].reshape(2, key_heads, 1, size)
    value = heads[2 * key_heads :].reshape(*grouped, size)
    entering = matrix.reshape(*grouped, size, size)
    decay, strength = jnp.exp(g[0]).reshape(*grouped, 1), beta[0].reshape(*grouped, 1)

    read = jnp.sum(entering[None] * q_k[:, :, :, None], axis=-1) * decay[None]  # [2, Hk, Hv/Hk, dv]
    q, k = q_k[0], q_k[1]
    write = (value - read[1]) * strength
    out = read[0] + write * jnp.sum(k * q, axis=-1, keepdims=True)
    leaving = entering * decay[..., None] + write[..., None] * k[:, :, None]
    return out.reshape(1, value_heads, size), leaving.reshape(matrix.shape)


def chunked(
    matrix: Float[Array, "Hv dv dk"],
    heads: Float[Array, "E T d"],
    g: Float[Array, "T Hv"],
    beta: Float[Array, "T Hv"],
) -> tuple[Float[Array, "T Hv dv"], Float[Array, "Hv dv dk"]]:
    """The same rule over chunks of 64 tokens; unrolled, since a loop would return to the host between chunks.

    With G the sum of g up to a token and A the strict lower part of -beta_i e^(G_i - G_j) k_i.k_j, the writes
    of a chunk solve (I - A) [W | U] = beta [e^G k | v]. Across chunks, with K~ = e^(G_last - G) k, the state
    moves by S' = e^G_last S - S (W^T K~) + U^T K~, so that one product per chunk is serial and the rest is
    batched over chunks. The outputs are (e^G q - B W) S^T + B U, B the lower part of e^(G_i - G_j) q_i.k_j.
    """
    steps, value_heads = g.shape
    size = min(CHUNK, steps)
    parted = heads.reshape(heads.shape[0], steps // size, size, heads.shape[2])
    key_heads = (heads.shape[0] - value_heads) // 2
    q_k = parted[: 2 * key_heads].reshape(2, key_heads, *parted.shape[1:])
    k, v = share(q_k[1], value_heads), parted[2 * key_heads :]

    lower = jnp.asarray(np.tril(np.ones((size, size), np.float32)))  # [later, earlier]
    by_time = jnp.einsum("ts,csh->tch", lower, g.reshape(-1, size, value_heads))  # G
    total = by_time.transpose(2, 1, 0)[..., None]  # [Hv, chunks, size, 1]
    last = by_time[-1][:, :, None, None]  # [chunks, Hv, 1, 1]
    decay = lower[None, None] * jnp.exp(jnp.minimum(total - total.swapaxes(2, 3), 0.0))

    overlaps = jnp.einsum("xhctd,hcsd->xhcts", q_k, q_k[1])
    overlaps = share(overlaps, value_heads) * decay[None]
    strength = beta.reshape(-1, size, value_heads).transpose(2, 0, 1)[..., None]  # [Hv, chunks, size, 1]
    solved = solve_lower(overlaps[1], strength)
    q_decayed, k_decayed = share(q_k, value_heads) * jnp.exp(total)[None]
    w, u = solved @ k_decayed, solved @ v
    left = k * jnp.exp(last.swapaxes(0, 1) - total)
    lost = jnp.einsum("hctd,hcte->hcde", w, left).swapaxes(0, 1)
    gain = jnp.einsum("hctd,hcte->hcde", u, left).swapaxes(0, 1)
    states = [matrix]
    for i in range(steps // size):
        states.append(jnp.exp(last[i]) * states[i] - states[i] @ lost[i] + gain[i])
    entering, leaving = jnp.stack(states[:-1]), states[-1]

    inward = q_decayed - overlaps[0] @ w
    out = jnp.einsum("hctk,chvk->hctv", inward, entering) + overlaps[0] @ u
    # The leaving state overwrites the donated buffer of the first one, and the compiler does not see that
    # both are the same memory: by this zero the write waits for the last read.
    leaving = leaving + out[:, -1, -1:, :1] * 0.0
    return out.transpose(1, 2, 0, 3).reshape(steps, value_heads, -1), leaving


def share(x: Float[Array, "*batch Hk chunks m n"], value_heads: int) -> Float[Array, "*batch Hv chunks m n"]:
    """Gives each value head what its key head has."""
    *batch, key_heads, chunks, m, n = x.shape
    wide = (*batch, key_heads, value_heads // key_heads, chunks, m, n)
    return jnp.broadcast_to(jnp.expand_dims(x, -4), wide).reshape(*batch, value_heads, chunks, m, n)


def solve_lower(
    overlaps: Float[Array, "Hv chunks size size"], write: Float[Array, "Hv chunks size 1"]
) -> Float[Array, "Hv chunks size size"]:
    """(I - A)^-1 diag(write), A the strict lower part of -write * overlaps: [later, earlier].

    A series inside blocks of 8 tokens, then one over the blocks: a single one over all of a chunk loses every
    digit in f32 on trained weights (slow decay, repeated keys). Blocks are masks on full products, not
    slices, which would each cost a copy on the device.
    """
    size = overlaps.shape[-1]
    block = np.arange(size) // SAFE
    strict = np.tril(np.ones((size, size), np.float32), -1)
    inside = strict * (block[:, None] == block[None, :])
    zero, one = np.zeros((size, size), np.float32), np.eye(size, dtype=np.float32)
    masks = np.stack([-inside, zero, inside - strict, zero])[:, None, None]
    ones = np.stack([zero, one, zero, one])[:, None, None]
    parts = (overlaps * write)[None] * masks + ones  # A inside of blocks, I, A between blocks, I

    inverse = geometric(parts[:2], min(size, SAFE))
    if size > SAFE:
        twice = jnp.broadcast_to(inverse[None], (2, *inverse.shape))
        inverse = geometric(twice @ parts[2:], -(-size // SAFE))
    return inverse * write.swapaxes(2, 3)


def geometric(
    power_and_sum: Float[Array, "2 Hv chunks size size"], terms: int
) -> Float[Array, "Hv chunks size size"]:
    """(I + N + .. + N^(terms-1)) X of a pair (N, X), terms rounded up to a power of two.

    One product squares N and doubles the terms: P [P | X] + [0 | X].
    """
    keep = np.array([0.0, 1.0], np.float32)[:, None, None, None, None]
    while terms > 2:
        grown = jnp.einsum("hcij,xhcjk->xhcik", power_and_sum[0], power_and_sum)
        power_and_sum = grown + power_and_sum * keep
        terms = -(-terms // 2)
    return power_and_sum[1] + power_and_sum[0] @ power_and_sum[1]


def softplus(x: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    return jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
