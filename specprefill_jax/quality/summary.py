"""From the outcomes of single prompts to what is said of them together."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from specprefill_jax.policy import Status
from specprefill_jax.quality.evaluation import Cell, Outcome
from specprefill_jax.quality.statistics import Interval, paired_difference, wilson

AS_ASKED = (Status.ACTIVE, Status.KEPT_ALL)
"""What becomes of a sparse request that goes well."""


@dataclass(frozen=True)
class Row:
    """The prompts of a cell in one way.

    Attributes:
        cell: Which prompts.
        way: In which way they were read.
        prompts: How many.
        accuracy: Share of right answers, with Wilson's 95% interval.
        difference: How much that is above the dense share, with the 95% interval for pairs; None of dense.
        kept, most_kept: Share of the prompt that the target read: the mean, and the most of one prompt.
        over_budget: Prompts of which more was kept than allowed. There must be none.
        whole: Share of prompts of which everything needed was kept.
        agreement: Share of prompts with the first token of dense prefill.
        divergence: Mean Kullback-Leibler divergence of the first token from dense prefill, in nats.
        statuses: How many requests ended in each status.
    """

    cell: Cell
    way: str
    prompts: int
    accuracy: Interval
    difference: Interval | None
    kept: float
    most_kept: float
    over_budget: int
    whole: float
    agreement: float
    divergence: float
    statuses: Mapping[str, int]

    @property
    def unlike_asked(self) -> dict[str, int]:
        """Statuses of sparse requests that were answered densely all the same; they are among the rest."""
        if self.difference is None:
            return {}
        return {status: count for status, count in self.statuses.items() if status not in AS_ASKED}


def summarize(outcomes: Iterable[Outcome]) -> list[Row]:
    """A row for every cell and way, in the order in which they came.

    Every prompt counts, also those that dense prefill answers wrongly and those with another status.
    """
    cells: dict[Cell, dict[str, list[Outcome]]] = {}
    for outcome in outcomes:
        cell = Cell(outcome.suite, outcome.filler, outcome.tokens)
        cells.setdefault(cell, {}).setdefault(outcome.way, []).append(outcome)
    return [
        _row(cell, way, found, None if found is dense else dense)
        for cell, ways in cells.items()
        for dense in [next(iter(ways.values()))]
        for way, found in ways.items()
    ]


def _row(cell: Cell, way: str, found: Sequence[Outcome], dense: Sequence[Outcome] | None) -> Row:
    shares = [outcome.kept / outcome.prompt for outcome in found]
    return Row(
        cell=cell,
        way=way,
        prompts=len(found),
        accuracy=wilson(sum(outcome.right for outcome in found), len(found)),
        difference=None if dense is None else _difference(found, dense),
        kept=fmean(shares),
        most_kept=max(shares),
        over_budget=sum(_is_over(outcome) for outcome in found),
        whole=fmean(outcome.whole for outcome in found),
        agreement=fmean(outcome.agrees for outcome in found),
        divergence=fmean(outcome.divergence for outcome in found),
        statuses=dict(Counter(outcome.status for outcome in found)),
    )


def _is_over(outcome: Outcome) -> bool:
    """A request that was answered densely all the same has no budget; its status says so."""
    return outcome.status in AS_ASKED and outcome.kept > outcome.budget


def _difference(found: Sequence[Outcome], dense: Sequence[Outcome]) -> Interval:
    pairs = Counter((a.right, b.right) for a, b in zip(found, dense, strict=True))
    return paired_difference(pairs[True, True], pairs[True, False], pairs[False, True], pairs[False, False])
