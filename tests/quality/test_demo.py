"""The demo pair, evaluated: it finds facts, keeps them, and its budget holds."""

from collections.abc import Callable
from pathlib import Path

from specprefill_jax.engine import Engine
from specprefill_jax.quality.evaluation import Cell, Plan, evaluate, make_ways
from specprefill_jax.quality.summary import summarize
from specprefill_jax.settings import Settings


def test_the_demo_pair_finds_facts_in_what_it_keeps(demo_of: Callable[[str], Path]):
    engine = Engine.load(demo_of("cpu-portable"), self_test=False)
    ways = make_ways(Settings(), [0.3])
    plan = Plan(("facts",), ("code",), (700,), ways, count=6, seed=1, values=("name",))
    outcomes = [outcome for found in evaluate(engine, plan, Cell("facts", "code", 700)) for outcome in found]
    dense, sparse = summarize(outcomes)
    # Both were right 6 times of 6 with the pair of this commit.
    assert dense.accuracy.value >= 5 / 6
    assert sparse.accuracy.value >= 4 / 6
    assert sparse.statuses == {"active": 6}
    assert sparse.over_budget == 0
    assert sparse.most_kept <= 0.3 + 1 / 700
    assert 0 < sparse.divergence < 1
    assert dense.divergence == 0
