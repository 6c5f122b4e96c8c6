"""
Protobuf to the canonical request, and the line's answers to protobuf.

Nothing past this file has seen a protobuf message, so the contract of the wire and the gateway's own vocabulary can
each change without the other. What a request gets wrong is refused here, with the path of the field as the caller wrote
it: left alone it would surface as a provider's error, or as a row the store cannot take.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, NoReturn, assert_never

import msgspec
from google.protobuf import struct_pb2
from google.protobuf.message import DecodeError

from adapters.chat import (
    Audio,
    ChatRequest,
    Choice,
    ChoiceEnd,
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
_CACHES: Final = {"": None, "5m": "5m", "1h": "1h"}
_DETAILS: Final = {"": None, "low": "low", "high": "high", "auto": "auto"}
#: Where a thing of the canonical request stands in a `CompletionRequest`.
_WORDS: Final = {name: (f"{{kind}}.{name}",) for name in ("detail", "filename", "url", "data", "media_type", "format")}
_ROLES: Final = {role.value: role for role in Role}
_OF_ASSISTANTS: Final = ("tool_calls", "refusal", "reasoning")
_OF_TOOLS: Final = ("tool_call_id", "is_error")
#: The fields of a message that belong to other roles than this one.
_OF_OTHERS: Final = {
    role: (() if role is Role.ASSISTANT else _OF_ASSISTANTS) + (() if role is Role.TOOL else _OF_TOOLS) for role in Role
}


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
    model = _identifier("model", request.model)
    options = _options(request)
    if model is None and options.role is None:
        _refuse("model", "a model or a role is needed")
    if not request.messages:
        _refuse("messages", "at least one message is needed")
    tools = _tools(request.tools)
    chat = ChatRequest(
        messages=tuple(_message(f"messages[{at}]", message) for at, message in enumerate(request.messages)),
        tools=tools,
        tool_choice=_tool_choice(request, tools),
        parallel_tool_calls=request.parallel_tool_calls if request.HasField("parallel_tool_calls") else None,
        response_format=_response_format(request),
        max_output_tokens=_whole(request, "max_output_tokens", least=1),
        temperature=_real(request, "temperature", least=0.0),
        top_p=_real(request, "top_p", least=0.0),
        top_k=_whole(request, "top_k", least=0),
        stop=_stop(request.stop),
        seed=request.seed if request.HasField("seed") else None,
        n=_whole(request, "n", least=1),
        presence_penalty=_real(request, "presence_penalty"),
        frequency_penalty=_real(request, "frequency_penalty"),
        logprobs=request.logprobs if request.HasField("logprobs") else None,
        top_logprobs=_whole(request, "top_logprobs", least=0),
        logit_bias=_logit_bias(request.logit_bias),
        reasoning_effort=_optional_identifier(request, "reasoning_effort"),
        reasoning_budget_tokens=_whole(request, "reasoning_budget_tokens", least=0),
        verbosity=_optional_identifier(request, "verbosity"),
        service_tier=_optional_identifier(request, "service_tier"),
        prompt_cache_key=_optional_identifier(request, "prompt_cache_key"),
        prompt_cache_retention=_optional_identifier(request, "prompt_cache_retention"),
        store=request.store if request.HasField("store") else None,
        metadata=_metadata(request.metadata),
        end_user=_optional_identifier(request, "end_user"),
        extra=_extra(request),
        paths=Paths(
            messages=[_spot(f"messages[{at}]", message) for at, message in enumerate(request.messages)], words=_WORDS
        ),
    )
    return Asked(model=model or "", chat=chat, options=options)


def _spot(path: str, message: pb.Message) -> Spot:
    if message.WhichOneof("content") == "text":
        return Spot(path, [f"{path}.text"])
    return Spot(path, [f"{path}.parts.parts[{at}]" for at in range(len(message.parts.parts))])


def _refuse(path: str, reason: str) -> NoReturn:
    raise InvalidRequest(f"{path}: {reason}", param=path)


def _options(request: pb.CompletionRequest) -> Options:
    return Options(
        session_id=_identifier("session_id", request.session_id),
        debit_id=_identifier("debit_id", request.debit_id),
        idempotency_key=_identifier("idempotency_key", request.idempotency_key),
        scope_id=_identifier("scope_id", request.scope_id),
        run_id=_identifier("run_id", request.run_id),
        step_id=_identifier("step_id", request.step_id),
        skill=_identifier("skill", request.skill),
        skill_version=_identifier("skill_version", request.skill_version),
        role=_identifier("role", request.role),
        tool=_identifier("tool", request.tool),
        tags=_tags(request.tags),
        owner_fence=_whole(request, "owner_fence", least=0),
        klass=_member("class", _CLASSES, getattr(request, "class")),
        max_cost_usd=_money(request),
        allowed_providers=_names("allowed_providers", MAX_PROVIDERS, request.allowed_providers),
        allowed_models=_names("allowed_models", MAX_MODELS, request.allowed_models),
        allow_failover=request.allow_failover if request.HasField("allow_failover") else True,
        resend_uncertain=_member("resend_uncertain", _RESEND, request.resend_uncertain),
        spill_after_s=_real(request, "spill_after_s", least=0.0),
        order=_member("order", _ORDERS, request.order),
        unsupported=_member("unsupported", _UNSUPPORTED, request.unsupported),
        explain=request.explain,
    )


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


def _optional_identifier(request: pb.CompletionRequest, name: str) -> str | None:
    if not request.HasField(name):
        return None
    return _needed(name, getattr(request, name))


def _metadata(metadata: Mapping[str, str]) -> dict[str, str] | None:
    for key, value in metadata.items():
        _needed("metadata", key)
        _identifier("metadata", value)
    return dict(metadata) or None


def _needed(path: str, value: str) -> str:
    given = _identifier(path, value)
    if given is None:
        _refuse(path, "is empty")
    return given


def _tags(tags: Mapping[str, str]) -> dict[str, str]:
    if len(tags) > MAX_TAGS:
        _refuse("tags", f"more than {MAX_TAGS}")
    for key, value in tags.items():
        _needed("tags", key)
        _identifier("tags", value)
    return dict(tags)


def _names(path: str, most: int, names: Sequence[str]) -> tuple[str, ...]:
    if len(names) > most:
        _refuse(path, f"more than {most}")
    return tuple(_needed(f"{path}[{at}]", name) for at, name in enumerate(names))


def _member(path: str, known: Mapping[Any, Any], value: int) -> Any:
    if value not in known:
        _refuse(path, f"no such value: {value}")
    return known[value]


def _money(request: pb.CompletionRequest) -> Decimal | None:
    if not request.HasField("max_cost_usd"):
        return None
    if not _MONEY.fullmatch(request.max_cost_usd):
        _refuse("max_cost_usd", 'a decimal number of USD that is not negative and below 1e9 is needed, like "0.25"')
    return Decimal(request.max_cost_usd)


def _whole(request: pb.CompletionRequest, name: str, *, least: int) -> int | None:
    if not request.HasField(name):
        return None
    value: int = getattr(request, name)
    if value < least:
        _refuse(name, f"less than {least}")
    return value


def _real(request: pb.CompletionRequest, name: str, *, least: float | None = None) -> float | None:
    if not request.HasField(name):
        return None
    value: float = getattr(request, name)
    if not math.isfinite(value):
        _refuse(name, "not a finite number")
    if least is not None and value < least:
        _refuse(name, f"less than {least:g}")
    return value


def _stop(stop: Sequence[str]) -> tuple[str, ...]:
    for at, sequence in enumerate(stop):
        if not sequence:
            _refuse(f"stop[{at}]", "is empty")
    return tuple(stop)


def _logit_bias(bias: Mapping[str, float]) -> dict[str, float] | None:
    for token, value in bias.items():
        _needed("logit_bias", token)
        if not math.isfinite(value):
            _refuse("logit_bias", "not a finite number")
    return dict(bias) or None


# ------------------------------------------------------------------ messages


def _message(path: str, message: pb.Message) -> Message:
    role = _ROLES.get(message.role)
    if role is None:
        _refuse(f"{path}.role", f"one of {', '.join(_ROLES)} is needed")
    for name in _OF_OTHERS[role]:
        if getattr(message, name):
            _refuse(f"{path}.{name}", f"does not belong on a message of the role {role.value}")
    content = _content(path, message)
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


def _content(path: str, message: pb.Message) -> tuple[Part, ...]:
    match message.WhichOneof("content"):
        case "text":
            return (Text(text=message.text),)
        case "parts":
            if not message.parts.parts:
                _refuse(f"{path}.parts", "is empty")
            return tuple(_part(f"{path}.parts.parts[{at}]", part) for at, part in enumerate(message.parts.parts))
        case _:
            return ()


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


def _tools(tools: Sequence[pb.Tool]) -> tuple[Tool, ...]:
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


def _tool_choice(request: pb.CompletionRequest, tools: Iterable[Tool]) -> ToolChoice | None:
    choice = request.tool_choice
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


def _response_format(request: pb.CompletionRequest) -> ResponseFormat | None:
    if not request.HasField("response_format"):
        return None
    form = request.response_format
    kind: str = _member("response_format.kind", _FORMATS, form.kind)
    schema = _json("response_format.schema", form.schema) if form.HasField("schema") else None
    if kind == "json_schema":
        if schema is None:
            _refuse("response_format.schema", "KIND_JSON_SCHEMA needs a schema")
    else:
        for name in ("name", "description", "schema", "strict"):
            if form.HasField(name) if name in {"schema", "strict"} else getattr(form, name):
                _refuse(f"response_format.{name}", "belongs to KIND_JSON_SCHEMA")
    return ResponseFormat(
        kind=kind,
        name=_identifier("response_format.name", form.name),
        description=form.description or None,
        schema=schema,
        strict=form.strict if form.HasField("strict") else None,
    )


def _extra(request: pb.CompletionRequest) -> dict[str, msgspec.Raw]:
    if not request.HasField("extra"):
        return {}
    decoded = {}
    for name in sorted(request.extra.fields):
        _needed("extra", name)
        if name in _TAKEN:
            _refuse(f"extra.{name}", "the request has a field of its own for this, or the gateway sets it")
        decoded[name] = _encoded(_value(f"extra.{name}", request.extra.fields[name]))
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


# ------------------------------------------------------------------ answer


def encode_completion(completion: Completion) -> pb.CompletionResponse:
    return pb.CompletionResponse(
        choices=[_choice(choice) for choice in completion.response.choices],
        outcome=encode_outcome(completion.outcome),
    )


def _choice(choice: Choice) -> pb.Choice:
    return pb.Choice(
        index=choice.index,
        text=choice.text,
        refusal=choice.refusal,
        reasoning=[
            pb.Reasoning(
                text=thought.text, signature=_bytes(thought.signature), redacted=thought.redacted, id=thought.id or ""
            )
            for thought in choice.reasoning
        ],
        tool_calls=[
            pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments, signature=_bytes(call.signature))
            for call in choice.tool_calls
        ],
        finish_reason=_FINISH[choice.stop_reason],
        native_finish_reason=choice.native_stop_reason,
        images=[_image_out(image) for image in choice.images],
        logprobs=None if choice.logprobs is None else _logprobs(choice.logprobs),
    )


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
    return pb.CompletionChunk(started=pb.Started(route=_route(route), attempt=attempt))


def encode_deltas(deltas: Sequence[Delta]) -> pb.CompletionChunk:
    """One message; neighbouring pieces of one kind and choice become one piece."""
    chunk = pb.CompletionChunk()
    pieces = chunk.delta.pieces
    last: pb.Piece | None = None
    for delta in deltas:
        match delta:
            case TextDelta():
                if last is not None and last.choice == delta.choice and last.WhichOneof("piece") == "text":
                    last.text += delta.text
                else:
                    last = pieces.add(choice=delta.choice, text=delta.text)
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
    return pb.CompletionChunk(
        finished=pb.Finished(ends=[_end(end) for end in ended.ends], outcome=encode_outcome(ended.outcome))
    )


def _end(end: ChoiceEnd) -> pb.ChoiceEnd:
    return pb.ChoiceEnd(
        choice=end.choice, finish_reason=_FINISH[end.stop_reason], native_finish_reason=end.native_stop_reason
    )


def encode_failed(error: GatewayError, outcome: Outcome | None) -> pb.CompletionChunk:
    return pb.CompletionChunk(
        failed=pb.Failed(
            code=error.code,
            message=error.message,
            outcome=None if outcome is None else encode_outcome(outcome),
        )
    )


def encode_outcome(outcome: Outcome) -> pb.Outcome:
    return pb.Outcome(
        request_id=outcome.request_id,
        debit_id=outcome.debit_id,
        route=None if outcome.route is None else _route(outcome.route),
        attempts=[_attempt(attempt) for attempt in outcome.attempts],
        usage=_usage(outcome.usage),
        cost=_cost(outcome.cost),
        ended=outcome.ended,
        settlement=outcome.settlement,
        counters=None if outcome.counters is None else _counters(outcome.counters),
        warnings=outcome.warnings,
        served_model=outcome.served_model,
        provider_request_id=outcome.provider_request_id,
        left_out=[pb.LeftOut(provider=out.provider, model=out.model, reason=out.reason) for out in outcome.left_out],
    )


def _route(route: RouteReport) -> pb.Route:
    return pb.Route(route_id=route.route_id, provider=route.provider, model=route.model, protocol=route.protocol)


def _attempt(attempt: AttemptReport) -> pb.Attempt:
    return pb.Attempt(
        number=attempt.number,
        route=_route(attempt.route),
        status=attempt.status,
        error_class=attempt.error_class,
        code=attempt.code,
        http_status=attempt.http_status,
        message=attempt.message,
        cost=_cost(attempt.cost),
    )


def _usage(usage: Usage) -> pb.Usage | None:
    if usage == NOTHING:
        return None
    return pb.Usage(
        input_tokens=usage.input_total,
        cache_read_tokens=usage.cache_read,
        cache_write_5m_tokens=usage.cache_write_5m,
        cache_write_1h_tokens=usage.cache_write_1h,
        output_tokens=usage.output_total,
        reasoning_tokens=usage.reasoning,
    )


def _cost(cost: Cost) -> pb.Cost:
    return pb.Cost(
        state=cost.state,
        usd=_decimal(cost.usd),
        upper_bound_usd=_decimal(cost.upper_bound_usd),
        price_version=cost.price_version,
        reason=cost.reason,
    )


def _counters(counters: Counters) -> pb.Counters:
    return pb.Counters(
        session_usd=_decimal(counters.session_usd),
        day_usd=_decimal(counters.day_usd),
        total_usd=_decimal(counters.total_usd),
        day=counters.day.isoformat(),
    )


def _decimal(value: Decimal | None) -> str | None:
    """Never in exponent form: callers compare and parse these as plain decimals."""
    return None if value is None else decimal_string(value)
