"""The halo: a chunk whose importance peaks at a border brings the neighbor across it.

80 tokens in 10 chunks of 8, no boost, importance 0 but at single tokens; "at a border" is the first or last
2 tokens of a chunk. Forced are 12: 0-3 and chunk 9, the last.
"""

from typing import Any

import numpy as np
import pytest
from jaxtyping import Float, Int

from specprefill_jax.selection import History, Selection, select
from specprefill_jax.settings import Settings


def halo(**knobs: Any) -> Settings:
    return Settings(**{"boost_first_n": 0, "boost_last_n": 0, "chunk": 8, "halo": True, **knobs})


def peaks(values: dict[int, float], tokens: int = 80) -> Float[np.ndarray, "M"]:
    importance = np.zeros(tokens, dtype=np.float32)
    importance[list(values)] = list(values.values())
    return importance


def taken(selection: Selection) -> list[int]:
    """Chunks that are kept whole, but for the last, which always is."""
    kept = np.isin(np.arange(selection.prompt), selection.kept)
    edges = selection.edges.tolist()
    whole = [i for i, start in enumerate(edges[:-1]) if kept[start : edges[i + 1]].all()]
    assert whole[-1] == len(edges) - 2
    return whole[:-1]


def test_a_fact_that_is_cut_in_two_is_kept_whole():
    # Chunks of 32. The fact is tokens 90-101, its value, at 97, is what the draft looks at; 170 and 260 are
    # something else. Budget 0.36 * 320 = 116, 36 forced: two chunks.
    importance = peaks({97: 9, 176: 5, 240: 4}, tokens=320)
    fact = set(range(90, 102))
    without = set(select(importance, halo(keep=0.36, chunk=32, halo=False)).kept.tolist())
    assert fact - without == set(range(90, 96))
    assert fact <= set(select(importance, halo(keep=0.36, chunk=32)).kept.tolist())


@pytest.mark.parametrize(
    ("place", "chunks"),
    [(24, [2, 3]), (25, [2, 3]), (26, [3, 6]), (29, [3, 6]), (30, [3, 4]), (31, [3, 4])],
)
def test_only_a_peak_at_a_border_brings_the_neighbor_across_it(place: int, chunks: list[int]):
    # Budget 30, 12 forced: two chunks.
    assert taken(select(peaks({place: 9, 52: 5}), halo(keep=0.37))) == chunks
    assert taken(select(peaks({place: 9, 52: 5}), halo(keep=0.37, halo=False))) == [3, 6]


@pytest.mark.parametrize(("place", "before"), [(99, True), (100, False)])
def test_a_border_reaches_an_eighth_of_the_chunk(place: int, before: bool):
    selection = select(peaks({place: 9, 208: 5}, tokens=320), halo(keep=0.36, chunk=32))
    assert (2 in taken(selection)) is before


def test_with_a_peak_at_both_ends_both_neighbors_come_the_earlier_one_first():
    importance = peaks({24: 9, 31: 9, 52: 5})
    assert taken(select(importance, halo(keep=0.48))) == [2, 3, 4]  # budget 39: three chunks
    assert taken(select(importance, halo(keep=0.37))) == [2, 3]


def test_a_neighbor_brings_its_own_only_when_its_turn_comes():
    importance = peaks({31: 9, 39: 1, 52: 5})
    assert taken(select(importance, halo(keep=0.48))) == [3, 4, 6]
    assert taken(select(importance, halo(keep=0.58))) == [3, 4, 5, 6]


def test_a_forced_chunk_brings_its_neighbor_when_its_turn_comes():
    assert taken(select(peaks({72: 9, 52: 5, 28: 4}), halo(keep=0.37))) == [6, 8]


def test_the_ends_of_the_prompt_are_no_borders():
    # The neighbor of chunk 0 is not the last, and that of the last is none.
    assert taken(select(peaks({0: 9, 79: 8, 52: 5}), halo(keep=0.37))) == [0, 6]


def test_a_neighbor_that_does_not_fit_is_left_out_and_the_next_in_rank_is_taken():
    # Budget 28, 12 forced, 8 for chunk 3; its neighbor has 12 tokens. Chunk 6 has 4, its neighbor 8 again. Of
    # those without importance, chunk 0 fits.
    edges = np.array([0, 8, 16, 24, 32, 44, 48, 52, 60, 72, 80])
    selection = select(peaks({31: 12, 51: 5}), halo(keep=0.35), edges=edges)
    assert selection.kept.tolist() == [*range(8), *range(24, 32), *range(48, 52), *range(72, 80)]


class TestMass:
    # Of 20: chunk 3 with 10 at its end, chunk 4 behind it with 2, chunk 6 with 5, chunk 1 with 3.
    IMPORTANCE = peaks({31: 10, 36: 2, 52: 5, 12: 3})

    def kept(self, importance: Float[np.ndarray, "M"], mass: float, **knobs: Any) -> list[int]:
        return taken(select(importance, halo(cumulative_mass=mass, **knobs)))

    def test_the_neighbors_mass_counts(self):
        assert self.kept(self.IMPORTANCE, 0.6) == [3, 4]
        assert self.kept(self.IMPORTANCE, 0.61) == [3, 4, 6]
        assert self.kept(self.IMPORTANCE, 0.6, halo=False) == [3, 6]

    def test_it_counts_once(self):
        # Of 21, with 1 in chunk 8: 10, 2, 5 and 3 are 20; when the turn of chunk 4 comes, it is counted.
        importance = self.IMPORTANCE.copy()
        importance[68] = 1
        assert self.kept(importance, 20 / 21) == [1, 3, 4, 6]
        assert self.kept(importance, 20.5 / 21) == [1, 3, 4, 6, 8]

    def test_the_neighbor_comes_though_the_chunk_alone_has_the_share(self):
        assert self.kept(self.IMPORTANCE, 0.5) == [3, 4]

    def test_what_does_not_fit_the_cap_does_not_count(self):
        # Room for one chunk beside the forced 12.
        assert self.kept(self.IMPORTANCE, 0.6, max_keep=20) == [3]


def test_a_turn_may_bring_new_tokens_next_to_old_ones_and_leaves_the_old_alone():
    old: Int[np.ndarray, "P"] = np.arange(8, dtype=np.int32)
    importance = peaks({39: 9, 40: 0, 60: 5})
    selection = select(importance, halo(keep=0.5), history=History(40, old))
    # 40 in all, 8 kept before. Chunk 4 was left out before and stays out; its neighbor, 5, is new.
    assert selection.kept.tolist() == [*range(8), *range(40, 48), *range(48, 64), *range(72, 80)]
