"""Which tokens of the prompt the target will read."""

import logging
import math
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
from specprefill_jax.selection.scores import boost, chunk_masses, chunk_sizes, normalize
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
        chunk: Tokens per chunk.
        chunk_scores: Mean normalized, boosted importance of each chunk; empty where nothing had to be ranked.
    """

    kept: Int[np.ndarray, "N"]
    prompt: int
    forced: int
    pinned: int
    mode: Literal["mass", "chunk"]
    budget: int
    chunk: int
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
) -> Selection:
    """Keeps the forced tokens and then whole chunks, in order of mean importance (ties: the earlier chunk).

    The first chunk that does not fit the budget ends the selection, and so does, in mass mode, the chunk with
    which the ranked chunks reach `cumulative_mass` of all importance. If that is below the minimum, tokens
    are added in the same order up to it, as far as the budget goes. Tokens of `pinned` are forced like the
    first and the last: they are kept, and count against the budget.

    Tokens of `history` stay as they were kept. The tokens since are ranked against everything: a chunk of
    theirs is kept if it ranks that high in the whole conversation. Their budget is what earlier turns left of
    the conversation's, and at least what they would have had alone.

    Raises:
        ScoresUnusable: the importance is not finite or ranks nothing.
        BudgetTooSmall: the forced tokens leave no room for another.
    """
    tokens = importance.size
    new = tokens - history.prompt
    open_ = np.arange(tokens) >= history.prompt
    kept = np.zeros(tokens, dtype=bool)
    kept[history.kept] = True
    forced, pinned = _forced(tokens, settings, pinned, history)
    if keeps_everything(new, settings):
        return _selection(kept | open_, forced, pinned, settings, tokens, np.zeros(0))
    _warn_of_cap(new, settings)
    budget = turn_budget(tokens, history.prompt, history.kept.size, settings)
    _check_room(forced, pinned, budget, new, settings)
    masses = chunk_masses(boost(normalize(importance), settings), settings.chunk)
    means = masses / chunk_sizes(tokens, settings.chunk)
    ranking = np.argsort(-means, kind="stable")
    enough = math.inf
    if settings.selection == "mass":
        enough = settings.cumulative_mass * math.fsum(masses) * (1 - MASS_SLACK)
    taken = forced | ~open_  # what is decided already is not taken again
    before = tokens - new
    _take_chunks(taken, ranking, masses, settings.chunk, budget=before + budget, enough=enough)
    _fill(taken, ranking, settings.chunk, up_to=before + min(minimum_kept(new), budget))
    return _selection(kept | (taken & open_), forced, pinned, settings, history.kept.size + budget, means)


def require_room(
    tokens: int,
    settings: Settings,
    pinned: Bool[np.ndarray, "M"] | None = None,
    history: History = NO_HISTORY,
) -> None:
    """What `select` finds out whatever the importance, so that no scoring is paid for in vain.

    Raises:
        BudgetTooSmall: as `select` will, if a prompt of `tokens` can be ranked at all.
    """
    new = tokens - history.prompt
    if not keeps_everything(new, settings):
        budget = turn_budget(tokens, history.prompt, history.kept.size, settings)
        _check_room(*_forced(tokens, settings, pinned, history), budget, new, settings)


def _forced(
    tokens: int, settings: Settings, pinned: Bool[np.ndarray, "M"] | None, history: History
) -> tuple[Bool[np.ndarray, "M"], Bool[np.ndarray, "M"]]:
    """Masks of the tokens since `history` that are kept in any case, and of the pinned ones among them."""
    open_ = np.arange(tokens) >= history.prompt
    pinned = np.zeros(tokens, dtype=bool) if pinned is None else pinned & open_
    return (forced_tokens(tokens, settings.chunk) & open_) | pinned, pinned


def _take_chunks(
    kept: Bool[np.ndarray, "M"],
    ranking: Int[np.ndarray, "K"],
    masses: Float[np.ndarray, "K"],
    chunk: int,
    *,
    budget: int,
    enough: float,
) -> None:
    """Marks whole chunks in `kept` until one does not fit `budget`, or the mass ranked so far is `enough`."""
    count, mass = np.count_nonzero(kept), 0.0
    for index in ranking:
        span = kept[index * chunk : (index + 1) * chunk]
        count += np.count_nonzero(~span)
        if count > budget:
            return
        span[:] = True
        mass += masses[index]
        if mass >= enough:
            return


def _fill(kept: Bool[np.ndarray, "M"], ranking: Int[np.ndarray, "K"], chunk: int, *, up_to: int) -> None:
    """Marks tokens in `kept` in rank order, first tokens of a chunk first, until `up_to` are kept."""
    for index in ranking:
        room = up_to - np.count_nonzero(kept)
        if room <= 0:
            return
        span = kept[index * chunk : (index + 1) * chunk]
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
    forced: Bool[np.ndarray, "M"],
    pinned: Bool[np.ndarray, "M"],
    settings: Settings,
    budget: int,
    chunk_scores: Float[np.ndarray, "K"],
) -> Selection:
    return Selection(
        kept=np.flatnonzero(kept).astype(np.int32),
        prompt=kept.size,
        forced=int(np.count_nonzero(forced)),
        pinned=int(np.count_nonzero(pinned)),
        mode=settings.selection,
        budget=budget,
        chunk=settings.chunk,
        chunk_scores=chunk_scores,
    )
