"""Norms, rotary phases, MLP and gated attention with explicit attention rows.

Letters as in docs/architecture.md. Products run in the matrices' dtype with f32 accumulation; everything
between products is f32. Reference for the semantics: transformers 5.24, models/qwen3_5/modeling_qwen3_5.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specprefill_jax.models.config import TextConfig
from specprefill_jax.models.matrix import linear
from specprefill_jax.models.parameters import Attention, AttentionState, Mlp

# Added to masked logits. Finite, so that a row whose every slot is masked (padding) stays finite too.
MASKED = -1e30
# Rotary phases are composed from two tables of this many rows.
FINE = 512
POSITIONS = FINE * FINE  # a position from there on would read past them


@dataclass(frozen=True)
class Block:
    """What the layers need to know about the tokens of one call.

    Attributes:
        valid: which of the T tokens exist; the rest is padding.
        count: how many of them, as a scalar.
        slot: the cache slot of the first token, as a scalar.
        mask: added to attention logits: 0 where the query may look, `MASKED` elsewhere.
        cos, sin: rotary factors at the tokens' positions, for every dim of a head (see `rotary_phases`).
        rows: how many attention rows to return (R), for the last valid queries; 0 for none.
    """

    valid: Bool[Array, " T"]
    count: Int[Array, ""]
    slot: Int[Array, ""]
    mask: Float[Array, "T C"]
    cos: Float[Array, "T head_dim"]
    sin: Float[Array, "T head_dim"]
    rows: int


def rms_norm(x: Float[Array, "*batch K"], weight: Float[Array, " K"], eps: float) -> Float[Array, "*batch K"]:
    """Root-mean-square norm scaled by (1 + weight): every norm but the delta rule's output norm."""
    return scale_to_unit(x, eps) * jnp.expand_dims(1.0 + weight, range(x.ndim - 1))


def scale_to_unit(x: Float[Array, "*batch K"], eps: float) -> Float[Array, "*batch K"]:
    """x divided by its root mean square over the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def mlp(p: Mlp, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    return linear(jax.nn.silu(linear(x, p.gate_proj)) * linear(x, p.up_proj), p.down_proj)


def rotary_phases(
    config: TextConfig, positions: Int[Array, " T"]
) -> tuple[Float[Array, "T head_dim"], Float[Array, "T head_dim"]]:
    """Factors of `rotate`: cos and sin of position * frequency, by the angle sum of two tables.

    They cover a whole head: both halves of the pairs with the sine's sign of each, and 1 and 0 for the dims
    that do not turn. Tables and not `cos(angle)`: Vulkan promises sine and cosine only to 2^-11, and only
    within [-pi, pi].
    The frequencies are rounded to f32 as transformers does; the tables are made in f64.
    """
    half = config.rotary_dim // 2
    frequency = (1.0 / config.rope_theta ** (np.arange(half, dtype=np.float32) / half)).astype(np.float32)
    turning = np.concatenate([frequency, frequency, np.zeros(config.head_dim - 2 * half, np.float32)])
    sign = np.where(np.arange(config.head_dim) < half, -1.0, 1.0)
    fine = np.arange(FINE, dtype=np.float64)[:, None] * turning.astype(np.float64)
    coarse = fine * FINE

    def gather(table: np.ndarray, index: Int[Array, " T"]) -> Float[Array, "T head_dim"]:
        return jnp.asarray(table.astype(np.float32)).at[index].get(mode="promise_in_bounds")

    high, low = positions // FINE, positions % FINE
    cos_high, sin_high = gather(np.cos(coarse), high), gather(np.sin(coarse) * sign, high)
    cos_low, sin_low = gather(np.cos(fine), low), gather(np.sin(fine) * sign, low)
    return cos_high * cos_low - sin_high * sin_low, sin_high * cos_low + cos_high * sin_low


def rotate(
    config: TextConfig, x: Float[Array, "heads T head_dim"], block: Block
) -> Float[Array, "heads T head_dim"]:
    """Turns the first `rotary_dim` dims of each head (half-split pairs); the rest passes through.

    The partner of each dim is gathered; slices and a concatenation would cost a copy each on the device.
    """
    half = config.rotary_dim // 2
    partner = np.arange(config.head_dim)
    partner[: 2 * half] = (partner[: 2 * half] + half) % (2 * half)
    swapped = x.at[..., jnp.asarray(partner)].get(mode="promise_in_bounds")
    return x * block.cos[None] + swapped * block.sin[None]


def causal_mask(slot: Int[Array, ""], block: int, capacity: int) -> Float[Array, "T C"]:
    """Query t (in slot `slot + t`) sees slots 0..slot+t: causality is by slot, rotation by position."""
    query = slot + jnp.arange(block, dtype=jnp.int32)[:, None]
    key = jnp.arange(capacity, dtype=jnp.int32)[None, :]
    return jnp.where(key <= query, 0.0, MASKED).astype(jnp.float32)


def pick_last(x: Float[Array, "T K"], count: Int[Array, ""], rows: int) -> Float[Array, "R K"]:
    """`rows` consecutive rows of x that end with the last valid one; the first ones where fewer are valid."""
    first = jnp.maximum(count - rows, 0)
    zero = jnp.zeros((), jnp.int32)
    return jax.lax.dynamic_slice(x, (first, zero), (rows, x.shape[1]), allow_negative_indices=False)


def attention(
    config: TextConfig, p: Attention, state: AttentionState, x: Float[Array, "T D"], block: Block
) -> tuple[Float[Array, "T D"], AttentionState, Float[Array, "R H C"]]:
    """Gated attention over the cache, and the post-softmax rows of the last R valid queries.

    Unused rows are 0. The rows are one small product of their own: the block's probabilities are not kept for
    them.
    """
    steps, head_dim = x.shape[0], config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    query, gate = jnp.split(linear(x, p.q_proj).reshape(steps, heads, 2 * head_dim), 2, axis=-1)
    key = linear(x, p.k_proj).reshape(steps, kv_heads, head_dim)
    value = linear(x, p.v_proj).reshape(steps, kv_heads, head_dim)

    query = rotate(config, heads_first(rms_norm(query, p.q_norm, config.rms_norm_eps)), block)
    key = rotate(config, heads_first(rms_norm(key, p.k_norm, config.rms_norm_eps)), block)
    query = query * head_dim**-0.5
    state = AttentionState(
        k=write_slots(state.k, key, block.slot),
        v=write_slots(state.v, gathered_heads_first(value), block.slot),
    )

    probabilities = softmax(scores(by_key_head(query, kv_heads), state.k) + block.mask[None, None])
    mixed = mix(probabilities, state.v).reshape(heads, steps, head_dim)
    gated = mixed.transpose(1, 0, 2) * jax.nn.sigmoid(gate)
    out = linear(gated.reshape(steps, heads * head_dim), p.o_proj)
    if steps == 1 and block.rows:
        return out, state, probabilities.reshape(1, heads, -1)
    return out, state, attention_rows(query, state.k, block)


def attention_rows(
    query: Float[Array, "H T head_dim"], k: Float[Array, "Hkv C head_dim"], block: Block
) -> Float[Array, "R H C"]:
    """Post-softmax probabilities of the last R valid queries over all slots, f32; unused rows are 0."""
    heads, _, head_dim = query.shape
    kv_heads, capacity, _ = k.shape
    if block.rows == 0:
        return jnp.zeros((0, heads, capacity), jnp.float32)
    first, zero = jnp.maximum(block.count - block.rows, 0), jnp.zeros((), jnp.int32)
    # Before the heads are grouped: the other order costs a copy of all queries.
    last = jax.lax.dynamic_slice(
        query, (zero, first, zero), (heads, block.rows, head_dim), allow_negative_indices=False
    )
    # A mask computed here would be fused into the softmax, whose kernel gfx1103 then refuses.
    mask = pick_last(block.mask, block.count, block.rows)
    rows = softmax(scores(by_key_head(last, kv_heads), k) + mask[None, None])
    step = first + jnp.arange(block.rows, dtype=jnp.int32)
    rows = rows * jnp.where(step < block.count, 1.0, 0.0)[None, None, :, None]
    return rows.reshape(heads, block.rows, capacity).transpose(1, 0, 2)


def heads_first(x: Float[Array, "T heads head_dim"]) -> Float[Array, "heads T head_dim"]:
    return x.transpose(1, 0, 2)


def gathered_heads_first(x: Float[Array, "T heads head_dim"]) -> Float[Array, "heads T head_dim"]:
    """The same by a gather.

    A transpose would be fused into the projection, whose kernel gfx1103 then refuses.
    """
    steps, heads = x.shape[:2]
    if steps == 1:
        return heads_first(x)
    step, head = np.arange(steps)[None, :], np.arange(heads)[:, None]
    return x.at[jnp.asarray(step), jnp.asarray(head)].get(mode="promise_in_bounds")


def by_key_head(query: Float[Array, "H Q head_dim"], kv_heads: int) -> Float[Array, "Hkv G Q head_dim"]:
    heads, steps, head_dim = query.shape
    return query.reshape(kv_heads, heads // kv_heads, steps, head_dim)


def write_slots(
    cache: Float[Array, "heads C head_dim"], new: Float[Array, "heads T head_dim"], slot: Int[Array, ""]
) -> Float[Array, "heads C head_dim"]:
    """Writes T slots in place (the cache is donated).

    The caller guarantees slot + T <= C: XLA would clamp.
    """
    zero = jnp.zeros((), jnp.int32)
    return jax.lax.dynamic_update_slice(
        cache, new.astype(cache.dtype), (zero, slot, zero), allow_negative_indices=False
    )


def scores(
    query: Float[Array, "Hkv G Q head_dim"], k: Float[Array, "Hkv C head_dim"]
) -> Float[Array, "Hkv G Q C"]:
    """Scaled query · key in f32."""
    kv_heads, group, steps, head_dim = query.shape
    query = query.astype(k.dtype).reshape(kv_heads, group * steps, head_dim)
    logits = jnp.einsum("hqd,hcd->hqc", query, k, preferred_element_type=jnp.float32)
    return logits.reshape(kv_heads, group, steps, k.shape[1])


def mix(
    probabilities: Float[Array, "Hkv G Q C"], v: Float[Array, "Hkv C head_dim"]
) -> Float[Array, "Hkv G*Q head_dim"]:
    """probabilities · values in f32."""
    kv_heads, group, steps, capacity = probabilities.shape
    weights = probabilities.astype(v.dtype).reshape(kv_heads, group * steps, capacity)
    return jnp.einsum("hqc,hcd->hqd", weights, v, preferred_element_type=jnp.float32)


def softmax(logits: Float[Array, "*batch C"]) -> Float[Array, "*batch C"]:
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    return weights / jnp.sum(weights, axis=-1, keepdims=True)
