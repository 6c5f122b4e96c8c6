"""
Requests of Responses, from a caller and to a provider.

A request keeps its own top-level fields byte for byte, and goes on with them to a provider of the same protocol. The
canonical form is filled beside it, for routing and for other protocols.

Decisions, for a request that came in another protocol:

- `store` is sent as false unless the caller asked for more: this protocol keeps every exchange by default, and nothing
  is kept at a provider unasked. A caller of this protocol knows that default and keeps it.
- What a model thought then comes back only as `encrypted_content`, which is asked for by `include` where the endpoint
  is marked as one that takes an effort, or the request itself asks for reasoning or brings some back. It cannot be
  asked for always: a model that does not reason refuses it (https://github.com/pydantic/pydantic-ai/issues/2865).
- A function is sent with `strict: false` unless the caller said so: left out it means true here, and false elsewhere.
- The first system message, where it is one text, becomes `instructions`; the others stay where they are.
"""

from __future__ import annotations

import mimetypes
from collections.abc import Iterable, Mapping
from typing import Any, cast

import msgspec

from adapters.body import data_url, from_base64, given, read_fields, to_data_url, typed
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
from adapters.errors import MalformedRequest, RequestNotExpressible
from adapters.protocols.responses import schema
from adapters.protocols.responses.answers import NAME, PARTS_APART
from adapters.reasoning import effort_of

_PATH = "/responses"

#: Top-level fields that are ours to write.
_ENVELOPE = frozenset({"model", "stream", "stream_options"})
#: Top-level fields that the canonical form carries.
_MAPPED = frozenset(field.name for field in msgspec.structs.fields(schema.RequestIn))
#: What may stand for the input: it is kept at the provider.
_INSTEAD_OF_INPUT = ("previous_response_id", "conversation", "prompt")
#: A summary of the reasoning may be asked for; every protocol tells what its provider shows of it.
_REASONING_MAPPED = frozenset({"effort", "summary", "generate_summary"})
_TEXT_MAPPED = frozenset({"format", "verbosity"})

_LOGPROBS = "message.output_text.logprobs"
_ENCRYPTED = "reasoning.encrypted_content"

_encode = msgspec.json.Encoder().encode


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says of how it wants to be served, not of the chat."""

    model: str | None = None
    stream: bool = False
    #: This protocol always tells it.
    include_usage: bool = True


def envelope(request: ChatRequest) -> Envelope:
    """Of a request that `parse_request` gave."""
    fields = request.native.fields if request.native is not None else {}
    return Envelope(
        model=msgspec.json.decode(fields["model"], type=str | None) if "model" in fields else None,
        stream=msgspec.json.decode(fields["stream"], type=bool | None) is True if "stream" in fields else False,
    )


# ------------------------------------------------------------------- reading


def parse_request(body: bytes) -> ChatRequest:
    """Raises `MalformedRequest`, which names the field and repeats none of its content."""
    fields = read_fields(body)
    wire = typed(body, schema.RequestIn, "")
    unmapped = [name for name, raw in fields.items() if name not in _MAPPED and given(raw) is not None]
    unmapped += _inner_unmapped(fields, "reasoning", _REASONING_MAPPED)
    unmapped += _inner_unmapped(fields, "text", _TEXT_MAPPED)
    if wire.background:
        unmapped.append("background")
    if wire.truncation not in {None, "disabled"}:
        unmapped.append("truncation")
    include = wire.include or ()
    if any(asked not in {_LOGPROBS, _ENCRYPTED} for asked in include):
        unmapped.append("include")
    if wire.input is None and not any(name in unmapped for name in _INSTEAD_OF_INPUT):
        raise MalformedRequest("input", "is required")
    return ChatRequest(
        messages=_messages(wire, unmapped),
        tools=_tools(wire.tools or (), unmapped),
        tool_choice=_tool_choice(wire.tool_choice, unmapped),
        parallel_tool_calls=wire.parallel_tool_calls,
        response_format=_response_format(wire.text.format if wire.text else None, unmapped),
        max_output_tokens=wire.max_output_tokens,
        temperature=wire.temperature,
        top_p=wire.top_p,
        logprobs=True if _LOGPROBS in include or wire.top_logprobs else None,
        top_logprobs=wire.top_logprobs or None,
        reasoning_effort=wire.reasoning.effort if wire.reasoning else None,
        verbosity=wire.text.verbosity if wire.text else None,
        service_tier=wire.service_tier,
        prompt_cache_key=wire.prompt_cache_key,
        store=wire.store,
        metadata=wire.metadata,
        end_user=wire.safety_identifier or wire.user,
        native=NativeRequest(protocol=NAME, fields=fields, unmapped=tuple(unmapped)),
    )


def _inner_unmapped(fields: Mapping[str, msgspec.Raw], name: str, mapped: frozenset[str]) -> list[str]:
    raw = given(fields[name]) if name in fields else None
    if raw is None:
        return []
    inner = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    return [f"{name}.{key}" for key, value in inner.items() if key not in mapped and given(value) is not None]


class _Turns:
    """
    Items to messages. What a model said in one turn is one message, so that its calls stand right before their
    results; a second text without a call between is a message of its own.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._content: list[Part] = []
        self._refusals: list[str] = []
        self._reasoning: list[Reasoning] = []
        self._calls: list[ToolCall] = []

    def add(self, message: Message) -> None:
        self.flush()
        self.messages.append(message)

    def think(self, thought: Reasoning) -> None:
        self._begin()
        self._reasoning.append(thought)

    def say(self, content: Iterable[Part], refusal: str) -> None:
        self._begin()
        self._content += content
        if refusal:
            self._refusals.append(refusal)

    def call(self, call: ToolCall) -> None:
        self._calls.append(call)

    def flush(self) -> None:
        if self._content or self._refusals or self._reasoning or self._calls:
            message = Message(
                role=Role.ASSISTANT,
                content=tuple(self._content),
                refusal="".join(self._refusals) or None,
                reasoning=tuple(self._reasoning),
                tool_calls=tuple(self._calls),
            )
            self.messages.append(message)
        self._content, self._refusals, self._reasoning, self._calls = [], [], [], []

    def _begin(self) -> None:
        if (self._content or self._refusals) and not self._calls:
            self.flush()


def _messages(wire: schema.RequestIn, unmapped: list[str]) -> tuple[Message, ...]:
    turns = _Turns()
    if wire.instructions:
        turns.add(Message(role=Role.SYSTEM, content=(Text(text=wire.instructions),)))
    if isinstance(wire.input, str):
        turns.add(Message(role=Role.USER, content=_text(wire.input)))
    else:
        for i, raw in enumerate(wire.input or ()):
            _take_item(turns, raw, f"input[{i}]", unmapped)
    turns.flush()
    return tuple(turns.messages)


def _take_item(turns: _Turns, raw: msgspec.Raw, path: str, unmapped: list[str]) -> None:
    kind = typed(raw, schema.Kind, path)
    match kind.type or ("message" if kind.role else None):
        case "message":
            message = typed(raw, schema.MessageIn, path)
            content, refusal = _content(message.content, f"{path}.content")
            if message.role == "assistant":
                turns.say(content, refusal)
            elif refusal:
                raise MalformedRequest(f"{path}.content", "only an assistant refuses")
            else:
                turns.add(Message(role=Role(message.role), content=content))
        case "function_call":
            call = typed(raw, schema.CallIn, path)
            turns.call(
                ToolCall(id=call.call_id, name=call.name, arguments=call.arguments, signature=call.signature),
            )
        case "function_call_output":
            result = typed(raw, schema.CallOutputIn, path)
            content, _ = _content(result.output, f"{path}.output")
            turns.add(Message(role=Role.TOOL, content=content, tool_call_id=result.call_id))
        case "reasoning":
            turns.think(_reasoning(typed(raw, schema.ReasoningIn, path)))
        case None:
            raise MalformedRequest(f"{path}.type", "is required")
        case _:
            unmapped.append(path)


def _reasoning(wire: schema.ReasoningIn) -> Reasoning:
    parts = wire.content or wire.summary or ()
    text = PARTS_APART.join(part.text for part in parts)
    return Reasoning(text=text, signature=wire.encrypted_content, redacted=not parts, id=wire.id)


def _text(text: str) -> tuple[Part, ...]:
    return (Text(text=text),) if text else ()


def _content(content: str | Iterable[msgspec.Raw], path: str) -> tuple[tuple[Part, ...], str]:
    """The parts, and what of them is a refusal."""
    if isinstance(content, str):
        return _text(content), ""
    parts: list[Part] = []
    refusals: list[str] = []
    for i, raw in enumerate(content):
        at = f"{path}[{i}]"
        wire = typed(raw, schema.PartIn, at)
        cache = _cache(wire.prompt_cache_breakpoint)
        match wire:
            case schema.PartIn(type="input_text" | "output_text" | "text", text=str() as text):
                parts.append(Text(text=text, cache=cache))
            case schema.PartIn(type="refusal", refusal=str() as refusal):
                refusals.append(refusal)
            case schema.PartIn(type="input_image", image_url=str() as url):
                parts.append(_image(url, wire.detail, cache, f"{at}.image_url"))
            case schema.PartIn(type="input_image", file_id=None):
                raise MalformedRequest(at, "needs image_url or file_id")
            case schema.PartIn(type="input_file"):
                parts.append(_file(wire, cache, at))
            case schema.PartIn(type="input_text" | "output_text" | "text"):
                raise MalformedRequest(f"{at}.text", "is required")
            case schema.PartIn(type="refusal"):
                raise MalformedRequest(f"{at}.refusal", "is required")
            case _:
                parts.append(Opaque(protocol=NAME, raw=raw))
    return tuple(parts), "".join(refusals)


def _cache(wire: schema.Breakpoint | None) -> str | None:
    """Kept for half an hour at least, or for twelve: the shorter and the longer of the two there are."""
    if wire is None:
        return None
    return "5m" if wire.ttl in {None, "30m"} else "1h"


def _image(url: str, detail: str | None, cache: str | None, path: str) -> Image:
    if not url.startswith("data:"):
        return Image(url=url, detail=detail, cache=cache)
    media_type, data = data_url(url, path)
    return Image(data=data, media_type=media_type, detail=detail, cache=cache)


def _file(wire: schema.PartIn, cache: str | None, path: str) -> Document:
    if wire.file_id is not None:
        return Document(file_id=wire.file_id, filename=wire.filename, cache=cache)
    if wire.file_url is not None:
        return Document(url=wire.file_url, filename=wire.filename, cache=cache)
    if wire.file_data is None:
        raise MalformedRequest(path, "needs file_id, file_url or file_data")
    if wire.file_data.startswith("data:"):
        media_type, data = data_url(wire.file_data, f"{path}.file_data")
    else:
        media_type, data = None, from_base64(wire.file_data, f"{path}.file_data")
    return Document(data=data, media_type=media_type, filename=wire.filename, cache=cache)


def _tools(raws: Iterable[msgspec.Raw], unmapped: list[str]) -> tuple[Tool, ...]:
    tools = []
    for i, raw in enumerate(raws):
        path = f"tools[{i}]"
        if typed(raw, schema.Kind, path).type == "function":
            wire = typed(raw, schema.FunctionIn, path)
            tool = Tool(
                name=wire.name, description=wire.description, parameters=given(wire.parameters), strict=wire.strict
            )
            tools.append(tool)
        else:
            unmapped.append(path)
    return tuple(tools)


def _tool_choice(choice: str | schema.ToolChoiceIn | None, unmapped: list[str]) -> ToolChoice | None:
    match choice:
        case None:
            return None
        case "auto" | "none" | "required" as mode:
            return ToolChoice(mode=mode)
        case schema.ToolChoiceIn(type="function", name=str() as tool):
            return ToolChoice(mode="tool", tool=tool)
        case schema.ToolChoiceIn(type="function"):
            raise MalformedRequest("tool_choice.name", "is required")
        case schema.ToolChoiceIn():
            unmapped.append("tool_choice")
            return None
        case _:
            raise MalformedRequest("tool_choice", "is not one of the allowed values")


def _response_format(wire: schema.FormatIn | None, unmapped: list[str]) -> ResponseFormat | None:
    if wire is None:
        return None
    if wire.type not in {"text", "json_object", "json_schema"}:
        unmapped.append("text.format")
        return None
    if wire.type != "json_schema":
        return ResponseFormat(kind=wire.type)
    if given(wire.schema) is None:
        raise MalformedRequest("text.format.schema", "is required")
    return ResponseFormat(
        kind=wire.type, name=wire.name, description=wire.description, schema=given(wire.schema), strict=wire.strict
    )


# ------------------------------------------------------------------- writing


def render_request(call: UpstreamCall, *, stream: bool) -> HttpRequest:
    """Raises `RequestNotExpressible` for what this protocol, or this endpoint, has no word for."""
    endpoint, request = call.endpoint, call.request
    native = request.native
    dropped: list[str] = []
    fields: dict[str, Any]
    if native is not None and native.protocol == NAME:
        fields = dict(native.fields)
        if "background" in native.unmapped and "background" not in endpoint.omit and not stream:
            raise RequestNotExpressible("background", "an answer is waited for, and none comes of this")
        if endpoint.reasoning == "off" and given(fields.pop("reasoning", msgspec.Raw(b"null"))) is not None:
            dropped.append("reasoning")
    else:
        fields = _Writer(request, endpoint, dropped).fields()
    fields["model"] = call.model
    fields.pop("stream", None)
    if stream:
        fields["stream"] = True
    else:
        fields.pop("stream_options", None)
    dropped += [name for name in sorted(endpoint.omit) if fields.pop(name, None) is not None]
    fields.update(endpoint.force)
    return HttpRequest(
        path=_PATH,
        headers={
            "content-type": "application/json",
            "accept": "text/event-stream" if stream else "application/json",
        },
        body=_encode(fields),
        dropped=tuple(dropped),
    )


class _Writer:
    """One canonical request in this protocol's words. What the endpoint omits is put down in `dropped`."""

    def __init__(self, request: ChatRequest, endpoint: Endpoint, dropped: list[str]) -> None:
        self._request = request
        self._endpoint = endpoint
        self._dropped = dropped

    def _refuse(self, path: str, reason: str, name: str | None = None) -> None:
        """Raises `RequestNotExpressible`, unless the endpoint omits the path, or the `name` that stands for it."""
        omitted = path if name is None else name
        if omitted not in self._endpoint.omit:
            raise RequestNotExpressible(path, reason)
        if omitted not in self._dropped:
            self._dropped.append(omitted)

    def _asked(self, name: str, value: Any) -> Any:
        """A field by its canonical name: None where the endpoint omits it."""
        if value is None or name not in self._endpoint.omit:
            return value
        self._dropped.append(name)
        return None

    def fields(self) -> dict[str, Any]:
        request = self._request
        for path in request.native.unmapped if request.native is not None else ():
            self._refuse(path, f"{NAME} has no such field")
        self._refuse_unknown()
        instructions, first = self._instructions()
        logprobs = self._asked("logprobs", request.logprobs)
        reasoning = self._reasoning()
        store = self._asked("store", request.store)
        fields: dict[str, Any] = {
            "instructions": instructions,
            "input": [
                item
                for i, message in enumerate(request.messages[first:], first)
                for item in self._items(message, f"messages[{i}]")
            ],
            "tools": [self._tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)] or None,
            "tool_choice": _render_tool_choice(self._asked("tool_choice", request.tool_choice)),
            "parallel_tool_calls": self._asked("parallel_tool_calls", request.parallel_tool_calls),
            "text": self._text(),
            "max_output_tokens": self._asked("max_output_tokens", request.max_output_tokens),
            "temperature": self._asked("temperature", request.temperature),
            "top_p": self._asked("top_p", request.top_p),
            "top_logprobs": self._asked("top_logprobs", request.top_logprobs),
            "reasoning": reasoning,
            "service_tier": self._asked("service_tier", request.service_tier),
            "prompt_cache_key": self._asked("prompt_cache_key", request.prompt_cache_key),
            "metadata": self._asked("metadata", request.metadata),
            "safety_identifier": self._asked("end_user", request.end_user),
            "include": self._include(logprobs=logprobs is True, stored=store is True),
        }
        fields = {name: value for name, value in fields.items() if value is not None}
        if "store" not in self._endpoint.omit:
            fields["store"] = store is True
        for name, value in request.extra.items():
            if name in fields or name in _ENVELOPE:
                raise RequestNotExpressible(f"extra.{name}", "the request has this field already")
            fields[name] = value
        return fields

    def _refuse_unknown(self) -> None:
        request = self._request
        given_fields = {
            "top_k": request.top_k is not None,
            "stop": bool(request.stop),
            "seed": request.seed is not None,
            "n": request.n not in {None, 1},
            "presence_penalty": bool(request.presence_penalty),
            "frequency_penalty": bool(request.frequency_penalty),
            "logit_bias": bool(request.logit_bias),
        }
        for name, is_given in given_fields.items():
            if is_given:
                self._refuse(name, f"{NAME} has no such field")

    def _instructions(self) -> tuple[str | None, int]:
        """The leading system message where it is one plain text, and the number of the first message after it."""
        match self._request.messages:
            case (Message(role=Role.SYSTEM, content=(Text(text=text, cache=None),), name=None), _, *_) if text:
                return text, 1
            case _:
                return None, 0

    def _reasoning(self) -> dict[str, str] | None:
        effort = self._asked("reasoning_effort", self._request.reasoning_effort)
        budget = self._asked("reasoning_budget_tokens", self._request.reasoning_budget_tokens)
        if self._endpoint.reasoning == "off":
            self._dropped += ["reasoning_effort"] if effort is not None else []
            self._dropped += ["reasoning_budget_tokens"] if budget is not None else []
            return None
        if effort is None and budget is not None:
            effort = effort_of(budget)
        return None if effort is None else {"effort": effort}

    def _include(self, *, logprobs: bool, stored: bool) -> list[str] | None:
        include = [_LOGPROBS] if logprobs else []
        request, mode = self._request, self._endpoint.reasoning
        reasons = (
            mode == "effort"
            or request.reasoning_effort not in {None, "none"}
            or bool(request.reasoning_budget_tokens)
            or (any(m.reasoning for m in request.messages) and "messages.reasoning" not in self._endpoint.omit)
        )
        if reasons and mode != "off" and not stored:
            include.append(_ENCRYPTED)
        return include or None

    def _text(self) -> dict[str, Any] | None:
        text: dict[str, Any] = {}
        wanted = self._asked("response_format", self._request.response_format)
        if wanted is not None:
            text["format"] = _render_format(wanted)
        verbosity = self._asked("verbosity", self._request.verbosity)
        if verbosity is not None:
            text["verbosity"] = verbosity
        return text or None

    def _tool(self, tool: Tool, path: str) -> dict[str, Any]:
        if tool.cache is not None:
            self._refuse(f"{path}.cache", f"{NAME} has no cache boundary after a tool", "messages.cache")
        function = {
            "type": "function",
            "name": tool.name,
            "parameters": tool.parameters if tool.parameters is not None else {"type": "object", "properties": {}},
            "strict": tool.strict is True,
        }
        return function if tool.description is None else {**function, "description": tool.description}

    # ------------------------------------------------------------ messages

    def _items(self, message: Message, path: str) -> list[Any]:
        if message.name is not None:
            self._refuse(f"{path}.name", f"{NAME} has no names of speakers", "messages.name")
        if message.is_error:
            self._refuse(f"{path}.is_error", f"{NAME} cannot mark a result as failed", "messages.is_error")
        match message.role:
            case Role.ASSISTANT:
                return self._assistant(message, path)
            case Role.TOOL:
                output = self._content(message, path, "input_text")
                return [{"type": "function_call_output", "call_id": message.tool_call_id or "", "output": output}]
            case role:
                return [{"type": "message", "role": str(role), "content": self._content(message, path, "input_text")}]

    def _assistant(self, message: Message, path: str) -> list[Any]:
        items: list[Any] = []
        for i, thought in enumerate(message.reasoning):
            item = self._thought(thought, f"{path}.reasoning[{i}]")
            if item is not None:
                items.append(item)
        content = self._content(message, path, "output_text")
        if message.refusal is not None:
            parts = [{"type": "output_text", "text": content}] if isinstance(content, str) and content else content
            content = [*(parts or ()), {"type": "refusal", "refusal": message.refusal}]
        if content:
            items.append({"type": "message", "role": "assistant", "content": content})
        for i, call in enumerate(message.tool_calls):
            if call.signature is not None:
                at = f"{path}.tool_calls[{i}].signature"
                self._refuse(at, f"{NAME} takes no signature of a call back", "messages.reasoning")
            items.append({"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments})
        return items

    def _thought(self, thought: Reasoning, path: str) -> dict[str, Any] | None:
        """
        A provider takes back what it can prove to be its own: a block with its signature, or one that it has stored.
        Servers that take plain text say so by `reasoning_field`: the name of the item's field it goes into.
        """
        if "messages.reasoning" in self._endpoint.omit:
            self._refuse(path, "", "messages.reasoning")
            return None
        field, stored = self._endpoint.reasoning_field, self._request.store is True and thought.id is not None
        item: dict[str, Any] = {"type": "reasoning", "summary": []}
        if thought.id is not None:
            item["id"] = thought.id
        if thought.signature is not None:
            item["encrypted_content"] = thought.signature
        elif field not in {"content", "summary"} and not stored:
            raise RequestNotExpressible(path, "this provider takes back only reasoning that it has signed")
        if field == "content" and not thought.redacted:
            return {**item, "content": [{"type": "reasoning_text", "text": thought.text}]}
        if not thought.redacted:
            item["summary"] = [{"type": "summary_text", "text": thought.text}]
        return item

    def _content(self, message: Message, path: str, text_type: str) -> str | list[Any]:
        match message.content:
            case ():
                return ""
            case (Text(text=text, cache=None),):
                return text
            case parts:
                return [self._part(message, part, f"{path}.content[{i}]", text_type) for i, part in enumerate(parts)]

    def _part(self, message: Message, part: Part, path: str, text_type: str) -> Any:
        if isinstance(part, Opaque):
            if part.protocol != NAME:
                raise RequestNotExpressible(path, f"a part that only {part.protocol} knows")
            return part.raw
        if message.role not in {Role.USER, Role.TOOL} and not isinstance(part, Text):
            raise RequestNotExpressible(path, f"{NAME} takes only text from {message.role}")
        if isinstance(part, Audio):
            raise RequestNotExpressible(path, f"{NAME} takes no sound")
        rendered = _render_part(part, text_type)
        if part.cache is not None:
            if "messages.cache" in self._endpoint.omit or text_type == "output_text":
                self._refuse(f"{path}.cache", f"{NAME} has cache boundaries in input only", "messages.cache")
            else:
                rendered["prompt_cache_breakpoint"] = {
                    "mode": "explicit",
                    "ttl": "30m" if part.cache == "5m" else "12h",
                }
        return rendered


def _render_part(part: Text | Image | Document, text_type: str) -> dict[str, Any]:
    match part:
        case Text():
            return {"type": text_type, "text": part.text}
        case Image():
            url = part.url if part.url is not None else to_data_url(part.media_type or "image/png", part.data or b"")
            return {"type": "input_image", "image_url": url, "detail": part.detail or "auto"}
        case Document():
            return {"type": "input_file", **_render_file(part)}


def _render_file(part: Document) -> dict[str, str]:
    if part.file_id is not None:
        return {"file_id": part.file_id}
    if part.data is None:
        return {"file_url": part.url or ""}
    media_type = part.media_type or "application/pdf"
    # Data without a name is refused there.
    name = part.filename or f"document{mimetypes.guess_extension(media_type) or ''}"
    return {"filename": name, "file_data": to_data_url(media_type, part.data)}


def _render_tool_choice(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.mode == "tool":
        return {"type": "function", "name": cast("str", choice.tool)}
    return choice.mode


def _render_format(wanted: ResponseFormat) -> dict[str, Any]:
    if wanted.kind != "json_schema":
        return {"type": wanted.kind}
    inner = {
        "type": wanted.kind,
        "name": wanted.name or "response",
        "description": wanted.description,
        "schema": wanted.schema if wanted.schema is not None else {},
        "strict": wanted.strict,
    }
    return {name: value for name, value in inner.items() if value is not None}
