"""What a protocol says with the words it has must say all that was asked."""

from __future__ import annotations

import msgspec
import pytest

from adapters.chat import ChatRequest, Image, Message, ResponseFormat, Role, Text, ToolCall
from adapters.contract import Endpoint, HttpRequest, UpstreamCall
from adapters.errors import RequestNotExpressible
from adapters.protocols import PROTOCOLS
from adapters.sending import described_schema, failure_told

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}

ASKED = Message(role=Role.USER, content=(Text(text="hi"),))
CALLED = Message(role=Role.ASSISTANT, tool_calls=(ToolCall(id="c", name="weather", arguments="{}"),))
PICTURE = Image(url="http://picture.test/1.png")


def wanted(schema: object, description: str | None = "A place.") -> ResponseFormat:
    return ResponseFormat(
        kind="json_schema", name="Place", description=description, schema=msgspec.Raw(msgspec.json.encode(schema))
    )


def rendered(protocol: str, request: ChatRequest, *omit: str) -> HttpRequest:
    endpoint = Endpoint(
        provider="p", protocol=protocol, base_url="http://provider.test/v1", omit=frozenset(omit), default_max_tokens=9
    )
    call = UpstreamCall(endpoint=endpoint, model="m", request=request, deadline=0.0)
    return PROTOCOLS[protocol].render_request(call, stream=False)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_is_said_of_a_schema_reaches_every_protocol(protocol):
    asked = ChatRequest(messages=(ASKED,), response_format=wanted({**SCHEMA, "description": "On a map."}))
    sent = rendered(protocol, asked)
    assert sent.body is not None
    assert b"A place." in sent.body
    assert b"On a map." in sent.body
    assert not sent.dropped


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_protocol_says_that_a_tool_has_failed(protocol):
    def told(failed: bool, *omit: str) -> HttpRequest:
        result = Message(role=Role.TOOL, tool_call_id="c", is_error=failed, content=(Text(text="no such town"),))
        return rendered(protocol, ChatRequest(messages=(ASKED, CALLED, result)), *omit)

    assert b"no such town" in told(True).body
    assert b"error" in told(True).body.lower()
    assert b"error" not in told(False).body.lower()
    assert not told(True).dropped
    if protocol != "gemini":  # it has one place for a result, and another for an error
        silent = told(True, "messages.is_error")
        assert silent.body == told(False).body
        assert silent.dropped == ("messages[2].is_error",)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ((Text(text="no"),), (Text(text="Error: no"),)),
        ((Text(text="no", cache="5m"), Text(text="more")), (Text(text="Error: no", cache="5m"), Text(text="more"))),
        ((Text(text="Error 5"),), (Text(text="Error 5"),)),
        ((PICTURE, Text(text="no")), (PICTURE, Text(text="Error: no"))),
        ((PICTURE,), (PICTURE, Text(text="Error"))),
        ((), (Text(text="Error"),)),
    ],
)
def test_a_failure_is_told_once_and_in_its_place(content, told):
    failed = Message(role=Role.TOOL, tool_call_id="c", is_error=True, content=content)
    assert failure_told(failed).content == told


@pytest.mark.parametrize(
    ("own", "description", "told"),
    [
        ({}, "A place.", {"description": "A place."}),
        ({"description": "A place."}, "A place.", {"description": "A place."}),
        ({"description": "On a map."}, "A place.", {"description": "A place.\n\nOn a map."}),
        ({"description": "On a map."}, None, {"description": "On a map."}),
        ({"description": ""}, "A place.", {"description": "A place."}),
        ({}, None, {}),
    ],
)
def test_a_schema_is_told_what_was_said_beside_it(own, description, told):
    schema = described_schema(wanted({**SCHEMA, **own}, description))
    assert schema is not None
    assert msgspec.json.decode(schema) == {**SCHEMA, **told}


@pytest.mark.parametrize("schema", [True, {"description": 5}])
def test_a_schema_that_can_have_no_description_is_refused_with_its_path(schema):
    with pytest.raises(RequestNotExpressible) as raised:
        described_schema(wanted(schema))
    assert raised.value.path == "response_format.schema"
    assert described_schema(wanted(schema, None)) is not None
