"""(I - A)^-1 for strictly lower triangular A, in kernels that a GPU runs well.

Substitution by rows inside of blocks of 8, a series over the 8 blocks of 64, and one over the blocks of 64.
A single series (I + A)(I + A^2)(I + A^4).. over all of a chunk loses every digit in f32 on trained weights
(slow decay, repeated keys).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specprefill_jax.models.matrix import product

ROWS, BLOCK = 8, 64


@dataclass(frozen=True)
class Layout:
    """Where `inverse` wants the entries of A, for n tokens: a table of n rows and `width` columns.

    Its columns are A inside of blocks of 64 (each row's own block: 64 columns, n if n is less), and for more
    than 64 tokens A between those blocks and the identity, n columns each.

    Attributes:
        earlier: of an entry of the table, the column in A. Its row is the same.
        of_a: which entries come from A.
        other: what the others are, 0 or 1.
    """

    earlier: Int[np.ndarray, "n width"]
    of_a: Bool[np.ndarray, "n width"]
    other: Float[np.ndarray, "n width"]


def layout(size: int) -> Layout:
    """The layout for `size` tokens."""
    small = min(size, BLOCK)
    later, every = np.arange(size)[:, None], np.arange(size)[None, :]
    earlier, of_a = later // small * small + np.arange(small)[None, :], np.ones((size, small), bool)
    other = np.zeros((size, small), np.float32)
    if size > small:
        earlier = np.concatenate([earlier, np.broadcast_to(every, (size, size)), 0 * later + every], axis=1)
        of_a = np.concatenate([of_a, every < later // small * small, np.zeros((size, size), bool)], axis=1)
        other = np.concatenate([other, np.zeros((size, size)), np.eye(size)], axis=1).astype(np.float32)
    return Layout(earlier, of_a & (earlier < later), other)


def inverse(
    table: Float[Array, "H chunks n W"], skip: int, products: np.dtype
) -> Float[Array, "H chunks n n"]:
    """(I - A)^-1 of each chunk, from a table whose columns past the first `skip` are as `layout` has them."""
    heads, chunks, size, width = table.shape
    small = min(size, BLOCK)
    blocks = table.reshape(heads, chunks * size // small, small, width)
    pair = substituted(blocks, skip).astype(products).transpose(1, 2, 3, 0, 4).reshape(-1, small, 2 * small)
    solved = series(pair, small // ROWS, products)
    if size > small:
        wide = blocks.reshape(-1, small, width)[..., skip + small :]  # [A between | I]
        pair = product("bij,bjk->bik", solved, wide, products).astype(products)
        solved = series(pair.reshape(-1, size, 2 * size), size // small, products)
    return solved.reshape(heads, chunks, size, size)


def substituted(blocks: Float[Array, "H B n W"], skip: int) -> Float[Array, "2 H B n n"]:
    """D [A between | I] in each block, D the inverse of I - A inside of blocks of 8, row by row."""
    size = blocks.shape[2]
    row, column = np.arange(size), np.arange(size)
    start = row - row % ROWS

    def at(
        later: Int[np.ndarray, "*rows"], earlier: Int[np.ndarray, "*columns"]
    ) -> Float[Array, "H B *shape"]:
        found = blocks.at[:, :, jnp.asarray(later), jnp.asarray(skip + earlier)]
        return found.get(mode="promise_in_bounds").astype(jnp.float32)

    first = jnp.asarray(np.arange(2) == 0)[:, None, None, None, None]
    between = jnp.asarray(column[None, :] < start[:, None])[None, None]
    solved: list[Array] = []
    for i in range(min(ROWS, size)):
        unit = jnp.asarray((start[:, None] + i == column[None, :]).astype(np.float32))
        line = at((start + i)[:, None], column[None, :])
        x = jnp.where(first, jnp.where(between, line, 0.0)[None], unit[None, None, None])
        for j, earlier in enumerate(solved):
            x = x + at(start + i, start + j)[None, ..., None] * earlier
        solved.append(x)
    # One table and not one per row: a kernel takes so many operands and no more, then it falls apart.
    place, found = jnp.asarray(row % ROWS)[None, None, None, :, None], solved[0]
    for i in range(1, len(solved)):
        found = jnp.where(place == i, solved[i], found)
    return found


def series(pair: Float[Array, "B n 2*n"], terms: int, products: np.dtype) -> Float[Array, "B n n"]:
    """(I + N + .. + N^(terms-1)) X of a pair [N | X], terms rounded up to a power of two.

    One product squares N and doubles the terms: N [N | X] + [0 | X].
    """
    size = pair.shape[1]
    keep = np.repeat(np.array([0.0, 1.0], np.float32), size)[None, None]
    while terms > 2:
        grown = product("bij,bjk->bik", pair[..., :size], pair, products)
        pair = (grown + pair.astype(jnp.float32) * keep).astype(products)
        terms = -(-terms // 2)
    last = product("bij,bjk->bik", pair[..., :size], pair[..., size:], products)
    return (pair[..., size:].astype(jnp.float32) + last).astype(products)
