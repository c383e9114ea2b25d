"""What is pinned of a prompt, and prompts for which the draft must not or cannot run."""

import dataclasses
import weakref
from pathlib import Path
from typing import Any

import pytest

from specprefill_jax.artifact.verify import Artifact
from specprefill_jax.chat import Chat
from specprefill_jax.engine import Engine
from specprefill_jax.errors import ArtifactError, DeviceFailed, MemoryTooSmall, PinError
from specprefill_jax.pins import Pins
from specprefill_jax.policy import plan_memory
from specprefill_jax.settings import Settings
from tests.engine.fake import CHAT, DEMO, make, prompt
from tests.policy.pair import make_manifest

SPARSE = Settings(mode="sparse", max_tokens=2, select_mode="chunk", keep=0.3, chunking="fixed")
TOKENS = prompt(320, needle_at=130)
LONG = "one two three four five six seven eight nine ten " * 60
TOOLS: list[dict[str, Any]] = [{"name": "get_weather", "description": "the weather of a place"}]


def with_tools(tmp_path: Path) -> Engine:
    """An engine whose template writes tools before everything else."""
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    fake = make()
    chat = Chat.load(DEMO / "tokenizer.json", template, stop_ids=[2])
    return Engine(fake.engine.artifact, chat, fake.draft, fake.target)


# --- pins


def test_pinned_tokens_are_kept_and_counted_among_the_forced():
    result = make().engine.generate(TOKENS, SPARSE, pins=Pins(tokens=((200, 210),)))
    assert set(range(200, 210)) <= set(result.kept.tolist())
    assert (result.timings.forced, result.timings.pinned) == (4 + 32 + 10, 10)
    assert result.kept.size <= 96


def test_a_pinned_text_is_kept_where_it_stands():
    text = LONG + "the secret word is plover. " + LONG
    engine = make().engine
    result = engine.generate(text, SPARSE, pins=Pins(texts=("secret word is plover",)))
    kept = CHAT.decode(engine.encode(text)[result.kept])
    assert "secret word is plover" in kept


def test_the_system_message_is_kept_whole_and_a_long_last_user_message_is_not():
    messages = [{"role": "system", "content": "Answer in verse."}, {"role": "user", "content": LONG}]
    engine = make().engine
    result = engine.generate(messages, SPARSE)
    kept = CHAT.decode(engine.encode(messages)[result.kept])
    assert kept.startswith("<|im_start|>system\nAnswer in verse.<|im_end|>\n<|im_start|>user\n")
    assert result.timings.status == "active"
    assert result.kept.size < 0.4 * result.usage.prompt_tokens
    without = engine.generate(messages, dataclasses.replace(SPARSE, pin_roles=()))
    assert result.timings.pinned > without.timings.pinned == 5, "the opening of the answer"


def test_pins_that_leave_no_room_make_the_prompt_dense_and_say_so():
    fake = make()
    result = fake.engine.generate(TOKENS, SPARSE, pins=Pins(tokens=((0, 200),)))
    assert result.timings.status == "skipped_insufficient_budget"
    assert "200 that are pinned" in result.timings.reason
    assert result.kept.size == 320
    assert fake.draft.calls == [], "that was known before the draft had read anything"


def test_a_pin_without_a_place_is_an_error():
    with pytest.raises(PinError, match="does not occur in the prompt"):
        make().engine.generate("What is this?", pins=Pins(texts=("elsewhere",)))


def test_a_score_shows_what_is_pinned():
    scored = make().engine.score(TOKENS, SPARSE, pins=Pins(tokens=((200, 210),)))
    assert scored.selection.pinned == 10


# --- tools


def test_by_default_tool_definitions_are_kept_whole(tmp_path: Path):
    engine = with_tools(tmp_path)
    result = engine.generate(LONG, dataclasses.replace(SPARSE, pin_roles=()), variables={"tools": TOOLS})
    kept = CHAT.decode(engine.encode(LONG, variables={"tools": TOOLS})[result.kept])
    assert result.timings.status == "active"
    assert '"the weather of a place"' in kept


def test_code_full_of_the_guides_words_does_not_trigger_the_default_guard(tmp_path: Path):
    text = "def get_value(function, tool): set_value(search_all) " + LONG
    result = with_tools(tmp_path).generate(text, SPARSE)
    assert result.timings.status == "active"


@pytest.mark.parametrize(
    ("text", "options", "reason"),
    [
        (LONG, {"variables": {"tools": TOOLS}}, "the request defines tools"),
        (LONG, {"structured": True}, "the answer has a given structure"),
        ("def get_value(): " + LONG, {}, "the first 256 tokens contain 'get_'"),
    ],
)
def test_the_strict_guard_runs_requests_with_tools_dense(
    tmp_path: Path, text: str, options: dict[str, Any], reason: str
):
    engine = with_tools(tmp_path)
    result = engine.generate(text, dataclasses.replace(SPARSE, tool_guard="strict"), **options)
    assert result.timings.status == "skipped_tool_guard"
    assert reason in result.timings.reason
    assert result.kept.size == result.usage.prompt_tokens
    assert engine.generate(LONG, dataclasses.replace(SPARSE, tool_guard="strict")).timings.status == "active"


def test_tools_whose_place_the_template_hides_run_dense(tmp_path: Path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content | reverse }}{% endfor %}{{ tools }}")
    chat = Chat.load(DEMO / "tokenizer.json", template, stop_ids=[2])
    fake = make()
    engine = Engine(fake.engine.artifact, chat, fake.draft, fake.target)
    result = engine.generate(LONG, SPARSE, variables={"tools": TOOLS})
    assert result.timings.status == "skipped_tool_guard"
    assert "hides where the tool definitions are" in result.timings.reason


def test_variables_reach_the_template_and_need_one(tmp_path: Path):
    engine = with_tools(tmp_path)
    assert engine.encode("x", variables={"tools": TOOLS}).size > engine.encode("x").size
    with pytest.raises(ValueError, match="variables are for the chat template"):
        engine.encode("x", raw=True, variables={"tools": TOOLS})


# --- no draft


def test_without_a_draft_every_prompt_is_read_whole():
    fake = make()
    engine = Engine(fake.engine.artifact, CHAT, None, fake.target)
    result = engine.generate(TOKENS, SPARSE)
    assert (result.timings.status, result.timings.reason) == ("failed_dense", "this artifact has no draft")
    assert result.tokens == make().engine.generate(TOKENS, Settings(mode="dense", max_tokens=2)).tokens
    assert engine.generate(TOKENS, Settings(mode="dense", max_tokens=2)).timings.status == "disabled"
    with pytest.raises(ArtifactError, match="only a draft scores, and this artifact has no draft"):
        engine.score(TOKENS)


def test_no_memory_for_the_draft_leads_to_the_dense_answer_and_the_next_request_runs(
    monkeypatch: pytest.MonkeyPatch,
):
    fake = make()
    new_state = fake.draft.new_state

    def fail(slots: int):
        raise DeviceFailed("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(fake.draft, "new_state", fail)
    result = fake.engine.generate(TOKENS, SPARSE)
    assert result.timings.status == "failed_dense"
    assert "RESOURCE_EXHAUSTED" in result.timings.reason
    monkeypatch.setattr(fake.draft, "new_state", new_state)
    after = fake.engine.generate(TOKENS, SPARSE)
    assert after.timings.status == "active"
    assert after.tokens == make().engine.generate(TOKENS, SPARSE).tokens


def test_the_drafts_memory_is_given_back_before_the_target_takes_its_own(monkeypatch: pytest.MonkeyPatch):
    fake = make()
    alive: list[int] = []
    new_state = fake.target.new_state

    def count(slots: int):
        alive.append(sum(state is not None for state in [ref() for ref in held]))
        return new_state(slots)

    held: list[weakref.ref[Any]] = []
    draft_state = fake.draft.new_state

    def hold(slots: int):
        state = draft_state(slots)
        fake.draft.states.clear()
        held.append(weakref.ref(state))
        return state

    monkeypatch.setattr(fake.draft, "new_state", hold)
    monkeypatch.setattr(fake.target, "new_state", count)
    fake.engine.generate(TOKENS, SPARSE)
    assert (len(held), alive) == (1, [0])


# --- memory


def true_pair() -> Engine:
    """Models of a few lines whose manifest is that of the true 0.8B and 4B."""
    fake = make()
    return Engine(Artifact(DEMO, make_manifest()), CHAT, fake.draft, fake.target)


def test_a_prompt_runs_in_whatever_way_the_memory_allows_and_is_refused_with_numbers_where_it_allows_none():
    tokens = prompt(900, needle_at=130)
    plan = plan_memory(make_manifest(), 900, SPARSE)
    found = {way.mode: way.total for way in plan.ways}
    assert found["dense"] < found["continuous"]
    sparse = true_pair().generate(tokens, dataclasses.replace(SPARSE, memory=found["continuous"]))
    assert (sparse.timings.status, sparse.timings.scoring) == ("active", "continuous")
    dense = true_pair().generate(tokens, dataclasses.replace(SPARSE, memory=found["continuous"] - 1))
    assert dense.timings.status == "failed_dense"
    assert f"the draft does not fit {found['continuous'] - 1} bytes" in dense.timings.reason
    with pytest.raises(MemoryTooSmall, match="weights"):
        true_pair().generate(tokens, dataclasses.replace(SPARSE, memory=found["dense"] - 1))
