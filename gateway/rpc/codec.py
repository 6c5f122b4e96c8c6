"""
Protobuf to the canonical request, and the line's answers to protobuf.

Nothing past this file has seen a protobuf message, so the contract of the wire and the gateway's own vocabulary can
each change without the other. What a request gets wrong is refused here, with the path of the field as the caller wrote
it: left alone it would surface as a provider's error, or as a row the store cannot take.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, NoReturn, TypeAlias, assert_never

import msgspec
from google.protobuf import struct_pb2
from google.protobuf.message import DecodeError

from adapters.chat import (
    Audio,
    ChatRequest,
    Choice,
    Delta,
    Document,
    Image,
    ImageOutput,
    LogprobsDelta,
    Message,
    Part,
    Reasoning,
    ReasoningDelta,
    RefusalDelta,
    ResponseFormat,
    Role,
    StopReason,
    Text,
    TextDelta,
    TokenLogprob,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolCallStart,
    ToolChoice,
)
from adapters.paths import Paths, Spot
from admission.lease import Class, Waiting
from gateway.answer import Ended
from gateway.call import Completion, Options, Order, Resend, Unsupported
from gateway.errors import GatewayError, InvalidRequest
from gateway.outcome import AttemptReport, Cost, Counters, Outcome, RouteReport
from metering.cost import decimal_string
from metering.usage import NOTHING, Usage
from protos.tollbridge.v1 import gateway_pb2 as pb

#: Identifiers end up in index keys and log lines.
MAX_ID_CHARS: Final = 256
#: Of a call's metadata, as the header of HTTP.
SESSION_METADATA: Final = "x-tollbridge-session-id"
MAX_TAGS: Final = 64
MAX_PROVIDERS: Final = 64
MAX_MODELS: Final = 64
#: A double holds every whole number up to this one (2**53), and a Struct has only doubles.
_EXACT: Final = 9007199254740992.0
#: What the store's numeric column takes.
_MONEY: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,18})?")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")

#: Set by the gateway, or another protocol's word for a field of `CompletionRequest`: in `extra` they would say a thing
#: twice, or turn a plain call into a stream behind the gateway's back.
_OTHER_NAMES: Final = frozenset(
    {
        "contents",
        "input",
        "instructions",
        "max_completion_tokens",
        "max_tokens",
        "stop_sequences",
        "stream",
        "stream_options",
        "system",
        "user",
    }
)
_TAKEN: Final = frozenset(pb.CompletionRequest.DESCRIPTOR.fields_by_name) | _OTHER_NAMES

_CLASSES: Final = {
    pb.CLASS_UNSPECIFIED: Class.INTERACTIVE,
    pb.CLASS_INTERACTIVE: Class.INTERACTIVE,
    pb.CLASS_BATCH: Class.BATCH,
}
_RESEND: Final = {
    pb.RESEND_UNCERTAIN_UNSPECIFIED: None,
    pb.RESEND_UNCERTAIN_NEVER: Resend.NEVER,
    pb.RESEND_UNCERTAIN_BEFORE_FIRST_BYTE: Resend.BEFORE_FIRST_BYTE,
}
_ORDERS: Final = {
    pb.ORDER_UNSPECIFIED: None,
    pb.ORDER_PRIORITY: Order.PRIORITY,
    pb.ORDER_COST: Order.COST,
    pb.ORDER_LATENCY: Order.LATENCY,
    pb.ORDER_WEIGHTED: Order.WEIGHTED,
}
_UNSUPPORTED: Final = {
    pb.UNSUPPORTED_UNSPECIFIED: None,
    pb.UNSUPPORTED_REFUSE: Unsupported.REFUSE,
    pb.UNSUPPORTED_DROP: Unsupported.DROP,
}
_MODES: Final = {
    pb.ToolChoice.MODE_UNSPECIFIED: None,
    pb.ToolChoice.MODE_AUTO: ToolChoice(mode="auto"),
    pb.ToolChoice.MODE_NONE: ToolChoice(mode="none"),
    pb.ToolChoice.MODE_REQUIRED: ToolChoice(mode="required"),
}
_FORMATS: Final = {
    pb.ResponseFormat.KIND_UNSPECIFIED: "text",
    pb.ResponseFormat.KIND_TEXT: "text",
    pb.ResponseFormat.KIND_JSON_OBJECT: "json_object",
    pb.ResponseFormat.KIND_JSON_SCHEMA: "json_schema",
}
_FINISH: Final = {
    StopReason.STOP: pb.FINISH_REASON_STOP,
    StopReason.LENGTH: pb.FINISH_REASON_LENGTH,
    StopReason.TOOL_CALLS: pb.FINISH_REASON_TOOL_CALLS,
    StopReason.CONTENT_FILTER: pb.FINISH_REASON_CONTENT_FILTER,
    StopReason.REFUSAL: pb.FINISH_REASON_REFUSAL,
    StopReason.PAUSE: pb.FINISH_REASON_PAUSE,
    StopReason.OTHER: pb.FINISH_REASON_OTHER,
}
#: The counts of a `Usage` message, and where each is in our own.
_COUNTS: Final = (
    ("input_tokens", "input_total"),
    ("cache_read_tokens", "cache_read"),
    ("cache_write_5m_tokens", "cache_write_5m"),
    ("cache_write_1h_tokens", "cache_write_1h"),
    ("output_tokens", "output_total"),
    ("reasoning_tokens", "reasoning"),
)
_CACHES: Final = {"": None, "5m": "5m", "1h": "1h"}
_DETAILS: Final = {"": None, "low": "low", "high": "high", "auto": "auto"}
#: Where a thing of the canonical request stands in a `CompletionRequest`.
_WORDS: Final = {name: (f"{{kind}}.{name}",) for name in ("detail", "filename", "url", "data", "media_type", "format")}
_OF_ASSISTANTS: Final = ("tool_calls", "refusal", "reasoning")
_OF_TOOLS: Final = ("tool_call_id", "is_error")
#: By its word each role, with the fields of a message that belong to other roles.
_ROLES: Final = {
    role.value: (role, (() if role is Role.ASSISTANT else _OF_ASSISTANTS) + (() if role is Role.TOOL else _OF_TOOLS))
    for role in Role
}

#: Makes of the path and value of a field what it means, or refuses it.
_Reader: TypeAlias = Callable[[str, Any], Any]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a `CompletionRequest` asks for."""

    #: Empty only where `options.role` is set.
    model: str
    chat: ChatRequest
    options: Options


# ------------------------------------------------------------------ request


class Undecodable:
    """
    Stands for a message whose bytes are not one. gRPC's own answer to them names Python's internals, and comes
    before anybody has asked for a key.
    """


def parse_request(data: bytes) -> pb.CompletionRequest | Undecodable:
    """The message in these bytes. Never raises."""
    try:
        return pb.CompletionRequest.FromString(data)
    except DecodeError:
        return Undecodable()


def decode_request(request: pb.CompletionRequest) -> Asked:
    """The canonical request. Raises `InvalidRequest` with the field's path for anything it cannot mean."""
    model = ""
    messages: Sequence[pb.Message] = ()
    choice: pb.ToolChoice | None = None
    chat: dict[str, Any] = {}
    options: dict[str, Any] = {}
    # Only what is set is looked at: most of the fields of most requests are not.
    for field, value in request.ListFields():
        name = field.name
        if name == "messages":
            messages = value
        elif name == "model":
            model = _needed(name, value)
        elif name == "tool_choice":
            choice = value
        elif name in _CHAT:
            chat[name] = _CHAT[name](name, value)
        else:
            attribute, read = _OPTIONS[name]
            options[attribute] = read(name, value)
    if not model and "role" not in options:
        _refuse("model", "a model or a role is needed")
    if not messages:
        _refuse("messages", "at least one message is needed")
    if choice is not None:
        chat["tool_choice"] = _tool_choice(choice, chat.get("tools", ()))
    spots: list[Spot] = []
    chat["messages"] = tuple([_message(f"messages[{at}]", message, spots) for at, message in enumerate(messages)])
    chat["paths"] = Paths(messages=spots, words=_WORDS)
    return Asked(model=model, chat=ChatRequest(**chat), options=Options(**options))


def _refuse(path: str, reason: str) -> NoReturn:
    raise InvalidRequest(f"{path}: {reason}", param=path)


def in_session(options: Options, metadata: Iterable[tuple[str, str | bytes]]) -> Options:
    """
    With the session that the call's metadata names, as a header does over HTTP: for a proxy that knows no messages.

    Raises InvalidRequest where it is there twice, or the message names another.
    """
    given = [value for name, value in metadata if name == SESSION_METADATA]
    if not given:
        return options
    if len(given) > 1 or not isinstance(given[0], str):
        _refuse(SESSION_METADATA, "given twice" if len(given) > 1 else "is no text")
    named = _needed(SESSION_METADATA, given[0])
    if options.session_id not in {None, named}:
        _refuse(SESSION_METADATA, "the message's session_id is another")
    return msgspec.structs.replace(options, session_id=named)


def _identifier(path: str, value: str) -> str | None:
    if not value:
        return None
    if len(value) > MAX_ID_CHARS:
        _refuse(path, f"longer than {MAX_ID_CHARS} characters")
    if _CONTROL.search(value):
        _refuse(path, "holds a control character")
    return value


def _needed(path: str, value: str) -> str:
    given = _identifier(path, value)
    if given is None:
        _refuse(path, "is empty")
    return given


def _as_it_is(_path: str, value: Any) -> Any:
    return value


def _metadata(path: str, metadata: Mapping[str, str]) -> dict[str, str]:
    given = dict(metadata)
    for key, value in given.items():
        _needed(path, key)
        _identifier(path, value)
    return given


def _tags(path: str, tags: Mapping[str, str]) -> dict[str, str]:
    if len(tags) > MAX_TAGS:
        _refuse(path, f"more than {MAX_TAGS}")
    return _metadata(path, tags)


def _names(most: int) -> _Reader:
    def read(path: str, names: Sequence[str]) -> tuple[str, ...]:
        if len(names) > most:
            _refuse(path, f"more than {most}")
        return tuple(_needed(f"{path}[{at}]", name) for at, name in enumerate(names))

    return read


def _member(path: str, known: Mapping[Any, Any], value: int) -> Any:
    if value not in known:
        _refuse(path, f"no such value: {value}")
    return known[value]


def _one_of(known: Mapping[Any, Any]) -> _Reader:
    return lambda path, value: _member(path, known, value)


def _money(path: str, value: str) -> Decimal:
    if not _MONEY.fullmatch(value):
        _refuse(path, 'a decimal number of USD that is not negative and below 1e9 is needed, like "0.25"')
    return Decimal(value)


def _whole(*, least: int) -> _Reader:
    def read(path: str, value: int) -> int:
        if value < least:
            _refuse(path, f"less than {least}")
        return value

    return read


def _real(*, least: float = -math.inf) -> _Reader:
    def read(path: str, value: float) -> float:
        if not math.isfinite(value):
            _refuse(path, "not a finite number")
        if value < least:
            _refuse(path, f"less than {least:g}")
        return value

    return read


def _stop(path: str, stop: Sequence[str]) -> tuple[str, ...]:
    for at, sequence in enumerate(stop):
        if not sequence:
            _refuse(f"{path}[{at}]", "is empty")
    return tuple(stop)


def _logit_bias(path: str, bias: Mapping[str, float]) -> dict[str, float]:
    given = dict(bias)
    for token, value in given.items():
        _needed(path, token)
        if not math.isfinite(value):
            _refuse(path, "not a finite number")
    return given


# ------------------------------------------------------------------ messages


def _message(path: str, message: pb.Message, spots: list[Spot]) -> Message:
    """The message; where it stood is added to `spots`."""
    known = _ROLES.get(message.role)
    if known is None:
        _refuse(f"{path}.role", f"one of {', '.join(_ROLES)} is needed")
    role, of_others = known
    for name in of_others:
        if getattr(message, name):
            _refuse(f"{path}.{name}", f"does not belong on a message of the role {role.value}")
    content: tuple[Part, ...] = ()
    places: Sequence[str] = ()
    kind = message.WhichOneof("content")
    if kind == "text":
        content, places = (Text(text=message.text),), (f"{path}.text",)
    elif kind == "parts":
        parts = message.parts.parts
        if not parts:
            _refuse(f"{path}.parts", "is empty")
        places = [f"{path}.parts.parts[{at}]" for at in range(len(parts))]
        content = tuple([_part(place, part) for place, part in zip(places, parts, strict=True)])
    spots.append(Spot(path, places))
    if role is not Role.ASSISTANT and role is not Role.TOOL:
        if not content:
            _refuse(path, "has no content: set `text` or `parts`")
        return Message(role=role, content=content, name=_identifier(f"{path}.name", message.name))
    tool_calls, reasoning = message.tool_calls, message.reasoning
    if role is Role.TOOL and not message.tool_call_id:
        _refuse(f"{path}.tool_call_id", "a tool message names the call it is the result of")
    if not (content or tool_calls or message.refusal or reasoning):
        _refuse(path, "has no content: set `text` or `parts`")
    return Message(
        role=role,
        content=content,
        name=_identifier(f"{path}.name", message.name),
        tool_calls=tuple([_tool_call(f"{path}.tool_calls[{at}]", call) for at, call in enumerate(tool_calls)]),
        tool_call_id=_identifier(f"{path}.tool_call_id", message.tool_call_id),
        is_error=message.is_error,
        refusal=message.refusal or None,
        reasoning=tuple([_reasoning(f"{path}.reasoning[{at}]", thought) for at, thought in enumerate(reasoning)]),
    )


def _reasoning(path: str, thought: pb.Reasoning) -> Reasoning:
    return Reasoning(
        text=thought.text,
        signature=_signature(f"{path}.signature", thought.signature),
        redacted=thought.redacted,
        id=_identifier(f"{path}.id", thought.id),
    )


def _cache(path: str, value: str) -> str | None:
    if value not in _CACHES:
        _refuse(path, 'one of "", "5m", "1h" is needed')
    return _CACHES[value]


def _part(path: str, part: pb.Part) -> Part:
    cache = _cache(f"{path}.cache", part.cache)
    match part.WhichOneof("part"):
        case "text":
            return Text(text=part.text, cache=cache)
        case "image":
            return _image(f"{path}.image", part.image, cache)
        case "document":
            return _document(f"{path}.document", part.document, cache)
        case "audio":
            if cache is not None:
                _refuse(f"{path}.cache", "no cache boundary can follow audio")
            if not part.audio.data:
                _refuse(f"{path}.audio.data", "is empty")
            return Audio(data=part.audio.data, format=_needed(f"{path}.audio.format", part.audio.format))
        case _:
            _refuse(path, "one of text, image, document, audio is needed")


def _image(path: str, image: pb.Image, cache: str | None) -> Image:
    if image.detail not in _DETAILS:
        _refuse(f"{path}.detail", 'one of "low", "high", "auto" is needed')
    source = _source(path, image, image.WhichOneof("source"), "url or data")
    return Image(
        url=image.url if source == "url" else None,
        data=image.data if source == "data" else None,
        media_type=_identifier(f"{path}.media_type", image.media_type),
        detail=_DETAILS[image.detail],
        cache=cache,
    )


def _document(path: str, document: pb.Document, cache: str | None) -> Document:
    source = _source(path, document, document.WhichOneof("source"), "url, data or file_id")
    return Document(
        url=document.url if source == "url" else None,
        data=document.data if source == "data" else None,
        file_id=_needed(f"{path}.file_id", document.file_id) if source == "file_id" else None,
        media_type=_identifier(f"{path}.media_type", document.media_type),
        filename=_identifier(f"{path}.filename", document.filename),
        cache=cache,
    )


def _source(path: str, media: pb.Image | pb.Document, source: str | None, known: str) -> str:
    if source is None:
        _refuse(path, f"{known} is needed")
    if not getattr(media, source):
        _refuse(f"{path}.{source}", "is empty")
    if source == "url" and _CONTROL.search(media.url):
        _refuse(f"{path}.url", "holds a control character")
    if source == "data" and not media.media_type:
        _refuse(f"{path}.media_type", "data needs its media type")
    return source


def _tool_call(path: str, call: pb.ToolCall) -> ToolCall:
    return ToolCall(
        id=_needed(f"{path}.id", call.id),
        name=_needed(f"{path}.name", call.name),
        arguments=call.arguments,
        signature=_signature(f"{path}.signature", call.signature),
    )


def _signature(path: str, signature: bytes) -> str | None:
    try:
        return signature.decode() or None
    except UnicodeDecodeError:
        _refuse(path, "not a signature that was given out here")


# ------------------------------------------------------------------ tools, formats, extra


def _tools(path: str, tools: Sequence[pb.Tool]) -> tuple[Tool, ...]:
    seen: set[str] = set()
    decoded = []
    for at, tool in enumerate(tools):
        path = f"tools[{at}]"
        name = _needed(f"{path}.name", tool.name)
        if name in seen:
            _refuse(f"{path}.name", "another tool has this name")
        seen.add(name)
        decoded.append(
            Tool(
                name=name,
                description=tool.description or None,
                parameters=_json(f"{path}.parameters", tool.parameters) if tool.HasField("parameters") else None,
                strict=tool.strict if tool.HasField("strict") else None,
                cache=_cache(f"{path}.cache", tool.cache),
            )
        )
    return tuple(decoded)


def _tool_choice(choice: pb.ToolChoice, tools: Iterable[Tool]) -> ToolChoice | None:
    match choice.WhichOneof("choice"):
        case "mode":
            decoded: ToolChoice | None = _member("tool_choice.mode", _MODES, choice.mode)
            return decoded
        case "tool":
            if all(tool.name != choice.tool for tool in tools):
                _refuse("tool_choice.tool", "no tool has this name")
            return ToolChoice(mode="tool", tool=choice.tool)
        case _:
            return None


def _response_format(path: str, form: pb.ResponseFormat) -> ResponseFormat:
    kind: str = _member(f"{path}.kind", _FORMATS, form.kind)
    schema = _json(f"{path}.schema", form.schema) if form.HasField("schema") else None
    if kind == "json_schema":
        if schema is None:
            _refuse(f"{path}.schema", "KIND_JSON_SCHEMA needs a schema")
    else:
        for name in ("name", "description", "schema", "strict"):
            if form.HasField(name) if name in {"schema", "strict"} else getattr(form, name):
                _refuse(f"{path}.{name}", "belongs to KIND_JSON_SCHEMA")
    return ResponseFormat(
        kind=kind,
        name=_identifier(f"{path}.name", form.name),
        description=form.description or None,
        schema=schema,
        strict=form.strict if form.HasField("strict") else None,
    )


def _extra(path: str, extra: struct_pb2.Struct) -> dict[str, msgspec.Raw]:
    decoded = {}
    for name in sorted(extra.fields):
        _needed(path, name)
        if name in _TAKEN:
            _refuse(f"{path}.{name}", "the request has a field of its own for this, or the gateway sets it")
        decoded[name] = _encoded(_value(f"{path}.{name}", extra.fields[name]))
    return decoded


def _json(path: str, struct: struct_pb2.Struct) -> msgspec.Raw:
    return _encoded({name: _value(path, value) for name, value in struct.fields.items()})


def _encoded(value: Any) -> msgspec.Raw:
    # A Struct has lost the order of its keys. In a fixed one, equal requests stay equal bytes, which is what the
    # prompt caches of providers go by.
    return msgspec.Raw(msgspec.json.encode(value, order="sorted"))


def _value(path: str, value: struct_pb2.Value) -> Any:
    match value.WhichOneof("kind"):
        case "number_value":
            number = value.number_value
            if not math.isfinite(number):
                _refuse(path, "not a finite number")
            return int(number) if number.is_integer() and abs(number) <= _EXACT else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "struct_value":
            return {name: _value(path, inner) for name, inner in value.struct_value.fields.items()}
        case "list_value":
            return [_value(path, inner) for inner in value.list_value.values]
        case "null_value":
            return None
        case _:
            _refuse(path, "holds a value of no kind")


#: The fields that stand for themselves, and how each is read, as they are in a `ChatRequest`.
_CHAT: Final[Mapping[str, _Reader]] = {
    "tools": _tools,
    "parallel_tool_calls": _as_it_is,
    "response_format": _response_format,
    "max_output_tokens": _whole(least=1),
    "temperature": _real(least=0.0),
    "top_p": _real(least=0.0),
    "top_k": _whole(least=0),
    "stop": _stop,
    "seed": _as_it_is,
    "n": _whole(least=1),
    "presence_penalty": _real(),
    "frequency_penalty": _real(),
    "logprobs": _as_it_is,
    "top_logprobs": _whole(least=0),
    "logit_bias": _logit_bias,
    "reasoning_effort": _needed,
    "reasoning_budget_tokens": _whole(least=0),
    "verbosity": _needed,
    "service_tier": _needed,
    "prompt_cache_key": _needed,
    "prompt_cache_retention": _needed,
    "store": _as_it_is,
    "metadata": _metadata,
    "end_user": _needed,
    "extra": _extra,
}
#: The same of `Options`, with their names there.
_OPTIONS: Final[Mapping[str, tuple[str, _Reader]]] = {
    "session_id": ("session_id", _needed),
    "debit_id": ("debit_id", _needed),
    "idempotency_key": ("idempotency_key", _needed),
    "scope_id": ("scope_id", _needed),
    "run_id": ("run_id", _needed),
    "step_id": ("step_id", _needed),
    "skill": ("skill", _needed),
    "skill_version": ("skill_version", _needed),
    "role": ("role", _needed),
    "tool": ("tool", _needed),
    "tags": ("tags", _tags),
    "owner_fence": ("owner_fence", _whole(least=0)),
    "class": ("klass", _one_of(_CLASSES)),
    "max_cost_usd": ("max_cost_usd", _money),
    "allowed_providers": ("allowed_providers", _names(MAX_PROVIDERS)),
    "allowed_models": ("allowed_models", _names(MAX_MODELS)),
    "allow_failover": ("allow_failover", _as_it_is),
    "resend_uncertain": ("resend_uncertain", _one_of(_RESEND)),
    "spill_after_s": ("spill_after_s", _real(least=0.0)),
    "order": ("order", _one_of(_ORDERS)),
    "unsupported": ("unsupported", _one_of(_UNSUPPORTED)),
    "explain": ("explain", _as_it_is),
}


# ------------------------------------------------------------------ answer


def encode_completion(completion: Completion) -> pb.CompletionResponse:
    response = pb.CompletionResponse()
    for choice in completion.response.choices:
        _choice(response.choices.add(), choice)
    _outcome(response.outcome, completion.outcome)
    return response


def _choice(said: pb.Choice, choice: Choice) -> None:
    said.index = choice.index
    said.text = choice.text
    said.refusal = choice.refusal
    for thought in choice.reasoning:
        said.reasoning.add(
            text=thought.text, signature=_bytes(thought.signature), redacted=thought.redacted, id=thought.id or ""
        )
    for call in choice.tool_calls:
        said.tool_calls.add(id=call.id, name=call.name, arguments=call.arguments, signature=_bytes(call.signature))
    said.finish_reason = _FINISH[choice.stop_reason]
    if choice.native_stop_reason is not None:
        said.native_finish_reason = choice.native_stop_reason
    said.images.extend([_image_out(image) for image in choice.images])
    if choice.logprobs is not None:
        said.logprobs.CopyFrom(_logprobs(choice.logprobs))


def _image_out(image: Image) -> pb.Image:
    media_type = image.media_type or ""
    if image.data is not None:
        return pb.Image(data=image.data, media_type=media_type)
    return pb.Image(url=image.url or "", media_type=media_type)


def _logprobs(tokens: Sequence[TokenLogprob]) -> pb.Logprobs:
    return pb.Logprobs(tokens=[_logprob(token) for token in tokens])


def _logprob(token: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token=token.token,
        logprob=token.logprob,
        bytes=None if token.bytes is None else bytes(token.bytes),
        top=[_logprob(other) for other in token.top],
    )


def _bytes(signature: str | None) -> bytes:
    return (signature or "").encode()


def encode_queued(waiting: Waiting) -> pb.CompletionChunk:
    return pb.CompletionChunk(
        queued=pb.Queued(
            group=waiting.group,
            position=waiting.position,
            reason=waiting.reason,
            expected_wait_s=waiting.expected_wait_s,
            until_s=waiting.until_s,
        )
    )


def encode_started(route: RouteReport, attempt: int) -> pb.CompletionChunk:
    chunk = pb.CompletionChunk()
    _route(chunk.started.route, route)
    chunk.started.attempt = attempt
    return chunk


def encode_deltas(deltas: Sequence[Delta]) -> pb.CompletionChunk:
    """One message; neighbouring pieces of one kind and choice become one piece."""
    chunk = pb.CompletionChunk()
    pieces = chunk.delta.pieces
    last: pb.Piece | None = None
    at, count = 0, len(deltas)
    while at < count:
        delta = deltas[at]
        at += 1
        match delta:
            case TextDelta():
                # Joined here: a message would copy its whole text for each delta that is added to it.
                texts = [delta.text]
                while at < count and isinstance(more := deltas[at], TextDelta) and more.choice == delta.choice:
                    texts.append(more.text)
                    at += 1
                last = pieces.add(choice=delta.choice, text="".join(texts))
            case ReasoningDelta():
                choice, block = delta.choice, delta.block
                if (
                    last is not None
                    and last.choice == choice
                    and last.WhichOneof("piece") == "reasoning"
                    and last.reasoning_block == block
                ):
                    last.reasoning += delta.text
                elif delta.text:
                    last = pieces.add(choice=choice, reasoning_block=block, reasoning=delta.text)
                if delta.redacted:
                    last = pieces.add(choice=choice, reasoning_block=block, reasoning_redacted=True)
                if delta.id is not None:
                    last = pieces.add(choice=choice, reasoning_block=block, reasoning_id=delta.id)
                if delta.signature is not None:
                    last = pieces.add(
                        choice=choice, reasoning_block=block, reasoning_signature=delta.signature.encode()
                    )
            case RefusalDelta():
                last = pieces.add(choice=delta.choice, refusal=delta.text)
            case ToolCallStart():
                last = pieces.add(
                    choice=delta.choice,
                    tool_call=pb.ToolCallStart(
                        index=delta.index, id=delta.id, name=delta.name, signature=_bytes(delta.signature)
                    ),
                )
            case ToolCallDelta():
                if (
                    last is not None
                    and last.choice == delta.choice
                    and last.WhichOneof("piece") == "tool_arguments"
                    and last.tool_arguments.index == delta.index
                ):
                    last.tool_arguments.arguments += delta.arguments
                else:
                    last = pieces.add(
                        choice=delta.choice,
                        tool_arguments=pb.ToolCallArguments(index=delta.index, arguments=delta.arguments),
                    )
            case ImageOutput():
                last = pieces.add(choice=delta.choice, image=_image_out(delta.image))
            case LogprobsDelta():
                last = pieces.add(choice=delta.choice, logprobs=_logprobs(delta.tokens))
            case _:
                assert_never(delta)
    return chunk


def encode_ended(ended: Ended) -> pb.CompletionChunk:
    chunk = pb.CompletionChunk()
    finished = chunk.finished
    for end in ended.ends:
        finished.ends.add(
            choice=end.choice, finish_reason=_FINISH[end.stop_reason], native_finish_reason=end.native_stop_reason
        )
    _outcome(finished.outcome, ended.outcome)
    return chunk


def encode_failed(error: GatewayError, outcome: Outcome | None) -> pb.CompletionChunk:
    chunk = pb.CompletionChunk(failed=pb.Failed(code=error.code, message=error.message))
    if outcome is not None:
        _outcome(chunk.failed.outcome, outcome)
    return chunk


def encode_outcome(outcome: Outcome) -> pb.Outcome:
    report = pb.Outcome()
    _outcome(report, outcome)
    return report


# What is in every answer is written into the message it is a part of, field by field: made apart, each part would be
# built and then copied into the next larger one.


def _outcome(report: pb.Outcome, outcome: Outcome) -> None:
    report.request_id = outcome.request_id
    report.debit_id = outcome.debit_id
    if outcome.route is not None:
        _route(report.route, outcome.route)
    for attempt in outcome.attempts:
        _attempt(report.attempts.add(), attempt)
    if outcome.usage != NOTHING:
        _usage(report.usage, outcome.usage)
    _cost(report.cost, outcome.cost)
    report.ended = outcome.ended
    report.settlement = outcome.settlement
    if outcome.counters is not None:
        _counters(report.counters, outcome.counters)
    report.warnings.extend(outcome.warnings)
    if outcome.served_model is not None:
        report.served_model = outcome.served_model
    if outcome.provider_request_id is not None:
        report.provider_request_id = outcome.provider_request_id
    for out in outcome.left_out:
        report.left_out.add(provider=out.provider, model=out.model, reason=out.reason)


def _route(report: pb.Route, route: RouteReport) -> None:
    report.route_id = route.route_id
    report.provider = route.provider
    report.model = route.model
    report.protocol = route.protocol


def _attempt(report: pb.Attempt, attempt: AttemptReport) -> None:
    report.number = attempt.number
    _route(report.route, attempt.route)
    report.status = attempt.status
    if attempt.error_class is not None:
        report.error_class = attempt.error_class
    if attempt.code is not None:
        report.code = attempt.code
    if attempt.http_status is not None:
        report.http_status = attempt.http_status
    if attempt.message is not None:
        report.message = attempt.message
    _cost(report.cost, attempt.cost)


def _usage(report: pb.Usage, usage: Usage) -> None:
    report.SetInParent()
    for name, count in _COUNTS:
        tokens: int | None = getattr(usage, count)
        if tokens is not None:
            setattr(report, name, tokens)


def _cost(report: pb.Cost, cost: Cost) -> None:
    report.state = cost.state
    if cost.usd is not None:
        report.usd = decimal_string(cost.usd)
    if cost.upper_bound_usd is not None:
        report.upper_bound_usd = decimal_string(cost.upper_bound_usd)
    if cost.price_version is not None:
        report.price_version = cost.price_version
    if cost.reason is not None:
        report.reason = cost.reason


def _counters(report: pb.Counters, counters: Counters) -> None:
    if counters.session_usd is not None:
        report.session_usd = decimal_string(counters.session_usd)
    report.day_usd = decimal_string(counters.day_usd)
    report.total_usd = decimal_string(counters.total_usd)
    report.day = counters.day.isoformat()
