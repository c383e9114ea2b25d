"""What memory the ways to answer a prompt take, as a table."""

from collections.abc import Callable, Iterator

from rich.console import Group
from rich.table import Table
from rich.text import Text

from specprefill_jax.policy import MemoryPlan, Way
from specprefill_jax.policy.memory import Share, size_words

# Row of a model's share, and what it says of it.
_ROWS: tuple[tuple[str, Callable[[Share], str]], ...] = (
    ("weights", lambda share: size_words(share.weights)),
    ("slots", lambda share: f"{share.slots} of {share.capacity}" if share.slots else ""),
    ("cache", lambda share: size_words(share.cache) if share.slots else ""),
    ("snapshots", lambda share: size_words(share.snapshots) if share.slots else ""),
    ("block", lambda share: f"{share.block} tokens" if share.slots else ""),
    ("one call", lambda share: size_words(share.call) if share.slots else ""),
    ("rows", lambda share: size_words(share.rows) if share.rows else ""),
)


def memory_table(plan: MemoryPlan, memory: int | None) -> Group:
    """A column for each way, the sums below, then what would be done in `memory` bytes (None: no limit)."""
    return Group(*_parts(plan, memory))


def _parts(plan: MemoryPlan, memory: int | None) -> Iterator[Table | Text]:
    if plan.ways:
        yield _table(plan, memory)
        yield Text("together: weights, caches, snapshots, and the larger call with its rows")
    for line in plan.impossible:
        yield Text(line)
    if any(way.estimated for way in plan.ways):
        yield Text("one call: estimated, or in proportion to what the build recorded of its largest")
    chosen = plan.fitting(memory)
    if chosen is None:
        yield Text("nothing fits", "bold")
    else:
        reason = plan.reason if chosen is plan.ways[0] else f"{plan.ways[0].name} does not fit"
        yield Text.assemble((chosen.name, "bold"), f": {reason}")


def _table(plan: MemoryPlan, memory: int | None) -> Table:
    table = Table(f"{plan.tokens} + {plan.max_tokens} tokens")
    for way in plan.ways:
        table.add_column(way.name, justify="right")
    for role in ("draft", "target"):
        shares = [way.draft if role == "draft" else way.target for way in plan.ways]
        for label, tell in _ROWS:
            if any(tell(share) for share in shares):
                table.add_row(f"{role} {label}", *(tell(share) for share in shares))
    table.add_section()
    table.add_row("tokens kept, at most", *(str(way.kept) for way in plan.ways))
    table.add_row("together", *(size_words(way.total) for way in plan.ways))
    if memory is not None:
        table.add_row(f"fits {size_words(memory)}", *(_fits(way, memory) for way in plan.ways))
    return table


def _fits(way: Way, memory: int) -> Text:
    return Text("yes", "green") if way.total <= memory else Text("no", "red")
