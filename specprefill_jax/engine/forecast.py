"""What measured entries promise for prompts that nobody has sent yet: where the draft begins to pay."""

import dataclasses
from collections.abc import Mapping

from specprefill_jax.artifact.rates import EntryTimes
from specprefill_jax.engine.reading import reads_in_one_pass, window_size
from specprefill_jax.policy import break_even
from specprefill_jax.runtime.blocks import capacity_for
from specprefill_jax.runtime.predict import answering_ms, reading_ms, together
from specprefill_jax.runtime.program import Program
from specprefill_jax.scoring import Window, plan_windows
from specprefill_jax.selection import token_budget
from specprefill_jax.settings import Settings

SHORTEST = 512


@dataclasses.dataclass(frozen=True)
class Forecast:
    """A prompt of `tokens` on empty caches, if `kept` of them are kept. Times are milliseconds.

    Attributes:
        scoring_ms: the draft reads the prompt and looks ahead; by `spec_throughput` where that is set.
        dense_ms: the target reads all of it.
        sparse_ms: the target reads what is kept.
        pays: whether scoring is worth it, by the settings' margin.
    """

    tokens: int
    kept: int
    scoring_ms: float
    dense_ms: float
    sparse_ms: float
    pays: bool


def forecasts(
    draft: Program, target: Program, times: Mapping[str, EntryTimes], settings: Settings
) -> list[Forecast]:
    """Forecasts for 512 tokens, 1024, 2048 .. and the longest prompt that the target can answer densely.

    What will be kept is not known before scoring: the fraction `keep` is taken (0.3 unless set), as far as
    `max_keep` goes.

    Args:
        times: milliseconds of every entry, by role.

    Raises:
        SettingError: `window` or `lookahead` does not fit the draft's largest cache.
    """
    longest = target.largest_capacity - settings.max_tokens
    lengths = [SHORTEST << doubled for doubled in range(max(longest // SHORTEST, 0).bit_length())]
    if longest > 0 and longest not in lengths:
        lengths.append(longest)
    return [_forecast(draft, target, times, tokens, settings) for tokens in lengths]


def scoring_ms(draft: Program, times: EntryTimes, tokens: int, settings: Settings) -> float | None:
    """Milliseconds that the draft takes to score a prompt, as `Reader` does; None if not measured.

    Raises:
        SettingError: `window` or `lookahead` does not fit the draft's largest cache.
    """
    windows = _windows(draft, tokens, settings)
    sizes = [window.end - window.start for window in windows]
    capacity = capacity_for(max(sizes) + settings.lookahead, draft.model.capacities)
    assert capacity is not None, "windows are made for the largest cache"
    parts = [reading_ms(times, draft.model, size, capacity=capacity, rows=True) for size in sizes]
    parts += [answering_ms(times, settings.lookahead, capacity=capacity)] * len(windows)
    return together(*parts)


def _windows(draft: Program, tokens: int, settings: Settings) -> tuple[Window, ...]:
    if reads_in_one_pass(draft, tokens, settings):
        return (Window(0, tokens, tokens),)
    return plan_windows(tokens, window_size(draft, settings))


def _forecast(
    draft: Program, target: Program, times: Mapping[str, EntryTimes], tokens: int, settings: Settings
) -> Forecast:
    kept = token_budget(tokens, dataclasses.replace(settings, select_mode="chunk"))
    scoring = scoring_ms(draft, times["draft"], tokens, settings)
    dense, sparse = (_target_ms(target, times["target"], read, settings) for read in (tokens, kept))
    assert scoring is not None, "every entry of the draft was measured"
    assert dense is not None, "every entry of the target was measured"
    assert sparse is not None, "every entry of the target was measured"
    estimate = break_even(
        settings,
        draft_tokens=tokens,
        target_tokens=tokens,
        kept=kept,
        draft_ms=scoring,
        dense_ms=dense,
        sparse_ms=sparse,
        draft_known="measured",
        target_known="measured",
    )
    return Forecast(tokens, kept, estimate.cost_ms, dense, sparse, estimate.pays)


def _target_ms(target: Program, times: EntryTimes, tokens: int, settings: Settings) -> float | None:
    capacity = capacity_for(tokens + settings.max_tokens, target.model.capacities)
    assert capacity is not None, "lengths end where the largest cache does"
    return reading_ms(times, target.model, tokens, capacity=capacity)
