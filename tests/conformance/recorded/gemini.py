"""What the recorded traffic in Gemini means, from the Gemini API and from Vertex."""

from __future__ import annotations

import json
from typing import Any

from adapters.errors import ErrorClass
from tests.fakes.recorded import Meaning, Recorded, events_end

#: The facts list its function calls piece by piece, as Vertex streamed them.
_IN_PIECES = "gemini/vertex_stream_partial_args"

_F, _O, _T = ErrorClass.FATAL, ErrorClass.OURS, ErrorClass.TRANSIENT
_ERRORS: dict[str, Meaning] = {
    "gemini/err400_api_key": (_O, None, False, True),
    "gemini/err400_context_vertex": (_F, None, False, False),
    "gemini/err400_missing_thought_signature": (_F, None, False, False),
    "gemini/err404_model": (_O, None, False, False),
    "gemini/err429_no_details": (_T, None, True, False),
    "gemini/err429_retry_delay": (_T, 34.4, True, False),
    "gemini/err500": (_T, None, False, False),
    "gemini/err503_overloaded": (_T, None, False, False),
    "gemini/g_err400_api_key_details": (_O, None, False, True),
    "gemini/g_err403_api_not_enabled": (_O, None, False, True),
    "gemini/v_err400_user_location": (_O, None, False, True),
    "gemini/v_err403_iam": (_O, None, False, False),
    "gemini/v_err404_html": (_O, None, False, False),
    # Its quota is 0: no waiting helps.
    "gemini/v_err429_quota_errorinfo": (_O, None, False, False),
}
_ERRORS_IN_200: dict[str, ErrorClass] = {
    "gemini/v_stream_error_mid_stream": _T,
    "gemini/malformed_function_call": _T,
}


def _check(name: str, told: dict[str, Any], facts: dict[str, Any]) -> None:
    (choice,) = told["choices"].values()
    assert choice["text"] == facts.get("text", "")
    assert choice["end"][1] == facts.get("native_stop", facts.get("block_reason"))
    assert len(choice["reasoning"]) == facts.get("thought_chars", 0)
    calls = [{"name": call["name"], "args": json.loads(call["arguments"])} for call in choice["tool_calls"]]
    if name == _IN_PIECES:
        assert calls == [
            {"name": "getWeather", "args": {"location": "Boston"}},
            {"name": "getWeather", "args": {"location": "San Francisco"}},
        ]
    else:
        assert calls == [
            {"name": call["name"], "args": call.get("args", {})} for call in facts.get("function_calls", [])
        ]
        ids = [call["id"] for call in choice["tool_calls"]]
        assert all(ids)
        assert len(set(ids)) == len(ids)
        signed = [call for call in choice["tool_calls"] if "signature" in call]
        blocks = [block for block in choice.get("blocks", []) if block["signature"]]
        assert len(signed) + len(blocks) == facts.get("thought_signatures", 0)
    _check_usage(told, facts.get("usage") or {})


def _check_usage(told: dict[str, Any], usage: dict[str, Any]) -> None:
    used = told["usage"]
    if "promptTokenCount" in usage:
        assert used["input_total"] == usage["promptTokenCount"] + usage.get("toolUsePromptTokenCount", 0)
    said, thought = usage.get("candidatesTokenCount"), usage.get("thoughtsTokenCount")
    assert used.get("output_total") == (None if said is None and thought is None else (said or 0) + (thought or 0))
    assert used.get("reasoning") == thought
    assert used.get("cache_read") == usage.get("cachedContentTokenCount")
    if "totalTokenCount" in usage and "promptTokenCount" in usage:
        assert used["input_total"] + used.get("output_total", 0) == usage["totalTokenCount"]


def _cuts(_name: str, body: bytes) -> list[int]:
    """At the end of every event that gives no reason for an end. Old models give one with each."""
    ends = events_end(body)
    starts = [0, *(end + 2 for end in ends)]
    return [
        end
        for start, end in zip(starts, ends, strict=False)
        if b'"finishReason"' not in body[start:end] and b'"blockReason"' not in body[start:end]
    ]


RECORDED = Recorded(
    protocol="gemini",
    folders=("gemini",),
    errors=_ERRORS,
    errors_in_200=_ERRORS_IN_200,
    broken_plain={"gemini/v_empty_content": "no_terminal"},
    check=_check,
    cuts=_cuts,
    at_least=(17, 18, 14),
)
