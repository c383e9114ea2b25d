"""How many tokens may be kept, how many must be, and which must be."""

import math
from decimal import Decimal

import numpy as np
from jaxtyping import Bool, Int

from specprefill_jax.selection.segments import longest_chunk, longest_segment
from specprefill_jax.settings import Settings

FORCED_FIRST = 4
"""First tokens that are always kept: attention sinks there hold the target's attention together."""

FORCED_LAST = 2
"""Last tokens that are always kept: the answer begins from them."""


def minimum_kept(tokens: int) -> int:
    """Fewest tokens to keep of `tokens`: a tenth, at least 4, at most 128."""
    return min(128, max(4, tokens // 10))


def keeps_everything(tokens: int, settings: Settings) -> bool:
    """Whether all `tokens` are kept whatever their importance, so that scoring them would be wasted."""
    return settings.keep_fraction >= 1 or tokens <= minimum_kept(tokens)


def wanted_tokens(tokens: int, settings: Settings) -> int:
    """Tokens that might be kept but for `max_keep`: the fraction `keep`, or in mass mode all of them."""
    if settings.selection == "mass":
        return tokens
    # Decimal takes 0.55 as written: in binary floating point 0.55 * 100 is above 55 and would become 56.
    return max(math.ceil(Decimal(repr(settings.keep_fraction)) * tokens), minimum_kept(tokens))


def token_budget(tokens: int, settings: Settings) -> int:
    """Most tokens that may be kept of `tokens`; never exceeded, forced tokens included."""
    wanted = wanted_tokens(tokens, settings)
    return min(wanted, settings.max_keep) if settings.max_keep else wanted


def fewest_kept(tokens: int, settings: Settings) -> int:
    """Fewest tokens that selection keeps of `tokens`, however its text is cut into chunks.

    The budget but for the longest chunk, or by mass the minimum.
    """
    budget = min(token_budget(tokens, settings), tokens)
    if settings.selection == "chunk":
        return max(budget - longest_chunk(settings) + 1, 1)
    return min(minimum_kept(tokens), budget)


def turn_budget(tokens: int, before: int, kept_before: int, settings: Settings) -> int:
    """Most tokens that a turn may keep of the `tokens - before` that are new in a conversation of `tokens`.

    What earlier turns left of the conversation's budget, and at least what the new tokens would have alone;
    at most `max_keep`, which bounds what is read at once.
    """
    new = tokens - before
    wanted = max(wanted_tokens(tokens, settings) - kept_before, wanted_tokens(new, settings))
    return min(new, wanted, settings.max_keep or new)


def forced_tokens(edges: Int[np.ndarray, "B"], chunk: int) -> Bool[np.ndarray, "M"]:
    """Mask of the tokens that are always kept: the first 4, the last 2, and the whole last chunk.

    Of a last chunk of more than half as many tokens again as `chunk`, the last so many.
    """
    tokens = int(edges[-1])
    forced = np.zeros(tokens, dtype=bool)
    forced[:FORCED_FIRST] = True
    forced[-FORCED_LAST:] = True
    last = int(edges[-2]) if tokens else 0
    forced[max(last, tokens - longest_segment(chunk)) :] = True
    return forced
