"""Windows: sizes, coverage and merging."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specprefill_jax.scoring import Window, auto_window, merge_windows, plan_windows


def test_the_guides_example_has_its_four_windows_and_ranges():
    assert plan_windows(4471, 2000) == (
        Window(start=0, end=2000, keep_end=1000),
        Window(start=1000, end=3000, keep_end=2000),
        Window(start=2000, end=4000, keep_end=3000),
        Window(start=3000, end=4471, keep_end=4471),
    )


@pytest.mark.parametrize(
    ("ctx", "heads", "window"),
    [
        (8192, 8, 2000),  # 524,288,000 / (8192 * 8 * 4 = 262,144) = 2000, the guide's own figure
        (4096, 8, 3584),  # 524,288,000 / 131,072 = 4000, but ctx - 512 = 3584
        (8192, 16, 1000),  # 524,288,000 / 524,288 = 1000
        (32768, 8, 512),  # 524,288,000 / 1,048,576 = 500, raised to 512
        (640, 8, 512),  # ctx - 512 = 128, raised to 512, which is ctx - 128
        (1000, 8, 512),  # ctx - 512 = 488, raised to 512
        (8191, 8, 2000),  # 524,288,000 / 262,112 = 2000.2
    ],
)
def test_the_automatic_window_fits_500_mib_of_attention_within_the_clamps(ctx: int, heads: int, window: int):
    assert auto_window(ctx, heads) == window


@pytest.mark.parametrize("tokens", [1, 1999, 2000])
def test_a_prompt_that_fits_one_window_has_one(tokens: int):
    assert plan_windows(tokens, 2000) == (Window(0, tokens, tokens),)


def test_one_token_more_needs_a_second_window():
    assert plan_windows(2001, 2000) == (Window(0, 2000, 1000), Window(1000, 2001, 2001))


def test_no_window_follows_one_that_reaches_the_end():
    # The second window ends at 3000 exactly; a third would start at 2000 and repeat its tail.
    assert plan_windows(3000, 2000) == (Window(0, 2000, 1000), Window(1000, 3000, 3000))


def test_an_odd_window_strides_by_its_half_rounded_down():
    assert plan_windows(1000, 513) == (Window(0, 513, 256), Window(256, 769, 512), Window(512, 1000, 1000))


@given(tokens=st.integers(1, 20_000), window=st.integers(512, 8064))
def test_every_token_is_contributed_once_by_a_window_that_reads_it(tokens: int, window: int):
    windows = plan_windows(tokens, window)
    assert [w.start for w in windows] == [0, *(w.keep_end for w in windows[:-1])]
    assert windows[-1].keep_end == windows[-1].end == tokens
    assert all(w.start < w.keep_end <= w.end <= w.start + window for w in windows)
    assert all(w.end < tokens for w in windows[:-1])


def test_merging_takes_each_windows_contribution():
    windows = (Window(0, 4, 2), Window(2, 6, 4), Window(4, 7, 7))
    parts = [np.array(p, dtype=np.float32) for p in ([1, 2, 9, 9], [3, 4, 9, 9], [5, 6, 7])]
    merged = merge_windows(windows, parts)
    np.testing.assert_array_equal(merged, np.array([1, 2, 3, 4, 5, 6, 7], dtype=np.float32))
    assert merged.dtype == np.float32


def test_merging_refuses_a_window_without_scores():
    with pytest.raises(ValueError, match="shorter"):
        merge_windows((Window(0, 4, 2), Window(2, 4, 4)), [np.zeros(4, dtype=np.float32)])
