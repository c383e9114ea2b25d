"""Qwen3.5's own chat template, and the demo pair's tokenizer with Qwen's control tokens added."""

from pathlib import Path

from specprefill_jax.chat import Chat

ROOT = Path(__file__).parent.parent
TOKENIZER = ROOT / "artifacts" / "demo" / "tokenizer.json"
TEMPLATE = ROOT / "tests" / "data" / "qwen3.5.chat_template.jinja"

WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {}}}},
}


def qwen_chat() -> Chat:
    """As Qwen3.5 reads and writes, but for the words of its vocabulary."""
    chat = Chat.load(TOKENIZER, TEMPLATE, stop_ids=[2])
    names = ("think", "tool_call", "tool_response")
    chat.tokenizer.add_tokens([f"<{slash}{name}>" for name in names for slash in ("", "/")])
    return chat
