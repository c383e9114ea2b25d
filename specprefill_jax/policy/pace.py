"""Whether the draft pays: how fast both models read, how much is kept, and what that comes to."""

import math
from collections import defaultdict, deque
from dataclasses import dataclass
from statistics import median
from typing import Literal

from specprefill_jax.settings import Settings

DRAFT_TOKENS_PER_S = 600.0
"""What a draft is taken to read where nothing was measured (the guide's automatic estimate)."""

TARGET_TOKENS_PER_S = 270.0
"""The same of a target."""

RECENT = 9
"""Requests that a correction follows from: few enough to follow a device that heats up or is shared, enough
that one slow request moves nothing."""

FEWEST_REQUESTS = 3
"""Requests before a correction is believed: the first ones wait for weights to be read from the disk, and a
draft that is declined after them would never show that it has become faster."""

FEWEST_TOKENS = 128
"""Requests of fewer tokens correct nothing: they take a whole padded block, and starting is most of it."""

Known = Literal["measured", "assumed"]
"""How a time came about: from measured entries or earlier requests, or from a guess of tokens/s."""


class Pace:
    """How fast one model reads on its device: a measurement or a guess, corrected by live requests.

    Args:
        fallback: tokens/s where nothing was measured.
    """

    def __init__(self, fallback: float) -> None:
        self._fallback = fallback
        # What was off by how much from a guess says nothing about what a measurement is off by.
        self._ratios: dict[Known, deque[float]] = {
            "measured": deque(maxlen=RECENT),
            "assumed": deque(maxlen=RECENT),
        }

    def predict(self, tokens: int, measured_ms: float | None) -> float:
        """Milliseconds that reading `tokens` will take.

        Args:
            measured_ms: what the measured entries say about exactly these tokens, cut into blocks as they
                will be; None where they say nothing.
        """
        base, kind = self._base(tokens, measured_ms)
        ratios = self._ratios[kind]
        return base * median(ratios) if len(ratios) >= FEWEST_REQUESTS else base

    def observe(self, tokens: int, measured_ms: float | None, actual_ms: float) -> None:
        """Learn from a request that took `actual_ms`; the other arguments are those of `predict`."""
        base, kind = self._base(tokens, measured_ms)
        if tokens >= FEWEST_TOKENS and base > 0 and math.isfinite(actual_ms) and actual_ms > 0:
            self._ratios[kind].append(actual_ms / base)

    def known(self, measured_ms: float | None) -> Known:
        """How `predict` knows: "assumed" only where nothing was measured, neither entries nor requests."""
        few = len(self._ratios["assumed"]) < FEWEST_REQUESTS
        return "assumed" if measured_ms is None and few else "measured"

    def _base(self, tokens: int, measured_ms: float | None) -> tuple[float, Known]:
        if measured_ms is None:
            return tokens / self._fallback * 1000, "assumed"
        return measured_ms, "measured"


class KeptFractions:
    """What part of a prompt was kept lately, by its length: the longer a prompt, the less of it matters.

    Lengths from one power of two to the next count as alike.
    """

    def __init__(self) -> None:
        self._fractions: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))

    def note(self, tokens: int, kept: int) -> None:
        """Learn that `kept` of at least one `tokens` were kept."""
        self._fractions[tokens.bit_length()].append(kept / tokens)

    def expected(self, tokens: int) -> int | None:
        """Tokens that will be kept of `tokens`; None where no prompt of such a length was seen."""
        fractions = self._fractions.get(tokens.bit_length())
        return round(median(fractions) * tokens) if fractions else None


@dataclass(frozen=True)
class Estimate:
    """What the draft would save of the target's prefill, and what it would cost, in milliseconds.

    `pays` says whether that is worth it, `reason` why, in one sentence.
    """

    saved_ms: float
    cost_ms: float
    pays: bool
    reason: str


def break_even(
    settings: Settings,
    *,
    draft_tokens: int,
    target_tokens: int,
    kept: int,
    draft_ms: float,
    dense_ms: float,
    sparse_ms: float,
    draft_known: Known,
    target_known: Known,
) -> Estimate:
    """Whether the target's time saved is more than `break_even_safety` times the draft's; equal is not more.

    `spec_throughput` takes the place of `draft_ms` where it is set.

    Args:
        draft_tokens, target_tokens: tokens that each has still to read.
        kept: those of `target_tokens` that will be kept.
        draft_ms: the draft's prefill and lookahead.
        dense_ms, sparse_ms: the target's prefill of `target_tokens` and of `kept`.

    Source: SpecPrefill guide v3.1, "Break-Even Detection"; the rates there are fixed.
    """
    known: str = draft_known
    if settings.spec_throughput > 0:
        draft_ms = draft_tokens / settings.spec_throughput * 1000
        known = f"by spec_throughput={settings.spec_throughput:g}"
    saved_ms = dense_ms - sparse_ms
    pays = saved_ms > settings.break_even_safety * draft_ms
    reason = (
        f"keeping {kept} of {target_tokens} tokens saves {saved_ms:.0f} ms ({target_known}), "
        f"{'' if pays else 'not '}more than {settings.break_even_safety:g} (break_even_safety) times the "
        f"{draft_ms:.0f} ms of the draft for {draft_tokens} tokens ({known})"
    )
    return Estimate(saved_ms, draft_ms, pays, reason)
