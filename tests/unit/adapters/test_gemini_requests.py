"""Requests of Gemini: what a caller's becomes, what a provider is sent, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from adapters.chat import (
    Audio,
    ChatRequest,
    Document,
    Image,
    Message,
    NativeRequest,
    Opaque,
    Reasoning,
    ResponseFormat,
    Role,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
)
from adapters.contract import Endpoint, HttpRequest, UpstreamCall
from adapters.errors import MalformedRequest, RequestNotExpressible
from adapters.paths import CANONICAL
from adapters.protocols.gemini import Gemini, envelope
from adapters.protocols.gemini.signatures import UNSIGNED, wrapped

PROTOCOL = Gemini()
HI = Message(role=Role.USER, content=(Text(text="hi"),))


def rendered(
    request: ChatRequest, model: str = "gemini-2.5-flash", *, stream: bool = False, **endpoint: Any
) -> HttpRequest:
    call = UpstreamCall(
        endpoint=Endpoint(provider="p", protocol="gemini", base_url="", **endpoint),
        model=model,
        request=request,
        deadline=0.0,
    )
    return PROTOCOL.render_request(call, stream=stream)


def body(request: ChatRequest, model: str = "gemini-2.5-flash", **endpoint: Any) -> Any:
    return json.loads(rendered(request, model, **endpoint).body)


def read(**fields: Any) -> ChatRequest:
    return PROTOCOL.parse_request(json.dumps({"contents": [{"parts": [{"text": "hi"}]}], **fields}).encode())


def contents(*entries: Any) -> tuple[Message, ...]:
    return PROTOCOL.parse_request(json.dumps({"contents": list(entries)}).encode()).messages


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "parts": list(parts)}


def model(*parts: Any) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


# ------------------------------------------------------------------- address


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("gemini-2.5-flash", "/models/gemini-2.5-flash:generateContent"),
        ("models/gemini-2.5-flash", "/models/gemini-2.5-flash:generateContent"),
        ("tunedModels/mine", "/tunedModels/mine:generateContent"),
        ("publishers/google/models/g", "/publishers/google/models/g:generateContent"),
        ("projects/p/locations/l/endpoints/1", "/projects/p/locations/l/endpoints/1:generateContent"),
        ("google/gemini", "/models/google%2Fgemini:generateContent"),
        ("claude@2024", "/models/claude@2024:generateContent"),
        ("a?key=1#f", "/models/a%3Fkey%3D1%23f:generateContent"),
        ("a\r\nb", "/models/a%0D%0Ab:generateContent"),
        ("%2e%2e", "/models/%252e%252e:generateContent"),
    ],
)
def test_a_model_is_named_by_its_address_and_reaches_no_other(name, path):
    assert rendered(ChatRequest(messages=(HI,)), name).path == path


@pytest.mark.parametrize("name", ["", "..", "models/../x", "x/../../y", "models/", "models//x", "./x"])
def test_what_is_no_name_of_a_model_is_refused(name):
    with pytest.raises(RequestNotExpressible) as caught:
        rendered(ChatRequest(messages=(HI,)), name)
    assert caught.value.path == "model"


def test_a_stream_is_asked_for_by_the_address():
    request = rendered(ChatRequest(messages=(HI,)), stream=True)
    assert request.path == "/models/gemini-2.5-flash:streamGenerateContent?alt=sse"
    assert json.loads(request.body) == {"contents": [user({"text": "hi"})]}


# ------------------------------------------------------------------- reading


def test_a_request_in_either_spelling_is_the_same():
    camel = read(
        systemInstruction={"parts": [{"text": "be kind"}]},
        generationConfig={"maxOutputTokens": 9, "topK": 40.0, "thinkingConfig": {"thinkingBudget": 5}},
        tools=[{"functionDeclarations": [{"name": "f", "parametersJsonSchema": {"type": "object"}}]}],
    )
    snake = read(
        system_instruction={"parts": {"text": "be kind"}},
        generation_config={"max_output_tokens": 9, "top_k": 40, "thinking_config": {"thinking_budget": 5}},
        tools={"function_declarations": {"name": "f", "parameters_json_schema": {"type": "object"}}},
    )
    assert msgspec.to_builtins(
        msgspec.structs.replace(camel, native=None, tools=(), paths=CANONICAL)
    ) == msgspec.to_builtins(msgspec.structs.replace(snake, native=None, tools=(), paths=CANONICAL))
    assert camel.max_output_tokens == 9
    assert camel.top_k == 40
    assert camel.reasoning_budget_tokens == 5
    assert [bytes(tool.parameters or b"") for tool in (*camel.tools, *snake.tools)] == [b'{"type": "object"}'] * 2
    assert snake.native is not None
    assert snake.native.unmapped == ()


def test_parts_become_what_they_are():
    (message,) = contents(
        user(
            {"text": "look"},
            {"inlineData": {"mimeType": "image/png", "data": "AAEC"}},
            {"inlineData": {"mimeType": "audio/mpeg", "data": "AAEC"}},
            {"inlineData": {"mimeType": "application/pdf", "data": "_-8=", "displayName": "a.pdf"}},
            {"fileData": {"fileUri": "https://x.org/a.png"}},
            {"fileData": {"fileUri": "https://x.org/a", "mimeType": "application/pdf"}},
        )
    )
    assert message.content == (
        Text(text="look"),
        Image(data=b"\0\1\2", media_type="image/png"),
        Audio(data=b"\0\1\2", format="mp3"),
        Document(data=b"\xff\xef", media_type="application/pdf", filename="a.pdf"),
        Image(url="https://x.org/a.png"),
        Document(url="https://x.org/a", media_type="application/pdf"),
    )


@pytest.mark.parametrize(
    "part",
    [
        {"fileData": {"fileUri": "gs://b/o.png", "mimeType": "image/png"}},
        {"inlineData": {"mimeType": "video/mp4", "data": "AAEC"}},
        {"inlineData": {"mimeType": "image/png", "data": "AAEC"}, "mediaResolution": {"level": "LOW"}},
        {"executableCode": {"code": "1"}},
        {"somethingNew": 1},
    ],
)
def test_a_part_that_only_gemini_knows_is_kept_as_it_is(part):
    (message,) = contents(user(part))
    (kept,) = message.content
    assert isinstance(kept, Opaque)
    assert json.loads(bytes(kept.raw)) == part
    assert body(ChatRequest(messages=(message,)))["contents"] == [user(part)]


def test_results_find_their_calls_by_id_or_by_name_and_order():
    messages = contents(
        user({"text": "hi"}),
        model(
            {"functionCall": {"name": "f", "args": {"x": 1}}},
            {"functionCall": {"name": "f", "args": {"x": 2}}},
            {"functionCall": {"name": "g", "id": "g-1"}},
        ),
        user(
            {"functionResponse": {"name": "g", "id": "g-1", "response": {"error": "no"}}},
            {"functionResponse": {"name": "f", "response": {"output": "one"}}},
            {"functionResponse": {"name": "f", "response": {"n": 2}}},
            {"text": "go on"},
        ),
    )
    assert [call.id for call in messages[1].tool_calls] == ["call_1_0", "call_1_1", "g-1"]
    assert [call.arguments for call in messages[1].tool_calls] == ['{"x": 1}', '{"x": 2}', "{}"]
    results = [(m.role, m.tool_call_id, m.content, m.is_error) for m in messages[2:]]
    assert results == [
        (Role.TOOL, "g-1", (Text(text="no"),), True),
        (Role.TOOL, "call_1_0", (Text(text="one"),), False),
        (Role.TOOL, "call_1_1", (Text(text='{"n": 2}'),), False),
        (Role.USER, None, (Text(text="go on"),), False),
    ]


def test_a_result_of_no_call_cannot_be_said_in_another_protocol():
    request = PROTOCOL.parse_request(
        b'{"contents": [{"parts": [{"functionResponse": {"name": "f", "response": {"a": 1}}}]}]}'
    )
    assert request.native is not None
    assert request.native.unmapped == ("contents[0].parts[0].functionResponse",)


def test_signatures_come_back_to_where_they_were():
    given = [
        user({"text": "hi"}),
        model(
            {"text": "Hm.", "thought": True},
            {"text": "Let me "},
            {"text": "look", "thoughtSignature": "QUJD"},
            {"text": "!"},
            {"inlineData": {"mimeType": "image/png", "data": "AAEC"}, "thoughtSignature": "REVG"},
            {"functionCall": {"name": "f", "args": {}, "id": "1"}, "thoughtSignature": "R0hJ"},
        ),
        user({"functionResponse": {"name": "f", "id": "1", "response": {"output": "ok"}}}),
    ]
    request = ChatRequest(messages=contents(*given))
    assert body(request, "gemini-3-pro")["contents"] == given
    # The same where the text came as one.
    joined = msgspec.structs.replace(
        request.messages[1],
        content=(Text(text="Let me look!"),),
        reasoning=(Reasoning(signature="gemini:text:7:11:QUJD"),),
    )
    parts = body(ChatRequest(messages=(HI, joined, request.messages[2])), "gemini-3-pro")["contents"][1]["parts"]
    assert parts[:3] == [{"text": "Let me "}, {"text": "look", "thoughtSignature": "QUJD"}, {"text": "!"}]


def test_a_signature_whose_place_is_lost_is_sent_with_the_last_text():
    message = Message(
        role=Role.ASSISTANT,
        content=(Text(text="a"), Text(text="b")),
        reasoning=(Reasoning(signature="gemini:text:5:9:QUJD"),),
    )
    parts = body(ChatRequest(messages=(HI, message)))["contents"][1]["parts"]
    assert parts == [{"text": "a"}, {"text": "b", "thoughtSignature": "QUJD"}]
    alone = msgspec.structs.replace(message, content=())
    parts = body(ChatRequest(messages=(HI, alone)))["contents"][1]["parts"]
    assert parts == [{"text": "", "thoughtSignature": "QUJD"}]


def test_what_another_provider_signed_is_not_sent_and_told_as_dropped():
    message = Message(
        role=Role.ASSISTANT,
        content=(Text(text="a"),),
        reasoning=(Reasoning(text="hm", signature="EqoB"), Reasoning(signature="gAAAA")),
    )
    sent = rendered(ChatRequest(messages=(HI, message)))
    assert json.loads(sent.body)["contents"][1]["parts"] == [{"text": "hm", "thought": True}, {"text": "a"}]
    assert sent.dropped == ("messages[1].reasoning[0].signature", "messages[1].reasoning[1]")


def test_a_thought_in_pieces_is_one_with_the_signature_that_follows_it():
    (message,) = contents(
        model(
            {"text": "Fir", "thought": True},
            {"text": "st.", "thought": True},
            {"text": "", "thought": True, "thoughtSignature": wrapped("EqoB-/_")},
            {"text": "Second.", "thought": True},
        )
    )
    assert message.reasoning == (Reasoning(text="First.", signature="EqoB-/_"), Reasoning(text="Second."))


@pytest.mark.parametrize(
    ("name", "signature"), [("gemini-3-pro-preview", "skip_thought_signature_validator"), ("gemini-2.5-pro", None)]
)
def test_calls_of_another_model_are_marked_for_models_that_demand_signatures(name, signature):
    calls = (ToolCall(id="1", name="f", arguments="{}"), ToolCall(id="2", name="f", arguments=""))
    result = Message(role=Role.TOOL, tool_call_id="1", content=(Text(text="x"),))
    parts = body(ChatRequest(messages=(HI, Message(role=Role.ASSISTANT, tool_calls=calls), result)), name)
    assert [part.get("thoughtSignature") for part in parts["contents"][1]["parts"]] == [signature, None]


def test_choices_of_tools_are_read():
    def choice(mode: str, *names: str) -> tuple[ToolChoice | None, tuple[str, ...]]:
        config = {"mode": mode, **({"allowedFunctionNames": names} if names else {})}
        request = read(
            tools=[{"functionDeclarations": [{"name": "f"}, {"name": "g"}]}],
            toolConfig={"functionCallingConfig": config},
        )
        assert request.native is not None
        return request.tool_choice, request.native.unmapped

    assert choice("AUTO") == (ToolChoice(mode="auto"), ())
    assert choice("none") == (ToolChoice(mode="none"), ())
    assert choice("ANY") == (ToolChoice(mode="required"), ())
    assert choice("ANY", "g") == (ToolChoice(mode="tool", tool="g"), ())
    assert choice("ANY", "g", "f") == (ToolChoice(mode="required"), ())
    assert choice("MODE_UNSPECIFIED") == (None, ())
    unknown = read(
        tools=[{"functionDeclarations": [{"name": n} for n in "fgh"]}],
        toolConfig={"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f", "g"]}},
    )
    assert unknown.native is not None
    assert unknown.native.unmapped == ("toolConfig.functionCallingConfig.allowedFunctionNames",)
    validated = read(
        tools=[{"functionDeclarations": [{"name": "f"}]}], toolConfig={"functionCallingConfig": {"mode": "VALIDATED"}}
    )
    assert [tool.strict for tool in validated.tools] == [True]


def test_a_schema_in_the_older_form_becomes_json_schema():
    request = read(
        generationConfig={
            "responseMimeType": "application/json",
            "responseSchema": {
                "type": "OBJECT",
                "properties": {
                    "type": {"type": "STRING", "nullable": True, "enum": ["a"]},
                    "items": {"type": "ARRAY", "items": {"type": "INTEGER"}, "minItems": "2"},
                    "either": {"anyOf": [{"type": "NUMBER"}, {"type": "BOOLEAN"}]},
                },
                "required": ["type"],
                "propertyOrdering": ["type"],
            },
        }
    )
    assert request.response_format is not None
    assert request.response_format.schema is not None
    assert json.loads(bytes(request.response_format.schema)) == {
        "type": "object",
        "properties": {
            "type": {"type": ["string", "null"], "enum": ["a", None]},
            "items": {"type": "array", "items": {"type": "integer"}, "minItems": 2},
            "either": {"anyOf": [{"type": "number"}, {"type": "boolean"}]},
        },
        "required": ["type"],
    }


def test_what_only_gemini_knows_is_named_for_other_protocols():
    request = read(
        contents=[
            {"parts": [{"text": "hi"}], "cache": 1},
            model({"functionCall": {"name": "f", "willContinue": True}}),
        ],
        safetySettings=[],
        cachedContent="cachedContents/x",
        tools=[{"googleSearch": {}}, {"functionDeclarations": [{"name": "f", "behavior": "BLOCKING"}]}],
        toolConfig={"retrievalConfig": {}},
        generationConfig={
            "mediaResolution": "MEDIA_RESOLUTION_LOW",
            "responseModalities": ["TEXT", "IMAGE"],
            "responseMimeType": "text/x.enum",
            "thinkingConfig": {"newThing": 1, "thinkingLevel": "HIGH", "includeThoughts": True},
        },
    )
    assert request.native is not None
    assert set(request.native.unmapped) == {
        "contents[0].cache",
        "contents[1].parts[0].functionCall.willContinue",
        "safetySettings",
        "cachedContent",
        "tools[0].googleSearch",
        "tools[1].functionDeclarations[0].behavior",
        "toolConfig.retrievalConfig",
        "generationConfig.mediaResolution",
        "generationConfig.responseModalities",
        "generationConfig.responseMimeType",
        "generationConfig.thinkingConfig.newThing",
    }
    assert request.reasoning_effort == "high"
    assert envelope(request).model is None


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"contents": []}, "contents"),
        ({"contents": None}, "contents"),
        ({"contents": "hi"}, "contents"),
        ({"contents": [{"role": "system", "parts": []}]}, "contents[0].role"),
        ({"contents": [{"parts": [{"text": 5}]}]}, "contents[0].parts[0].text"),
        ({"contents": [{"parts": [{"inlineData": {"data": "AAEC"}}]}]}, "contents[0].parts[0].inlineData.mimeType"),
        (
            {"contents": [{"parts": [{"inlineData": {"data": "*", "mimeType": "image/png"}}]}]},
            "contents[0].parts[0].inlineData.data",
        ),
        ({"contents": [{"parts": [{"fileData": {}}]}]}, "contents[0].parts[0].fileData.fileUri"),
        ({"contents": [model({"functionCall": {}})]}, "contents[0].parts[0].functionCall.name"),
        (
            {"contents": [model({"functionCall": {"name": "f", "args": "x"}})]},
            "contents[0].parts[0].functionCall.args",
        ),
        ({"contents": [user({"functionResponse": {}})]}, "contents[0].parts[0].functionResponse.name"),
        ({"generationConfig": {"topK": 1.5}}, "generationConfig.topK"),
        ({"generationConfig": {"maxOutputTokens": -1}}, "generationConfig.maxOutputTokens"),
        ({"generationConfig": {"temperature": "hot"}}, "generationConfig.temperature"),
        ({"generationConfig": {"stopSequences": "x"}}, "generationConfig.stopSequences"),
        ({"tools": [{"functionDeclarations": [{}]}]}, "tools[0].functionDeclarations[0].name"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "SOME"}}}, "toolConfig.functionCallingConfig.mode"),
        ({"model": 5}, "model"),
    ],
)
def test_a_fault_is_named_by_its_path(fields, path):
    with pytest.raises(MalformedRequest) as caught:
        read(**fields)
    assert caught.value.path == path


def test_a_request_of_its_own_goes_on_byte_for_byte_but_for_the_model():
    native = (
        b'{"model":"models/x","contents":[{"parts":[{"text":"hi","new":1}]}],'
        b'"generationConfig":{"temperature":1.50,"new":{"a":1}},"other":[1.0]}'
    )
    sent = rendered(PROTOCOL.parse_request(native)).body
    assert sent == native.replace(b'"model":"models/x",', b"")


@pytest.mark.parametrize(("model_name", "marked"), [("gemini-3-pro", True), ("gemini-2.5-pro", False)])
def test_what_another_provider_signed_is_taken_off_a_request_of_its_own(model_name, marked):
    foreign = wrapped("EqoB-/_")
    call_part = {"functionCall": {"name": "f", "args": {}}, "thought_signature": foreign}
    request = read(
        contents=[
            {"role": "user", "parts": {"text": "hi"}},
            {
                "role": "model",
                "parts": [
                    {"text": "hm", "thought": True, "thoughtSignature": foreign},
                    {"text": "a", "thoughtSignature": "QUJD"},
                    {"text": "", "thoughtSignature": foreign.replace("+", "-").replace("/", "_")},
                    call_part,
                ],
            },
        ]
    )
    sent = rendered(request, model=model_name)
    told = {"functionCall": {"name": "f", "args": {}}}
    assert json.loads(sent.body)["contents"] == [
        {"role": "user", "parts": {"text": "hi"}},
        {
            "role": "model",
            "parts": [
                {"text": "hm", "thought": True},
                {"text": "a", "thoughtSignature": "QUJD"},
                told | ({"thoughtSignature": UNSIGNED} if marked else {}),
            ],
        },
    ]
    assert sent.dropped == (
        "contents[1].parts[0].thoughtSignature",
        "contents[1].parts[2].thoughtSignature",
        "contents[1].parts[3].thought_signature",
    )


def test_the_profile_omits_and_forces_in_a_request_of_its_own_too():
    request = read(safetySettings=[1], generation_config={"top_k": 4, "seed": 1})
    sent = rendered(
        request,
        omit=frozenset({"safetySettings", "generationConfig.topK", "labels"}),
        force={"store": msgspec.Raw(b"false")},
    )
    assert json.loads(sent.body) == {
        "contents": [{"parts": [{"text": "hi"}]}],
        "generation_config": {"seed": 1},
        "store": False,
    }
    assert sent.dropped == ("generation_config.top_k", "safetySettings")


# ------------------------------------------------------------------- writing


def test_a_canonical_request_is_said_in_full():
    request = ChatRequest(
        messages=(
            Message(role=Role.SYSTEM, content=(Text(text="be kind"),)),
            Message(role=Role.DEVELOPER, content=(Text(text="be brief"),)),
            HI,
            Message(role=Role.USER, content=(Image(data=b"\0\1\2", media_type="image/webp", detail="low"),)),
            Message(role=Role.ASSISTANT, content=(Text(text="ok"),), refusal="no"),
            Message(
                role=Role.USER,
                content=(
                    Audio(data=b"\0\1\2", format="wav"),
                    Document(data=b"\0\1\2", filename="a.pdf"),
                    Document(file_id="files/1", media_type="text/plain"),
                    Image(url="https://x.org/a.png", detail="low"),
                ),
            ),
        ),
        tools=(Tool(name="f", description="d", parameters=msgspec.Raw(b'{"type":"object"}')),),
        tool_choice=ToolChoice(mode="tool", tool="f"),
        parallel_tool_calls=True,
        response_format=ResponseFormat(
            kind="json_schema", name="n", description="d", schema=msgspec.Raw(b'{"type":"object"}')
        ),
        max_output_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        stop=("x",),
        seed=7,
        n=2,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logprobs=True,
        top_logprobs=4,
        reasoning_effort="medium",
        service_tier="default",
        store=False,
        extra={"safetySettings": msgspec.Raw(b"[]")},
    )
    sent = rendered(request)
    assert json.loads(sent.body) == {
        "systemInstruction": {"parts": [{"text": "be kind"}, {"text": "be brief"}]},
        "contents": [
            user({"text": "hi"}, {"inlineData": {"mimeType": "image/webp", "data": "AAEC"}}),
            model({"text": "ok"}, {"text": "no"}),
            user(
                {"inlineData": {"mimeType": "audio/wav", "data": "AAEC"}},
                {"inlineData": {"mimeType": "application/pdf", "data": "AAEC"}},
                {"fileData": {"fileUri": "files/1", "mimeType": "text/plain"}},
                {"fileData": {"fileUri": "https://x.org/a.png", "mimeType": "image/png"}},
            ),
        ],
        "tools": [
            {"functionDeclarations": [{"name": "f", "description": "d", "parametersJsonSchema": {"type": "object"}}]}
        ],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
        "generationConfig": {
            "temperature": 0.5,
            "topP": 0.9,
            "topK": 3,
            "maxOutputTokens": 5,
            "stopSequences": ["x"],
            "candidateCount": 2,
            "seed": 7,
            "presencePenalty": 0.1,
            "frequencyPenalty": 0.2,
            "responseLogprobs": True,
            "logprobs": 4,
            "mediaResolution": "MEDIA_RESOLUTION_LOW",
            "responseMimeType": "application/json",
            "responseJsonSchema": {"description": "d", "type": "object"},
            "thinkingConfig": {"thinkingBudget": 512, "includeThoughts": True},
        },
        "serviceTier": "standard",
        "store": False,
        "safetySettings": [],
    }
    assert sent.dropped == ("messages[5].content[1].filename",)


@pytest.mark.parametrize(
    ("asked", "name", "way", "config"),
    [
        ({"reasoning_effort": "high"}, "gemini-2.5-pro", None, {"thinkingBudget": 24576, "includeThoughts": True}),
        ({"reasoning_effort": "high"}, "gemini-3-pro", None, {"thinkingLevel": "HIGH", "includeThoughts": True}),
        ({"reasoning_effort": "high"}, "gemini-3-pro", "budget", {"thinkingBudget": 24576, "includeThoughts": True}),
        ({"reasoning_effort": "low"}, "gemini-2.5-pro", "effort", {"thinkingLevel": "LOW", "includeThoughts": True}),
        ({"reasoning_budget_tokens": 77}, "gemini-2.5-pro", None, {"thinkingBudget": 77, "includeThoughts": True}),
        ({"reasoning_budget_tokens": 900}, "gemini-3-pro", None, {"thinkingLevel": "LOW", "includeThoughts": True}),
        ({"reasoning_effort": "none"}, "gemini-3-flash", None, {"thinkingBudget": 0}),
        ({"reasoning_budget_tokens": 0}, "gemini-2.5-flash", None, {"thinkingBudget": 0}),
        ({}, "gemini-2.5-flash", "off", {"thinkingBudget": 0}),
    ],
)
def test_thinking_is_asked_for_as_the_model_or_the_profile_takes_it(asked, name, way, config):
    sent = body(ChatRequest(messages=(HI,), **asked), name, reasoning=way)
    assert sent["generationConfig"] == {"thinkingConfig": config}


def test_thinking_that_a_profile_switches_off_is_told_as_dropped():
    sent = rendered(ChatRequest(messages=(HI,), reasoning_effort="high"), reasoning="off")
    assert sent.dropped == ("reasoning_effort",)
    native = rendered(read(generationConfig={"thinkingConfig": {"thinkingBudget": 9}, "seed": 1}), reasoning="off")
    assert json.loads(native.body)["generationConfig"] == {"seed": 1, "thinkingConfig": {"thinkingBudget": 0}}
    assert native.dropped == ("generationConfig.thinkingConfig",)


def test_strict_tools_are_held_to_their_schemas():
    sent = body(ChatRequest(messages=(HI,), tools=(Tool(name="f", strict=True), Tool(name="g"))))
    assert sent["toolConfig"] == {"functionCallingConfig": {"mode": "VALIDATED"}}


def test_results_name_their_function_and_carry_what_they_are():
    call = Message(
        role=Role.ASSISTANT,
        tool_calls=(ToolCall(id="1", name="f", arguments='{"a": 1}'), ToolCall(id="2", name="g", arguments="")),
    )
    results = (
        Message(role=Role.TOOL, tool_call_id="2", content=(Text(text="broke"),), is_error=True),
        Message(
            role=Role.TOOL,
            tool_call_id="1",
            content=(Text(text='{"n": 1.50}'), Image(data=b"\0", media_type="image/png")),
        ),
        Message(role=Role.TOOL, tool_call_id="1", content=(Text(text="[1]"),)),
    )
    sent = body(ChatRequest(messages=(HI, call, *results)))["contents"]
    assert sent[1] == model(
        {"functionCall": {"name": "f", "args": {"a": 1}, "id": "1"}},
        {"functionCall": {"name": "g", "args": {}, "id": "2"}},
    )
    assert sent[2] == user(
        {"functionResponse": {"name": "g", "id": "2", "response": {"error": "broke"}}},
        {
            "functionResponse": {
                "name": "f",
                "id": "1",
                "response": {"n": 1.5},
                "parts": [{"inlineData": {"mimeType": "image/png", "data": "AA=="}}],
            }
        },
        {"functionResponse": {"name": "f", "id": "1", "response": {"output": "[1]"}}},
    )


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"logit_bias": {"1": 2.0}}, "logit_bias"),
        ({"verbosity": "low"}, "verbosity"),
        ({"prompt_cache_key": "k"}, "prompt_cache_key"),
        ({"metadata": {"a": "b"}}, "metadata"),
        ({"end_user": "u"}, "end_user"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"service_tier": "scale"}, "service_tier"),
    ],
)
def test_what_gemini_has_no_word_for_is_refused_or_dropped_as_the_profile_says(change, path):
    request = ChatRequest(messages=(HI,), **change)
    with pytest.raises(RequestNotExpressible) as caught:
        rendered(request)
    assert caught.value.path == path
    sent = rendered(request, omit=frozenset({path}))
    assert sent.dropped == (path,)
    assert json.loads(sent.body) == {"contents": [user({"text": "hi"})]}


@pytest.mark.parametrize(
    ("messages", "path", "key"),
    [
        ((HI, Message(role=Role.SYSTEM, content=(Text(text="x"),))), "messages[1].role", "messages.place"),
        ((Message(role=Role.TOOL, tool_call_id="1"),), "messages[0].tool_call_id", None),
        ((msgspec.structs.replace(HI, name="Ann"),), "messages[0].name", "messages.name"),
        (
            (Message(role=Role.USER, content=(Text(text="x", cache="5m"),)),),
            "messages[0].content[0].cache",
            "messages.cache",
        ),
        (
            (Message(role=Role.USER, content=(Opaque(protocol="other", raw=msgspec.Raw(b"{}")),)),),
            "messages[0].content[0]",
            None,
        ),
        (
            (HI, Message(role=Role.ASSISTANT, tool_calls=(ToolCall(id="1", name="f", arguments='{"a'),))),
            "messages[1].tool_calls[0].arguments",
            None,
        ),
        (
            (
                Message(role=Role.USER, content=(Image(url="http://x/a.png", detail="low"),)),
                Message(role=Role.USER, content=(Image(url="http://x/b.png", detail="high"),)),
            ),
            "messages[1].content[0].detail",
            "messages.detail",
        ),
        ((Message(role=Role.SYSTEM, content=(Text(text="x"),)),), "messages", None),
    ],
)
def test_what_a_message_cannot_hold_is_refused_by_its_path(messages, path, key):
    request = ChatRequest(messages=messages)
    with pytest.raises(RequestNotExpressible) as caught:
        rendered(request)
    assert caught.value.path == path
    if key is not None:
        assert rendered(request, omit=frozenset({key})).dropped == (path,)


def test_fields_of_another_protocol_are_refused_unless_the_profile_omits_them():
    native = NativeRequest(protocol="other", fields={}, unmapped=("audio",))
    request = ChatRequest(messages=(HI,), native=native)
    with pytest.raises(RequestNotExpressible) as caught:
        rendered(request)
    assert caught.value.path == "audio"
    assert rendered(request, omit=frozenset({"audio"})).dropped == ("audio",)


def test_an_extra_field_that_the_request_has_already_is_refused():
    with pytest.raises(RequestNotExpressible) as caught:
        rendered(ChatRequest(messages=(HI,), extra={"contents": msgspec.Raw(b"[]")}))
    assert caught.value.path == "extra.contents"
