"""The draft reads a prompt: from its attention rows to one importance per token."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Float, Int

from specprefill_jax.engine.clock import Watcher
from specprefill_jax.engine.values import Scoring
from specprefill_jax.errors import ScoresUnusable, SettingError
from specprefill_jax.runtime.program import Program
from specprefill_jax.runtime.state import State
from specprefill_jax.sampling import sample
from specprefill_jax.scoring import Window, auto_window, importance, merge_windows, plan_windows
from specprefill_jax.settings import Settings

_GREEDY = Settings()
_UNUSED = np.random.default_rng(0)  # greedy sampling draws nothing from it


@dataclass(frozen=True, eq=False)
class Reading:
    """What the draft says about each token of a prompt, and how it read them."""

    importance: Float[np.ndarray, "M"]
    scoring: Scoring
    windows: tuple[Window, ...]


def read_prompt(
    draft: Program, vocabulary: int, tokens: Int[np.ndarray, "M"], settings: Settings, watcher: Watcher
) -> Reading:
    """Reads the whole prompt with the draft, in one pass or by windows, and scores each token.

    One pass needs M + S slots; where the draft's largest cache has fewer, the prompt is read by windows. Each
    window starts from an empty state at position 0 and looks ahead by its own S greedy steps.

    Args:
        vocabulary: Size of the tokenizer; ids from there on are never taken as a lookahead token.

    Raises:
        SettingError: `window` or `lookahead` does not fit the draft's largest cache.
        ScoresUnusable: the draft computed something that is not a finite number.
        NotFiniteOutput: its logits are not finite.
    """
    fits = tokens.size + settings.lookahead <= draft.largest_capacity
    if settings.scoring == "continuous" and fits:
        scoring, windows = "continuous", (Window(0, tokens.size, tokens.size),)
    else:
        scoring, windows = "windows", plan_windows(tokens.size, window_size(draft, settings))
    longest = max(window.end - window.start for window in windows)
    state = draft.new_state(longest + settings.lookahead)
    total = sum(window.end - window.start for window in windows)
    done, parts = 0, []
    for window in windows:
        if state.length:
            state.reset()
        part = tokens[window.start : window.end]
        rows = _rows(draft, vocabulary, state, part, settings.lookahead, partial(_tell, watcher, done, total))
        parts.append(_finite(importance(rows, settings.pool), "importance"))
        done += part.size
    return Reading(merge_windows(windows, parts), scoring, windows)


def window_size(draft: Program, settings: Settings) -> int:
    """Tokens per window: as asked for, else the automatic size, as far as the draft's largest cache goes.

    Raises:
        SettingError: the window asked for, or the lookahead, does not fit.
    """
    room = draft.largest_capacity - settings.lookahead
    if settings.window:
        if settings.window > room:
            raise SettingError(
                f"window={settings.window}: {draft.label} was compiled for {draft.largest_capacity} slots, "
                f"and lookahead takes {settings.lookahead}; give a window (SP_WINDOW) of {room} or fewer "
                "tokens, or 0 for the automatic size"
            )
        return settings.window
    if room < 2:
        raise SettingError(
            f"lookahead={settings.lookahead}: {draft.label} was compiled for {draft.largest_capacity} slots, "
            f"which leaves none for the prompt; lower lookahead (SP_LOOKAHEAD)"
        )
    return min(auto_window(settings.draft_context, draft.model.query_heads), room)


def _rows(
    draft: Program,
    vocabulary: int,
    state: State,
    tokens: Int[np.ndarray, "M"],
    lookahead: int,
    tell: Callable[[int], None],
) -> list[Float[np.ndarray, "A H M"]]:
    """Attention over `tokens` of their last one, then of each lookahead token; `state` is empty before.

    Lookahead goes on past a stop token: every step is one more opinion, as in the guide. Afterwards `state`
    is again what the prompt alone made of it. `tell` hears the tokens read before each block and step.
    """
    size = tokens.size
    positions = np.arange(size, dtype=np.int32)
    prefilled = draft.prefill(state, tokens, positions, rows=True, before_block=lambda done, _: tell(done))
    rows = [_of_prompt(prefilled.rows, size, draft)[prefilled.rows_valid - 1]]
    _finite(prefilled.hidden, "hidden state")
    if lookahead == 0:
        return rows
    before = draft.snapshot(state)
    logits = draft.head(prefilled.hidden)
    for step in range(lookahead):
        tell(size)
        decoded = draft.decode(state, sample(logits, _GREEDY, _UNUSED, vocabulary), size + step)
        rows.append(_of_prompt(decoded.rows, size, draft))
        logits = decoded.logits
    draft.restore(state, before)
    return rows


def _tell(watcher: Watcher, before: int, total: int, done: int) -> None:
    watcher("score", before + done, total)


def _of_prompt(
    rows: Float[np.ndarray, "*S A H C"] | None, size: int, draft: Program
) -> Float[np.ndarray, "*S A H M"]:
    """The columns of the prompt: a row also covers lookahead tokens and slots not in use."""
    if rows is None:
        raise ScoresUnusable(f"{draft.label} returned no attention rows, so no token can be ranked")
    return rows[..., :size]


def _finite(values: Float[np.ndarray, "..."], what: str) -> Float[np.ndarray, "..."]:
    if not np.isfinite(values).all():
        bad = np.count_nonzero(~np.isfinite(values))
        raise ScoresUnusable(f"the draft's {what}: {bad} of {values.size} numbers are not finite")
    return values
