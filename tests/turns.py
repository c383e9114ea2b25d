"""Conversations on the models of tests/engine/fake.py: prompts, settings, and what a turn should say."""

import numpy as np
from jaxtyping import Int

from specprefill_jax.engine import Result
from specprefill_jax.settings import Settings
from tests.engine.fake import Fake, FakeProgram, make, prompt

SPARSE = Settings(mode="sparse", max_tokens=3, select_mode="chunk", keep=0.3)
DENSE = Settings(mode="dense", max_tokens=3)
FIRST = prompt(320, needle_at=130)


def follow_up(
    result: Result, before: Int[np.ndarray, "M"], size: int, needle_at: int
) -> Int[np.ndarray, "_"]:
    """The next prompt: the last one, its answer, and `size` more tokens with a needle among them."""
    answer = np.array(result.tokens, np.int32)
    return np.concatenate([before, answer, prompt(size, needle_at=needle_at)]).astype(np.int32)


def fresh_answer(result: Result, tokens: Int[np.ndarray, "M"], settings: Settings) -> tuple[int, ...]:
    """What a target says that reads the kept tokens in one go, from nothing."""
    return make().engine.answer_from(tokens, result.kept, settings).tokens


def read(program: FakeProgram) -> int:
    return sum(len(tokens) for tokens, _ in program.of("prefill"))


def next_turn(fake: Fake) -> None:
    """Forget the calls of the turns so far."""
    fake.draft.calls.clear()
    fake.target.calls.clear()
