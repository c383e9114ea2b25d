"""The gated delta rule: one mixer, in a chunked form for blocks and a one-step form for decode.

Per head, with state S [value, key], decay a = exp(g), write strength beta:
    S <- a S;  S <- S + beta (v - S k) k^T;  o = S q
Source: Yang et al., "Gated Delta Networks" (arXiv 2412.06464); transformers 5.24
`torch_chunk_gated_delta_rule`.

Heads of queries and keys come by turns (query, key, query, key, ..), so that one product takes both. Parts of
an array that differ in kind lie side by side in it and are read by gathers: a concatenation would be kernels
of its own on the device.
"""

from __future__ import annotations

from math import gcd

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from specprefill_jax.models.config import TextConfig
from specprefill_jax.models.layers import Block, scale_to_unit
from specprefill_jax.models.matrix import dtype_of, linear, linear_by_output, product, product_dtype
from specprefill_jax.models.parameters import Delta, DeltaState
from specprefill_jax.models.triangular import inverse, layout

CHUNK = 64  # longer blocks are multiples of it
# Most tokens whose writes are solved for at once, by the format of products. Matrix units make a large solve
# cheaper than the kernels that more chunks take.
SOLVED_AT_ONCE = {np.dtype(np.float32): CHUNK, np.dtype(np.float16): 4 * CHUNK}


def delta(
    config: TextConfig,
    p: Delta,
    state: DeltaState,
    x: Float[Array, "T D"],
    block: Block,
    inputs: Float[Array, "window columns"],
) -> tuple[Float[Array, "T D"], DeltaState, Float[Array, "window columns"]]:
    """Gated delta mixer.

    `inputs` is room for what the convolution reads, the last delta layer's and not needed any more; it is
    returned for the next one. So the projection writes into it, and nothing is copied.

    Padding leaves the state untouched: decay 1, write strength 0, inputs kept up to `count`.
    """
    steps, before = x.shape[0], state.conv.shape[0]
    zero = jnp.zeros((), jnp.int32)
    emitted = linear(x, p.in_proj_qkvz)
    if steps == 1:
        inputs = jnp.concatenate([state.conv, emitted])
    else:
        inputs = jax.lax.dynamic_update_slice(inputs, emitted, (jnp.int32(before), zero))
        inputs = jax.lax.dynamic_update_slice(inputs, state.conv, (zero, zero))
    gates = write_and_decay(p, linear_by_output(x, p.in_proj_ba), block)
    heads = unit_heads(config, convolved_heads(p.conv1d, inputs, config.linear_key_head_dim))
    z = inputs[before:].reshape(steps, -1, config.linear_value_head_dim)[:, heads.shape[0] :]
    if steps == 1:
        out, matrix = one_step(state.matrix, heads, gates)
        z = z.reshape(out.shape)
    else:
        out, matrix = chunked(state.matrix, heads, gates, product_dtype(dtype_of(p.out_proj)))
        z = z.transpose(1, 0, 2)
    gated = scale_to_unit(out, config.rms_norm_eps) * p.norm[None, None] * jax.nn.silu(z)
    if steps > 1:
        gated = gated.transpose(1, 0, 2)
    out = linear(gated.reshape(steps, config.value_dim), p.out_proj)
    return out, DeltaState(conv=kept_inputs(inputs, state.conv, block), matrix=matrix), inputs


def write_and_decay(p: Delta, ba: Float[Array, "gates T"], block: Block) -> Float[Array, "gates T"]:
    """Per token the value heads' write strengths beta, then their decays: of a block the logarithms g."""
    value_heads = p.A_log.shape[0]
    row = np.arange(2 * value_heads)
    rate = jnp.exp(p.A_log).at[row % value_heads].get(mode="promise_in_bounds")
    bias = p.dt_bias.at[row % value_heads].get(mode="promise_in_bounds")
    decay = -rate[:, None] * softplus(ba + bias[:, None])
    if ba.shape[1] == 1:
        return jnp.where(jnp.asarray(row < value_heads)[:, None], jax.nn.sigmoid(ba), jnp.exp(decay))
    gates = jnp.where(jnp.asarray(row < value_heads)[:, None], jax.nn.sigmoid(ba), decay)
    return gates * jnp.where(block.valid, 1.0, 0.0)[None]


def convolved_heads(
    weight: Float[Array, "kernel channels"], inputs: Float[Array, "window columns"], size: int
) -> Float[Array, "E window-kernel+1 {size}"]:
    """Depthwise causal convolution and SiLU; the first kernel-1 inputs are those before the block."""
    kernel, channels = weight.shape
    steps, heads = inputs.shape[0] - kernel + 1, channels // size
    taps = (
        inputs[i : i + steps].reshape(steps, -1, size)[:, :heads] * weight[i].reshape(1, heads, size)
        for i in range(kernel)
    )
    return jax.nn.silu(sum(taps, jnp.zeros((), jnp.float32))).transpose(1, 0, 2)


def kept_inputs(
    inputs: Float[Array, "window columns"], kept: Float[Array, "rows columns"], block: Block
) -> Float[Array, "rows columns"]:
    """The last inputs up to `count`, for the next block: as many as came before this one."""
    last = jax.lax.dynamic_slice(
        inputs, (block.count, jnp.int32(0)), kept.shape, allow_negative_indices=False
    )
    # A kernel writes it over the donated buffer; without the choice it would be copied twice.
    return jnp.where(block.valid[:1][:, None], last, kept)


def unit_heads(config: TextConfig, heads: Float[Array, "E T d"]) -> Float[Array, "E T d"]:
    """Queries and keys at unit length, queries times dk^-1/2 as well; values as they are."""
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    pair = [config.linear_key_head_dim**-0.5, 1.0]
    factor = np.array(key_heads * pair + value_heads * [0.0], np.float32)
    untouched = np.where(factor == 0.0, 1.0, 0.0).astype(np.float32)
    norm = jax.lax.rsqrt(jnp.sum(heads * heads, axis=-1, keepdims=True) + 1e-6)
    return heads * (norm * factor[:, None, None] + untouched[:, None, None])


def one_step(
    matrix: Float[Array, "Hv dv dk"], heads: Float[Array, "E 1 d"], gates: Float[Array, "2*Hv 1"]
) -> tuple[Float[Array, "Hk Hv/Hk dv"], Float[Array, "Hv dv dk"]]:
    """One token. Every reduction is over the last axis (see `DeltaState`).

    One reduction reads the state, for the query and for the key at once, and the write depends on it: the new
    state overwrites the donated buffer of the old one. The output then follows as
    a S q + beta (v - a S k) (k . q).
    """
    value_heads, size, _ = matrix.shape
    key_heads = (heads.shape[0] - value_heads) // 2
    grouped = (key_heads, value_heads // key_heads)
    q_k = heads[: 2 * key_heads].reshape(key_heads, 2, 1, size)
    value = heads[2 * key_heads :].reshape(*grouped, size)
    entering = matrix.reshape(*grouped, size, size)
    strength = gates[:value_heads].reshape(*grouped, 1)
    decay = gates[value_heads:].reshape(*grouped, 1)

    read = jnp.sum(entering[:, None] * q_k[:, :, :, None], axis=-1) * decay[:, None]  # [Hk, 2, Hv/Hk, dv]
    q, k = q_k[:, 0], q_k[:, 1]
    write = (value - read[:, 1]) * strength
    out = read[:, 0] + write * jnp.sum(k * q, axis=-1, keepdims=True)
    leaving = entering * decay[..., None] + write[..., None] * k[:, :, None]
    return out, leaving.reshape(matrix.shape)


def chunked(
    matrix: Float[Array, "Hv dv dk"],
    heads: Float[Array, "E T d"],
    gates: Float[Array, "2*Hv T"],
    products: np.dtype,
    chunk: int | None = None,
) -> tuple[Float[Array, "Hv T dv"], Float[Array, "Hv dv dk"]]:
    """The same rule over chunks of tokens; unrolled, since a loop would return to the host between chunks.

    With G the sum of g up to a token, A the strict lower part of -beta_i e^(G_i - G_j) k_i.k_j and B the
    lower part of e^(G_i - G_j) q_i.k_j, the writes of a chunk are D = (I - A)^-1 beta (v - e^G S k), its
    outputs e^G S q + B D, and the state moves on by S' = e^G_last S + D^T (e^(G_last - G) k).
    """
    value_heads, steps = gates.shape[0] // 2, gates.shape[1]
    size = gcd(steps, chunk or SOLVED_AT_ONCE[products])
    sums = sums_by_chunk(gates[value_heads:], size)
    heads = heads.astype(products)
    table = interactions(heads, sums, gates, size, products)
    solved = inverse(table, size, products)
    scaled = scaled_heads(heads, sums, gates, size, products)
    outputs = []
    for i in range(steps // size):
        decayed, entering = decayed_state(matrix, sums[:, (i + 1) * size - 1], products)
        added = scaled[:, i, 2 * size : 4 * size].astype(jnp.float32)
        read = product("hrk,hvk->hrv", scaled[:, i, : 2 * size], entering, products) + added
        read = read.astype(products)  # [e^G S q | beta (v - e^G S k)]
        writes = product("hts,hsv->htv", solved[:, i], read[:, size:], products).astype(products)
        within = product("hts,hsv->htv", table[:, i, :, :size], writes, products)
        outputs.append(within + read[:, :size].astype(jnp.float32))
        matrix = decayed + product("htv,htk->hvk", writes, scaled[:, i, 4 * size :], products)
    return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=1), matrix


def sums_by_chunk(g: Float[Array, "Hv T"], size: int) -> Float[Array, "Hv T"]:
    """Sums of g from the start of a token's chunk up to it."""
    step = np.arange(g.shape[1])
    up_to = (step[:, None] // size == step[None, :] // size) & (step[:, None] <= step[None, :])
    return g @ jnp.asarray(up_to.astype(np.float32))


def decayed_state(
    matrix: Float[Array, "Hv dv dk"], logarithm: Float[Array, " Hv"], products: np.dtype
) -> tuple[Float[Array, "Hv dv dk"], Float[Array, "Hv dv dk"]]:
    """The state after the chunk's decays, and the state as it was, for products."""
    decayed = matrix * jnp.exp(logarithm)[:, None, None]
    if products == matrix.dtype:
        return decayed, matrix
    # By this zero both are results of one kernel, and the first overwrites the donated buffer.
    return decayed, (matrix + decayed * 0.0).astype(products)


def interactions(
    heads: Float[Array, "E T d"],
    sums: Float[Array, "Hv T"],
    gates: Float[Array, "gates T"],
    size: int,
    products: np.dtype,
) -> Float[Array, "Hv chunks {size} W"]:
    """What earlier tokens of a chunk do to later ones: B [later, earlier], then A as `inverse` wants it."""
    value_heads, steps = sums.shape
    key_heads, chunks = (heads.shape[0] - value_heads) // 2, steps // size
    q_k = heads[: 2 * key_heads].reshape(key_heads, 2, chunks, size, -1)
    overlaps = product("hxctd,hcsd->hcxts", q_k, q_k[:, 1], products)

    of_a, later, every = layout(size), np.arange(size)[:, None], np.arange(size)[None, :]
    earlier = np.concatenate([np.broadcast_to(every, (size, size)), of_a.earlier], axis=1)
    there = np.concatenate([every <= later, of_a.of_a], axis=1)
    other = np.concatenate([np.zeros((size, size), np.float32), of_a.other], axis=1)
    in_a = np.arange(earlier.shape[1]) >= size
    entry = (in_a * size + later) * size + earlier
    picked = overlaps.reshape(key_heads, 1, chunks, 2 * size * size)
    picked = picked.at[..., entry.astype(np.int32)].get(mode="promise_in_bounds")

    per_head = (key_heads, value_heads // key_heads, chunks, size)
    total, write = sums.reshape(per_head), gates[:value_heads].reshape(per_head)
    since = total.at[..., earlier.astype(np.int32)].get(mode="promise_in_bounds")
    decay = jnp.exp(jnp.minimum(total[..., None] - since, 0.0))
    negated = jnp.where(jnp.asarray(in_a)[None, None, None, None], write[..., None], -1.0)
    found = jnp.where(
        jnp.asarray(there)[None, None, None],
        -(picked * decay * negated),
        jnp.asarray(other)[None, None, None],
    )
    return found.astype(products).reshape(value_heads, chunks, size, -1)


def scaled_heads(
    heads: Float[Array, "E T d"],
    sums: Float[Array, "Hv T"],
    gates: Float[Array, "2*Hv T"],
    size: int,
    products: np.dtype,
) -> Float[Array, "Hv chunks 5*{size} d"]:
    """Per value head and chunk e^G q, then -beta e^G k, zeros, beta v, and e^(G_last - G) k."""
    value_heads, steps = sums.shape
    key_heads, chunks = (heads.shape[0] - value_heads) // 2, steps // size
    query, value = 2 * (np.arange(value_heads) // (value_heads // key_heads)), np.arange(value_heads)
    source = np.stack([query, query + 1, query, 2 * key_heads + value, query + 1], axis=1)
    last = sums.reshape(value_heads, chunks, size)[:, :, -1:]
    into, left = jnp.exp(sums), jnp.exp(last - sums.reshape(value_heads, chunks, size))
    write = gates[:value_heads]
    factors = (into, -(write * into), 0.0, write, left.reshape(value_heads, steps))
    plane, factor = np.arange(5)[None, :, None], jnp.zeros((), jnp.float32)
    for i, each in enumerate(factors):
        each = jnp.asarray(each)
        factor = jnp.where(jnp.asarray(plane == i), each[:, None] if each.ndim else each, factor)
    picked = heads.at[source].get(mode="promise_in_bounds").astype(jnp.float32)
    scaled = (picked * factor[..., None]).astype(products).reshape(value_heads, 5, chunks, size, -1)
    return scaled.transpose(0, 2, 1, 3, 4).reshape(value_heads, chunks, 5 * size, -1)


def softplus(x: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    return jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
