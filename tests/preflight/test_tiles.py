"""Which tiles workgroups read: addresses of hand-made shaders, worked out by hand."""

from __future__ import annotations

import pytest

from specprefill_jax.aot.spirv import Shader
from specprefill_jax.preflight.tiles import MOST_WORKGROUPS, Tiles, weight_tiles
from tests.preflight.sample import shader

INT, WORKGROUP, WEIGHT, OTHER = 1, 10, 20, 21
UDIV, UMOD, SHIFT, AND, PHI, SELECT, LESS, LONG = 134, 137, 194, 199, 245, 169, 176, 151


def reading(*index: tuple[int, ...], address: int) -> Shader:
    """Loads a float at `address` of the weight (binding 1); ids 30..32 are the workgroup's number in x, y, z.

    Constants: ids 40, 41, 42, 43 are 4, 12, 1 and 0.
    """
    return shader(
        (71, WORKGROUP, 11, 26),
        (71, WEIGHT, 33, 1),
        (71, OTHER, 33, 0),
        *((43, INT, id, value) for id, value in ((40, 4), (41, 12), (42, 1), (43, 0))),
        (61, 2, 11, WORKGROUP),
        *((81, INT, 30 + axis, 11, axis) for axis in range(3)),
        *index,
        (65, 3, 90, OTHER, 43, 43),
        (61, 4, 91, 90),
        (65, 3, 92, WEIGHT, 43, address),
        (61, 4, 93, 92),
    )


def test_a_grid_whose_fast_axis_is_the_weights_tiles() -> None:
    by_row = reading((UMOD, INT, 50, 30, 41), address=50)
    assert weight_tiles(by_row, 1, (48, 1, 1)) == Tiles(12, next_workgroup_next_tile=True)


def test_a_grid_whose_fast_axis_is_the_tokens() -> None:
    by_column = reading((UDIV, INT, 50, 30, 40), address=50)
    assert weight_tiles(by_column, 1, (48, 1, 1)) == Tiles(12, next_workgroup_next_tile=False)


def test_a_grid_of_two_axes_counts_x_first() -> None:
    assert weight_tiles(reading(address=31), 1, (4, 12, 1)) == Tiles(12, next_workgroup_next_tile=False)
    assert weight_tiles(reading(address=30), 1, (12, 4, 1)) == Tiles(12, next_workgroup_next_tile=True)


@pytest.mark.parametrize(
    ("index", "tiles"),
    [
        (((SHIFT, INT, 50, 30, 40),), 3),  # x >> 4, of 48
        (((AND, INT, 50, 30, 41),), 4),  # x & 12: 0, 4, 8, 12
        (((PHI, INT, 50, 30, 60, 42, 61),), 48),  # the first turn of a loop
        (((LESS, INT, 49, 30, 41), (SELECT, INT, 50, 49, 30, 43)), 12),  # x < 12 ? x : 0
        (((LONG, INT, 49, 30, 41), (81, INT, 50, 49, 0)), 48),  # the low word of x * 12
        (((LONG, INT, 49, 30, 41), (81, INT, 50, 49, 1)), 1),  # the high word: 0
    ],
)
def test_index_arithmetic_is_followed(index: tuple[tuple[int, ...], ...], tiles: int) -> None:
    found = weight_tiles(reading(*index, address=50), 1, (48, 1, 1))
    assert found is not None
    assert found.count == tiles


def test_what_cannot_be_followed_is_not_guessed() -> None:
    looked_up = reading((61, INT, 50, 90), address=50)  # an index that is loaded from a buffer
    assert weight_tiles(looked_up, 1, (48, 1, 1)) is None
    floating = reading((129, INT, 50, 30, 30), address=50)
    assert weight_tiles(floating, 1, (48, 1, 1)) is None
    assert weight_tiles(reading(address=30), 2, (48, 1, 1)) is None, "nothing is loaded from binding 2"


def test_one_workgroup_has_no_order_and_a_huge_grid_is_not_walked() -> None:
    assert weight_tiles(reading(address=30), 1, (1, 1, 1)) is None
    assert weight_tiles(reading(address=30), 1, (MOST_WORKGROUPS + 1, 1, 1)) is None
