"""Accuracy and divergence from dense prefill, by what delta layers make of gaps between kept tokens."""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int
from plans import add_plan_options, read_plan
from rich import box
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file
from train_demo.model import CHUNK, NO_GAPS, QUERIES, Gaps, logits

from specprefill_jax.chat import Chat
from specprefill_jax.cli.progress import Waiting
from specprefill_jax.engine.prompt import encode
from specprefill_jax.errors import FileMissing, SpecPrefillError
from specprefill_jax.models.config import TextConfig
from specprefill_jax.quality.evaluation import (
    VARIABLES,
    Plan,
    divergence,
    log_probabilities,
    needed_tokens,
    task_of,
)
from specprefill_jax.quality.statistics import paired_difference, wilson
from specprefill_jax.quality.tasks import Task
from specprefill_jax.selection import select
from specprefill_jax.settings import Settings

DEMO = Path(__file__).resolve().parents[1] / "artifacts" / "demo"
KEEPS = (0.5, 0.2)
END = 64  # tokens of a dense end


class Variant(NamedTuple):
    """What is done about gaps; `end`: as many tokens before the question are kept; `renumbered`: no gaps."""

    gaps: Gaps = NO_GAPS
    end: int = 0
    renumbered: bool = False


KEPT_ONLY = "kept tokens only"
VARIANTS: dict[str, Variant] = {
    KEPT_ONLY: Variant(),
    "decay 1": Variant(Gaps(decay=1)),
    "decay 0.1": Variant(Gaps(decay=0.1)),
    "decay 0.01": Variant(Gaps(decay=0.01)),
    "convolution cut": Variant(Gaps(cut=True)),
    "convolution cut, decay 0.1": Variant(Gaps(decay=0.1, cut=True)),
    f"the last {END} tokens dense": Variant(end=END),
    "positions without gaps": Variant(renumbered=True),
}


@dataclass(frozen=True, eq=False)
class Asked:
    """A prompt with its right answer behind it: `tokens`, of which the first `prompt` are the prompt's."""

    tokens: Int[np.ndarray, " T"]
    prompt: int
    needed: Int[np.ndarray, " K"]
    pinned: Bool[np.ndarray, " M"]


class Answer(NamedTuple):
    """Whether greedy decoding gives the whole answer, and the first token's log probabilities."""

    right: bool
    first: Float[np.ndarray, " V"]


Forward = Callable[[Gaps, np.ndarray, np.ndarray], np.ndarray]
"""Logits of padded tokens at positions."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="ablate_gaps", description=__doc__)
    parser.add_argument("folder", type=Path, help="what training left there")
    add_plan_options(parser, lengths="1000", count=100)
    options = parser.parse_args()
    try:
        ablate(options.folder, read_plan(options))
    except SpecPrefillError as error:
        print(f"ablate_gaps: error: {error}", file=sys.stderr)
        return 2
    return 0


def ablate(folder: Path, plan: Plan) -> None:
    chat = Chat.load(DEMO / "tokenizer.json", DEMO / "chat_template.jinja", [2])
    forward = load(folder)
    dense: list[Answer] = []
    found: dict[tuple[float, str], list[Answer]] = defaultdict(list)
    with Waiting() as waiting:
        for number, asked in enumerate(prompts(chat, plan)):
            waiting("prompts", number, plan.count * len(plan.cells))
            every = np.arange(asked.tokens.size, dtype=np.int32)
            dense.append(answer(forward, asked, every, Variant()))
            for keep in KEEPS:
                for name, variant in VARIANTS.items():
                    kept = keep_of(asked, keep, variant.end, number)
                    found[keep, name].append(answer(forward, asked, kept, variant))
    console = Console(file=sys.stdout, width=120)
    console.print(f"{len(dense)} prompts: {', '.join(map(str, plan.cells))}\n", soft_wrap=True)
    for keep in KEEPS:
        each = {name: found[keep, name] for name in VARIANTS}
        console.print(table(keep, dense, each), highlight=False)


def load(folder: Path) -> Forward:
    """A model that was trained, compiled once for each length and way with gaps.

    Raises:
        FileMissing: there is none.
    """
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise FileMissing(
                f"{folder / name} is not there; `scripts/train_demo/run slow {folder}` trains such a model"
            )
    config = TextConfig.from_hf(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    parameters = {name: jnp.asarray(p) for name, p in load_file(folder / "model.safetensors").items()}
    compiled: dict[Gaps, Callable[..., jax.Array]] = {}

    def forward(gaps: Gaps, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
        if gaps not in compiled:
            compiled[gaps] = jax.jit(partial(logits, config, gaps=gaps))
        return np.asarray(compiled[gaps](parameters, tokens[None], positions=positions[None])[0])

    return forward


def prompts(chat: Chat, plan: Plan) -> Iterator[Asked]:
    for index in range(plan.count):
        for cell in plan.cells:
            yield ask(chat, task_of(chat, plan, cell, index))


def ask(chat: Chat, task: Task) -> Asked:
    encoded = encode(
        chat, chat.vocabulary, task.messages, Settings(), prefix=task.prefix, variables=VARIABLES
    )
    tokens = np.concatenate([encoded.tokens, chat.encode(f" {task.answer}")])
    return Asked(tokens, encoded.tokens.size, needed_tokens(chat, task), encoded.pinned)


def keep_of(asked: Asked, keep: float, end: int, number: int) -> Int[np.ndarray, " N"]:
    """What is asked for, then other chunks at random: the model is tested here, not a draft. Answers stay.

    Args:
        end: As many tokens before the last chunk are kept in any case; the budget is the same.
    """
    size = asked.prompt
    scores = np.repeat(np.random.default_rng(number).random(-(-size // 32)), 32)[:size]
    scores[asked.needed] += size
    pinned = asked.pinned.copy()
    pinned[max(0, size - end) :] |= end > 0
    kept = select(scores, Settings(keep=keep, max_keep=0), pinned).kept
    return np.concatenate([kept, np.arange(size, asked.tokens.size, dtype=np.int32)])


def answer(forward: Forward, asked: Asked, kept: Int[np.ndarray, " N"], variant: Variant) -> Answer:
    """Right if each token of the answer is the likeliest after those before it, as greedy decoding has it."""
    count = asked.tokens.size - asked.prompt
    unit = QUERIES if kept.size > QUERIES else CHUNK
    padding = -kept.size % unit
    positions = np.arange(kept.size, dtype=np.int32) if variant.renumbered else kept
    after = positions[-1] + 1 + np.arange(padding, dtype=np.int32)
    # The mean decay that a skipped token counts by is taken over the padding too: one and the same token
    # there would move it by how many there are, the text's own hardly do.
    tokens = np.resize(asked.tokens[kept], kept.size + padding).astype(np.int32)
    found = forward(variant.gaps, tokens, np.concatenate([positions, after]))
    found = found[kept.size - count - 1 : kept.size - 1]
    right = bool((found.argmax(axis=-1) == asked.tokens[-count:]).all())
    return Answer(right, log_probabilities(found[0]))


def table(keep: float, dense: Sequence[Answer], found: Mapping[str, Sequence[Answer]]) -> Table:
    made = Table(title=f"keep {keep:g}", box=box.MARKDOWN, title_justify="left")
    made.add_column("delta layers")
    for heading in ("right, %", "minus dense", "minus kept only", "KL to dense"):
        made.add_column(heading, justify="right")
    made.add_row("dense", shown(dense), "", "", "")
    plain = found[KEPT_ONLY]
    for name, answers in found.items():
        apart = np.mean([divergence(a.first, b.first) for a, b in zip(dense, answers, strict=True)])
        against = "" if answers is plain else minus(answers, plain)
        made.add_row(name, shown(answers), minus(answers, dense), against, f"{apart:.3f}")
    return made


def shown(answers: Sequence[Answer]) -> str:
    value, low, high = (100 * each for each in wilson(sum(a.right for a in answers), len(answers)))
    return f"{value:.1f} ({low:.1f} to {high:.1f})"


def minus(answers: Sequence[Answer], other: Sequence[Answer]) -> str:
    pairs = [(a.right, b.right) for a, b in zip(answers, other, strict=True)]
    counts = (pairs.count(each) for each in ((True, True), (True, False), (False, True), (False, False)))
    value, low, high = (100 * each for each in paired_difference(*counts))
    return f"{value:+.1f} ({low:+.1f} to {high:+.1f})"


if __name__ == "__main__":
    sys.exit(main())
