"""The smallest program with a product that belongs onto the matrix unit."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specprefill_jax.aot.lower import Entry, module_text


def program(dtype: str) -> str:
    """The entry `product`: x wᵀ, whose sizes fit cooperative matrices."""

    def product(_: tuple[()], x: jax.Array, w: jax.Array, state: tuple[()]) -> tuple[jax.Array]:
        return (jnp.einsum("tk,nk->tn", x, w, preferred_element_type=jnp.float32),)

    x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((64, 512), (256, 512)))
    return module_text("gemm", [], [Entry("product", product, (x, w), ())])
