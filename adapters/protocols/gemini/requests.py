"""
Requests of Gemini, from a caller and to a provider.

Google takes every name in two spellings, `inlineData` and `inline_data`, and one object where a list is due; a caller's
request is therefore read level by level, and what holds names of the caller's own (arguments, results, schemas) is not
touched. The model and the wish for a stream are in the address, not in the body.

Sources: https://ai.google.dev/api/generate-content, https://ai.google.dev/gemini-api/docs/function-calling,
https://ai.google.dev/gemini-api/docs/thinking
"""

from __future__ import annotations

import base64
import mimetypes
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from adapters.body import from_base64, given, read_fields, typed
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
from adapters.contract import HttpRequest, UpstreamCall
from adapters.envelope import Envelope
from adapters.errors import MalformedRequest
from adapters.paths import Paths, Spot, Words
from adapters.protocols.gemini import openapi, signatures
from adapters.protocols.gemini.answers import NAME
from adapters.reasoning import effort_of, within
from adapters.sending import Sending, same
from adapters.urls import path_step

_Fields = dict[str, msgspec.Raw]

#: Top-level fields that are ours to write: the address says it.
_ENVELOPE = frozenset({"model"})
_CONFIG = "generationConfig"

#: Resource names that say themselves what they are; any other name is that of a model.
_COLLECTIONS = frozenset({"models", "tunedModels", "publishers", "projects"})
#: Models from this generation on are told how hard to think in words, and sign what they think.
_WORDS_SINCE = 3
_LEVELS = ("minimal", "low", "medium", "high")
#: The least budget of thought that each model takes which can think. https://ai.google.dev/gemini-api/docs/thinking
_LEAST_BUDGET = 512
_GENERATION = re.compile(r"gemini-([0-9]{1,3})(?![0-9])")

_AUDIO_FORMAT = {"mpeg": "mp3", "x-wav": "wav", "wave": "wav", "vnd.wave": "wav"}
_PATH_CHARACTERS = 96
#: Kept on Google's side, where no one else can read them.
_GOOGLES_OWN = ("gs://", "https://generativelanguage.googleapis.com/")

#: Canonical names to those of this format.
WORDS: Words = {
    "messages": ("contents",),
    **{
        canonical: (f"{_CONFIG}.{name}",)
        for canonical, name in (
            ("max_output_tokens", "maxOutputTokens"),
            ("temperature", "temperature"),
            ("top_p", "topP"),
            ("top_k", "topK"),
            ("stop", "stopSequences"),
            ("seed", "seed"),
            ("n", "candidateCount"),
            ("presence_penalty", "presencePenalty"),
            ("frequency_penalty", "frequencyPenalty"),
            ("logprobs", "responseLogprobs"),
            ("top_logprobs", "logprobs"),
            ("reasoning_effort", "thinkingConfig.thinkingLevel"),
            ("reasoning_budget_tokens", "thinkingConfig.thinkingBudget"),
        )
    },
    "response_format": tuple(
        f"{_CONFIG}.{name}" for name in ("responseJsonSchema", "responseSchema", "responseMimeType")
    ),
    "response_format.schema": (f"{_CONFIG}.responseJsonSchema", f"{_CONFIG}.responseSchema"),
    "tool_choice": ("toolConfig",),
    "service_tier": ("serviceTier",),
    "filename": ("inlineData.displayName",),
    "url": ("fileData.fileUri",),
    "data": ("inlineData.data",),
    "media_type": ("inlineData.mimeType", "fileData.mimeType"),
    "is_error": ("functionResponse.response.error",),
    "arguments": ("functionCall.args",),
    "signature": ("thoughtSignature",),
    "tool_call_id": ("functionResponse.id",),
}

_object_in = msgspec.json.Decoder(dict[str, msgspec.Raw])


def envelope(request: ChatRequest) -> Envelope:
    """Of a request that `parse_request` gave. Here the address says it; the body seldom."""
    fields = request.native.fields if request.native is not None else {}
    model = msgspec.json.decode(fields["model"], type=str | None) if "model" in fields else None
    return Envelope(model=model.removeprefix("models/") if model else None)


# ------------------------------------------------------------------- reading


def parse_request(body: bytes) -> ChatRequest:
    """Raises `MalformedRequest`, which names the field and repeats none of its content."""
    native = read_fields(body)
    fields = fields_of(native)
    unmapped = [name for name in native if _camel(name) not in _MAPPED]
    config = object_of(fields["generationConfig"], _CONFIG) if _CONFIG in fields else {}
    unmapped += [f"{_CONFIG}.{name}" for name in config if name not in _MAPPED_CONFIG]
    if "model" in fields:
        typed(fields["model"], str, "model")
    contents = list_of(fields.get("contents"), "contents")
    if not contents:
        raise MalformedRequest("contents", "is required")
    messages = _Messages(unmapped)
    if "systemInstruction" in fields:
        written = next(name for name in native if _camel(name) == "systemInstruction")
        messages.take_system(fields["systemInstruction"], written)
    for i, raw in enumerate(contents):
        messages.take(raw, i)
    declared: list[str] = []
    tools = _tools(fields.get("tools"), unmapped, declared)
    choice, strict = _tool_choice(fields.get("toolConfig"), tools, unmapped)
    if strict:
        tools = [msgspec.structs.replace(tool, strict=True) for tool in tools]
    read = _Config(config)
    logprobs = read.leaf("responseLogprobs", bool)
    effort, budget = _thinking(config, unmapped)
    service_tier = typed(fields["serviceTier"], str, "serviceTier") if "serviceTier" in fields else None
    return ChatRequest(
        messages=tuple(messages.messages),
        tools=tuple(tools),
        tool_choice=choice,
        response_format=_response_format(config, unmapped),
        max_output_tokens=read.count("maxOutputTokens"),
        temperature=read.leaf("temperature", float),
        top_p=read.leaf("topP", float),
        top_k=read.count("topK"),
        stop=read.leaf("stopSequences", tuple[str, ...]) or (),
        seed=read.leaf("seed", int),
        n=read.count("candidateCount"),
        presence_penalty=read.leaf("presencePenalty", float),
        frequency_penalty=read.leaf("frequencyPenalty", float),
        logprobs=logprobs,
        top_logprobs=read.count("logprobs"),
        reasoning_effort=effort,
        reasoning_budget_tokens=budget,
        service_tier="default" if service_tier == "standard" else service_tier,
        store=typed(fields["store"], bool, "store") if "store" in fields else None,
        native=NativeRequest(protocol=NAME, fields=native, unmapped=tuple(unmapped)),
        paths=Paths(messages=messages.spots, tools=declared, words=WORDS),
    )


_MAPPED = frozenset({"model", "contents", "systemInstruction", "tools", "toolConfig", _CONFIG, "serviceTier", "store"})
_MAPPED_CONFIG = frozenset(
    {
        "maxOutputTokens",
        "temperature",
        "topP",
        "topK",
        "stopSequences",
        "seed",
        "candidateCount",
        "presencePenalty",
        "frequencyPenalty",
        "responseLogprobs",
        "logprobs",
        "thinkingConfig",
        "responseMimeType",
        "responseSchema",
        "responseJsonSchema",
        "responseModalities",
    }
)


def _camel(name: str) -> str:
    if "_" not in name:
        return name
    first, *others = name.lstrip("_").split("_")
    return first + "".join(other[:1].upper() + other[1:] for other in others)


def fields_of(fields: Mapping[str, msgspec.Raw]) -> _Fields:
    """The fields of an object of the protocol: names in one spelling, and a null is as good as absent."""
    return {_camel(name): raw for name, raw in fields.items() if bytes(raw) != b"null"}


def object_of(raw: msgspec.Raw, path: str) -> _Fields:
    """Raises `MalformedRequest` with the path."""
    return fields_of(typed(raw, _Fields, path))


def list_of(raw: msgspec.Raw | None, path: str) -> list[msgspec.Raw]:
    """A list, or the one object that stands for it."""
    if raw is None:
        return []
    return [raw] if bytes(raw)[:1] == b"{" else typed(raw, list[msgspec.Raw], path)


class _Config:
    """`generationConfig`, field by field."""

    __slots__ = ("_fields",)

    def __init__(self, fields: _Fields) -> None:
        self._fields = fields

    def leaf(self, name: str, kind: Any) -> Any:
        return typed(self._fields[name], kind, f"{_CONFIG}.{name}") if name in self._fields else None

    def count(self, name: str) -> int | None:
        """A whole number that is not negative; Google takes 40.0 for 40."""
        value: int | float | None = self.leaf(name, int | float)
        if value is None:
            return None
        if value != int(value) or not 0 <= value < 2**31:
            raise MalformedRequest(f"{_CONFIG}.{name}", "is not a whole number in range")
        return int(value)


class _Messages:
    """Contents to messages. A call without an id gets one, and a result without one the id of its call."""

    def __init__(self, unmapped: list[str]) -> None:
        self.messages: list[Message] = []
        #: Where each of them was.
        self.spots: list[Spot] = []
        self._unmapped = unmapped
        #: Calls of the latest model content that have no result yet: (name, id).
        self._open: list[tuple[str, str]] = []

    def _add(self, message: Message, at: str, content: Sequence[str]) -> None:
        self.messages.append(message)
        self.spots.append(Spot(at, content))

    def take_system(self, raw: msgspec.Raw, path: str) -> None:
        if bytes(raw)[:1] == b'"':
            self._add(Message(role=Role.SYSTEM, content=(Text(text=typed(raw, str, path)),)), path, [path])
            return
        content = object_of(raw, path)
        parts = list_of(content.get("parts"), f"{path}.parts")
        found = [self._part(part, f"{path}.parts[{i}]") for i, part in enumerate(parts)]
        kept = [i for i, part in enumerate(found) if part is not None and part != Text(text="")]
        texts = tuple(part for part in found if part is not None and part != Text(text=""))
        if texts:
            self._add(Message(role=Role.SYSTEM, content=texts), path, [f"{path}.parts[{i}]" for i in kept])

    def take(self, raw: msgspec.Raw, number: int) -> None:
        path = f"contents[{number}]"
        content = object_of(raw, path)
        self._unmapped += [f"{path}.{key}"[:_PATH_CHARACTERS] for key in content if key not in {"role", "parts"}]
        role = typed(content["role"], str, f"{path}.role") if "role" in content else "user"
        parts = list_of(content.get("parts"), f"{path}.parts")
        match role:
            case "model":
                self._take_model(parts, path, number)
            case "user" | "function":
                self._take_user(parts, path)
            case _:
                raise MalformedRequest(f"{path}.role", "is not one of the allowed values")

    def _take_user(self, parts: Sequence[msgspec.Raw], path: str) -> None:
        content: list[Part] = []
        places: list[str] = []
        for i, raw in enumerate(parts):
            at = f"{path}.parts[{i}]"
            fields = object_of(raw, at)
            if "functionResponse" in fields:
                if content:
                    self._add(Message(role=Role.USER, content=tuple(content)), path, places)
                    content, places = [], []
                self._take_result(fields, at)
            elif (part := self._part(raw, at)) is not None:
                content.append(part)
                places.append(at)
        if content or not parts:
            self._add(Message(role=Role.USER, content=tuple(content)), path, places)

    def _take_model(self, parts: Sequence[msgspec.Raw], path: str, number: int) -> None:
        content: list[Part] = []
        reasoning: list[Reasoning] = []
        calls: list[ToolCall] = []
        places: list[str] = []
        called: list[str] = []
        #: Where what was thought was, text and signatures.
        thought: list[str] = []
        length = images = 0
        #: The last part was a thought that nothing has ended.
        thinking = False
        self._open = []
        for i, raw in enumerate(parts):
            at = f"{path}.parts[{i}]"
            fields = object_of(raw, at)
            signature, own = _signature(fields, at)
            if "functionCall" in fields:
                thinking = False
                marked = signatures.of_call(signature) if signature is not None and own else signature
                call = self._call(fields["functionCall"], f"{at}.functionCall", f"call_{number}_{i}", marked)
                calls.append(call)
                called.append(at)
                self._open.append((call.name, call.id))
                continue
            if "text" in fields and "thought" in fields and typed(fields["thought"], bool, f"{at}.thought"):
                marked = signatures.of_thought(signature) if signature is not None and own else signature
                block = Reasoning(text=typed(fields["text"], str, f"{at}.text"), signature=marked)
                if thinking and reasoning:
                    # One thought, which a client kept in the pieces it came in.
                    last = reasoning.pop()
                    thought.pop()
                    block = Reasoning(text=last.text + block.text, signature=marked)
                reasoning.append(block)
                thought.append(at)
                thinking = marked is None
                continue
            thinking = False
            part = self._part(raw, at)
            start, length = length, length + (len(part.text) if isinstance(part, Text) else 0)
            if signature is not None and not isinstance(part, Opaque):
                if not own:
                    marked = signature
                elif isinstance(part, Image):
                    marked = signatures.of_image(signature, images)
                else:
                    marked = signatures.of_text(signature, start, length)
                reasoning.append(Reasoning(signature=marked))
                thought.append(at)
            images += isinstance(part, Image)
            if part is not None and not (isinstance(part, Text) and not part.text):
                content.append(part)
                places.append(at)
        self.messages.append(
            Message(role=Role.ASSISTANT, content=tuple(content), reasoning=tuple(reasoning), tool_calls=tuple(calls))
        )
        self.spots.append(Spot(path, places, called, thought))

    def _call(self, raw: msgspec.Raw, path: str, made_id: str, signature: str | None) -> ToolCall:
        call = object_of(raw, path)
        self._unmapped += [f"{path}.{key}"[:_PATH_CHARACTERS] for key in call if key not in {"name", "args", "id"}]
        if "name" not in call:
            raise MalformedRequest(f"{path}.name", "is required")
        args = call.get("args")
        if args is not None:
            typed(args, _Fields, f"{path}.args")
        return ToolCall(
            id=(typed(call["id"], str, f"{path}.id") if "id" in call else "") or made_id,
            name=typed(call["name"], str, f"{path}.name"),
            arguments=bytes(args).decode() if args is not None else "{}",
            signature=signature,
        )

    def _take_result(self, fields: _Fields, path: str) -> None:
        at = f"{path}.functionResponse"
        wire = object_of(fields["functionResponse"], at)
        if "name" not in wire:
            raise MalformedRequest(f"{at}.name", "is required")
        name = typed(wire["name"], str, f"{at}.name")
        call_id = typed(wire["id"], str, f"{at}.id") if "id" in wire else ""
        found = next((call for call in self._open if call[1] == call_id or (not call_id and call[0] == name)), None)
        if found is not None:
            self._open.remove(found)
        elif not call_id:
            self._unmapped.append(at)
        self._unmapped += [f"{at}.{key}" for key in wire if key not in {"name", "id", "response", "parts"}]
        text, is_error = _result_text(wire.get("response"), f"{at}.response")
        content: list[Part] = [Text(text=text)] if text else []
        places = [f"{at}.response"] if text else []
        for i, part in enumerate(list_of(wire.get("parts"), f"{at}.parts")):
            inner = self._part(part, f"{at}.parts[{i}]")
            if inner is not None:
                content.append(inner)
                places.append(f"{at}.parts[{i}]")
        message = Message(
            role=Role.TOOL,
            content=tuple(content),
            name=name,
            tool_call_id=found[1] if found is not None else call_id or name,
            is_error=is_error,
        )
        self._add(message, path, places)

    def _part(self, raw: msgspec.Raw, path: str) -> Part | None:
        """None for a part that says nothing."""
        fields = object_of(raw, path)
        match set(fields) - {"thoughtSignature"}:
            case kinds if not kinds:
                return None
            case kinds if kinds <= {"text", "thought"} and "text" in kinds:
                return Text(text=typed(fields["text"], str, f"{path}.text"))
            case kinds if kinds == {"inlineData"}:
                return _inline(object_of(fields["inlineData"], f"{path}.inlineData"), raw, f"{path}.inlineData")
            case kinds if kinds == {"fileData"}:
                return _file(object_of(fields["fileData"], f"{path}.fileData"), raw, f"{path}.fileData")
            case _:
                return Opaque(protocol=NAME, raw=raw)


def _signature(fields: _Fields, path: str) -> tuple[str | None, bool]:
    """As `signatures.heard`."""
    if "thoughtSignature" not in fields:
        return None, False
    signature, own = signatures.heard(typed(fields["thoughtSignature"], str, f"{path}.thoughtSignature"))
    return signature or None, own


def _inline(blob: _Fields, raw: msgspec.Raw, path: str) -> Part:
    if "data" not in blob or "mimeType" not in blob:
        raise MalformedRequest(f"{path}.{'data' if 'mimeType' in blob else 'mimeType'}", "is required")
    media_type = typed(blob["mimeType"], str, f"{path}.mimeType")
    text = typed(blob["data"], str, f"{path}.data")
    data = from_base64(text.replace("-", "+").replace("_", "/") if "-" in text or "_" in text else text, f"{path}.data")
    kind, _, sub = media_type.partition("/")
    if not blob.keys() <= {"mimeType", "data", "displayName"}:
        return Opaque(protocol=NAME, raw=raw)
    match kind:
        case "image":
            return Image(data=data, media_type=media_type)
        case "audio":
            return Audio(data=data, format=_AUDIO_FORMAT.get(sub, sub))
        case "video":
            return Opaque(protocol=NAME, raw=raw)
        case _:
            filename = typed(blob["displayName"], str, f"{path}.displayName") if "displayName" in blob else None
            return Document(data=data, media_type=media_type, filename=filename)


def _file(file: _Fields, raw: msgspec.Raw, path: str) -> Part:
    if "fileUri" not in file:
        raise MalformedRequest(f"{path}.fileUri", "is required")
    url = typed(file["fileUri"], str, f"{path}.fileUri")
    media_type = typed(file["mimeType"], str, f"{path}.mimeType") if "mimeType" in file else None
    kind = (media_type or mimetypes.guess_type(url)[0] or "").partition("/")[0]
    if url.startswith(_GOOGLES_OWN) or kind in {"video", "audio", ""} or not file.keys() <= {"fileUri", "mimeType"}:
        return Opaque(protocol=NAME, raw=raw)
    if kind == "image":
        return Image(url=url, media_type=media_type)
    return Document(url=url, media_type=media_type)


def _result_text(raw: msgspec.Raw | None, path: str) -> tuple[str, bool]:
    """A function's result as text, and whether it failed: Google's words for the two are "output" and "error"."""
    if raw is None:
        return "", False
    fields = typed(raw, _Fields, path)
    if len(fields) == 1:
        (name, value), text = next(iter(fields.items())), None
        if name in {"output", "error"} and bytes(value)[:1] == b'"':
            text = typed(value, str, f"{path}.{name}")
        if text is not None:
            return text, name == "error"
    return bytes(raw).decode(), False


def _tools(raw: msgspec.Raw | None, unmapped: list[str], places: list[str]) -> list[Tool]:
    """The functions; where each was is put into `places`."""
    tools: list[Tool] = []
    for i, entry in enumerate(list_of(raw, "tools")):
        path = f"tools[{i}]"
        fields = object_of(entry, path)
        unmapped += [f"{path}.{name}" for name in fields if name != "functionDeclarations"]
        declared = list_of(fields.get("functionDeclarations"), f"{path}.functionDeclarations")
        for j, declaration in enumerate(declared):
            places.append(f"{path}.functionDeclarations[{j}]")
            tools.append(_tool(declaration, places[-1], unmapped))
    return tools


def _tool(raw: msgspec.Raw, path: str, unmapped: list[str]) -> Tool:
    fields = object_of(raw, path)
    if "name" not in fields:
        raise MalformedRequest(f"{path}.name", "is required")
    known = {"name", "description", "parameters", "parametersJsonSchema"}
    unmapped += [f"{path}.{name}" for name in fields if name not in known]
    parameters = fields.get("parametersJsonSchema")
    if parameters is None and "parameters" in fields:
        parameters = openapi.to_json_schema(fields["parameters"])
    return Tool(
        name=typed(fields["name"], str, f"{path}.name"),
        description=typed(fields["description"], str, f"{path}.description") if "description" in fields else None,
        parameters=parameters,
    )


def _tool_choice(raw: msgspec.Raw | None, tools: Sequence[Tool], unmapped: list[str]) -> tuple[ToolChoice | None, bool]:
    """The choice, and whether calls are held to their schemas."""
    if raw is None:
        return None, False
    fields = object_of(raw, "toolConfig")
    unmapped += [f"toolConfig.{name}" for name in fields if name != "functionCallingConfig"]
    if "functionCallingConfig" not in fields:
        return None, False
    path = "toolConfig.functionCallingConfig"
    config = object_of(fields["functionCallingConfig"], path)
    unmapped += [f"{path}.{name}" for name in config if name not in {"mode", "allowedFunctionNames"}]
    names = (
        typed(config["allowedFunctionNames"], tuple[str, ...], f"{path}.allowedFunctionNames")
        if "allowedFunctionNames" in config
        else ()
    )
    mode = typed(config["mode"], str, f"{path}.mode").upper() if "mode" in config else "MODE_UNSPECIFIED"
    match mode, names:
        case "MODE_UNSPECIFIED", _:
            return None, False
        case "NONE", _:
            return ToolChoice(mode="none"), False
        case "ANY", (name,):
            return ToolChoice(mode="tool", tool=name), False
        case _:
            pass
    if names and {tool.name for tool in tools} != set(names):
        unmapped.append(f"{path}.allowedFunctionNames")
    match mode:
        case "AUTO":
            return ToolChoice(mode="auto"), False
        case "VALIDATED":
            return ToolChoice(mode="auto"), True
        case "ANY":
            return ToolChoice(mode="required"), False
        case _:
            raise MalformedRequest(f"{path}.mode", "is not one of the allowed values")


def _response_format(config: _Fields, unmapped: list[str]) -> ResponseFormat | None:
    if "responseModalities" in config:
        path = f"{_CONFIG}.responseModalities"
        if [word.upper() for word in typed(config["responseModalities"], list[str], path)] != ["TEXT"]:
            unmapped.append(path)
    path = f"{_CONFIG}.responseMimeType"
    kind = typed(config["responseMimeType"], str, path) if "responseMimeType" in config else None
    schema = config.get("responseJsonSchema")
    if schema is None and "responseSchema" in config:
        schema = openapi.to_json_schema(config["responseSchema"])
    match kind, schema:
        case None, None:
            return None
        case "text/plain", None:
            return ResponseFormat(kind="text")
        case ("application/json", None):
            return ResponseFormat(kind="json_object")
        case (None | "application/json", msgspec.Raw() as schema):
            return ResponseFormat(kind="json_schema", schema=schema)
        case _:
            unmapped.append(path)
            return None


def _thinking(config: _Fields, unmapped: list[str]) -> tuple[str | None, int | None]:
    """Effort and budget. A negative budget leaves it to the model, as none does."""
    if "thinkingConfig" not in config:
        return None, None
    path = f"{_CONFIG}.thinkingConfig"
    fields = object_of(config["thinkingConfig"], path)
    unmapped += [
        f"{path}.{name}" for name in fields if name not in {"thinkingBudget", "thinkingLevel", "includeThoughts"}
    ]
    level = typed(fields["thinkingLevel"], str, f"{path}.thinkingLevel") if "thinkingLevel" in fields else ""
    effort = None if level.upper() in {"", "THINKING_LEVEL_UNSPECIFIED"} else level.lower()
    budget = typed(fields["thinkingBudget"], int, f"{path}.thinkingBudget") if "thinkingBudget" in fields else -1
    if budget >= 2**31:
        raise MalformedRequest(f"{path}.thinkingBudget", "is out of range")
    return effort, budget if budget >= 0 else None


# ------------------------------------------------------------------- writing


def path_of(model: str, verb: str) -> str:
    """
    The address of a model's method, below the base URL. A name is one of a model, or a resource name that says where
    the model is. Raises `RequestNotExpressible` for a name that is none, and never lets one reach another address.
    """
    steps = model.split("/")
    if steps[0] not in _COLLECTIONS:
        # The slash of a name is no step of the path.
        return f"/models/{path_step(model)}:{verb}"
    return "".join(f"/{path_step(step)}" for step in steps) + f":{verb}"


def render_request(call: UpstreamCall, *, stream: bool) -> HttpRequest:
    """Raises `RequestNotExpressible` for what this protocol, or this endpoint, has no word for."""
    request = call.request
    sending = Sending(call, NAME, WORDS)
    fields: dict[str, Any]
    if request.native is not None and request.native.protocol == NAME:
        fields = dict(request.native.fields)
        _unsign(fields, call.model, sending)
        if call.endpoint.reasoning == "off":
            _switch_off(fields, sending)
    else:
        fields = _Writer(call, sending).fields()
    fields.pop("model", None)
    _as_profiled(fields, sending)
    verb = "streamGenerateContent?alt=sse" if stream else "generateContent"
    return sending.post(path_of(call.model, verb), fields, stream=stream)


def _as_profiled(fields: dict[str, Any], sending: Sending) -> None:
    """As `Sending.as_profiled`, by either spelling; a dot reaches into `generationConfig`."""
    endpoint = sending.endpoint
    for path in sorted(endpoint.omit | endpoint.force.keys()):
        name, _, inner = path.partition(".")
        for written in [written for written in fields if _camel(written) == name]:
            if not inner:
                value, forced = fields.pop(written), endpoint.force.get(path)
                if forced is None or not same(value, forced):
                    sending.lost(path)
            elif name == _CONFIG:
                config = _inner(fields[written])
                for found in [found for found in config if _camel(found) == inner]:
                    del config[found]
                    sending.lost(path)
                fields[written] = config
    fields.update(endpoint.force)


def _switch_off(fields: dict[str, Any], sending: Sending) -> None:
    written = next((name for name in fields if _camel(name) == _CONFIG), _CONFIG)
    config = _inner(fields.get(written, {}))
    for name in [name for name in config if _camel(name) == "thinkingConfig"]:
        del config[name]
        sending.lost(f"{_CONFIG}.thinkingConfig")
    config["thinkingConfig"] = {"thinkingBudget": 0}
    fields[written] = config


def _unsign(fields: dict[str, Any], model: str, sending: Sending) -> None:
    """Takes off what another provider signed, which we wrapped for the caller: it would make a request fail here."""
    written = next((name for name in fields if _camel(name) == "contents"), None)
    if written is None or signatures.WRAPPED not in bytes(fields[written]):
        return
    contents = msgspec.json.decode(fields[written])
    one = isinstance(contents, dict)
    for i, content in enumerate([contents] if one else contents):
        parts = content.get("parts")
        lone = isinstance(parts, dict)
        calls = []
        for j, part in enumerate([parts] if lone else parts or ()):
            calls += [part] if {"functionCall", "function_call"} & part.keys() else []
            for name in [name for name in part if _camel(name) == "thoughtSignature"]:
                if isinstance(part[name], str) and not signatures.heard(part[name])[1]:
                    del part[name]
                    at = f"{written}{'' if one else f'[{i}]'}.parts{'' if lone else f'[{j}]'}"
                    sending.drop_own(f"{at}.{name}")
        _mark_unsigned(calls, model)
        if not lone:
            # A part that was there for its signature alone.
            content["parts"] = [part for part in parts or () if part not in ({"text": ""}, {})]
    fields[written] = contents


def _mark_unsigned(calls: Sequence[dict[str, Any]], model: str) -> None:
    """Another model's calls, which a model that signs its own would otherwise refuse to go on from."""
    signed = any(_camel(name) == "thoughtSignature" for part in calls for name in part)
    if calls and not signed and _generation(model) >= _WORDS_SINCE:
        calls[0]["thoughtSignature"] = signatures.UNSIGNED


def _generation(model: str) -> int:
    found = _GENERATION.search(model)
    return int(found.group(1)) if found else 0


def _inner(value: Any) -> dict[str, Any]:
    if isinstance(value, msgspec.Raw):
        return dict(_object_in.decode(value)) if given(value) is not None else {}
    return dict(value)


class _Writer:
    """One canonical request in the words of this protocol."""

    def __init__(self, call: UpstreamCall, sending: Sending) -> None:
        self._request = call.request
        self._endpoint = call.endpoint
        self._sending = sending
        self._model = call.model
        #: Of the calls so far, what function each was of.
        self._names: dict[str, str] = {}

    def fields(self) -> dict[str, Any]:
        request = self._request
        self._sending.refuse_unmapped()
        self._sending.refuse_unknown(
            ("logit_bias", "verbosity", "prompt_cache_key", "prompt_cache_retention", "metadata", "end_user")
        )
        if request.parallel_tool_calls is False:
            self._refuse("parallel_tool_calls", "cannot forbid more than one call at a time")
        contents, system = self._contents()
        config = {name: value for name, value in self._config().items() if value is not None}
        fields: dict[str, Any] = {
            "contents": contents,
            "systemInstruction": {"parts": system} if system else None,
            "tools": self._tools() or None,
            "toolConfig": self._tool_config(),
            _CONFIG: config or None,
            "serviceTier": self._service_tier(),
            "store": request.store,
        }
        fields = {name: value for name, value in fields.items() if value is not None}
        self._sending.add_extra(fields, _ENVELOPE)
        return fields

    def _refuse(self, path: str, reason: str, word: str | None = None) -> None:
        self._sending.refuse(path, reason, word)

    # ------------------------------------------------------------- messages

    def _contents(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        contents: list[dict[str, Any]] = []
        system: list[dict[str, Any]] = []
        for i, message in enumerate(self._request.messages):
            path = f"messages[{i}]"
            match message.role:
                case Role.SYSTEM | Role.DEVELOPER:
                    if contents:
                        self._refuse(f"{path}.role", "takes instructions at the start only", "messages.place")
                    system += self._parts(message, path)
                case Role.ASSISTANT:
                    _add(contents, "model", self._model_parts(message, path))
                case Role.TOOL:
                    _add(contents, "user", [self._result(message, path)])
                case Role.USER:
                    _add(contents, "user", self._parts(message, path))
        if not contents:
            raise self._sending.refusal("messages", f"{NAME} needs a message with content")
        return contents, system

    def _parts(self, message: Message, path: str) -> list[dict[str, Any]]:
        if message.name is not None:
            self._refuse(f"{path}.name", "has no names for those who speak", "messages.name")
        rendered = []
        for j, part in enumerate(message.content):
            at = f"{path}.content[{j}]"
            if not isinstance(part, Text) and message.role in {Role.SYSTEM, Role.DEVELOPER}:
                raise self._sending.refusal(at, f"{NAME} takes only text as instruction")
            if not (isinstance(part, Text) and not part.text):
                rendered.append(self._part(part, at))
        return rendered

    def _model_parts(self, message: Message, path: str) -> list[dict[str, Any]]:
        thoughts = self._sending.thoughts(message, path, signed=True, unsigned=True)
        reasoning = [block for _, block in thoughts]
        texts = sum(len(part.text) for part in message.content if isinstance(part, Text))
        pictures = sum(isinstance(part, Image) for part in message.content)
        places = signatures.Places(reasoning, texts, pictures)
        parts: list[dict[str, Any]] = []
        for block in reasoning:
            if block.text:
                signature = signatures.own(block.signature)
                parts.append({"text": block.text, "thought": True})
                if signature is not None:
                    parts[-1]["thoughtSignature"] = signature
        offset = images = 0
        last_text: dict[str, Any] | None = None
        for j, part in enumerate(message.content):
            at = f"{path}.content[{j}]"
            if isinstance(part, Text):
                self._refuse_cache(part.cache, at)
                split = places.split(part.text, offset)
                offset += len(part.text)
                last_text = split[-1] if split else last_text
                parts += split
                continue
            rendered = self._part(part, at)
            if isinstance(part, Image):
                if (signature := places.of_image(images)) is not None:
                    rendered["thoughtSignature"] = signature
                images += 1
            parts.append(rendered)
        if offset == 0:
            parts += places.split("", 0)
        if message.refusal:
            parts.append(last_text := {"text": message.refusal})
        for signature in places.rest():
            if last_text is not None and "thoughtSignature" not in last_text:
                last_text["thoughtSignature"] = signature
            else:
                parts.append({"text": "", "thoughtSignature": signature})
        return parts + self._calls(message.tool_calls, path)

    def _calls(self, calls: Sequence[ToolCall], path: str) -> list[dict[str, Any]]:
        rendered: list[dict[str, Any]] = []
        for j, call in enumerate(calls):
            self._names[call.id] = call.name
            args = as_args(call.arguments)
            if args is None:
                raise self._sending.refusal(f"{path}.tool_calls[{j}].arguments", f"{NAME} takes only a JSON object")
            part: dict[str, Any] = {"functionCall": {"name": call.name, "args": args}}
            if call.id:
                part["functionCall"]["id"] = call.id
            signature = signatures.own(call.signature)
            if signature is not None and signatures.can_be_ours(signature):
                part["thoughtSignature"] = signature
            elif call.signature is not None:
                self._sending.drop(f"{path}.tool_calls[{j}].signature")
            rendered.append(part)
        _mark_unsigned(rendered, self._model)
        return rendered

    def _result(self, message: Message, path: str) -> dict[str, Any]:
        name = self._names.get(message.tool_call_id or "") or message.name
        if name is None:
            raise self._sending.refusal(
                f"{path}.tool_call_id", f"{NAME} needs the function's name, and no earlier message has such a call"
            )
        text = "".join(part.text for part in message.content if isinstance(part, Text))
        for j, part in enumerate(message.content):
            if isinstance(part, Text):
                self._refuse_cache(part.cache, f"{path}.content[{j}]")
        response: Any = {"error": text} if message.is_error else as_object(text)
        if response is None:
            response = {"output": text}
        result: dict[str, Any] = {"name": name, "response": response}
        if message.tool_call_id:
            result["id"] = message.tool_call_id
        media = [
            self._part(part, f"{path}.content[{j}]")
            for j, part in enumerate(message.content)
            if not isinstance(part, Text)
        ]
        if media:
            result["parts"] = media
        return {"functionResponse": result}

    def _part(self, part: Part, path: str) -> dict[str, Any]:
        if isinstance(part, Text | Image | Document):
            self._refuse_cache(part.cache, path)
        match part:
            case Text():
                return {"text": part.text}
            case Image():
                if part.url is not None:
                    return _file_data(part.url, part.media_type)
                return _inline_data(part.media_type or "image/png", part.data or b"")
            case Audio():
                return _inline_data(f"audio/{part.format}", part.data)
            case Document():
                if part.filename is not None:
                    # The model reads the document without it: no reason to refuse, one to tell.
                    self._sending.drop(f"{path}.filename")
                if part.data is not None:
                    return _inline_data(part.media_type or "application/pdf", part.data)
                return _file_data(part.file_id or part.url or "", part.media_type)
            case Opaque():
                if part.protocol != NAME:
                    raise self._sending.refusal(path, f"a part that only {part.protocol} knows")
                return dict(_object_in.decode(part.raw))

    def _refuse_cache(self, cache: str | None, path: str) -> None:
        if cache is not None:
            self._refuse(f"{path}.cache", "has no cache boundaries", "messages.cache")

    # ---------------------------------------------------------------- tools

    def _tools(self) -> list[dict[str, Any]]:
        declared = []
        for i, tool in enumerate(self._request.tools):
            self._refuse_cache(tool.cache, f"tools[{i}]")
            declaration = {
                "name": tool.name,
                "description": tool.description,
                "parametersJsonSchema": tool.parameters,
            }
            declared.append({name: value for name, value in declaration.items() if value is not None})
        return [{"functionDeclarations": declared}] if declared else []

    def _tool_config(self) -> dict[str, Any] | None:
        request = self._request
        config: dict[str, Any]
        match request.tool_choice:
            case None | ToolChoice(mode="auto"):
                # Held to their schemas: what a function asks for is asked of all of them.
                if any(tool.strict for tool in request.tools):
                    config = {"mode": "VALIDATED"}
                elif request.tool_choice is None:
                    return None
                else:
                    config = {"mode": "AUTO"}
            case ToolChoice(mode="none"):
                config = {"mode": "NONE"}
            case ToolChoice(mode="tool", tool=name):
                config = {"mode": "ANY", "allowedFunctionNames": [name]}
            case _:
                config = {"mode": "ANY"}
        return {"functionCallingConfig": config}

    # --------------------------------------------------------------- config

    def _config(self) -> dict[str, Any]:
        request = self._request
        return {
            "temperature": request.temperature,
            "topP": request.top_p,
            "topK": request.top_k,
            "maxOutputTokens": request.max_output_tokens,
            "stopSequences": list(request.stop) or None,
            "candidateCount": request.n,
            "seed": request.seed,
            "presencePenalty": request.presence_penalty,
            "frequencyPenalty": request.frequency_penalty,
            "responseLogprobs": request.logprobs,
            "logprobs": request.top_logprobs,
            "mediaResolution": self._media_resolution(),
            **self._format(),
            "thinkingConfig": self._thinking(),
        }

    def _media_resolution(self) -> str | None:
        """One for all pictures of the request: where they ask for different ones it cannot be said."""
        found: dict[str, str] = {}
        for i, message in enumerate(self._request.messages):
            for j, part in enumerate(message.content):
                if isinstance(part, Image):
                    found.setdefault(part.detail or "auto", f"messages[{i}].content[{j}].detail")
        asked = [detail for detail in found if detail != "auto"]
        if not asked:
            return None
        if len(found) > 1 or asked[0] not in {"low", "medium", "high"}:
            self._refuse(found[asked[-1]], "has one detail for all pictures", "messages.detail")
            return None
        return f"MEDIA_RESOLUTION_{asked[0].upper()}"

    def _format(self) -> dict[str, Any]:
        wanted = self._request.response_format
        if wanted is None:
            return {}
        if wanted.kind == "text":
            return {"responseMimeType": "text/plain"}
        return {"responseMimeType": "application/json", "responseJsonSchema": self._sending.described_schema(wanted)}

    def _thinking(self) -> dict[str, Any] | None:
        """
        Models of the third generation are asked in words, older ones in tokens, unless the profile says which. Off is
        a budget of nothing for both; a model that cannot stop thinking refuses that itself. Thoughts count against the
        output limit here: a budget leaves room for an answer, and one that the caller gave is told where it had to.
        """
        effort, budget = self._sending.effort, self._request.reasoning_budget_tokens
        way = self._endpoint.reasoning
        if way == "off":
            asked = {"reasoning_effort": effort, "reasoning_budget_tokens": budget}
            for name, value in asked.items():
                if value not in {None, "none", 0}:
                    self._sending.drop(name)
            return {"thinkingBudget": 0}
        if effort is None and budget is None:
            return None
        if effort == "none" or (effort is None and budget == 0):
            return {"thinkingBudget": 0}
        if way is None:
            way = "effort" if _generation(self._model) >= _WORDS_SINCE else "budget"
        if way == "effort":
            word = self._sending.effort_among(effort if effort is not None else effort_of(budget or 0), _LEVELS)
            return {"thinkingLevel": word.upper(), "includeThoughts": True}
        limit = self._request.max_output_tokens
        if budget is None:
            tokens = self._sending.effort_as_budget(effort or "none", limit, least=_LEAST_BUDGET)
            if tokens is None:
                return None
        else:
            tokens = budget if limit is None or budget < limit else within(budget, limit, least=_LEAST_BUDGET)
            if tokens != budget:
                self._sending.drop("reasoning_budget_tokens")
        return {"thinkingBudget": tokens, "includeThoughts": True}

    def _service_tier(self) -> str | None:
        match self._request.service_tier:
            case None | "auto":
                return None
            case "default":
                return "standard"
            case "flex" | "priority" | "standard" as tier:
                return tier
            case _:
                self._refuse("service_tier", "has no such tier")
                return None


def _add(contents: list[dict[str, Any]], role: str, parts: list[dict[str, Any]]) -> None:
    """To the content before, where that is of the same side: the two take turns here."""
    if contents and contents[-1]["role"] == role:
        contents[-1]["parts"] += parts
    elif parts:
        contents.append({"role": role, "parts": parts})


def as_args(arguments: str) -> msgspec.Raw | None:
    """Arguments as this protocol has them, byte for byte: an object. None for text that is none."""
    return msgspec.Raw(b"{}") if not arguments.strip() else as_object(arguments)


def as_object(text: str) -> msgspec.Raw | None:
    if not text.lstrip().startswith("{"):
        return None
    try:
        _object_in.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return msgspec.Raw(text.strip().encode())


def _inline_data(media_type: str, data: bytes) -> dict[str, Any]:
    return {"inlineData": {"mimeType": media_type, "data": base64.b64encode(data).decode()}}


def _file_data(url: str, media_type: str | None) -> dict[str, Any]:
    media_type = media_type or mimetypes.guess_type(url)[0]
    return {"fileData": {"fileUri": url} if media_type is None else {"fileUri": url, "mimeType": media_type}}
