"""A fake pair that finds facts: its target answers right where the fact was kept, whatever else was."""

import numpy as np
from jaxtyping import Float

from specprefill_jax.quality.evaluation import Plan, make_ways
from specprefill_jax.quality.words import VALUES
from specprefill_jax.settings import Settings
from tests.engine.fake import CHAT, Attend, Fake, make

VALUE_TOKENS = {CHAT.tokenizer.token_to_id(f"Ġ{value}") for value in VALUES} - {None}
EQUALS = CHAT.tokenizer.token_to_id("Ġ=")
STOP = 2
UNKNOWN = 300


def answer(read: list[tuple[int, int]]) -> int:
    """After ` =` the value that was read, which in documents of code only the fact has; then the end."""
    tokens = [token for token, _ in read]
    if tokens[-1] != EQUALS:
        return STOP
    return next((token for token in tokens if token in VALUE_TOKENS), UNKNOWN)


def to_values(tokens: list[int]) -> Float[np.ndarray, "n"]:
    """Attention to the fact."""
    return np.array([0.5 if token in VALUE_TOKENS else 0.001 * (token % 5) for token in tokens], np.float32)


def from_values(tokens: list[int]) -> Float[np.ndarray, "n"]:
    """Attention to anything but the fact."""
    return np.array(
        [0.0 if token in VALUE_TOKENS else 0.1 + 0.001 * (token % 5) for token in tokens], np.float32
    )


def oracle(attend: Attend = to_values) -> Fake:
    """The pair; `attend` is what its draft looks at."""
    return make(speak=answer, attend=attend)


def plan(
    *keep: float, count: int = 3, suites: tuple[str, ...] = ("needle",), lengths: tuple[int, ...] = (400,)
) -> Plan:
    """One fact in code-like documents, dense and with fractions kept."""
    # Without pooling, and in small chunks, what is kept is what the draft looks at.
    ways = make_ways(Settings(pool=0, chunk=8, boost_first_n=0, boost_last_n=0), keep)
    return Plan(suites, ("code",), lengths, ways, count, 0, ("name",))
