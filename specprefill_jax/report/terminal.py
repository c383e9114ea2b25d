"""What the terminal shows: kept tokens in color, a line of counts, a table of phases."""

from collections.abc import Mapping

from rich.console import Group
from rich.table import Table
from rich.text import Text

from specprefill_jax.engine import Scored, Timings
from specprefill_jax.report.heat import LEVELS, kept_mask, levels, runs
from specprefill_jax.selection import Selection

# From cool to hot, all dark enough for white text; 256-color numbers, so that every terminal has them.
_HEAT = tuple(f"color({number})" for number in (17, 18, 54, 90, 89, 125, 124, 160))


def kept_text(scored: Scored, *, color: bool) -> Text:
    """The prompt: kept tokens on their heat, the others dim. Without color, the others are only counted."""
    kept = kept_mask(scored)
    heat = levels(scored.importance)
    text = Text()
    for start, end in runs(kept * LEVELS + (heat if color else 0)):
        piece = "".join(scored.pieces[start:end])
        if kept[start]:
            shade = _HEAT[heat[start] * len(_HEAT) // LEVELS]
            text.append(piece, style=f"white on {shade}" if color else "")
        elif color:
            text.append(piece, style="dim")
        else:
            text.append(f" [... {end - start} tokens ...] ")
    return text


def selection_line(selection: Selection) -> str:
    """How much is kept, in one line."""
    share = selection.kept.size / selection.prompt
    return (
        f"kept {selection.kept.size} of {selection.prompt} tokens ({share:.0%}), "
        f"{selection.forced} of them forced, by {selection.mode}"
    )


def summary(timings: Timings) -> Group:
    """What became of a request, and how long the first token took."""
    kept = [f"{timings.kept} of {timings.prompt} tokens ({timings.kept / timings.prompt:.0%})"]
    if timings.forced:
        kept.append(f"{timings.forced} forced")
    if timings.pinned:
        kept.append(f"{timings.pinned} of them pinned")
    if timings.reused:
        kept.append(f"{timings.reused} done with in earlier turns")
    lines = [("status", f"{timings.status}: {timings.reason}"), ("kept", ", ".join(kept))]
    if timings.remembered:
        lines.append(("draft", "knew this prompt"))
    elif timings.scoring is not None:
        read, ahead = timings.draft_read, timings.looked_ahead
        lines.append(("draft", f"read {read} tokens, and {ahead} steps ahead"))
    lines.append(("first", f"{timings.first_token:.1f} ms to the first token"))
    return Group(*(Text.assemble((f"{name:<8}", "bold"), text) for name, text in lines))


def phases_table(phases: Mapping[str, float]) -> Table:
    """One row per phase, in milliseconds, and their sum."""
    table = Table(show_footer=True)
    table.add_column("phase", footer="sum")
    table.add_column("ms", justify="right", footer=f"{sum(phases.values()):.1f}")
    for phase, milliseconds in phases.items():
        table.add_row(phase, f"{milliseconds:.1f}")
    return table
