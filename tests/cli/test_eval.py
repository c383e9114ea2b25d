"""`specprefill eval`: what it asks, prints and writes."""

import json
from pathlib import Path

import pytest

from specprefill_jax.runtime.device import open_device
from tests.cli.conftest import Run
from tests.engine.fake import Fake
from tests.quality.oracle import answer, oracle

# What the fake pair can answer, and where the draft's attention decides about what is kept.
ASKED = ("--suites", "needle", "--fillers", "code", "--values", "name", "--lengths", "400", "--pool", "0")
FEW = (*ASKED, "--count", "2")


@pytest.fixture
def knowing(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """The engine that is loaded: a pair that finds facts."""
    made = oracle()
    made.target.device = open_device("cpu")
    monkeypatch.setattr("specprefill_jax.cli.evaluate.load_engine", lambda *_: made.engine)
    return made


def test_a_table_is_printed_for_each_cell(knowing: Fake, specprefill: Run):
    ran = specprefill("eval", *ASKED, "--count", "1", "--lengths", "400,600", "--suites", "needle,facts")
    assert ran.status == 0
    titles = [line for line in ran.out.splitlines() if " tokens, n = " in line]
    assert titles == [
        f"{suite}, code, {tokens} tokens, n = 1" for suite in ("needle", "facts") for tokens in (400, 600)
    ]
    assert ran.err.splitlines() == [title.removesuffix(", n = 1") for title in titles]


def test_each_way_has_its_row(knowing: Fake, specprefill: Run):
    ran = specprefill("eval", *FEW, "--keep", "0.3,0.5", "--mass", "0.85")
    lines = [line for line in ran.out.splitlines() if "%" in line]
    assert [line[:9].strip() for line in lines] == ["dense", "keep 0.3", "keep 0.5", "mass 0.85"]
    assert all("100% (34-100)" in line for line in lines)
    assert knowing.target.of("decode") != []


def test_by_itself_fractions_are_kept_and_with_mass_only_that(knowing: Fake, specprefill: Run):
    for arguments, ways in (
        ((), ["dense", "keep 0.5", "keep 0.3", "keep 0.15", "keep 0.1"]),
        (("--mass", "0.9"), ["dense", "mass 0.9"]),
    ):
        out = specprefill("eval", *ASKED, "--count", "1", *arguments).out
        assert [line[:9].strip() for line in out.splitlines() if "%" in line] == ways


def test_all_outcomes_are_written_as_json(knowing: Fake, specprefill: Run):
    ran = specprefill("eval", *FEW, "--keep", "0.3", "--seed", "7", "--chunk", "8", "--json", "out.json")
    assert ran.status == 0
    found = json.loads(Path("out.json").read_text())
    assert found["complete"]
    assert (found["plan"]["seed"], found["plan"]["values"], found["plan"]["lengths"]) == (7, ["name"], [400])
    assert [way["settings"]["chunk"] for way in found["plan"]["ways"]] == [8, 8]
    assert len(found["outcomes"]) == 4
    assert [row["way"] for row in found["rows"]] == ["dense", "keep 0.3"]


def test_a_plot_is_drawn(knowing: Fake, specprefill: Run):
    assert specprefill("eval", *FEW, "--keep", "0.3", "--plot", "plot.svg").status == 0
    assert Path("plot.svg").read_text().startswith("<?xml")


def test_an_evaluation_that_is_interrupted_shows_and_writes_what_was_answered(
    knowing: Fake, specprefill: Run
):
    def speak(read: list[tuple[int, int]]) -> float:
        if len(knowing.target.of("prefill")) == 6:  # the second way of the third prompt
            raise KeyboardInterrupt
        return answer(read)

    knowing.target.speak = speak
    ran = specprefill("eval", *ASKED, "--count", "5", "--keep", "0.3", "--json", "out.json")
    assert ran.status == 130
    assert "needle, code, 400 tokens, n = 2" in ran.out
    found = json.loads(Path("out.json").read_text())
    assert not found["complete"]
    assert [(outcome["index"], outcome["way"]) for outcome in found["outcomes"]] == [
        (0, "dense"),
        (0, "keep 0.3"),
        (1, "dense"),
        (1, "keep 0.3"),
    ]


def test_a_target_that_fails_leaves_what_was_answered(knowing: Fake, specprefill: Run):
    def speak(read: list[tuple[int, int]]) -> float:
        return float("nan") if len(knowing.target.of("prefill")) == 3 else answer(read)

    knowing.target.speak = speak
    ran = specprefill("eval", *FEW, "--keep", "0.3")
    assert ran.status == 1
    assert "needle, code, 400 tokens, n = 1" in ran.out
    assert "specprefill: error: " in ran.err


def test_a_budget_that_is_exceeded_is_a_failure(
    knowing: Fake, specprefill: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("specprefill_jax.quality.evaluation.token_budget", lambda *_: 5)
    ran = specprefill("eval", *FEW, "--keep", "0.3")
    assert ran.status == 1
    assert "keep 0.3: more was kept of 2 of 2 than its budget" in ran.out


def test_longest_is_what_the_caches_allow(knowing: Fake, specprefill: Run):
    knowing.target.speak = lambda _: 2
    ran = specprefill("eval", *ASKED, "--count", "1", "--lengths", "longest", "--keep", "0.3")
    assert "needle, code, 4,032 tokens, n = 1" in ran.out  # 4096 slots but for 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--suites", "riddles"],
            "--suites=riddles: suites must be names separated by commas, of needle, facts,",
        ),
        (
            ["--fillers", "prose,"],
            "--fillers=prose,: fillers must be names separated by commas, of prose, code",
        ),
        (
            ["--values", "hex"],
            "--values=hex: values must be names separated by commas, of name, names, digits",
        ),
        (["--lengths", "many"], "--lengths=many: lengths must be numbers of tokens or longest"),
        (["--lengths", "400,5000"], "lengths=5000: with this artifact, lengths are from 1 to 4032 tokens"),
        (["--lengths", "20"], "lengths=20: without any filler a prompt of suite needle has about"),
        (["--keep", "0.3,2"], "--keep=0.3,2: each is a number from 0 to 1"),
        (["--keep", ""], "--keep=: each is a number from 0 to 1, with commas between them"),
        (["--mass", ""], "--mass=: each is a number above 0, at most 1, with commas between them"),
        (["--values", ""], "--values=: values must be names separated by commas, of name, names, digits"),
        (["--mass", "0"], "--mass=0: each is a number above 0, at most 1"),
        (["--count", "0"], "--count=0: count must be a whole number, 1 or more"),
        (["--suites", "confusable"], "--fillers=code: confusable has no prompts with that filler"),
        (["--json", "none/out.json"], "--json: none/out.json cannot be written"),
        (["--json", "."], "--json: . cannot be written"),
        (["--plot", "plot.bmp"], "the file's name must end in .png, .svg, .pdf"),
        (["--plot", "none/plot.png"], "--plot: none/plot.png cannot be written"),
        (["--chunk", "0"], "--chunk=0: chunk must be a whole number, 1 or more"),
        (["--max-keep", "5"], "unrecognized arguments: --max-keep 5"),
    ],
)
def test_what_cannot_be_asked_is_bad_input(
    knowing: Fake, specprefill: Run, arguments: list[str], message: str
):
    ran = specprefill("eval", *FEW, *arguments)
    assert ran.status == 2
    assert message in ran.err
    assert ran.out == ""
