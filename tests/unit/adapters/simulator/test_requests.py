from __future__ import annotations

import json
from typing import Any

import pytest

from adapters.simulator.requests import BadRequest, parse

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"model": ""}, "model"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [USER, {"role": "tool", "tool_call_id": "c", "content": "x"}]}, "messages[1].role"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]}, "messages[1]"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, USER]}, "messages[2]"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tools": []}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ],
)
def test_a_bad_request_is_refused_with_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(json.dumps({"model": "m", "messages": [USER], **fields}).encode())
    assert refused.value.param == param


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"model": NaN}', b"[" * 5000])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        parse(body)


def test_a_missing_parameter_is_named() -> None:
    with pytest.raises(BadRequest, match="'messages'"):
        parse(b'{"model": "m"}')


def test_a_refusal_holds_nothing_of_the_content() -> None:
    with pytest.raises(BadRequest) as refused:
        parse(json.dumps({"model": "m", "messages": [{**USER, "content": {"secret": "hunter2"}}]}).encode())
    assert "hunter2" not in refused.value.message


def test_unknown_fields_are_taken_and_named() -> None:
    _, fields = parse(json.dumps({"model": "m", "messages": [USER], "vendor_knob": 1}).encode())
    assert fields == ["messages", "model", "vendor_knob"]
