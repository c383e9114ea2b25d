"""The guide's table of attention memory (v3.1, "Per-Layer Attention Matrix Size"), row by row."""

import pytest

from specprefill_jax.policy.guide import attention_memory
from specprefill_jax.scoring import attention_bytes

FITS, BORDERLINE, NO = "fits", "borderline", "does not fit"


@pytest.mark.parametrize(
    ("ctx", "window", "layer", "layers", "together", "verdict"),
    [
        (8192, 2000, "524 MB", "3.1 GB", "6.4 GB", FITS),
        (8192, 2500, "655 MB", "3.9 GB", "7.2 GB", "fits, but the target does not"),
        (16384, 2000, "1.0 GB", "6.0 GB", "9.3 GB", FITS),
        (32768, 2000, "2.1 GB", "12.6 GB", "15.9 GB", BORDERLINE),
        (32768, 3000, "3.1 GB", "18.6 GB", "21.9 GB", NO),
    ],
)
def test_each_row_has_the_guides_numbers_and_verdict(
    ctx: int, window: int, layer: str, layers: str, together: str, verdict: str
) -> None:
    row = attention_memory(ctx, window)
    assert printed(row.layer) == layer
    assert printed(row.layers) == layers
    assert printed(row.together) == together
    assert row.verdict == verdict


def printed(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def test_a_matrix_is_that_of_the_memory_plan_and_of_automatic_windows() -> None:
    assert attention_bytes(8192, 2000, 8) == 524_288_000  # 500 MiB: what an automatic window may take
    assert attention_memory(8192, 2000).layer == 524_000_000


def test_two_hundred_tokens_more_than_borderline_do_not_fit() -> None:
    """As the guide says below its table: 2.3 GB a layer, 13.8 GB in all, 17.1 GB with the weights."""
    row = attention_memory(32768, 2200)
    assert (row.layer, row.layers, row.together) == (2_300_000_000, 13_800_000_000, 17_100_000_000)
    assert row.verdict == NO
