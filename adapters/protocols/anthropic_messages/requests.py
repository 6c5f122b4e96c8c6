"""
Requests of the Messages API from a caller.

A request keeps its own top-level fields byte for byte, and goes on with them to a provider of the same protocol, so
that a field we never heard of arrives. The canonical form is filled beside it, for routing and for other protocols.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from adapters import signatures
from adapters.body import from_base64, given, read_fields, typed
from adapters.chat import (
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
from adapters.errors import MalformedRequest
from adapters.paths import Paths, Spot, Words
from adapters.protocols.anthropic_messages import schema
from adapters.protocols.anthropic_messages.answers import NAME, signature_of_call

#: Top-level fields that the canonical form carries.
_MAPPED = frozenset(field.name for field in msgspec.structs.fields(schema.RequestIn))
_IMAGES = frozenset({"base64", "url"})
_DOCUMENTS = frozenset({"base64", "url", "text", "file"})
#: What a tool may hold and the canonical form carries.
_TOOL_FIELDS = frozenset(field.name for field in msgspec.structs.fields(schema.ToolIn))

#: Canonical names to those of this format.
WORDS: Words = {
    "max_output_tokens": ("max_tokens",),
    "stop": ("stop_sequences",),
    "end_user": ("metadata.user_id",),
    "metadata": (),
    "parallel_tool_calls": ("tool_choice.disable_parallel_tool_use",),
    "response_format": ("output_config.format", "output_format"),
    "response_format.schema": ("output_config.format.schema", "output_format.schema"),
    "reasoning_effort": ("output_config.effort", "thinking.budget_tokens", "thinking"),
    "reasoning_budget_tokens": ("thinking.budget_tokens", "thinking"),
    "cache": ("cache_control",),
    "filename": ("title",),
    "url": ("source.url",),
    "data": ("source.data",),
    "media_type": ("source.media_type",),
    "arguments": ("input",),
    "tool_call_id": ("tool_use_id",),
}

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def parse_request(body: bytes) -> ChatRequest:
    """
    Raises `MalformedRequest`, which names the field and repeats none of its content.

    `max_tokens` may be absent: it is then the endpoint's, and a request to count tokens has none.
    """
    fields = read_fields(body)
    wire = typed(body, schema.RequestIn, "")
    unmapped = [name for name in fields if name not in _MAPPED]
    messages: list[Message] = []
    spots: list[Spot] = []
    if wire.system:
        content = (Text(text=wire.system),) if isinstance(wire.system, str) else _texts(wire.system, "system", unmapped)
        messages.append(Message(role=Role.SYSTEM, content=content))
        spots.append(_spot("system", "system", wire.system))
    for i, message in enumerate(wire.messages):
        messages += _message(message, f"messages[{i}]", unmapped, spots)
    tools = [_tool(raw, f"tools[{i}]", unmapped) for i, raw in enumerate(wire.tools or ())]
    if wire.metadata is not None:
        _keep_unmapped(fields["metadata"], {"user_id"}, "metadata", unmapped)
    effort, budget = _reasoning(wire, fields, unmapped)
    choice = wire.tool_choice
    return ChatRequest(
        messages=tuple(messages),
        tools=tuple(tool for tool in tools if tool is not None),
        tool_choice=_tool_choice(choice, unmapped),
        parallel_tool_calls=None
        if choice is None or choice.disable_parallel_tool_use is None
        else not choice.disable_parallel_tool_use,
        response_format=_response_format(wire, unmapped),
        max_output_tokens=wire.max_tokens,
        temperature=wire.temperature,
        top_p=wire.top_p,
        top_k=wire.top_k,
        stop=wire.stop_sequences or (),
        reasoning_effort=effort,
        reasoning_budget_tokens=budget,
        # The canonical words are OpenAI's: "auto" is the same, and this API's other word asks for the usual tier.
        service_tier="default" if wire.service_tier == "standard_only" else wire.service_tier,
        end_user=wire.metadata.user_id if wire.metadata else None,
        native=NativeRequest(
            protocol=NAME,
            fields=fields,
            unmapped=tuple(dict.fromkeys(unmapped)),
            wishes=("thinking.display",) if wire.thinking is not None and wire.thinking.display is not None else (),
        ),
        paths=Paths(
            messages=spots, tools=[f"tools[{i}]" for i, tool in enumerate(tools) if tool is not None], words=WORDS
        ),
    )


def _spot(at: str, content: str, told: str | tuple[msgspec.Raw, ...]) -> Spot:
    """Of a message that has all parts of what it was read from."""
    return Spot(at, [content] if isinstance(told, str) else [f"{content}[{j}]" for j in range(len(told))])


def _keep_unmapped(raw: msgspec.Raw, known: Iterable[str], path: str, unmapped: list[str]) -> None:
    fields = _fields.decode(raw).items()
    unmapped += [f"{path}.{name}" for name, value in fields if name not in known and given(value) is not None]


def _ttl(control: schema.CacheControl | None) -> str | None:
    return None if control is None else control.ttl or "5m"


def _texts(raws: tuple[msgspec.Raw, ...], path: str, unmapped: list[str]) -> tuple[Part, ...]:
    """What a system says: text, or what only this protocol knows."""
    parts: list[Part] = []
    for j, raw in enumerate(raws):
        at = f"{path}[{j}]"
        block = _block(raw, at)
        is_text = block is not None and block.type == "text"
        parts.append(_part(raw, block, at, unmapped) if is_text else Opaque(protocol=NAME, raw=raw))
    return tuple(parts)


def _note_citations(raw: msgspec.Raw, path: str, unmapped: list[str]) -> None:
    if (known := given(raw)) is not None and bytes(known).replace(b" ", b"") != b"[]":
        unmapped.append(f"{path}.citations")


def _message(wire: schema.MessageIn, path: str, unmapped: list[str], spots: list[Spot]) -> list[Message]:
    if isinstance(wire.content, str):
        content: tuple[Part, ...] = (Text(text=wire.content),) if wire.content else ()
        spots.append(_spot(path, f"{path}.content", wire.content))
        return [Message(role=Role(wire.role), content=content)]
    match wire.role:
        case "system":
            spots.append(_spot(path, f"{path}.content", wire.content))
            return [Message(role=Role.SYSTEM, content=_texts(wire.content, f"{path}.content", unmapped))]
        case "assistant":
            return [_assistant(wire.content, path, unmapped, spots)]
        case "user":
            return _user(wire.content, path, unmapped, spots)


def _block(raw: msgspec.Raw, path: str) -> schema.BlockIn | None:
    """None for a kind we do not know, whose fields may be of any type."""
    if typed(raw, schema.TypeOnly, path).type in {
        "text",
        "image",
        "document",
        "tool_use",
        "tool_result",
        "thinking",
        "redacted_thinking",
    }:
        return typed(raw, schema.BlockIn, path)
    return None


def _assistant(raws: tuple[msgspec.Raw, ...], path: str, unmapped: list[str], spots: list[Spot]) -> Message:
    parts: list[Part] = []
    said: list[str] = []
    called: list[str] = []
    thought: list[str] = []
    calls: list[ToolCall] = []
    thoughts: list[Reasoning] = []
    signed: dict[int, str] = {}
    blocks = [_block(raw, f"{path}.content[{j}]") for j, raw in enumerate(raws)]
    uses = sum(block is not None and block.type == "tool_use" for block in blocks)
    for j, (raw, block) in enumerate(zip(raws, blocks, strict=True)):
        at = f"{path}.content[{j}]"
        match block:
            case schema.BlockIn(type="thinking"):
                thought.append(at)
                thoughts.append(
                    Reasoning(
                        text=_needed(block.thinking, f"{at}.thinking"),
                        signature=signatures.heard(NAME, block.signature),
                    )
                )
            case schema.BlockIn(type="redacted_thinking"):
                data = _needed(block.data, f"{at}.data")
                of_call = signature_of_call(data)
                # Which call it was, where that did not come back, nobody can say: it is then a thought of nobody's.
                if of_call is not None and of_call[0] < uses:
                    signed[of_call[0]] = of_call[1]
                else:
                    thought.append(at)
                    thoughts.append(Reasoning(signature=signatures.heard(NAME, data), redacted=True))
            case schema.BlockIn(type="tool_use"):
                if block.cache_control is not None:
                    unmapped.append(f"{at}.cache_control")
                called.append(at)
                calls.append(_tool_use(block, at))
            case _:
                said.append(at)
                parts.append(_part(raw, block, at, unmapped))
    for number, call in enumerate(calls):
        if number in signed:
            calls[number] = msgspec.structs.replace(call, signature=signed[number])
    spots.append(Spot(path, said, called, thought))
    return Message(role=Role.ASSISTANT, content=tuple(parts), tool_calls=tuple(calls), reasoning=tuple(thoughts))


def _tool_use(block: schema.BlockIn, path: str) -> ToolCall:
    arguments = given(block.input)
    if arguments is None or not bytes(arguments).startswith(b"{"):
        raise MalformedRequest(f"{path}.input", "an object is needed")
    return ToolCall(
        id=_needed(block.id, f"{path}.id"),
        name=_needed(block.name, f"{path}.name"),
        arguments=bytes(arguments).decode(),
    )


def _needed(value: str | None, path: str) -> str:
    if value is None:
        raise MalformedRequest(path, "is required")
    return value


def _user(raws: tuple[msgspec.Raw, ...], path: str, unmapped: list[str], spots: list[Spot]) -> list[Message]:
    """Each tool result is a message of its own in the canonical form, in the order of the blocks."""
    messages: list[Message] = []
    parts: list[Part] = []
    said: list[str] = []
    for j, raw in enumerate(raws):
        at = f"{path}.content[{j}]"
        block = _block(raw, at)
        if block is None or block.type != "tool_result":
            said.append(at)
            parts.append(_part(raw, block, at, unmapped))
            continue
        if parts:
            messages.append(Message(role=Role.USER, content=tuple(parts)))
            spots.append(Spot(path, said))
            parts, said = [], []
        messages.append(_tool_result(block, at, unmapped, spots))
    if parts or not messages:
        messages.append(Message(role=Role.USER, content=tuple(parts)))
        spots.append(Spot(path, said))
    return messages


def _tool_result(block: schema.BlockIn, path: str, unmapped: list[str], spots: list[Spot]) -> Message:
    content = given(block.content)
    parts: list[Part] = []
    spot = Spot(path)
    if content is not None:
        inner = typed(content, str | tuple[msgspec.Raw, ...], f"{path}.content")  # type: ignore[arg-type]
        spot = _spot(path, f"{path}.content", inner)
        if isinstance(inner, str):
            parts = [Text(text=inner)] if inner else []
        else:
            for k, raw in enumerate(inner):
                at = f"{path}.content[{k}]"
                parts.append(_part(raw, _block(raw, at), at, unmapped))
    if (cache := _ttl(block.cache_control)) is not None:
        parts = _cached(parts, cache)
        # The boundary stands beside the parts.
        spot = Spot(path, [*spot.content[:-1], path])
    spots.append(spot)
    return Message(
        role=Role.TOOL,
        content=tuple(parts),
        tool_call_id=_needed(block.tool_use_id, f"{path}.tool_use_id"),
        is_error=block.is_error is True,
    )


def _cached(parts: list[Part], cache: str) -> list[Part]:
    """A boundary after a result is one after its last part."""
    if not parts:
        return [Text(text="", cache=cache)]
    last = parts[-1]
    if isinstance(last, Text | Image | Document) and last.cache is None:
        return [*parts[:-1], msgspec.structs.replace(last, cache=cache)]
    return parts


def _part(raw: msgspec.Raw, block: schema.BlockIn | None, path: str, unmapped: list[str]) -> Part:
    match block:
        case schema.BlockIn(type="text"):
            _note_citations(block.citations, path, unmapped)
            return Text(text=_needed(block.text, f"{path}.text"), cache=_ttl(block.cache_control))
        case schema.BlockIn(type="image" | "document", source=None):
            raise MalformedRequest(f"{path}.source", "is required")
        case schema.BlockIn(type="image", source=schema.SourceIn() as source):
            if source.type in _IMAGES and given(block.transformations) is None:
                return _image(source, _ttl(block.cache_control), f"{path}.source")
        case schema.BlockIn(type="document", source=schema.SourceIn() as source):
            if source.type in _DOCUMENTS and block.context is None and given(block.citations) is None:
                return _document(source, block, f"{path}.source")
        case _:
            pass
    return Opaque(protocol=NAME, raw=raw)


def _image(source: schema.SourceIn, cache: str | None, path: str) -> Image:
    if source.type == "url":
        return Image(url=_needed(source.url, f"{path}.url"), cache=cache)
    data = from_base64(_needed(source.data, f"{path}.data"), f"{path}.data")
    return Image(data=data, media_type=_needed(source.media_type, f"{path}.media_type"), cache=cache)


def _document(source: schema.SourceIn, block: schema.BlockIn, path: str) -> Document:
    filename, cache = block.title, _ttl(block.cache_control)
    match source.type:
        case "url":
            return Document(url=_needed(source.url, f"{path}.url"), filename=filename, cache=cache)
        case "file":
            return Document(file_id=_needed(source.file_id, f"{path}.file_id"), filename=filename, cache=cache)
        case "text":
            data = _needed(source.data, f"{path}.data").encode()
            media_type = source.media_type or "text/plain"
        case _:
            data = from_base64(_needed(source.data, f"{path}.data"), f"{path}.data")
            media_type = source.media_type or "application/pdf"
    return Document(data=data, media_type=media_type, filename=filename, cache=cache)


def _tool(raw: msgspec.Raw, path: str, unmapped: list[str]) -> Tool | None:
    kind = given(typed(raw, dict[str, msgspec.Raw], path).get("type", msgspec.Raw(b"null")))
    if kind is not None and bytes(kind) != b'"custom"':
        unmapped.append(path)  # one that the provider runs itself
        return None
    wire = typed(raw, schema.ToolIn, path)
    _keep_unmapped(raw, _TOOL_FIELDS, path, unmapped)
    return Tool(
        name=_needed(wire.name, f"{path}.name"),
        description=wire.description,
        parameters=given(wire.input_schema),
        strict=wire.strict,
        cache=_ttl(wire.cache_control),
    )


def _tool_choice(choice: schema.ToolChoiceIn | None, unmapped: list[str]) -> ToolChoice | None:
    match choice:
        case None:
            return None
        case schema.ToolChoiceIn(type="auto" | "none" as mode):
            return ToolChoice(mode=mode)
        case schema.ToolChoiceIn(type="any"):
            return ToolChoice(mode="required")
        case schema.ToolChoiceIn(type="tool"):
            return ToolChoice(mode="tool", tool=_needed(choice.name, "tool_choice.name"))
        case _:
            unmapped.append("tool_choice")
            return None


def _response_format(wire: schema.RequestIn, unmapped: list[str]) -> ResponseFormat | None:
    """`output_format` is the beta's name for what is now in `output_config`."""
    for path, wanted in (
        ("output_config.format", wire.output_config.format if wire.output_config else None),
        ("output_format", wire.output_format),
    ):
        if wanted is None:
            continue
        if wanted.type != "json_schema":
            unmapped.append(path)
            return None
        if (known := given(wanted.schema)) is None:
            raise MalformedRequest(f"{path}.schema", "is required")
        return ResponseFormat(kind="json_schema", schema=known, strict=True)
    return None


def _reasoning(
    wire: schema.RequestIn, fields: Mapping[str, msgspec.Raw], unmapped: list[str]
) -> tuple[str | None, int | None]:
    """Effort and budget. `adaptive` leaves it to the model how much it thinks, as every model does that is not told."""
    effort = None
    if wire.output_config is not None:
        effort = wire.output_config.effort
        _keep_unmapped(fields["output_config"], {"effort", "format"}, "output_config", unmapped)
    thinking = wire.thinking
    if thinking is None:
        return effort, None
    _keep_unmapped(fields["thinking"], {"type", "budget_tokens", "display"}, "thinking", unmapped)
    match thinking.type:
        case "enabled":
            if thinking.budget_tokens is None:
                raise MalformedRequest("thinking.budget_tokens", "is required")
            return effort, thinking.budget_tokens
        case "disabled":
            return effort, 0
        case "adaptive":
            return effort, None
        case _:
            unmapped.append("thinking")
            return effort, None
