"""Forecasts: what measured entries promise, on models of which each call takes a known time."""

import pytest

from specprefill_jax.artifact.rates import EntryTimes
from specprefill_jax.engine.clock import Clock, Watcher
from specprefill_jax.engine.forecast import Forecast, forecasts, scoring_ms
from specprefill_jax.engine.reading import Reader
from specprefill_jax.engine.track import Track
from specprefill_jax.settings import Settings
from tests.engine.fake import BLOCK, CHAT, Fake, make, prompt


def times_at(capacity: int) -> dict[str, EntryTimes]:
    """A block of 16 tokens takes the draft 1 ms and the target 4, a step of lookahead 50."""
    target = {f"prefill_T{BLOCK}_C{capacity}": 4.0, f"decode_C{capacity}": 50.0, "head": 0.25}
    draft = {f"prefill_rows_T{BLOCK}_C{capacity}": 1.0, f"prefill_T{BLOCK}_C{capacity}": 1.0}
    return {"draft": target | draft, "target": target}


def of(fake: Fake, settings: Settings | None = None, capacity: int = 4096) -> list[Forecast]:
    return forecasts(fake.draft, fake.target, times_at(capacity), settings or Settings())


def test_each_length_has_the_time_of_its_blocks():
    """Of 2,048 tokens 615 are kept (0.3, rounded up): 39 blocks. Saved are 356 ms, the draft costs 228.25."""
    assert of(make())[2] == Forecast(2048, 615, 128 + 100.25, 128 * 4.0, 39 * 4.0, pays=True)


def test_lengths_double_up_to_the_longest_that_leaves_room_for_an_answer():
    assert [row.tokens for row in of(make())] == [512, 1024, 2048, 3840]
    fitting = Settings(max_tokens=2048)
    assert [row.tokens for row in of(make(), fitting)] == [512, 1024, 2048]
    assert [row.tokens for row in of(make(), Settings(max_tokens=3900))] == [196]
    assert of(make(), Settings(max_tokens=4096)) == []


def test_the_draft_pays_from_some_length_on():
    assert [row.pays for row in of(make())] == [False, False, True, True]


def test_settings_move_break_even():
    assert [row.pays for row in of(make(), Settings(lookahead=0))] == [True] * 4
    assert not any(row.pays for row in of(make(), Settings(break_even_safety=5)))
    assert not any(row.pays for row in of(make(), Settings(spec_throughput=10)))
    assert [row.kept for row in of(make(), Settings(keep=0.5, max_keep=1500))] == [256, 512, 1024, 1500]


@pytest.mark.parametrize(
    "settings", [Settings(), Settings(lookahead=0), Settings(window=600), Settings(lookahead=5, window=0)]
)
@pytest.mark.parametrize("tokens", [1, 512, 1201, 2500])
@pytest.mark.parametrize("capacity", [1024, 4096])
def test_scoring_takes_as_long_as_the_calls_that_it_makes(tokens: int, capacity: int, settings: Settings):
    """Also where the prompt is longer than the draft's cache, and where windows are asked for."""
    fake = make(draft_capacity=capacity)
    reader = Reader(Track(fake.draft), CHAT.vocabulary, settings, clock=Clock("test"), watcher=Watcher())
    reader.read(prompt(tokens))
    blocks = sum(-(-len(read) // BLOCK) for read, _ in fake.draft.of("prefill"))
    steps, heads = len(fake.draft.of("decode")), len(fake.draft.of("head"))
    found = scoring_ms(fake.draft, times_at(capacity)["draft"], tokens, settings)
    assert found == blocks + 50 * steps + 0.25 * heads


def test_scoring_that_was_not_measured_has_no_time():
    times = dict(times_at(4096)["draft"])
    del times["decode_C4096"]
    assert scoring_ms(make().draft, times, 1000, Settings()) is None
    assert scoring_ms(make().draft, times, 1000, Settings(lookahead=0)) == 63
