"""Overlapping windows for a draft that cannot read the whole prompt at once.

Source: SpecPrefill guide v3.1, "Sliding Window" and "Auto Window Size".
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from specprefill_jax.settings import SMALLEST_WINDOW, WINDOW_MARGIN

ATTENTION_BYTES = 500 * 2**20
"""What one layer's attention probabilities may take, as the guide budgets for a 16 GB GPU."""


class Window(NamedTuple):
    """Tokens [start, end) are read from zero state; [start, keep_end) get their importance from it."""

    start: int
    end: int
    keep_end: int


def attention_bytes(ctx: int, tokens: int, heads: int) -> int:
    """Bytes of one layer's float32 attention matrix [heads, tokens, ctx], where all of it is materialized."""
    return ctx * tokens * heads * 4


def auto_window(ctx: int, heads: int) -> int:
    """Window size in tokens for a draft context of `ctx` slots and `heads` query heads.

    The largest whose float32 attention probabilities [heads, window, ctx] fit `ATTENTION_BYTES`, within the
    guide's clamps. `ctx` is at least 640, which `Settings` ensures.
    """
    fitting = min(ctx - 512, ATTENTION_BYTES // attention_bytes(ctx, 1, heads))
    return min(max(fitting, SMALLEST_WINDOW), ctx - WINDOW_MARGIN)


def plan_windows(tokens: int, window: int) -> tuple[Window, ...]:
    """Windows of `window` tokens, each half a window after the one before, over a prompt of `tokens`.

    Every window but the last contributes its first half; the first that reaches the prompt's end is the last
    and contributes all it has. So each token is contributed once, and no window repeats what another covered.
    """
    stride = window // 2
    windows: list[Window] = []
    start = 0
    while start + window < tokens:
        windows.append(Window(start, start + window, start + stride))
        start += stride
    return (*windows, Window(start, tokens, tokens))


def merge_windows(
    windows: Sequence[Window], importances: Sequence[Float[np.ndarray, "_"]]
) -> Float[np.ndarray, "M"]:
    """The prompt's importance: what each window contributes of its own tokens' importance, end to end."""
    parts = [scores[: w.keep_end - w.start] for w, scores in zip(windows, importances, strict=True)]
    return np.concatenate(parts)
