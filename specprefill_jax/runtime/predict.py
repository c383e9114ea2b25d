"""How long a model will take, from the measured times of its entries: sums over the calls to come."""

from specprefill_jax.artifact.manifest import Model
from specprefill_jax.artifact.rates import EntryTimes
from specprefill_jax.runtime.blocks import plan_blocks


def reading_ms(
    times: EntryTimes, model: Model, tokens: int, *, capacity: int, start: int = 0, rows: bool = False
) -> float | None:
    """Milliseconds that `Program.prefill` will take; None if one of its entries was not measured.

    Args:
        times: milliseconds of each entry.
        tokens: how many are read; nothing is done for none.
        capacity: slots of the cache.
        start: the slot of the first token.
        rows: whether the last block returns attention rows.

    Raises:
        PromptTooLong: the tokens do not fit the cache.
    """
    if tokens == 0:
        return 0.0
    plan = plan_blocks(
        tokens, lengths=model.blocks, capacity=capacity, start=start, rows=model.rows if rows else 0
    )
    entries = [f"prefill_T{block.length}_C{capacity}" for block in plan]
    if rows:
        entries[-1] = entries[-1].replace("prefill", "prefill_rows")
    return _sum(times, entries)


def answering_ms(times: EntryTimes, tokens: int, *, capacity: int) -> float | None:
    """Milliseconds that `head` and a decode step for each of `tokens` will take, such as those of lookahead.

    None if an entry was not measured. Without tokens nothing is done.
    """
    return _sum(times, ["head", *[f"decode_C{capacity}"] * tokens]) if tokens else 0.0


def together(*parts: float | None) -> float | None:
    """Their sum; None if one of them is not known."""
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _sum(times: EntryTimes, entries: list[str]) -> float | None:
    return together(*(times.get(entry) for entry in entries))
