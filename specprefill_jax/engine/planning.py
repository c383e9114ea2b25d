"""From a request to the positions that the target reads, and why."""

import dataclasses
import logging
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int

from specprefill_jax.engine.gauge import Gauge
from specprefill_jax.engine.reading import Reader, Reading
from specprefill_jax.engine.request import Request
from specprefill_jax.engine.track import BEGINNING, Place, Track
from specprefill_jax.engine.values import Plan
from specprefill_jax.errors import (
    BudgetTooSmall,
    DeviceFailed,
    MemoryTooSmall,
    NotFiniteOutput,
    PromptTooLong,
    ScoresUnusable,
)
from specprefill_jax.policy import Status, decide
from specprefill_jax.selection import (
    NO_HISTORY,
    History,
    bounds_of,
    fewest_kept,
    keeps_everything,
    select,
)

logger = logging.getLogger(__name__)


class Planner:
    """Decides for one request after the other what the target reads.

    Args:
        minimum: Tokens below which the artifact's makers advise against the draft.
        vocabulary: Size of the tokenizer.
        largest: Slots of the target's largest cache.
        gauge: Knows whether the draft will pay.
        no_draft: Why there is no draft, where there is none.
        unfit: Why the draft is no guide to what matters, and not asked where the target can read all of a
            prompt; "": nothing speaks against it.
    """

    def __init__(
        self,
        *,
        minimum: int,
        vocabulary: int,
        largest: int,
        gauge: Gauge,
        no_draft: str,
        unfit: str = "",
    ) -> None:
        self._gauge = gauge
        self._unfit = unfit
        self._no_draft = no_draft
        self._minimum = minimum
        self._vocabulary = vocabulary
        self._largest = largest

    def plan(self, request: Request) -> Plan:
        """What the target will have read before its answer. A draft that fails leads to a dense plan.

        Earlier turns stay as they were kept, and the new turn's tokens are selected beside them; unless the
        settings want a wholly dense prompt, or all of it scored again.

        Raises:
            PromptTooLong: whatever the draft says, what is kept and the answer exceed the target's cache.
        """
        lasting, asked = request.caches.lasting, request.asked if request.caches.lasting else ()
        if lasting and (known := request.caches.last_plan(asked)) is not None:
            return known
        base = _fixed(request)
        plan = self._plan_from(request, base)
        if base is not BEGINNING and plan.kept.size + request.settings.max_tokens > self._largest:
            logger.warning(
                "%d tokens kept of earlier turns leave no room for this one, so all turns are selected anew",
                base.slots,
            )
            plan = self._plan_from(request, BEGINNING)
        if lasting and plan.status is not Status.FAILED_DENSE:  # what failed is tried again
            request.caches.note_plan(asked, plan)
        return plan

    def _plan_from(self, request: Request, base: Place) -> Plan:
        settings, draft = request.settings, request.caches.draft
        history = History(base.prompt, request.caches.target.kept[: base.slots])
        left = request.size - base.prompt
        dense = history.kept.size + left + settings.max_tokens
        unfit = self._unfit if dense <= self._largest else ""  # better sparse than no answer
        decision = decide(left, settings, self._minimum, guard=request.guard, unfit=unfit)
        if decision.status is not None:
            return _dense(request, history, decision.status, decision.reason)
        if keeps_everything(left, settings):
            return _dense(request, history, Status.KEPT_ALL, "the settings keep every token of this prompt")
        if draft is None:
            return _dense(request, history, Status.FAILED_DENSE, self._no_draft)
        try:
            bounds_of(request.size, settings, request.pinned, history, request.edges)
        except BudgetTooSmall as error:
            return _dense(request, history, Status.SKIPPED_INSUFFICIENT_BUDGET, str(error))
        if base is BEGINNING:
            fewest = fewest_kept(request.size, settings)
            check_slots(request, fewest, f"at least {fewest} tokens kept of {request.size}")
        reason = decision.reason
        if settings.mode == "auto" and settings.break_even:
            estimate = self._gauge.estimate(request, history)
            if estimate is not None and not estimate.pays:
                return _dense(request, history, Status.SKIPPED_BREAK_EVEN, estimate.reason)
            reason = reason if estimate is None else estimate.reason
        return self._selected(request, history, draft, reason)

    def _selected(self, request: Request, history: History, draft: Track, reason: str) -> Plan:
        """What the draft finds important; every token where it fails."""
        try:
            reading, remembered = self.score(request)
            request.clock.enter("select")
            selection = select(reading.importance, request.settings, request.pinned, history, request.edges)
        except (ScoresUnusable, NotFiniteOutput) as error:
            draft.clear()
            return _dense(request, history, Status.FAILED_DENSE, str(error))
        except (DeviceFailed, MemoryError, MemoryTooSmall) as error:
            if request.watcher.stopped_by(error):
                raise
            draft.clear()
            logger.warning("the draft failed, so all tokens are read: %s", error)
            return _dense(request, history, Status.FAILED_DENSE, f"the draft failed: {error}")
        left, kept = request.size - history.prompt, selection.kept.size - history.kept.size
        self._gauge.kept(left, kept)
        plan = Plan(
            selection.kept,
            Status.ACTIVE,
            reason,
            forced=selection.forced,
            pinned=selection.pinned,
            mode=selection.mode,
            scoring=reading.scoring,
            draft_read=reading.read,
            looked_ahead=reading.looked_ahead,
            remembered=remembered,
            base=history.prompt,
        )
        if kept == left:
            reason = "every chunk of this prompt was selected"
            return dataclasses.replace(
                plan, status=Status.KEPT_ALL, reason=reason, forced=0, pinned=0, mode="dense"
            )
        return plan

    def score(self, request: Request) -> tuple[Reading, bool]:
        """The importance of each token, and whether it was known already."""
        readings, settings = request.caches.readings, request.settings
        known = readings.find(request.tokens, settings)
        if known is not None:
            return known, True
        assert request.caches.draft is not None
        reader = Reader(
            request.caches.draft,
            self._vocabulary,
            settings,
            clock=request.clock,
            watcher=request.watcher,
            stops=request.stops,
        )
        expected = self._gauge.before_scoring(request, request.caches.draft)
        reading = reader.read(request.tokens)
        phases = request.clock.phases
        self._gauge.scored(expected, phases["draft_prefill"] + phases.get("lookahead", 0.0))
        readings.note(request.tokens, settings, reading)
        return reading, False


def all_of(request: Request, status: Status, reason: str) -> Plan:
    """A plan to read every token of the prompt."""
    return _dense(request, NO_HISTORY, status, reason)


def deepest_place(request: Request, kept: Int[np.ndarray, "N"]) -> Place:
    """Where the target can begin to read `kept`: it has read exactly what of them comes before."""
    target = request.caches.target
    for place in _usable(request):
        if np.array_equal(target.kept[: place.slots], kept[: np.searchsorted(kept, place.prompt)]):
            return place
    return BEGINNING


def check_slots(request: Request, kept: int, read: str) -> None:
    """Whether the target can hold `kept` tokens, which the caller calls `read`, and the answer.

    Raises:
        PromptTooLong: it cannot.
    """
    target, asked = request.caches.target.program, request.settings.max_tokens
    largest = target.largest_capacity
    if kept + asked <= largest:
        return
    remedies = ["shorten the prompt", "keep less of it", "use an artifact with larger `capacities`"]
    if kept < largest:
        remedies.insert(0, f"lower max_tokens (--max-tokens) to {largest - kept}")
    raise PromptTooLong(
        f"{read} and max_tokens={asked} for the answer need {kept + asked} cache slots, but {target.label} "
        f"was compiled for {largest}: {', '.join(remedies[:-1])}, or {remedies[-1]}"
    )


def _fixed(request: Request) -> Place:
    """Up to where earlier turns decided what is kept, unless that lacks what this one pins or wants whole."""
    settings, caches = request.settings, request.caches
    dense = not settings.enabled or settings.mode == "dense" or settings.keep_fraction >= 1
    if dense or request.guard is not None or settings.history == "rescore":
        return BEGINNING
    pinned = np.zeros(request.size, dtype=bool) if request.pinned is None else request.pinned
    decided = caches.decided(request.tokens)
    for place in caches.target.places(request.tokens, request.size - 1):
        missing = pinned[: place.prompt].copy()
        missing[caches.target.kept[: place.slots]] = False
        if place.prompt <= decided and not missing.any():
            return place
    return BEGINNING


def _usable(request: Request) -> Iterator[Place]:
    """Places of the target from which the answer can be reached."""
    for place in request.caches.target.places(request.tokens, request.size):
        if place.prompt < request.size or place.hidden is not None:
            yield place


def _dense(request: Request, history: History, status: Status, reason: str) -> Plan:
    """What was kept of earlier turns, and every token since."""
    rest = np.arange(history.prompt, request.size, dtype=np.int32)
    return Plan(np.concatenate([history.kept, rest]), status, reason, base=history.prompt)
