"""Where the parts of a rendered conversation are: system and tools, messages, the opening of the answer.

Nothing about any template is written down here. A place is found by rendering a part of the conversation, or
the whole with one content replaced, and comparing the texts. A template that refuses such a rendering, or
changes more than the content, hides that place; that is never an error.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from specprefill_jax.chat import Chat, Message
from specprefill_jax.errors import PinError, TemplateError
from specprefill_jax.settings import ROLES

Render = Callable[[Sequence[Message], bool], str | None]
"""Text of messages, with or without the opening of an answer; None where the template refuses them."""


class Span(NamedTuple):
    """Tokens, or characters, `start` to `end - 1`."""

    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Outline:
    """A prompt and where its parts are.

    Attributes:
        tokens: The prompt.
        text: What they were encoded from; None for a prompt that was given as tokens.
        offsets: Characters of `text` that each token stands for, start and end; no rows without a text.
        boundaries: Counts of first tokens that later prompts are likely to begin with too, ascending, none of
            them 0 or the whole prompt: after the system part and the tools (and what opens the first user
            message), after the last user message, and before the opening of the answer.
        opening: Count of first tokens up to the end of the last content: behind it the template closes that
            message and opens the answer. The whole prompt where that is not known.
        spans: Token spans of each role that was asked for. "system" and "tools" are everything up to the end
            of both; the others are contents of messages, without what the template puts around them. A role
            that the conversation lacks has no spans; one whose place the template hides is not in here.
    """

    tokens: Int[np.ndarray, "M"]
    text: str | None
    offsets: Int[np.ndarray, "K 2"]
    boundaries: tuple[int, ...]
    opening: int
    spans: Mapping[str, tuple[Span, ...]]

    @classmethod
    def of_text(cls, chat: Chat, text: str) -> "Outline":
        """A text that is taken as it is: nothing is known about its parts."""
        tokens, offsets = chat.encode_with_offsets(text)
        return cls(tokens, text, offsets, (), tokens.size, {})

    @classmethod
    def of_tokens(cls, tokens: Int[np.ndarray, "M"]) -> "Outline":
        """Tokens that are taken as they are."""
        return cls(tokens, None, np.zeros((0, 2), dtype=np.int32), (), tokens.size, {})


def outline(
    chat: Chat,
    messages: Sequence[Message],
    *,
    prefix: str = "",
    variables: Mapping[str, object] | None = None,
    roles: Sequence[str] = (),
) -> Outline:
    """Renders and encodes a conversation, and finds its parts.

    It costs one encoding and four renderings, of which one is of the system part alone; one more where
    messages follow the last user message, and one for each message of `roles` but the last.

    Args:
        prefix, variables: As for `Chat.render`; `tools` among the variables are tool definitions.
        roles: Names of `settings.ROLES` whose spans are wanted.

    Raises:
        TemplateError: there is no template, no message, or the template refuses these messages.
        PinError: a role is unknown.
    """
    check_roles(roles)

    def render(part: Sequence[Message], opening: bool) -> str | None:
        try:
            return chat.render(part, add_generation_prompt=opening, variables=variables)
        except TemplateError:
            return None

    @cache
    def place(index: int) -> Span | None:
        return _content(rendered, messages, index, render)

    rendered = chat.render(messages, variables=variables)
    text = rendered + prefix
    tokens, offsets = chat.encode_with_offsets(text)
    system = tokens_before(offsets, _system_end(rendered, messages, render))
    ends = [tokens_before(offsets, end) for end in _turn_ends(rendered, messages, render)]
    spans: dict[str, tuple[Span, ...]] = {}
    for role in dict.fromkeys(roles):
        if role in ("system", "tools"):
            found = _system_spans(role, system, messages, variables)
        else:
            found = _contents(messages, _indices(messages, role), offsets, place)
        if found is not None:
            spans[role] = found
    boundaries = sorted({count for count in (system, *ends) if 0 < count < tokens.size})
    content = place(len(messages) - 1)
    opening = tokens.size if content is None else tokens_before(offsets, content.end)
    return Outline(tokens, text, offsets, tuple(boundaries), opening, spans)


def check_roles(roles: Sequence[str]) -> None:
    """Raises PinError for a role that is not one of `settings.ROLES`."""
    if unknown := [role for role in roles if role not in ROLES]:
        raise PinError(f"{unknown[0]!r} is no role that can be pinned; known are {', '.join(ROLES)}")


def tokens_over(offsets: Int[np.ndarray, "M 2"], characters: Span) -> Span:
    """Every token that has one of `characters`, of which there must be at least one."""
    first = np.searchsorted(offsets[:, 1], characters.start, side="right")
    last = np.searchsorted(offsets[:, 0], characters.end, side="left")
    return Span(int(first), int(last))


def tokens_before(offsets: Int[np.ndarray, "M 2"], end: int) -> int:
    """How many tokens end at character `end` or before it."""
    return int(np.searchsorted(offsets[:, 1], end, side="right"))


def _is_system(message: Message) -> bool:
    return message.get("role") == "system"


def _system_end(rendered: str, messages: Sequence[Message], render: Render) -> int:
    """Characters that every conversation with this system part and these tools begins with; 0 if hidden.

    They are what stands before the first user message, and are found with a mark in place of that message.
    """
    system = list(takewhile(_is_system, messages))
    like = messages[len(system)].get("content") if len(system) < len(messages) else ""
    mark = _mark(rendered)
    probe = render([*system, {"role": "user", "content": _in_form_of(like, mark)}], False)
    before, found, _ = (probe or "").partition(mark)
    return len(before) if found and rendered.startswith(before) else 0


def _system_spans(
    role: str, system: int, messages: Sequence[Message], variables: Mapping[str, object] | None
) -> tuple[Span, ...] | None:
    """The first `system` tokens, if they hold what `role` names; None if they are hidden."""
    tools = bool((variables or {}).get("tools"))
    if system and (tools or role == "system"):
        return (Span(0, system),)
    return None if tools or (role == "system" and _is_system(messages[0])) else ()


def _turn_ends(rendered: str, messages: Sequence[Message], render: Render) -> list[int]:
    """Ends of the last user message and of the last message, with what the template puts after them."""
    parts = {index + 1 for index in _indices(messages, "last_user")} | {len(messages)}
    bodies = [render(messages[:count], False) for count in sorted(parts)]
    return [len(body) for body in bodies if body is not None and rendered.startswith(body)]


def _indices(messages: Sequence[Message], role: str) -> list[int]:
    wanted = "user" if role == "last_user" else role
    indices = [index for index, message in enumerate(messages) if message.get("role") == wanted]
    return indices[-1:] if role == "last_user" else indices


def _contents(
    messages: Sequence[Message],
    indices: Sequence[int],
    offsets: Int[np.ndarray, "M 2"],
    place: Callable[[int], Span | None],
) -> tuple[Span, ...] | None:
    """Token spans of the contents of the messages at `indices`; None if one of them is hidden."""
    places = [place(index) for index in indices if not _is_empty(messages[index].get("content"))]
    if None in places:
        return None
    return tuple(tokens_over(offsets, found) for found in places if found and found.start < found.end)


def _content(rendered: str, messages: Sequence[Message], index: int, render: Render) -> Span | None:
    """Characters of one message's content: what is left when it is replaced by one character, a mark.

    The text before the mark and the text after it must be as they are, or the place is hidden.
    """
    mark, message = _mark(rendered), messages[index]
    marked = {**message, "content": _in_form_of(message.get("content"), mark)}
    probe = render([*messages[:index], marked, *messages[index + 1 :]], True)
    before, found, after = (probe or "").partition(mark)
    end = len(rendered) - len(after)
    if found and len(before) <= end and rendered.startswith(before) and rendered.endswith(after):
        return Span(len(before), end)
    return None


def _mark(text: str) -> str:
    """A character that `text` does not have: the first such of those for private use, which nobody writes."""
    return next(letter for letter in map(chr, range(0xE000, 0x110000)) if letter not in text)


def _in_form_of(content: object, text: str) -> object:
    """`text` as a list of parts if `content` is one: some templates read only these, some only strings."""
    return text if content is None or isinstance(content, str) else [{"type": "text", "text": text}]


def _is_empty(content: object) -> bool:
    return content is None or (isinstance(content, str) and not content.strip()) or content == []
