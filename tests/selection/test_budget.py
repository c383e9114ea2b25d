"""Budgets: how many tokens may be kept, and which must be."""

from typing import Any

import numpy as np
import pytest

from specprefill_jax.selection import (
    fewest_kept,
    fixed,
    forced_tokens,
    keeps_everything,
    minimum_kept,
    token_budget,
)
from specprefill_jax.settings import Settings


@pytest.mark.parametrize(
    ("tokens", "minimum"), [(1, 4), (49, 4), (50, 5), (1279, 127), (1280, 128), (1289, 128), (100_000, 128)]
)
def test_the_minimum_is_a_tenth_between_4_and_128(tokens: int, minimum: int):
    assert minimum_kept(tokens) == minimum


@pytest.mark.parametrize(
    ("knobs", "fewest"),
    [
        ({"keep": 0.3, "max_keep": 0, "chunking": "fixed"}, 300 - 31),  # whole chunks of 32 up to the budget
        ({"keep": 0.3, "max_keep": 0, "chunk": 400}, 1),
        ({"keep": 0.3, "max_keep": 0}, 300 - 47),  # chunks that follow the text have at most 48
        ({"max_keep": 0}, 100),  # by mass the minimum
        ({"max_keep": 50}, 50),
    ],
)
def test_the_fewest_kept_are_the_budget_but_for_a_chunk_and_by_mass_the_minimum(
    knobs: dict[str, Any], fewest: int
):
    assert fewest_kept(1000, Settings(**knobs)) == fewest


@pytest.mark.parametrize(
    ("tokens", "keep", "budget"),
    [
        (4471, 0.3, 1342),  # 1341.3 rounded up
        (100, 0.14, 14),  # exactly 14, though 0.14 * 100 in floating point is 14.000000000000002
        (100, 0.55, 55),  # exactly 55; in floating point 55.00000000000001
        (100, 0.0, 10),  # the minimum
        (100, 1e-9, 10),
        (100, 0.101, 11),
        (5000, 0.01, 128),  # 50, raised to the minimum
        (6666, 0.3, 2000),  # 1999.8
        (6667, 0.3, 2000),  # 2000.1 would be 2001: capped by max_keep
    ],
)
def test_in_chunk_mode_the_budget_is_the_fraction_rounded_up_within_minimum_and_cap(
    tokens: int, keep: float, budget: int
):
    assert token_budget(tokens, Settings(keep=keep, select_mode="chunk")) == budget


def test_without_a_cap_the_fraction_alone_counts():
    assert token_budget(20_000, Settings.resolve({"keep": 0.3, "max_keep": 0})) == 6000


def test_the_cap_wins_over_the_minimum():
    assert token_budget(5000, Settings(keep=0.01, max_keep=100)) == 100


@pytest.mark.parametrize(("max_keep", "budget"), [(2000, 2000), (0, 20_000), (30_000, 20_000)])
def test_in_mass_mode_the_budget_is_the_cap_or_the_prompt(max_keep: int, budget: int):
    assert token_budget(20_000, Settings(max_keep=max_keep)) == budget


@pytest.mark.parametrize(
    ("tokens", "keep", "everything"),
    [(4, 0.3, True), (5, 0.3, False), (1, 0.0, True), (100_000, 1.0, True), (100_000, 0.999, False)],
)
def test_everything_is_kept_of_few_tokens_or_at_keep_1(tokens: int, keep: float, everything: bool):
    assert keeps_everything(tokens, Settings(keep=keep)) is everything
    assert keeps_everything(tokens, Settings(keep=keep, select_mode="mass")) is everything


@pytest.mark.parametrize(
    ("tokens", "chunk", "forced"),
    [
        (1, 32, [0]),
        (3, 32, [0, 1, 2]),
        (12, 4, [0, 1, 2, 3, 8, 9, 10, 11]),  # the last chunk is whole
        (11, 4, [0, 1, 2, 3, 8, 9, 10]),  # the last chunk has 3 tokens
        (9, 4, [0, 1, 2, 3, 7, 8]),  # it has 1, so the last 2 reach into the chunk before
        (6, 1, [0, 1, 2, 3, 4, 5]),
        (8, 1, [0, 1, 2, 3, 6, 7]),
    ],
)
def test_the_first_4_the_last_2_and_the_last_chunk_are_forced(tokens: int, chunk: int, forced: list[int]):
    np.testing.assert_array_equal(np.flatnonzero(forced_tokens(fixed(tokens, chunk), chunk)), forced)
