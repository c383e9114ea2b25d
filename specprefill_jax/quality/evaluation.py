"""Prompts with known answers, answered by one artifact densely and in ways that keep less of them."""

import dataclasses
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from specprefill_jax.chat import Chat
from specprefill_jax.engine import Engine, Result
from specprefill_jax.errors import ArtifactError, SettingError, TemplateError
from specprefill_jax.outline import Span, tokens_over
from specprefill_jax.quality.facts import ValueKind
from specprefill_jax.quality.tasks import SUITES, Task, Wanted, make_task
from specprefill_jax.quality.words import Filler
from specprefill_jax.selection import token_budget
from specprefill_jax.settings import Settings

DEPTHS = 10
"""Equal parts of a document, in the middles of which the fact lies in turn."""

ANSWER_ROOM = 64
"""Tokens that the longest prompts leave for the answer; a line to quote has the most."""

VARIABLES = {"enable_thinking": False}
"""For the chat template: an answer begins at once, so that its first words can be given. Qwen's reads it, and
those without a think block do not."""

MORE = 4
"""Tokens that an answer may be longer than the right one, so that one which goes on is not taken for it."""


@dataclass(frozen=True)
class Way:
    """How prompts are read: a name, and the settings of the request."""

    name: str
    settings: Settings


class Cell(NamedTuple):
    """What some of the prompts have in common; `tokens` is their length."""

    suite: str
    filler: Filler
    tokens: int

    def __str__(self) -> str:
        return f"{self.suite}, {self.filler}, {self.tokens:,} tokens"


@dataclass(frozen=True)
class Plan:
    """An evaluation.

    Attributes:
        ways: The first is dense: the others are compared with it.
        count: Prompts in a cell.
        seed: Other seeds give other prompts.
        values: Kinds of values that facts have.
        purpose: What the prompts are for: other purposes have other prompts.
    """

    suites: tuple[str, ...]
    fillers: tuple[Filler, ...]
    lengths: tuple[int, ...]
    ways: tuple[Way, ...]
    count: int
    seed: int
    values: tuple[ValueKind, ...]
    purpose: Literal["eval", "calibrate"] = "eval"

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Every suite with every filler that it has, at every length."""
        return tuple(
            Cell(suite, filler, tokens)
            for suite in self.suites
            for filler in SUITES[suite].fillers
            if filler in self.fillers
            for tokens in self.lengths
        )


@dataclass(frozen=True)
class Outcome:
    """What came of one prompt in one way.

    Attributes:
        suite, filler, tokens, index, depth: Which prompt it was.
        way: The name of the way.
        text, answer: What was answered, and what is right.
        right: Whether the two agree; see `is_right`.
        prompt, kept: Tokens of the prompt, and those that the target read.
        budget: The most that the way may keep of it.
        whole: Whether every token of what the answer follows from was kept.
        agrees: Whether the likeliest first token is that of dense prefill.
        divergence: Kullback-Leibler divergence of the first token's distribution from the dense one, in nats.
        status: What became of the request.
    """

    suite: str
    filler: Filler
    tokens: int
    index: int
    depth: float
    way: str
    text: str
    answer: str
    right: bool
    prompt: int
    kept: int
    budget: int
    whole: bool
    agrees: bool
    divergence: float
    status: str


def make_ways(base: Settings, keep: Sequence[float], mass: Sequence[float] = ()) -> tuple[Way, ...]:
    """Dense prefill, then one way for each fraction of tokens and for each share of attention to keep.

    Nothing else bounds what is kept, and answers are greedy. All else is as in `base`: what a real request
    with these settings pins is pinned here too.
    """
    base = dataclasses.replace(base, mode="sparse", max_keep=0, temperature=0.0)
    dense = Way("dense", dataclasses.replace(base, mode="dense"))
    fractions = [
        Way(f"keep {share:g}", dataclasses.replace(base, keep=share, select_mode="chunk")) for share in keep
    ]
    masses = [
        Way(
            f"mass {share:g}", dataclasses.replace(base, cumulative_mass=share, select_mode="mass", keep=None)
        )
        for share in mass
    ]
    return (dense, *fractions, *masses)


def longest_prompt(engine: Engine, settings: Settings, *, in_one_pass: bool) -> int:
    """Most tokens of a prompt that the target can read densely and answer.

    Args:
        in_one_pass: Whether the draft is to read it in one pass too; a longer one it reads by windows.
    """
    target = engine.target
    most = min(target.largest_capacity, target.model.positions) - ANSWER_ROOM
    if in_one_pass and engine.draft is not None:
        draft = engine.draft
        most = min(most, min(draft.largest_capacity, draft.model.positions) - settings.lookahead)
    return most


def evaluate(engine: Engine, plan: Plan, cell: Cell) -> Iterator[tuple[Outcome, ...]]:
    """Every prompt of a cell in every way: as many outcomes at a time as there are ways.

    The target reads each prompt once in each way; the draft once for all ways that score it alike.

    Raises:
        ArtifactError: there is no draft.
        SettingError: the cell's prompts are too short for its suite.
        EvaluationMissing: the suite needs a package that is not installed.
        TemplateError: the chat template refuses a prompt, or changes its text.
        and all that `Engine.generate` raises.
    """
    if engine.draft is None:
        raise ArtifactError(f"without a draft there is only dense prefill, and {engine.no_draft}")
    for index in range(plan.count):
        yield ask(engine, task_of(engine.chat, plan, cell, index), index, plan.ways)


def task_of(chat: Chat, plan: Plan, cell: Cell, index: int) -> Task:
    """A cell's prompt: the same for all ways, and independent of all other cells' prompts.

    Raises:
        SettingError, EvaluationMissing: as `evaluate`.
    """

    def count(text: str) -> int:
        return chat.encode(text).size

    def measure(task: Task) -> int:
        return count(prompt_text(chat, task))

    depth = (index % DEPTHS + 0.5) / DEPTHS
    wanted = Wanted(cell.filler, cell.tokens, depth, plan.values, count)
    seed = f"{plan.purpose}/{plan.seed}/{cell.suite}/{cell.filler}/{cell.tokens}/{index}"
    return make_task(cell.suite, wanted, seed, measure)


def ask(engine: Engine, task: Task, index: int, ways: Sequence[Way]) -> tuple[Outcome, ...]:
    """One prompt in every way, of which the first is dense; each is a request like any other.

    So the system part and the opening of the answer, its prefix included, are pinned as the settings say.
    """
    chat = engine.chat
    needed = needed_tokens(chat, task)
    most = min(chat.encode(f" {task.answer}").size + MORE, ANSWER_ROOM)
    outcomes: list[Outcome] = []
    expected: Float[np.ndarray, "V"] | None = None
    for way in ways:
        settings = dataclasses.replace(way.settings, max_tokens=most)
        result = engine.generate(task.messages, settings, prefix=task.prefix, variables=VARIABLES)
        found = log_probabilities(result.logits[: chat.vocabulary])
        expected = found if expected is None else expected
        outcomes.append(_outcome(task, index, way, result, needed, expected, found))
    return tuple(outcomes)


def prompt_text(chat: Chat, task: Task) -> str:
    """A task's prompt as the models read it, up to where the answer goes on."""
    return chat.render(task.messages, prefix=task.prefix, variables=VARIABLES)


def is_right(text: str, answer: str) -> bool:
    """Whether a text is the answer, space around it aside: nothing may follow but marks, or a new line.

    What comes behind the marks does not count. A chat model ends its sentence; a value that goes on with
    other letters or digits, or with another word, is another value.
    """
    found = text.strip()
    return found.startswith(answer) and _END.fullmatch(found[len(answer) :]) is not None


_END = re.compile(r"""(?:[.,;:!?'"`*)]+(?:\s.*)?|[ \t]*\n.*)?""", re.DOTALL)


def needed_tokens(chat: Chat, task: Task) -> Int[np.ndarray, "K"]:
    """Every token that has a character of what the answer follows from.

    Raises:
        TemplateError: the template changes the contents of messages, so that these are not to be found.
    """
    text = prompt_text(chat, task)
    _, offsets = chat.encode_with_offsets(text)
    starts, end = [], 0
    for message in task.messages:
        content = str(message["content"])
        place = text.find(content.strip(), end)  # templates cut space off the ends
        if place < 0:
            raise TemplateError(
                "the chat template changes the text of messages, so that it cannot be seen whether the facts "
                "in it were kept; evaluate with a template that renders contents as they are"
            )
        starts.append(place - (len(content) - len(content.lstrip())))
        end = place + len(content.strip())
    spans = [
        tokens_over(offsets, Span(starts[span.message] + span.start, starts[span.message] + span.end))
        for span in task.spans
    ]
    return np.unique(np.concatenate([np.arange(span.start, span.end) for span in spans]))


def log_probabilities(logits: Float[np.ndarray, "V"]) -> Float[np.ndarray, "V"]:
    """Natural logarithms of the probabilities that logits stand for."""
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def divergence(expected: Float[np.ndarray, "V"], found: Float[np.ndarray, "V"]) -> float:
    """Kullback-Leibler divergence of `found` from `expected`, both log probabilities, in nats.

    It is what a token drawn from `expected` surprises more under `found`: 0 where they are equal.
    """
    return max(float(np.sum(np.exp(expected) * (expected - found))), 0.0)


def check_lengths(lengths: Collection[int], most: int) -> None:
    """Raises SettingError for a length that is no length, or that is more than `most`."""
    for tokens in lengths:
        if not 1 <= tokens <= most:
            raise SettingError(
                f"lengths={tokens}: with this artifact, lengths are from 1 to {most} tokens, because prompts "
                f"are read densely too, and {ANSWER_ROOM} slots are left for the answer"
            )


def _outcome(
    task: Task,
    index: int,
    way: Way,
    result: Result,
    needed: Int[np.ndarray, "K"],
    expected: Float[np.ndarray, "V"],
    found: Float[np.ndarray, "V"],
) -> Outcome:
    prompt = result.usage.prompt_tokens
    return Outcome(
        suite=task.suite,
        filler=task.filler,
        tokens=task.tokens,
        index=index,
        depth=task.depth,
        way=way.name,
        text=result.text,
        answer=task.answer,
        right=is_right(result.text, task.answer),
        prompt=prompt,
        kept=result.kept.size,
        budget=prompt if way.settings.mode == "dense" else min(token_budget(prompt, way.settings), prompt),
        whole=bool(np.isin(needed, result.kept).all()),
        agrees=bool(expected.argmax() == found.argmax()),
        divergence=divergence(expected, found),
        status=str(result.timings.status),
    )
