"""Where the prompt is cut into chunks: every so many tokens, or where its text has borders.

Chunks are given by their edges: chunk `i` is the tokens from `edges[i]` to `edges[i + 1] - 1`.
"""

import numpy as np
from jaxtyping import Int, Int8

from specprefill_jax.settings import Settings


def fixed(tokens: int, chunk: int) -> Int[np.ndarray, "B"]:
    """Edges of chunks of `chunk` tokens each, and in the last one what is left."""
    return np.append(np.arange(0, tokens, chunk), tokens)


def segments(borders: Int8[np.ndarray, "M"], chunk: int) -> Int[np.ndarray, "B"]:
    """Edges of chunks of about `chunk` tokens that end where the text does.

    Each has from half as many tokens (rounded up) to half as many again (`longest_segment`); a prompt of
    fewer is one chunk. Of the places in these bounds a chunk ends at the best border, and of equally good
    ones at that nearest to `chunk` tokens (ties: the shorter chunk). Where there is none, it has `chunk`.

    Where a chunk ends follows from twice `chunk` tokens behind its start: text that is added to a prompt
    moves only the last edges.

    Args:
        borders: For each token how good a place its end is: 0 for none, and else the more the better, as
            `Chat.borders` tells.
    """
    starts, start = [], 0
    while start < borders.size:
        starts.append(start)
        start += _length(borders[start:], chunk)
    return np.array([*starts, borders.size])


def longest_segment(chunk: int) -> int:
    """Most tokens of a chunk that ends where the text does."""
    return 3 * chunk // 2


def longest_chunk(settings: Settings) -> int:
    """Most tokens of a chunk, whatever the prompt."""
    return longest_segment(settings.chunk) if settings.chunking == "text" else settings.chunk


def _length(borders: Int8[np.ndarray, "M"], chunk: int) -> int:
    """Tokens of the first chunk. It leaves none or enough for another."""
    least, most = (chunk + 1) // 2, longest_segment(chunk)
    if borders.size <= most:
        return borders.size
    lengths = np.arange(least, min(most, borders.size - least) + 1)
    found = borders[lengths - 1]
    if not found.any():
        return chunk
    best = lengths[found == found.max()]
    return int(best[np.argmin(np.abs(best - chunk))])
