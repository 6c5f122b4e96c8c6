"""What the recorded traffic in Responses means, from OpenAI's API and from everyone who speaks it."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from adapters.errors import ErrorClass
from tests.fakes.recorded import Meaning, Recorded, events_end

_F, _O, _T = ErrorClass.FATAL, ErrorClass.OURS, ErrorClass.TRANSIENT
_ERRORS: dict[str, Meaning] = {
    "openai_responses/err400_http_error": (_F, None, False, False),
    "openai_responses/err401": (_O, None, False, True),
    "openai_responses/err429_insufficient_quota": (_O, None, False, True),
    "openai_responses/err500": (_T, None, False, False),
}
#: What the canonical form does not carry of them.
_OMITTED: dict[str, list[str]] = {
    "openai_responses/stream_custom_tool": ["custom_tool_call"],
    "openai_responses/stream_local_shell": ["local_shell_call"],
    "openai_responses/web_search_stream_reasoning": ["web_search_call", "citations"],
}
_STOPS = {"max_output_tokens": "length", "content_filter": "content_filter"}


def _check(name: str, told: dict[str, Any], facts: dict[str, Any]) -> None:
    (choice,) = told["choices"].values()
    assert choice["text"] == facts.get("text", "")
    calls = [] if name in _OMITTED else facts.get("tool_calls", [])
    assert choice["tool_calls"] == [
        {"id": call["call_id"], "name": call["name"], "arguments": call["arguments"]} for call in calls
    ]
    if facts["status"] == "incomplete":
        native = facts["incomplete_details"]["reason"]
        assert choice["end"] == [_STOPS[native], native]
    else:
        assert choice["end"] == ["tool_calls" if calls else "stop", "completed"]
    usage = facts["usage"]
    assert told["usage"]["input_total"] == usage["input_tokens"]
    assert told["usage"]["output_total"] == usage["output_tokens"]
    inputs = usage["input_tokens_details"]
    assert told["usage"]["cache_read"] == inputs["cached_tokens"]
    assert told["usage"].get("cache_write_5m") == inputs.get("cache_write_tokens")
    assert told["usage"]["reasoning"] == usage["output_tokens_details"]["reasoning_tokens"]
    assert told["cost"] is None if usage.get("cost") is None else Decimal(told["cost"]) == Decimal(str(usage["cost"]))
    assert told.get("omitted", []) == _OMITTED.get(name, [])


def _cuts(_name: str, body: bytes) -> list[int]:
    return events_end(body, b"response.completed")


RECORDED = Recorded(
    protocol="responses",
    folders=("openai_responses",),
    errors=_ERRORS,
    errors_in_200={},
    check=_check,
    cuts=_cuts,
    at_least=(12, 11, 4),
)
