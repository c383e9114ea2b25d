"""Which of a draft's heads find what is asked for, and how its attention is best read.

Retention is the share of prompts of which every token that the answer follows from is kept.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specprefill_jax.artifact.beside import manifest_digest
from specprefill_jax.artifact.calibration import Calibration
from specprefill_jax.engine import Engine
from specprefill_jax.errors import SettingError
from specprefill_jax.quality.evaluation import Plan, longest_prompt
from specprefill_jax.quality.facts import ValueKind
from specprefill_jax.quality.retention import Progress, Seen, kept_whole, see
from specprefill_jax.quality.statistics import wilson
from specprefill_jax.quality.words import FILLERS
from specprefill_jax.settings import Head, Settings

KEEPS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
"""Fractions of tokens that a calibration may choose to keep, and over which scorers are compared."""

LOOKAHEAD = 4
"""Most lookahead steps that are tried."""

LENGTHS = (1000, 2000)
"""Tokens of the prompts."""

DEFAULT = Settings(mode="sparse", max_keep=0, calibration=False)
PLAIN = dataclasses.replace(DEFAULT, pool=0, chunking="fixed")
"""The guide's rule: the maximum over heads and layers of the attention as it is."""

CHEAP = dataclasses.replace(DEFAULT, lookahead=0)
"""Where the choice begins: what costs time, lookahead, must earn it."""

Option = dict[str, object]

AXES: tuple[tuple[Option, ...], ...] = (
    tuple(
        {"per_head": per_head, "across": across}
        for across in ("max", "mean")
        for per_head in ("raw", "peak", "zscore", "median", "rank")
    ),
    tuple({"pooling": "average", "pool": pool} for pool in (13, 7, 25, 0))
    + tuple({"pooling": "max", "pool": pool} for pool in (7, 13)),
    tuple(
        {"lookahead": steps, "queries": queries}
        for steps, queries in ((0, 1), (0, 4), (0, 8), (2, 1), (LOOKAHEAD, 1), (2, 8))
    ),
    ({"sinks": 0}, {"sinks": 4}),
    tuple({"chunking": chunking, "halo": halo} for halo in (False, True) for chunking in ("text", "fixed")),
)
"""What is tried, one group of settings after the other; of equals the first is taken."""

CHOSEN = (
    "per_head",
    "across",
    "pooling",
    "pool",
    "queries",
    "lookahead",
    "sinks",
    "halo",
    "chunking",
    "heads",
)
"""The settings that are chosen, beside how much to keep."""

ROUNDS = 2
"""How often each group is gone through: what is best in one depends on the others."""


@dataclass(frozen=True)
class Retained:
    """Retention at a fraction kept, under the chosen and the default settings and the guide's rule."""

    keep: float
    chosen: float
    default: float
    plain: float


@dataclass(frozen=True)
class Found:
    """What came out: the calibration, and what it rests on.

    Attributes:
        heads: Each head, and its retention if it decided alone, the mean over `KEEPS`; best first.
        retention: Of the prompts put aside, by fraction kept.
    """

    calibration: Calibration
    heads: tuple[tuple[Head, float], ...]
    retention: tuple[Retained, ...]


def calibrate(engine: Engine, plan: Plan, wanted: float, progress: Progress = lambda *_: None) -> Found:
    """Choose the settings under which the draft keeps what is asked for, and the least to keep for `wanted`.

    Half of the prompts choose, the scorer and then how much is kept: the least of `KEEPS` with the wanted
    retention, or the most. The others say how good the choice is.

    Raises:
        ArtifactError: there is no draft.
        SettingError: the prompts are too short for their suites, or the draft's cache is too small for them.
        TemplateError, NotFiniteOutput, DeviceFailed: as `Engine.generate`.
    """
    seen = list(see(engine, plan, LOOKAHEAD, progress))
    choosing, aside = halves(seen, len(plan.cells))
    assert engine.draft is not None
    model = engine.draft.model
    every = tuple(
        Head(layer, head) for layer in range(model.attention_layers) for head in range(model.query_heads)
    )
    ranked = rank_heads(choosing, every, progress)
    chosen = choose(choosing, ranked, model.rows, progress)
    shares = (retention(aside, way) for way in (chosen, DEFAULT, PLAIN))
    table = tuple(Retained(*row) for row in zip(KEEPS, *shares, strict=True))
    enough = (row for row, share in zip(table, retention(choosing, chosen), strict=True) if share >= wanted)
    row = next(enough, table[-1])
    share, low, high = wilson(round(row.chosen * len(aside)), len(aside))
    calibration = Calibration(
        manifest=manifest_digest(engine.artifact.manifest),
        settings=written(chosen, row.keep),
        wanted=wanted,
        retention=share,
        lower=low,
        upper=high,
        prompts=len(aside),
        depth=1 + max(head.layer for head in chosen.heads or every),
        seed=plan.seed,
    )
    return Found(calibration, tuple(ranked), table)


def halves(seen: Sequence[Seen], cells: int) -> tuple[list[Seen], list[Seen]]:
    """Two halves with prompts of every cell; of `cells` prompts in a row each is of another cell."""
    first = [one for number, one in enumerate(seen) if number // cells % 2 == 0]
    return first, [one for number, one in enumerate(seen) if number // cells % 2]


def rank_heads(seen: Sequence[Seen], every: Sequence[Head], progress: Progress) -> list[tuple[Head, float]]:
    """The retention that each head gives alone, the mean over `KEEPS`; best first, of equals the lower."""
    found: list[tuple[Head, float]] = []
    for number, head in enumerate(every):
        progress("heads", number, len(every))
        alone = dataclasses.replace(CHEAP, heads=(head,))
        found.append((head, mean_retention(seen, alone)))
    return sorted(found, key=lambda each: (-each[1], each[0]))


def choose(
    seen: Sequence[Seen], ranked: Sequence[tuple[Head, float]], rows: int, progress: Progress
) -> Settings:
    """The settings with the best retention, the mean over `KEEPS`; one group of `AXES` after the other.

    A group's settings change only for a gain of more than half a prompt, so that noise changes nothing; in
    the end each goes back that was not needed after all.

    Args:
        rows: How many of the last prompt tokens the draft returns rows of.
    """
    counts = [count for count in (1, 2, 4, 8, 16) if count < len(ranked)]
    several: tuple[Option, ...] = (
        {"heads": None},
        *({"heads": tuple(sorted(head for head, _ in ranked[:count]))} for count in counts),
    )
    axes = [(*axis,) for _ in range(ROUNDS) for axis in (several, *AXES)]
    total, done = sum(map(len, axes)), 0
    chosen = CHEAP
    best = mean_retention(seen, chosen)
    for axis in axes:
        before = chosen
        for option in axis:
            progress("scorers", done, total)
            done += 1
            tried = dataclasses.replace(before, **option)
            if tried in (before, chosen) or tried.queries > rows:
                continue
            score = mean_retention(seen, tried)
            if score > best + 0.5 / len(seen):
                chosen, best = tried, score
    for name in CHOSEN:
        simpler = dataclasses.replace(chosen, **{name: getattr(CHEAP, name)})
        if simpler != chosen and (score := mean_retention(seen, simpler)) >= best:
            chosen, best = simpler, score
    return chosen


def mean_retention(seen: Sequence[Seen], settings: Settings) -> float:
    """The mean of the retention over `KEEPS`."""
    return float(np.mean([kept_whole(each, settings, KEEPS) for each in seen]))


def retention(seen: Sequence[Seen], settings: Settings) -> list[float]:
    """The share of prompts of which every needed token is kept, for each of `KEEPS`."""
    return np.mean([kept_whole(each, settings, KEEPS) for each in seen], axis=0).tolist()


def written(settings: Settings, keep: float) -> dict[str, object]:
    """What differs from the default settings, and how much to keep, as a settings file has it."""
    default = Settings()
    found = {name: getattr(settings, name) for name in CHOSEN}
    chosen: dict[str, object] = {n: value for n, value in found.items() if value != getattr(default, n)}
    if settings.heads is not None:
        chosen["heads"] = [f"{layer}.{head}" for layer, head in settings.heads]
    return {**chosen, "keep": keep}


def check_wanted(wanted: float) -> None:
    """Raises SettingError for a retention that is no share."""
    if not 0 < wanted <= 1:
        raise SettingError(f"retention={wanted:g}: give a share of prompts above 0 and up to 1, such as 0.95")


def calibration_plan(engine: Engine, count: int, seed: int, values: tuple[ValueKind, ...]) -> Plan:
    """The prompts of a calibration: facts among others, in both fillers, of the lengths that fit.

    Args:
        count: Prompts of each kind.
    """
    longest = longest_prompt(engine, dataclasses.replace(DEFAULT, lookahead=LOOKAHEAD), in_one_pass=True)
    return Plan(
        suites=("facts", "distractors"),
        fillers=FILLERS,
        lengths=tuple(tokens for tokens in LENGTHS if tokens <= longest) or (longest,),
        ways=(),
        count=count,
        seed=seed,
        values=values,
        purpose="calibrate",
    )
