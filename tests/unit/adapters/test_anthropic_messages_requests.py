"""Requests of the Messages API, in and out."""

from __future__ import annotations

import base64
import json

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
from adapters.errors import Broken, MalformedRequest, Rejected, RequestNotExpressible
from adapters.protocols.anthropic_messages import AnthropicMessages, envelope
from adapters.protocols.anthropic_messages.writing import DEFAULT_MAX_TOKENS

PROTOCOL = AnthropicMessages()
HELLO = {"role": "user", "content": "hi"}
USER = Message(role=Role.USER, content=(Text(text="hi"),))
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
RAW_SCHEMA = msgspec.Raw(json.dumps(SCHEMA).encode())
PDF = b"%PDF-1.7 x"


def parse(**fields: object) -> ChatRequest:
    return PROTOCOL.parse_request(json.dumps({"max_tokens": 9, "messages": [HELLO], **fields}).encode())


def parsed_blocks(*blocks: object, role: str = "user") -> tuple[Message, ...]:
    return parse(messages=[{"role": role, "content": list(blocks)}]).messages


def call(request: ChatRequest, **endpoint: object) -> UpstreamCall:
    target = Endpoint(provider="p", protocol="anthropic_messages", base_url="http://h/v1", **endpoint)  # type: ignore[arg-type]
    return UpstreamCall(endpoint=target, model="upstream-model", request=request, deadline=0)


def sent(request: ChatRequest, *, stream: bool = False, **endpoint: object) -> HttpRequest:
    rendered = PROTOCOL.render_request(call(request, **endpoint), stream=stream)
    assert rendered.path == "/messages"
    return rendered


def render(request: ChatRequest, *, stream: bool = False, **endpoint: object) -> dict[str, object]:
    content = json.loads(sent(request, stream=stream, **endpoint).body)
    assert isinstance(content, dict)
    return content


def chat(*messages: Message, **fields: object) -> ChatRequest:
    return ChatRequest(messages=messages or (USER,), **fields)  # type: ignore[arg-type]


def said(*messages: Message) -> object:
    return render(chat(*messages))["messages"]


def refused(request: ChatRequest, *, reasoning: str | None = None) -> str:
    with pytest.raises(RequestNotExpressible) as caught:
        render(request, reasoning=reasoning)
    return caught.value.path


def text(role: Role, words: str) -> Message:
    return Message(role=role, content=(Text(text=words),))


# -------------------------------------------------------------------- reading


def test_a_request_is_read_into_the_canonical_form():
    request = parse(
        model="m",
        stream=True,
        system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "see", "cache_control": {"type": "ephemeral"}},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/gif", "data": "R0lG"}},
                    {"type": "image", "source": {"type": "url", "url": "https://h/i.png"}},
                    {"type": "document", "source": {"type": "file", "file_id": "f1"}, "title": "t"},
                    {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "ä"}},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s1"},
                    {"type": "redacted_thinking", "data": "enc"},
                    {"type": "text", "text": "I look", "citations": None},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                    {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "fine"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "t2",
                        "is_error": True,
                        "content": [{"type": "text", "text": "no"}],
                        "cache_control": {"type": "ephemeral"},
                    },
                    {"type": "text", "text": "and?"},
                ],
            },
        ],
        tools=[
            {
                "name": "f",
                "description": "d",
                "input_schema": SCHEMA,
                "strict": True,
                "cache_control": {},
                "eager_input_streaming": True,
            }
        ],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        thinking={"type": "enabled", "budget_tokens": 2000},
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        stop_sequences=["x"],
        metadata={"user_id": "u"},
        service_tier="standard_only",
    )
    assert request.messages == (
        Message(role=Role.SYSTEM, content=(Text(text="be brief", cache="1h"),)),
        Message(
            role=Role.USER,
            content=(
                Text(text="see", cache="5m"),
                Image(data=b"GIF", media_type="image/gif"),
                Image(url="https://h/i.png"),
                Document(file_id="f1", filename="t"),
                Document(data="ä".encode(), media_type="text/plain"),
            ),
        ),
        Message(
            role=Role.ASSISTANT,
            reasoning=(
                Reasoning(text="hm", signature="anthropic_messages:s1"),
                Reasoning(signature="anthropic_messages:enc", redacted=True),
            ),
            content=(Text(text="I look"),),
            tool_calls=(ToolCall(id="t1", name="f", arguments='{"a": 1}'), ToolCall(id="t2", name="g", arguments="{}")),
        ),
        Message(role=Role.TOOL, tool_call_id="t1", content=(Text(text="fine"),)),
        Message(role=Role.TOOL, tool_call_id="t2", content=(Text(text="no", cache="5m"),), is_error=True),
        text(Role.USER, "and?"),
    )
    assert request.tools == (Tool(name="f", description="d", parameters=RAW_SCHEMA, strict=True, cache="5m"),)
    assert request.tool_choice == ToolChoice(mode="required")
    assert request.parallel_tool_calls is False
    assert request.response_format == ResponseFormat(kind="json_schema", schema=RAW_SCHEMA, strict=True)
    assert (request.max_output_tokens, request.reasoning_effort, request.reasoning_budget_tokens) == (9, "low", 2000)
    assert (request.temperature, request.top_p, request.top_k, request.stop) == (0.5, 0.9, 3, ("x",))
    assert (request.end_user, request.service_tier) == ("u", "default")
    assert request.native is not None
    assert request.native.unmapped == ()
    told = envelope(request)
    assert (told.model, told.stream, told.include_usage) == ("m", True, True)


@pytest.mark.parametrize(
    ("fields", "unmapped"),
    [
        ({"container": "c"}, ["container"]),
        ({"cache_control": {"type": "ephemeral"}}, ["cache_control"]),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, ["tools[0]"]),
        ({"tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]}, ["tools[0].defer_loading"]),
        ({"output_config": {"effort": "low", "task_budget": {"total": 9}}}, ["output_config.task_budget"]),
        ({"output_config": {"format": {"type": "grammar"}}}, ["output_config.format"]),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, []),
        ({"thinking": {"type": "between_tools"}}, ["thinking"]),
        ({"tool_choice": {"type": "future"}}, ["tool_choice"]),
        ({"metadata": {"user_id": "u", "team": "t"}}, ["metadata.team"]),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "citations": [{"type": "c"}]}]}]},
            ["messages[0].content[0].citations"],
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}, "cache_control": {}}],
                    }
                ]
            },
            ["messages[0].content[0].cache_control"],
        ),
    ],
)
def test_what_the_canonical_form_does_not_carry_is_named(fields, unmapped):
    request = parse(**fields)
    assert request.native is not None
    assert list(request.native.unmapped) == unmapped


@pytest.mark.parametrize(
    "block",
    [
        {"type": "search_result", "source": "a string here", "title": 3, "content": []},
        {"type": "image", "source": {"type": "file", "file_id": "f"}},
        {"type": "document", "source": {"type": "content", "content": "x"}},
        {"type": "document", "source": {"type": "file", "file_id": "f"}, "citations": {"enabled": True}},
        {"type": "from_the_future", "text": {"deep": 1}},
    ],
)
def test_a_block_that_only_this_protocol_knows_is_kept_as_it_came(block):
    (message,) = parsed_blocks(block)
    assert message.content == (Opaque(protocol="anthropic_messages", raw=msgspec.Raw(json.dumps(block).encode())),)


def test_the_order_of_results_and_words_of_a_user_is_kept():
    messages = parsed_blocks(
        {"type": "text", "text": "a"},
        {"type": "tool_result", "tool_use_id": "t1"},
        {"type": "text", "text": "b"},
        {"type": "tool_result", "tool_use_id": "t2", "content": [], "cache_control": {"ttl": "1h"}},
    )
    assert messages == (
        text(Role.USER, "a"),
        Message(role=Role.TOOL, tool_call_id="t1"),
        text(Role.USER, "b"),
        Message(role=Role.TOOL, tool_call_id="t2", content=(Text(text="", cache="1h"),)),
    )


def test_a_boundary_in_a_result_stays_where_there_is_one_behind_it_too():
    inner = {"type": "text", "text": "x", "cache_control": {"ttl": "1h"}}
    (message,) = parsed_blocks({"type": "tool_result", "tool_use_id": "t", "content": [inner], "cache_control": {}})
    assert message.content == (Text(text="x", cache="1h"),)


def test_a_system_message_in_the_midst_is_read_in_its_place():
    request = parse(messages=[HELLO, {"role": "system", "content": [{"type": "text", "text": "be brief"}]}])
    assert request.messages == (text(Role.USER, "hi"), text(Role.SYSTEM, "be brief"))


def test_a_system_block_of_another_kind_is_kept_as_it_came():
    block = {"type": "future", "text": 3}
    expected = Opaque(protocol="anthropic_messages", raw=msgspec.Raw(json.dumps(block).encode()))
    assert parse(system=[block]).messages[0].content == (expected,)
    assert parse(messages=[HELLO, {"role": "system", "content": [block]}]).messages[1].content == (expected,)


def test_thoughts_that_are_not_signed_have_no_signature():
    (message,) = parsed_blocks({"type": "thinking", "thinking": "hm", "signature": ""}, role="assistant")
    assert message.reasoning == (Reasoning(text="hm"),)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": "SECRET!"}}]}
                ]
            },
            "messages[0].content[0].source.data",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f"}]}]},
            "messages[0].content[0].input",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": "SECRET"}]}
                ]
            },
            "messages[0].content[0].input",
        ),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [{"description": "x"}]}, "tools[0].name"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"system": [{"type": "text"}]}, "system[0].text"),
        ({"system": [{}]}, "system[0].type"),
    ],
)
def test_a_malformed_request_is_refused_with_the_path_and_without_its_content(fields, path):
    with pytest.raises(MalformedRequest) as caught:
        parse(**fields)
    assert caught.value.path == path
    assert "SECRET" not in str(caught.value)


# ------------------------------------------------------------------ passing on


def test_a_native_request_passes_byte_for_byte_but_for_model_and_stream():
    body = (
        b'{"model":"short","max_tokens":  9,"messages":[{"role":"user","content":"a\\u00e9"}],'
        b'"temperature":1.50,"stream":true,"context_management":{"edits":[]}}'
    )
    rendered = sent(PROTOCOL.parse_request(body), stream=True)
    assert rendered.body == (
        b'{"model":"upstream-model","max_tokens":9,"messages":[{"role":"user","content":"a\\u00e9"}],'
        b'"temperature":1.50,"context_management":{"edits":[]},"stream":true}'
    )
    assert rendered.dropped == ()
    assert "stream" not in json.loads(sent(PROTOCOL.parse_request(body)).body)


def test_a_native_request_without_a_limit_gets_the_endpoints():
    body = json.dumps({"messages": [HELLO], "thinking": {"type": "enabled", "budget_tokens": 2000}}).encode()
    request = PROTOCOL.parse_request(body)
    assert render(request)["max_tokens"] == DEFAULT_MAX_TOKENS + 2000
    assert render(request, default_max_tokens=5000)["max_tokens"] == 7000
    assert render(parse(), default_max_tokens=5000)["max_tokens"] == 9


def test_what_the_profile_omits_is_told_and_what_it_forces_wins():
    rendered = sent(
        parse(top_k=3, temperature=0.1),
        omit=frozenset({"top_k", "seed"}),
        force={"temperature": msgspec.Raw(b"1"), "top_k": msgspec.Raw(b"7")},
    )
    content = json.loads(rendered.body)
    assert (content["temperature"], content["top_k"]) == (1, 7)
    assert rendered.dropped == ("temperature", "top_k")


def test_reasoning_off_switches_it_off_in_a_native_request_too():
    rendered = sent(parse(thinking={"type": "adaptive"}), reasoning="off")
    assert json.loads(rendered.body)["thinking"] == {"type": "disabled"}
    assert rendered.dropped == ("thinking",)
    assert sent(parse(thinking={"type": "disabled"}), reasoning="off").dropped == ()
    assert sent(parse(thinking=None), reasoning="off").dropped == ()


@pytest.mark.parametrize("name", ["anthropic-version", "Anthropic-Version"])
def test_the_version_is_sent_unless_the_profile_has_one(name):
    assert sent(chat()).headers["anthropic-version"] == "2023-06-01"
    assert "anthropic-version" not in sent(chat(), headers={name: "2030-01-01"}).headers


# -------------------------------------------------------------------- writing


def test_a_canonical_request_is_written_whole():
    request = chat(
        text(Role.SYSTEM, "a"),
        Message(role=Role.DEVELOPER, content=(Text(text="b", cache="1h"),)),
        USER,
        tools=(Tool(name="f", description="d", parameters=RAW_SCHEMA, strict=True, cache="5m"), Tool(name="g")),
        tool_choice=ToolChoice(mode="tool", tool="f"),
        parallel_tool_calls=False,
        response_format=ResponseFormat(kind="json_schema", name="label", schema=RAW_SCHEMA, strict=True),
        max_output_tokens=77,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        stop=("x", "y"),
        reasoning_effort="xhigh",
        service_tier="default",
        end_user="u",
        extra={"inference_geo": msgspec.Raw(b'"eu"')},
    )
    rendered = sent(request, stream=True)
    assert json.loads(rendered.body) == {
        "model": "upstream-model",
        "max_tokens": 77,
        "stream": True,
        "system": [
            {"type": "text", "text": "a"},
            {"type": "text", "text": "b", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ],
        "messages": [HELLO],
        "tools": [
            {
                "name": "f",
                "description": "d",
                "input_schema": SCHEMA,
                "strict": True,
                "cache_control": {"type": "ephemeral"},
            },
            {"name": "g", "input_schema": {"type": "object", "properties": {}}},
        ],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "output_config": {"effort": "xhigh", "format": {"type": "json_schema", "schema": SCHEMA}},
        "thinking": {"type": "adaptive"},
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "stop_sequences": ["x", "y"],
        "service_tier": "standard_only",
        "metadata": {"user_id": "u"},
        "inference_geo": "eu",
    }
    assert rendered.headers["accept"] == "text/event-stream"


def test_tool_use_with_signed_thoughts_and_results_goes_back_as_this_api_wants_it():
    assert said(
        USER,
        Message(
            role=Role.ASSISTANT,
            reasoning=(
                Reasoning(text="hm", signature="anthropic_messages:s"),
                Reasoning(signature="anthropic_messages:enc", redacted=True),
            ),
            content=(Text(text="I look"),),
            tool_calls=(ToolCall(id="t1", name="f", arguments=""), ToolCall(id="t2", name="g", arguments='{"a":  1}')),
        ),
        Message(role=Role.TOOL, tool_call_id="t1", content=(Text(text="fine", cache="5m"),)),
        Message(
            role=Role.TOOL,
            tool_call_id="t2",
            is_error=True,
            content=(Text(text="see"), Image(data=b"GIF", media_type="image/gif", cache="1h")),
        ),
        text(Role.USER, "and?"),
    ) == [
        HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "enc"},
                {"type": "text", "text": "I look"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {}},
                {"type": "tool_use", "id": "t2", "name": "g", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": "fine",
                    "cache_control": {"type": "ephemeral"},
                },
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "is_error": True,
                    "content": [
                        {"type": "text", "text": "see"},
                        {
                            "type": "image",
                            "source": {"type": "base64", "media_type": "image/gif", "data": "R0lG"},
                            "cache_control": {"type": "ephemeral", "ttl": "1h"},
                        },
                    ],
                },
                {"type": "text", "text": "and?"},
            ],
        },
    ]


def test_the_name_of_a_tool_in_its_result_is_told_by_the_call_already():
    result = Message(role=Role.TOOL, tool_call_id="t1", name="f", content=(Text(text="x"),))
    assert said(result) == [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "x"}]}]


def test_images_and_documents_have_a_source_each():
    assert said(
        Message(
            role=Role.USER,
            content=(
                Image(url="https://h/i.png", detail="auto"),
                Document(url="https://h/d.pdf"),
                Document(file_id="f1"),
                Document(data=PDF, filename="d.pdf"),
                Document(data="ä".encode(), media_type="text/markdown"),
            ),
        )
    ) == [
        {
            "role": "user",
            "content": [
                {"type": "image", "source": {"type": "url", "url": "https://h/i.png"}},
                {"type": "document", "source": {"type": "url", "url": "https://h/d.pdf"}},
                {"type": "document", "source": {"type": "file", "file_id": "f1"}},
                {
                    "type": "document",
                    "source": {
                        "type": "base64",
                        "media_type": "application/pdf",
                        "data": base64.b64encode(PDF).decode(),
                    },
                    "title": "d.pdf",
                },
                {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "ä"}},
            ],
        }
    ]


def test_what_one_side_says_in_a_row_is_one_turn_and_nothing_said_is_none():
    assert said(
        text(Role.USER, "a"),
        text(Role.USER, "b"),
        Message(role=Role.ASSISTANT),
        text(Role.ASSISTANT, ""),
        text(Role.USER, "c"),
        Message(role=Role.ASSISTANT, refusal="I cannot"),
        text(Role.ASSISTANT, "or can I"),
    ) == [
        {"role": "user", "content": [{"type": "text", "text": letter} for letter in "abc"]},
        {"role": "assistant", "content": [{"type": "text", "text": t} for t in ("I cannot", "or can I")]},
    ]


SYSTEM = text(Role.SYSTEM, "be brief")
ANSWER = text(Role.ASSISTANT, "yes")


@pytest.mark.parametrize(
    "messages",
    [
        (USER, SYSTEM),
        (USER, SYSTEM, ANSWER),
        (USER, ANSWER, USER, SYSTEM, text(Role.DEVELOPER, "be kind")),
        (
            USER,
            Message(role=Role.ASSISTANT, tool_calls=(ToolCall(id="t", name="f", arguments=""),)),
            Message(role=Role.TOOL, tool_call_id="t"),
            SYSTEM,
        ),
    ],
)
def test_a_system_message_in_the_midst_stays_where_this_api_lets_it_stand(messages):
    rendered = render(chat(*messages))
    assert "system" not in rendered
    turns = rendered["messages"]
    assert isinstance(turns, list)
    assert [turn["role"] for turn in turns].count("system") == 1


@pytest.mark.parametrize(
    ("messages", "path"),
    [
        ((USER, SYSTEM, USER), "messages[1]"),
        ((USER, ANSWER, SYSTEM), "messages[2]"),
        ((USER, ANSWER, SYSTEM, USER), "messages[2]"),
    ],
)
def test_a_system_message_elsewhere_is_refused_or_loses_its_place_where_the_profile_says_so(messages, path):
    assert refused(chat(SYSTEM, *messages)) == f"messages[{int(path[9]) + 1}]"
    rendered = sent(chat(*messages), omit=frozenset({"messages.place"}))
    content = json.loads(rendered.body)
    assert content["system"] == "be brief"
    assert "system" not in {turn["role"] for turn in content["messages"]}
    assert rendered.dropped == (path,)


def test_where_no_model_takes_the_role_every_system_message_joins_the_first():
    content = render(chat(SYSTEM, USER, text(Role.SYSTEM, "be kind"), ANSWER), omit=frozenset({"messages.place"}))
    assert content["system"] == [{"type": "text", "text": "be brief"}, {"type": "text", "text": "be kind"}]
    assert content["messages"] == [HELLO, {"role": "assistant", "content": "yes"}]


@pytest.mark.parametrize(
    ("request_", "path"),
    [
        (chat(seed=1), "seed"),
        (chat(n=2), "n"),
        (chat(presence_penalty=0.1), "presence_penalty"),
        (chat(frequency_penalty=-1.0), "frequency_penalty"),
        (chat(logprobs=True), "logprobs"),
        (chat(top_logprobs=3), "top_logprobs"),
        (chat(logit_bias={"1": 2.0}), "logit_bias"),
        (chat(verbosity="low"), "verbosity"),
        (chat(prompt_cache_key="k"), "prompt_cache_key"),
        (chat(store=True), "store"),
        (chat(metadata={"a": "b"}), "metadata"),
        (chat(temperature=1.5), "temperature"),
        (chat(service_tier="flex"), "service_tier"),
        (chat(response_format=ResponseFormat(kind="json_object")), "response_format"),
    ],
)
def test_what_this_api_has_no_word_for_is_refused_or_dropped_where_the_profile_says_so(request_, path):
    assert refused(request_) == path
    rendered = sent(request_, omit=frozenset({path}))
    assert rendered.dropped == (path,)
    assert json.loads(rendered.body) == render(chat())


@pytest.mark.parametrize(
    "request_",
    [
        chat(n=1, presence_penalty=0.0, frequency_penalty=0.0, logprobs=False, store=False, metadata={}),
        chat(response_format=ResponseFormat(kind="text"), parallel_tool_calls=True, logit_bias={}),
    ],
)
def test_what_asks_for_what_is_the_case_anyway_is_no_question(request_):
    rendered = sent(request_)
    assert json.loads(rendered.body) == render(chat())
    assert rendered.dropped == ()


@pytest.mark.parametrize(
    ("message", "path"),
    [
        (Message(role=Role.USER, content=(Text(text="x"), Audio(data=b"x", format="wav"))), "messages[0].content[1]"),
        (
            Message(role=Role.USER, content=(Opaque(protocol="gemini", raw=msgspec.Raw(b"{}")),)),
            "messages[0].content[0]",
        ),
        (Message(role=Role.USER, name="ann", content=(Text(text="x"),)), "messages[0].name"),
        (Message(role=Role.USER, content=(Image(url="https://h/i", detail="high"),)), "messages[0].content[0].detail"),
        (Message(role=Role.USER, content=(Image(data=b"x"),)), "messages[0].content[0].media_type"),
        (
            Message(role=Role.USER, content=(Document(data=b"PK", media_type="application/zip"),)),
            "messages[0].content[0].media_type",
        ),
        (
            Message(role=Role.USER, content=(Document(data=b"\xff", media_type="text/plain"),)),
            "messages[0].content[0].data",
        ),
        (Message(role=Role.ASSISTANT, content=(Image(url="https://h/i"),)), "messages[0].content[0]"),
        (
            Message(role=Role.ASSISTANT, tool_calls=(ToolCall(id="t", name="f", arguments='{"a":'),)),
            "messages[0].tool_calls[0].arguments",
        ),
        (
            Message(role=Role.ASSISTANT, tool_calls=(ToolCall(id="t", name="f", arguments="[1]"),)),
            "messages[0].tool_calls[0].arguments",
        ),
        (Message(role=Role.TOOL, content=(Text(text="x"),)), "messages[0].tool_call_id"),
        (SYSTEM, "messages"),
    ],
)
def test_a_message_that_cannot_be_said_is_refused_with_its_path(message, path):
    assert refused(chat(message)) == path


def test_marks_of_a_message_are_dropped_where_the_profile_says_so():
    request = chat(
        Message(role=Role.USER, name="ann", content=(Text(text="hi", cache="5m"), Image(url="u", detail="low"))),
        Message(
            role=Role.ASSISTANT,
            reasoning=(Reasoning(text="hm"),),
            tool_calls=(ToolCall(id="t", name="f", arguments=""),),
        ),
        Message(role=Role.TOOL, tool_call_id="t", is_error=True),
        tools=(Tool(name="f", cache="1h"),),
    )
    marks = {"cache", "is_error", "reasoning", "name", "detail"}
    rendered = sent(request, omit=frozenset(f"messages.{mark}" for mark in marks))
    assert set(rendered.dropped) == {
        "messages[0].name",
        "messages[0].content[0].cache",
        "messages[0].content[1].detail",
        "messages[1].reasoning[0]",
        "messages[2].is_error",
        "tools[0].cache",
    }
    assert b"cache_control" not in rendered.body
    assert b"is_error" not in rendered.body
    assert b"thinking" not in rendered.body


def test_what_another_protocol_does_not_carry_is_refused_unless_the_profile_omits_it():
    request = chat(native=NativeRequest(protocol="chat_completions", fields={}, unmapped=("web_search_options",)))
    assert refused(request) == "web_search_options"
    assert sent(request, omit=frozenset({"web_search_options"})).dropped == ("web_search_options",)


@pytest.mark.parametrize(
    ("choice", "parallel", "told"),
    [
        (None, None, None),
        (None, False, {"type": "auto", "disable_parallel_tool_use": True}),
        (None, True, {"type": "auto", "disable_parallel_tool_use": False}),
        (ToolChoice(mode="auto"), None, {"type": "auto"}),
        (ToolChoice(mode="required"), None, {"type": "any"}),
        (ToolChoice(mode="none"), False, {"type": "none"}),
        (ToolChoice(mode="tool", tool="f"), None, {"type": "tool", "name": "f"}),
    ],
)
def test_the_choice_of_tools_has_a_word_for_each_case(choice, parallel, told):
    request = chat(tools=(Tool(name="f"),), tool_choice=choice, parallel_tool_calls=parallel)
    assert render(request).get("tool_choice") == told


D = DEFAULT_MAX_TOKENS


@pytest.mark.parametrize(
    ("mode", "fields", "thinking", "effort", "limit"),
    [
        (None, {}, None, None, D),
        (None, {"reasoning_effort": "none"}, {"type": "disabled"}, None, D),
        (None, {"reasoning_effort": "minimal"}, {"type": "adaptive"}, "low", D),
        (None, {"reasoning_effort": "high", "max_output_tokens": 50}, {"type": "adaptive"}, "high", 50),
        (None, {"reasoning_budget_tokens": 0}, {"type": "disabled"}, None, D),
        (None, {"reasoning_budget_tokens": 0, "max_output_tokens": 0}, {"type": "disabled"}, None, 0),
        (None, {"reasoning_budget_tokens": 5000}, {"type": "enabled", "budget_tokens": 5000}, None, D + 5000),
        (
            None,
            {"reasoning_budget_tokens": 5000, "reasoning_effort": "low", "max_output_tokens": 5001},
            {"type": "enabled", "budget_tokens": 5000},
            "low",
            5001,
        ),
        (
            None,
            {"reasoning_budget_tokens": 5000, "reasoning_effort": "none"},
            {"type": "enabled", "budget_tokens": 5000},
            None,
            D + 5000,
        ),
        ("effort", {"reasoning_budget_tokens": 5000}, {"type": "adaptive"}, "medium", D),
        ("effort", {"reasoning_budget_tokens": 0}, {"type": "disabled"}, None, D),
        ("budget", {"reasoning_effort": "medium"}, {"type": "enabled", "budget_tokens": 8192}, None, D + 8192),
        (
            "budget",
            {"reasoning_effort": "high", "max_output_tokens": 6000},
            {"type": "enabled", "budget_tokens": 3000},
            None,
            6000,
        ),
        (
            "budget",
            {"reasoning_effort": "low", "max_output_tokens": 1100},
            {"type": "enabled", "budget_tokens": 1024},
            None,
            1100,
        ),
        ("off", {}, {"type": "disabled"}, None, D),
    ],
)
def test_reasoning_is_asked_for_as_the_profile_says(mode, fields, thinking, effort, limit):
    content = render(chat(**fields), reasoning=mode)
    output = content.get("output_config", {})
    assert isinstance(output, dict)
    assert (content.get("thinking"), output.get("effort"), content["max_tokens"]) == (thinking, effort, limit)


@pytest.mark.parametrize(
    ("mode", "fields", "path"),
    [
        (None, {"reasoning_budget_tokens": 500}, "reasoning_budget_tokens"),
        (None, {"reasoning_budget_tokens": 2000, "max_output_tokens": 2000}, "reasoning_budget_tokens"),
        ("budget", {"reasoning_effort": "high", "max_output_tokens": 1024}, "reasoning_effort"),
    ],
)
def test_a_budget_this_api_does_not_take_is_refused(mode, fields, path):
    assert refused(chat(**fields), reasoning=mode) == path


@pytest.mark.parametrize(
    ("mode", "dropped"),
    [
        ("off", ("reasoning_effort", "reasoning_budget_tokens")),
        ("effort", ("reasoning_budget_tokens",)),
        ("budget", ("reasoning_effort",)),
        (None, ()),
    ],
)
def test_what_is_not_sent_of_a_wish_for_reasoning_is_told(mode, dropped):
    assert sent(chat(reasoning_effort="high", reasoning_budget_tokens=5000), reasoning=mode).dropped == dropped


def test_an_extra_field_may_not_write_what_is_ours():
    assert refused(chat(extra={"stream": msgspec.Raw(b"true")})) == "extra.stream"
    assert refused(chat(extra={"messages": msgspec.Raw(b"[]")})) == "extra.messages"


def test_what_is_read_and_written_from_the_canonical_form_is_the_same_request():
    fields = {
        "max_tokens": 3000,
        "system": "s",
        "messages": [
            HELLO,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "tool_use", "id": "t", "name": "f", "input": {"a": [1]}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t", "content": "x", "is_error": True},
                    {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
                ],
            },
        ],
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 2000},
        "service_tier": "auto",
        "metadata": {"user_id": "u"},
    }
    request = PROTOCOL.parse_request(json.dumps(fields).encode())
    canonical = msgspec.structs.replace(request, native=None)
    assert render(canonical) == {"model": "upstream-model", **fields}


# ------------------------------------------------------------- counting tokens


def test_a_request_for_a_count_holds_what_is_counted_and_no_more():
    request = parse(system="s", temperature=0.5, stream=True, thinking={"type": "adaptive"})
    rendered = PROTOCOL.render_count_request(call(request))
    assert rendered.path == "/messages/count_tokens"
    assert json.loads(rendered.body) == {
        "model": "upstream-model",
        "system": "s",
        "messages": [HELLO],
        "thinking": {"type": "adaptive"},
    }
    rendered = PROTOCOL.render_count_request(call(chat(SYSTEM, USER, tools=(Tool(name="f"),), max_output_tokens=5)))
    assert json.loads(rendered.body).keys() == {"model", "system", "messages", "tools"}


def test_a_count_is_read_and_told():
    assert PROTOCOL.parse_count_response(200, {}, b'{"input_tokens": 42}') == 42
    assert json.loads(PROTOCOL.render_count_response(42)) == {"input_tokens": 42}
    for body in (b"{}", b'{"input_tokens": -1}', b"x"):
        with pytest.raises(Broken):
            PROTOCOL.parse_count_response(200, {}, body)
    with pytest.raises(Rejected):
        PROTOCOL.parse_count_response(429, {}, b'{"type":"error","error":{"type":"rate_limit_error"}}')


def test_the_signature_of_a_call_comes_back_with_its_call_wherever_its_block_stands():
    signed = [{"type": "redacted_thinking", "data": f"call:{n}:gemini:call:c{n}"} for n in (1, 0, 7)]
    calls = [{"type": "tool_use", "id": f"toolu_{n}", "name": "look", "input": {}} for n in (0, 1)]
    results = [{"type": "tool_result", "tool_use_id": f"toolu_{n}", "content": "x"} for n in (0, 1)]
    turn = {"role": "assistant", "content": [*signed, *calls]}
    body = {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "hi"}, turn, {"role": "user", "content": results}],
    }
    request = PROTOCOL.parse_request(json.dumps(body).encode())
    said = request.messages[1]
    assert [call.signature for call in said.tool_calls] == ["gemini:call:c0", "gemini:call:c1"]
    # The call of the third is gone: whatever it was, no provider made it.
    assert [thought.signature for thought in said.reasoning] == ["call:7:gemini:call:c7"]
    http = sent(request)
    assert json.loads(http.body)["messages"][1]["content"] == calls
    assert http.dropped == ("messages[1].content[0]", "messages[1].content[1]", "messages[1].content[2]")


@pytest.mark.parametrize("native", [True, False], ids=["the same format", "another"])
def test_only_thoughts_that_this_protocol_signed_are_sent_and_none_where_the_profile_omits_them(native):
    thoughts = [
        {"type": "thinking", "thinking": "a", "signature": ""},
        {"type": "thinking", "thinking": "b", "signature": "gemini:thought:abc"},
        {"type": "thinking", "thinking": "c", "signature": "unsigned:"},
        {"type": "redacted_thinking", "data": "responses:abc"},
        {"type": "thinking", "thinking": "d", "signature": "c2lnbmVk"},
        {"type": "redacted_thinking", "data": "aGlkZGVu"},
    ]
    said = {"role": "assistant", "content": [*thoughts, {"type": "text", "text": "t"}]}
    request = parse(messages=[HELLO, said, HELLO])
    request = request if native else msgspec.structs.replace(request, native=None)
    for omit, kept in (frozenset[str](), thoughts[4:]), (frozenset({"messages.reasoning"}), []):
        http = sent(request, omit=omit)
        content = json.loads(http.body)["messages"][1]["content"]
        assert [block for block in content if isinstance(block, dict) and "thinking" in block["type"]] == kept
        assert http.dropped == tuple(f"messages[1].content[{j}]" for j in range(6 - len(kept)))
