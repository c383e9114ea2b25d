"""Whether the draft will pay for a request, from what was measured on this device and in earlier requests."""

from collections.abc import Mapping

from specprefill_jax.artifact.manifest import Model
from specprefill_jax.artifact.rates import EntryTimes
from specprefill_jax.engine.forecast import scoring_ms
from specprefill_jax.engine.reading import reading_place, reads_in_one_pass
from specprefill_jax.engine.request import Request
from specprefill_jax.engine.track import BEGINNING, Track
from specprefill_jax.policy import (
    DRAFT_TOKENS_PER_S,
    TARGET_TOKENS_PER_S,
    Estimate,
    KeptFractions,
    Pace,
    break_even,
)
from specprefill_jax.runtime.blocks import capacity_for
from specprefill_jax.runtime.predict import answering_ms, reading_ms, together
from specprefill_jax.selection import History, turn_budget


class Gauge:
    """How fast draft and target are, and how much is kept, as far as requests have shown.

    Args:
        times: Milliseconds of each measured entry, by role (`specprefill tune`); empty: nothing was measured.
    """

    def __init__(self, times: Mapping[str, EntryTimes]) -> None:
        self._times = times
        self._draft = Pace(DRAFT_TOKENS_PER_S)
        self._target = Pace(TARGET_TOKENS_PER_S)
        self._kept = KeptFractions()

    def estimate(self, request: Request, history: History) -> Estimate | None:
        """What the draft would save and cost; only tokens still to prefill count.

        None where there is nothing to weigh: the prompt was scored before, or does not fit the target whole.
        """
        settings, draft, target = request.settings, request.caches.draft, request.caches.target
        if draft is None or request.caches.readings.find(request.tokens, settings) is not None:
            return None
        left, slots = request.size - history.prompt, history.kept.size
        capacity = capacity_for(slots + left + settings.max_tokens, target.program.model.capacities)
        if capacity is None:
            return None
        budget = turn_budget(request.size, history.prompt, slots, settings)
        expected = self._kept.expected(left)
        kept = budget if expected is None else min(expected, budget)
        to_score, scoring = self.before_scoring(request, draft)
        dense, sparse = (self._reading(target, slots, tokens, settings.max_tokens) for tokens in (left, kept))
        return break_even(
            settings,
            draft_tokens=to_score,
            target_tokens=left,
            kept=kept,
            draft_ms=self._draft.predict(to_score, scoring),
            dense_ms=self._target.predict(left, dense),
            sparse_ms=self._target.predict(kept, sparse),
            draft_known=self._draft.known(scoring),
            target_known=self._target.known(dense),
        )

    def before_scoring(self, request: Request, draft: Track) -> tuple[int, float | None]:
        """Tokens that the draft has still to read, and what the measured entries say that will take."""
        settings, program, times = request.settings, draft.program, self._times.get("draft")
        one_pass = reads_in_one_pass(program, request.size, settings)
        place = reading_place(draft, request.tokens, settings) if one_pass else BEGINNING
        left = request.size - place.prompt
        if times is None:
            return left, None
        if place.prompt == 0:
            return left, scoring_ms(program, times, request.size, settings)
        capacity = _capacity(program.model, place.slots, request.size + settings.lookahead)
        if capacity is None:
            return left, None
        return left, together(
            reading_ms(times, program.model, left, capacity=capacity, start=place.slots, rows=True),
            answering_ms(times, settings.lookahead, capacity=capacity),
        )

    def scored(self, expected: tuple[int, float | None], actual_ms: float) -> None:
        """Learn how long the draft took for what `before_scoring` gave."""
        self._draft.observe(*expected, actual_ms)

    def kept(self, tokens: int, kept: int) -> None:
        """Learn that `kept` of `tokens` new ones were kept."""
        self._kept.note(tokens, kept)

    def prefilled(self, target: Track, slots: int, tokens: int, room: int, actual_ms: float) -> None:
        """Learn how long the target took to read `tokens` from slot `slots` on, with `room` for an answer."""
        self._target.observe(tokens, self._reading(target, slots, tokens, room), actual_ms)

    def _reading(self, target: Track, slots: int, tokens: int, room: int) -> float | None:
        times, model = self._times.get("target"), target.program.model
        capacity = _capacity(model, slots, slots + tokens + room)
        if times is None or capacity is None:
            return None
        return reading_ms(times, model, tokens, capacity=capacity, start=slots)


def _capacity(model: Model, start: int, slots: int) -> int | None:
    """The cache that `Track.start` will take for `slots` slots, of which those from `start` on are read."""
    return capacity_for(max(slots, start + model.blocks[0]), model.capacities)
