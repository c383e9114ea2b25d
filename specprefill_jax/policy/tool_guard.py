"""Requests with tools: what is kept whole for them, and when they are not prefilled sparsely at all.

A model that misses part of a tool's definition calls it wrongly, so the guide (v3, "Expanded Tool-Call
Guard") runs every prompt dense that looks like one with tools. Here that is mode "strict". By default the
system part and the tool definitions are kept whole and the rest is prefilled sparsely, because the guide's
words also stand in any pasted code.
"""

from typing import Literal

Mode = Literal["spans", "strict", "off"]

OPENING_TOKENS = 256
"""First tokens of a prompt whose text is searched for the guide's words."""

KEYWORDS = ("function", "tool", "get_", "set_", "search_")
"""The guide's words, in lower case only."""


def guard(mode: Mode, *, structured: bool, tools: bool, tool_roles: bool, opening: str) -> str | None:
    """Why a request is to run dense, or None; only mode "strict" ever gives a reason.

    Args:
        structured: Whether the answer must follow a grammar or a schema.
        tools: Whether the request defines tools.
        tool_roles: Whether the conversation has messages of role tool.
        opening: The text of the prompt's first `OPENING_TOKENS` tokens.
    """
    if mode != "strict":
        return None
    word = next((word for word in KEYWORDS if word in opening), None)
    for found, what in (
        (structured, "the answer has a given structure"),
        (tools, "the request defines tools"),
        (tool_roles, "the conversation has messages of role tool"),
        (word is not None, f"the first {OPENING_TOKENS} tokens contain {word!r}"),
    ):
        if found:
            return f"{what}, and tool_guard is strict"
    return None


def guarded_roles(mode: Mode, *, tools: bool) -> tuple[str, ...]:
    """Parts of a conversation that a request with tools keeps whole, whatever `pin_roles` says."""
    return ("system", "tools") if tools and mode == "spans" else ()
