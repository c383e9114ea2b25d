"""The JAX model against transformers: random models of the shapes that matter, then the trained demo pair."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Int
from tokenizers import Tokenizer

from specprefill_jax.models.checkpoint import ParameterSpec, build_model, parameter_at
from specprefill_jax.models.config import TextConfig
from specprefill_jax.models.layers import rotary_phases
from specprefill_jax.models.matrix import Tiled, TileShape
from tests.models.reference import (
    CASES,
    DEMO,
    ROWS,
    TOLERANCE,
    Case,
    JaxRunner,
    Pair,
    Reference,
    Tensors,
    compare,
    expected,
    load_pair,
    random_pair,
    run,
    run_blocks,
    used_slots,
)

Pairs = Callable[[str], Pair]
BY_NAME = {case.name: case for case in CASES}
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return cache(lambda name: random_pair(tmp_path_factory.mktemp("random"), name))


@pytest.fixture(scope="module")
def outcome(pairs: Pairs) -> Callable[[Case], Tensors]:
    return cache(lambda case: run(runner(pairs(case.config)), case))


def runner(pair: Pair) -> JaxRunner:
    return JaxRunner(pair.config, pair.model)


@each_case
def test_logits_rows_and_state_are_those_of_transformers(
    case: Case, pairs: Pairs, outcome: Callable[[Case], Tensors]
) -> None:
    compare(expected(pairs(case.config).reference, case), outcome(case), TOLERANCE)


@each_case
def test_valid_rows_sum_to_one_over_the_slots_in_use(case: Case, outcome: Callable[[Case], Tensors]) -> None:
    rows = outcome(case)["rows"]
    last_block = case.length - (case.length - 1) // case.block * case.block
    valid = min(ROWS, last_block)
    # A sum of at most 256 rounded f32 probabilities.
    np.testing.assert_allclose(rows[:valid].sum(axis=-1), 1.0, atol=1e-5)
    assert not rows[..., case.length :].any()


@pytest.mark.parametrize("name", ["fewer tokens than rows in the last block", "gaps, two chunks in a block"])
def test_padding_leaves_no_trace_bit_for_bit(
    name: str, pairs: Pairs, outcome: Callable[[Case], Tensors]
) -> None:
    case = BY_NAME[name]
    garbage = run(runner(pairs(case.config)), case, padding=71)
    for tensor, wanted in outcome(case).items():
        np.testing.assert_array_equal(garbage[tensor], wanted, err_msg=tensor)


def test_tiled_matrices_give_the_same_model(pairs: Pairs) -> None:
    """Tiles that no matrix of the model fills exactly, in blocks and in decode."""
    case = BY_NAME["several blocks"]
    pair = pairs(case.config)
    shape = TileShape(rows=32, depth=28)

    def tiled(spec: ParameterSpec) -> Tiled | Array:
        matrix = parameter_at(pair.model, spec)
        if spec.kind == "vector":
            return matrix
        return Tiled(jnp.asarray(shape.tile(np.asarray(matrix))), *matrix.shape)

    got = run(JaxRunner(pair.config, build_model(pair.config, tiled)), case)
    compare(expected(pair.reference, case), got, TOLERANCE)


def test_slots_in_place_of_positions_are_noticed(pairs: Pairs, outcome: Callable[[Case], Tensors]) -> None:
    case = BY_NAME["gaps, several blocks"]
    by_slot = run(runner(pairs(case.config)), replace(case, positions=tuple(range(case.length))))
    with pytest.raises(AssertionError, match="logits"):
        compare(outcome(case), by_slot, 100 * TOLERANCE)


@pytest.mark.parametrize("position", [0, 1, 511, 512, 30_001, 262_143])
def test_rotary_phases_are_exact_at_every_position(position: int, pairs: Pairs) -> None:
    config = replace(pairs("wide heads").config, rope_theta=1e7)
    cos, sin = rotary_phases(config, jnp.array([position], jnp.int32))
    # The frequencies are rounded to f32, as transformers does; the phases must not add to that.
    half = config.rotary_dim // 2
    frequency = (1.0 / config.rope_theta ** (np.arange(half, dtype=np.float32) / half)).astype(np.float32)
    angle = position * frequency.astype(np.float64)
    rest = np.zeros(config.head_dim - config.rotary_dim)
    np.testing.assert_allclose(cos[0], [*np.cos(angle), *np.cos(angle), *(rest + 1)], atol=3e-7)
    np.testing.assert_allclose(sin[0], [*-np.sin(angle), *np.sin(angle), *rest], atol=3e-7)


@pytest.fixture(scope="module")
def demo() -> Pairs:
    return cache(lambda name: load_pair(DEMO / name))


@pytest.fixture(scope="module")
def prompt() -> Int[np.ndarray, " M"]:
    """The eighth example: 478 tokens of code."""
    example = json.loads((DEMO / "examples.jsonl").read_text().splitlines()[7])
    ids = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(example["prompt"]).ids
    assert len(ids) == example["tokens"]
    return np.array(ids, np.int32)


DEMO_BLOCK, DEMO_CAPACITY, STEPS = 256, 512, 4


@pytest.mark.parametrize("name", ["draft", "target"])
@pytest.mark.parametrize("kept", ["all", "every third chunk"])
def test_trained_models_are_those_of_transformers(
    name: str, kept: str, demo: Pairs, prompt: Int[np.ndarray, " M"]
) -> None:
    pair = demo(name)
    positions = np.arange(len(prompt), dtype=np.int32)
    if kept == "every third chunk":
        positions = positions[(positions // 32 % 3 == 0) | (positions >= len(prompt) - 30)]
    tokens, length = prompt[positions], len(positions)
    jax_model = JaxRunner(pair.config, pair.model, DEMO_CAPACITY)
    hidden, rows, state = run_blocks(jax_model, tokens, positions, block=DEMO_BLOCK)
    logits = jax_model.head(hidden)
    source = Reference(pair.reference)
    wanted, wanted_rows = source.feed(tokens, positions)
    got = {"logits": logits, "rows": rows[..., :length], **used_slots(jax_model.read(state), length)}
    compare({"logits": wanted[-1], "rows": wanted_rows[-ROWS:], **source.state()}, got, TOLERANCE)


def test_greedy_tokens_of_the_demo_target_are_those_of_transformers(
    demo: Pairs, prompt: Int[np.ndarray, " M"]
) -> None:
    pair = demo("target")
    positions = np.arange(len(prompt), dtype=np.int32)
    jax_model = JaxRunner(pair.config, pair.model, DEMO_CAPACITY)
    hidden, _, state = run_blocks(jax_model, prompt, positions, block=DEMO_BLOCK)
    logits = jax_model.head(hidden)
    source = Reference(pair.reference)
    wanted = source.feed(prompt, positions)[0][-1]
    got_tokens, wanted_tokens = [], []
    for slot in range(len(prompt), len(prompt) + STEPS):
        got_tokens.append(int(logits.argmax()))
        wanted_tokens.append(int(wanted.argmax()))
        logits, _, state = jax_model.decode(got_tokens[-1], slot, slot, state)
        wanted = source.feed(np.array(wanted_tokens[-1:]), np.array([slot]))[0][-1]
    assert got_tokens == wanted_tokens
    compare({"logits": wanted}, {"logits": logits}, TOLERANCE)


def test_configuration_is_read_from_what_transformers_saved(pairs: Pairs) -> None:
    config: TextConfig = pairs("twice the value heads").config
    assert config.attention_layers == (1, 3)
    assert (config.linear_num_key_heads, config.linear_num_value_heads) == (2, 4)
    assert config.rotary_dim == 8
