"""What the recorded traffic in the Messages API means, from Anthropic's API and from OpenCode, which speaks it too."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

from adapters.errors import ErrorClass
from tests.fakes.recorded import Case, Meaning, Recorded, events_end

_F, _O, _T = ErrorClass.FATAL, ErrorClass.OURS, ErrorClass.TRANSIENT
_ERRORS: dict[str, Meaning] = {
    "anthropic_messages/err400_bad_request": (_F, None, False, False),
    "anthropic_messages/err400_context_length": (_F, None, False, False),
    "anthropic_messages/err400_tool_result_missing": (_F, None, False, False),
    "anthropic_messages/err401": (_O, None, False, True),
    "anthropic_messages/err401_old": (_O, None, False, True),
    "anthropic_messages/err404_model": (_O, None, False, False),
    "anthropic_messages/err413_request_too_large": (_F, None, False, False),
    "anthropic_messages/err429_rate_limited_short": (_T, None, True, False),
    "anthropic_messages/err429_retry_after": (_T, 7.0, True, False),
    # More than a whole minute's allowance in one request: waiting does not help.
    "anthropic_messages/err429_should_not_retry": (_O, None, False, False),
    # The reset is said to have been in 1970; the wait is told apart from it.
    "anthropic_messages/err429_should_retry_reset_1970": (_T, 41.0, True, False),
    "anthropic_messages/err500_should_retry_false": (_O, None, False, False),
    "anthropic_messages/err529_overloaded": (_T, None, False, False),
    "anthropic_messages/err529_overloaded_small": (_T, None, False, False),
}
_ERRORS_IN_200: dict[str, ErrorClass] = {
    "anthropic_messages/stream_error_mid_text": _T,
}


def _check(name: str, told: dict[str, Any], facts: dict[str, Any]) -> None:
    assert told["choices"].keys() == {"0"}
    choice = told["choices"]["0"]
    assert choice["end"][1] == facts["native_stop"]
    blocks = facts.get("blocks")
    if blocks is None:
        assert choice["text"] == facts.get("text", "")
        _check_calls(choice, [(c["id"], c["name"], c["input"]) for c in facts.get("tool_calls", [])])
    else:
        assert choice["text"] == "".join(block.get("text", "") for block in blocks if block["type"] == "text")
        _check_calls(
            choice,
            [
                (b["id"], b["name"], json.loads(b["arguments"] or "{}") if _parses(b["arguments"]) else b["arguments"])
                for b in blocks
                if b["type"] == "tool_use"
            ],
        )
        assert len(choice["reasoning"]) == sum(b.get("chars", 0) for b in blocks if b["type"] == "thinking")
        omitted = {b["type"] for b in blocks} - {"text", "thinking", "redacted_thinking", "tool_use"}
        assert omitted == set(told.get("omitted", ())) - {"citations"}
    _check_usage(told, facts.get("usage") or {})


def _parses(arguments: str) -> bool:
    try:
        json.loads(arguments or "{}")
    except ValueError:
        return False
    return True


def _check_calls(choice: dict[str, Any], expected: list[tuple[str, str, Any]]) -> None:
    assert [
        (c["id"], c["name"], json.loads(c["arguments"]) if _parses(c["arguments"]) else c["arguments"])
        for c in choice["tool_calls"]
    ] == expected


def _check_usage(told: dict[str, Any], usage: dict[str, Any]) -> None:
    read, written = usage.get("cache_read_input_tokens") or 0, usage.get("cache_creation_input_tokens") or 0
    assert told["usage"]["input_total"] == usage["input_tokens"] + read + written
    assert told["usage"]["output_total"] == usage["output_tokens"]
    assert (told["usage"].get("cache_read") or 0) == read
    hour = (usage.get("cache_creation") or {}).get("ephemeral_1h_input_tokens") or 0
    assert (told["usage"].get("cache_write_1h") or 0) == hour
    assert (told["usage"].get("cache_write_5m") or 0) == written - hour
    thought = (usage.get("output_tokens_details") or {}).get("thinking_tokens")
    assert told["usage"].get("reasoning") == thought
    if isinstance(usage.get("cost"), str):
        assert Decimal(told["cost"]) == Decimal(usage["cost"])


def _mine(name: str, _case: Case) -> bool:
    folder, case = name.split("/")
    return folder == "anthropic_messages" or case.startswith("messages_")


def _cuts(_name: str, body: bytes) -> list[int]:
    return events_end(body, b"event: message_stop")


RECORDED = Recorded(
    protocol="anthropic_messages",
    folders=("anthropic_messages", "compat_opencode_zen"),
    mine=_mine,
    errors=_ERRORS,
    errors_in_200=_ERRORS_IN_200,
    check=_check,
    cuts=_cuts,
    at_least=(25, 10, 14),
)
