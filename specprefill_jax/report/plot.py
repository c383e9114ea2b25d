"""What came of an evaluation, as a picture."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from specprefill_jax.errors import EvaluationMissing, FileMissing, SettingError
from specprefill_jax.quality.summary import Row

FORMATS = (".png", ".svg", ".pdf")

PANEL = (3.6, 2.8)
"""Inches of one panel."""

MOST_COLUMNS = 4


def check_plot(path: Path) -> None:
    """Find out whether a plot can be drawn, before an evaluation begins.

    Raises:
        SettingError: the file's name ends in no format that is known.
        EvaluationMissing: matplotlib is not installed.
    """
    if path.suffix not in FORMATS:
        raise SettingError(f"plot={path}: the file's name must end in {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise EvaluationMissing(
            'a plot needs the package matplotlib: pip install "specprefill-jax[eval]"'
        ) from error


def write_plot(rows: Sequence[Row], path: Path) -> None:
    """Accuracy with its interval over the share of tokens kept; dense prefill is the point at 100%.

    A panel for each suite and filler, a line for each length.

    Raises:
        FileMissing: the file cannot be written.
        SettingError, EvaluationMissing: as `check_plot`.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    names = list(dict.fromkeys((row.cell.suite, row.cell.filler) for row in rows))
    columns = min(len(names), MOST_COLUMNS)
    stacked = -(-len(names) // columns)
    width, height = PANEL
    figure = Figure(figsize=(width * columns, height * stacked), layout="constrained")
    panels = figure.subplots(stacked, columns, squeeze=False).flat
    for panel, (suite, filler) in zip(panels, names, strict=False):
        for tokens, points in _by_length(rows, suite, filler):
            shares = [100 * row.accuracy.value for row in points]
            below = [100 * (row.accuracy.value - row.accuracy.low) for row in points]
            above = [100 * (row.accuracy.high - row.accuracy.value) for row in points]
            kept = [100 * row.kept for row in points]
            panel.errorbar(
                kept,
                shares,
                yerr=(below, above),
                marker="o",
                markersize=4,
                capsize=2,
                label=f"{tokens:,} tokens",
            )
        panel.set_title(f"{suite}, {filler}", fontsize="medium")
        panel.set_xlim(-3, 103)
        panel.set_ylim(-3, 103)
        panel.grid(alpha=0.3)
    for panel in panels[len(names) :]:
        panel.set_visible(False)
    found = (panel.get_legend_handles_labels() for panel in panels)
    lines = {label: line for drawn in found for line, label in zip(*drawn, strict=True)}
    figure.legend(list(lines.values()), list(lines), loc="outside upper center", ncols=len(lines))
    figure.supxlabel("tokens kept, %")
    figure.supylabel("right answers, %")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise FileMissing(f"--plot: {path} cannot be written: {error.strerror}") from error


def _by_length(rows: Sequence[Row], suite: str, filler: str) -> Iterator[tuple[int, list[Row]]]:
    """The rows of a panel by length, of each the one with the fewest tokens kept first."""
    here = [row for row in rows if (row.cell.suite, row.cell.filler) == (suite, filler)]
    for tokens in sorted({row.cell.tokens for row in here}):
        yield tokens, sorted((row for row in here if row.cell.tokens == tokens), key=lambda row: row.kept)
