"""What came of an evaluation: a table for each cell."""

from collections.abc import Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from specprefill_jax.quality.statistics import Interval
from specprefill_jax.quality.summary import Row

# As wide as their widest values, so that the tables of several cells stand one below the other in 80 columns.
_COLUMNS = (
    ("right", 13),
    ("minus dense", 18),
    ("kept", 4),
    ("most", 4),
    ("whole", 5),
    ("first", 5),
    ("KL", 6),
)


def cell_table(rows: Sequence[Row]) -> Group:
    """A row for each way in which the prompts of one cell were read; percentages, and nats for KL.

    What did not go as it should stands below: requests that were not sparse, and budgets that were exceeded.
    """
    title = Text(f"{rows[0].cell}, n = {rows[0].prompts}", "bold")
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("way", min_width=9, no_wrap=True)
    for heading, width in _COLUMNS:
        table.add_column(heading, justify="right", min_width=width, no_wrap=True)
    for row in rows:
        table.add_row(
            row.way,
            _share(row.accuracy),
            "" if row.difference is None else _points(row.difference),
            f"{row.kept:.0%}",
            f"{row.most_kept:.0%}",
            f"{row.whole:.0%}",
            f"{row.agreement:.0%}",
            f"{row.divergence:.3f}",
        )
    return Group(title, table, *_otherwise(rows), Text())


def _share(found: Interval) -> str:
    return f"{found.value:.0%} ({100 * found.low:.0f}-{100 * found.high:.0f})"


def _points(found: Interval) -> str:
    """Percentage points, all with their signs."""
    value, low, high = (f"{round(100 * part):+d}" for part in found)
    return f"{value} ({low} to {high})"


def _otherwise(rows: Sequence[Row]) -> list[Text]:
    lines = [
        Text(f"{row.way}: {count} of {row.prompts} {status}, read densely", "yellow")
        for row in rows
        for status, count in sorted(row.unlike_asked.items())
    ]
    return lines + [
        Text(f"{row.way}: more was kept of {row.over_budget} of {row.prompts} than its budget", "bold red")
        for row in rows
        if row.over_budget
    ]
