"""Training of the demo pair: its model is the serving one, its data are what they say, a run can go on."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from train_demo import train as training
from train_demo.data import ANSWER, FIRST, MAKERS, OTHER, Source, Stage
from train_demo.model import NO_GAPS, Gaps, initial, inverse, logits, shapes

from specprefill_jax.models.config import TextConfig
from tests.models.reference import DEMO, JaxRunner, load_pair, run_blocks

TINY: dict[str, Any] = {
    "vocab_size": 1664,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
STAGE = Stage(
    steps=2,
    tokens=64,
    batch=2,
    kinds={"restated": 1},
    facts=(1, 2),
    values=("name",),
    rate=1e-3,
)


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    """Here a batch is before all axes of the serving model, and optax raises numbers to whole powers."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def source() -> Source:
    return Source(Tokenizer.from_file(str(DEMO / "tokenizer.json")))


@cache
def compiled(config: TextConfig, gaps: Gaps = NO_GAPS) -> Callable[..., jax.Array]:
    return jax.jit(partial(logits, config, gaps=gaps))


@pytest.mark.parametrize("role", ["draft", "target"])
@pytest.mark.parametrize("kept", ["all", "with gaps"])
def test_the_model_is_the_one_that_serves(role: str, kept: str):
    pair = load_pair(DEMO / role)
    example = json.loads((DEMO / "examples.jsonl").read_text().splitlines()[7])
    ids = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(example["prompt"]).ids[:256]
    positions = np.arange(256, dtype=np.int32)
    if kept == "with gaps":
        positions = positions[(positions // 32 % 3 != 1) | (positions >= 240)][:160]
    tokens = np.array(ids, np.int32)[positions]
    runner = JaxRunner(pair.config, pair.model, 256)
    expected = runner.head(run_blocks(runner, tokens, positions, block=32)[0])
    parameters = {name: jnp.asarray(p) for name, p in load_file(DEMO / role / "model.safetensors").items()}
    found = compiled(pair.config)(
        parameters, jnp.asarray(tokens[None]), positions=jnp.asarray(positions[None])
    )
    np.testing.assert_allclose(found[0, -1], expected, atol=1e-4 * float(np.abs(np.asarray(expected)).max()))


def test_what_delta_layers_might_do_at_gaps_does_nothing_without_gaps_and_something_with_them():
    config = TextConfig.from_hf(hf(TINY))
    parameters = initial(config, 0, (0.01, 0.1), 0.0)
    tokens = jnp.arange(64)[None]
    straight = jnp.arange(64)[None]
    gapped = jnp.where(straight < 40, straight, straight + 100)
    at = {"no": straight, "yes": gapped}
    plain = {name: compiled(config)(parameters, tokens, positions=p) for name, p in at.items()}
    for gaps in (Gaps(decay=1.0), Gaps(cut=True)):
        same = compiled(config, gaps)(parameters, tokens, positions=straight)
        np.testing.assert_allclose(same, plain["no"], atol=1e-5)
        other = compiled(config, gaps)(parameters, tokens, positions=gapped)
        np.testing.assert_allclose(other[:, :40], plain["yes"][:, :40], atol=1e-6)
        assert float(np.abs(other[:, 40:44] - plain["yes"][:, 40:44]).max()) > 1e-4


def test_the_inverse_is_exact_on_keys_that_repeat_and_hardly_decay():
    """Where a single series over the chunk would lose every digit."""
    a = -np.tril(np.ones((32, 32)), -1) * 0.99
    expected = np.linalg.inv(np.eye(32) - a)
    np.testing.assert_allclose(inverse(jnp.asarray(a, jnp.float32)), expected, atol=1e-3)


def test_parameters_are_those_of_the_checkpoint():
    for role in ("draft", "target"):
        config = load_pair(DEMO / role).config
        stored = {name: p.shape for name, p in load_file(DEMO / role / "model.safetensors").items()}
        assert shapes(config) == stored


# --- data


@pytest.mark.parametrize("kind", MAKERS)
def test_answers_weigh_most_and_are_the_texts_own(source: Source, kind: str):
    stage = dataclasses.replace(STAGE, tokens=256, batch=8, kinds={kind: 1}, facts=(2, 4))
    ids, weights = source.batch(stage, "1/0")
    assert ids.shape == weights.shape == (8, 257)
    assert set(np.unique(weights)) <= {np.float32(w) for w in (0, OTHER, ANSWER, FIRST)}
    for row, weight in zip(ids, weights, strict=True):
        firsts = np.flatnonzero(weight == np.float32(FIRST))
        assert firsts.size
        for at in firsts:
            before = source.tokenizer.decode(row[:at].tolist(), skip_special_tokens=False)
            answer = source.tokenizer.decode([int(row[at])]).strip()
            assert answer, "a space alone is no answer"
            assert answer in before, f"{answer!r} is nowhere before"


def test_a_batch_follows_from_its_seed(source: Source):
    stage = dataclasses.replace(STAGE, kinds=dict.fromkeys(MAKERS, 1.0), tokens=256)
    one, same, other = (source.batch(stage, seed) for seed in ("1/5", "1/5", "1/6"))
    np.testing.assert_array_equal(one[0], same[0])
    np.testing.assert_array_equal(one[1], same[1])
    assert (one[0] != other[0]).any()


# --- a run


def test_a_role_that_the_plan_lacks_is_named_with_those_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.argv", ["train_demo", "drift", "out"])
    with pytest.raises(SystemExit, match="2"):
        training.main()
    assert "no table 'drift' in " in (error := capsys.readouterr().err)
    assert "; there are draft, target, " in error


def hf(sizes: dict[str, Any]) -> dict[str, Any]:
    fields = json.loads((DEMO / "draft" / "config.json").read_text())
    return {**fields, **sizes}


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two stages of two steps, each of which is saved."""
    monkeypatch.setattr(training, "SAVED_EVERY", 1)
    (tmp_path / "config.json").write_text(json.dumps(hf(TINY)))
    stage = dataclasses.asdict(STAGE) | {"kinds": {"restated": 1.0, "asked": 1.0}}
    return {
        "config": "config.json",
        "tokenizer": str(DEMO / "tokenizer.json"),
        "seed": 3,
        "decay": 0.02,
        "rate": 0.0,
        "memory": (0.001, 0.1),
        "sharpness": 0.0,
        "stages": [{**stage, "layers": 1}, {**stage, "memory": (0.06, 0.5), "sharpness": 0.8}],
    }


def assert_same(one: Path, other: Path) -> None:
    """The weights in two folders are equal, bit by bit."""
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys() == shapes(TextConfig.from_hf(hf(TINY))).keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def test_a_run_that_was_stopped_goes_on_to_the_same_weights(tmp_path: Path, plan: dict[str, Any]):
    training.train(plan, tmp_path, tmp_path / "whole")
    training.train({**plan, "stages": plan["stages"][:1]}, tmp_path, tmp_path / "parts")
    first = load_file(tmp_path / "parts" / "model.safetensors")
    training.train(plan, tmp_path, tmp_path / "parts")
    assert_same(tmp_path / "whole", tmp_path / "parts")
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert any((first[name] != whole[name]).any() for name in whole)
    assert load_pair(tmp_path / "whole").config.num_hidden_layers == 2


def test_a_run_that_was_stopped_while_it_saved_goes_on_to_the_same_weights(
    tmp_path: Path, plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """In the middle of the second stage, whose first step has set parameters anew."""
    written: list[str] = []

    def write(path: Path, *rest: Any) -> None:
        written.append(path.name)
        if len(written) == 6:  # two files a step
            raise KeyboardInterrupt
        whole(path, *rest)

    training.train(plan, tmp_path, tmp_path / "whole")
    whole = training.write
    monkeypatch.setattr(training, "write", write)
    with pytest.raises(KeyboardInterrupt):
        training.train(plan, tmp_path, tmp_path / "parts")
    assert written[-2:] == ["training.safetensors", "model.safetensors"]
    training.train(plan, tmp_path, tmp_path / "parts")
    assert_same(tmp_path / "whole", tmp_path / "parts")
