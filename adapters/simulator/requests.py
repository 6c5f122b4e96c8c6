"""
What a caller may ask of the simulated provider, checked as strictly as the real ones do.

A provider that accepted anything would let the gateway render nonsense unnoticed.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec

#: Message texts above this are refused, as a context window would.
CONTEXT_TOKENS = 1_000_000

#: Where in a body msgspec found a fault.
PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")


class BadRequest(Exception):
    """The request is the caller's fault. The message holds nothing of its content."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status


class Part(msgspec.Struct, frozen=True):
    type: Literal["text", "image_url", "input_audio", "file", "refusal"]
    text: str | None = None
    refusal: str | None = None


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class Message(msgspec.Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None

    @property
    def text(self) -> str:
        """The message's text, the same whether it came as a string or in parts."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text or part.refusal or "" for part in self.content or ())

    @property
    def other_parts(self) -> int:
        if self.content is None or isinstance(self.content, str):
            return 0
        return sum(1 for part in self.content if part.type not in {"text", "refusal"})


class Function(msgspec.Struct, frozen=True):
    name: Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: Function


class NamedFunction(msgspec.Struct, frozen=True):
    name: str


class AllowedTools(msgspec.Struct, frozen=True):
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class NamedChoice(msgspec.Struct, frozen=True):
    type: Literal["function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


class JsonSchema(msgspec.Struct, frozen=True):
    name: str
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class Request(msgspec.Struct, frozen=True):
    model: Annotated[str, msgspec.Meta(min_length=1)]
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] | None = None
    stop: str | Annotated[list[str], msgspec.Meta(max_length=4)] | None = None
    seed: int | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    #: Faults for this request alone, in the words of `faults.Faults`.
    simulate: dict[str, Any] | None = None

    @property
    def correlation(self) -> str | None:
        """What the caller calls this request: `metadata.request`, or else `user`."""
        return (self.metadata or {}).get("request") or self.user

    @property
    def output_limit(self) -> int | None:
        """Tokens a choice may have."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


_decode_request = msgspec.json.Decoder(Request).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def parse(body: bytes) -> tuple[Request, list[str]]:
    """The request and the names of all its top-level fields, unknown ones included. Raises `BadRequest`."""
    try:
        fields = sorted(_decode_fields(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest("we could not parse the JSON body of your request", code="invalid_json") from error
    for name in ("model", "messages"):
        if name not in fields:
            raise BadRequest(f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter")
    try:
        request = _decode_request(body)
    except msgspec.ValidationError as error:
        at = PATH.search(str(error))
        raise BadRequest(
            f"Invalid value: {PATH.sub('', str(error))}.", param=at["path"] if at else None, code="invalid_value"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest("we could not parse the JSON body of your request", code="invalid_json") from error
    _check(request)
    return request, fields


def _check(request: Request) -> None:
    if request.stream_options is not None and not request.stream:
        raise BadRequest("'stream_options' is only allowed when 'stream' is enabled.", param="stream_options")
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise BadRequest(
            "Setting 'max_tokens' and 'max_completion_tokens' at once is not supported.", param="max_tokens"
        )
    if any(not stop for stop in request.stops):
        raise BadRequest("A stop sequence must not be empty.", param="stop")
    _check_messages(request.messages)
    _check_tools(request)
    form = request.response_format
    if (
        form is not None
        and form.type == "json_schema"
        and (form.json_schema is None or form.json_schema.schema is None)
    ):
        raise BadRequest(
            "Missing required parameter: 'response_format.json_schema.schema'.",
            param="response_format.json_schema",
            code="missing_required_parameter",
        )


def _check_messages(messages: list[Message]) -> None:
    open_calls: set[str] = set()
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if message.role == "tool":
            if not message.tool_call_id:
                raise BadRequest(f"Missing required parameter: '{path}.tool_call_id'.", param=f"{path}.tool_call_id")
            if message.tool_call_id not in open_calls:
                raise BadRequest(
                    "messages with role 'tool' must be a response to a preceding message with 'tool_calls'.",
                    param=f"{path}.role",
                )
            open_calls.discard(message.tool_call_id)
            continue
        if open_calls:
            raise BadRequest(
                "An assistant message with 'tool_calls' must be followed by tool messages responding to each call.",
                param=path,
            )
        if message.tool_calls is not None:
            if message.role != "assistant":
                raise BadRequest("Only an assistant message may have 'tool_calls'.", param=f"{path}.tool_calls")
            open_calls = {call.id for call in message.tool_calls}
        elif message.content is None and message.refusal is None:
            raise BadRequest("A message needs content.", param=f"{path}.content", code="invalid_type")
    if open_calls:
        raise BadRequest(
            "An assistant message with 'tool_calls' must be followed by tool messages responding to each call.",
            param=f"messages[{len(messages) - 1}]",
        )


def _check_tools(request: Request) -> None:
    names = {tool.function.name for tool in request.tools or ()}
    if request.tools is not None and not names:
        raise BadRequest("'tools' must not be empty.", param="tools", code="empty_array")
    choice = request.tool_choice
    if choice is None:
        return
    if not names:
        raise BadRequest("'tool_choice' is only allowed when 'tools' are specified.", param="tool_choice")
    if isinstance(choice, NamedChoice):
        if choice.type == "function" and (choice.function is None or choice.function.name not in names):
            raise BadRequest("'tool_choice' names no tool of this request.", param="tool_choice")
        if choice.type == "allowed_tools" and choice.allowed_tools is None:
            raise BadRequest("'tool_choice.allowed_tools' is missing.", param="tool_choice")
