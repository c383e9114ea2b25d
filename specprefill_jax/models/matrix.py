"""Weight matrices, plain or tiled, and the products that read them; the rest of the model sees no difference.

A plain matrix is [out, in], as in the checkpoint. A tiled one holds the same numbers in the order in which a
CPU's matrix kernel reads them, so that prefill, decode and the vocabulary head share one copy, mapped from
the archive: no entry packs weights of its own when a module is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped
from numpy.typing import DTypeLike


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiled:
    """[out, in] as tiles [out/n, in/k, n, k], zero-padded to whole tiles."""

    tiles: Shaped[Array, "outer inner n k"]
    out_features: int = field(metadata={"static": True})
    in_features: int = field(metadata={"static": True})


Matrix: TypeAlias = Float[Array, "N K"] | Tiled


@dataclass(frozen=True)
class TileShape:
    """The tile a target's matrix kernel reads: `rows` outputs by `depth` inputs."""

    rows: int
    depth: int

    def tiled_shape(self, out_features: int, in_features: int) -> tuple[int, int, int, int]:
        return (-(-out_features // self.rows), -(-in_features // self.depth), self.rows, self.depth)

    def tile(self, matrix: Shaped[np.ndarray, "N K"]) -> Shaped[np.ndarray, "outer inner n k"]:
        """The tiles of a plain matrix (a copy)."""
        outer, inner, rows, depth = self.tiled_shape(*matrix.shape)
        padding = ((0, outer * rows - matrix.shape[0]), (0, inner * depth - matrix.shape[1]))
        padded = np.pad(matrix, padding) if any(after for _, after in padding) else matrix
        return np.ascontiguousarray(padded.reshape(outer, rows, inner, depth).transpose(0, 2, 1, 3))


def product_dtype(matrices: DTypeLike) -> np.dtype:
    """The format of operands in products of activations with each other, by that of the weight matrices.

    f16 matrices mean a device with f16 matrix units, and all products go there. Elsewhere it is f32.
    """
    return np.dtype(np.float16) if np.dtype(matrices) == np.float16 else np.dtype(np.float32)


def dtype_of(weight: Matrix) -> np.dtype:
    """The format of a matrix."""
    return np.dtype((weight.tiles if isinstance(weight, Tiled) else weight).dtype)


def product(equation: str, a: Array, b: Array, dtype: np.dtype) -> Array:
    """An einsum of two operands in `dtype`, summed in f32."""
    return jnp.einsum(equation, a.astype(dtype), b.astype(dtype), preferred_element_type=jnp.float32)


def columns(x: Float[Array, "T K"], start: int, size: int) -> Float[Array, "T {size}"]:
    """x[:, start:start + size] read in place: a slice would be a copy of its own on the device."""
    column = start + jnp.arange(size, dtype=jnp.int32)
    return x.at[:, column].get(mode="promise_in_bounds")


def linear(x: Float[Array, "T K"], weight: Matrix) -> Float[Array, "T N"]:
    """x · weightᵀ in the weight's dtype, accumulated and returned in f32."""
    if isinstance(weight, Tiled):
        return tiled_linear(x, weight)
    return jnp.einsum("tk,nk->tn", x.astype(weight.dtype), weight, preferred_element_type=jnp.float32)


def linear_by_output(x: Float[Array, "T K"], weight: Matrix) -> Float[Array, "N T"]:
    """weight · xᵀ: the same numbers with each output's in one row, for the few outputs that go on as rows."""
    if isinstance(weight, Tiled):
        return tiled_linear(x, weight).T
    return jnp.einsum("nk,tk->nt", weight, x.astype(weight.dtype), preferred_element_type=jnp.float32)


def tiled_linear(x: Float[Array, "T K"], weight: Tiled) -> Float[Array, "T N"]:
    """The same product over tiles: x is cut into tiles too, and the tiles of the result are put together."""
    steps = x.shape[0]
    outer, inner, rows, depth = weight.tiles.shape
    tokens = rows if steps % rows == 0 else steps  # square tiles; in decode, a single row
    x = x.astype(weight.tiles.dtype)
    if inner * depth != weight.in_features:
        x = jnp.pad(x, ((0, 0), (0, inner * depth - weight.in_features)))
    left = x.reshape(steps // tokens, tokens, inner, depth).transpose(0, 2, 1, 3)
    product = mmt4d(left, weight.tiles).transpose(0, 2, 1, 3).reshape(steps, outer * rows)
    return product[:, : weight.out_features]


@jax.jit
def mmt4d(left: Shaped[Array, "M K m k"], right: Shaped[Array, "N K n k"]) -> Float[Array, "M N m n"]:
    """Product of tiles.

    Compiled modules replace the body of this function by `linalg.mmt4d` (see `aot.lower`).
    """
    return jnp.einsum("aixk,biyk->abxy", left, right, preferred_element_type=jnp.float32)


@jax.jit
def apart(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """x, made by a kernel of its own.

    Compiled modules replace the body of this function by a barrier against fusion (see `aot.lower`).
    """
    return x + 0.0


def embed(weight: Matrix, tokens: Int[Array, " T"]) -> Float[Array, "T K"]:
    """Rows of the matrix, in f32."""
    if isinstance(weight, Tiled):
        rows = weight.tiles.shape[2]
        picked = weight.tiles.at[tokens // rows, :, tokens % rows].get(mode="promise_in_bounds")
        return picked.reshape(tokens.shape[0], -1)[:, : weight.in_features].astype(jnp.float32)
    return weight.at[tokens].get(mode="promise_in_bounds").astype(jnp.float32)
