"""One request: from text to kept positions to an answer. Composes the rooms below; compiles nothing."""

from specprefill_jax.engine.clock import Watch
from specprefill_jax.engine.engine import Engine
from specprefill_jax.engine.values import Prompt, Result, Scored, Timings, Usage

__all__ = ["Engine", "Prompt", "Result", "Scored", "Timings", "Usage", "Watch"]
