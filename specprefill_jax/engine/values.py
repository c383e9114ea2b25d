"""What goes into a request and what comes out of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int

from specprefill_jax.chat import Message
from specprefill_jax.policy import Status
from specprefill_jax.scoring import Window
from specprefill_jax.selection import Selection

Prompt = str | Sequence[Message] | Sequence[int] | Int[np.ndarray, "M"]
"""A user's message, a conversation, or token ids that are taken as they are."""

Scoring = Literal["continuous", "windows"]


@dataclass(frozen=True, eq=False)
class Plan:
    """The positions that the target reads, and how it came to that.

    `draft_read`, `looked_ahead` and `remembered` are as in `Timings`. Earlier turns decided about the first
    `base` tokens of the prompt.
    """

    kept: Int[np.ndarray, "N"]
    status: Status
    reason: str
    forced: int = 0
    pinned: int = 0
    mode: Literal["mass", "chunk", "dense"] = "dense"
    scoring: Scoring | None = None
    draft_read: int = 0
    looked_ahead: int = 0
    remembered: bool = False
    base: int = 0


@dataclass(frozen=True)
class Usage:
    """Tokens read and written. The stop token that ends an answer is neither."""

    prompt_tokens: int
    completion_tokens: int

    def to_json(self) -> dict[str, int]:
        """The counts and their sum."""
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


@dataclass(frozen=True)
class Timings:
    """What speculative prefill did, and the time of each phase in milliseconds.

    Attributes:
        status, reason: What became of the request, and why.
        prompt, kept, forced: Tokens of the prompt, those read by the target, and of these the ones that were
            kept whatever their importance.
        pinned: How many of the forced tokens the caller or a role asked for, or open the answer.
        reused: Tokens of the prompt that the target was done with from earlier turns, whether it had read
            them or left them out.
        draft_read: Tokens that the draft read for this request; by windows, those of overlaps twice.
        looked_ahead: Steps of the draft beyond the prompt.
        remembered: Whether the same prompt was scored before, so that the draft had nothing to do.
        mode: How chunks were selected; "dense" where none were.
        scoring: How the draft read the prompt; None where it did not.
        phases: Phases up to the first token; they add up to `first_token`.
        first_token: From the request to the first token.
        decode: From the first token to the last.
    """

    status: Status
    reason: str
    prompt: int
    kept: int
    forced: int
    pinned: int
    reused: int
    draft_read: int
    looked_ahead: int
    remembered: bool
    mode: Literal["mass", "chunk", "dense"]
    scoring: Scoring | None
    phases: Mapping[str, float]
    first_token: float
    decode: float

    def to_json(self) -> dict[str, Any]:
        """`specprefill` holds the status, `specprefill_detail` what led to it; times are milliseconds."""
        return {
            "specprefill": str(self.status),
            "specprefill_detail": {
                "prompt": self.prompt,
                "kept": self.kept,
                "forced": self.forced,
                "pinned": self.pinned,
                "reused": self.reused,
                "draft_read": self.draft_read,
                "looked_ahead": self.looked_ahead,
                "remembered": self.remembered,
                "mode": self.mode,
                "scoring": self.scoring,
                "reason": self.reason,
                "phases": _rounded(self.phases),
            },
            "time_to_first_token_ms": round(self.first_token, 3),
            "decode_ms": round(self.decode, 3),
        }


@dataclass(frozen=True)
class Result:
    """An answer: its text and tokens without the stop token, and how it came about.

    `finish` says whether a stop token ended it or `max_tokens` did. `kept` are the positions that the target
    read, ascending, and `logits` those of the first token, from which it was sampled.
    """

    text: str
    tokens: tuple[int, ...]
    finish: Literal["stop", "length"]
    usage: Usage
    timings: Timings
    kept: Int[np.ndarray, "N"] = field(compare=False, repr=False)
    logits: Float[np.ndarray, "V"] = field(compare=False, repr=False)

    def to_json(self) -> dict[str, Any]:
        """What `specprefill run --json` prints."""
        return {
            "text": self.text,
            "tokens": list(self.tokens),
            "finish": self.finish,
            "usage": self.usage.to_json(),
            "timings": self.timings.to_json(),
        }


@dataclass(frozen=True, eq=False)
class Scored:
    """What the draft found important in a prompt, and what would be kept of it.

    Attributes:
        tokens: The prompt.
        pieces: The text of each token; a character of several tokens is with its last. Joined: the prompt.
        importance: One score per token, as pooled from attention: neither normalized nor boosted.
        chunk: The setting: tokens per chunk, or about so many where the text's borders make the chunks.
        selection: The kept positions, and the edges and the scores of the chunks.
        scoring: How the draft read the prompt.
        windows: What it read together; one window when continuous.
        phases: Milliseconds of each phase.
    """

    tokens: Int[np.ndarray, "M"]
    pieces: tuple[str, ...]
    importance: Float[np.ndarray, "M"]
    chunk: int
    selection: Selection
    scoring: Scoring
    windows: tuple[Window, ...]
    phases: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """What `specprefill score --json` prints."""
        selection = self.selection
        return {
            "prompt": selection.prompt,
            "kept": selection.kept.tolist(),
            "forced": selection.forced,
            "mode": selection.mode,
            "budget": selection.budget,
            "chunk": self.chunk,
            "edges": selection.edges.tolist(),
            "chunk_scores": selection.chunk_scores.tolist(),
            "scoring": self.scoring,
            "windows": [window._asdict() for window in self.windows],
            "tokens": self.tokens.tolist(),
            "pieces": list(self.pieces),
            "importance": self.importance.tolist(),
            "phases": _rounded(self.phases),
        }


def _rounded(phases: Mapping[str, float]) -> dict[str, float]:
    """To the microsecond: more is noise."""
    return {name: round(milliseconds, 3) for name, milliseconds in phases.items()}
