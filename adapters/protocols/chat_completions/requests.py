"""
Requests of Chat Completions, from a caller and to a provider.

A request keeps its own top-level fields byte for byte, and goes on with them to a provider of the same protocol, so
that a field we never heard of arrives. The canonical form is filled beside it, for routing and for other protocols.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any, cast

import msgspec

from adapters import signatures
from adapters.body import data_url, from_base64, given, read_object, says_something, to_data_url, typed
from adapters.chat import (
    Audio,
    ChatRequest,
    Document,
    Image,
    Message,
    NativeRequest,
    Opaque,
    Part,
    Reasoning,
    ResponseFormat,
    Role,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
)
from adapters.contract import Endpoint, HttpRequest, UpstreamCall
from adapters.envelope import Envelope
from adapters.envelope import envelope as envelope_of
from adapters.errors import MalformedRequest
from adapters.paths import Paths, Spot, Words
from adapters.protocols.chat_completions import answers, schema
from adapters.protocols.chat_completions.answers import NAME
from adapters.reasoning import LEFT_TO_PROVIDER, effort_of
from adapters.sending import Sending

_PATH = "/chat/completions"

#: Whose messages may be nothing but a text.
_SPEAKERS: Mapping[str, Role] = {str(role): role for role in Role if role is not Role.TOOL}

#: Top-level fields that are ours to write.
_ENVELOPE = frozenset({"model", "stream", "stream_options"})
#: Top-level fields that the canonical form carries.
_MAPPED = frozenset(field.name for field in msgspec.structs.fields(schema.RequestIn))

#: The same of what a message and a tool hold. What a caller repeats from an answer about the answer may be lost.
_READ = {
    "messages": frozenset(field.name for field in msgspec.structs.fields(schema.MessageIn))
    | {"annotations", "executed_tools", "id"},
    "tools": frozenset(field.name for field in msgspec.structs.fields(schema.ToolIn)) | {"custom"},
}
#: Of a budget that we make of an effort: OpenRouter takes no less for the models it asks in tokens.
_LEAST_BUDGET = 1024
_PATH_CHARACTERS = 96

#: Top-level fields that ask for reasoning, at any provider.
_REASONING_FIELDS = frozenset(
    {"reasoning_effort", "reasoning", "thinking", "enable_thinking", "thinking_budget", "include_reasoning"}
)
#: The same of a message: what was thought.
_REASONING_MARKS = frozenset({"reasoning_content", "reasoning", "reasoning_details"})

#: Canonical names to those of this format.
WORDS: Words = {
    "max_output_tokens": ("max_completion_tokens", "max_tokens"),
    "end_user": ("safety_identifier", "user"),
    "reasoning_effort": ("reasoning_effort", "reasoning.effort"),
    "reasoning_budget_tokens": ("reasoning.max_tokens", "thinking_budget"),
    "tool_choice": ("tool_choice", "function_call"),
    "response_format.schema": ("response_format.json_schema.schema",),
    "response_format.description": ("response_format.json_schema.description",),
    "cache": ("cache_control", "function.cache_control"),
    "detail": ("image_url.detail",),
    "url": ("image_url.url",),
    "filename": ("file.filename",),
    "data": ("file.file_data", "input_audio.data"),
    "media_type": ("file.file_data", "image_url.url"),
    "reasoning": ("reasoning_content", "reasoning", "reasoning_details", "content"),
    "signature": ("extra_content",),
    "arguments": ("function.arguments", "arguments"),
    "strict": ("function.strict", "strict"),
    "refusal": ("refusal", "content"),
    "tool_call_id": ("tool_call_id", "name"),
}

_options = msgspec.json.Decoder(schema.StreamOptions | None)


def envelope(request: ChatRequest) -> Envelope:
    """Of a request that `parse_request` gave. Usage is told in a stream where that is asked."""
    options = request.native.fields.get("stream_options") if request.native is not None else None
    streamed = _options.decode(options) if options is not None else None
    asked = envelope_of(request)
    return Envelope(
        model=asked.model,
        stream=asked.stream,
        include_usage=streamed is not None and streamed.include_usage is True,
    )


# ------------------------------------------------------------------- reading


def parse_request(body: bytes) -> ChatRequest:
    """Raises `MalformedRequest`, which names the field and repeats none of its content."""
    fields, content = read_object(body)
    wire = typed(body, schema.RequestIn, "")
    unmapped = [name for name in fields if name not in _MAPPED]
    _note_unread(content, unmapped)
    if content.get("modalities") == ["text"]:
        # What every model answers in, where nothing else is asked for.
        unmapped.remove("modalities")
    if wire.safety_identifier and wire.user and wire.user != wire.safety_identifier:
        unmapped.append("user")
    effort, budget = _reasoning_wanted(wire, unmapped)
    spots: list[Spot] = []
    messages = tuple(_message(message, f"messages[{i}]", unmapped, spots) for i, message in enumerate(wire.messages))
    tools = [(f"tools[{i}]", _tool(tool, f"tools[{i}]", unmapped)) for i, tool in enumerate(wire.tools or ())]
    tools += [(f"functions[{i}]", _function(function)) for i, function in enumerate(wire.functions or ())]
    limit = wire.max_completion_tokens if wire.max_completion_tokens is not None else wire.max_tokens
    return ChatRequest(
        messages=messages,
        tools=tuple(tool for _, tool in tools if tool is not None),
        tool_choice=_tool_choice(wire, unmapped),
        parallel_tool_calls=wire.parallel_tool_calls,
        response_format=_response_format(wire.response_format, unmapped),
        max_output_tokens=limit,
        temperature=wire.temperature,
        top_p=wire.top_p,
        top_k=wire.top_k,
        stop=(wire.stop,) if isinstance(wire.stop, str) else wire.stop or (),
        seed=wire.seed,
        n=wire.n,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        logprobs=wire.logprobs,
        top_logprobs=wire.top_logprobs,
        logit_bias=wire.logit_bias,
        reasoning_effort=effort,
        reasoning_budget_tokens=budget,
        verbosity=wire.verbosity,
        service_tier=wire.service_tier,
        prompt_cache_key=wire.prompt_cache_key,
        prompt_cache_retention=wire.prompt_cache_retention,
        store=wire.store,
        metadata=wire.metadata,
        end_user=wire.safety_identifier or wire.user,
        native=NativeRequest(protocol=NAME, fields=fields, unmapped=tuple(unmapped)),
        paths=Paths(messages=spots, tools=[at for at, tool in tools if tool is not None], words=WORDS),
    )


def _note_unread(content: Mapping[str, Any], unmapped: list[str]) -> None:
    """Names what messages and tools hold that is read by nobody here: another protocol would lose it in silence."""
    for name, known in _READ.items():
        for i, item in enumerate(content.get(name) or ()):
            if not known.issuperset(item):
                unmapped.extend(
                    f"{name}[{i}].{key}"[:_PATH_CHARACTERS]
                    for key in sorted(item.keys() - known)
                    if says_something(item[key])
                )


def _reasoning_wanted(wire: schema.RequestIn, unmapped: list[str]) -> tuple[str | None, int | None]:
    """Effort and budget, from OpenAI's field or OpenRouter's object."""
    if wire.reasoning is None:
        return wire.reasoning_effort, None
    if not isinstance(wire.reasoning, dict):
        unmapped.append("reasoning")
        return wire.reasoning_effort, None
    effort, budget = None, None
    for name, value in wire.reasoning.items():
        match name, value:
            case "effort", str():
                effort = value
            case "max_tokens", int() if not isinstance(value, bool) and 0 <= value < 2**31:
                budget = value
            case _:
                unmapped.append(f"reasoning.{name}"[:64])
    return wire.reasoning_effort or effort, budget


def _message(wire: schema.MessageIn, path: str, unmapped: list[str], spots: list[Spot]) -> Message:
    role, text = _SPEAKERS.get(wire.role), wire.content
    if role is not None and type(text) is str and wire == schema.MessageIn(role=wire.role, content=text):
        # What nearly every message is: all that it has is its text.
        spots.append(Spot(path))
        return Message(role=role, content=(Text(text=text),) if text else ())
    thoughts = _thoughts(wire, path, unmapped)
    calls = []
    called: list[str] = []
    places: list[str] = []
    for i, call in enumerate(wire.tool_calls or ()):
        if call.function is None:
            unmapped.append(f"{path}.tool_calls[{i}]")
        else:
            called.append(f"{path}.tool_calls[{i}]")
            calls.append(
                ToolCall(
                    id=call.id or "",
                    name=call.function.name,
                    arguments=call.function.arguments,
                    signature=answers.signature_in(call.extra_content),
                )
            )
    call_id = wire.tool_call_id
    if wire.function_call is not None:
        # The older form has one call and no ids: its name pairs it with its result.
        called.append(f"{path}.function_call")
        calls.append(
            ToolCall(id=wire.function_call.name, name=wire.function_call.name, arguments=wire.function_call.arguments)
        )
    if wire.role == "function":
        call_id = call_id or wire.name
    elif wire.role == "tool" and not call_id:
        raise MalformedRequest(f"{path}.tool_call_id", "is required")
    if isinstance(wire.content, str):
        content: tuple[Part, ...] = (Text(text=wire.content),) if wire.content else ()
        refusal = wire.refusal
    else:
        thoughts_of = thoughts if wire.role == "assistant" else None
        parts, refused = _parts(wire.content or (), path, thoughts_of, places)
        content, refusal = tuple(parts), wire.refusal or refused or None
    spots.append(Spot(path, places, called))
    return Message(
        role=Role.TOOL if wire.role == "function" else Role(wire.role),
        content=content,
        name=wire.name,
        tool_calls=tuple(calls),
        tool_call_id=call_id,
        refusal=refusal,
        reasoning=tuple(thoughts),
    )


def _thoughts(wire: schema.MessageIn, path: str, unmapped: list[str]) -> list[Reasoning]:
    """Beside the content: the details where there are any that hold the text, since only they keep blocks apart."""
    unknown: dict[str, None] = {}
    pieces = answers.read_details(wire.reasoning_details, unknown)
    unmapped.extend(f"{path}.{name}" for name in unknown)
    plain = wire.reasoning_content or wire.reasoning
    if plain and not any(piece.text for piece in pieces):
        pieces.insert(0, answers.Thought(plain))
    return list(answers.joined(pieces))


def _parts(
    raws: Iterable[msgspec.Raw], path: str, thoughts: list[Reasoning] | None, places: list[str]
) -> tuple[list[Part], str]:
    """
    Parts, and refusals joined. Mistral's `thinking` parts are put into `thoughts`, where reasoning may be; where each
    part was is put into `places`.
    """
    parts: list[Part] = []
    refusals: list[str] = []
    for i, raw in enumerate(raws):
        at = f"{path}.content[{i}]"
        wire = typed(raw, schema.PartIn, at)
        cache = _cache(wire.cache_control)
        match wire:
            case schema.PartIn(type="text", text=str() as text):
                parts.append(Text(text=text, cache=cache))
            case schema.PartIn(type="refusal", refusal=str() as refusal):
                refusals.append(refusal)
            case schema.PartIn(type="image_url", image_url=schema.ImageUrl() as image):
                parts.append(_image(image, cache, f"{at}.image_url.url"))
            case schema.PartIn(type="input_audio", input_audio=schema.InputAudio() as audio):
                data = from_base64(audio.data, f"{at}.input_audio.data")
                parts.append(Audio(data=data, format=audio.format))
            case schema.PartIn(type="file", file=schema.File() as file):
                parts.append(_file(file, cache, f"{at}.file"))
            case schema.PartIn(type="thinking", thinking=str() | tuple() as thinking) if thoughts is not None:
                if text := answers.thinking_text(thinking):
                    thoughts.append(Reasoning(text=text))
            case schema.PartIn(type="text" | "refusal" | "image_url" | "input_audio" | "file"):
                raise MalformedRequest(f"{at}.{wire.type}", "is required")
            case _:
                parts.append(Opaque(protocol=NAME, raw=raw))
        if len(parts) > len(places):
            places.append(at)
    return parts, "".join(refusals)


def _image(wire: schema.ImageUrl, cache: str | None, path: str) -> Image:
    if not wire.url.startswith("data:"):
        return Image(url=wire.url, detail=wire.detail, cache=cache)
    media_type, data = data_url(wire.url, path)
    return Image(data=data, media_type=media_type, detail=wire.detail, cache=cache)


def _file(wire: schema.File, cache: str | None, path: str) -> Document:
    if wire.file_id is not None:
        return Document(file_id=wire.file_id, filename=wire.filename, cache=cache)
    if wire.file_data is None:
        raise MalformedRequest(path, "needs file_id or file_data")
    if wire.file_data.startswith("data:"):
        media_type, data = data_url(wire.file_data, f"{path}.file_data")
    else:
        media_type, data = None, from_base64(wire.file_data, f"{path}.file_data")
    return Document(data=data, media_type=media_type, filename=wire.filename, cache=cache)


def _tool(wire: schema.ToolIn, path: str, unmapped: list[str]) -> Tool | None:
    if wire.function is not None:
        return _function(wire.function, wire.cache_control)
    if wire.type == "function":
        raise MalformedRequest(f"{path}.function", "is required")
    unmapped.append(path)
    return None


def _function(wire: schema.FunctionIn, cache: schema.CacheControl | None = None) -> Tool:
    return Tool(
        name=wire.name,
        description=wire.description,
        parameters=given(wire.parameters),
        strict=wire.strict,
        cache=_cache(cache or wire.cache_control),
    )


def _cache(wire: schema.CacheControl | None) -> str | None:
    return None if wire is None else wire.ttl or "5m"


def _tool_choice(wire: schema.RequestIn, unmapped: list[str]) -> ToolChoice | None:
    name, choice = ("tool_choice", wire.tool_choice) if wire.tool_choice is not None else ("function_call", None)
    match choice if choice is not None else wire.function_call:
        case None:
            return None
        case "auto" | "none" | "required" as mode:
            return ToolChoice(mode=mode)
        case "any":  # Mistral's word
            return ToolChoice(mode="required")
        case schema.ToolChoiceIn(type="function", function=schema.NamedFunction(name=tool)):
            return ToolChoice(mode="tool", tool=tool)
        case schema.NamedFunction(name=tool):
            return ToolChoice(mode="tool", tool=tool)
        case schema.ToolChoiceIn(type="function"):
            raise MalformedRequest("tool_choice.function", "is required")
        case schema.ToolChoiceIn():
            unmapped.append("tool_choice")
            return None
        case _:
            raise MalformedRequest(name, "is not one of the allowed values")


def _response_format(wire: schema.ResponseFormatIn | None, unmapped: list[str]) -> ResponseFormat | None:
    if wire is None:
        return None
    if wire.type not in {"text", "json_object", "json_schema"}:
        unmapped.append("response_format")
        return None
    if wire.type != "json_schema":
        return ResponseFormat(kind=wire.type)
    wanted = wire.json_schema
    if wanted is None:
        raise MalformedRequest("response_format.json_schema", "is required")
    return ResponseFormat(
        kind=wire.type,
        name=wanted.name,
        description=wanted.description,
        schema=given(wanted.schema),
        strict=wanted.strict,
    )


# ------------------------------------------------------------------- writing


def render_request(call: UpstreamCall, *, stream: bool) -> HttpRequest:
    """Raises `RequestNotExpressible` for what this protocol, or this endpoint, has no word for."""
    endpoint, request = call.endpoint, call.request
    native = request.native
    sending = Sending(call, NAME, WORDS)
    fields: dict[str, Any]
    if native is not None and native.protocol == NAME:
        fields = _native_fields(request, native, sending)
    else:
        fields = _canonical_fields(request, sending)
    options = fields.pop("stream_options", None)
    fields.pop("stream", None)
    fields["model"] = call.model
    if stream:
        fields["stream"] = True
        asked = msgspec.json.decode(options) if isinstance(options, msgspec.Raw) else None
        if "stream_options" in endpoint.omit:
            sending.lost("stream_options")
        else:
            fields["stream_options"] = {**(asked if isinstance(asked, dict) else {}), "include_usage": True}
    sending.as_profiled(fields)
    return sending.post(_PATH, fields, stream=stream)


def _native_fields(request: ChatRequest, native: NativeRequest, sending: Sending) -> dict[str, Any]:
    """The caller's own, but for what the profile says of this provider."""
    fields: dict[str, Any] = dict(native.fields)
    endpoint = sending.endpoint
    _rename_limit(fields, endpoint)
    if endpoint.reasoning == "off":
        for name in sorted(_REASONING_FIELDS & fields.keys()):
            sending.lost(name)
            del fields[name]
        _ask_for_reasoning(fields, "none", None, sending)
    elif endpoint.reasoning is not None and "reasoning_effort" in fields and request.reasoning_effort is not None:
        del fields["reasoning_effort"]
        _ask_for_reasoning(fields, request.reasoning_effort, None, sending)
    without_cache = "messages.cache" in endpoint.omit and _has_cache(request)
    thought = [message for message in request.messages if message.reasoning or message.tool_calls]
    without_reasoning = "messages.reasoning" in endpoint.omit and any(
        message.reasoning or any(call.signature is not None for call in message.tool_calls) for message in thought
    )
    # A signature of a call that its own provider told has no mark.
    if not without_reasoning and any(
        any(signatures.is_foreign(NAME, block.signature) for block in message.reasoning)
        or any(call.signature is not None for call in message.tool_calls)
        for message in thought
    ):
        fields["messages"] = _unsigned(msgspec.json.decode(fields["messages"]), sending)
    if without_cache or without_reasoning:
        for name in ("messages", "tools") if without_cache else ("messages",):
            if name in fields:
                content = msgspec.json.decode(fields[name])
                _strip(content, name, sending, cache=without_cache, reasoning=without_reasoning)
                fields[name] = content
    return fields


def _unsigned(messages: list[dict[str, Any]], sending: Sending) -> list[dict[str, Any]]:
    """The caller's messages without what a provider of another protocol has signed. What can be read stays."""
    for i, message in enumerate(messages):
        kept = []
        for j, detail in enumerate(_listed(message, "reasoning_details")):
            foreign = _foreign_fields(detail)
            for field in foreign:
                del detail[field]
                sending.drop_own(f"messages[{i}].reasoning_details[{j}].{field}")
            if not foreign or detail.get("text") or detail.get("summary"):
                kept.append(detail)
        if isinstance(message.get("reasoning_details"), list):
            message["reasoning_details"] = kept
        for j, call in enumerate(_listed(message, "tool_calls")):
            _unsign_call(call, f"messages[{i}].tool_calls[{j}]", sending)
    return messages


def _unsign_call(call: Any, path: str, sending: Sending) -> None:
    told = answers.told_signature(call.get("extra_content")) if isinstance(call, dict) else None
    if told is None or not signatures.is_marked(told):
        return
    signature = signatures.own(answers.SIGNED_CALL, told)
    if signature is not None and sending.endpoint.reasoning_field == "extra_content":
        call["extra_content"]["google"]["thought_signature"] = signature
    else:
        del call["extra_content"]
        sending.drop_own(f"{path}.extra_content")


def _foreign_fields(detail: object) -> list[str]:
    values = {field: detail.get(field) for field in ("signature", "data")} if isinstance(detail, dict) else {}
    return [
        field
        for field, value in values.items()
        if isinstance(value, str) and signatures.is_foreign(NAME, signatures.heard(NAME, value))
    ]


def _has_cache(request: ChatRequest) -> bool:
    return any(tool.cache is not None for tool in request.tools) or any(
        not isinstance(part, Audio | Opaque) and part.cache is not None
        for message in request.messages
        for part in message.content
    )


def _strip(items: object, at: str, sending: Sending, *, cache: bool, reasoning: bool) -> None:
    """Takes the marks off messages or tools that this provider has no word for."""
    for i, item in enumerate(items if isinstance(items, list) else ()):
        if not isinstance(item, dict):
            continue
        path = f"{at}[{i}]"
        for name in sorted(_REASONING_MARKS & item.keys()) if reasoning else ():
            if item.pop(name):
                sending.drop_own(f"{path}.{name}")
        for j, call in enumerate(_listed(item, "tool_calls") if reasoning else ()):
            if isinstance(call, dict) and call.pop("extra_content", None) is not None:
                sending.drop_own(f"{path}.tool_calls[{j}].extra_content")
        holders = [(path, item), (f"{path}.function", item.get("function"))]
        holders += [(f"{path}.content[{j}]", part) for j, part in enumerate(_listed(item, "content"))]
        for where, holder in holders if cache else ():
            if isinstance(holder, dict) and holder.pop("cache_control", None) is not None:
                sending.drop_own(f"{where}.cache_control")


def _listed(item: Mapping[str, Any], name: str) -> list[Any]:
    found = item.get(name)
    return found if isinstance(found, list) else []


def _ask_for_reasoning(fields: dict[str, Any], effort: str | None, budget: int | None, sending: Sending) -> None:
    """In the way the endpoint takes it: a word of effort or tokens, in a field or in OpenRouter's object."""
    endpoint = sending.endpoint
    if endpoint.reasoning == "budget" and effort in LEFT_TO_PROVIDER:
        effort = None
    if effort is None and budget is None:
        return
    match endpoint.reasoning:
        case "off":
            # Only the object has a word for it that is known to be taken; elsewhere `force` can say it.
            if endpoint.reasoning_object:
                fields["reasoning"] = {"effort": "none"}
        case "budget":
            limit = sending.output_limit
            tokens = (
                sending.effort_as_budget(effort or "none", limit, least=_LEAST_BUDGET) if budget is None else budget
            )
            if tokens is None:
                return
            if endpoint.reasoning_object:
                fields["reasoning"] = {"max_tokens": tokens} if tokens else {"effort": "none"}
            else:
                fields["thinking_budget"] = tokens  # the word of Alibaba and of many who serve Qwen
        case _:
            word = effort if effort is not None else effort_of(budget or 0)
            fields["reasoning" if endpoint.reasoning_object else "reasoning_effort"] = (
                {"effort": word} if endpoint.reasoning_object else word
            )


def _rename_limit(fields: dict[str, Any], endpoint: Endpoint) -> None:
    """To the one name the provider knows, where it is known that it knows only one."""
    names = ("max_completion_tokens", "max_tokens")
    if endpoint.max_tokens_field is None:
        return
    given = next((fields[name] for name in names if name in fields and bytes(fields[name]) != b"null"), None)
    for name in names:
        fields.pop(name, None)
    if given is not None:
        fields[endpoint.max_tokens_field] = given


def _canonical_fields(request: ChatRequest, sending: Sending) -> dict[str, Any]:
    sending.refuse_unmapped()
    endpoint = sending.endpoint
    fields: dict[str, Any] = {
        "messages": [_render_message(m, f"messages[{i}]", sending) for i, m in enumerate(request.messages)],
        "tools": [_render_tool(tool, f"tools[{i}]", sending) for i, tool in enumerate(request.tools)] or None,
        "tool_choice": _render_tool_choice(request.tool_choice),
        "parallel_tool_calls": request.parallel_tool_calls,
        "response_format": _render_response_format(request.response_format),
        endpoint.max_tokens_field or "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop": list(request.stop) or None,
        "seed": request.seed,
        "n": request.n,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "logprobs": request.logprobs,
        "top_logprobs": request.top_logprobs,
        "logit_bias": request.logit_bias,
        "verbosity": request.verbosity,
        "service_tier": request.service_tier,
        "prompt_cache_key": request.prompt_cache_key,
        "prompt_cache_retention": request.prompt_cache_retention,
        "store": request.store,
        "metadata": request.metadata,
        "user": request.end_user,
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    _render_reasoning_wanted(request, sending, fields)
    sending.add_extra(fields, _ENVELOPE)
    return fields


def _render_reasoning_wanted(request: ChatRequest, sending: Sending, fields: dict[str, Any]) -> None:
    effort, budget = request.reasoning_effort, request.reasoning_budget_tokens
    endpoint = sending.endpoint
    for name, wanted in (("reasoning_effort", effort), ("reasoning_budget_tokens", budget)):
        if wanted is not None and (sending.omits(name) or endpoint.reasoning == "off") and wanted not in {"none", 0}:
            sending.drop(name)
    if endpoint.reasoning == "off":
        effort, budget = "none", None
    else:
        effort = None if sending.omits("reasoning_effort") else effort
        budget = None if sending.omits("reasoning_budget_tokens") else budget
    _ask_for_reasoning(fields, effort, budget, sending)


def _render_message(message: Message, path: str, sending: Sending) -> dict[str, Any]:
    if message.is_error:
        message = sending.failure_told(message, path)
    rendered: dict[str, Any] = {
        "role": str(message.role),
        "content": _render_content(message, path, sending),
    }
    if message.name is not None and message.role is not Role.TOOL:  # its call names it
        rendered["name"] = message.name
    if message.tool_calls:
        signed = sending.endpoint.reasoning_field == "extra_content" and not sending.omits("messages.reasoning")
        rendered["tool_calls"] = []
        for call in message.tool_calls:
            signature = signatures.own(answers.SIGNED_CALL, call.signature) if signed else None
            rendered["tool_calls"].append(answers.render_call(call.id, call.name, call.arguments, signature))
        rendered["content"] = rendered["content"] or None
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    if message.refusal is not None:
        rendered["refusal"] = message.refusal
    if message.reasoning or any(call.signature is not None for call in message.tool_calls):
        _render_reasoning(message, path, sending, rendered)
    return rendered


def _render_reasoning(message: Message, path: str, sending: Sending, rendered: dict[str, Any]) -> None:
    """What the model thought, back in the way its provider takes it."""
    field = None if sending.omits("messages.reasoning") else sending.endpoint.reasoning_field
    details = field == "reasoning_details"
    # A signature is a proof for its own provider, and no other one misses it.
    for i, call in enumerate(message.tool_calls):
        taken = details or field == "extra_content"
        if call.signature and not (taken and signatures.own(answers.SIGNED_CALL, call.signature)):
            sending.drop(f"{path}.tool_calls[{i}].signature")
    thoughts = sending.thoughts(message, path, signed=details, unsigned=field not in {None, "extra_content"})
    blocks = [block for _, block in thoughts]
    if details:
        told = answers.render_details(blocks)
        told += [
            answers.render_detail("", signature, redacted=True, block_id=call.id, block=len(told) + number)
            for number, call in enumerate(message.tool_calls)
            if (signature := signatures.own(answers.SIGNED_CALL, call.signature)) is not None
        ]
        if told:
            rendered["reasoning_details"] = told
        return
    if not blocks:
        return
    if field == "content":
        said = rendered["content"]
        parts = [{"type": "text", "text": said}] if isinstance(said, str) and said else said or []
        thinking = [{"type": "thinking", "thinking": [{"type": "text", "text": block.text}]} for block in blocks]
        rendered["content"] = [*thinking, *parts]
    elif field is not None:
        rendered[field] = "".join(block.text for block in blocks)


def _render_content(message: Message, path: str, sending: Sending) -> str | list[Any]:
    match message.content:
        case ():
            return ""
        case (Text(text=text, cache=None),):
            return text
        case parts:
            rendered = [_render_part(part, f"{path}.content[{i}]", sending) for i, part in enumerate(parts)]
            if message.role is not Role.USER:
                sending.refuse_all_but_text(message, path)
            return rendered


def _render_cache(cache: str | None, path: str, sending: Sending) -> dict[str, Any]:
    """The mark of a cache boundary, where the provider takes it."""
    if cache is None:
        return {}
    if sending.endpoint.cache_control and not sending.omits("messages.cache"):
        return {"cache_control": {"type": "ephemeral"} if cache == "5m" else {"type": "ephemeral", "ttl": cache}}
    sending.refuse(f"{path}.cache", "has no cache boundaries", "messages.cache")
    return {}


def _render_part(part: Part, path: str, sending: Sending) -> Any:
    cache = {} if isinstance(part, Audio | Opaque) else _render_cache(part.cache, path, sending)
    match part:
        case Text():
            return {"type": "text", "text": part.text, **cache}
        case Image():
            url = part.url if part.url is not None else to_data_url(part.media_type or "image/png", part.data or b"")
            image = {"url": url} if part.detail is None else {"url": url, "detail": part.detail}
            return {"type": "image_url", "image_url": image, **cache}
        case Document():
            return {"type": "file", "file": _render_file(part, path, sending), **cache}
        case Audio():
            return {
                "type": "input_audio",
                "input_audio": {"data": base64.b64encode(part.data).decode(), "format": part.format},
            }
        case Opaque():
            if part.protocol != NAME:
                raise sending.refusal(path, f"a part that only {part.protocol} knows")
            return part.raw


def _render_file(part: Document, path: str, sending: Sending) -> dict[str, str]:
    if part.file_id is not None:
        file = {"file_id": part.file_id}
    elif part.data is not None:
        file = {"file_data": to_data_url(part.media_type or "application/pdf", part.data)}
    else:
        raise sending.refusal(f"{path}.url", f"{NAME} takes a document as data, not by URL")
    return file if part.filename is None else {**file, "filename": part.filename}


def _render_tool(tool: Tool, path: str, sending: Sending) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    cache = _render_cache(tool.cache, path, sending)
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}, **cache}


def _render_tool_choice(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.mode == "tool":
        return {"type": "function", "function": {"name": cast("str", choice.tool)}}
    return choice.mode


def _render_response_format(wanted: ResponseFormat | None) -> dict[str, Any] | None:
    if wanted is None:
        return None
    if wanted.kind != "json_schema":
        return {"type": wanted.kind}
    inner = {
        "name": wanted.name or "response",
        "description": wanted.description,
        "schema": wanted.schema,
        "strict": wanted.strict,
    }
    return {"type": wanted.kind, "json_schema": {k: v for k, v in inner.items() if v is not None}}
