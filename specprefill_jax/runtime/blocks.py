"""How many tokens go into which compiled block: a pure plan, made before anything runs."""

import dataclasses
from collections.abc import Sequence

from specprefill_jax.errors import EmptyPrompt, PromptTooLong


@dataclasses.dataclass(frozen=True)
class Block:
    """One call of `prefill_T{length}`: tokens[offset : offset + count] go to slots slot .. slot + count - 1.

    The call also writes padding into the slots up to slot + length, so these must exist.
    """

    length: int
    offset: int
    count: int
    slot: int


def capacity_for(slots: int, capacities: Sequence[int]) -> int | None:
    """The smallest compiled capacity of at least `slots` slots; None if none is that large.

    Args:
        capacities: cache slots C, ascending.
    """
    return next((capacity for capacity in capacities if capacity >= slots), None)


def plan_blocks(
    tokens: int, *, lengths: Sequence[int], capacity: int, start: int = 0, rows: int = 0
) -> tuple[Block, ...]:
    """Cover `tokens` tokens, the first of them at slot `start`, with blocks of the compiled lengths.

    The longest blocks come first. What is left goes into the shortest single block that holds it, unless that
    block would be at least half padding and a shorter one can be taken first. Any way of splitting gives the
    same state, so this choice is about time only. A block is filled less where the last needs more tokens,
    for the rows asked or, near the end of the cache, because its padding would not fit.

    Args:
        lengths: block lengths T, ascending.
        capacity: cache slots C.
        rows: the query rows R asked for; the last block then holds the last min(R, tokens) tokens.

    Raises:
        EmptyPrompt: there are no tokens.
        PromptTooLong: no split fits the cache.
    """
    if tokens < 1:
        raise EmptyPrompt("the prompt has no tokens; give at least one")
    least = max(1, min(rows, tokens))
    end = start + tokens
    reserve = _reserve(tokens, end, least, lengths, capacity)
    plan: list[Block] = []
    slot = start
    while True:
        left = end - slot
        front = [length for length in lengths if length <= left and 2 * min(length, left - reserve) > length]
        last = next((length for length in lengths if length >= left and slot + length <= capacity), None)
        if last is not None and not (front and 2 * left <= last):
            return (*plan, Block(last, slot - start, left, slot))
        length = front[-1] if front else lengths[0]
        count = min(length, left - reserve)
        plan.append(Block(length, slot - start, count, slot))
        slot += count


def _reserve(tokens: int, end: int, least: int, lengths: Sequence[int], capacity: int) -> int:
    """How many tokens to leave for the last block: it must hold `least`, and its padding must fit."""
    fitting = next((length for length in lengths if length >= least), None)
    if fitting is None:
        raise PromptTooLong(
            f"{least} query rows were asked for, but the longest compiled block holds {lengths[-1]} tokens: "
            "compile with longer `blocks`, or fewer `rows`"
        )
    if end > capacity or end - tokens + max(tokens, fitting) > capacity:
        raise PromptTooLong(
            f"{tokens} tokens from slot {end - tokens} on need {max(end, end - tokens + fitting)} slots "
            f"(blocks of {fitting} at least), but the cache has {capacity}: shorten the prompt, keep less "
            "of it, or use an artifact with larger `capacities`"
        )
    return max(least, min(fitting, end + fitting - capacity))
