"""Whose a signature is, through a caller and back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from adapters import signatures
from adapters.contract import Endpoint, HttpRequest, UpstreamCall
from adapters.protocols import PROTOCOLS

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


def sent(protocol: str, *, body: dict[str, Any], **profile: Any) -> HttpRequest:
    """A caller's request natively to a provider of the same protocol."""
    request = PROTOCOLS[protocol].parse_request(json.dumps({"model": "m", **body}).encode())
    endpoint = Endpoint(provider="p", protocol=protocol, base_url="", **profile)
    return PROTOCOLS[protocol].render_request(
        UpstreamCall(endpoint=endpoint, model="up", request=request, deadline=0), stream=False
    )


@pytest.mark.parametrize("protocol", [name for name in PROTOCOLS if name != "gemini"])
def test_a_signature_comes_back_from_every_caller_as_whose_it_was(protocol: str) -> None:
    for marked in ("anthropic_messages:EqoB", "responses:gAAA", "gemini:text:0:4:QUJD", f"{protocol}:c2ln"):
        assert signatures.heard(protocol, signatures.told(protocol, marked)) == marked
    assert signatures.told(protocol, f"{protocol}:c2ln") == "c2ln"
    assert signatures.heard(protocol, "") is None
    assert signatures.heard(protocol, signatures.NONE) is None


def test_a_signature_that_nobody_is_known_to_have_made_is_foreign_everywhere() -> None:
    assert all(signatures.is_foreign(protocol, "EqoB") for protocol in PROTOCOLS)
    assert not any(signatures.is_foreign(protocol, None) for protocol in PROTOCOLS)


def test_of_messages_only_foreign_thoughts_are_taken_out_and_told() -> None:
    own = {"type": "thinking", "thinking": "Hm.", "signature": "EqoB"}
    foreign = [
        {"type": "thinking", "thinking": "Hm.", "signature": "gemini:thought:QUJD"},
        {"type": "redacted_thinking", "data": "responses:gAAA"},
        {"type": "thinking", "thinking": "Hm.", "signature": signatures.NONE},
    ]
    said = {"role": "assistant", "content": [own, *foreign, {"type": "text", "text": "x"}]}
    only = {"role": "assistant", "content": foreign[:1]}
    request = sent("anthropic_messages", body={"max_tokens": 9, "messages": [USER, said, USER, only, USER]})
    assert json.loads(request.body)["messages"] == [USER, {**said, "content": [own, said["content"][-1]]}, USER, USER]
    assert request.dropped == (
        "messages[1].content[1]",
        "messages[1].content[2]",
        "messages[1].content[3]",
        "messages[3].content[0]",
    )


def test_of_the_items_of_responses_foreign_thoughts_and_signatures_of_calls_are_taken_out_and_told() -> None:
    own = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"}
    summary = [{"type": "summary_text", "text": "Hm."}]
    foreign = {"type": "reasoning", "id": "rs_made_x_0", "summary": summary, "encrypted_content": "gemini:thought:QUJD"}
    unsigned = {"type": "reasoning", "id": "rs_made_x_1", "summary": summary}
    body = {"input": [USER, own, foreign, unsigned, {**CALL, "signature": "QUJD"}]}
    request = sent("responses", body=body)
    assert json.loads(request.body)["input"] == [USER, own, CALL]
    assert request.dropped == ("input[2]", "input[3]", "input[4].signature")
    texts = sent("responses", body=body, reasoning_field="summary")
    assert json.loads(texts.body)["input"][2] == {k: v for k, v in foreign.items() if k != "encrypted_content"}
    assert texts.dropped == ("input[2].encrypted_content", "input[4].signature")


def test_of_chat_completions_what_can_be_read_stays_and_foreign_signatures_are_taken_out_and_told() -> None:
    own = {"type": "reasoning.text", "text": "Hm.", "signature": "EqoB", "index": 0}
    text = {"type": "reasoning.text", "text": "So.", "index": 1}
    details = [
        own,
        {**text, "signature": "anthropic_messages:EqoB"},
        {"type": "reasoning.encrypted", "data": "responses:gAAA", "index": 2},
    ]
    said = {"role": "assistant", "content": "x", "reasoning_details": details}
    request = sent("chat_completions", body={"messages": [USER, said]})
    assert json.loads(request.body)["messages"][1]["reasoning_details"] == [own, text]
    assert request.dropped == (
        "messages[1].reasoning_details[1].signature",
        "messages[1].reasoning_details[2].data",
    )


def test_of_chat_completions_the_signature_of_a_call_goes_where_it_was_made_or_is_known_to_be_taken() -> None:
    def body(signature: str) -> dict[str, Any]:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        signed = {**call, "extra_content": {"google": {"thought_signature": signature}}}
        result = {"role": "tool", "tool_call_id": "c", "content": "x"}
        return {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [signed]}, result]}

    def call_of(request: HttpRequest) -> dict[str, Any]:
        (call,) = json.loads(request.body)["messages"][1]["tool_calls"]
        return dict(call.get("extra_content", {}))

    its_own = sent("chat_completions", body=body("QUJD"))
    assert (call_of(its_own), its_own.dropped) == ({"google": {"thought_signature": "QUJD"}}, ())
    elsewhere = sent("chat_completions", body=body("gemini:call:QUJD"))
    assert (call_of(elsewhere), elsewhere.dropped) == ({}, ("messages[1].tool_calls[0].extra_content",))
    compatible = sent("chat_completions", body=body("gemini:call:QUJD"), reasoning_field="extra_content")
    assert (call_of(compatible), compatible.dropped) == ({"google": {"thought_signature": "QUJD"}}, ())


@pytest.mark.parametrize(
    ("protocol", "messages"),
    [
        (
            "anthropic_messages",
            '[{"role":"assistant","content":[{"type":"thinking","thinking":"a","signature":"EqoB","n":1.0}]}]',
        ),
        ("responses", '[{"type":"reasoning","id":"rs_1","summary":[],"encrypted_content":"gA","n":1.0}]'),
        (
            "chat_completions",
            '[{"role":"assistant","content":"x","reasoning_details":[{"type":"reasoning.text","signature":"E","n":1.0}]}]',
        ),
    ],
)
def test_what_its_own_provider_signed_stays_as_it_was_byte_for_byte(protocol: str, messages: str) -> None:
    field = "input" if protocol == "responses" else "messages"
    request = PROTOCOLS[protocol].parse_request(f'{{"max_tokens":9,"{field}": {messages}}}'.encode())
    endpoint = Endpoint(provider="p", protocol=protocol, base_url="")
    call = UpstreamCall(endpoint=endpoint, model="m", request=request, deadline=0)
    rendered = PROTOCOLS[protocol].render_request(call, stream=False)
    assert messages.encode() in rendered.body
    assert rendered.dropped == ()
