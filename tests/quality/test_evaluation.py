"""Answers of a fake pair whose right and wrong answers are known, and what is said of them."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from specprefill_jax.artifact.calibration import Calibration
from specprefill_jax.chat import Chat
from specprefill_jax.errors import ArtifactError, SettingError, TemplateError
from specprefill_jax.quality.evaluation import (
    Cell,
    Outcome,
    Plan,
    ask,
    check_lengths,
    divergence,
    evaluate,
    is_right,
    log_probabilities,
    longest_prompt,
    make_ways,
    needed_tokens,
    prompt_text,
    task_of,
)
from specprefill_jax.quality.record import to_json
from specprefill_jax.quality.summary import summarize
from specprefill_jax.quality.tasks import SUITES
from specprefill_jax.runtime.device import open_device
from specprefill_jax.settings import Settings
from tests.engine.fake import CHAT, DEMO, Attend, make
from tests.quality.oracle import VALUE_TOKENS, from_values, oracle, plan, to_values
from tests.qwen_chat import qwen_chat

CELL = Cell("needle", "code", 400)


def asked(engine_plan: Plan, attend: Attend = to_values) -> list[Outcome]:
    fake = oracle(attend)
    return [outcome for found in evaluate(fake.engine, engine_plan, CELL) for outcome in found]


def one(**changes: object) -> Outcome:
    outcome = Outcome(
        suite="needle",
        filler="code",
        tokens=400,
        index=0,
        depth=0.05,
        way="dense",
        text=" x",
        answer="x",
        right=True,
        prompt=400,
        kept=400,
        budget=400,
        whole=True,
        agrees=True,
        divergence=0.0,
        status="disabled",
    )
    return dataclasses.replace(outcome, **changes)


# --- one prompt


def test_a_draft_that_looks_at_the_fact_keeps_it_and_the_answer_is_right():
    for outcome in asked(plan(0.3)):
        assert outcome.right
        assert outcome.text == f" {outcome.answer}"
        assert outcome.whole
        assert outcome.agrees
        assert outcome.divergence == 0
        assert outcome.kept <= outcome.budget
        assert outcome.status == ("disabled" if outcome.way == "dense" else "active")
        assert outcome.budget == (outcome.prompt if outcome.way == "dense" else -(-3 * outcome.prompt // 10))


def test_a_draft_that_looks_elsewhere_loses_it_and_the_answer_is_wrong():
    for outcome in asked(plan(0.3, count=4), from_values):
        dense = outcome.way == "dense"
        assert (outcome.right, outcome.whole, outcome.agrees) == (dense, dense, dense)
        # Both likeliest logits are 5 among 0: the divergence is 5 (e^5 - 1) / (e^5 + V - 1).
        assert outcome.divergence == pytest.approx(
            0 if dense else 5 * (np.e**5 - 1) / (np.e**5 + 1663), rel=1e-6
        )


def test_every_prompt_is_read_once_in_each_way_and_by_the_draft_once():
    fake = oracle()
    ways = make_ways(Settings(), [0.5, 0.3], [0.85])
    engine_plan = dataclasses.replace(plan(), ways=ways, count=2)
    found = list(evaluate(fake.engine, engine_plan, CELL))
    assert [[outcome.way for outcome in each] for each in found] == 2 * [
        ["dense", "keep 0.5", "keep 0.3", "mass 0.85"]
    ]
    assert len(fake.target.of("prefill")) == 2 * 4
    assert len(fake.draft.of("prefill")) == 2


def test_ways_differ_in_what_they_keep_alone():
    base = Settings(mode="auto", max_keep=100, temperature=1.0, chunk=8, pin_roles=("tools",))
    dense, half, mass = make_ways(base, [0.5], [0.9])
    assert dense.settings == dataclasses.replace(half.settings, mode="dense", keep=None, select_mode=None)
    assert (half.settings.selection, half.settings.keep, half.settings.max_keep) == ("chunk", 0.5, 0)
    assert (mass.settings.selection, mass.settings.cumulative_mass, mass.settings.keep) == ("mass", 0.9, None)
    for way in (half, mass):
        assert (way.settings.mode, way.settings.temperature, way.settings.chunk) == ("sparse", 0.0, 8)
        assert way.settings.pin_roles == ("tools",)


def test_the_system_part_is_kept_as_in_any_request():
    fake = oracle(from_values)
    engine_plan = plan(0.3, suites=("secret",))
    for index in range(3):
        task = task_of(CHAT, engine_plan, Cell("secret", "code", 400), index)
        assert all(outcome.whole for outcome in ask(fake.engine, task, index, engine_plan.ways))


def test_a_request_that_runs_dense_all_the_same_is_counted_and_shown():
    found = asked(dataclasses.replace(plan(0.3), ways=make_ways(Settings(chunk=300), [0.1])))
    assert {outcome.status for outcome in found if outcome.way != "dense"} == {"skipped_insufficient_budget"}
    _, sparse = summarize(found)
    assert sparse.unlike_asked == {"skipped_insufficient_budget": 3}
    assert (sparse.prompts, sparse.kept, sparse.over_budget) == (3, 1.0, 0)


def test_without_a_draft_there_is_nothing_to_compare():
    fake = oracle()
    fake.engine.draft = None
    with pytest.raises(
        ArtifactError, match="without a draft there is only dense prefill, and this artifact has no"
    ):
        next(evaluate(fake.engine, plan(0.3), CELL))


# --- its parts


@pytest.mark.parametrize(
    "text", ["Rera", " Rera", "\n Rera\n", "Rera.", " Rera. The simple pocket", 'Rera".', "Rera\nlet x = 1"]
)
def test_an_answer_may_end_in_marks_or_a_new_line(text: str):
    assert is_right(text, "Rera")


@pytest.mark.parametrize(
    "text", ["", "Re", "Reraga", "Rera Dovepa", "Rera-2", "Rera.5", "rera", "The Rera", "Rera}"]
)
def test_an_answer_that_goes_on_is_another(text: str):
    assert not is_right(text, "Rera")


def test_all_tokens_of_the_fact_are_needed_and_no_others():
    task = task_of(CHAT, plan(0.3), CELL, 0)
    needed = needed_tokens(CHAT, task)
    text = CHAT.decode(CHAT.encode(prompt_text(CHAT, task))[needed])
    (span,) = task.spans
    # The tokenizer joins a line's last bracket and its end in one token.
    assert text.rstrip("\n") == str(task.messages[0]["content"])[span.start : span.end]
    assert needed.tolist() == list(range(needed[0], needed[-1] + 1))


def test_a_template_that_changes_texts_is_refused(tmp_path: Path):
    template = tmp_path / "upper.jinja"
    template.write_text("{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    chat = Chat.load(DEMO / "tokenizer.json", template, [2])
    with pytest.raises(TemplateError, match="changes the text of messages"):
        needed_tokens(chat, task_of(CHAT, plan(0.3), CELL, 0))


def test_a_template_that_cuts_space_off_is_none_that_changes_texts(tmp_path: Path):
    template = tmp_path / "trim.jinja"
    template.write_text("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}")
    chat = Chat.load(DEMO / "tokenizer.json", template, [2])
    task = task_of(CHAT, plan(0.3, suites=("quote",)), Cell("quote", "prose", 400), 3)
    text = chat.decode(chat.encode(prompt_text(chat, task))[needed_tokens(chat, task)])
    assert text.strip() == f"{task.prefix} {task.answer}"


@pytest.mark.parametrize("suite", SUITES)
def test_qwens_template_leaves_out_the_think_block_and_hides_nothing(suite: str):
    chat = qwen_chat()
    task = task_of(chat, plan(0.3, suites=(suite,)), Cell(suite, "prose", 400), 1)
    assert prompt_text(chat, task).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n" + task.prefix)
    tokens = chat.encode(prompt_text(chat, task))
    assert 370 <= tokens.size <= 400
    kept = chat.decode(tokens[needed_tokens(chat, task)])
    for span in task.spans:
        assert str(task.messages[span.message]["content"])[span.start : span.end] in kept


def test_divergence_is_that_of_kullback_and_leibler_in_nats():
    half, quarter = (log_probabilities(np.log(np.array(p))) for p in ([0.5, 0.5], [0.25, 0.75]))
    assert divergence(half, quarter) == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3))
    assert divergence(quarter, half) == pytest.approx(0.25 * np.log(0.5) + 0.75 * np.log(1.5))
    assert divergence(half, half) == 0
    assert log_probabilities(np.array([1e4, 0, -1e4], np.float32)).tolist() == [0, -1e4, -2e4]


def test_the_longest_prompt_leaves_room_for_the_answer_and_for_lookahead():
    engine = make(draft_capacity=(1024, 2048), target_capacity=4096).engine
    assert longest_prompt(engine, Settings(lookahead=8), in_one_pass=True) == 2048 - 8
    assert longest_prompt(engine, Settings(), in_one_pass=False) == 4096 - 64
    assert longest_prompt(make(target_capacity=2048).engine, Settings(), in_one_pass=True) == 2048 - 64
    check_lengths([1, 4032], 4032)
    with pytest.raises(SettingError, match=r"lengths=4033: .* from 1 to 4032 tokens"):
        check_lengths([4033], 4032)


def test_a_prompt_of_the_longest_length_is_answered():
    fake = make(speak=lambda _: 2, target_capacity=512, draft_capacity=512)
    most = longest_prompt(fake.engine, Settings(), in_one_pass=True)
    engine_plan = plan(0.3, count=1, lengths=(most,))
    (found,) = evaluate(fake.engine, engine_plan, Cell("needle", "code", most))
    assert [outcome.status for outcome in found] == ["disabled", "active"]


# --- all of them together


def test_a_summary_counts_every_prompt_of_a_cell():
    rights = [(True, True), (True, False), (True, False), (False, False), (False, True)]
    outcomes = [
        outcome
        for index, (dense, sparse) in enumerate(rights)
        for outcome in (
            one(index=index, right=dense),
            one(
                index=index,
                right=sparse,
                way="keep 0.3",
                status="active",
                kept=100 + index,
                budget=103,
                whole=sparse,
            ),
        )
    ]
    dense, sparse = summarize(outcomes)
    assert (dense.cell, dense.way, dense.prompts, dense.difference) == (CELL, "dense", 5, None)
    assert dense.accuracy.value == 0.6
    assert sparse.accuracy.value == 0.4
    assert sparse.difference is not None
    assert sparse.difference.value == pytest.approx(-0.2)
    assert sparse.difference.low < -0.2 < sparse.difference.high
    assert (sparse.kept, sparse.most_kept) == (pytest.approx(102 / 400), 104 / 400)
    assert sparse.over_budget == 1
    assert sparse.whole == 0.4
    assert sparse.statuses == {"active": 5}
    assert sparse.unlike_asked == {}


def test_cells_and_ways_stay_apart_and_in_their_order():
    outcomes = [
        one(suite=suite, tokens=tokens, way=way)
        for suite, tokens in (("facts", 800), ("needle", 400))
        for way in ("dense", "keep 0.5")
    ]
    found = [(row.cell.suite, row.cell.tokens, row.way) for row in summarize(outcomes)]
    assert found == [
        ("facts", 800, "dense"),
        ("facts", 800, "keep 0.5"),
        ("needle", 400, "dense"),
        ("needle", 400, "keep 0.5"),
    ]


def test_a_record_holds_all_that_its_rows_follow_from():
    fake = oracle()
    fake.target.device = open_device("cpu")
    engine_plan = plan(0.3, 0.1)
    outcomes = [outcome for found in evaluate(fake.engine, engine_plan, CELL) for outcome in found]
    record = json.loads(json.dumps(to_json(fake.engine, engine_plan, outcomes)))
    again = [Outcome(**outcome) for outcome in record["outcomes"]]
    assert summarize(again) == summarize(outcomes)
    assert record["complete"]
    assert record["plan"]["seed"] == 0
    assert record["plan"]["ways"][1]["settings"]["keep"] == 0.3
    assert record["artifact"] == {"name": "fake", "device": "cpu", "files": {"p": "0" * 64}} | {
        "manifest": record["artifact"]["manifest"]
    }
    assert record["rows"][1]["difference"]["value"] == 0
    assert not to_json(fake.engine, engine_plan, outcomes[:-3])["complete"]


def test_a_record_says_which_calibration_there_was_and_the_settings_that_held():
    chosen = {"across": "mean", "lookahead": 5, "keep": 0.2}
    made = Calibration("0" * 64, chosen, 0.95, 0.97, 0.9, 1.0, 60, 2, 0)
    fake = make(calibration=made)
    fake.target.device = open_device("cpu")
    for base, expected in (
        (Settings(), ("mean", 5)),
        (Settings(lookahead=3), ("mean", 3)),
        (Settings(calibration=False), (Settings().across, Settings().lookahead)),
    ):
        engine_plan = dataclasses.replace(plan(), ways=make_ways(base, [0.3]))
        record = json.loads(json.dumps(to_json(fake.engine, engine_plan, [])))
        assert record["calibration"] == {**dataclasses.asdict(made), "settings": chosen}
        held = record["plan"]["ways"][1]["settings"]
        assert (held["across"], held["lookahead"], held["keep"]) == (*expected, 0.3)
        assert "origins" not in held


def test_a_record_without_a_calibration_says_that_there_was_none():
    fake = oracle()
    fake.target.device = open_device("cpu")
    assert to_json(fake.engine, plan(0.3), [])["calibration"] is None


def test_the_oracle_knows_values_as_one_token_each():
    assert len(VALUE_TOKENS) > 100
