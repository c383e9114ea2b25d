"""Break-even: how fast models read, how much is kept, and when the draft pays."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specprefill_jax.policy import (
    DRAFT_TOKENS_PER_S,
    TARGET_TOKENS_PER_S,
    Estimate,
    KeptFractions,
    Pace,
    break_even,
)
from specprefill_jax.policy.pace import FEWEST_REQUESTS, FEWEST_TOKENS, RECENT
from specprefill_jax.settings import Settings

TOKENS = st.integers(FEWEST_TOKENS, 2**18)
TIMES = st.floats(0.01, 1e7)

# --- pace


def learn(pace: Pace, tokens: int, measured_ms: float | None, actual_ms: float) -> None:
    """From as many requests as are believed."""
    for _ in range(FEWEST_REQUESTS):
        pace.observe(tokens, measured_ms, actual_ms)


def test_a_first_slow_request_is_not_believed():
    """A draft that is declined after it would never show that it is faster."""
    pace = Pace(600)
    for _ in range(FEWEST_REQUESTS - 1):
        pace.observe(6000, None, 10**6)
        assert pace.predict(6000, None) == pytest.approx(10_000)
    pace.observe(6000, None, 10**6)
    assert pace.predict(6000, None) == pytest.approx(10**6)


def test_without_any_measurement_the_guides_rates_are_taken():
    assert Pace(DRAFT_TOKENS_PER_S).predict(6000, None) == pytest.approx(10_000)
    assert Pace(TARGET_TOKENS_PER_S).predict(2700, None) == pytest.approx(10_000)


def test_measured_entries_are_taken_as_they_are_until_requests_come():
    pace = Pace(600)
    assert pace.predict(6000, 123.5) == 123.5
    learn(pace, 6000, 100.0, 150.0)
    assert pace.predict(6000, 200.0) == 300.0


@given(TOKENS, TIMES, st.integers(1, 8))
def test_the_first_requests_replace_the_guess_entirely(tokens: int, actual: float, times: int):
    pace = Pace(600)
    learn(pace, tokens, None, actual)
    assert pace.predict(tokens * times, None) == pytest.approx(actual * times)


@given(st.lists(st.tuples(TOKENS, TIMES), min_size=FEWEST_REQUESTS, max_size=20), TOKENS)
def test_a_prediction_lies_within_the_rates_of_the_last_requests(
    requests: list[tuple[int, float]], tokens: int
):
    pace = Pace(270)
    for read, actual in requests:
        pace.observe(read, None, actual)
    rates = [actual / read for read, actual in requests[-RECENT:]]
    found = pace.predict(tokens, None) / tokens
    assert min(rates) * (1 - 1e-9) <= found <= max(rates) * (1 + 1e-9)


def test_one_slow_request_among_others_moves_nothing():
    pace = Pace(600)
    for actual in (100.0, 100.0, 9000.0, 100.0):
        pace.observe(1000, 50.0, actual)
    assert pace.predict(1000, 50.0) == 100.0


def test_a_device_that_stays_slow_is_noticed_and_what_is_long_ago_forgotten():
    pace = Pace(600)
    for actual in [100.0] * 50 + [400.0] * (RECENT // 2 + 1):
        pace.observe(1000, 100.0, actual)
    assert pace.predict(1000, 100.0) == 400.0


def test_a_few_tokens_say_nothing_about_many():
    """They take a whole block: 1 token in 100 ms would make 10,000 tokens last 1,000 s."""
    pace = Pace(600)
    learn(pace, FEWEST_TOKENS - 1, None, 100_000.0)
    learn(pace, 0, None, 5.0)
    assert pace.predict(6000, None) == pytest.approx(10_000)
    learn(pace, FEWEST_TOKENS, None, 100_000.0)
    assert pace.predict(FEWEST_TOKENS, None) == pytest.approx(100_000)


@pytest.mark.parametrize("actual", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_cannot_be_corrects_nothing(actual: float):
    pace = Pace(600)
    pace.observe(1000, 100.0, actual)
    assert pace.predict(1000, 100.0) == 100.0


def test_what_a_guess_is_off_by_does_not_correct_a_measurement():
    pace = Pace(600)
    learn(pace, 6000, None, 1000.0)
    assert pace.predict(6000, 1000.0) == 1000.0
    learn(pace, 6000, 1000.0, 2000.0)
    assert pace.predict(6000, None) == pytest.approx(1000.0)


def test_a_guess_is_assumed_until_a_request_has_shown_the_truth():
    pace = Pace(600)
    assert (pace.known(None), pace.known(5.0)) == ("assumed", "measured")
    learn(pace, 1000, 5.0, 6.0)
    assert pace.known(None) == "assumed"
    learn(pace, 1000, None, 6.0)
    assert pace.known(None) == "measured"


def test_nothing_is_read_in_no_time():
    assert Pace(600).predict(0, None) == 0.0
    assert Pace(600).predict(0, 0.0) == 0.0


# --- kept


def test_nothing_is_expected_before_a_prompt_of_such_a_length_was_seen():
    kept = KeptFractions()
    assert kept.expected(5000) is None
    kept.note(5000, 1000)
    assert kept.expected(4096) == 819
    assert kept.expected(8191) == 1638
    assert kept.expected(4095) is None
    assert kept.expected(8192) is None


def test_the_median_of_the_last_prompts_is_expected():
    kept = KeptFractions()
    for part in [900] * 20 + [100] * RECENT:
        kept.note(1000, part)
    assert kept.expected(1000) == 100
    kept.note(1000, 1000)
    assert kept.expected(1000) == 100


@given(st.integers(1, 2**18).flatmap(lambda tokens: st.tuples(st.just(tokens), st.integers(0, tokens))))
def test_the_same_prompt_again_is_expected_to_keep_what_it_kept(seen: tuple[int, int]):
    kept = KeptFractions()
    kept.note(*seen)
    assert kept.expected(seen[0]) == seen[1]


# --- break-even


def estimate(settings: Settings | None = None, **changes: float) -> Estimate:
    """10,000 tokens of which 2,000 are kept, at the guide's rates."""
    times = {"draft_ms": 10_000 / 0.6, "dense_ms": 10_000 / 0.27, "sparse_ms": 2_000 / 0.27} | changes
    return break_even(
        settings or Settings(),
        draft_tokens=10_000,
        target_tokens=10_000,
        kept=2_000,
        draft_known="assumed",
        target_known="measured",
        **times,
    )


def test_the_guides_example_pays():
    found = estimate()
    assert found.pays
    assert (round(found.saved_ms), round(found.cost_ms)) == (29630, 16667)
    assert found.reason == (
        "keeping 2000 of 10000 tokens saves 29630 ms (measured), more than 1.2 (break_even_safety) times "
        "the 16667 ms of the draft for 10000 tokens (assumed)"
    )


def test_a_draft_that_does_not_pay_says_by_which_numbers():
    found = estimate(draft_ms=30_000)
    assert not found.pays
    assert found.reason == (
        "keeping 2000 of 10000 tokens saves 29630 ms (measured), not more than 1.2 (break_even_safety) times "
        "the 30000 ms of the draft for 10000 tokens (assumed)"
    )


@pytest.mark.parametrize(("saved", "pays"), [(1199.0, False), (1200.0, False), (1200.1, True)])
def test_savings_that_only_reach_the_margin_do_not_pay(saved: float, pays: bool):
    assert estimate(draft_ms=1000.0, dense_ms=saved + 500, sparse_ms=500.0).pays is pays


def test_the_margin_is_a_setting():
    times = {"draft_ms": 1000.0, "dense_ms": 1500.0, "sparse_ms": 0.0}
    assert estimate(Settings(break_even_safety=1.4), **times).pays
    assert not estimate(Settings(break_even_safety=1.5), **times).pays


def test_a_throughput_that_was_set_takes_the_place_of_the_drafts_time():
    found = estimate(Settings(spec_throughput=1000), draft_ms=1.0)
    assert found.cost_ms == 10_000
    assert found.reason.endswith("the 10000 ms of the draft for 10000 tokens (by spec_throughput=1000)")
    assert not estimate(Settings(spec_throughput=100), draft_ms=1.0).pays


def test_a_number_that_is_none_never_pays():
    assert not estimate(dense_ms=math.nan).pays
    assert not estimate(draft_ms=math.nan).pays


@given(TIMES, TIMES, TIMES, st.floats(0.1, 10), st.floats(1.01, 10))
def test_a_draft_that_pays_also_pays_where_it_costs_less_or_saves_more(
    draft: float, dense: float, sparse: float, safety: float, factor: float
):
    settings = Settings(break_even_safety=safety)
    if estimate(settings, draft_ms=draft, dense_ms=dense, sparse_ms=sparse).pays:
        assert estimate(settings, draft_ms=draft / factor, dense_ms=dense, sparse_ms=sparse).pays
        assert estimate(settings, draft_ms=draft, dense_ms=dense * factor, sparse_ms=sparse).pays
        assert dense - sparse > 0
