"""The scripts that compare scorers and ways of passing gaps: what they count, and that they say it."""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path

import ablate_gaps
import compare_scorers
import numpy as np
import pytest
from ablate_gaps import END, KEPT_ONLY, VARIANTS, Answer, Asked, Forward, Variant, answer, ask, keep_of, load
from ablate_gaps import table as gap_table
from compare_scorers import CHUNKINGS, KEEPS, ORACLE, PLAIN, RANDOM, SCORERS, Row, check_scorers, measured
from compare_scorers import table as scorer_table
from plans import add_plan_options, read_plan
from rich.console import Console
from train_demo.model import NO_GAPS, Gaps

from specprefill_jax.errors import FileMissing, SettingError
from specprefill_jax.quality.evaluation import Plan, task_of
from specprefill_jax.selection import token_budget
from specprefill_jax.settings import Settings
from tests.quality.oracle import oracle

PLAN = Plan(
    suites=("needle",),
    fillers=("code",),
    lengths=(500,),
    ways=(),
    count=2,
    seed=0,
    values=("name",),
)


def cells(table: object) -> list[list[str]]:
    """The cells of each line of a Markdown table."""
    console = Console(width=200, record=True, quiet=False, file=None)
    with console.capture() as captured:
        console.print(table)
    lines = captured.get().splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]


# --- prompts


@pytest.mark.parametrize("main", [ablate_gaps.main, compare_scorers.main], ids=["gaps", "scorers"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "many"], "--lengths=many: lengths must be numbers of tokens, 1 or more"),
        (["--lengths", "1000,0"], "--lengths=1000,0: lengths must be numbers of tokens, 1 or more"),
        (["--count", "0"], "--count=0: count must be a whole number, 1 or more"),
        (["--suites", ""], "--suites=: suites must be names separated by commas, of needle, facts"),
        (["--suites", "confusable", "--fillers", "code"], "--fillers=code: confusable has no prompts with"),
    ],
)
def test_prompts_that_cannot_be_are_bad_input(
    main: Callable[[], int],
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    folder = ["none"] if main is ablate_gaps.main else []
    monkeypatch.setattr("sys.argv", ["script", *folder, *arguments])
    assert main() == 2
    assert f": error: {message}" in capsys.readouterr().err


def test_the_options_of_both_scripts_make_the_plan():
    parser = argparse.ArgumentParser()
    add_plan_options(parser, lengths="500", count=2)
    given = ["--suites", "needle", "--fillers", "code", "--values", "name"]
    assert read_plan(parser.parse_args(given)) == PLAN


# --- scorers


def test_a_scorer_that_the_draft_cannot_be_asked_is_refused():
    fake = oracle()
    fake.draft.model = dataclasses.replace(fake.draft.model, rows=8)
    check_scorers(fake.engine)
    fake.draft.model = dataclasses.replace(fake.draft.model, rows=4)
    with pytest.raises(
        SettingError, match="queries=8: the draft was compiled to return the rows of 4 tokens"
    ):
        check_scorers(fake.engine)


def test_every_scorer_has_an_outcome_for_every_chunking_keep_and_prompt():
    rows = measured(oracle().engine, PLAN, lambda *_: None)
    assert [row.name for row in rows] == [RANDOM, *SCORERS, ORACLE]
    for row in rows:
        assert {name: each.shape for name, each in row.whole.items()} == dict.fromkeys(
            CHUNKINGS, (PLAN.count, len(KEEPS))
        )
    best = rows[-1]
    assert all(best.share(chunking, keep) == 1 for chunking in CHUNKINGS for keep in KEEPS if keep > 0.1)


def row(name: str, fixed: list[bool], text: list[bool]) -> Row:
    whole = {"fixed": fixed, "fixed, halo": fixed, "text": text, "text, halo": text}
    return Row(name, {c: np.array([[w] * len(KEEPS) for w in each]) for c, each in whole.items()})


def test_the_table_has_shares_and_the_paired_difference_from_the_plain_rule():
    plain = row(PLAIN, [True, False, False, False], [True, True, False, False])
    other = row("default", [True, True, False, True], [True] * 4)
    found = cells(scorer_table([plain, other], plain, 0.1))
    assert found[0] == ["scorer", *CHUNKINGS, "text, minus raw max"]
    assert found[2][:5] == [PLAIN, "25.0", "25.0", "50.0", "50.0"]
    assert found[2][5].startswith("+25.0 (")
    assert found[3][:5] == ["default", "75.0", "75.0", "100.0", "100.0"]
    assert found[3][5].startswith("+75.0 (")


# --- gaps


def test_a_folder_without_a_model_is_told_how_to_make_one(tmp_path: Path):
    with pytest.raises(FileMissing, match=r"config.json is not there; `scripts/train_demo/run slow .*none`"):
        load(tmp_path / "none")


@pytest.fixture(scope="module")
def asked() -> Asked:
    chat = oracle().engine.chat
    return ask(chat, task_of(chat, PLAN, PLAN.cells[0], 0))


@pytest.mark.parametrize("end", [0, END])
@pytest.mark.parametrize("keep", [0.5, 0.3])
def test_what_is_asked_for_is_kept_within_the_budget_and_the_answer_follows(
    asked: Asked, keep: float, end: int
):
    kept = keep_of(asked, keep, end, 0)
    of_prompt = kept[kept < asked.prompt]
    assert np.isin(asked.needed, of_prompt).all()
    assert of_prompt.size <= token_budget(asked.prompt, Settings(keep=keep))
    assert np.isin(np.arange(asked.prompt - end, asked.prompt), of_prompt).all()
    assert kept[of_prompt.size :].tolist() == list(range(asked.prompt, asked.tokens.size))


def telling(asked: Asked, wrong: int | None = None) -> tuple[Forward, list[tuple[np.ndarray, np.ndarray]]]:
    """A model that knows every token of a text, but that before position `wrong`; and what it was asked."""
    seen: list[tuple[np.ndarray, np.ndarray]] = []

    def forward(gaps: Gaps, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
        seen.append((tokens, positions))
        logits = np.zeros((tokens.size, 1664), np.float32)
        for index, token in enumerate(tokens[1:]):
            logits[index, token if positions[index + 1] != wrong else token - 1] = 9
        return logits

    return forward, seen


def test_an_answer_is_right_if_all_its_tokens_are(asked: Asked):
    kept = keep_of(asked, 0.5, 0, 0)
    assert answer(telling(asked)[0], asked, kept, Variant()).right
    for position in range(asked.prompt, asked.tokens.size):
        assert not answer(telling(asked, position)[0], asked, kept, Variant()).right
    assert answer(telling(asked, asked.prompt - 1)[0], asked, kept, Variant()).right


def test_the_model_reads_the_kept_tokens_at_their_positions_or_without_gaps(asked: Asked):
    kept = keep_of(asked, 0.3, 0, 0)
    forward, seen = telling(asked)
    answer(forward, asked, kept, Variant(NO_GAPS))
    answer(forward, asked, kept, Variant(NO_GAPS, renumbered=True))
    (tokens, positions), (_, renumbered) = seen
    assert positions[: kept.size].tolist() == kept.tolist()
    assert (np.diff(positions[kept.size - 1 :]) == 1).all()
    assert renumbered.tolist() == list(range(renumbered.size))
    assert tokens[: kept.size].tolist() == asked.tokens[kept].tolist()


def test_the_padding_is_more_of_the_text_itself(asked: Asked):
    """Another token's decay would otherwise have a say in the mean that skipped tokens count by."""
    kept = keep_of(asked, 0.3, 0, 0)
    forward, seen = telling(asked)
    answer(forward, asked, kept, Variant(Gaps(decay=1)))
    ((tokens, _),) = seen
    padding = tokens[kept.size :]
    assert padding.size
    assert padding.tolist() == asked.tokens[kept][: padding.size].tolist()


def test_the_table_compares_with_dense_and_with_kept_tokens_only():
    one, other = np.log([0.5, 0.5]), np.log([0.9, 0.1])
    dense = [Answer(True, one), Answer(True, one)]
    found = {name: [Answer(True, one), Answer(False, other)] for name in VARIANTS}
    found[KEPT_ONLY] = dense
    lines = {line[0]: line for line in cells(gap_table(0.5, dense, found))}
    assert lines["dense"][1].startswith("100.0 (")
    assert lines[KEPT_ONLY][2].startswith("+0.0 (")
    assert lines[KEPT_ONLY][3:] == ["", "0.000"]
    assert lines["decay 1"][2].startswith("-50.0 (")
    assert lines["decay 1"][4] == f"{0.5 * (0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1)):.3f}"
