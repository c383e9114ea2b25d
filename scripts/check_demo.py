"""All 40 prompts of the demo pair on one device or several: a table, and the bars that must be met."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specprefill_jax.artifact.locate import embedded
from specprefill_jax.cli.load import load_engine
from specprefill_jax.cli.progress import Waiting
from specprefill_jax.engine import Engine
from specprefill_jax.errors import SpecPrefillError
from specprefill_jax.settings import Settings

MOST_KEPT = 0.45
LOST_ANSWERS = 4  # right answers that sparse prefill may cost, of 40
RIGHT_WITHOUT_FACT = 0.10
AGREEMENT = 0.98  # kept tokens that devices must share, on each prompt

# Some of the prompts are shorter than the 512 tokens that the demo's threshold asks for.
SPARSE = Settings(mode="sparse", max_tokens=1)
DENSE = Settings(mode="dense", max_tokens=1)


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """What one device made of one prompt; the last three say whether the first token was the right answer."""

    status: str
    kept: Int[np.ndarray, "N"]
    share: float
    dense: bool
    sparse: bool
    without_fact: bool


def main() -> int:
    """0 if every bar is met, 1 if not, 2 if a device cannot run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("devices", nargs="*", metavar="DEVICE", help="default: cpu vulkan")
    devices = parser.parse_args().devices or ["cpu", "vulkan"]
    lines = embedded("artifacts/demo/examples.jsonl").read_text(encoding="utf-8").splitlines()
    examples = [json.loads(line) for line in lines]
    try:
        outcomes = {device: ask_all(device, examples) for device in devices}
    except SpecPrefillError as error:
        print(f"check_demo: error: {error}", file=sys.stderr)
        return 2
    agreement = [agreed(of_one) for of_one in zip(*outcomes.values(), strict=True)]
    console = Console()
    console.print(table(examples, outcomes, agreement))
    missed = [bar for device in devices for bar in bars_missed(device, outcomes[device])]
    if min(agreement) < AGREEMENT:
        missed.append(
            f"devices share {min(agreement):.1%} of the kept tokens on a prompt, not {AGREEMENT:.0%}"
        )
    for bar in missed:
        print(f"check_demo: missed: {bar}", file=sys.stderr)
    return 1 if missed else 0


def ask_all(device: str, examples: Sequence[dict[str, Any]]) -> list[Outcome]:
    """Every prompt on one device; the pair is compiled for it first, if need be."""
    with Waiting() as waiting:
        engine = load_engine(None, device, waiting)
    with Progress(console=Console(file=sys.stderr), transient=True) as progress:
        return [ask(engine, example) for example in progress.track(examples, description=device)]


def ask(engine: Engine, example: dict[str, Any]) -> Outcome:
    """One prompt: dense, sparse, and sparse with the tokens of the fact left out."""
    (answer,) = example["answer_ids"]
    tokens = engine.encode(example["prompt"], raw=True)
    sparse = engine.generate(tokens, SPARSE)
    kept = sparse.kept
    first, end = example["fact_span"]
    without = kept[(kept < first) | (kept >= end)]
    return Outcome(
        status=sparse.timings.status,
        kept=kept,
        share=kept.size / tokens.size,
        dense=engine.generate(tokens, DENSE).tokens == (answer,),
        sparse=sparse.tokens == (answer,),
        without_fact=engine.answer_from(tokens, without, SPARSE).tokens == (answer,),
    )


def agreed(outcomes: Sequence[Outcome]) -> float:
    """The share of kept tokens that all devices kept."""
    common = set.intersection(*(set(outcome.kept.tolist()) for outcome in outcomes))
    return len(common) / max(outcome.kept.size for outcome in outcomes)


def bars_missed(device: str, outcomes: Sequence[Outcome]) -> list[str]:
    """What one device does not reach, in words."""
    missed = []
    inactive = sorted({outcome.status for outcome in outcomes} - {"active"})
    if inactive:
        missed.append(f"{device}: status {', '.join(inactive)} in place of active")
    most = max(outcome.share for outcome in outcomes)
    if most > MOST_KEPT:
        missed.append(f"{device}: {most:.1%} of a prompt is kept, more than {MOST_KEPT:.0%}")
    dense, sparse, without = totals(outcomes)
    if sparse < dense - LOST_ANSWERS:
        missed.append(f"{device}: {sparse} right answers, dense {dense}, and {LOST_ANSWERS} may be lost")
    if without >= RIGHT_WITHOUT_FACT * len(outcomes):
        missed.append(f"{device}: {without} of {len(outcomes)} answers are right without their fact")
    return missed


def totals(outcomes: Sequence[Outcome]) -> tuple[int, int, int]:
    """Right answers: dense, sparse, and without the fact."""
    return (
        sum(outcome.dense for outcome in outcomes),
        sum(outcome.sparse for outcome in outcomes),
        sum(outcome.without_fact for outcome in outcomes),
    )


def table(
    examples: Sequence[dict[str, Any]], outcomes: dict[str, list[Outcome]], agreement: Sequence[float]
) -> Table:
    """A row per prompt, and the totals."""
    shown = Table(show_footer=True)
    shown.add_column("prompt", footer="right answers")
    shown.add_column("tokens", justify="right")
    for device, answers in outcomes.items():
        dense, sparse, without = totals(answers)
        shown.add_column(device, footer="")
        shown.add_column("kept", justify="right", footer=f"{np.mean([a.share for a in answers]):.0%}")
        shown.add_column("dense", justify="center", footer=str(dense))
        shown.add_column("sparse", justify="center", footer=str(sparse))
        shown.add_column("no fact", justify="center", footer=str(without))
    if len(outcomes) > 1:
        shown.add_column("same kept", justify="right", footer=f"{min(agreement):.1%}")
    for number, example in enumerate(examples):
        row = [f"{number + 1} {example['kind']}", str(example["tokens"])]
        for answers in outcomes.values():
            found = answers[number]
            marks = ["right" if right else "-" for right in (found.dense, found.sparse, found.without_fact)]
            row += [found.status, f"{found.share:.0%}", *marks]
        if len(outcomes) > 1:
            row.append(f"{agreement[number]:.1%}")
        shown.add_row(*row)
    return shown


if __name__ == "__main__":
    sys.exit(main())
