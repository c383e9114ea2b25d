"""One request: from text to kept positions to an answer. Composes the rooms below; compiles nothing."""

from specprefill_jax.engine.caches import Caches, Readings
from specprefill_jax.engine.clock import Watch
from specprefill_jax.engine.engine import Engine, last
from specprefill_jax.engine.prompt import PromptOptions
from specprefill_jax.engine.track import Track
from specprefill_jax.engine.values import Prompt, Result, Scored, Timings, Usage

__all__ = [
    "Caches",
    "Engine",
    "Prompt",
    "PromptOptions",
    "Readings",
    "Result",
    "Scored",
    "Timings",
    "Track",
    "Usage",
    "Watch",
    "last",
]
