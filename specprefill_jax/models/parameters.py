"""Parameters and state of a Qwen3.5 text model, as pytrees whose field names are the checkpoint's own.

Matrices are [out, in], as in the checkpoint: every product contracts the last axis of both operands, which is
the layout that a compiled matrix-vector product reads without a transpose. (Builds for a CPU hold them
tiled.) Matrices that read the same input and whose outputs go the same way lie one below the other, as one:
that is one kernel instead of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform, no_type_check

import jax
from jaxtyping import Array, Float

from specprefill_jax.models.matrix import Matrix

Node = TypeVar("Node")


@dataclass_transform(frozen_default=True)
def pytree(cls: type[Node]) -> type[Node]:
    """Registers a dataclass of arrays as a JAX pytree, its fields as children in order.

    Construction is not type checked: JAX rebuilds nodes with leaves that are shapes, NumPy arrays or
    placeholders.
    """
    return jax.tree_util.register_dataclass(no_type_check(dataclass(frozen=True)(cls)))


@pytree
class Attention:
    """Gated full attention. `qk_proj` emits [query | gate] per query head, then the keys."""

    qk_proj: Matrix  # [(2*H + Hkv)*head_dim, D]
    v_proj: Matrix  # [Hkv*head_dim, D]
    o_proj: Matrix  # [D, H*head_dim]
    q_norm: Float[Array, " head_dim"]
    k_norm: Float[Array, " head_dim"]


@pytree
class Delta:
    """Gated delta rule. `in_proj_qkvz` emits the channels of the convolution, then z.

    The channels are the heads of queries and keys by turns (query, key, query, key, ..), and then the values.
    `in_proj_ba` emits the write strengths, then the decays. `conv1d` is turned from the checkpoint's
    [channels, 1, kernel], so that one tap is one contiguous row.
    """

    in_proj_qkvz: Matrix  # [columns, D]: channels + Hv*dv
    in_proj_ba: Matrix  # [2*Hv, D]
    conv1d: Float[Array, "kernel channels"]
    A_log: Float[Array, " Hv"]
    dt_bias: Float[Array, " Hv"]
    norm: Float[Array, " dv"]
    out_proj: Matrix  # [D, Hv*dv]


@pytree
class Mlp:
    gate_up_proj: Matrix  # [2*I, D]: the gate's rows, then up's
    down_proj: Matrix  # [D, I]


@pytree
class Block:
    input_layernorm: Float[Array, " D"]
    mixer: Attention | Delta
    post_attention_layernorm: Float[Array, " D"]
    mlp: Mlp


@pytree
class Model:
    """`lm_head` is None where the embedding is tied: the vocabulary head then reads `embed_tokens`."""

    embed_tokens: Matrix  # [V, D]
    layers: tuple[Block, ...]
    norm: Float[Array, " D"]
    lm_head: Matrix | None  # [V, D]


@pytree
class AttentionState:
    """Keys (rotated) and values by slot; slots past the length are undefined and masked.

    The slot comes first: a block's new ones are one range of memory, which their kernel writes in place.
    """

    k: Float[Array, "C Hkv head_dim"]
    v: Float[Array, "C Hkv head_dim"]


@pytree
class DeltaState:
    """The convolution's last raw inputs, z beside them as the projection emits it, and the recurrent matrix.

    The matrix is stored [heads, value, key]: with [heads, key, value] the one-token step compiles to wrong
    numbers for Vulkan, so every reduction of that step runs over the last axis.
    """

    conv: Float[Array, "kernel-1 columns"]
    matrix: Float[Array, "Hv dv dk"]


@pytree
class ModelState:
    layers: tuple[AttentionState | DeltaState, ...]
