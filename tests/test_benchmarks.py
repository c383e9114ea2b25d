"""The parts of scripts/bench_turns, bench_overhead and soak that need no model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import bench_overhead
import bench_turns
import numpy as np
import pytest
import soak
import subjects

from specprefill_jax.engine import Result, Timings, Usage
from specprefill_jax.policy import Status

TURN = bench_turns.Turn(first_ms=100.0, draft_read=108, target_read=40, phases={"head": 1.0}, status="active")
ROUND = bench_turns.Round(
    replace(TURN, first_ms=600.0, draft_read=4000), replace(TURN, first_ms=650.0), TURN, 108
)


def test_the_target_read_what_is_kept_after_the_tokens_that_it_was_done_with():
    timings = Timings(
        status=Status.ACTIVE,
        reason="",
        prompt=12,
        kept=6,
        forced=0,
        pinned=0,
        reused=8,
        draft_read=4,
        looked_ahead=2,
        remembered=False,
        mode="chunk",
        scoring="continuous",
        phases={"draft_prefill": 3.0, "head": 1.0},
        first_token=4.0,
        decode=0.0,
    )
    kept = np.array([0, 1, 5, 8, 10, 11], np.int32)
    turn = bench_turns.Turn.of(Result("", (), "stop", Usage(12, 0), timings, kept, np.zeros(3, np.float32)))
    assert (turn.target_read, turn.draft_read, turn.first_ms, turn.status) == (3, 4, 4.0, "active")


def test_a_second_turn_that_is_fast_and_reads_what_is_new_misses_no_bar():
    assert bench_turns.bars_missed([ROUND, ROUND]) == []


@pytest.mark.parametrize(
    ("resumed", "missed"),
    [
        (
            replace(TURN, draft_read=4108),
            "turn 2: the draft read 4108 tokens, not the 108 of the answer and the new ones",
        ),
        (
            replace(TURN, draft_read=107),
            "turn 2: the draft read 107 tokens, not the 108 of the answer and the new ones",
        ),
        (replace(TURN, first_ms=150.0), "turn 2 is 4.0 times as fast as turn 1, not 5 times"),
        (replace(TURN, status="failed_dense"), "turn 2: status failed_dense in place of active"),
    ],
)
def test_a_second_turn_that_does_not_is_told(resumed: bench_turns.Turn, missed: str):
    assert bench_turns.bars_missed([replace(ROUND, resumed=resumed)]) == [missed]


def test_one_slow_round_of_three_moves_no_ratio():
    slow = replace(ROUND, resumed=replace(TURN, first_ms=1000.0))
    assert bench_turns.bars_missed([ROUND, slow, ROUND]) == []
    assert bench_turns.bars_missed([ROUND, slow, slow]) != []


def measured(*auto_ms: float, bar: bool = True) -> bench_overhead.Measured:
    def ask(_: object) -> Result:
        raise AssertionError("nothing is asked here")

    case = bench_overhead.Case("a prompt", ask, ask, "skipped_min_tokens", bar)
    return bench_overhead.Measured(case, 500, (100.0,) * len(auto_ms), auto_ms)


def test_overhead_is_the_median_of_the_ratios_of_each_round():
    assert measured(101.0, 102.0, 150.0).ratios == pytest.approx([1.01, 1.02, 1.5])
    assert bench_overhead.bars_missed([measured(101.0, 102.0, 150.0)]) == []
    (bar,) = bench_overhead.bars_missed([measured(101.0, 102.5, 103.0)])
    assert bar == 'skipped_min_tokens: "auto" takes 1.025 times as long as "dense", more than 1.02'


def test_a_case_without_a_bar_misses_none():
    assert bench_overhead.bars_missed([measured(150.0, bar=False)]) == []


def test_a_spread_is_two_quartiles_around_the_median():
    assert subjects.spread([5.0, 1.0, 2.0, 3.0, 4.0]) == (2.0, 3.0, 4.0)


def soaked(last: soak.Memory, status: str = "active", **statuses: int) -> soak.Soaked:
    tenth = soak.Memory(1000, 500, 200)
    return soak.Soaked(
        memory={"prompt": (tenth, tenth), "conversation": (tenth, last)},
        statuses=Counter(statuses),
        last={"prompt": "active", "conversation": status},
    )


def test_memory_that_stays_within_two_percent_misses_no_bar():
    assert soak.bars_missed(soaked(soak.Memory(1020, 400, 204))) == []


def test_growth_is_told_by_what_grew():
    missed = soak.bars_missed(soaked(soak.Memory(1030, 500, 210)))
    assert missed == [
        "resident memory, conversations: +3.0% from the tenth to the last, more than 2%",
        "device memory, conversations: +5.0% from the tenth to the last, more than 2%",
    ]


def test_a_draft_that_no_longer_runs_is_told():
    same = soak.Memory(1000, 500, 200)
    missed = soak.bars_missed(soaked(same, "failed_dense", active=3, failed_dense=2))
    assert missed == ["the draft failed 2 times", "the last conversation has status failed_dense, not active"]


def test_long_prompts_differ_and_come_near_the_longest():
    pool = np.arange(20_000, dtype=np.int32)
    prompts = [soak.long_prompt(pool, 4606, number) for number in range(soak.PROMPTS)]
    assert len({int(prompt[0]) for prompt in prompts}) == soak.PROMPTS
    assert {prompt.size for prompt in prompts} <= set(range(4606 - 255, 4607))


def test_the_tenth_conversation_and_the_last_are_of_one_size_and_other_words():
    text = "".join(chr(0x4E00 + i) for i in range(20_000))
    tenth, last = (soak.Conversation(number - 1, text) for number in (soak.WARM, soak.CONVERSATIONS))
    for one in (tenth, last):
        one.ask()
    sizes = {len(str(one.messages[0]["content"])) for one in (tenth, last)}
    assert len(sizes) == 1
    assert tenth.messages != last.messages


def test_an_edit_changes_a_question_in_the_middle_and_keeps_the_answers():
    conversation = soak.Conversation(2, "".join(chr(0x4E00 + i) for i in range(20_000)))
    for answer in ("one", "two"):
        assert not conversation.ask()
        conversation.hear(answer)
    before = list(conversation.messages)
    assert conversation.ask()
    changed = [i for i, message in enumerate(before) if conversation.messages[i] != message]
    assert changed == [2]
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 2 + ["user"]


def test_some_turns_are_cancelled_in_every_phase_and_most_are_not():
    found = Counter()
    for number in range(soak.CONVERSATIONS):
        conversation = soak.Conversation(number, "x" * 20_000)
        for turn in range(soak.TURNS):
            conversation.turn = turn
            found[conversation.cancelled_in] += 1
    assert set(found) == {None, *soak.PHASES}
    assert found[None] == 600
