"""Sampling: which token follows."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from specprefill_jax.errors import NotFiniteOutput
from specprefill_jax.sampling import sample, softmax
from specprefill_jax.settings import Settings

# Probabilities 0.4, 0.3, 0.2, 0.1 for ids 2, 0, 3, 1.
LOGITS = np.log(np.array([0.3, 0.1, 0.4, 0.2], dtype=np.float32))


def drawn(
    settings: Settings, logits: np.ndarray = LOGITS, count: int = 400, vocabulary: int = 4
) -> Counter[int]:
    """How often each id comes in `count` draws from one seed."""
    generator = np.random.default_rng(0)
    return Counter(sample(logits, settings, generator, vocabulary) for _ in range(count))


def test_temperature_zero_takes_the_likeliest_and_the_lowest_id_of_equals():
    assert drawn(Settings()) == {2: 400}
    assert drawn(Settings(), np.array([0.0, 5.0, 5.0, 1.0], dtype=np.float32)) == {1: 400}


def test_temperature_one_draws_by_probability():
    counts = drawn(Settings(temperature=1.0), count=10_000)
    # Standard deviation of a share: sqrt(0.4 * 0.6 / 10000) = 0.005; four of them are 0.02.
    for token, share in ((2, 0.4), (0, 0.3), (3, 0.2), (1, 0.1)):
        assert counts[token] / 10_000 == pytest.approx(share, abs=0.02)


def test_temperature_flattens_or_sharpens():
    # At temperature 0.5 probabilities are squared: .16 .09 .04 .01 of .30 -> the likeliest has 0.533.
    np.testing.assert_allclose(
        softmax(LOGITS.astype(np.float64), 0.5), [0.3, 1 / 30, 16 / 30, 4 / 30], rtol=1e-6
    )
    assert drawn(Settings(temperature=1e-300)) == {2: 400}


@pytest.mark.parametrize(
    ("knobs", "allowed"),
    [
        ({"top_k": 1}, {2}),
        ({"top_k": 2}, {2, 0}),
        ({"top_k": 4}, {0, 1, 2, 3}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"top_p": 0.39}, {2}),  # 0.4 reaches it
        ({"top_p": 0.65}, {2, 0}),  # 0.4 does not, 0.4 + 0.3 does
        ({"top_p": 0.95}, {0, 1, 2, 3}),  # 0.9 does not
        ({"min_p": 0.3}, {2, 0, 3}),  # at least 0.3 * 0.4 = 0.12
        ({"min_p": 0.6}, {2, 0}),  # at least 0.24
        ({"min_p": 1.0}, {2}),
        # Of top-k's three, 4/9 and 3/9 are .777 and reach it; of all four, .4 and .3 would not.
        ({"top_k": 3, "top_p": 0.77}, {2, 0}),
    ],
)
def test_candidates_are_narrowed_to(knobs: dict[str, Any], allowed: set[int]):
    assert set(drawn(Settings(temperature=1.0, **knobs))) == allowed


def test_top_p_is_taken_before_the_temperature_as_in_llama_cpp():
    # At temperature 4 all are nearly equal: after it, 0.65 would need three candidates.
    assert set(drawn(Settings(temperature=4.0, top_p=0.65))) == {2, 0}


def test_top_k_among_equals_takes_the_lower_ids():
    logits = np.array([1.0, 1.0, 1.0, 1.0], dtype=np.float32)
    assert set(drawn(Settings(temperature=1.0, top_k=2), logits)) == {0, 1}


def test_ids_that_only_pad_the_vocabulary_are_never_drawn():
    logits = np.array([0.0, 1.0, 50.0, 60.0], dtype=np.float32)
    assert drawn(Settings(), logits, vocabulary=2) == {1: 400}
    assert set(drawn(Settings(temperature=1.0), logits, vocabulary=2)) == {0, 1}


def test_the_same_seed_draws_the_same_tokens():
    settings = Settings(temperature=1.0)
    first, second = (np.random.default_rng(11) for _ in range(2))
    draws = [sample(LOGITS, settings, first, 4) for _ in range(50)]
    assert draws == [sample(LOGITS, settings, second, 4) for _ in range(50)]
    assert len(set(draws)) == 4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(bad: float, temperature: float):
    logits = LOGITS.copy()
    logits[3] = bad
    with pytest.raises(NotFiniteOutput, match=r"^1 of 4 logits are not finite, so no token can follow$"):
        sample(logits, Settings(temperature=temperature), np.random.default_rng(0), 4)
