"""Progress is for people who have waited for a second."""

import io
import time

import pytest
from rich.console import Console

from specprefill_jax.cli import progress
from specprefill_jax.cli.progress import Waiting


def screen() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=80)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_what_takes_less_than_a_second_shows_nothing():
    console = screen()
    with Waiting(console) as waiting:
        waiting("score", 16, 320)
    assert shown(console) == ""


def test_what_takes_longer_is_shown_until_it_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "DELAY_S", 0.01)
    console = screen()
    with Waiting(console) as waiting:
        waiting("score", 16, 320)
        time.sleep(0.3)
        assert "Scoring" in shown(console)
        assert "16/320" in shown(console)
    before = shown(console)
    time.sleep(0.3)
    assert shown(console) == before


def test_nothing_is_shown_once_the_answer_has_begun(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "DELAY_S", 0.05)
    console = screen()
    with Waiting(console) as waiting:
        waiting.end()
        time.sleep(0.2)
    assert "Working" not in shown(console)


def test_away_from_a_terminal_the_steps_that_take_time_are_printed_as_lines():
    console = Console(file=io.StringIO(), force_terminal=False)
    with Waiting(console) as waiting:
        waiting.say("Lowering [draft]")
        waiting("score", 16, 320)
        waiting.say("Writing")
    assert shown(console) == "Lowering [draft]\nWriting\n"
