"""Qwen3.5 text: the block stack and the entry points that are compiled.

Every function is pure: parameters, state and tokens in, state out. Scalars are i32 arrays of rank 0; the
compiler receives them as primitive values, so that no call waits for an index to come back from the device.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpy.typing import DTypeLike

from specprefill_jax.models.config import TextConfig
from specprefill_jax.models.delta import delta
from specprefill_jax.models.layers import (
    Block,
    attention,
    causal_mask,
    mlp,
    pick_last,
    rms_norm,
    rotary_phases,
)
from specprefill_jax.models.matrix import embed, linear, product_dtype
from specprefill_jax.models.parameters import Attention, AttentionState, DeltaState, Model, ModelState


def initial_state(config: TextConfig, capacity: int, matrices: DTypeLike = np.float32) -> ModelState:
    """Zero state for `capacity` slots, of a build whose matrices are `matrices`.

    Keys and values take the format of products (see `product_dtype`); all else is f32 in every build.
    """
    cache = (capacity, config.num_key_value_heads, config.head_dim)
    products = product_dtype(matrices)
    matrix = (config.linear_num_value_heads, config.linear_value_head_dim, config.linear_key_head_dim)
    inputs = (config.linear_conv_kernel_dim - 1, config.conv_channels + config.value_dim)

    def layer(kind: str) -> AttentionState | DeltaState:
        if kind == "full_attention":
            return AttentionState(k=jnp.zeros(cache, products), v=jnp.zeros(cache, products))
        return DeltaState(conv=jnp.zeros(inputs, jnp.float32), matrix=jnp.zeros(matrix, jnp.float32))

    return ModelState(layers=tuple(layer(kind) for kind in config.layer_types))


def prefill(
    config: TextConfig,
    model: Model,
    tokens: Int[Array, " T"],
    positions: Int[Array, " T"],
    count: Int[Array, ""],
    slot: Int[Array, ""],
    state: ModelState,
    *,
    rows: int = 0,
) -> tuple[Float[Array, " D"], Float[Array, "A H R C"], ModelState]:
    """Runs the first `count` of T tokens, each at its own position, into slots `slot`, `slot`+1, ...

    Returns the last valid token's hidden vector (after the final norm), the attention rows of the last
    min(rows, count) valid tokens (oldest first, those after them of no use) and the state. Padding leaves the
    state untouched, except for slots at and past `slot + count`, which are undefined until they are written.
    """
    steps = tokens.shape[0]
    cos, sin = rotary_phases(config, positions)
    block = Block(
        valid=jnp.arange(steps, dtype=jnp.int32) < count,
        count=count,
        slot=slot,
        mask=causal_mask(slot, steps, capacity_of(state)),
        cos=cos,
        sin=sin,
        rows=rows,
    )
    x = embed(model.embed_tokens, tokens)
    layers, all_rows = [], []
    inputs = jnp.zeros((steps + config.linear_conv_kernel_dim - 1, config.conv_channels + config.value_dim))
    for parameters, layer_state in zip(model.layers, state.layers, strict=True):
        h = rms_norm(x, parameters.input_layernorm, config.rms_norm_eps)
        if isinstance(parameters.mixer, Attention):
            assert isinstance(layer_state, AttentionState)
            y, layer_state, row = attention(config, parameters.mixer, layer_state, h, block)
            all_rows.append(row)
        else:
            assert isinstance(layer_state, DeltaState)
            y, layer_state, inputs = delta(config, parameters.mixer, layer_state, h, block, inputs)
        layers.append(layer_state)
        x = x + y
        x = x + mlp(parameters.mlp, rms_norm(x, parameters.post_attention_layernorm, config.rms_norm_eps))
    last = pick_last(x, count, 1)[0]
    hidden = rms_norm(last, model.norm, config.rms_norm_eps)
    return hidden, jnp.stack(all_rows), ModelState(layers=tuple(layers))


def decode(
    config: TextConfig,
    model: Model,
    token: Int[Array, ""],
    position: Int[Array, ""],
    slot: Int[Array, ""],
    state: ModelState,
    *,
    rows: bool = False,
) -> tuple[Float[Array, " V"], Float[Array, "A H C"] | None, ModelState]:
    """One token: its logits, its attention rows when asked, and the state."""
    one = jnp.ones((), jnp.int32)
    hidden, all_rows, state = prefill(
        config, model, token[None], position[None], one, slot, state, rows=int(rows)
    )
    return head(model, hidden), all_rows[:, :, 0] if rows else None, state


def head(model: Model, hidden: Float[Array, " D"]) -> Float[Array, " V"]:
    """Logits of a hidden vector; kept out of prefill, so that blocks do not pay for the vocabulary."""
    weight = model.embed_tokens if model.lm_head is None else model.lm_head
    return linear(hidden[None], weight)[0]


def capacity_of(state: ModelState) -> int:
    """Slots in the cache, C."""
    return next(layer.k.shape[0] for layer in state.layers if isinstance(layer, AttentionState))
