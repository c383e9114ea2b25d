"""What a conversation keeps from one turn to the next."""

import dataclasses
import hashlib
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from specprefill_jax.engine.reading import Reading
from specprefill_jax.engine.track import Track
from specprefill_jax.engine.values import Plan
from specprefill_jax.scoring import Scorer
from specprefill_jax.settings import Settings

MOST_READINGS = 32
"""Prompts whose importance is remembered; each takes 4 bytes per token."""

Asked = tuple[object, ...]
"""Everything that a plan follows from, beside what was read in earlier turns (`Request.asked`)."""


class Readings:
    """What the draft found in the newest prompts, so that the same prompt is not scored again."""

    def __init__(self) -> None:
        self._readings: OrderedDict[bytes, Reading] = OrderedDict()

    def find(self, tokens: Int[np.ndarray, "M"], settings: Settings) -> Reading | None:
        """What was noted of exactly these tokens, scored in the same way; it took no work this time."""
        key = _key(tokens, settings)
        if key not in self._readings:
            return None
        self._readings.move_to_end(key)
        return dataclasses.replace(self._readings[key], read=0, looked_ahead=0)

    def note(self, tokens: Int[np.ndarray, "M"], settings: Settings, reading: Reading) -> None:
        """Remember a reading, and forget the one that was not asked for the longest."""
        self._readings[_key(tokens, settings)] = reading
        if len(self._readings) > MOST_READINGS:
            self._readings.popitem(last=False)


def _key(tokens: Int[np.ndarray, "M"], settings: Settings) -> bytes:
    """Everything that importance follows from, on one artifact and device."""
    knobs = (settings.lookahead, settings.window, settings.spec_ctx, Scorer.of(settings))
    return hashlib.sha256(f"{knobs}\n".encode() + np.ascontiguousarray(tokens, np.int32).tobytes()).digest()


class _Decided(NamedTuple):
    """The last finished turn: its prompt and answer, the length of the prompt, and that of what was fixed."""

    tokens: Int[np.ndarray, "M"]
    prompt: int
    base: int


class Caches:
    """What both models have read of a conversation, and what the draft found in its prompts.

    Attributes:
        draft, target: What each has read; the draft is None where the artifact has none.
        readings: The importance of prompts.
        lasting: Whether there will be another turn, so that it pays to leave places to come back to.
    """

    def __init__(self, draft: Track | None, target: Track, readings: Readings, *, lasting: bool) -> None:
        self.draft = draft
        self.target = target
        self.readings = readings
        self.lasting = lasting
        self._last: tuple[Asked, Plan] | None = None
        self._decided = _Decided(np.empty(0, np.int32), 0, 0)

    @property
    def bytes(self) -> int:
        """Device memory that both tracks hold."""
        return self.target.bytes + (0 if self.draft is None else self.draft.bytes)

    def last_plan(self, asked: Asked) -> Plan | None:
        """The plan of the turn before, if it asked for the same: it took no work this time."""
        if self._last is None or self._last[0] != asked:
            return None
        plan = self._last[1]
        return dataclasses.replace(plan, draft_read=0, looked_ahead=0, remembered=plan.scoring is not None)

    def note_plan(self, asked: Asked, plan: Plan) -> None:
        """Remember what this turn's prompt led to."""
        self._last = asked, plan

    def decided(self, tokens: Int[np.ndarray, "M"]) -> int:
        """How many of the first `tokens` finished turns decided about: whether the target reads them.

        The turn before does not count if it had the same prompt, and neither does one that was stopped before
        it had read its prompt: what such a turn began to read is no decision.
        """
        before = self._decided
        if np.array_equal(tokens, before.tokens[: before.prompt]):
            return before.base
        both = min(tokens.size, before.tokens.size)
        unlike = np.flatnonzero(tokens[:both] != before.tokens[:both])
        return int(unlike[0]) if unlike.size else both

    def decide(self, prompt: int, base: int) -> None:
        """Note that the target has read its prompt, and perhaps some of the answer.

        Args:
            prompt: Tokens of the prompt.
            base: Tokens of it about which earlier turns had decided.
        """
        self._decided = _Decided(self.target.tokens, prompt, base)

    def clear(self) -> None:
        """Give the memory back; the next turn begins anew. What single requests share stays."""
        self._last = None
        self._decided = _Decided(np.empty(0, np.int32), 0, 0)
        if self.lasting:
            self.readings = Readings()
        self.target.clear()
        if self.draft is not None:
            self.draft.clear()
