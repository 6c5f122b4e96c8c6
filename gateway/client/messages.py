"""
From what a program has at hand to a `CompletionRequest`: a string, messages in OpenAI's shape, or the messages of the
contract themselves.

What is not understood is refused here with the field's path, as the gateway would: a misspelt member that got lost on
the way would never be missed.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, Literal, TypeAlias, TypedDict

from google.protobuf import struct_pb2

from gateway.client.errors import refused
from protos.tollbridge.v1 import gateway_pb2 as pb

Json: TypeAlias = Mapping[str, Any]
Messages: TypeAlias = str | Sequence[Json | pb.Message]
#: What is asked: a question, messages, or a whole request.
Asked: TypeAlias = Messages | pb.CompletionRequest

#: What the vendors call some parameters, and what they are called here.
_OURS: Final = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "max_new_tokens": "max_output_tokens",
    "stop_sequences": "stop",
    "user": "end_user",
    "functions": "tools",
    "function_call": "tool_choice",
    "extra_body": "extra",
}

#: A double holds every whole number up to this one (2**53), and a Struct has only doubles.
_EXACT: Final = 2**53


class Parameters(TypedDict, total=False):
    """The fields of `CompletionRequest` beside its messages. `klass` is its `class`."""

    model: str
    role: str
    temperature: float
    top_p: float
    top_k: int
    max_output_tokens: int
    stop: Sequence[str]
    seed: int
    n: int
    presence_penalty: float
    frequency_penalty: float
    logprobs: bool
    top_logprobs: int
    logit_bias: Mapping[str, float]
    reasoning_effort: str
    reasoning_budget_tokens: int
    end_user: str
    extra: Json
    verbosity: str
    tools: Sequence[Json | pb.Tool]
    tool_choice: str | Json | pb.ToolChoice
    parallel_tool_calls: bool
    response_format: Json | pb.ResponseFormat
    service_tier: str
    prompt_cache_key: str
    prompt_cache_retention: str
    store: bool
    metadata: Mapping[str, str]
    session_id: str
    debit_id: str
    idempotency_key: str
    scope_id: str
    run_id: str
    step_id: str
    skill: str
    skill_version: str
    tags: Mapping[str, str]
    owner_fence: int
    tool: str
    klass: Literal["interactive", "batch"]
    max_cost_usd: Decimal | str
    allowed_providers: Sequence[str]
    allowed_models: Sequence[str]
    allow_failover: bool
    resend_uncertain: Literal["never", "before_first_byte"]
    spill_after_s: float
    order: Literal["priority", "cost", "latency", "weighted"]
    unsupported: Literal["refuse", "drop"]
    explain: bool


def request_of(asked: Asked, parameters: Mapping[str, Any]) -> pb.CompletionRequest:
    """
    The request. Raises `InvalidRequest` with the path of what cannot be one.

    A `CompletionRequest` that is given is not changed; parameters beside it are set in a copy.
    """
    request = pb.CompletionRequest()
    if isinstance(asked, pb.CompletionRequest):
        request.CopyFrom(asked)
    elif isinstance(asked, str):
        request.messages.add(role="user", text=asked)
    else:
        request.messages.extend([_message(f"messages[{at}]", message) for at, message in enumerate(asked)])
    for name, value in parameters.items():
        if name not in Parameters.__annotations__:
            meant = f": {_OURS[name]} is meant" if name in _OURS else ""
            raise refused(name, f"no such parameter{meant}", code="unsupported_field")
        try:
            _set(request, name, value)
        except (TypeError, ValueError) as error:
            raise refused(name, str(error)) from error
    return request


def _set(request: pb.CompletionRequest, name: str, value: Any) -> None:
    match name:
        case "tools":
            request.tools.extend([_tool(f"tools[{at}]", tool) for at, tool in enumerate(value)])
        case "tool_choice":
            request.tool_choice.CopyFrom(_tool_choice(value))
        case "response_format":
            request.response_format.CopyFrom(_response_format(value))
        case "extra":
            request.extra.CopyFrom(_struct("extra", value))
        case "max_cost_usd":
            request.max_cost_usd = f"{value:f}" if isinstance(value, Decimal) else value
        case "klass":
            setattr(request, "class", _member("klass", pb.Class, f"CLASS_{value}"))
        case "resend_uncertain":
            request.resend_uncertain = _member(name, pb.ResendUncertain, f"RESEND_UNCERTAIN_{value}")
        case "order":
            request.order = _member(name, pb.Order, f"ORDER_{value}")
        case "unsupported":
            request.unsupported = _member(name, pb.Unsupported, f"UNSUPPORTED_{value}")
        case "stop" | "allowed_providers" | "allowed_models":
            if isinstance(value, str):
                raise refused(name, "a list of strings is needed")
            getattr(request, name).extend(value)
        case "logit_bias" | "metadata" | "tags":
            getattr(request, name).update(value)
        case _:
            setattr(request, name, value)


def _member(path: str, kind: Any, name: str) -> Any:
    try:
        return kind.Value(name.upper())
    except ValueError:
        known = [word.partition("_")[2].removeprefix("UNCERTAIN_").lower() for word in kind.keys()[1:]]
        raise refused(path, f"one of {', '.join(known)} is needed") from None


# ------------------------------------------------------------------ messages


def _message(path: str, given: Json | pb.Message) -> pb.Message:
    if isinstance(given, pb.Message):
        return given
    fields = _Fields(path, given)
    message = pb.Message()
    for name in ("role", "name", "tool_call_id", "refusal"):
        if (value := fields.take(name, str)) is not None:
            setattr(message, name, value)
    if (failed := fields.take("is_error", bool)) is not None:
        message.is_error = failed
    content = fields.take("content", str, list, tuple)
    if isinstance(content, str):
        message.text = content
    elif content is not None:
        message.parts.parts.extend([_part(f"{path}.content[{at}]", part) for at, part in enumerate(content)])
    for at, call in enumerate(fields.take("tool_calls", list, tuple) or ()):
        message.tool_calls.append(_tool_call(f"{path}.tool_calls[{at}]", call))
    fields.close()
    return message


def _part(path: str, given: Json | pb.Part) -> pb.Part:
    if isinstance(given, pb.Part):
        return given
    fields = _Fields(path, given)
    part = pb.Part(cache=fields.take("cache", str) or "")
    match fields.needed("type", str):
        case "text":
            part.text = fields.needed("text", str)
        case "image_url":
            image = fields.inner("image_url")
            url, part.image.detail = image.needed("url", str), image.take("detail", str) or ""
            data = _data_url(f"{image.path}.url", url)
            if data is None:
                part.image.url = url
            else:
                part.image.media_type, part.image.data = data
            image.close()
        case "input_audio":
            audio = fields.inner("input_audio")
            part.audio.data = _base64(f"{audio.path}.data", audio.needed("data", str))
            part.audio.format = audio.needed("format", str)
            audio.close()
        case "file":
            file = fields.inner("file")
            part.document.filename = file.take("filename", str) or ""
            if (text := file.take("file_data", str)) is not None:
                data = _data_url(f"{file.path}.file_data", text)
                if data is None:
                    raise refused(f"{file.path}.file_data", 'a data URL is needed: "data:application/pdf;base64,..."')
                part.document.media_type, part.document.data = data
            if (file_id := file.take("file_id", str)) is not None:
                part.document.file_id = file_id
            file.close()
        case other:
            raise refused(f"{path}.type", f"text, image_url, input_audio or file is needed, not {other}")
    fields.close()
    return part


def _tool_call(path: str, given: Json | pb.ToolCall) -> pb.ToolCall:
    if isinstance(given, pb.ToolCall):
        return given
    fields = _Fields(path, given)
    call = pb.ToolCall(id=fields.needed("id", str))
    fields.only("type", "function")
    function = fields.inner("function")
    call.name, call.arguments = function.needed("name", str), function.needed("arguments", str)
    function.close()
    fields.close()
    return call


def _tool(path: str, given: Json | pb.Tool) -> pb.Tool:
    if isinstance(given, pb.Tool):
        return given
    fields = _Fields(path, given)
    fields.only("type", "function")
    function = fields.inner("function")
    tool = pb.Tool(name=function.needed("name", str), description=function.take("description", str) or "")
    if (parameters := function.take("parameters", Mapping)) is not None:
        tool.parameters.CopyFrom(_struct(f"{function.path}.parameters", parameters))
    if (strict := function.take("strict", bool)) is not None:
        tool.strict = strict
    tool.cache = fields.take("cache", str) or ""
    function.close()
    fields.close()
    return tool


def _tool_choice(given: str | Json | pb.ToolChoice) -> pb.ToolChoice:
    if isinstance(given, pb.ToolChoice):
        return given
    if isinstance(given, str):
        return pb.ToolChoice(mode=_member("tool_choice", pb.ToolChoice.Mode, f"MODE_{given}"))
    fields = _Fields("tool_choice", given)
    fields.only("type", "function")
    function = fields.inner("function")
    choice = pb.ToolChoice(tool=function.needed("name", str))
    function.close()
    fields.close()
    return choice


def _response_format(given: Json | pb.ResponseFormat) -> pb.ResponseFormat:
    if isinstance(given, pb.ResponseFormat):
        return given
    fields = _Fields("response_format", given)
    kind = fields.needed("type", str)
    form = pb.ResponseFormat(kind=_member("response_format.type", pb.ResponseFormat.Kind, f"KIND_{kind}"))
    if kind == "json_schema":
        schema = fields.inner("json_schema")
        form.name, form.description = schema.needed("name", str), schema.take("description", str) or ""
        form.schema.CopyFrom(_struct(f"{schema.path}.schema", schema.needed("schema", Mapping)))
        if (strict := schema.take("strict", bool)) is not None:
            form.strict = strict
        schema.close()
    fields.close()
    return form


# ------------------------------------------------------------------ JSON


class _Fields:
    """The members of a JSON object, each taken once; what is left at the end is not understood."""

    def __init__(self, path: str, given: Any) -> None:
        if not isinstance(given, Mapping):
            raise refused(path, "an object is needed")
        self.path = path
        self._left = dict(given)

    def take(self, name: str, *kinds: type) -> Any:
        """None where it is absent or null."""
        value = self._left.pop(name, None)
        if value is not None and not isinstance(value, kinds):
            raise refused(f"{self.path}.{name}", f"{' or '.join(kind.__name__ for kind in kinds)} is needed")
        return value

    def needed(self, name: str, *kinds: type) -> Any:
        value = self.take(name, *kinds)
        if value is None:
            raise refused(f"{self.path}.{name}", "is required")
        return value

    def only(self, name: str, word: str) -> None:
        """A member that may be left out and has but one value."""
        if (value := self._left.pop(name, word)) != word:
            raise refused(f"{self.path}.{name}", f"{word} is needed, not {value}")

    def inner(self, name: str) -> _Fields:
        return _Fields(f"{self.path}.{name}", self.needed(name, Mapping))

    def close(self) -> None:
        for name in self._left:
            raise refused(f"{self.path}.{name}", "unknown member", code="unsupported_field")


def _struct(path: str, given: Json) -> struct_pb2.Struct:
    _exact(path, given)
    struct = struct_pb2.Struct()
    try:
        struct.update(dict(given))
    except (TypeError, ValueError) as error:
        raise refused(path, f"is not JSON: {error}") from error
    return struct


def _exact(path: str, value: Any) -> None:
    if isinstance(value, int) and abs(value) > _EXACT:
        raise refused(path, f"{value} has more digits than the wire keeps")
    inner: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    for one in inner:
        _exact(path, one)


def _data_url(path: str, url: str) -> tuple[str, bytes] | None:
    """The media type and the bytes of a data URL; None for another one."""
    if not url.startswith("data:"):
        return None
    head, comma, text = url[5:].partition(",")
    media_type = head.removesuffix(";base64")
    if not comma or media_type == head:
        raise refused(path, "a data URL in Base64 is needed")
    return media_type, _base64(path, text)


def _base64(path: str, text: str) -> bytes:
    decode: Callable[..., bytes] = base64.b64decode
    try:
        return decode(text, validate=True)
    except binascii.Error as error:
        raise refused(path, "is not Base64") from error
