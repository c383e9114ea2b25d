"""Predictions: sums of exactly the calls that a program makes."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specprefill_jax.errors import PromptTooLong
from specprefill_jax.runtime.predict import answering_ms, reading_ms
from specprefill_jax.runtime.program import Program
from tests.runtime import toy
from tests.runtime.toy import ids

DRAFT = toy.model("draft")  # blocks of 4 and 8, caches of 16 and 32, 3 rows
TIMES = {
    "prefill_T4_C16": 1.0,
    "prefill_T8_C16": 10.0,
    "prefill_rows_T4_C16": 100.0,
    "prefill_rows_T8_C16": 1000.0,
    "decode_C16": 0.25,
    "head": 0.5,
}


def test_reading_is_the_sum_of_its_blocks():
    assert reading_ms(TIMES, DRAFT, 12, capacity=16) == 11.0
    assert reading_ms(TIMES, DRAFT, 4, capacity=16, start=8) == 1.0
    assert reading_ms(TIMES, DRAFT, 11, capacity=16, rows=True) == 110.0
    assert reading_ms(TIMES, DRAFT, 3, capacity=16, rows=True) == 100.0


def test_nothing_is_read_in_no_time():
    assert reading_ms({}, DRAFT, 0, capacity=16) == 0.0
    assert answering_ms({}, 0, capacity=16) == 0.0


def test_answering_is_the_head_once_and_a_step_per_token():
    assert answering_ms(TIMES, 3, capacity=16) == 1.25


@pytest.mark.parametrize("missing", ["prefill_T8_C16", "prefill_rows_T4_C16"])
def test_an_entry_that_was_not_measured_leaves_no_prediction(missing: str):
    times = {entry: time for entry, time in TIMES.items() if entry != missing}
    assert reading_ms(times, DRAFT, 11, capacity=16, rows=True) is None
    assert reading_ms(times, DRAFT, 11, capacity=32, rows=True) is None
    assert reading_ms(times, DRAFT, 4, capacity=16) == 1.0


def test_lookahead_without_its_entries_has_no_prediction():
    assert answering_ms({"head": 0.5}, 1, capacity=16) is None
    assert answering_ms({"decode_C16": 0.5}, 1, capacity=16) is None


def test_tokens_that_do_not_fit_are_refused():
    with pytest.raises(PromptTooLong):
        reading_ms(TIMES, DRAFT, 9, capacity=16, start=8)


@given(st.integers(1, 32), st.integers(0, 16), st.sampled_from([16, 32]), st.booleans())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_prediction_counts_the_very_entries_that_reading_calls(
    draft: Program, tokens: int, start: int, capacity: int, rows: bool
):
    if start + max(tokens, 4) > capacity:
        return
    called: list[str] = []
    invoke = draft._invoke

    def note(entry: str, *arguments: Any) -> Any:
        called.append(entry)
        return invoke(entry, *arguments)

    state = draft.state_of_capacity(capacity)
    state.advance(start)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft, "_invoke", note)
        draft.prefill(state, ids([1] * tokens), ids(list(range(start, start + tokens))), rows=rows)
    times = {entry: float(10**i) for i, entry in enumerate(draft.entries)}
    predicted = reading_ms(times, DRAFT, tokens, capacity=capacity, start=start, rows=rows)
    assert predicted == sum(times[entry] for entry in called)
