"""The draft reads a prompt: from its attention rows to one importance per token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from specprefill_jax.engine.clock import Clock, Watcher
from specprefill_jax.engine.track import BEGINNING, Place, Track
from specprefill_jax.engine.values import Scoring
from specprefill_jax.errors import ScoresUnusable, SettingError
from specprefill_jax.runtime.program import Program
from specprefill_jax.sampling import sample
from specprefill_jax.scoring import (
    Rows,
    Scorer,
    Window,
    auto_window,
    check_scorer,
    importance,
    merge_windows,
    plan_windows,
)
from specprefill_jax.settings import Settings

_GREEDY = Settings()
_UNUSED = np.random.default_rng(0)  # greedy sampling draws nothing from it


@dataclass(frozen=True, eq=False)
class Reading:
    """What the draft says about each token of a prompt, and how it read them.

    `read` are the tokens that it read, those of overlapping windows once for each; `looked_ahead` its steps
    beyond the prompt, of all windows together.
    """

    importance: Float[np.ndarray, "M"]
    scoring: Scoring
    windows: tuple[Window, ...]
    read: int
    looked_ahead: int


class Reader:
    """The draft at work on one request.

    Args:
        track: The draft, and what it has read of the conversation before.
        vocabulary: Size of the tokenizer; ids from there on are never taken as a lookahead token.
        stops: Tokens of the prompt after which `track` keeps a place to come back to.
    """

    def __init__(
        self,
        track: Track,
        vocabulary: int,
        settings: Settings,
        *,
        clock: Clock,
        watcher: Watcher,
        stops: Sequence[int] = (),
    ) -> None:
        self._track = track
        self._vocabulary = vocabulary
        self._settings = settings
        self._clock = clock
        self._watcher = watcher
        self._stops = stops

    def read(self, tokens: Int[np.ndarray, "M"]) -> Reading:
        """Reads the whole prompt, in one pass or by windows, and scores each token.

        One pass needs M + S slots, and begins where the draft has read the same tokens before; where the
        draft's largest cache has fewer slots, the prompt is read by windows. Each window starts from an empty
        state at position 0 and looks ahead by its own S greedy steps.

        Raises:
            SettingError: `window` or `lookahead` does not fit the draft's largest cache, or the draft has
                fewer heads or rows than are asked for.
            ScoresUnusable: the draft computed something that is not a finite number.
            NotFiniteOutput: its logits are not finite.
        """
        draft = self._track.program
        model, scorer = draft.model, Scorer.of(self._settings)
        check_scorer(scorer, layers=model.attention_layers, heads=model.query_heads, rows=model.rows)
        if reads_in_one_pass(draft, tokens.size, self._settings):
            return self._in_one_pass(tokens)
        return self._by_windows(tokens)

    def _in_one_pass(self, tokens: Int[np.ndarray, "M"]) -> Reading:
        size, lookahead = tokens.size, self._settings.lookahead
        place = reading_place(self._track, tokens, self._settings)
        before, last = place.prompt, size - self._settings.queries
        # A later stop would cut off some of the last tokens, so a place is left before them instead.
        stops = sorted({stop if stop == size else min(stop, last) for stop in self._stops})
        scores = self._score(
            tokens,
            place,
            size + lookahead,
            lambda done: self._watcher("score", done, size - before),
            stops=stops,
        )
        return Reading(scores, "continuous", (Window(0, size, size),), size - before, lookahead)

    def _by_windows(self, tokens: Int[np.ndarray, "M"]) -> Reading:
        lookahead = self._settings.lookahead
        windows = plan_windows(tokens.size, window_size(self._track.program, self._settings))
        sizes = [window.end - window.start for window in windows]
        parts: list[Float[np.ndarray, "_"]] = []
        for i, window in enumerate(windows):
            before, total = sum(sizes[:i]), sum(sizes)
            part = tokens[window.start : window.end]

            def tell(done: int, before: int = before, total: int = total) -> None:
                self._watcher("score", before + done, total)

            parts.append(self._score(part, BEGINNING, max(sizes) + lookahead, tell))
        self._track.clear()  # a window is no beginning of the conversation
        return Reading(
            merge_windows(windows, parts), "windows", windows, sum(sizes), lookahead * len(windows)
        )

    def _score(
        self,
        tokens: Int[np.ndarray, "M"],
        place: Place,
        slots: int,
        tell: Callable[[int], None],
        stops: Sequence[int] = (),
    ) -> Float[np.ndarray, "M"]:
        """Importance of `tokens`, of which the draft has read those before `place`."""
        self._clock.enter("draft_prefill")
        self._track.start(place, slots)
        rows = self._rows(tokens, tell, stops)
        self._clock.enter("select")
        return _finite(importance(rows, Scorer.of(self._settings)), "importance")

    def rows(self, tokens: Int[np.ndarray, "M"]) -> Rows:
        """The attention rows themselves, of a prompt that is read in one pass from its beginning.

        Raises:
            PromptTooLong: the draft's largest cache does not hold it.
            ScoresUnusable, NotFiniteOutput: as `read`.
        """
        self._clock.enter("draft_prefill")
        self._track.start(BEGINNING, tokens.size + self._settings.lookahead)
        return self._rows(tokens, lambda done: self._watcher("score", done, tokens.size), ())

    def _rows(self, tokens: Int[np.ndarray, "M"], tell: Callable[[int], None], stops: Sequence[int]) -> Rows:
        """Attention over `tokens` of their last ones, and of each lookahead token.

        Lookahead goes on past a stop token: every step is one more opinion, as in the guide. Afterwards the
        draft's state is again what the prompt alone made of it. `tell` hears the tokens read before each
        block and step.
        """
        size, track = tokens.size, self._track
        left = size - track.prompt
        prefilled = track.read(
            tokens,
            np.arange(size, dtype=np.int32),
            stops=stops,
            rows=True,
            before_block=lambda done, _: tell(done),
        )
        prompt = _of_prompt(prefilled.rows, size, track.program)[: prefilled.rows_valid]
        _finite(prefilled.hidden, "hidden state")
        steps: list[Float[np.ndarray, "A H M"]] = []
        if self._settings.lookahead:
            self._clock.enter("lookahead")
            here = track.stay()
            logits = track.program.head(prefilled.hidden)
            for step in range(self._settings.lookahead):
                tell(left)
                token = sample(logits, _GREEDY, _UNUSED, self._vocabulary)
                decoded = track.look_ahead(token, size + step)
                steps.append(_of_prompt(decoded.rows, size, track.program))
                logits = decoded.logits
            track.back_to(here)
        return Rows(prompt, np.stack(steps) if steps else prompt[:0])


def reads_in_one_pass(draft: Program, tokens: int, settings: Settings) -> bool:
    """Whether a prompt is read in one pass: as the settings ask, and as the draft's largest cache allows."""
    return settings.scoring == "continuous" and tokens + settings.lookahead <= draft.largest_capacity


def reading_place(track: Track, tokens: Int[np.ndarray, "M"], settings: Settings) -> Place:
    """Where the draft goes on to read a prompt in one pass.

    It reads the last `queries` tokens in any case, in one call: it is from their attention that scores come.
    """
    return next(track.places(tokens, tokens.size - settings.queries))


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
