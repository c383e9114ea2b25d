"""The promises of docs/architecture.md, by number, on the compiled demo pair: on the CPU and on lavapipe.

Prompts are short, because lavapipe takes its time. tests/test_session.py and others show the same on models
of a few lines, with hundreds of prompts.
"""

import dataclasses
import json
import random

import numpy as np
import pytest
from jaxtyping import Float, Int

from specprefill_jax.engine import Engine
from specprefill_jax.pins import Pins
from specprefill_jax.runtime.program import Prefilled
from specprefill_jax.selection import token_budget
from specprefill_jax.session import Session
from specprefill_jax.settings import Settings
from tests.engine.fake import DEMO

TEXT = json.loads((DEMO / "examples.jsonl").read_text().splitlines()[0])["prompt"]
SPARSE = Settings(mode="sparse", max_tokens=3, select_mode="chunk", keep=0.4, chunk=16)
DENSE = Settings(mode="dense", max_tokens=3)
SEEDS = (1, 2)


@pytest.fixture(params=["engine", pytest.param("vulkan_engine", marks=pytest.mark.vulkan)])
def pair(request: pytest.FixtureRequest) -> Engine:
    """The pair on the CPU and on lavapipe."""
    engine: Engine = request.getfixturevalue(request.param)
    engine.forget()
    return engine


def prompt_of(engine: Engine, chance: random.Random, least: int = 1) -> Int[np.ndarray, "M"]:
    """The first tokens of a document, more or fewer than a block of 256 and whatever modulo a chunk."""
    return engine.encode(TEXT, raw=True)[: chance.randint(least, 300)]


@pytest.mark.parametrize("seed", SEEDS)
def test_1_keeping_everything_gives_the_tokens_of_dense(pair: Engine, seed: int):
    tokens = prompt_of(pair, random.Random(seed))
    everything = pair.generate(tokens, dataclasses.replace(SPARSE, keep=1.0))
    assert everything.timings.status == "kept_all"
    assert everything.tokens == pair.generate(tokens, DENSE).tokens


@pytest.mark.parametrize("seed", SEEDS)
def test_2_the_budget_holds_and_pinned_tokens_count_against_it(pair: Engine, seed: int):
    chance = random.Random(seed)
    tokens = prompt_of(pair, chance, least=150)
    start = chance.randrange(tokens.size - 10)
    result = pair.generate(tokens, SPARSE, pins=Pins(tokens=((start, start + 10),)))
    assert result.timings.status == "active"
    assert result.kept.size <= token_budget(tokens.size, SPARSE)
    assert set(range(start, start + 10)) <= set(result.kept.tolist())


def test_3_the_same_prompt_keeps_the_same_tokens_bit_for_bit(pair: Engine):
    tokens = prompt_of(pair, random.Random(3), least=200)
    first = pair.score(tokens, SPARSE)
    pair.score(tokens[::-1].copy(), SPARSE)
    pair.forget()
    second = pair.score(tokens, SPARSE)
    np.testing.assert_array_equal(first.importance, second.importance)
    np.testing.assert_array_equal(first.selection.kept, second.selection.kept)


def test_4_kept_tokens_have_their_own_positions_and_new_ones_follow_the_prompt(pair: Engine):
    tokens = prompt_of(pair, random.Random(4), least=200)
    result = pair.generate(tokens, SPARSE)
    kept, size = result.kept, tokens.size
    assert kept.size < size
    state = pair.target.new_state(kept.size + 3)
    logits = pair.target.head(pair.target.prefill(state, tokens[kept], kept).hidden)
    said: list[int] = []
    while len(said) < 3:
        said.append(int(logits[: pair.chat.vocabulary].argmax()))
        if said[-1] in pair.chat.stop_ids:
            said.pop()
            break
        logits = pair.target.decode(state, said[-1], size + len(said) - 1).logits
    assert list(result.tokens) == said


def test_5_numbers_that_are_none_lead_to_the_dense_answer(pair: Engine, monkeypatch: pytest.MonkeyPatch):
    tokens = prompt_of(pair, random.Random(5), least=200)
    draft = pair.programs["draft"]
    real = draft.prefill

    def broken(*arguments: object, **more: object) -> Prefilled:
        found = real(*arguments, **more)  # type: ignore[arg-type]
        rows: Float[np.ndarray, "R A H C"] | None = found.rows
        assert rows is not None
        rows[..., 7] = np.nan
        return found

    monkeypatch.setattr(draft, "prefill", broken)
    result = pair.generate(tokens, SPARSE)
    assert result.timings.status == "failed_dense"
    assert result.tokens == pair.generate(tokens, DENSE).tokens
    monkeypatch.undo()
    assert pair.generate(tokens, SPARSE).timings.status == "active"


# 6, the state after lookahead, is in test_conversations.py.


@pytest.mark.parametrize("seed", SEEDS)
def test_7_every_length_works_and_wherever_a_prompt_is_cut_the_answer_is_the_same(pair: Engine, seed: int):
    chance = random.Random(seed)
    tokens = prompt_of(pair, chance, least=2)
    session = Session(pair)
    cut = chance.randrange(1, tokens.size)
    session.generate(tokens[:cut], dataclasses.replace(DENSE, max_tokens=1))
    resumed = session.generate(tokens, DENSE)
    assert resumed.timings.reused == cut
    assert resumed.tokens == pair.generate(tokens, DENSE).tokens


@pytest.mark.parametrize("seed", SEEDS)
def test_8_a_request_can_be_cancelled_anywhere_and_the_next_is_unaffected(pair: Engine, seed: int):
    chance = random.Random(seed)
    tokens = prompt_of(pair, chance, least=260)
    heard = 0
    last = chance.randint(1, 7)  # 2 blocks and 2 steps of the draft, a block of the target, 2 tokens more

    def watch(*_: object) -> None:
        nonlocal heard
        heard += 1
        if heard == last:
            raise KeyboardInterrupt

    undisturbed = pair.generate(tokens, SPARSE)
    pair.forget()
    with pytest.raises(KeyboardInterrupt):
        pair.generate(tokens, SPARSE, watch=watch)
    after = pair.generate(tokens, SPARSE)
    assert after.tokens == undisturbed.tokens
    np.testing.assert_array_equal(after.kept, undisturbed.kept)


def test_9_phases_add_up_to_the_time_to_the_first_token(pair: Engine):
    timings = pair.generate(prompt_of(pair, random.Random(9), least=200), SPARSE).timings
    assert len(timings.phases) == 8
    assert timings.first_token == pytest.approx(sum(timings.phases.values()))


def test_10_a_draft_that_costs_more_than_it_saves_is_not_run(pair: Engine, monkeypatch: pytest.MonkeyPatch):
    def never(*_: object, **__: object) -> Prefilled:
        raise AssertionError("the draft was run")

    tokens = prompt_of(pair, random.Random(10), least=200)
    settings = dataclasses.replace(SPARSE, mode="auto", minimum_tokens=0, spec_throughput=1)
    monkeypatch.setattr(pair.programs["draft"], "prefill", never)
    result = pair.generate(tokens, settings)
    assert result.timings.status == "skipped_break_even"
    assert result.tokens == pair.generate(tokens, DENSE).tokens


# 11, answers that follow from the kept tokens alone, is in test_conversations.py.
