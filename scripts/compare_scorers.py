"""Retention by scorer, chunking and keep, between random chunks and an oracle."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float
from plans import add_plan_options, read_plan
from rich import box
from rich.console import Console
from rich.table import Table

from specprefill_jax.cli.load import load_engine
from specprefill_jax.cli.progress import Waiting
from specprefill_jax.engine import Engine
from specprefill_jax.errors import SpecPrefillError
from specprefill_jax.quality.evaluation import Plan
from specprefill_jax.quality.retention import Seen, kept_whole, see, whole_by
from specprefill_jax.quality.statistics import Interval, paired_difference
from specprefill_jax.scoring import Scorer, check_scorer
from specprefill_jax.settings import Settings

KEEPS = (0.3, 0.15, 0.1)
LOOKAHEAD = 8
BASE = Settings(mode="sparse", max_keep=0, calibration=False)

CHUNKINGS = {
    "fixed": replace(BASE, chunking="fixed", halo=False),
    "fixed, halo": replace(BASE, chunking="fixed", halo=True),
    "text": replace(BASE, chunking="text", halo=False),
    "text, halo": replace(BASE, chunking="text", halo=True),
}

POOLINGS = {
    "": {"pool": 0},
    ", average of 13": {"pool": 13, "pooling": "average"},
    ", largest of 7": {"pool": 7, "pooling": "max"},
}
PLAIN, DEFAULT = "raw max", "default"
ACROSS = {"max": "max", "mean": "mean"}
HEADS = ("raw", "peak", "zscore", "median", "rank")

SCORERS: dict[str, dict[str, object]] = {
    f"{per_head} {across}{pooled}": {"per_head": per_head, "across": across, **pooling}
    for per_head in HEADS
    for across in ACROSS
    for pooled, pooling in POOLINGS.items()
} | {
    DEFAULT: {},
    "default, average of 7": {"pool": 7},
    "default, average of 25": {"pool": 25},
    "default, no lookahead": {"lookahead": 0},
    "default, lookahead 4": {"lookahead": 4},
    "default, last 4 queries": {"queries": 4},
    "default, last 8 queries, no lookahead": {"queries": 8, "lookahead": 0},
    "default, first 4 tokens are sinks": {"sinks": 4},
    "default, importance clipped": {"normalizer": "clip"},
    "default, importance by deviation": {"normalizer": "zscore"},
}
"""What differs from the default settings. Attention mass is "raw mean"."""

RANDOM, ORACLE = "random chunks", "oracle"


@dataclass(frozen=True)
class Row:
    """A scorer's outcomes: by chunking, whether each prompt's fact was kept whole at each of `KEEPS`."""

    name: str
    whole: dict[str, Bool[np.ndarray, "prompts keeps"]]

    def share(self, chunking: str, keep: float) -> float:
        return float(self.whole[chunking][:, KEEPS.index(keep)].mean())

    def minus(self, other: Row, chunking: str, keep: float) -> Interval:
        """How much larger the share is than that of another with fixed chunks, on the same prompts."""
        at = KEEPS.index(keep)
        mine, theirs = self.whole[chunking][:, at], other.whole["fixed"][:, at]
        both = int((mine & theirs).sum())
        first, second = int(mine.sum()) - both, int(theirs.sum()) - both
        return paired_difference(both, first, second, mine.size - both - first - second)


def main() -> int:
    parser = argparse.ArgumentParser(prog="compare_scorers", description=__doc__)
    parser.add_argument("--artifact", metavar="NAME", help="a compiled artifact (default: the demo pair)")
    parser.add_argument("--device", metavar="NAME")
    add_plan_options(parser, lengths="1000,2000,4000", count=70)
    options = parser.parse_args()
    try:
        compare(options)
    except SpecPrefillError as error:
        print(f"compare_scorers: error: {error}", file=sys.stderr)
        return 2
    return 0


def compare(options: argparse.Namespace) -> None:
    plan = read_plan(options)
    with Waiting() as waiting:
        engine = load_engine(options.artifact, options.device, waiting)
        check_scorers(engine)
        rows = measured(engine, plan, waiting)
    plain = next(row for row in rows if row.name == PLAIN)
    console = Console(file=sys.stdout, width=200)
    prompts = plan.count * len(plan.cells)
    console.print(f"{prompts} prompts: {', '.join(map(str, plan.cells))}\n", soft_wrap=True)
    for keep in KEEPS:
        console.print(table(rows, plain, keep), highlight=False)


def check_scorers(engine: Engine) -> None:
    """Raises SettingError for a scorer that the draft cannot be asked, before it reads hours of prompts."""
    if engine.draft is None:
        return  # `see` says so
    model = engine.draft.model
    for changes in SCORERS.values():
        check_scorer(
            Scorer.of(replace(BASE, **changes)),
            layers=model.attention_layers,
            heads=model.query_heads,
            rows=model.rows,
        )


def measured(engine: Engine, plan: Plan, progress: Callable[[str, int, int], None]) -> list[Row]:
    """All scorers on all prompts; a prompt's rows are dropped before the next one is read."""
    every = (RANDOM, *SCORERS, ORACLE)
    whole = {name: {chunking: [] for chunking in CHUNKINGS} for name in every}
    for number, seen in enumerate(see(engine, plan, LOOKAHEAD, progress)):
        for chunking, base in CHUNKINGS.items():
            for name, changes in SCORERS.items():
                whole[name][chunking].append(kept_whole(seen, replace(base, **changes), KEEPS))
            for name, scores in bounds(seen, number, base):
                whole[name][chunking].append(whole_by(scores, seen, base, KEEPS))
    return [Row(name, {c: np.array(each) for c, each in found.items()}) for name, found in whole.items()]


def bounds(seen: Seen, number: int, settings: Settings) -> Iterator[tuple[str, Float[np.ndarray, " M"]]]:
    """An importance that knows nothing, the same for all tokens of a chunk, and one that knows the answer."""
    tokens = seen.pinned.size
    edges = seen.edges(settings)
    drawn = np.random.default_rng(number).random(edges.size - 1)
    yield RANDOM, np.repeat(drawn, np.diff(edges))
    right = np.zeros(tokens)
    right[seen.needed] = 1
    yield ORACLE, right


def table(rows: Sequence[Row], plain: Row, keep: float) -> Table:
    made = Table(title=f"keep {keep:g}: facts kept whole, %", box=box.MARKDOWN, title_justify="left")
    made.add_column("scorer")
    for heading in (*CHUNKINGS, f"text, minus {PLAIN}"):
        made.add_column(heading, justify="right")
    for row in rows:
        shares = [f"{row.share(chunking, keep):.1%}".rstrip("%") for chunking in CHUNKINGS]
        value, low, high = (100 * each for each in row.minus(plain, "text", keep))
        made.add_row(row.name, *shares, f"{value:+.1f} ({low:+.1f} to {high:+.1f})")
    return made


if __name__ == "__main__":
    sys.exit(main())
