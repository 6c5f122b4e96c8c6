"""
Cloudflare's Workers AI, its own API, as the simulated provider speaks it.

Sources: https://developers.cloudflare.com/workers-ai/ (models, JSON mode, errors). A stream tells no reason for its
end, tool calls have no ids, and JSON mode answers with an object where text would be.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import unquote

import msgspec

from adapters.simulator import requests
from adapters.simulator.content import Answer, Piece, taking_turns
from adapters.simulator.dialect import AS_ASKED, Asked, Frame, decode, event, field_names, refuse_unshown, text_of
from adapters.simulator.faults import Faults
from adapters.simulator.ledger import Ended
from adapters.simulator.requests import BadRequest

_PATH = re.compile(r"/client/v4/accounts/[^/]+/ai/run/(?P<model>.+)")
_SHOWN: dict[str, tuple[object, ...]] = {
    "usage": ("none", "each", "late", "zeros_after"),
    "terminal": ("none", "no_done"),
    "body": ("openai", "text", "html", "empty"),
    "refusal": (False,),
    # The native shape has a field for it in whole answers of some models only: it would be counted and not shown.
    "reasoning": (0,),
    "finish": (),
    "image": (0,),
    "audio": (0,),
    "audio_out": (0,),
    "searches": (0,),
    "service_tier": (),
}
_END = Frame(b"data: [DONE]\n\n", proof=True)
#: What a model may say where the caller sets no limit.
_USUAL_LIMIT = 256


class Function(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["function"] = "function"
    function: Function | None = None
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Call(msgspec.Struct, frozen=True, kw_only=True):
    id: str | None = None
    type: str | None = None
    function: requests.CalledFunction | None = None
    name: str | None = None
    arguments: Any = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[requests.Part] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None


class Format(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class Body(msgspec.Struct, frozen=True, kw_only=True):
    messages: list[Message] | None = None
    prompt: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    stream: bool | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=5)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=1, le=50)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=1, le=9999999999)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | requests.NamedChoice | None = None
    response_format: Format | None = None
    simulate: dict[str, Any] | None = None


class WorkersAi:
    """The protocol; a `Dialect`."""

    request_id_header = "cf-ai-req-id"
    statuses = AS_ASKED

    def check(self, faults: Faults) -> None:
        refuse_unshown(faults, _SHOWN)

    def parse(self, path: str, query: str, body: bytes) -> Asked:
        fields = field_names(body)
        asked = decode(body, Body)
        if not asked.messages and asked.prompt is None:
            raise BadRequest("must have required property 'prompt' or 'messages'", param="messages")
        if asked.stream and asked.response_format is not None:
            raise BadRequest("JSON mode cannot be streamed", param="response_format")
        form = asked.response_format
        request = requests.Request(
            model=model_in(path, query),
            messages=[_message(message) for message in asked.messages or ()]
            or [requests.Message(role="user", content=asked.prompt)],
            stream=asked.stream,
            tools=[_tool(tool, f"tools[{at}]") for at, tool in enumerate(asked.tools or ())] or None,
            tool_choice=asked.tool_choice,
            response_format=None
            if form is None
            else requests.ResponseFormat(
                type=form.type, json_schema=requests.JsonSchema(name="answer", schema=form.json_schema)
            ),
            max_tokens=asked.max_tokens or _USUAL_LIMIT,
            seed=asked.seed,
            simulate=asked.simulate,
        )
        return Asked(request=request, fields=fields, stream=asked.stream is True)

    def models(self, names: Sequence[str]) -> bytes:
        return wrapped([{"name": name, "task": {"name": "Text Generation"}} for name in names])

    def whole(self, answer: Answer, faults: Faults) -> tuple[bytes, Ended]:
        choice = answer.choices[0]
        said = choice.text("text")
        calls = [_call(name, arguments) for _, name, arguments in choice.calls()]
        result: dict[str, Any] = {"response": _as_object(said) if said[:1] == "{" else said}
        if calls:
            result = {"response": None, "tool_calls": calls}
        if faults.usage != "none":
            result["usage"] = _usage(answer, answer.completion_tokens)
        # A whole answer's end is that of its JSON; there is nothing in it that could be missing but the answer itself.
        if faults.terminal is not None:
            return wrapped({}), Ended.UNPROVEN
        return wrapped(result), Ended.COMPLETE

    def writer(self, answer: Answer, faults: Faults, asked: Asked) -> _Stream:  # noqa: ARG002 - the same of every dialect
        return _Stream(answer, faults)

    def error(self, status: int, message: str, *, param: str | None, code: str | None, faults: Faults) -> bytes:  # noqa: ARG002 - the same of every dialect
        number, known = _BY_CODE.get(code or "", _ERRORS.get(status, (3043, "Internal server error")))
        if param is not None:
            message = f"{param}: {message}"
        told = known if code in _BY_CODE else message or known
        return text_of({"result": {}, "success": False, "errors": [{"code": number, "message": told}], "messages": []})

    def left_headers(self, faults: Faults, *, limited: bool) -> Iterable[str]:  # noqa: ARG002 - it says nothing
        return ()


def _message(message: Message) -> requests.Message:
    calls = [
        requests.ToolCall(
            call.id or "",
            call.function or requests.CalledFunction(call.name or "", msgspec.json.encode(call.arguments).decode()),
        )
        for call in message.tool_calls or ()
    ]
    return requests.Message(
        role=message.role,
        content=message.content,
        name=message.name if message.role != "tool" else None,
        tool_calls=calls or None,
        tool_call_id=message.tool_call_id,
    )


def _tool(tool: Tool, path: str) -> requests.Tool:
    function = tool.function
    if function is None:
        if tool.name is None:
            raise BadRequest("must have required property 'function'", param=path)
        function = Function(name=tool.name, description=tool.description, parameters=tool.parameters)
    return requests.Tool(
        type="function", function=requests.Function(function.name, function.description, function.parameters)
    )


def model_in(path: str, query: str) -> str:
    """The model that is called, with its faults."""
    called = _PATH.fullmatch(path)
    assert called is not None, "the server sends us only what fits"
    model = unquote(called["model"])
    return f"{model}?{query}" if query else model


def wrapped(result: Any) -> bytes:
    return text_of({"result": result, "success": True, "errors": [], "messages": []})


def _as_object(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text  # the limit cut it


def _call(name: str, arguments: str) -> dict[str, Any]:
    given = _as_object(arguments or "{}")
    return {"name": name, "arguments": given if isinstance(given, dict) else {}}


def _usage(answer: Answer, output: int) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": output,
        "total_tokens": answer.prompt_tokens + output,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


class _Stream:
    def __init__(self, answer: Answer, faults: Faults) -> None:
        self._answer = answer
        self._faults = faults
        self._told = 0

    def opening(self) -> list[Frame]:
        return []

    def pieces(self) -> list[Frame]:
        frames: list[Frame] = []
        held: list[Piece] = []
        for _, piece, tokens in taking_turns(self._answer, whole_arguments=True):
            self._told += tokens
            if piece.kind == "call":
                held.append(piece)
            elif piece.kind == "arguments":
                call = _call(held.pop().text, piece.text)
                frames.append(Frame(self._event(response=None, tool_calls=[call]), tokens + 1, piece=True))
            elif piece.kind == "text":
                frames.append(Frame(self._event(response=piece.text), tokens, piece=True))
        return frames

    def _event(self, **fields: Any) -> bytes:
        if self._faults.usage == "each":
            fields["usage"] = _usage(self._answer, self._told)
        return event(text_of({**fields, "p": "abcdefgh"[: self._told % 8 + 1]}))

    def error(self) -> list[Frame]:
        frames = [Frame(event(_OVER_CAPACITY))]
        return [*frames, _END] if self._faults.error_done else frames

    def closing(self) -> tuple[list[Frame], Ended]:
        faults = self._faults
        if faults.terminal == "none":
            return [], Ended.UNPROVEN
        total = Frame(event(text_of({"response": "", "usage": _usage(self._answer, self._answer.completion_tokens)})))
        done = [] if faults.terminal == "no_done" else [_END]
        ended = Ended.COMPLETE if done else Ended.UNPROVEN
        match faults.usage:
            case "none":
                return done, ended
            case "late":
                return [*done, total], ended
            case "zeros_after":
                zeros = text_of({"response": "", "usage": {"prompt_tokens": 0, "completion_tokens": 0}})
                return [total, Frame(event(zeros)), *done], ended
            case _:
                return [total, *done], ended


_ERRORS: dict[int, tuple[int, str]] = {
    400: (5004, "Invalid data for request"),
    401: (10000, "Authentication error"),
    403: (5018, "This account is not allowed to access this model"),
    404: (3042, "Not found: model ID"),
    405: (5019, "Unsupported method"),
    408: (3007, "Request timed out"),
    413: (3006, "Request is too large"),
    429: (3040, "No more data centers to forward the request to"),
    500: (3043, "Internal server error"),
    504: (3008, "Request timed out or was aborted"),
}
_BY_CODE: dict[str, tuple[int, str]] = {
    "insufficient_quota": (3036, "You have used up your daily free allocation of 10,000 neurons."),
    "model_not_found": (5007, "No such model"),
}
_OVER_CAPACITY = text_of({"errors": [{"code": 3040, "message": "No more data centers to forward the request to"}]})
