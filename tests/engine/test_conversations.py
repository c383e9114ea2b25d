"""Conversations on the compiled demo pair: what is read again, and whether the answers stay exact."""

import dataclasses
import json
import re
from typing import Any

import numpy as np
import pytest
from jaxtyping import Float, Int

from specprefill_jax.engine import Engine, Result, Track
from specprefill_jax.engine.track import BEGINNING
from specprefill_jax.runtime.state import State
from specprefill_jax.session import Session
from specprefill_jax.settings import Settings
from tests.engine.fake import DEMO

EXAMPLES = [json.loads(line) for line in (DEMO / "examples.jsonl").read_text().splitlines()]
SPARSE = Settings(mode="sparse", max_tokens=4)

# Of the largest value: a conversation cuts the same tokens into other blocks (see test_demo.py).
SPLIT_TOLERANCE = 1e-4


def document(example: dict[str, Any]) -> str:
    """The prompt without the question at its end."""
    return example["prompt"].rpartition("\n\n")[0]


def turns(engine: Engine, session: Session, count: int, settings: Settings) -> list[tuple[Any, Result]]:
    """A conversation about the shortest document, each message with an answer of its own."""
    messages: list[dict[str, str]] = [{"role": "system", "content": "Answer in one word."}]
    found = []
    for turn in range(count):
        text = document(EXAMPLES[0]) if turn == 0 else f"And {turn}? " * 12
        messages = [*messages, {"role": "user", "content": text}]
        found.append((messages, session.generate(messages, settings)))
        messages = [*messages, {"role": "assistant", "content": found[-1][1].text}]
    return found


@pytest.fixture(params=["engine", pytest.param("vulkan_engine", marks=pytest.mark.vulkan)])
def pair(request: pytest.FixtureRequest) -> Engine:
    """The pair on the CPU and on lavapipe."""
    engine: Engine = request.getfixturevalue(request.param)
    engine.forget()
    return engine


def test_three_turns_answer_as_if_their_kept_tokens_had_been_read_in_one_go(pair: Engine):
    for messages, result in turns(pair, Session(pair), 3, SPARSE):
        tokens = pair.encode(messages)
        assert result.timings.status in ("active", "skipped_insufficient_budget", "kept_all")
        assert result.tokens == pair.answer_from(tokens, result.kept, SPARSE).tokens


def test_a_later_turn_reads_only_what_is_new(pair: Engine):
    first, second = turns(pair, Session(pair), 2, SPARSE)
    before, now = pair.encode(first[0]), pair.encode(second[0])
    # The demo's template opens an answer as it shows it later, so all of the last prompt is known.
    assert now[: before.size].tolist() == before.tolist()
    timings = second[1].timings
    assert timings.draft_read == now.size - before.size
    assert timings.reused >= before.size


def test_a_resumed_state_is_that_of_one_go_within_rounding(pair: Engine):
    tokens = pair.encode(EXAMPLES[0]["prompt"], raw=True)
    there = np.arange(tokens.size, dtype=np.int32)
    cut = tokens.size // 2 + 5
    draft = pair.programs["draft"]
    resumed, whole = Track(draft), Track(draft)
    resumed.start(BEGINNING, tokens.size + 8)
    resumed.read(tokens[:cut], there[:cut], stops=(cut,))
    resumed.look_ahead(7, cut)
    resumed.start(next(resumed.places(tokens, cut)), tokens.size + 8)
    again = resumed.read(tokens, there, rows=True)
    whole.start(BEGINNING, tokens.size + 8)
    once = whole.read(tokens, there, rows=True)
    assert again.rows is not None
    assert once.rows is not None
    assert difference(again.hidden, once.hidden) <= SPLIT_TOLERANCE
    assert difference(again.rows[again.rows_valid - 1], once.rows[once.rows_valid - 1]) <= SPLIT_TOLERANCE


def difference(found: Float[np.ndarray, "..."], expected: Float[np.ndarray, "..."]) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def used(state: State, track: Track) -> dict[str, Float[np.ndarray, "..."]]:
    return state.read_slots(track.kept.size)


def test_going_back_after_lookahead_gives_the_same_bits(pair: Engine, monkeypatch: pytest.MonkeyPatch):
    draft = pair.programs["draft"]
    made: list[State] = []
    new_state = draft.new_state
    monkeypatch.setattr(draft, "new_state", lambda slots: made.append(new_state(slots)) or made[-1])
    tokens: Int[np.ndarray, "M"] = pair.encode(EXAMPLES[0]["prompt"], raw=True)[:300]
    track = Track(draft)
    track.start(BEGINNING, 310)
    track.read(tokens, np.arange(300, dtype=np.int32))
    before = used(made[0], track)
    here = track.stay()
    for step in range(3):
        track.look_ahead(11 + step, 300 + step)
    track.start(here, 310)
    after = used(made[0], track)
    assert len(made) == 1
    for name, expected in before.items():
        np.testing.assert_array_equal(after[name], expected, err_msg=name)


def test_the_same_turn_again_is_answered_from_memory(engine: Engine):
    session = Session(engine)
    tokens = engine.encode(EXAMPLES[0]["prompt"], raw=True)
    once = session.generate(tokens, SPARSE)
    again = session.generate(tokens, SPARSE)
    assert (again.timings.draft_read, again.timings.looked_ahead, again.timings.reused) == (0, 0, tokens.size)
    assert again.timings.remembered
    assert again.tokens == once.tokens
    assert again.tokens[0] == EXAMPLES[0]["answer_ids"][0]


def test_a_fact_of_an_earlier_turn_is_found_when_all_turns_are_scored_again(engine: Engine):
    """The first turn asks nothing: only the second shows which part of the document matters."""
    session = Session(engine)
    example = EXAMPLES[22]
    tokens = engine.encode(example["prompt"], raw=True)
    head = tokens[: example["fact_span"][1] + 400]
    session.generate(head, dataclasses.replace(SPARSE, max_tokens=1))
    result = session.generate(tokens, dataclasses.replace(SPARSE, history="rescore"))
    assert result.timings.draft_read == tokens.size - head.size
    assert result.timings.status == "active"
    assert result.tokens[0] == example["answer_ids"][0]
    assert set(range(*example["fact_span"])) <= set(result.kept.tolist())


def test_an_artifact_without_a_draft_loads_and_reads_prompts_whole(engine: Engine):
    manifest = engine.artifact.manifest
    alone = dataclasses.replace(manifest, models={"target": manifest.models["target"]})
    found = Engine.load(dataclasses.replace(engine.artifact, manifest=alone), self_test=False)
    tokens = engine.encode(EXAMPLES[0]["prompt"], raw=True)
    result = found.generate(tokens, SPARSE)
    assert (result.timings.status, result.timings.reason) == ("failed_dense", "this artifact has no draft")
    assert result.tokens == engine.generate(tokens, dataclasses.replace(SPARSE, mode="dense")).tokens


def test_the_example_of_the_document_runs(engine: Engine, capsys: pytest.CaptureFixture[str]):
    text = (DEMO.parents[1] / "docs" / "conversations.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(code, "conversations.md", "exec"), {"engine": engine, "document": document(EXAMPLES[0])})
    assert int(capsys.readouterr().out) > 0
