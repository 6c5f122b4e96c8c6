"""
Google's Gemini API, as the simulated provider speaks it.

Sources: https://ai.google.dev/api/generate-content, /gemini-api/docs/function-calling, /thinking, /thought-signatures.
As strict as the real one about unknown fields, the number of function responses, and thought signatures, which are
checked when a call comes back. A stream is served with `alt=sse` only.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs, unquote

import msgspec

from adapters.simulator import requests
from adapters.simulator.content import Answer, Choice, Piece, taking_turns
from adapters.simulator.dialect import NUMBER, Asked, Frame, decode, event, field_names, refuse_unshown, text_of
from adapters.simulator.faults import Faults
from adapters.simulator.ledger import Ended
from adapters.simulator.requests import BadRequest

_PATH = re.compile(r"/v1beta/models/(?P<model>[^/]+):(?P<method>generateContent|streamGenerateContent)")
_SHOWN: dict[str, tuple[object, ...]] = {
    "usage": ("none", "each", "on_finish", "zeros_after"),
    "searches": (0,),
    "terminal": ("none", "no_finish", "two", "error_word"),
    "body": ("openai", "text", "html", "empty"),
    "error_done": (False,),
}


class _Strict(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    pass


class Blob(_Strict):
    mime_type: str
    data: str


class FileData(_Strict):
    file_uri: str
    mime_type: str | None = None


class FunctionCall(_Strict):
    name: str
    args: dict[str, Any] | None = None
    id: str | None = None


class FunctionResponse(_Strict):
    name: str
    response: dict[str, Any]
    id: str | None = None
    parts: list[dict[str, Any]] | None = None


class Part(_Strict):
    text: str | None = None
    inline_data: Blob | None = None
    file_data: FileData | None = None
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None
    thought: bool | None = None
    thought_signature: str | None = None


class Content(_Strict):
    parts: list[Part]
    role: Literal["user", "model", "function"] | None = None


class Declaration(_Strict):
    name: Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z_][a-zA-Z0-9_.:-]{0,127}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None


class Tools(_Strict):
    function_declarations: list[Declaration] | None = None
    google_search: dict[str, Any] | None = None
    url_context: dict[str, Any] | None = None
    code_execution: dict[str, Any] | None = None


class CallingConfig(_Strict):
    mode: Literal["AUTO", "ANY", "NONE", "VALIDATED"] | None = None
    allowed_function_names: list[str] | None = None


class ToolConfig(_Strict):
    function_calling_config: CallingConfig | None = None


class ThinkingConfig(_Strict):
    thinking_budget: Annotated[int, msgspec.Meta(ge=-1, le=32768)] | None = None
    thinking_level: Literal["MINIMAL", "LOW", "MEDIUM", "HIGH", "minimal", "low", "medium", "high"] | None = None
    include_thoughts: bool | None = None


class GenerationConfig(_Strict):
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_k: float | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stop_sequences: Annotated[list[str], msgspec.Meta(max_length=5)] | None = None
    candidate_count: Annotated[int, msgspec.Meta(ge=1, le=8)] | None = None
    seed: int | None = None
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    response_logprobs: bool | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    response_mime_type: Literal["text/plain", "application/json"] | None = None
    response_schema: dict[str, Any] | None = None
    response_json_schema: dict[str, Any] | None = None
    response_modalities: list[str] | None = None
    thinking_config: ThinkingConfig | None = None
    media_resolution: str | None = None


class Body(_Strict):
    contents: Annotated[list[Content], msgspec.Meta(min_length=1)]
    system_instruction: Content | None = None
    tools: list[Tools] | None = None
    tool_config: ToolConfig | None = None
    generation_config: GenerationConfig = msgspec.field(default_factory=GenerationConfig)
    safety_settings: list[dict[str, Any]] | None = None
    cached_content: str | None = None
    labels: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    simulate: dict[str, Any] | None = None


#: A key that is not valid is a 400 here. https://ai.google.dev/gemini-api/docs/troubleshooting
_STATUSES = {401: 400}


class Gemini:
    """The protocol; a `Dialect`."""

    request_id_header = "x-goog-request-id"
    statuses = _STATUSES

    def check(self, faults: Faults) -> None:
        refuse_unshown(faults, _SHOWN)

    def parse(self, path: str, query: str, body: bytes) -> Asked:
        called = _PATH.fullmatch(path)
        assert called is not None, "the server sends us only what fits"
        stream = called["method"] == "streamGenerateContent"
        if stream and parse_qs(query).get("alt") != ["sse"]:
            raise BadRequest("only alt=sse is simulated", param="alt")
        fields = field_names(body)
        asked = decode(body, Body)
        config = asked.generation_config
        names = [declaration.name for tools in asked.tools or () for declaration in tools.function_declarations or ()]
        request = requests.Request(
            model=unquote(called["model"]),
            messages=list(_messages(asked)),
            stream=stream,
            tools=[
                requests.Tool(type="function", function=_function(declaration))
                for tools in asked.tools or ()
                for declaration in tools.function_declarations or ()
            ]
            or None,
            tool_choice=_choice_of(asked.tool_config, names),
            response_format=_format_of(config),
            max_tokens=config.max_output_tokens,
            n=config.candidate_count,
            stop=config.stop_sequences,
            seed=config.seed,
            user=(asked.labels or {}).get("request"),
            simulate=asked.simulate,
        )
        return Asked(request=request, fields=fields, stream=stream)

    def models(self, names: Sequence[str]) -> bytes:
        methods = ["generateContent", "embedContent", "countTokens"]
        return text_of(
            {"models": [{"name": f"models/{name}", "supportedGenerationMethods": methods} for name in names]}
        )

    def whole(self, answer: Answer, faults: Faults) -> tuple[bytes, Ended]:
        candidates = [
            _candidate(index, list(_parts(choice)), _finish(choice, faults))
            for index, choice in enumerate(answer.choices)
        ]
        usage = None if faults.usage == "none" else _usage(answer, answer.completion_tokens)
        return _chunk(answer, candidates, usage), _ended(faults)

    def writer(self, answer: Answer, faults: Faults, asked: Asked) -> _Stream:  # noqa: ARG002 - the same of every dialect
        return _Stream(answer, faults)

    def error(self, status: int, message: str, *, param: str | None, code: str | None, faults: Faults) -> bytes:
        known_status, known = _ERRORS.get(status, ("INTERNAL", "An internal error has occurred."))
        details: list[dict[str, Any]] = []
        if status == 429:
            per = "PerDay" if code == "insufficient_quota" else "PerMinute"
            quota = {"quotaId": f"GenerateRequests{per}PerProjectPerModel-FreeTier", "quotaValue": "5"}
            details.append({"@type": "type.googleapis.com/google.rpc.QuotaFailure", "violations": [quota]})
        if status == 401:
            status, known_status, known = 400, "INVALID_ARGUMENT", "API key not valid. Please pass a valid API key."
            info = {"reason": "API_KEY_INVALID", "domain": "googleapis.com"}
            details.append({"@type": "type.googleapis.com/google.rpc.ErrorInfo", **info})
        if faults.retry_after is not None:
            wait = f"{faults.retry_after:g}s"
            details.append({"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": wait})
        if param is not None:
            violation = {"field": param, "description": message}
            details.append({"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": [violation]})
        told = _MESSAGES.get(code or "", message or known)
        error: dict[str, Any] = {"code": status, "message": told, "status": known_status}
        if details:
            error["details"] = details
        return text_of({"error": error})

    def left_headers(self, faults: Faults, *, limited: bool) -> Iterable[str]:  # noqa: ARG002 - it says nothing
        return ()


# ------------------------------------------------------------------ what is asked


def signature(thought: str) -> str:
    """What proves a thought or a call to be ours; base64, as bytes are in this API."""
    return hashlib.blake2b(thought.encode(errors="replace"), digest_size=24, person=b"gemini").hexdigest()


def _call_signature(name: str, arguments: str) -> str:
    return signature(f"{name}({arguments})")


def _messages(asked: Body) -> Iterator[requests.Message]:
    if asked.system_instruction is not None:
        text = "".join(part.text or "" for part in asked.system_instruction.parts)
        yield requests.Message(role="system", content=text)
    called: list[tuple[str, str]] = []
    for index, content in enumerate(asked.contents):
        path = f"contents[{index}]"
        if not content.parts:
            raise BadRequest(f"{path}.parts must not be empty", param=f"{path}.parts")
        if content.role == "model":
            message, called = _said(content, path, index)
            yield message
            continue
        answers = [part.function_response for part in content.parts if part.function_response is not None]
        if len(answers) != len(called):
            raise BadRequest(
                "Please ensure that the number of function response parts is equal to the number of function call "
                "parts of the function call turn.",
                param=path,
            )
        for (call_id, name), answer in zip(called, answers, strict=True):
            if answer.name != name:
                raise BadRequest("the function response names another function than was called", param=path)
            text = answer.response.get("output", answer.response.get("result", answer.response))
            told = text if isinstance(text, str) else msgspec.json.encode(text).decode()
            yield requests.Message(role="tool", tool_call_id=call_id, content=told)
        called = []
        parts = [_part(part, f"{path}.parts[{at}]") for at, part in enumerate(content.parts)]
        if given := [part for part in parts if part is not None]:
            yield requests.Message(role="user", content=given)


def _said(content: Content, path: str, turn: int) -> tuple[requests.Message, list[tuple[str, str]]]:
    text: list[str] = []
    calls: list[requests.ToolCall] = []
    for at, part in enumerate(content.parts):
        if part.function_call is not None:
            call = part.function_call
            arguments = msgspec.json.encode(call.args or {}).decode()
            if part.thought_signature not in {None, _call_signature(call.name, arguments)}:
                raise BadRequest("Thought signature is not valid.", param=f"{path}.parts[{at}].thoughtSignature")
            made = call.id or f"call_{turn}_{at}"
            calls.append(requests.ToolCall(made, requests.CalledFunction(call.name, arguments)))
        elif part.thought_signature is not None:
            # Nothing but calls is signed here, so this was signed by somebody else.
            raise BadRequest("Thought signature is not valid.", param=f"{path}.parts[{at}].thoughtSignature")
        elif part.text is not None and not part.thought:
            text.append(part.text)
    message = requests.Message(role="assistant", content="".join(text) or None, tool_calls=calls or None)
    return message, [(call.id, call.function.name) for call in calls]


def _part(part: Part, path: str) -> requests.Part | None:
    if part.function_response is not None:
        return None
    if part.text is not None:
        return requests.Part(type="text", text=part.text)
    media_type = (part.inline_data and part.inline_data.mime_type) or (part.file_data and part.file_data.mime_type)
    if part.inline_data is None and part.file_data is None:
        raise BadRequest("required oneof field 'data' must have one initialized field", param=path)
    kind = (media_type or "").partition("/")[0]
    return requests.Part(type="image_url" if kind == "image" else "input_audio" if kind == "audio" else "file")


def _function(declaration: Declaration) -> requests.Function:
    if declaration.parameters is not None and declaration.parameters_json_schema is not None:
        raise BadRequest("parameters and parametersJsonSchema exclude each other", param="tools")
    wanted = declaration.parameters_json_schema or _lowered(declaration.parameters)
    return requests.Function(declaration.name, declaration.description, wanted)


def _lowered(schema: Any) -> Any:
    """The API's own schema writes types in capitals, too."""
    if isinstance(schema, dict):
        return {
            name: value.lower() if name == "type" and isinstance(value, str) else _lowered(value)
            for name, value in schema.items()
        }
    return [_lowered(value) for value in schema] if isinstance(schema, list) else schema


def _choice_of(
    config: ToolConfig | None, names: list[str]
) -> Literal["none", "auto", "required"] | requests.NamedChoice | None:
    calling = config.function_calling_config if config else None
    if calling is None or calling.mode is None:
        return None
    allowed = calling.allowed_function_names or []
    if allowed and calling.mode not in {"ANY", "VALIDATED"}:
        raise BadRequest("allowed_function_names needs the mode ANY", param="toolConfig")
    if set(allowed) - set(names):
        raise BadRequest("allowed_function_names names no declared function", param="toolConfig")
    if len(allowed) == 1:
        return requests.NamedChoice(type="function", function=requests.NamedFunction(allowed[0]))
    modes: dict[str, Literal["none", "auto", "required"]] = {"ANY": "required", "NONE": "none"}
    return modes.get(calling.mode, "auto")


def _format_of(config: GenerationConfig) -> requests.ResponseFormat | None:
    schema = config.response_json_schema or _lowered(config.response_schema)
    if config.response_mime_type != "application/json":
        if schema is not None:
            raise BadRequest("a response schema needs the MIME type application/json", param="generationConfig")
        return None
    if schema is None:
        return requests.ResponseFormat(type="json_object")
    return requests.ResponseFormat(type="json_schema", json_schema=requests.JsonSchema(name="answer", schema=schema))


# ------------------------------------------------------------------ what is answered


def _parts(choice: Choice) -> Iterator[dict[str, Any]]:
    thought = choice.text("reasoning")
    if thought:
        yield {"text": thought, "thought": True}
    if text := choice.text("text"):
        yield {"text": text}
    for number, (_, name, arguments) in enumerate(choice.calls()):
        yield _call(name, arguments, signed=bool(thought) and number == 0)


def _call(name: str, arguments: str, *, signed: bool) -> dict[str, Any]:
    """Of calls made at once, only the first is signed."""
    try:
        given = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        given = {}  # the limit cut it
    part: dict[str, Any] = {"functionCall": {"name": name, "args": given}}
    if signed:
        part["thoughtSignature"] = _call_signature(name, msgspec.json.encode(given).decode())
    return part


def _candidate(index: int, parts: list[dict[str, Any]], finish: str | None) -> dict[str, Any]:
    candidate: dict[str, Any] = {"index": index}
    if parts:
        candidate["content"] = {"role": "model", "parts": parts}
    if finish is not None:
        candidate["finishReason"] = finish
    return candidate


def _chunk(answer: Answer, candidates: list[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
    body: dict[str, Any] = {"candidates": candidates}
    if usage is not None:
        body["usageMetadata"] = usage
    body["modelVersion"] = answer.model
    return text_of(body)[:-1] + b',"responseId":"' + NUMBER + b'"}'


def _usage(answer: Answer, output: int) -> dict[str, Any]:
    thought = min(answer.reasoning_tokens, output)
    usage: dict[str, Any] = {
        "promptTokenCount": answer.prompt_tokens,
        "candidatesTokenCount": output - thought,
        "totalTokenCount": answer.prompt_tokens + output,
    }
    if thought:
        usage["thoughtsTokenCount"] = thought
    if answer.cached_tokens:
        usage["cachedContentTokenCount"] = answer.cached_tokens
    if answer.image_tokens or answer.audio_tokens:
        parts = {"IMAGE": answer.image_tokens, "AUDIO": answer.audio_tokens}
        parts["TEXT"] = answer.prompt_tokens - sum(parts.values())
        usage["promptTokensDetails"] = [{"modality": kind, "tokenCount": told} for kind, told in parts.items() if told]
    if answer.audio_out_tokens:
        usage["candidatesTokensDetails"] = [{"modality": "AUDIO", "tokenCount": answer.audio_out_tokens}]
    if answer.service_tier is not None:
        usage["serviceTier"] = answer.service_tier
    return usage


def _finish(choice: Choice, faults: Faults) -> str | None:
    match faults.terminal:
        case "none" | "no_finish":
            return None
        case "error_word":
            return "OTHER"
        case _:
            pass
    if faults.finish is not None:
        return faults.finish
    if any(run.kind == "refusal" for run in choice.runs):
        return "SAFETY"
    return "MAX_TOKENS" if choice.finish_reason == "length" else "STOP"


def _ended(faults: Faults) -> Ended:
    match faults.terminal:
        case "none" | "no_finish":
            return Ended.UNPROVEN
        case "error_word":
            return Ended.ERROR_IN_STREAM
        case _:
            return Ended.COMPLETE


class _Stream:
    def __init__(self, answer: Answer, faults: Faults) -> None:
        self._answer = answer
        self._faults = faults
        self._told = 0

    def _event(
        self, index: int, parts: list[dict[str, Any]], finish: str | None = None, *, usage: bool = True
    ) -> bytes:
        tells = usage and self._faults.usage not in {"none", "on_finish"}
        told = _usage(self._answer, self._told) if tells or (finish and self._faults.usage == "on_finish") else None
        return event(_chunk(self._answer, [_candidate(index, parts, finish)], told))

    def opening(self) -> list[Frame]:
        return []

    def pieces(self) -> list[Frame]:
        frames: list[Frame] = []
        held: dict[int, Piece] = {}
        thought: set[int] = set()
        for index, piece, tokens in taking_turns(self._answer, whole_arguments=True):
            self._told += tokens
            part: dict[str, Any]
            if piece.kind == "call":
                held[index] = piece
                continue
            if piece.kind == "refusal":
                continue  # what the safety filter held back does not arrive
            if piece.kind == "arguments":
                # The call's name was a token, too.
                name = held.pop(index).text
                part = _call(name, piece.text, signed=index in thought and piece.call == 0)
                frames.append(Frame(self._event(index, [part]), tokens + 1, piece=True))
                continue
            part = {"text": piece.text}
            if piece.kind == "reasoning":
                thought.add(index)
                part["thought"] = True
            frames.append(Frame(self._event(index, [part]), tokens, piece=True))
        return frames

    def error(self) -> list[Frame]:
        error = {"code": 503, "message": "The model is overloaded. Please try again later.", "status": "UNAVAILABLE"}
        return [Frame(event(text_of({"error": error})))]

    def closing(self) -> tuple[list[Frame], Ended]:
        faults = self._faults
        ended = _ended(faults)
        if ended is Ended.UNPROVEN:
            return [], ended
        frames = []
        for _ in range(2 if faults.terminal == "two" else 1):
            frames += [
                Frame(self._event(index, [{"text": ""}], _finish(choice, faults)))
                for index, choice in enumerate(self._answer.choices)
            ]
        if faults.usage == "zeros_after":
            zeros = {"promptTokenCount": 0, "candidatesTokenCount": 0, "totalTokenCount": 0}
            frames.append(Frame(event(_chunk(self._answer, [], zeros))))
        return frames, ended


_ERRORS: dict[int, tuple[str, str]] = {
    400: ("INVALID_ARGUMENT", "Request contains an invalid argument."),
    402: ("RESOURCE_EXHAUSTED", "Your prepaid credit is used up."),
    403: ("PERMISSION_DENIED", "The caller does not have permission."),
    404: ("NOT_FOUND", "The model is not found for API version v1beta."),
    429: ("RESOURCE_EXHAUSTED", "You exceeded your current quota, please check your plan and billing details."),
    499: ("CANCELLED", "The operation was cancelled."),
    500: ("INTERNAL", "An internal error has occurred."),
    503: ("UNAVAILABLE", "The model is overloaded. Please try again later."),
    504: ("DEADLINE_EXCEEDED", "The request timed out."),
}
_MESSAGES = {
    "context_length_exceeded": "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576)."
}
