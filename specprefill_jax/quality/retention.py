"""Whether the draft would have what an answer follows from kept whole: retention.

It needs the draft alone, and its attention only once per prompt: every scorer is tried on the same rows.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int, Int8

from specprefill_jax.engine import Engine
from specprefill_jax.engine.prompt import encode
from specprefill_jax.errors import ArtifactError, BudgetTooSmall, ScoresUnusable
from specprefill_jax.quality.evaluation import VARIABLES, Plan, needed_tokens, task_of
from specprefill_jax.scoring import Rows, Scorer, importance
from specprefill_jax.selection import fixed, segments, select
from specprefill_jax.settings import Settings

Progress = Callable[[str, int, int], None]
"""Hears a phase, how much of it is done and how much there is."""


@dataclass(frozen=True, eq=False)
class Seen:
    """A prompt as the draft saw it.

    Attributes:
        rows: Its attention, with lookahead.
        needed: The tokens that the answer follows from.
        pinned: Those that are kept whatever their importance.
        borders: Where lines and sentences end (`Chat.borders`).
    """

    rows: Rows
    needed: Int[np.ndarray, "K"]
    pinned: Bool[np.ndarray, "M"]
    borders: Int8[np.ndarray, "M"]

    def edges(self, settings: Settings) -> Int[np.ndarray, "E"]:
        """Edges of the chunks that settings ask for."""
        if settings.chunking == "text":
            return segments(self.borders, settings.chunk)
        return fixed(self.borders.size, settings.chunk)


def see(engine: Engine, plan: Plan, lookahead: int, progress: Progress) -> Iterator[Seen]:
    """Every prompt of a plan, read by the draft; cells by turns, so that both halves have of all.

    Raises:
        ArtifactError: there is no draft.
        SettingError: the prompts are too short for their suites, or the draft's cache is too small for them.
        TemplateError, NotFiniteOutput, DeviceFailed: as `Engine.generate`.
    """
    if engine.draft is None:
        raise ArtifactError(f"only a draft has attention to look at, and {engine.no_draft}")
    settings = Settings(lookahead=lookahead)
    chat, vocabulary = engine.chat, engine.draft.model.vocabulary
    total = plan.count * len(plan.cells)
    for index in range(plan.count):
        for number, cell in enumerate(plan.cells):
            progress("read", index * len(plan.cells) + number, total)
            task = task_of(chat, plan, cell, index)
            encoded = encode(
                chat, vocabulary, task.messages, settings, prefix=task.prefix, variables=VARIABLES
            )
            yield Seen(
                rows=Rows(*map(np.array, engine.rows(encoded.tokens, lookahead))),  # not the whole cache's
                needed=needed_tokens(chat, task),
                pinned=encoded.pinned,
                borders=chat.borders(encoded.tokens),
            )


def kept_whole(seen: Seen, settings: Settings, keeps: Sequence[float]) -> list[bool]:
    """For each fraction, whether the needed tokens are all kept. Rows that rank nothing keep nothing."""
    rows = Rows(seen.rows.prompt, seen.rows.lookahead[: settings.lookahead])
    try:
        return whole_by(importance(rows, Scorer.of(settings)), seen, settings, keeps)
    except ScoresUnusable:
        return [False] * len(keeps)


def whole_by(
    scores: Float[np.ndarray, "M"], seen: Seen, settings: Settings, keeps: Sequence[float]
) -> list[bool]:
    """The same by an importance that comes from elsewhere. A budget without room keeps nothing.

    Raises:
        ScoresUnusable: it is not finite or ranks nothing.
    """
    edges = seen.edges(settings)
    whole: list[bool] = []
    for keep in keeps:
        try:
            kept = select(scores, dataclasses.replace(settings, keep=keep), seen.pinned, edges=edges).kept
        except BudgetTooSmall:
            kept = np.empty(0, np.int32)
        whole.append(bool(np.isin(seen.needed, kept).all()))
    return whole
