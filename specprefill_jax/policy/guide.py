"""The SpecPrefill guide's table of attention memory (v3.1, "GPU Memory Analysis"): llama.cpp's, beside ours.

Without fused attention llama.cpp keeps the attention matrices of all layers at once; here a call's layers
share the room of one (`policy.memory`).
"""

from dataclasses import dataclass
from typing import Literal

from specprefill_jax.scoring import attention_bytes

HEADS, LAYERS = 8, 6
"""Query heads and full-attention layers of the 0.8B draft."""

WEIGHTS = 3_300_000_000
"""Bytes of the guide's two models: 2.8 GB and 0.5 GB, quantized."""

MEMORY = 16_000_000_000
"""Bytes of the guide's machine."""

MOST_READ = 2000
"""Tokens that the guide lets the target read together (`SP_MAX_KEEP`), "to avoid target OOM"."""

BORDER = 0.95
"""From this share of the memory on the guide calls a sum borderline: caches are not in it."""


@dataclass(frozen=True)
class AttentionMemory:
    """Bytes of the draft's attention matrices: one layer's, all layers', and with both models' weights."""

    layer: int
    layers: int
    together: int
    verdict: Literal["fits", "fits, but the target does not", "borderline", "does not fit"]


def attention_memory(ctx: int, window: int) -> AttentionMemory:
    """A row of the table, for a draft context of `ctx` slots and a window of `window` tokens.

    As in the guide one layer's matrix is rounded, to MB below a GB and to tenths of a GB above, and the sums
    are made of that.
    """
    exact = attention_bytes(ctx, window, HEADS)
    unit = 10**6 if exact < 10**9 else 10**8
    layer = round(exact / unit) * unit
    together = LAYERS * layer + WEIGHTS
    if together > MEMORY:
        verdict = "does not fit"
    elif together > BORDER * MEMORY:
        verdict = "borderline"
    elif window > MOST_READ:
        verdict = "fits, but the target does not"
    else:
        verdict = "fits"
    return AttentionMemory(layer, LAYERS * layer, together, verdict)
