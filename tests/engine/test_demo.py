"""The whole chain on the trained demo pair, compiled for the CPU."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jaxtyping import Float, Int

from specprefill_jax.artifact.verify import Artifact
from specprefill_jax.cli import load, main
from specprefill_jax.engine import Engine, Result, Track
from specprefill_jax.engine.track import BEGINNING
from specprefill_jax.errors import DeviceFailed
from specprefill_jax.pins import Pins
from specprefill_jax.runtime.program import Program
from specprefill_jax.runtime.state import State
from specprefill_jax.session import Session
from specprefill_jax.settings import Settings
from tests.engine.fake import DEMO

ROOT = DEMO.parents[1]
EXAMPLES = [json.loads(line) for line in (DEMO / "examples.jsonl").read_text().splitlines()]
MIDDLE = EXAMPLES[22]  # 2,042 tokens; the fact is at 1035
SPARSE = Settings(mode="sparse", max_tokens=4)
DENSE = Settings(mode="dense", max_tokens=4)

# Of the largest logit: another cut into blocks sums the same f32 products in another order.
SPLIT_TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def forgetful(request: pytest.FixtureRequest) -> None:
    """Each test has its prompts scored, also those that were scored in another."""
    if "engine" in request.fixturenames:
        request.getfixturevalue("engine").forget()


def tokens_of(engine: Engine, example: dict[str, Any]) -> Int[np.ndarray, "M"]:
    return engine.encode(example["prompt"], raw=True)


def of(example: dict[str, Any]) -> str:
    return f"{example['kind']}-{example['tokens']}"


def test_loading_tells_how_far_it_has_come(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Entries: one to prefill of the target and two of the draft, decode, head."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    heard: list[tuple[str, int, int]] = []
    for _ in range(2):
        Engine.load(demo, watch=lambda *what: heard.append(what))
    size = sum(path.stat().st_size for path in demo.iterdir() if path.name != "manifest.json")
    draft, target = ([("test", done, total) for done in range(1, total + 1)] for total in (4, 3))
    first, second = (at for at, what in enumerate(heard) if what == ("check", size, size))
    assert heard[first + 1 : second][: 2 + len(draft + target)] == [
        ("load", 0, 2),
        *draft,
        ("load", 1, 2),
        *target,
    ]
    assert heard[second + 1 :] == [("load", 0, 2), ("load", 1, 2)], "it passed before"


def test_a_fact_in_the_middle_of_a_long_document_is_found_sparsely(engine: Engine):
    result = engine.generate(MIDDLE["prompt"], dataclasses.replace(SPARSE, max_tokens=8), raw=True)
    first, end = MIDDLE["fact_span"]
    assert result.timings.status == "active"
    assert result.text.split()[0].rstrip(".") == "Golaga"
    assert result.kept.size <= 0.45 * MIDDLE["tokens"]
    assert set(range(first, end)) <= set(result.kept.tolist())


def test_without_the_fact_the_answer_is_wrong(engine: Engine):
    tokens = tokens_of(engine, MIDDLE)
    kept = engine.generate(tokens, SPARSE).kept
    first, end = MIDDLE["fact_span"]
    without = kept[(kept < first) | (kept >= end)]
    assert engine.answer_from(tokens, kept, SPARSE).tokens[0] == MIDDLE["answer_ids"][0]
    assert engine.answer_from(tokens, without, SPARSE).tokens[0] != MIDDLE["answer_ids"][0]


@pytest.mark.parametrize("example", EXAMPLES[::13], ids=of)
def test_keeping_everything_and_dense_give_identical_tokens(engine: Engine, example: dict[str, Any]):
    tokens = tokens_of(engine, example)
    everything = engine.generate(tokens, Settings(mode="sparse", keep=1.0, max_tokens=8))
    assert everything.timings.status == "kept_all"
    assert everything.tokens == engine.generate(tokens, dataclasses.replace(DENSE, max_tokens=8)).tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "example",
    [pytest.param(e, id=of(e), marks=pytest.mark.deep if i % 4 else []) for i, e in enumerate(EXAMPLES)],
)
def test_the_sparse_path_with_everything_kept_and_other_blocks_is_the_dense_one(
    engine: Engine, example: dict[str, Any]
):
    tokens = tokens_of(engine, example)
    kept = engine.score(tokens, Settings(keep=1.0)).selection.kept
    assert kept.tolist() == list(range(tokens.size))
    track, cut = Track(engine.target), tokens.size // 2 + 5
    track.start(BEGINNING, tokens.size)
    sparse = engine.target.head(track.read(tokens, kept, stops=(cut,)).hidden)
    dense = engine.answer_from(tokens, np.arange(tokens.size, dtype=np.int32), DENSE).logits
    assert scaled_difference(sparse, dense) <= SPLIT_TOLERANCE
    assert sparse.argmax() == dense.argmax()
    session = Session(engine)
    session.generate(tokens[:cut], dataclasses.replace(DENSE, max_tokens=1))
    assert session.generate(tokens, DENSE).tokens == engine.generate(tokens, DENSE).tokens


def scaled_difference(found: Float[np.ndarray, "V"], expected: Float[np.ndarray, "V"]) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def test_slots_in_place_of_the_true_positions_give_another_answer(engine: Engine):
    tokens = tokens_of(engine, MIDDLE)
    kept = engine.generate(tokens, SPARSE).kept
    true = engine.answer_from(tokens, kept, SPARSE)
    slots = engine.answer_from(tokens, kept, SPARSE, positions=np.arange(kept.size, dtype=np.int32))
    assert scaled_difference(slots.logits, true.logits) > 100 * SPLIT_TOLERANCE


def test_the_same_prompt_is_scored_the_same_bit_for_bit(engine: Engine):
    first = engine.score(MIDDLE["prompt"], raw=True)
    engine.score(EXAMPLES[0]["prompt"], raw=True)
    engine.forget()  # or it would be looked up
    second = engine.score(MIDDLE["prompt"], raw=True)
    np.testing.assert_array_equal(first.importance, second.importance)
    np.testing.assert_array_equal(first.selection.kept, second.selection.kept)


def test_after_lookahead_the_drafts_state_is_the_one_before_bit_for_bit(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    made: list[State] = []
    draft = engine.programs["draft"]
    new_state = draft.new_state

    def remember(slots: int) -> State:
        made.append(new_state(slots))
        return made[-1]

    monkeypatch.setattr(draft, "new_state", remember)
    for lookahead in (0, 2):
        engine.score(EXAMPLES[0]["prompt"], Settings(lookahead=lookahead), raw=True)
    without, with_lookahead = made
    assert without.length == with_lookahead.length == EXAMPLES[0]["tokens"]
    assert without.capacity == with_lookahead.capacity
    before, after = without.read(), with_lookahead.read()
    for tensor in draft.model.state:
        axis = tensor.shape.index("C") if tensor.grows else 0
        used = range(without.length if tensor.grows else len(before[tensor.name]))
        got, wanted = (found[tensor.name].take(used, axis=axis) for found in (after, before))
        np.testing.assert_array_equal(got, wanted, err_msg=tensor.name)


def test_the_same_request_is_answered_the_same_bit_for_bit(engine: Engine):
    tokens = tokens_of(engine, EXAMPLES[10])
    first = engine.generate(tokens, SPARSE)
    engine.generate(tokens_of(engine, EXAMPLES[0]), SPARSE)
    engine.forget()  # or it would be looked up
    second = engine.generate(tokens, SPARSE)
    np.testing.assert_array_equal(first.kept, second.kept)
    np.testing.assert_array_equal(first.logits, second.logits)
    assert first.tokens == second.tokens


def test_facts_in_code_are_kept_whole_and_found_at_every_keep_rate(engine: Engine):
    """Five documents of code-like filler, the fact at another depth in each; dense prefill finds all five."""
    found = dict.fromkeys((0.1, 0.2, 0.3), 0)
    for example in EXAMPLES[15:20]:
        tokens = tokens_of(engine, example)
        for keep in found:
            result = engine.generate(tokens, dataclasses.replace(SPARSE, max_tokens=1, keep=keep))
            assert result.timings.status == "active"
            assert result.kept.size <= -(-keep * tokens.size // 1)
            assert keep < 0.2 or set(range(*example["fact_span"])) <= set(result.kept.tolist())
            found[keep] += result.tokens[0] == example["answer_ids"][0]
    assert found[0.2] == found[0.3] == 5
    assert found[0.1] >= 4


def test_by_default_a_fact_in_the_middle_of_4000_tokens_of_code_is_found(engine: Engine):
    example = EXAMPLES[37]
    result = engine.generate(tokens_of(engine, example), dataclasses.replace(SPARSE, max_tokens=1))
    assert result.timings.status == "active"
    assert set(range(*example["fact_span"])) <= set(result.kept.tolist())
    assert result.tokens[0] == example["answer_ids"][0]


def test_a_secret_of_the_first_turn_is_known_in_the_next_which_reads_only_what_is_new(engine: Engine):
    """The first turn is the document without its question, the fact pinned as a system part would be."""
    example = EXAMPLES[12]
    tokens, (first, end) = tokens_of(engine, example), example["fact_span"]
    document = tokens.size - 40

    def second_turn(tokens: Int[np.ndarray, "M"], pins: Pins) -> Result:
        session = Session(engine)
        session.generate(tokens[:-40], SPARSE, pins=pins)
        return session.generate(tokens, SPARSE)

    result = second_turn(tokens, Pins(tokens=((first, end),)))
    assert result.tokens[0] == example["answer_ids"][0]
    assert (result.timings.reused, result.timings.draft_read) == (document, 40)
    without = second_turn(np.delete(tokens, range(first, end)), Pins())
    assert without.tokens[0] != example["answer_ids"][0]


def test_a_token_after_sparse_prefill_calls_the_entries_that_one_after_dense_prefill_calls(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    called: list[str] = []
    invoke = engine.target._invoke

    def note(entry: str, *arguments: Any) -> Any:
        called.append(entry)
        return invoke(entry, *arguments)

    monkeypatch.setattr(engine.target, "_invoke", note)
    for settings in (SPARSE, DENSE):
        called.clear()
        result = engine.generate(tokens_of(engine, EXAMPLES[1]), settings)
        answering = [entry for entry in called if not entry.startswith("prefill")]
        steps = len(result.tokens) - (result.finish == "length")  # the last token is not read
        assert answering == ["head", *[f"decode_C{engine.target.largest_capacity}"] * steps]
        assert steps


def test_a_draft_that_does_not_load_leaves_dense_answers_that_say_why(
    demo: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    load = Program.load

    def fail(artifact: Artifact, role: str, *arguments: Any, **more: Any) -> Program:
        if role == "draft":
            raise DeviceFailed("RESOURCE_EXHAUSTED")
        return load(artifact, role, *arguments, **more)

    monkeypatch.setattr(Program, "load", fail)
    alone = Engine.load(demo)
    result = alone.generate(EXAMPLES[0]["prompt"], SPARSE, raw=True)
    assert result.timings.status == "failed_dense"
    assert result.timings.reason == "the draft could not be loaded: RESOURCE_EXHAUSTED"
    assert result.timings.reason in caplog.text
    assert result.tokens == engine.generate(EXAMPLES[0]["prompt"], DENSE, raw=True).tokens


def test_windows_find_the_fact_too(engine: Engine):
    result = engine.generate(MIDDLE["prompt"], dataclasses.replace(SPARSE, window=600), raw=True)
    assert (result.timings.status, result.timings.scoring) == ("active", "windows")
    assert result.tokens[0] == MIDDLE["answer_ids"][0]


def test_the_phases_add_up_to_the_time_to_first_token(engine: Engine):
    timings = engine.generate(MIDDLE["prompt"], SPARSE, raw=True).timings
    assert list(timings.phases) == [
        *("tokenize", "decide", "draft_prefill", "lookahead", "select"),
        *("target_prefill", "head", "first_token"),
    ]
    assert timings.first_token == pytest.approx(sum(timings.phases.values()))


def test_a_cancelled_request_does_not_affect_the_next(engine: Engine):
    class Cancelled(Exception):
        pass

    tokens = tokens_of(engine, EXAMPLES[10])
    undisturbed = engine.generate(tokens, SPARSE)
    for phase in ("score", "prefill", "decode"):

        def watch(heard: str, done: int, total: int, phase: str = phase) -> None:
            if heard == phase and done > 0:
                raise Cancelled

        engine.forget()  # or there would be no scoring to cancel
        with pytest.raises(Cancelled):
            engine.generate(tokens, SPARSE, watch=watch)
        after = engine.generate(tokens, SPARSE)
        assert after.tokens == undisturbed.tokens
        np.testing.assert_array_equal(after.kept, undisturbed.kept)


def test_every_short_length_can_be_scored_and_answered(engine: Engine):
    tokens = tokens_of(engine, EXAMPLES[0])
    for size in (1, 2, 31, 32, 33, 63, 64, 65):
        result = engine.generate(tokens[:size], dataclasses.replace(SPARSE, max_tokens=2))
        assert result.timings.status in ("active", "kept_all", "skipped_insufficient_budget")
        assert isinstance(result, Result)


@pytest.mark.slow
@pytest.mark.vulkan
@pytest.mark.parametrize("example", EXAMPLES[:2], ids=of)
def test_vulkan_keeps_the_same_tokens_and_gives_the_same_answer(
    engine: Engine, vulkan_engine: Engine, example: dict[str, Any]
):
    tokens = tokens_of(engine, example)
    here, there = engine.generate(tokens, SPARSE), vulkan_engine.generate(tokens, SPARSE)
    common = np.intersect1d(here.kept, there.kept).size
    assert common >= 0.98 * max(here.kept.size, there.kept.size)
    assert there.timings.status == "active"
    assert there.tokens == here.tokens
    assert there.tokens[0] == example["answer_ids"][0]


def test_the_example_of_the_readme_answers(demo: Path, capsys: pytest.CaptureFixture[str]):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert code.count('"artifacts/') == 2
    code = code.replace('"artifacts/demo-cpu"', repr(str(demo))).replace('"artifacts/', f'"{ROOT}/artifacts/')
    exec(compile(code, "README.md", "exec"), {})
    assert re.search(r"^ Golaga.* active \d+ 2042$", capsys.readouterr().out, re.DOTALL)


# --- as a command


def arguments_of_the_example() -> list[str]:
    example = {path.stem: path.read_text().rstrip("\n") for path in (DEMO / "example").iterdir()}
    document = str(DEMO / "example" / "document.txt")
    return [
        *("-f", document, example["question"], "--prefix", example["prefix"]),
        *("--mode", "sparse", "--max-tokens", "8", "--json"),
    ]


def test_run_without_an_artifact_uses_the_compiled_demo_pair(
    demo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(load, "demo_artifact", lambda device: demo)
    assert main(["run", "--device", "cpu-portable", *arguments_of_the_example()]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["timings"]["specprefill"] == "active"
    assert document["text"].startswith(" Golaga")
    assert document["usage"]["prompt_tokens"] == MIDDLE["tokens"]


SERVING_ONLY = """
import sys
from importlib.abc import MetaPathFinder

class Wall(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "safetensors") or name.startswith("iree.compiler"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Wall())
from specprefill_jax.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_run_answers_on_a_compiled_artifact_where_neither_jax_nor_a_compiler_is_installed(demo: Path):
    command = ["run", "--artifact", str(demo), *arguments_of_the_example()]
    ran = subprocess.run(
        [sys.executable, "-c", SERVING_ONLY, *command],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["text"].startswith(" Golaga")
    assert ran.stderr == ""
