"""What people are shown of an evaluation: tables and a plot."""

import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from specprefill_jax.errors import EvaluationMissing, FileMissing, SettingError
from specprefill_jax.quality.evaluation import Cell
from specprefill_jax.quality.statistics import Interval
from specprefill_jax.quality.summary import Row
from specprefill_jax.report.evaluation import cell_table
from specprefill_jax.report.plot import write_plot


def row(way: str = "keep 0.3", **changes: object) -> Row:
    values: dict[str, object] = {
        "cell": Cell("needle", "code", 4000),
        "way": way,
        "prompts": 40,
        "accuracy": Interval(0.9, 0.769, 0.960),
        "difference": Interval(-0.05, -0.157, 0.061),
        "kept": 0.288,
        "most_kept": 0.3,
        "over_budget": 0,
        "whole": 0.95,
        "agreement": 0.975,
        "divergence": 0.12345,
        "statuses": {"active": 40},
    }
    return Row(**values | changes)  # type: ignore[arg-type]


DENSE = row("dense", difference=None, kept=1.0, most_kept=1.0, statuses={"disabled": 40})


def shown(*rows: Row) -> str:
    console = Console(width=80, force_terminal=False)
    with console.capture() as capture:
        console.print(cell_table(rows), highlight=False)
    return capture.get()


def test_a_table_tells_each_way_with_its_intervals_in_80_columns():
    lines = shown(DENSE, row()).splitlines()
    assert lines[0] == "needle, code, 4,000 tokens, n = 40"
    assert lines[1].split() == ["way", "right", "minus", "dense", "kept", "most", "whole", "first", "KL"]
    assert lines[3].split()[:3] == ["dense", "90%", "(77-96)"]
    assert re.sub(" +", " ", lines[4]).strip() == (
        "keep 0.3 90% (77-96) -5 (-16 to +6) 29% 30% 95% 98% 0.123"
    )
    assert len(lines) == 6


def test_the_widest_values_fit_80_columns():
    widest = row(
        "mass 0.85",
        accuracy=Interval(1.0, 0.912, 1.0),
        difference=Interval(-1.0, -1.0, -0.87),
        most_kept=1.0,
        whole=1.0,
        agreement=1.0,
        divergence=12.3456,
    )
    assert "…" not in shown(DENSE, widest)
    assert "100% (91-100)" in shown(widest)
    assert "-100 (-100 to -87)" in shown(widest)


def test_requests_that_ran_dense_and_budgets_that_were_exceeded_are_said_below():
    told = shown(DENSE, row(statuses={"active": 37, "failed_dense": 3}, over_budget=2))
    assert "keep 0.3: 3 of 40 failed_dense, read densely" in told
    assert "keep 0.3: more was kept of 2 of 40 than its budget" in told
    assert "disabled" not in told


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_plot_is_written_in_the_format_of_its_name(tmp_path: Path, ending: str):
    path = tmp_path / f"plot.{ending}"
    write_plot([DENSE, row()], path)
    begins = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    assert path.read_bytes().startswith(begins[ending])


def test_a_plot_has_a_panel_for_each_suite_and_filler_and_a_line_for_each_length(tmp_path: Path):
    rows = [
        row(way, cell=Cell(suite, "code", tokens))
        for suite in ("needle", "facts")
        for tokens in (1000, 2000)
        for way in ("dense", "keep 0.3")
    ]
    write_plot(rows, tmp_path / "plot.svg")
    comments = re.findall(r"<!-- (.*?) -->", (tmp_path / "plot.svg").read_text())
    assert [text for text in comments if text.endswith(", code")] == ["needle, code", "facts, code"]
    assert [text for text in comments if text.endswith(" tokens")] == ["1,000 tokens", "2,000 tokens"]


def test_a_plot_of_an_unknown_format_or_place_is_refused(tmp_path: Path):
    with pytest.raises(SettingError, match=r"plot.bmp: the file's name must end in .png, .svg, .pdf"):
        write_plot([row()], tmp_path / "plot.bmp")
    with pytest.raises(FileMissing, match=r"--plot: .* cannot be written: No such file"):
        write_plot([row()], tmp_path / "none" / "plot.png")


def test_without_matplotlib_the_plot_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(EvaluationMissing, match=r'pip install "specprefill-jax\[eval\]"'):
        write_plot([row()], tmp_path / "plot.png")
