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

# The default selection keeps what holds 85% of the attention, more of one prompt than of another, so there
# it is the most of all prompts together. By a fixed fraction it is the most of each prompt.
MOST_KEPT = 0.45
LOST_ANSWERS = 4  # right answers that sparse prefill may cost, of 40
RIGHT_WITHOUT_FACT = 0.10
AGREEMENT = 0.98  # kept tokens that devices must share, on each prompt

# Some of the prompts are shorter than the 512 tokens that the demo's threshold asks for.
SPARSE = Settings(mode="sparse", max_tokens=1)
FIXED = Settings(mode="sparse", max_tokens=1, keep=0.3)
DENSE = Settings(mode="dense", max_tokens=1)


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """What one device made of one prompt.

    Attributes:
        statuses: Of the default selection and of a fixed fraction.
        tokens: Of the prompt.
        kept: By the default selection.
        fixed: Tokens kept by a fixed fraction.
        dense_right, right, fixed_right: Whether the first token is the right answer: dense, by the default
            selection, by a fixed fraction.
        right_without_fact: The same by the default selection, its tokens of the fact left out.
    """

    statuses: tuple[str, str]
    tokens: int
    kept: Int[np.ndarray, "N"]
    fixed: int
    dense_right: bool
    right: bool
    fixed_right: bool
    right_without_fact: bool


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
    for device, of_device in outcomes.items():
        console.print(table(device, examples, of_device, agreement if len(devices) > 1 else None))
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
    """One prompt: dense, by the default selection, by a fixed fraction, and without the fact's tokens."""
    (answer,) = example["answer_ids"]
    tokens = engine.encode(example["prompt"], raw=True)
    sparse, fixed = engine.generate(tokens, SPARSE), engine.generate(tokens, FIXED)
    kept = sparse.kept
    first, end = example["fact_span"]
    without = kept[(kept < first) | (kept >= end)]
    return Outcome(
        statuses=(sparse.timings.status, fixed.timings.status),
        tokens=tokens.size,
        kept=kept,
        fixed=fixed.kept.size,
        dense_right=engine.generate(tokens, DENSE).tokens == (answer,),
        right=sparse.tokens == (answer,),
        fixed_right=fixed.tokens == (answer,),
        right_without_fact=engine.answer_from(tokens, without, SPARSE).tokens == (answer,),
    )


def agreed(outcomes: Sequence[Outcome]) -> float:
    """The share of kept tokens that all devices kept."""
    common = set.intersection(*(set(outcome.kept.tolist()) for outcome in outcomes))
    return len(common) / max(outcome.kept.size for outcome in outcomes)


def bars_missed(device: str, outcomes: Sequence[Outcome]) -> list[str]:
    """What one device does not reach, in words."""
    missed = []
    inactive = sorted({status for outcome in outcomes for status in outcome.statuses} - {"active"})
    if inactive:
        missed.append(f"{device}: status {', '.join(inactive)} in place of active")
    if kept_share(outcomes) > MOST_KEPT:
        missed.append(
            f"{device}: {kept_share(outcomes):.1%} of all tokens are kept, more than {MOST_KEPT:.0%}"
        )
    most = max(outcome.fixed / outcome.tokens for outcome in outcomes)
    if most > MOST_KEPT:
        missed.append(f"{device}: keep {FIXED.keep} keeps {most:.1%} of a prompt, more than {MOST_KEPT:.0%}")
    right = totals(outcomes)
    for name in ("right", "fixed_right"):
        if right[name] < right["dense_right"] - LOST_ANSWERS:
            missed.append(f"{device}: {right[name]} answers are right, dense {right['dense_right']}")
    if right["right_without_fact"] >= RIGHT_WITHOUT_FACT * len(outcomes):
        missed.append(f"{device}: {right['right_without_fact']} answers are right without their fact")
    return missed


def kept_share(outcomes: Sequence[Outcome]) -> float:
    """The share of all prompts' tokens that the default selection keeps."""
    return sum(outcome.kept.size for outcome in outcomes) / sum(outcome.tokens for outcome in outcomes)


def totals(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Right answers of each kind."""
    kinds = ("dense_right", "right", "fixed_right", "right_without_fact")
    return {kind: sum(getattr(outcome, kind) for outcome in outcomes) for kind in kinds}


def table(
    device: str,
    examples: Sequence[dict[str, Any]],
    outcomes: Sequence[Outcome],
    agreement: Sequence[float] | None,
) -> Table:
    """A row per prompt, and the totals; `agreement` is the share of kept tokens that all devices kept."""
    right = totals(outcomes)
    shown = Table(title=device, show_footer=True)
    for header, footer in (
        ("prompt", "all"),
        ("tokens", str(sum(outcome.tokens for outcome in outcomes))),
        ("dense", str(right["dense_right"])),
        ("status", ""),
        ("kept", f"{kept_share(outcomes):.0%}"),
        ("answer", str(right["right"])),
        ("no fact", str(right["right_without_fact"])),
        (f"keep {FIXED.keep}", ""),
        ("answer", str(right["fixed_right"])),
    ):
        shown.add_column(header, footer=footer, no_wrap=True)
    if agreement is not None:
        shown.add_column("same kept", footer=f"{min(agreement):.1%}", no_wrap=True)
    for number, (example, found) in enumerate(zip(examples, outcomes, strict=True)):
        same = [] if agreement is None else [f"{agreement[number]:.1%}"]
        shown.add_row(f"{number + 1} {example['kind']}", *cells(found), *same)
    return shown


def cells(found: Outcome) -> list[str]:
    """What one device made of one prompt, as `table` shows it."""
    return [
        str(found.tokens),
        mark(found.dense_right),
        found.statuses[0],
        f"{found.kept.size / found.tokens:.0%}",
        mark(found.right),
        mark(found.right_without_fact),
        f"{found.fixed / found.tokens:.0%}",
        mark(found.fixed_right),
    ]


def mark(right: bool) -> str:
    """A right answer, or another."""
    return "right" if right else "-"


if __name__ == "__main__":
    sys.exit(main())
