"""Dense and sparse prefill of long prompts, and decode: medians of runs that take turns, and their ratios."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from true_shapes import phases_of, say

from gpu.plan import NEW_TOKENS, Plan
from gpu.record import Check
from gpu.shapes import WHOLE
from specprefill_jax.engine import Engine
from specprefill_jax.settings import Settings

DENSE = 1.0  # as a share that is kept


@dataclass(frozen=True)
class Measured:
    """Runs of one prompt in one way.

    Attributes:
        first_ms: to the first token, of each run.
        phases: tokens and the median of ms by phase.
        status: what became of the runs.
        kept: tokens that the target read.
    """

    first_ms: tuple[float, ...]
    phases: Mapping[str, tuple[int, float]]
    status: str
    kept: int

    @classmethod
    def of(cls, results: Sequence[Mapping[str, Any]]) -> Measured:
        """Of the results of `specprefill run --json`."""
        runs = [phases_of(result) for result in results]
        phases = {}
        for one in runs[0]:
            ms = median(phase.ms for run in runs for phase in run if phase.name == one.name)
            phases[one.name] = (one.tokens, ms)
        timings = [result["timings"] for result in results]
        return cls(
            first_ms=tuple(timing["time_to_first_token_ms"] for timing in timings),
            phases=phases,
            status=", ".join(sorted({timing["specprefill"] for timing in timings})),
            kept=timings[0]["specprefill_detail"]["kept"],
        )

    @property
    def decode_speed(self) -> float | None:
        """Tokens per second after the first."""
        tokens, ms = self.phases.get("decode", (0, 0.0))
        return tokens / ms * 1000 if ms else None


def settings_for(keep: float) -> Settings:
    """A fixed share, whatever the thresholds say; the answer goes on to its limit."""
    if keep == DENSE:
        return Settings(mode="dense", max_tokens=NEW_TOKENS)
    return Settings(mode="sparse", keep=keep, max_keep=0, max_tokens=NEW_TOKENS)


def run_speed(plan: Plan, work: Path, rounds: int) -> Iterator[Check]:
    """Each length: a round to warm up, and `rounds` that count, the ways by turns in each."""
    engine = Engine.load(work / "run" / WHOLE, plan.target, self_test=False)
    ways = (DENSE, *plan.keeps)
    for count in plan.tokens:
        generator = np.random.default_rng(count)
        tokens = generator.integers(0, engine.target.model.vocabulary, count, np.int32)
        results: dict[float, list[Mapping[str, Any]]] = {way: [] for way in ways}
        for turn in range(rounds + 1):
            say(f"{count} tokens: {f'round {turn} of {rounds}' if turn else 'warming up'}")
            for way in ways:
                engine.forget()  # or the draft would not be run again
                result = engine.generate(tokens, settings_for(way)).to_json()
                if turn:
                    results[way].append(result)
        yield from summed_up(count, {way: Measured.of(found) for way, found in results.items()})


def summed_up(count: int, measured: Mapping[float, Measured]) -> Iterator[Check]:
    """A check for each way, which fails only where a sparse run was none: speeds have no bar here."""
    dense = measured[DENSE]
    for way, found in measured.items():
        name = f"{count:,} tokens, {'dense' if way == DENSE else f'keep {way:g}'}"
        first = median(found.first_ms)
        words = f"first token {first / 1000:.3f} s, {count / first * 1000:,.0f} tokens/s"
        ratio = 1.0
        if way != DENSE:
            ratio = median(a / b for a, b in zip(dense.first_ms, found.first_ms, strict=True))
            words += f", {ratio:.2f} times as fast as dense; {found.kept:,} kept"
        wanted = "disabled" if way == DENSE else "active"
        passed = found.status == wanted
        yield Check.of(
            name,
            passed,
            f"{words} ({in_words(found)})" if passed else f"status {found.status} in place of {wanted}",
            first_ms=first,
            ratio=ratio,
            phases=dict(found.phases),
        )
    if (speed := dense.decode_speed) is not None:
        words = f"{speed:.1f} tokens/s after {count:,} tokens"
        yield Check(f"decode after {count:,} tokens", "passed", words, {"speed": speed})


def in_words(measured: Measured) -> str:
    """Phases that read tokens, with their speeds."""
    parts = []
    for name, (tokens, ms) in measured.phases.items():
        if tokens and ms:
            parts.append(f"{name} {ms:,.0f} ms, {tokens / ms * 1000:,.0f} tokens/s")
    return "; ".join(parts)
