"""What `specprefill calibrate` prints."""

import dataclasses
import io

from rich.console import Console

from specprefill_jax.artifact.calibration import Calibration
from specprefill_jax.quality.calibration import Found, Retained
from specprefill_jax.report.calibration import SHOWN_HEADS, calibration_report
from specprefill_jax.settings import Head

CALIBRATION = Calibration(
    manifest="",
    settings={"heads": ["0.1", "1.2"], "keep": 0.15},
    wanted=0.95,
    retention=0.967,
    lower=0.886,
    upper=0.991,
    prompts=60,
    depth=2,
    seed=0,
)
FOUND = Found(
    CALIBRATION,
    tuple((Head(0, i), 0.9 - i / 100) for i in range(SHOWN_HEADS + 4)),
    (Retained(0.05, 0.9, 0.8, 0.78), Retained(0.1, 0.97, 0.93, 0.82)),
)


def printed(found: Found) -> list[str]:
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(calibration_report(found))
    return [" ".join(line.split()) for line in console.export_text().splitlines()]


def test_it_fits_a_terminal_and_has_every_number():
    lines = printed(FOUND)
    assert max(map(len, lines)) <= 80
    assert "0.05 90% 80% 78%" in lines
    assert "0.1 97% 93% 82%" in lines
    assert "chosen: heads=0.1,1.2, keep=0.15" in lines
    assert "which keeps whole 96.7% (88.6 to 99.1); wanted were 95.0%" in lines


def test_of_many_heads_the_best_are_shown_and_the_others_counted():
    lines = printed(FOUND)
    assert "0.0 90%" in lines
    assert f"0.{SHOWN_HEADS} {90 - SHOWN_HEADS}%" not in lines
    assert f"and 4 more at most {90 - SHOWN_HEADS}%" in lines


def test_a_draft_that_falls_short_is_told_what_follows():
    short = dataclasses.replace(
        FOUND, calibration=dataclasses.replace(CALIBRATION, retention=0.61, upper=0.7)
    )
    text = " ".join(printed(short))
    assert "skipped_calibration" in text
    assert "--retention" in text
    assert "skipped_calibration" not in " ".join(printed(FOUND))
