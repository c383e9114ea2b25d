"""One request on its way through the engine."""

import dataclasses
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from specprefill_jax.engine.caches import Asked, Caches
from specprefill_jax.engine.clock import Clock, Watcher
from specprefill_jax.policy import Decision
from specprefill_jax.settings import Settings

_DEFAULTS = Settings()
_NAMES = ("temperature", "top_k", "top_p", "min_p", "seed", "deadline", "max_tokens")
_ANSWERING = {name: getattr(_DEFAULTS, name) for name in _NAMES}


@dataclass(frozen=True, eq=False)
class Request:
    """What stays the same while a request runs.

    Attributes:
        tokens: The prompt.
        settings: Its knobs.
        caches: What earlier turns left, and where this one leaves what it read.
        stops: Tokens of the prompt after which a later turn may go on, ascending.
        pinned: Tokens that are kept whatever their importance; None: none.
        guard: What forbids the draft, whatever it would save; None: nothing does.
        edges: Of the chunks that it is cut into; None: every `chunk` tokens.
    """

    tokens: Int[np.ndarray, "M"]
    settings: Settings
    caches: Caches
    clock: Clock
    watcher: Watcher
    stops: tuple[int, ...] = ()
    pinned: Bool[np.ndarray, "M"] | None = None
    guard: Decision | None = None
    edges: Int[np.ndarray, "B"] | None = None

    @property
    def asked(self) -> Asked:
        """Everything that its plan follows from, beside what was read in earlier turns."""
        settings = dataclasses.replace(self.settings, **_ANSWERING)
        pinned = None if self.pinned is None else self.pinned.tobytes()
        return self.tokens.tobytes(), settings, pinned, self.guard

    @property
    def size(self) -> int:
        """Tokens of the prompt."""
        return self.tokens.size
