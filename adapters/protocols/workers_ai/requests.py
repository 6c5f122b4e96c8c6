"""
Requests of Workers AI, from a caller and to a provider.

The model is in the address, not in the body. Messages and tools have the shapes of chat completions; a JSON schema
stands by itself where others wrap it, and a prompt cache is told by a header.

Sources: https://developers.cloudflare.com/workers-ai/models/, https://developers.cloudflare.com/workers-ai/features/
json-mode/, .../features/function-calling/, .../features/prompt-caching/
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from adapters.body import data_url, given, read_fields, to_data_url, typed
from adapters.chat import (
    ChatRequest,
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
from adapters.contract import HttpRequest, UpstreamCall
from adapters.errors import MalformedRequest
from adapters.paths import Paths, Spot, Words
from adapters.protocols.workers_ai import schema
from adapters.protocols.workers_ai.answers import NAME
from adapters.reasoning import effort_of
from adapters.sending import Sending
from adapters.urls import path_step

#: Top-level fields that are ours to write.
_ENVELOPE = frozenset({"model", "stream"})
_MAPPED = frozenset(field.name for field in msgspec.structs.fields(schema.RequestIn))

#: What a request of chat may hold and this API has no word for.
_UNKNOWN = (
    "stop",
    "n",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "verbosity",
    "service_tier",
    "prompt_cache_retention",
    "store",
    "metadata",
    "end_user",
)
#: Canonical names to those of this format.
WORDS: Words = {
    "max_output_tokens": ("max_tokens",),
    "response_format.schema": ("response_format.json_schema",),
    "detail": ("image_url.detail",),
    "url": ("image_url.url",),
    "data": ("image_url.url",),
    "media_type": ("image_url.url",),
    "reasoning": ("reasoning_content",),
    "arguments": ("function.arguments", "arguments"),
    "strict": ("function.strict",),
    "tool_call_id": ("tool_call_id", "name"),
}
#: The header by which requests with a common prefix reach the same machine.
_AFFINITY = "x-session-affinity"

#: What is read of a message and of a tool.
_READ = {
    "messages": frozenset(field.name for field in msgspec.structs.fields(schema.MessageIn)),
    "tools": frozenset(field.name for field in msgspec.structs.fields(schema.ToolIn)),
}
_PATH_CHARACTERS = 96

_items = msgspec.json.Decoder(tuple[dict[str, msgspec.Raw], ...] | None)
_text = msgspec.json.Decoder(str)


# ------------------------------------------------------------------- reading


def parse_request(body: bytes) -> ChatRequest:
    """Raises `MalformedRequest`, which names the field and repeats none of its content."""
    fields = read_fields(body)
    wire = typed(body, schema.RequestIn, "")
    unmapped = [name for name in fields if name not in _MAPPED]
    _note_unread(fields, unmapped)
    if wire.messages is not None:
        messages = tuple(_message(message, f"messages[{i}]") for i, message in enumerate(wire.messages))
        if wire.prompt is not None:
            unmapped.append("prompt")
    elif wire.prompt is not None:
        messages = (Message(role=Role.USER, content=(Text(text=wire.prompt),)),)
    else:
        raise MalformedRequest("messages", "is required")
    tools = [(f"tools[{i}]", _tool(tool, f"tools[{i}]", unmapped)) for i, tool in enumerate(wire.tools or ())]
    return ChatRequest(
        messages=messages,
        tools=tuple(tool for _, tool in tools if tool is not None),
        tool_choice=_tool_choice(wire.tool_choice, unmapped),
        response_format=_response_format(wire.response_format, unmapped),
        max_output_tokens=wire.max_tokens,
        temperature=wire.temperature,
        top_p=wire.top_p,
        top_k=wire.top_k,
        seed=wire.seed,
        frequency_penalty=wire.frequency_penalty,
        presence_penalty=wire.presence_penalty,
        native=NativeRequest(protocol=NAME, fields=fields, unmapped=tuple(unmapped)),
        paths=Paths(
            messages=(Spot("prompt", ("prompt",)),) if wire.messages is None else (),
            tools=[at for at, tool in tools if tool is not None],
            words=WORDS,
        ),
    )


def _note_unread(fields: dict[str, msgspec.Raw], unmapped: list[str]) -> None:
    """Names what messages and tools hold that is read by nobody here: another protocol would lose it in silence."""
    for name, known in _READ.items():
        items = _items.decode(fields[name]) if name in fields else None
        for i, item in enumerate(items or ()):
            unmapped.extend(
                f"{name}[{i}].{key}"[:_PATH_CHARACTERS]
                for key in item
                if key not in known and given(item[key]) is not None
            )


def _message(wire: schema.MessageIn, path: str) -> Message:
    calls = []
    for i, call in enumerate(wire.tool_calls or ()):
        at = f"{path}.tool_calls[{i}]"
        name = call.function.name if call.function else call.name
        if name is None:
            raise MalformedRequest(f"{at}.name", "is required")
        raw = given(call.function.arguments if call.function else call.arguments)
        calls.append(ToolCall(id=call.id or name, name=name, arguments=_arguments(raw)))
    call_id = wire.tool_call_id
    if wire.role == "tool" and not call_id:
        # The older form has no ids: the function's name pairs a result with its call.
        call_id = wire.name
        if not call_id:
            raise MalformedRequest(f"{path}.tool_call_id", "is required")
    if isinstance(wire.content, str):
        content: tuple[Part, ...] = (Text(text=wire.content),) if wire.content else ()
    else:
        content = tuple(_parts(wire.content or (), path))
    return Message(
        role=Role(wire.role),
        content=content,
        name=wire.name,
        tool_calls=tuple(calls),
        tool_call_id=call_id,
        reasoning=(Reasoning(text=wire.reasoning_content),) if wire.reasoning_content else (),
    )


def _arguments(raw: msgspec.Raw | None) -> str:
    if raw is None:
        return ""
    return _text.decode(raw) if bytes(raw)[:1] == b'"' else bytes(raw).decode()


def _parts(raws: Iterable[msgspec.Raw], path: str) -> Iterable[Part]:
    for i, raw in enumerate(raws):
        at = f"{path}.content[{i}]"
        match typed(raw, schema.PartIn, at):
            case schema.PartIn(type="text", text=str() as text):
                yield Text(text=text)
            case schema.PartIn(type="image_url", image_url=schema.ImageUrl() as image):
                if not image.url.startswith("data:"):
                    yield Image(url=image.url, detail=image.detail)
                    continue
                media_type, data = data_url(image.url, f"{at}.image_url.url")
                yield Image(data=data, media_type=media_type, detail=image.detail)
            case schema.PartIn(type="text" | "image_url" as kind):
                raise MalformedRequest(f"{at}.{kind}", "is required")
            case _:
                yield Opaque(protocol=NAME, raw=raw)


def _tool(wire: schema.ToolIn, path: str, unmapped: list[str]) -> Tool | None:
    if wire.type != "function":
        unmapped.append(path)
        return None
    if wire.function is not None:
        function = wire.function
        return Tool(
            name=function.name,
            description=function.description,
            parameters=given(function.parameters),
            strict=function.strict,
        )
    if wire.name is None:
        raise MalformedRequest(f"{path}.function", "is required")
    return Tool(name=wire.name, description=wire.description, parameters=given(wire.parameters))


def _tool_choice(wire: str | schema.ToolChoiceIn | None, unmapped: list[str]) -> ToolChoice | None:
    match wire:
        case None:
            return None
        case "auto" | "none" | "required":
            return ToolChoice(mode=wire)
        case "any":
            return ToolChoice(mode="required")
        case schema.ToolChoiceIn(type="function", function=schema.NamedFunction(name=tool)):
            return ToolChoice(mode="tool", tool=tool)
        case _:
            unmapped.append("tool_choice")
            return None


def _response_format(wire: schema.ResponseFormatIn | None, unmapped: list[str]) -> ResponseFormat | None:
    if wire is None:
        return None
    if wire.type not in {"text", "json_object", "json_schema"}:
        unmapped.append("response_format")
        return None
    wanted = given(wire.json_schema)
    if wire.type != "json_schema":
        return ResponseFormat(kind=wire.type)
    if wanted is None:
        raise MalformedRequest("response_format.json_schema", "is required")
    return ResponseFormat(kind=wire.type, schema=wanted)


# ------------------------------------------------------------------- writing


def path_of(model: str) -> str:
    """
    The address of a model below the base URL; its slashes are steps of the path. Raises `RequestNotExpressible` for
    what is no name of a model, and never lets one reach another address.
    """
    return "/run/" + "/".join(path_step(step) for step in model.split("/"))


def render_request(call: UpstreamCall, *, stream: bool) -> HttpRequest:
    """Raises `RequestNotExpressible` for what this protocol, or this endpoint, has no word for."""
    endpoint, request = call.endpoint, call.request
    sending = Sending(call, NAME, WORDS)
    fields: dict[str, Any]
    if request.native is not None and request.native.protocol == NAME:
        fields = dict(request.native.fields)
    else:
        fields = _Writer(request, sending).fields()
        wanted = request.response_format
        if wanted is not None and wanted.kind != "text":
            # JSON mode does not stream; its one answer is then read as if it had.
            stream = False
    for name in _ENVELOPE:
        fields.pop(name, None)
    if stream:
        fields["stream"] = True
    sending.as_profiled(fields)
    headers = {}
    key = request.prompt_cache_key
    if key is not None and "prompt_cache_key" in endpoint.omit:
        sending.drop("prompt_cache_key")
    elif key is not None:
        if key.isascii() and key.isprintable() and len(key) <= 256:
            headers[_AFFINITY] = key
        else:
            sending.refuse("prompt_cache_key", "sends it as a header, which cannot hold this")
    http = sending.post(path_of(call.model), fields, stream=stream, headers=headers)
    limit = fields.get(endpoint.max_tokens_field or "max_tokens")
    if isinstance(limit, msgspec.Raw):
        limit = msgspec.json.decode(limit)
    return msgspec.structs.replace(http, silent_limit=limit if type(limit) is int and limit > 0 else None)


class _Writer:
    """One canonical request in the words of this protocol."""

    def __init__(self, request: ChatRequest, sending: Sending) -> None:
        self._request = request
        self._sending = sending
        self._endpoint = sending.endpoint
        #: Of the calls so far, what function each was of.
        self._names: dict[str, str] = {}

    def fields(self) -> dict[str, Any]:
        request = self._request
        self._sending.refuse_unmapped()
        self._sending.refuse_unknown(_UNKNOWN)
        if request.parallel_tool_calls is False:
            self._refuse("parallel_tool_calls", "cannot forbid more than one call at a time")
        limit = request.max_output_tokens
        fields: dict[str, Any] = {
            "messages": [self._message(m, f"messages[{i}]") for i, m in enumerate(request.messages)],
            "tools": [self._tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)] or None,
            "tool_choice": _render_choice(request.tool_choice),
            "response_format": self._format(),
            self._endpoint.max_tokens_field or "max_tokens": (
                limit if limit is not None else self._endpoint.default_max_tokens
            ),
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "seed": request.seed,
            "frequency_penalty": request.frequency_penalty,
            "presence_penalty": request.presence_penalty,
            "reasoning_effort": self._effort(),
        }
        fields = {name: value for name, value in fields.items() if value is not None}
        self._sending.add_extra(fields, _ENVELOPE)
        return fields

    def _refuse(self, path: str, reason: str, word: str | None = None) -> None:
        self._sending.refuse(path, reason, word)

    def _effort(self) -> str | None:
        """Only some models take it, so only a profile that says so sends it."""
        effort, budget = self._sending.effort, self._request.reasoning_budget_tokens
        if effort is None and budget is None:
            return None
        if self._endpoint.reasoning == "effort":
            return effort if effort is not None else effort_of(budget or 0)
        for name, value in (("reasoning_effort", effort), ("reasoning_budget_tokens", budget)):
            if value is None:
                continue
            if self._endpoint.reasoning == "off":
                self._sending.drop(name)
            else:
                self._refuse(name, "has no such field for all its models")
        return None

    def _format(self) -> dict[str, Any] | None:
        wanted = self._request.response_format
        if wanted is None or wanted.kind == "text":
            return None
        if wanted.kind != "json_schema":
            return {"type": wanted.kind}
        schema = self._sending.described_schema(wanted)
        return {"type": "json_schema", "json_schema": schema if schema is not None else {}}

    def _message(self, message: Message, path: str) -> dict[str, Any]:
        role = Role.SYSTEM if message.role is Role.DEVELOPER else message.role
        if message.is_error:
            message = self._sending.failure_told(message, path)
        rendered: dict[str, Any] = {"role": str(role), "content": self._content(message, path)}
        if message.refusal:
            if not isinstance(rendered["content"], str):
                raise self._sending.refusal(f"{path}.refusal", f"{NAME} takes it only where there is nothing but text")
            rendered["content"] += message.refusal
        if message.reasoning:
            self._reasoning(message, path, rendered)
        if message.tool_calls:
            self._names |= {call.id: call.name for call in message.tool_calls}
            # A proof for its own provider, and no other one misses it.
            for i, call in enumerate(message.tool_calls):
                if call.signature is not None:
                    self._sending.drop(f"{path}.tool_calls[{i}].signature")
            rendered["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.tool_calls
            ]
        if message.role is Role.TOOL:
            rendered["tool_call_id"] = message.tool_call_id or ""
            if (name := self._names.get(message.tool_call_id or "") or message.name) is not None:
                rendered["name"] = name
        elif message.name is not None:
            self._refuse(f"{path}.name", "has no names for those who speak", "messages.name")
        return rendered

    def _reasoning(self, message: Message, path: str, rendered: dict[str, Any]) -> None:
        field = self._endpoint.reasoning_field
        thoughts = self._sending.thoughts(message, path, unsigned=field is not None)
        if field is not None and thoughts:
            rendered[field] = "".join(block.text for _, block in thoughts)

    def _content(self, message: Message, path: str) -> str | list[dict[str, Any]]:
        parts = [self._part(part, f"{path}.content[{j}]") for j, part in enumerate(message.content)]
        if all(isinstance(part, Text) for part in message.content):
            return "".join(part["text"] for part in parts)
        if message.role is not Role.USER:
            self._sending.refuse_all_but_text(message, path)
        return parts

    def _part(self, part: Part, path: str) -> Any:
        match part:
            case Text():
                self._refuse_cache(part.cache, path)
                return {"type": "text", "text": part.text}
            case Image():
                self._refuse_cache(part.cache, path)
                if part.detail not in {None, "auto"}:
                    self._refuse(f"{path}.detail", "has no detail of pictures", "messages.detail")
                url = part.url
                if url is None:
                    url = to_data_url(part.media_type or "image/png", part.data or b"")
                return {"type": "image_url", "image_url": {"url": url}}
            case Opaque():
                if part.protocol != NAME:
                    raise self._sending.refusal(path, f"a part that only {part.protocol} knows")
                return part.raw
            case _:
                raise self._sending.refusal(path, f"{NAME} takes only text and pictures")

    def _tool(self, tool: Tool, path: str) -> dict[str, Any]:
        self._refuse_cache(tool.cache, path)
        if tool.strict:
            self._refuse(f"{path}.strict", "does not hold calls to their schemas", "tools.strict")
        # All three are demanded by the documented schema.
        parameters: Any = tool.parameters if tool.parameters is not None else {"type": "object", "properties": {}}
        return {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description or "", "parameters": parameters},
        }

    def _refuse_cache(self, cache: str | None, path: str) -> None:
        if cache is not None:
            self._refuse(f"{path}.cache", "has no cache boundaries", "messages.cache")


def _render_choice(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.mode == "tool":
        return {"type": "function", "function": {"name": choice.tool}}
    return choice.mode
