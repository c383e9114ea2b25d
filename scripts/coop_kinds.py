"""Every kind of product that a model runs on matrix units, as the model spells it, and what NumPy says.

A block's products and decode's; shapes are the model's own. `scripts/coop_check.py` shows that these are the
kernels of the true build, and that there is no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from specprefill_jax.models.config import TextConfig
from specprefill_jax.models.delta import softplus
from specprefill_jax.models.layers import mix, query_rows, scores
from specprefill_jax.models.matrix import columns, linear, linear_by_output, product
from specprefill_jax.models.triangular import BLOCK, series

F16 = np.dtype(np.float16)
HALF_ULP, HALF_ULP_F16 = 2.0**-24, 2.0**-11
SMALLEST_F16 = 2.0**-24  # the distance of numbers below 2^-14
# How many deviations a sum may be off. Of 8 million values, all within 8 but once in 10^7 runs (Hoeffding).
DEVIATIONS = 8.0

Values = Shaped[np.ndarray, "..."]


@dataclass(frozen=True)
class Input:
    """An operand: drawn from the normal distribution, or rows of probabilities where `spread` is 0."""

    shape: tuple[int, ...]
    dtype: np.dtype = F16
    spread: float = 1.0

    def draw(self, random: np.random.Generator) -> Values:
        """Values in the operand's own format."""
        values = random.standard_normal(self.shape, np.float32)
        if self.spread:
            return (values * np.float32(self.spread)).astype(self.dtype)
        values = np.exp(values)
        return (values / values.sum(axis=-1, keepdims=True)).astype(self.dtype)


@dataclass(frozen=True)
class Expected:
    """What a result must be, and how far it may be off."""

    value: Float[np.ndarray, "..."]
    bound: Float[np.ndarray, "..."]

    def reshaped(self, *shape: int) -> Expected:
        """The same numbers in another shape."""
        return Expected(self.value.reshape(shape), self.bound.reshape(shape))


@dataclass(frozen=True)
class Kind:
    """A product of the model.

    Attributes:
        spelled: in JAX, with the model's own functions where it has one for it.
        expected: of each result, from the inputs in f64.
    """

    name: str
    inputs: tuple[Input, ...]
    spelled: Callable[..., Any]
    expected: Callable[..., tuple[Expected, ...]]


def kinds(config: TextConfig, blocks: Sequence[int], capacity: int) -> tuple[tuple[int, Kind], ...]:
    """Those of a model, each with the tokens that it reads; a block is one chunk of the delta rule."""
    of_blocks = (
        (block, kind)
        for block in blocks
        for kind in (
            *_projections(config, block),
            *_attention(config, block, capacity),
            *_interactions(config, block),
            *_chunk(config, block),
        )
    )
    return (*of_blocks, *((1, kind) for kind in _attention(config, 1, capacity)))


def contracted(
    a: Values, b: Values, added: Values | None = None, *, stored: np.dtype | None = None
) -> Expected:
    """a @ b + added in f64, and the bound of sums in f32, rounded to `stored`.

    A product of two f16 numbers is exact in f32: 11 + 11 of 24 bits. So only sums round, each by at most half
    a unit (2^-24) of a partial sum, and of terms with random signs a partial sum is at most of the size
    sqrt(sum of squares). The roundings are independent, and add up like sqrt(their number), in whatever order
    the sum is made: Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019. The
    certain bound grows with the number of terms instead, and would miss a term that is left out.
    """
    value, squares, terms = a @ b, (a * a) @ (b * b), a.shape[-1]
    if added is not None:
        value, squares, terms = value + added, squares + added * added, terms + 1
    bound = DEVIATIONS * HALF_ULP * np.sqrt(terms * squares)
    if stored == F16:  # Vulkan leaves open whether a conversion rounds to nearest or towards zero
        bound = bound + np.maximum(2 * HALF_ULP_F16 * np.abs(value), SMALLEST_F16)
    return Expected(value, bound)


def turned(x: Values) -> Values:
    """The last two axes exchanged."""
    return np.swapaxes(x, -1, -2)


def _weight(outputs: int, inputs: int) -> Input:
    return Input((outputs, inputs), spread=inputs**-0.5)


def _projections(config: TextConfig, block: int) -> tuple[Kind, ...]:
    """The products with weights. The norm that follows adds them to the residual, in a kernel of its own."""
    size, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim

    def operands(outputs: int, inputs: int) -> tuple[Input, Input]:
        return Input((block, inputs)), _weight(outputs, inputs)

    def plain(name: str, outputs: int, inputs: int) -> Kind:
        return Kind(name, operands(outputs, inputs), linear, lambda x, w: (contracted(x, w.T),))

    cached = Kind(
        "v_proj",
        operands(kv_heads * head_dim, size),
        lambda x, w: linear(x, w).astype(F16),
        lambda x, w: (contracted(x, w.T, stored=F16),),
    )
    return (
        plain("in_proj_qkvz", config.conv_channels + config.value_dim, size),
        _gates(config, block),
        plain("out_proj", size, config.value_dim),
        plain("qk_proj", (2 * heads + kv_heads) * head_dim, size),
        cached,
        plain("o_proj", size, heads * head_dim),
        Kind("gate_up_proj, silu(gate) up", operands(2 * inner, size), _gated, _gated_expected),
        plain("down_proj", size, inner),
    )


def _gates(config: TextConfig, block: int) -> Kind:
    """As `delta.write_and_decay`, from the rates and biases of all rows: they are constants of a module."""
    value_heads, f32 = config.linear_num_value_heads, np.dtype(np.float32)
    rows = 2 * value_heads
    of_writes = (np.arange(rows) < value_heads)[:, None]
    per_row, per_token = Input((rows,), f32), Input((block,), f32)

    def spelled(x: Array, w: Array, rate: Array, bias: Array, valid: Array) -> Array:
        ba = linear_by_output(x, w)
        decay = rate[:, None] * softplus(ba + bias[:, None])
        return jnp.where(jnp.asarray(of_writes), jax.nn.sigmoid(ba), decay) * valid[None]

    def expected(x: Values, w: Values, rate: Values, bias: Values, valid: Values) -> tuple[Expected, ...]:
        sums = contracted(w, x.T)
        decay = sums.value + bias[:, None]
        value = np.where(of_writes, 1 / (1 + np.exp(-sums.value)), rate[:, None] * np.logaddexp(decay, 0.0))
        slope = np.where(of_writes, 0.25, np.abs(rate[:, None]))
        bound = slope * sums.bound + _of_exponentials(value, np.maximum(np.abs(sums.value), np.abs(decay)))
        return (Expected(value * valid, bound * np.abs(valid)),)

    inputs = (
        Input((block, config.hidden_size)),
        _weight(rows, config.hidden_size),
        per_row,
        per_row,
        per_token,
    )
    return Kind("in_proj_ba", inputs, spelled, expected)


def _gated(x: Array, w: Array) -> tuple[Array, Array]:
    gate_up = linear(x, w)
    size = gate_up.shape[1] // 2
    return gate_up, jax.nn.silu(columns(gate_up, 0, size)) * columns(gate_up, size, size)


def _gated_expected(x: Values, w: Values) -> tuple[Expected, ...]:
    sums = contracted(x, w.T)
    size = w.shape[0] // 2
    gate, up = sums.value[:, :size], sums.value[:, size:]
    silu = gate / (1 + np.exp(-gate))
    # The slope of silu is at most 1.1.
    bound = 1.1 * np.abs(up) * sums.bound[:, :size] + np.abs(silu) * sums.bound[:, size:]
    value = silu * up
    return sums, Expected(value, bound + _of_exponentials(value, gate))


def _of_exponentials(value: Values, argument: Values) -> Values:
    """What a few operations on exp(argument) may be off: Vulkan allows exp 3 + 2|x| units in the last
    place."""
    return (np.abs(value) + HALF_ULP) * (20 + 2 * np.abs(argument)) * 2 * HALF_ULP


def _attention(config: TextConfig, steps: int, capacity: int) -> tuple[Kind, Kind]:
    """Queries with the keys of the cache, probabilities with its values; of a block, or of one token."""
    kv_heads, head_dim = config.num_key_value_heads, config.head_dim
    group = query_rows(config.num_attention_heads // kv_heads, steps, F16)
    cache = Input((capacity, kv_heads, head_dim))
    query = Input((kv_heads * group, steps, head_dim), spread=head_dim**-0.5)
    probabilities = Input((kv_heads, group, steps, capacity), spread=0.0)
    # Of one token, the mask is added by the product's own kernel.
    masks = () if steps > 1 else (Input((steps, capacity), np.dtype(np.float32)),)

    def read(query: Array, k: Array, *masks: Array) -> Array:
        return sum((mask[None, None] for mask in masks), scores(query, k))

    def reading(query: Values, k: Values, *masks: Values) -> tuple[Expected, ...]:
        added = masks[0][None] if masks else None
        sums = contracted(query.reshape(kv_heads, -1, head_dim), k.transpose(1, 2, 0), added)
        return (sums.reshaped(kv_heads, group, steps, capacity),)

    def mixing(weights: Values, v: Values) -> tuple[Expected, ...]:
        sums = contracted(weights.reshape(kv_heads, -1, capacity), v.transpose(1, 0, 2))
        return (sums.reshaped(kv_heads, group, steps, head_dim),)

    return (
        Kind("attention: q k^T", (query, cache, *masks), read, reading),
        Kind("attention: p v", (probabilities, cache), mix, mixing),
    )


def _interactions(config: TextConfig, block: int) -> tuple[Kind, ...]:
    """What the delta rule's tokens do to each other (`delta.interactions`), and the inverse of it."""
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    size, blocks = config.linear_key_head_dim, value_heads * block // BLOCK

    def overlaps(heads: Array) -> Array:
        q_k = heads.reshape(key_heads, 2, 1, block, size)
        return product("hxctd,hcsd->hcxts", q_k, q_k[:, 1], F16)

    def overlapping(heads: Values) -> tuple[Expected, ...]:
        q_k = heads.reshape(key_heads, 2, block, size)
        return (contracted(q_k, turned(q_k[:, 1:])).reshaped(key_heads, 1, 2, block, block),)

    def between(solved: Array, table: Array) -> Array:
        wide = table.reshape(value_heads, -1, BLOCK, table.shape[-1])
        wide = wide.reshape(-1, BLOCK, table.shape[-1])[..., -2 * block :]
        return product("bij,bjk->bik", solved, wide, F16).astype(F16)

    def joined(solved: Values, table: Values) -> tuple[Expected, ...]:
        wide = table.reshape(blocks, BLOCK, -1)[..., -2 * block :]
        return (contracted(solved, wide, stored=F16),)

    inside = (
        Kind(
            "delta: q k^T, k k^T",
            (Input((2 * key_heads, block, size), spread=size**-0.5),),
            overlaps,
            overlapping,
        ),
        *_series(f"delta: inverse in {BLOCK}s", blocks, BLOCK),
    )
    if block <= BLOCK:
        return inside
    # Columns: the overlaps of queries, A inside of blocks, A between them, the identity.
    table = Input((value_heads, 1, block, 3 * block + BLOCK))
    operands = (Input((blocks, BLOCK, BLOCK), spread=BLOCK**-0.5), table)
    return (
        *inside,
        Kind("delta: inverse between", operands, between, joined),
        *_series(f"delta: inverse of {block}", value_heads, block),
    )


def _series(name: str, count: int, size: int) -> tuple[Kind, Kind]:
    """The two kinds of steps of `triangular.series`: one that doubles the terms, and the last."""
    pair = Input((count, size, 2 * size), spread=size**-0.5)

    def doubled(pair: Array) -> Array:
        keep = np.repeat(np.array([0.0, 1.0], np.float32), size)[None, None]
        grown = product("bij,bjk->bik", pair[..., :size], pair, F16)
        return (grown + pair.astype(jnp.float32) * keep).astype(F16)

    def doubling(pair: Values) -> tuple[Expected, ...]:
        kept = np.concatenate([np.zeros_like(pair[..., size:]), pair[..., size:]], axis=-1)
        return (contracted(pair[..., :size], pair, kept, stored=F16),)

    def ending(pair: Values) -> tuple[Expected, ...]:
        x = pair[..., size:]
        return (contracted(pair[..., :size], x, x, stored=F16),)

    return (
        Kind(f"{name}, doubling", (pair,), doubled, doubling),
        Kind(f"{name}, last", (pair,), lambda pair: series(pair, 2, F16), ending),
    )


def _chunk(config: TextConfig, block: int) -> tuple[Kind, ...]:
    """What `delta.chunked` does with one chunk."""
    heads, size = config.linear_num_value_heads, config.linear_value_head_dim
    scaled = Input((heads, 1, 5 * block, size))
    square = Input((heads, 1, block, block), spread=block**-0.5)
    read, writes = Input((heads, 2 * block, size)), Input((heads, block, size))
    state = Input((heads, size, size), np.dtype(np.float32))

    def reads(scaled: Array, entering: Array) -> Array:
        added = scaled[:, 0, 2 * block : 4 * block].astype(jnp.float32)
        return (product("hrk,hvk->hrv", scaled[:, 0, : 2 * block], entering, F16) + added).astype(F16)

    def reading(scaled: Values, entering: Values) -> tuple[Expected, ...]:
        rows = scaled[:, 0]
        added = rows[:, 2 * block : 4 * block]
        return (contracted(rows[:, : 2 * block], turned(entering), added, stored=F16),)

    return (
        Kind("delta: state read", (scaled, Input(state.shape, spread=size**-0.5)), reads, reading),
        Kind(
            "delta: writes",
            (square, read),
            lambda solved, read: product("hts,hsv->htv", solved[:, 0], read[:, block:], F16).astype(F16),
            lambda solved, read: (contracted(solved[:, 0], read[:, block:], stored=F16),),
        ),
        Kind(
            "delta: outputs",
            (square, writes),
            lambda table, writes: product("hts,hsv->htv", table[:, 0, :, :block], writes, F16),
            lambda table, writes: (contracted(table[:, 0], writes),),
        ),
        Kind(
            "delta: state written",
            (state, writes, scaled),
            lambda state, writes, scaled: (
                state + product("htv,htk->hvk", writes, scaled[:, 0, 4 * block :], F16)
            ),
            lambda state, writes, scaled: (contracted(turned(writes), scaled[:, 0, 4 * block :], state),),
        ),
    )
