"""The plan of blocks: examples worked out by hand, and what must hold for every prompt."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specprefill_jax.errors import EmptyPrompt, PromptTooLong
from specprefill_jax.runtime.blocks import Block, capacity_for, plan_blocks

LENGTHS = (32, 128, 512)


def counts(plan: tuple[Block, ...]) -> list[tuple[int, int]]:
    return [(block.length, block.count) for block in plan]


def test_longest_blocks_come_first_and_the_rest_takes_the_shortest_that_holds_it():
    plan = plan_blocks(600, lengths=LENGTHS, capacity=4096)
    assert plan == (Block(512, 0, 512, 0), Block(128, 512, 88, 512))


def test_one_token_takes_one_shortest_block():
    assert plan_blocks(1, lengths=LENGTHS, capacity=4096) == (Block(32, 0, 1, 0),)


def test_a_block_that_would_be_half_padding_is_split():
    # 129 tokens: 512 would be three quarters padding; 64 in 128 are exactly half.
    assert counts(plan_blocks(129, lengths=LENGTHS, capacity=4096)) == [(128, 128), (32, 1)]
    assert counts(plan_blocks(64, lengths=LENGTHS, capacity=4096)) == [(32, 32), (32, 32)]
    assert counts(plan_blocks(65, lengths=LENGTHS, capacity=4096)) == [(128, 65)]


def test_slots_go_on_from_the_start():
    plan = plan_blocks(40, lengths=LENGTHS, capacity=4096, start=7)
    assert plan == (Block(32, 0, 32, 7), Block(32, 32, 8, 39))


def test_the_last_block_holds_every_query_whose_row_is_asked():
    # Without rows the second block would hold one token; with 16 rows the first is filled less.
    assert counts(plan_blocks(513, lengths=(512,), capacity=4096)) == [(512, 512), (512, 1)]
    plan = plan_blocks(513, lengths=(512,), capacity=4096, rows=16)
    assert plan == (Block(512, 0, 497, 0), Block(512, 497, 16, 497))
    # In a cache of 520 slots, 16 tokens from slot 497 on would pad past the end.
    plan = plan_blocks(513, lengths=(512,), capacity=520, rows=16)
    assert plan == (Block(512, 0, 8, 0), Block(512, 8, 505, 8))
    plan = plan_blocks(600, lengths=(64, 512), capacity=4096, rows=16)
    assert counts(plan) == [(512, 512), (64, 64), (64, 24)]


def test_padding_that_does_not_fit_the_cache_moves_into_an_earlier_block():
    # 150 of 155 slots: after 128 tokens a block of 32 would end at slot 160, so it gets 27, not 22.
    plan = plan_blocks(150, lengths=(32, 128), capacity=155)
    assert plan == (Block(128, 0, 123, 0), Block(32, 123, 27, 123))


def test_a_prompt_that_fills_the_cache_to_the_last_slot_fits():
    for tokens in (16, 31, 32):
        plan = plan_blocks(tokens, lengths=(8, 16), capacity=32)
        assert plan[-1].offset + plan[-1].count == tokens


def test_no_tokens_are_an_error():
    with pytest.raises(EmptyPrompt):
        plan_blocks(0, lengths=LENGTHS, capacity=4096)


def test_too_many_tokens_name_the_limit_and_the_knob():
    with pytest.raises(PromptTooLong, match=r"need 4097 slots .* has 4096: .*`capacities`"):
        plan_blocks(4097, lengths=LENGTHS, capacity=4096)


def test_few_tokens_at_the_end_of_the_cache_do_not_fit_when_the_shortest_block_does_not():
    assert plan_blocks(3, lengths=(4,), capacity=16, start=12) == (Block(4, 0, 3, 12),)
    with pytest.raises(PromptTooLong, match="need 17 slots"):
        plan_blocks(3, lengths=(4,), capacity=16, start=13)


def test_more_rows_than_the_longest_block_holds_are_refused():
    with pytest.raises(PromptTooLong, match=r"9 query rows .* holds 8 tokens"):
        plan_blocks(20, lengths=(4, 8), capacity=64, rows=9)


@dataclasses.dataclass(frozen=True)
class Request:
    tokens: int
    lengths: tuple[int, ...]
    capacity: int
    start: int
    rows: int

    def plan(self) -> tuple[Block, ...]:
        return plan_blocks(
            self.tokens, lengths=self.lengths, capacity=self.capacity, start=self.start, rows=self.rows
        )


@st.composite
def requests(draw: st.DrawFn) -> Request:
    lengths = tuple(sorted(draw(st.sets(st.integers(1, 40), min_size=1, max_size=4))))
    capacity = draw(st.integers(lengths[0], 200))
    start = draw(st.integers(0, capacity))
    return Request(draw(st.integers(1, 220)), lengths, capacity, start, draw(st.integers(0, lengths[-1])))


@given(requests())
def test_every_plan_covers_the_tokens_once_in_order_inside_the_cache(request_: Request):
    r = request_
    least = max(1, min(r.rows, r.tokens))
    # A plan exists exactly when a block that holds the rows fits: as the only one, or full, as the last one.
    possible = any(least <= T and r.start + max(r.tokens, T) <= r.capacity for T in r.lengths)
    try:
        plan = r.plan()
    except PromptTooLong:
        assert not possible
        return
    assert possible
    read = 0
    for block in plan:
        assert block.offset == read
        assert block.slot - r.start == read
        assert r.lengths.count(block.length) == 1
        assert 1 <= block.count <= block.length
        assert block.slot + block.length <= r.capacity
        read += block.count
    assert read == r.tokens
    assert plan[-1].count >= least


@given(requests())
def test_at_most_the_last_two_blocks_hold_padding(request_: Request):
    try:
        plan = request_.plan()
    except PromptTooLong:
        return
    assert all(block.count == block.length for block in plan[:-2])


@pytest.mark.parametrize(("slots", "capacity"), [(0, 16), (1, 16), (16, 16), (17, 32), (32, 32), (33, None)])
def test_the_smallest_cache_that_holds_the_slots_is_taken(slots: int, capacity: int | None):
    assert capacity_for(slots, (16, 32)) == capacity
