"""From what a caller gives as a prompt to its tokens, the parts to keep, and the places to come back to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
from jaxtyping import Bool, Int

from specprefill_jax.chat import Chat, Message
from specprefill_jax.engine.values import Prompt
from specprefill_jax.errors import EmptyPrompt
from specprefill_jax.outline import Outline, outline
from specprefill_jax.pins import Pins, pinned_tokens
from specprefill_jax.policy import OPENING_TOKENS, Decision, Status, guard, guarded_roles
from specprefill_jax.selection import segments
from specprefill_jax.settings import Settings

_NO_PINS = Pins()


class PromptOptions(TypedDict, total=False):
    """How a prompt is to be read.

    Keys:
        raw: A text is taken as it is, its control tokens included, and the answer shows its own.
        prefix: What the answer begins with. It is part of the prompt, and the result's text follows it.
        variables: Further names that the chat template reads: `tools`, `enable_thinking`, ...
        pins: Parts of the prompt that are kept whatever their importance.
        structured: Whether the caller will force the answer into a grammar or schema, which the strict tool
            guard wants to know.
    """

    raw: bool
    prefix: str
    variables: Mapping[str, object] | None
    pins: Pins
    structured: bool


@dataclass(frozen=True, eq=False)
class Encoded:
    """A prompt as tokens.

    Attributes:
        tokens: The prompt.
        boundaries: Counts of its first tokens that a later prompt is likely to begin with too.
        pinned: Tokens that are kept whatever their importance; in a conversation also what closes its last
            message and opens the answer, without which a model goes on with the message.
        guard: What forbids to prefill it sparsely, whatever that would save; None: nothing does.
        edges: Of the chunks that it is cut into; None: every `chunk` tokens.
    """

    tokens: Int[np.ndarray, "M"]
    boundaries: tuple[int, ...]
    pinned: Bool[np.ndarray, "M"]
    guard: Decision | None
    edges: Int[np.ndarray, "B"] | None = None


def encode(
    chat: Chat,
    vocabulary: int,
    prompt: Prompt,
    settings: Settings,
    *,
    raw: bool = False,
    prefix: str = "",
    variables: Mapping[str, object] | None = None,
    pins: Pins = _NO_PINS,
    structured: bool = False,
) -> Encoded:
    """The tokens that a prompt stands for, and what is known of its parts; see `PromptOptions`.

    Args:
        vocabulary: Ids from there on are no tokens of the models.

    Raises:
        EmptyPrompt: it has no tokens, or is a message of nothing but space.
        TemplateError: the template refuses it.
        PinError: a pin has no place in it.
        ValueError: an option is given with what it cannot act on, or numbers are no token ids.
    """
    tools = bool((variables or {}).get("tools"))
    default_roles = (*settings.pin_roles, *guarded_roles(settings.tool_guard, tools=tools))
    messages = None if raw else _messages(prompt)
    if messages is not None:
        roles = (*default_roles, *pins.roles)
        found = outline(chat, messages, prefix=prefix, variables=variables, roles=roles)
    elif variables:
        raise ValueError("variables are for the chat template, which raw texts and tokens do not pass")
    elif isinstance(prompt, str):
        if not prompt:
            raise EmptyPrompt("the prompt is empty; give at least one word")
        found = Outline.of_text(chat, prompt + prefix)
    else:
        found = Outline.of_tokens(_tokens(prompt, vocabulary, raw, prefix))
    forbidden = guard(
        settings.tool_guard,
        structured=structured,
        tools=tools,
        tool_roles=any(message.get("role") == "tool" for message in messages or ()),
        opening=chat.decode(found.tokens[:OPENING_TOKENS]) if settings.tool_guard == "strict" else "",
    )
    if forbidden is None and tools and settings.tool_guard == "spans" and "tools" not in found.spans:
        forbidden = "the chat template hides where the tool definitions are, so they cannot be kept whole"
    reason = None if forbidden is None else Decision(Status.SKIPPED_TOOL_GUARD, forbidden)
    pinned = pinned_tokens(pins, found, default_roles)
    pinned[found.opening :] = True
    by_text = settings.chunking == "text"
    edges = segments(chat.borders(found.tokens), settings.chunk) if by_text else None
    return Encoded(found.tokens, found.boundaries, pinned, reason, edges)


def _messages(prompt: Prompt) -> Sequence[Message] | None:
    """The conversation that a prompt is; None for tokens."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise EmptyPrompt("the prompt is empty; give at least one word")
        return [{"role": "user", "content": prompt}]
    if len(prompt) and isinstance(prompt[0], Mapping):
        return list(prompt)  # type: ignore[arg-type]
    return None


def _tokens(prompt: Prompt, vocabulary: int, raw: bool, prefix: str) -> Int[np.ndarray, "M"]:
    """Token ids as they were given."""
    if len(prompt) == 0:
        raise EmptyPrompt("the prompt has no tokens; give at least one")
    if raw:
        raise ValueError("raw is for a text; messages need the template, and tokens are raw already")
    if prefix:
        raise ValueError("prefix is for a text or messages; put its tokens at the end of the prompt's")
    tokens = np.asarray(prompt)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"tokens are whole numbers in one row, not {tokens.dtype} of shape {tokens.shape}")
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise ValueError(f"a token id is outside 0..{vocabulary - 1}, the models' vocabulary")
    return tokens.astype(np.int32)
