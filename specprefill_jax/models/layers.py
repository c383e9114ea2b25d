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
from numpy.typing import DTypeLike

from specprefill_jax.models.config import TextConfig
from specprefill_jax.models.matrix import apart, columns, linear, product
from specprefill_jax.models.parameters import Attention, AttentionState, Mlp

# Added to masked logits. Finite, so that a row whose every slot is masked (padding) stays finite too.
MASKED = -1e30
# Rotary phases are composed from two tables of this many rows.
FINE = 512
POSITIONS = FINE * FINE  # a position from there on would read past them
MATRIX_ROWS = 16  # of a matrix unit's tile


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
    gate_up = linear(x, p.gate_up_proj)
    size = gate_up.shape[1] // 2
    return linear(jax.nn.silu(columns(gate_up, 0, size)) * columns(gate_up, size, size), p.down_proj)


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


def rotated_heads(
    config: TextConfig,
    mixed: Float[Array, "T N head_dim"],
    head: Int[Array, " heads"],
    weight: Float[Array, " head_dim"],
    block: Block,
) -> Float[Array, "T heads head_dim"]:
    """Some heads of `mixed`, normalized and turned: the first `rotary_dim` dims, in half-split pairs.

    Heads and the partners of dims are gathered; slices and a concatenation would cost a copy each on the
    device.
    """
    half = config.rotary_dim // 2
    partner = np.arange(config.head_dim)
    partner[: 2 * half] = (partner[: 2 * half] + half) % (2 * half)
    scale = jax.lax.rsqrt(jnp.mean(mixed * mixed, axis=-1) + config.rms_norm_eps)
    straight = mixed.at[:, head].get(mode="promise_in_bounds")
    swapped = mixed.at[:, head[:, None], jnp.asarray(partner)[None, :]].get(mode="promise_in_bounds")
    cos, sin = block.cos * (1.0 + weight)[None], block.sin * (1.0 + weight[partner])[None]
    turned = straight * cos[:, None] + swapped * sin[:, None]
    return turned * scale.at[:, head].get(mode="promise_in_bounds")[..., None]


def causal_mask(slot: Int[Array, ""], block: int, capacity: int) -> Float[Array, "T C"]:
    """Query t (in slot `slot + t`) sees slots 0..slot+t: causality is by slot, rotation by position.

    Made anew inside of a product or a softmax, as a single attention layer invites to, it would be in kernels
    that gfx1103 refuses.
    """
    query = slot + jnp.arange(block, dtype=jnp.int32)[:, None]
    key = jnp.arange(capacity, dtype=jnp.int32)[None, :]
    return apart(jnp.where(key <= query, 0.0, MASKED).astype(jnp.float32))


def pick_last(x: Float[Array, "T K"], count: Int[Array, ""], rows: int) -> Float[Array, "R K"]:
    """`rows` consecutive rows of x that end with the last valid one; the first ones where fewer are valid."""
    first = jnp.maximum(count - rows, 0)
    zero = jnp.zeros((), jnp.int32)
    return jax.lax.dynamic_slice(x, (first, zero), (rows, x.shape[1]), allow_negative_indices=False)


def attention(
    config: TextConfig, p: Attention, state: AttentionState, x: Float[Array, "T D"], block: Block
) -> tuple[Float[Array, "T D"], AttentionState, Float[Array, "H R C"]]:
    """Gated attention over the cache, and the post-softmax rows of the last R valid queries.

    The rows are one small product of their own: the block's probabilities are not kept for them.
    """
    steps, head_dim = x.shape[0], config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    # Query and gate of each head by turns, then the keys.
    mixed = linear(x, p.qk_proj).reshape(steps, 2 * heads + kv_heads, head_dim)
    group = heads // kv_heads
    rows = np.minimum(np.arange(query_rows(group, steps, state.k.dtype)), group - 1)
    at_query = jnp.asarray(2 * (np.arange(kv_heads)[:, None] * group + rows).reshape(-1))
    at_key = 2 * heads + jnp.arange(kv_heads, dtype=jnp.int32)
    query = rotated_heads(config, mixed, at_query, p.q_norm, block) * head_dim**-0.5
    query = query.transpose(1, 0, 2).astype(state.k.dtype)
    key = rotated_heads(config, mixed, at_key, p.k_norm, block)
    value = linear(x, p.v_proj).reshape(steps, kv_heads, head_dim)
    state = AttentionState(k=write_slots(state.k, key, block.slot), v=write_slots(state.v, value, block.slot))

    probabilities = softmax(scores(query, state.k) + block.mask[None, None])
    mixture = mix(probabilities, state.v)[:, :group].reshape(heads, steps, head_dim)
    gate = mixed.at[:, 2 * jnp.arange(heads, dtype=jnp.int32) + 1].get(mode="promise_in_bounds")
    gated = mixture.transpose(1, 0, 2) * jax.nn.sigmoid(gate)
    out = linear(gated.reshape(steps, heads * head_dim), p.o_proj)
    if steps == 1 and block.rows:
        return out, state, probabilities[:, :group].reshape(heads, 1, -1)
    return out, state, attention_rows(query, state.k, block)


def query_rows(group: int, steps: int, products: DTypeLike) -> int:
    """How many queries stand for the `group` heads that share a key head.

    For one token on matrix units, as many as a unit's tile has rows: the last one is repeated.
    """
    return max(group, MATRIX_ROWS) if steps == 1 and np.dtype(products) == np.float16 else group


def attention_rows(
    query: Float[Array, "H T head_dim"], k: Float[Array, "C Hkv head_dim"], block: Block
) -> Float[Array, "H R C"]:
    """Post-softmax probabilities of the last R valid queries over all slots, f32.

    Rows past the last valid query are of no use, and not 0.
    """
    heads, _, head_dim = query.shape
    capacity, kv_heads, _ = k.shape
    if block.rows == 0:
        return jnp.zeros((heads, 0, capacity), jnp.float32)
    first, zero = jnp.maximum(block.count - block.rows, 0), jnp.zeros((), jnp.int32)
    last = jax.lax.dynamic_slice(
        query.transpose(1, 0, 2),
        (first, zero, zero),
        (block.rows, heads, head_dim),
        allow_negative_indices=False,
    )
    if k.dtype == np.float16:
        # Token by token as they lie in memory: the product reads them there, and nothing is copied.
        grouped = last.reshape(block.rows, kv_heads, heads // kv_heads, head_dim)
        logits = product("qhgd,chd->hgqc", grouped, k, k.dtype)
    else:
        logits = scores(last.transpose(1, 0, 2), k)
    mask = pick_last(block.mask, block.count, block.rows)
    return softmax(logits + mask[None, None]).reshape(heads, block.rows, capacity)


def write_slots(
    cache: Float[Array, "C Hkv head_dim"], new: Float[Array, "T Hkv head_dim"], slot: Int[Array, ""]
) -> Float[Array, "C Hkv head_dim"]:
    """Writes T slots in place (the cache is donated).

    The caller guarantees slot + T <= C: XLA would clamp.
    """
    zero = jnp.zeros((), jnp.int32)
    return jax.lax.dynamic_update_slice(
        cache, new.astype(cache.dtype), (slot, zero, zero), allow_negative_indices=False
    )


def scores(
    query: Float[Array, "H Q head_dim"], k: Float[Array, "C Hkv head_dim"]
) -> Float[Array, "Hkv G Q C"]:
    """query · key in f32."""
    heads, steps, head_dim = query.shape
    capacity, kv_heads, _ = k.shape
    grouped = query.reshape(kv_heads, heads // kv_heads * steps, head_dim)
    logits = by_key_head("qd,cd->qc", grouped, k)
    return logits.reshape(kv_heads, heads // kv_heads, steps, capacity)


def mix(
    probabilities: Float[Array, "Hkv G Q C"], v: Float[Array, "C Hkv head_dim"]
) -> Float[Array, "Hkv G Q head_dim"]:
    """probabilities · values in f32."""
    kv_heads, group, steps, capacity = probabilities.shape
    weights = probabilities.reshape(kv_heads, group * steps, capacity)
    return by_key_head("qc,cd->qd", weights, v).reshape(kv_heads, group, steps, -1)


def by_key_head(
    equation: str, x: Float[Array, "Hkv rows K"], cache: Float[Array, "C Hkv head_dim"]
) -> Float[Array, "Hkv rows N"]:
    """A product with each key head's part of the cache, in the cache's format, summed in f32.

    Matrix units take the heads as one batch. Elsewhere each is a product of its own: a batch whose axis is
    not the first would be copied into one where it is, the whole cache for every block and token.
    """
    if cache.dtype == np.float16:
        left, rest = equation.split(",")
        batched = f"h{left},{rest[0]}h{rest[1:]}".replace("->", "->h")
        return product(batched, x, cache, cache.dtype)
    heads = [product(equation, x[head], cache[:, head], cache.dtype) for head in range(cache.shape[1])]
    return jnp.stack(heads)


def softmax(logits: Float[Array, "*batch C"]) -> Float[Array, "*batch C"]:
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    return weights / jnp.sum(weights, axis=-1, keepdims=True)
