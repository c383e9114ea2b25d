"""Policy: requests with tools."""

from typing import Any

import pytest

from specprefill_jax.policy import Status, guard, guarded_roles
from specprefill_jax.policy.tool_guard import KEYWORDS, Mode


def request(**signs: Any) -> dict[str, Any]:
    """What the guard looks at, of a request without any sign of tools but these."""
    return {"structured": False, "tools": False, "tool_roles": False, "opening": "A river."} | signs


SIGNS: list[tuple[dict[str, Any], str]] = [
    ({"structured": True}, "the answer has a given structure, and tool_guard is strict"),
    ({"tools": True}, "the request defines tools, and tool_guard is strict"),
    ({"tool_roles": True}, "the conversation has messages of role tool, and tool_guard is strict"),
    ({"opening": "x.get_name()"}, "the first 256 tokens contain 'get_', and tool_guard is strict"),
]


@pytest.mark.parametrize(("sign", "reason"), SIGNS)
def test_strict_skips_at_any_sign_of_tools_and_says_which(sign: dict[str, Any], reason: str):
    assert guard("strict", **request(**sign)) == reason


@pytest.mark.parametrize("sign", [sign for sign, _ in SIGNS])
@pytest.mark.parametrize("mode", ["spans", "off"])
def test_the_other_modes_never_skip_pasted_code_included(mode: Mode, sign: dict[str, Any]):
    assert guard(mode, **request(**sign)) is None


def test_strict_lets_a_prompt_without_tools_through():
    assert guard("strict", **request()) is None


@pytest.mark.parametrize("word", KEYWORDS)
def test_each_of_the_guides_words_is_found_inside_others_and_only_in_lower_case(word: str):
    assert guard("strict", **request(opening=f"a{word}b")) is not None
    assert guard("strict", **request(opening=f"a{word.upper()}b")) is None


def test_a_request_with_tools_keeps_its_definitions_whole_in_mode_spans_only():
    assert guarded_roles("spans", tools=True) == ("system", "tools")
    assert guarded_roles("spans", tools=False) == ()
    assert guarded_roles("off", tools=True) == guarded_roles("strict", tools=True) == ()


def test_the_status_is_the_guides_string():
    assert Status.SKIPPED_TOOL_GUARD == "skipped_tool_guard"
