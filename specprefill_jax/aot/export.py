"""The entry points of one model as a module: `prefill`, `prefill_rows`, `decode` by bucket, and `head`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from specprefill_jax.aot.lower import Entry, module_text
from specprefill_jax.artifact.manifest import StateTensor
from specprefill_jax.models import qwen35
from specprefill_jax.models.checkpoint import ParameterSpec, build_model, parameter_specs
from specprefill_jax.models.config import TextConfig
from specprefill_jax.models.matrix import Tiled, TileShape, product_dtype
from specprefill_jax.models.parameters import Model, ModelState

DTYPES = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
}


@dataclass(frozen=True)
class Shapes:
    """What a module is compiled for: buckets, attention rows, number format and layout of the matrices."""

    blocks: tuple[int, ...]
    capacities: tuple[int, ...]
    rows: int
    numerics: str
    tile: TileShape | None

    def stored_shape(self, spec: ParameterSpec) -> jax.ShapeDtypeStruct:
        """Shape of a parameter in the archive."""
        shape = spec.shape
        if self.tile is not None and spec.kind == "matrix":
            shape = self.tile.tiled_shape(*shape)
        return jax.ShapeDtypeStruct(shape, spec.dtype(DTYPES[self.numerics]))

    def parameter_bytes(self, config: TextConfig) -> list[int]:
        """Sizes of all parameters in the archive."""
        stored = map(self.stored_shape, parameter_specs(config))
        return [math.prod(weight.shape) * weight.dtype.itemsize for weight in stored]


def export_module(name: str, config: TextConfig, shapes: Shapes) -> str:
    """MLIR of the model's module; its parameters are external, under the checkpoint's keys."""
    specs = parameter_specs(config)
    parameters = [(spec.key, shapes.stored_shape(spec)) for spec in specs]
    order = {spec.path: i for i, spec in enumerate(specs)}

    def model(arrays: tuple[Any, ...]) -> Model:
        def leaf(spec: ParameterSpec) -> Any:
            array = arrays[order[spec.path]]
            if shapes.tile is not None and spec.kind == "matrix":
                return Tiled(array, *spec.shape)
            return array

        return build_model(config, leaf)

    return module_text(name, parameters, _entries(config, shapes, model))


def _entries(config: TextConfig, shapes: Shapes, model: Callable[[tuple[Any, ...]], Model]) -> list[Entry]:
    entries = []
    for capacity in shapes.capacities:
        abstract = jax.eval_shape(partial(qwen35.initial_state, config, capacity, DTYPES[shapes.numerics]))
        state, tree = jax.tree.flatten(abstract)
        rebuild = partial(jax.tree.unflatten, tree)
        for block in (length for length in shapes.blocks if length <= capacity):
            inputs = (_i32(block), _i32(block), _i32(), _i32())
            for rows in sorted({0, shapes.rows}):
                kind = "prefill_rows" if rows else "prefill"
                function = partial(_prefill, config, model, rebuild, rows)
                entries.append(Entry(f"{kind}_T{block}_C{capacity}", function, inputs, tuple(state)))
        function = partial(_decode, config, model, rebuild, shapes.rows > 0)
        entries.append(Entry(f"decode_C{capacity}", function, (_i32(), _i32(), _i32()), tuple(state)))
    hidden = jax.ShapeDtypeStruct((config.hidden_size,), jnp.float32)
    entries.append(Entry("head", lambda arrays, x, _: (qwen35.head(model(arrays), x),), (hidden,), ()))
    return entries


def _prefill(
    config: TextConfig,
    model: Callable[[tuple[Any, ...]], Model],
    rebuild: Callable[[Any], ModelState],
    rows: int,
    arrays: tuple[Any, ...],
    *inputs: Any,
) -> tuple[Any, ...]:
    tokens, positions, count, slot, state = inputs
    hidden, returned, after = qwen35.prefill(
        config, model(arrays), tokens, positions, count, slot, rebuild(state), rows=rows
    )
    return (hidden, *((returned,) if rows else ()), *jax.tree.leaves(after))


def _decode(
    config: TextConfig,
    model: Callable[[tuple[Any, ...]], Model],
    rebuild: Callable[[Any], ModelState],
    rows: bool,
    arrays: tuple[Any, ...],
    *inputs: Any,
) -> tuple[Any, ...]:
    token, position, slot, state = inputs
    logits, returned, after = qwen35.decode(
        config, model(arrays), token, position, slot, rebuild(state), rows=rows
    )
    return (logits, *((returned,) if rows else ()), *jax.tree.leaves(after))


def state_tensors(config: TextConfig, numerics: str) -> tuple[StateTensor, ...]:
    """The state's tensors in the order of the entries' arguments, as the manifest names them."""
    cache = "f16" if product_dtype(DTYPES[numerics]) == np.float16 else "f32"
    tensors = []
    for layer, kind in enumerate(config.layer_types):
        if kind == "full_attention":
            shape = ("C", config.num_key_value_heads, config.head_dim)
            tensors += [StateTensor(f"layers.{layer}.{name}", shape, cache) for name in ("k", "v")]
        else:
            inputs = (config.linear_conv_kernel_dim - 1, config.conv_channels + config.value_dim)
            size = (config.linear_num_value_heads, config.linear_value_head_dim, config.linear_key_head_dim)
            tensors += [
                StateTensor(f"layers.{layer}.conv", inputs, "f32"),
                StateTensor(f"layers.{layer}.matrix", size, "f32"),
            ]
    return tuple(tensors)


def _i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
