"""Where the prompt is cut: chunks of a fixed size, or those that end where the text does."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jaxtyping import Int, Int8

from specprefill_jax.selection import fixed, segments


def borders(
    tokens: int, lines: tuple[int, ...] = (), sentences: tuple[int, ...] = ()
) -> Int8[np.ndarray, "M"]:
    """Border classes of so many tokens. A place is a count of tokens behind which a line or sentence ends."""
    found = np.zeros(tokens, dtype=np.int8)
    found[[place - 1 for place in sentences]] = 1
    found[[place - 1 for place in lines]] = 2
    return found


def edges(*arguments: object, chunk: int = 8) -> list[int]:
    return segments(borders(*arguments), chunk).tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "chunk", "found"),
    [(0, 4, [0]), (1, 4, [0, 1]), (4, 4, [0, 4]), (9, 4, [0, 4, 8, 9]), (3, 1, [0, 1, 2, 3])],
)
def test_fixed_chunks_have_their_size_and_the_last_what_is_left(tokens: int, chunk: int, found: list[int]):
    assert fixed(tokens, chunk).tolist() == found


def test_a_text_without_borders_is_cut_at_the_chunk():
    assert edges(40) == [0, 8, 16, 24, 32, 40]


def test_a_chunk_ends_at_the_border_nearest_to_its_size_and_of_two_at_the_first():
    assert edges(20, (5, 9, 12))[:2] == [0, 9]
    assert edges(20, (6, 10))[:2] == [0, 6]


def test_the_end_of_a_line_wins_over_a_nearer_end_of_a_sentence():
    assert edges(20, (12,), (8,))[:2] == [0, 12]
    assert edges(20, (), (4, 7))[:2] == [0, 7]


def test_borders_too_near_or_too_far_are_passed_by():
    assert edges(30, (3, 13))[:3] == [0, 8, 13]


def test_the_last_chunk_is_never_a_stub():
    # 13 tokens: a chunk of 10 would leave 3, so that the sentence's end at 9 is taken.
    assert edges(13, (10,), (9,)) == [0, 9, 13]
    assert edges(12, (6,)) == [0, 12], "half as much again is one chunk"


def test_no_tokens_have_no_chunks():
    assert edges(0) == [0]


def test_chunks_of_one_token_are_each_token():
    assert edges(5, (2,), (4,), chunk=1) == [0, 1, 2, 3, 4, 5]


def by_hand(classes: list[int], chunk: int) -> list[int]:
    """The rule once more, one place after the other."""
    found = [0]
    while len(classes) - found[-1] > 3 * chunk // 2:
        start, left = found[-1], len(classes) - found[-1]
        places = [
            n for n in range(1, left) if chunk <= 2 * n and n <= 3 * chunk // 2 and chunk <= 2 * (left - n)
        ]
        ending = [n for n in places if classes[start + n - 1]]
        best = min(ending, key=lambda n: (-classes[start + n - 1], abs(n - chunk), n), default=chunk)
        found.append(start + best)
    return [*found, len(classes)]


classes = st.lists(st.sampled_from([0, 0, 0, 0, 0, 1, 1, 2]), min_size=1, max_size=200)


@given(classes, st.integers(1, 40))
@example([0] * 30, 1)
@settings(max_examples=300, deadline=None)
def test_whatever_the_borders_chunks_follow_one_another_within_their_bounds(found: list[int], chunk: int):
    cut = segments(np.array(found, dtype=np.int8), chunk)
    assert (cut[0], cut[-1]) == (0, len(found))
    sizes = np.diff(cut)
    assert sizes.max() <= max(3 * chunk // 2, 1)
    assert sizes.min() >= min(-(-chunk // 2), len(found))
    assert cut.tolist() == by_hand(found, chunk)


@given(classes, classes, st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_more_text_moves_only_the_last_edges(before: list[int], more: list[int], chunk: int):
    alone = segments(np.array(before, dtype=np.int8), chunk)
    longer = segments(np.array(before + more, dtype=np.int8), chunk)
    settled: Int[np.ndarray, "B"] = alone[:-1][len(before) - alone[:-1] >= 2 * chunk]
    assert longer[: settled.size + 1].tolist()[: settled.size] == settled.tolist()
