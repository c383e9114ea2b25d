"""Fingerprints of tensors, and the file that holds a model's self-test."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specprefill_jax.artifact.manifest import Model, StateTensor
from specprefill_jax.artifact.self_test import (
    PROJECTIONS,
    Expected,
    Piece,
    SelfTest,
    by_head,
    expect,
    rows_by_head,
    signs,
)
from specprefill_jax.errors import ArtifactError
from tests.artifact.sample import make_manifest, write_artifact

HEADS = np.random.default_rng(0).normal(size=(4, 300)).astype(np.float32)


def test_the_same_values_have_no_difference():
    assert expect(HEADS, 1e-3).difference(HEADS) < 3e-6  # what is recorded has 6 digits


@pytest.mark.parametrize("part", [1.0, 0.1, 1e-3])
def test_a_difference_is_the_relative_error_up_to_the_noise_of_16_directions(part: float):
    """Of 16 squared normal numbers the mean is within a factor of 2 with odds of 99.9%."""
    for seed in range(20):
        noise = np.random.default_rng(seed).normal(size=HEADS.shape)
        noise *= (
            part * np.linalg.norm(HEADS, axis=1, keepdims=True) / np.linalg.norm(noise, axis=1, keepdims=True)
        )
        found = expect(HEADS, 1e-3).difference((HEADS + noise).astype(np.float32))
        assert part / 2 < found < part * 2


def test_each_head_counts_by_its_own_size():
    """A change of a head by a tenth is seen alike, however small the head is beside others."""
    sizes = np.array([[1.0], [10.0], [100.0], [0.5]], np.float32)
    expected = expect(HEADS * sizes, 1e-3)
    for head in range(4):
        changed = HEADS * sizes
        changed[head] *= 1.1
        assert 0.02 < expected.difference(changed) < 0.1  # 0.1 / sqrt(4 heads)


def test_every_single_value_counts():
    expected = expect(HEADS, 1e-3)
    for at in range(0, HEADS.size, 41):
        changed = HEADS.copy()
        changed.reshape(-1)[at] += 1.0
        assert expected.difference(changed) > 0.01


def test_values_in_another_order_differ():
    assert expect(HEADS, 1e-3).difference(HEADS[::-1].copy()) > 0.5
    assert expect(HEADS, 1e-3).difference(np.roll(HEADS, 1, axis=1)) > 0.5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_never_within_a_tolerance(bad: float):
    changed = HEADS.copy()
    changed[3, 7] = bad
    assert not expect(HEADS, 1e-3).difference(changed) <= 1e30


def test_another_number_of_heads_is_infinitely_different():
    assert expect(HEADS, 1e-3).difference(HEADS[:2]) == float("inf")


def test_a_tensor_of_zeros_can_be_expected():
    expected = expect(np.zeros((2, 3), np.float32), 1e-3)
    assert expected.difference(np.zeros((2, 3), np.float32)) == 0
    assert expected.difference(np.full((2, 3), 1e-6, np.float32)) > 1


def test_signs_are_those_of_splitmix64():
    """The first three numbers of the generator started at 0, as its authors publish them."""
    first = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    bits = [[1 if number >> bit & 1 else -1 for number in first] for bit in range(PROJECTIONS)]
    np.testing.assert_array_equal(signs(3), bits)


def test_keys_are_grouped_by_head_wherever_the_slots_stand():
    keys = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)  # [heads, slots, size]
    heads_first = by_head(StateTensor("k", (2, "C", 4), "f32"), keys)
    slots_first = by_head(StateTensor("k", ("C", 2, 4), "f32"), keys.swapaxes(0, 1))
    np.testing.assert_array_equal(heads_first, slots_first)
    np.testing.assert_array_equal(np.sort(heads_first, axis=1), keys.reshape(2, 12))


def test_rows_are_grouped_by_layer_and_head():
    rows = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    np.testing.assert_array_equal(rows_by_head(rows)[4 * 1 + 2], rows[:, 1, 2].reshape(-1))


# --- the file


@pytest.fixture
def model(tmp_path: Path) -> Model:
    write_artifact(tmp_path / "artifact")
    return make_manifest(tmp_path / "artifact").models["target"]


def made(model: Model) -> SelfTest:
    values = {name: expect(HEADS, 1e-3) for name in ("logits", *(tensor.name for tensor in model.state))}
    pieces = (Piece((1, 2), (0, 5)), Piece((3,), (9,)))
    return SelfTest(pieces, 4, {"hidden": expect(HEADS, 1e-3), **values}, values)


def test_what_is_written_is_read_back(model: Model, tmp_path: Path):
    made(model).write(tmp_path / "test.json")
    assert SelfTest.read(tmp_path / "test.json", model) == made(model)
    assert made(model).slots == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pieces": ()}, "tokens and positions must be as many, and at least one"),
        ({"pieces": (Piece((1, 2), (0,)),)}, "tokens and positions must be as many"),
        ({"pieces": (Piece((1, 2), (5, 5)),)}, "positions must rise within"),
        ({"pieces": (Piece((1, 2), (0, 2**18 - 1)),)}, "positions must rise within"),
        ({"pieces": (Piece((1664,), (0,)),)}, "a token is outside the vocabulary"),
        ({"pieces": (Piece(tuple(range(512)), tuple(range(512))),)}, "512 tokens and one more do not fit"),
        ({"next_token": -1}, "a token is outside the vocabulary"),
        ({"prefilled": {}}, "prefilled must hold hidden, layers.0.matrix, layers.3.k, logits"),
        ({"decoded": {}}, "decoded must hold layers.0.matrix, layers.3.k, logits"),
    ],
)
def test_a_self_test_that_does_not_fit_the_model_is_refused(
    changes: dict[str, Any], message: str, model: Model, tmp_path: Path
):
    dataclasses.replace(made(model), **changes).write(tmp_path / "test.json")
    with pytest.raises(ArtifactError, match=rf"test\.json is no self-test of its model: {message}"):
        SelfTest.read(tmp_path / "test.json", model)


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (Expected((1.0,), (0.0,) * 15, 0.1), r"decoded\.logits needs 16 projections and positive norms"),
        (Expected((0.0,), (0.0,) * 16, 0.1), r"decoded\.logits needs 16 projections and positive norms"),
        (Expected((1.0,), (0.0,) * 16, 0.0), r"decoded\.logits: the tolerance must be positive"),
    ],
)
def test_an_expectation_that_nothing_could_miss_is_refused(
    expected: Expected, message: str, model: Model, tmp_path: Path
):
    test = made(model)
    dataclasses.replace(test, decoded={**test.decoded, "logits": expected}).write(tmp_path / "test.json")
    with pytest.raises(ArtifactError, match=message):
        SelfTest.read(tmp_path / "test.json", model)


@pytest.mark.parametrize("text", ["", "[]", '{"pieces": []}', "\x00"])
def test_a_file_that_is_no_self_test_is_refused(text: str, model: Model, tmp_path: Path):
    (tmp_path / "test.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"test\.json"):
        SelfTest.read(tmp_path / "test.json", model)


def test_the_tolerance_cannot_be_infinite(model: Model, tmp_path: Path):
    made(model).write(tmp_path / "test.json")
    document = json.loads((tmp_path / "test.json").read_text())
    document["decoded"]["logits"]["tolerance"] = float("inf")
    (tmp_path / "test.json").write_text(json.dumps(document))
    with pytest.raises(ArtifactError, match="tolerance"):
        SelfTest.read(tmp_path / "test.json", model)
