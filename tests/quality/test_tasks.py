"""Prompts of every suite: what they say, how long they are, and what of them must be kept."""

import dataclasses
import json
import re
import sys
from random import Random
from typing import Any

import pytest

from specprefill_jax.errors import EvaluationMissing, SettingError
from specprefill_jax.quality.evaluation import Cell, task_of
from specprefill_jax.quality.facts import VALUE_KINDS
from specprefill_jax.quality.tasks import OWN_SUITES, SUITES, Task, Wanted, make_task
from specprefill_jax.quality.words import FILLERS, Filler, filler_sentence, split_line
from tests.engine.fake import CHAT
from tests.quality.oracle import plan

PLAN = plan(0.3)


def count(text: str) -> int:
    # Not through `Chat.encode`, whose shapes are checked at each of thousands of calls.
    return len(CHAT.tokenizer.encode(text, add_special_tokens=False))


def measure(task: Task) -> int:
    return count(CHAT.render(task.messages, prefix=task.prefix))


def make(
    suite: str, filler: Filler = "prose", tokens: int = 500, depth: float = 0.5, seed: str = "a"
) -> Task:
    return make_task(suite, Wanted(filler, tokens, depth, VALUE_KINDS, count), seed, measure)


def content(task: Task) -> str:
    return str(task.messages[-1]["content"])


def needed(task: Task) -> list[str]:
    """The text that the answer follows from."""
    return [str(task.messages[span.message]["content"])[span.start : span.end] for span in task.spans]


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("tokens", [600, 1500])
def test_a_prompt_is_at_most_as_long_as_wanted_and_little_shorter(suite: str, tokens: int):
    for filler in SUITES[suite].fillers:
        # A sentence of hard-needle's has some 30 tokens, twice as many as ours.
        near = 0.93 if suite == "confusable" else 0.96
        assert near * tokens <= measure(make(suite, filler, tokens)) <= tokens


@pytest.mark.parametrize("suite", SUITES)
def test_a_prompt_follows_from_its_seed_alone(suite: str):
    assert make(suite) == make(suite)
    assert make(suite).messages != make(suite, seed="b").messages


@pytest.mark.parametrize("suite", OWN_SUITES)
@pytest.mark.parametrize("filler", FILLERS)
def test_what_must_be_kept_says_the_answer_and_stands_for_itself(suite: str, filler: Filler):
    for seed in "ab":
        task = make(suite, filler, seed=seed)
        value = task.answer.removesuffix("}}")
        texts = needed(task)
        assert all(text == text.strip() for text in texts)
        assert value in texts[0]
        assert (task.suite, task.filler) == (suite, filler)


def test_the_fact_lies_where_it_was_wanted():
    for depth in (0.05, 0.55, 0.95):
        task = make("needle", tokens=1500, depth=depth)
        assert task.spans[0].start / len(content(task)) == pytest.approx(depth, abs=0.04)


def test_several_facts_have_different_keys_and_values():
    task = make("distractors")
    stated = set(re.findall(r"(?: for | of |Note: )([A-Z]\w+) (?:is|has)|For ([A-Z]\w+) the", content(task)))
    assert len(stated) >= 17
    asked = re.search(r"What is the (.*) for (\w+)\?", content(task))
    assert asked is not None
    # All have the attribute that is asked for, once more than there are facts: in the question.
    assert content(task).count(asked[1]) == 18
    assert needed(task)[0].count(asked[2]) == 1


def test_of_a_chain_the_end_is_asked_for_and_only_its_first_statement_has_the_value():
    task = make("hops", "code")
    value, link = needed(task)
    end = content(task).rsplit("What is the value of ", 1)[1].removesuffix("?")
    assert task.answer in value
    assert end in link
    assert task.answer not in link
    (first,) = set(re.findall(r"[A-Z]\w+", link)) - {end}
    assert first in value
    assert task.prefix == f"let {end} ="


def test_a_tool_call_is_json_with_a_number_of_the_document():
    for filler in FILLERS:
        task = make("tool", filler)
        call = json.loads(f"{task.prefix} {task.answer}")
        assert call["name"] == "open"
        assert str(call["arguments"]["code"]) in needed(task)[0]
        assert call["arguments"]["key"] in needed(task)[0]


def test_the_line_to_quote_is_the_only_one_that_begins_so():
    for filler in FILLERS:
        task = make("quote", filler, tokens=900)
        document, asked = content(task).rsplit("\n\n", 1)
        assert document.count(task.prefix) == 1
        assert asked == f"Quote the line that begins with: {task.prefix}"
        assert needed(task) == [f"{task.prefix} {task.answer}"]


def test_the_secret_is_in_the_system_message_alone():
    task = make("secret")
    assert [message["role"] for message in task.messages] == ["system", "user"]
    assert task.messages[0]["content"] == f"The secret word is {task.answer}."
    assert task.answer not in content(task).split()


def test_confusable_facts_are_those_of_hard_needle():
    task = make("confusable")
    assert task.prefix == "Answer:"
    assert needed(task)[0].endswith(f"is {task.answer}.")
    begin = needed(task)[0].partition(" for ")[0]
    assert content(task).count(f"{begin} for ") == 6
    assert content(task).rsplit("\n", 1)[1].startswith("Question: ")


def test_without_hard_needle_the_suite_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "hard_needle", None)
    with pytest.raises(EvaluationMissing, match=r'pip install "specprefill-jax\[eval\]"'):
        make("confusable")
    assert make("needle").suite == "needle"


def test_a_prompt_that_has_no_room_for_its_facts_is_refused():
    with pytest.raises(
        SettingError, match=r"lengths=100: without any filler .* distractors has about \d+ tokens"
    ):
        make("distractors", tokens=100)


def test_prompts_of_an_evaluation_are_independent_of_other_cells_and_counts():
    cell = Cell("needle", "code", 400)
    task = task_of(CHAT, PLAN, cell, 2)
    assert task == task_of(CHAT, plan(0.5, count=7, lengths=(400, 800)), cell, 2)
    assert task.depth == 0.25


def test_each_prompt_has_a_seed_of_its_own(monkeypatch: pytest.MonkeyPatch):
    seeds: list[str] = []
    made = make("needle")

    def note(suite: str, wanted: Wanted, seed: str, measure: object) -> Task:
        seeds.append(seed)
        return made

    monkeypatch.setattr("specprefill_jax.quality.evaluation.make_task", note)
    cells = [Cell(s, f, n) for s in ("needle", "facts") for f in ("code", "prose") for n in (400, 410)]
    changes: tuple[dict[str, Any], ...] = ({}, {"seed": PLAN.seed + 1}, {"purpose": "calibrate"})
    for change in changes:
        for cell in cells:
            for index in range(2):
                task_of(CHAT, dataclasses.replace(PLAN, **change), cell, index)
    assert len(set(seeds)) == len(seeds) == len(changes) * len(cells) * 2


def test_no_fact_of_a_document_has_the_secret_word_as_its_value():
    for index in range(60):
        task = make("secret", seed=f"x/{index}")
        document = str(task.messages[1]["content"])
        assert f" {task.answer}." not in document, index  # so a statement would end


def test_a_line_is_split_into_its_first_words_and_the_rest():
    assert split_line("\nfor x in range(10):\n    y = f(x, ba)") == ("for x", "in range(10):")
    sentence = filler_sentence(Random(0), "prose")
    assert " ".join(split_line(sentence)) == sentence.strip()
