"""Which tokens of the prompt the target will read."""

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from specprefill_jax.errors import BudgetTooSmall
from specprefill_jax.selection.budget import (
    FORCED_FIRST,
    FORCED_LAST,
    forced_tokens,
    keeps_everything,
    minimum_kept,
    turn_budget,
    wanted_tokens,
)
from specprefill_jax.selection.scores import boost, chunk_masses, normalize, peaks_at_borders
from specprefill_jax.selection.segments import fixed
from specprefill_jax.settings import Settings

logger = logging.getLogger(__name__)

MASS_SLACK = 1e-9
"""Share of the mass threshold forgiven to rounding, so that a threshold met exactly on paper is met. A
running sum of 10,000 chunks errs by about 1e-12."""


@dataclass(frozen=True)
class Selection:
    """The tokens kept for the target's prefill, and what decided about them.

    Attributes:
        kept: Positions, ascending, int32.
        prompt: Tokens of the prompt.
        forced: How many of the kept tokens were kept whatever their importance, the pinned ones included.
        pinned: How many of them the caller asked for.
        mode: How chunks were selected.
        budget: Most tokens that could be kept, those of earlier turns included.
        edges: Where the chunks begin, and where the last one ends.
        chunk_scores: Mean normalized, boosted importance of each chunk; empty where nothing had to be ranked.
    """

    kept: Int[np.ndarray, "N"]
    prompt: int
    forced: int
    pinned: int
    mode: Literal["mass", "chunk"]
    budget: int
    edges: Int[np.ndarray, "B"]
    chunk_scores: Float[np.ndarray, "K"]

    @property
    def kept_all(self) -> bool:
        """Whether every token of the prompt is kept, so that the prefill is dense."""
        return self.kept.size == self.prompt


@dataclass(frozen=True, eq=False)
class History:
    """The first `prompt` tokens of a conversation, of which earlier turns kept exactly `kept` (ascending)."""

    prompt: int
    kept: Int[np.ndarray, "P"]


NO_HISTORY = History(0, np.empty(0, np.int32))


def select(
    importance: Float[np.ndarray, "M"],
    settings: Settings,
    pinned: Bool[np.ndarray, "M"] | None = None,
    history: History = NO_HISTORY,
    edges: Int[np.ndarray, "B"] | None = None,
) -> Selection:
    """Keeps the forced tokens and then whole chunks, in order of mean importance (ties: the earlier chunk).

    The first chunk that does not fit the budget ends the selection, and so does, in mass mode, the chunk with
    which the ranked chunks reach `cumulative_mass` of all importance. If that is below the minimum, tokens
    are added in the same order up to it, as far as the budget goes. Tokens of `pinned` are forced like the
    first and the last: they are kept, and count against the budget.

    With `halo`, a chunk whose largest score is among the tokens next to a border (an eighth of `chunk`, at
    least 2) brings the neighbor across it, whatever that one's rank: a fact that is cut in two is kept whole.
    A neighbor that does not fit the budget is left out, and does not end the selection. The mass of one that
    is taken counts with that of the ranked chunks, once.

    Tokens of `history` stay as they were kept. The tokens since are ranked against everything: a chunk of
    theirs is kept if it ranks that high in the whole conversation. Their budget is what earlier turns left of
    the conversation's, and at least what they would have had alone.

    Args:
        edges: Of the chunks, as `segments` gives them; None: every `chunk` tokens.

    Raises:
        ScoresUnusable: the importance is not finite or ranks nothing.
        BudgetTooSmall: the forced tokens leave no room for another.
        ValueError: the edges do not lead from 0 to the prompt's end.
    """
    tokens, before = importance.size, history.prompt
    open_ = np.arange(tokens) >= before
    kept = np.zeros(tokens, dtype=bool)
    kept[history.kept] = True
    edges = _edges(edges, tokens, settings)
    bounds = bounds_of(tokens, settings, pinned, history, edges)
    if keeps_everything(tokens - before, settings):
        return _selection(kept | open_, bounds, settings, tokens, edges, np.zeros(0))
    _warn_of_cap(tokens - before, settings)
    scores = boost(normalize(importance, settings.normalizer), settings)
    masses = chunk_masses(scores, edges)
    means = masses / np.diff(edges)
    ranking = np.argsort(-means, kind="stable")
    enough = math.inf
    if settings.selection == "mass":
        enough = settings.cumulative_mass * math.fsum(masses) * (1 - MASS_SLACK)
    taken = bounds.forced | ~open_  # what is decided already is not taken again
    groups = _with_neighbors(ranking, scores, edges, settings)
    _take_chunks(taken, groups, masses, edges, budget=before + bounds.budget, enough=enough)
    least = min(minimum_kept(tokens - before), bounds.budget)
    _fill(taken, ranking, edges, up_to=before + least)
    budget = history.kept.size + bounds.budget
    return _selection(kept | (taken & open_), bounds, settings, budget, edges, means)


@dataclass(frozen=True, eq=False)
class Bounds:
    """What is known of a selection before anything is scored.

    Attributes:
        forced: Mask of the new tokens that are kept whatever their importance.
        pinned: Those of them that were asked for.
        budget: Most new tokens that may be kept.
    """

    forced: Bool[np.ndarray, "M"]
    pinned: Bool[np.ndarray, "M"]
    budget: int


def bounds_of(
    tokens: int,
    settings: Settings,
    pinned: Bool[np.ndarray, "M"] | None = None,
    history: History = NO_HISTORY,
    edges: Int[np.ndarray, "B"] | None = None,
) -> Bounds:
    """What must and what may be kept of a prompt of `tokens`, cut into chunks as `select` is told.

    Raises:
        BudgetTooSmall: the forced tokens leave no room for another.
        ValueError: the edges do not lead from 0 to the prompt's end.
    """
    open_ = np.arange(tokens) >= history.prompt
    pinned = np.zeros(tokens, dtype=bool) if pinned is None else pinned & open_
    forced = (forced_tokens(_edges(edges, tokens, settings), settings.chunk) & open_) | pinned
    new, budget = tokens - history.prompt, turn_budget(tokens, history.prompt, history.kept.size, settings)
    if not keeps_everything(new, settings):
        _check_room(forced, pinned, budget, new, settings)
    return Bounds(forced, pinned, budget)


def _edges(edges: Int[np.ndarray, "B"] | None, tokens: int, settings: Settings) -> Int[np.ndarray, "B"]:
    if edges is None:
        return fixed(tokens, settings.chunk)
    if edges.size == 0 or edges[0] != 0 or edges[-1] != tokens or (np.diff(edges) <= 0).any():
        raise ValueError(f"edges of chunks ascend from 0 to {tokens}, the tokens of the prompt")
    return edges


def _with_neighbors(
    ranking: Int[np.ndarray, "K"],
    scores: Float[np.ndarray, "M"],
    edges: Int[np.ndarray, "B"],
    settings: Settings,
) -> Iterator[list[int]]:
    """Chunks in rank order, each with the neighbors that it brings, the earlier one first."""
    reach = max(settings.chunk // 8, 2) if settings.halo else 0
    before, behind = peaks_at_borders(scores, edges, reach)
    for chunk in map(int, ranking):
        yield [chunk, *([chunk - 1] if before[chunk] else []), *([chunk + 1] if behind[chunk] else [])]


def _take_chunks(
    kept: Bool[np.ndarray, "M"],
    groups: Iterable[list[int]],
    masses: Float[np.ndarray, "K"],
    edges: Int[np.ndarray, "B"],
    *,
    budget: int,
    enough: float,
) -> None:
    """Marks whole chunks in `kept`, those of one group after the other.

    It ends with a group whose first chunk does not fit `budget`, and behind one with which the mass of the
    chunks whose turn has come is `enough`.
    """
    count, mass = np.count_nonzero(kept), 0.0
    counted = np.zeros(masses.size, dtype=bool)
    for group in groups:
        for chunk in group:
            span = kept[edges[chunk] : edges[chunk + 1]]
            more = np.count_nonzero(~span)
            if count + more <= budget:
                span[:] = True
                count += more
                mass += 0.0 if counted[chunk] else masses[chunk]
                counted[chunk] = True
            elif chunk == group[0]:
                return
        if mass >= enough:
            return


def _fill(
    kept: Bool[np.ndarray, "M"],
    ranking: Int[np.ndarray, "K"],
    edges: Int[np.ndarray, "B"],
    *,
    up_to: int,
) -> None:
    """Marks tokens in `kept` in rank order, first tokens of a chunk first, until `up_to` are kept."""
    for chunk in ranking:
        room = up_to - np.count_nonzero(kept)
        if room <= 0:
            return
        span = kept[edges[chunk] : edges[chunk + 1]]
        span[np.flatnonzero(~span)[:room]] = True


def _check_room(
    forced: Bool[np.ndarray, "M"],
    pinned: Bool[np.ndarray, "M"],
    budget: int,
    new: int,
    settings: Settings,
) -> None:
    count = np.count_nonzero(forced)
    if budget <= count and budget < new:
        capped = budget == settings.max_keep
        knob = (
            f"max_keep (SP_MAX_KEEP={budget})" if capped else f"keep (SP_KEEP_PCT={settings.keep_fraction:g})"
        )
        always, remedies = ["the last chunk"], [f"raise {knob}", f"lower chunk (SP_CHUNK={settings.chunk})"]
        if pins := np.count_nonzero(pinned):
            always.append(f"{pins} that are pinned")
            remedies.append("pin less")
        raise BudgetTooSmall(
            f"{count} of {new} tokens are always kept ("
            + _listed([f"the first {FORCED_FIRST}", f"the last {FORCED_LAST}", *always], "and")
            + f"), which leaves no room in a budget of {budget}; {_listed(remedies, 'or')}"
        )


def _listed(items: list[str], last: str) -> str:
    """`a, b and c`, with `last` for the "and"."""
    return f"{', '.join(items[:-1])} {last} {items[-1]}"


def _warn_of_cap(tokens: int, settings: Settings) -> None:
    wanted = wanted_tokens(tokens, settings)
    if settings.keep is not None and settings.selection == "chunk" and 0 < settings.max_keep < wanted:
        logger.warning(
            "keep=%g asks for %d of %d tokens; max_keep=%d (SP_MAX_KEEP) caps it, and 0 lifts the cap",
            settings.keep,
            wanted,
            tokens,
            settings.max_keep,
        )


def _selection(
    kept: Bool[np.ndarray, "M"],
    bounds: Bounds,
    settings: Settings,
    budget: int,
    edges: Int[np.ndarray, "B"],
    chunk_scores: Float[np.ndarray, "K"],
) -> Selection:
    return Selection(
        kept=np.flatnonzero(kept).astype(np.int32),
        prompt=kept.size,
        forced=int(np.count_nonzero(bounds.forced)),
        pinned=int(np.count_nonzero(bounds.pinned)),
        mode=settings.selection,
        budget=budget,
        edges=edges,
        chunk_scores=chunk_scores,
    )
