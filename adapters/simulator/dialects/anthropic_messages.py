"""
Anthropic's Messages, as the simulated provider speaks it.

Sources: https://docs.claude.com/en/api/messages, /en/api/errors, /en/docs/build-with-claude/streaming. As strict as the
real one where the gateway could go wrong: unknown fields, the place of tool results, the order of content, and
signatures, which are checked when a thought comes back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec

from adapters.simulator import requests
from adapters.simulator.content import Answer, Choice, Piece, taking_turns
from adapters.simulator.dialect import (
    AS_ASKED,
    NUMBER,
    Asked,
    Frame,
    decode,
    event,
    field_names,
    refuse_unshown,
    text_of,
)
from adapters.simulator.faults import Faults
from adapters.simulator.ledger import Ended
from adapters.simulator.requests import BadRequest

_SHOWN: dict[str, tuple[object, ...]] = {
    "usage": ("none", "early", "zeros_after"),
    "image": (0,),
    "audio": (0,),
    "audio_out": (0,),
    "terminal": ("none", "no_done", "no_finish", "two"),
    "body": ("openai", "text", "html", "empty"),
    "error_done": (False,),
}

#: The names of content blocks that a conversation may hold.
Ephemeral = Literal["ephemeral"]


class _Strict(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    pass


class CacheControl(_Strict):
    type: Ephemeral
    ttl: Literal["5m", "1h"] | None = None


class Source(_Strict):
    type: Literal["base64", "url", "file", "text"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    file_id: str | None = None


class Block(_Strict):
    type: Literal[
        "text", "image", "document", "tool_use", "tool_result", "thinking", "redacted_thinking", "search_result"
    ]
    text: str | None = None
    source: Source | None = None
    title: str | None = None
    context: str | None = None
    citations: dict[str, Any] | list[Any] | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    cache_control: CacheControl | None = None


class Message(_Strict):
    role: Literal["user", "assistant"]
    content: str | list[Block]

    @property
    def blocks(self) -> list[Block]:
        return [Block(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class SystemBlock(_Strict):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Any = None


class Tool(_Strict):
    name: Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None


class ToolChoice(_Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(_Strict):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, msgspec.Meta(ge=1024)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class Format(_Strict):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(_Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Format | None = None


class Metadata(_Strict):
    user_id: str | None = None


class Body(_Strict):
    model: Annotated[str, msgspec.Meta(min_length=1)]
    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    system: str | list[SystemBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    stop_sequences: list[Annotated[str, msgspec.Meta(min_length=1)]] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0)] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    cache_control: CacheControl | None = None
    container: str | None = None
    inference_geo: str | None = None
    stream: bool | None = None
    simulate: dict[str, Any] | None = None


class AnthropicMessages:
    """The protocol; a `Dialect`."""

    request_id_header = "request-id"
    statuses = AS_ASKED

    def check(self, faults: Faults) -> None:
        refuse_unshown(faults, _SHOWN)

    def parse(self, path: str, query: str, body: bytes) -> Asked:  # noqa: ARG002 - the same of every dialect
        fields = field_names(body)
        asked = decode(body, Body)
        _check_thinking(asked)
        request = requests.Request(
            model=asked.model,
            messages=list(_messages(asked)),
            stream=asked.stream,
            tools=[
                requests.Tool(
                    type="function",
                    function=requests.Function(tool.name, tool.description, tool.input_schema, tool.strict),
                )
                for tool in asked.tools or ()
            ]
            or None,
            tool_choice=_choice_of(asked),
            parallel_tool_calls=not (asked.tool_choice and asked.tool_choice.disable_parallel_tool_use),
            response_format=_format_of(asked.output_config),
            max_tokens=asked.max_tokens,
            stop=asked.stop_sequences,
            user=asked.metadata.user_id if asked.metadata else None,
            simulate=asked.simulate,
        )
        return Asked(request=request, fields=fields, stream=asked.stream is True)

    def models(self, names: Sequence[str]) -> bytes:
        listed = [
            {"type": "model", "id": name, "display_name": name, "created_at": "2026-01-01T00:00:00Z"} for name in names
        ]
        return text_of(
            {"data": listed, "has_more": False, "first_id": names[0] if names else None, "last_id": names[-1]}
        )

    def whole(self, answer: Answer, faults: Faults) -> tuple[bytes, Ended]:
        choice = answer.choices[0]
        proven = faults.terminal not in {"none", "no_finish"}
        body = {
            **_envelope(answer),
            "content": [_block(kind, text, call_id, name) for kind, text, call_id, name in _contents(choice)],
            "stop_reason": _stop_reason(choice, faults) if proven else None,
            "stop_sequence": None,
        }
        if faults.usage != "none":
            body["usage"] = _usage(answer, answer.completion_tokens)
        return _open(text_of(body)), Ended.COMPLETE if proven else Ended.UNPROVEN

    def writer(self, answer: Answer, faults: Faults, asked: Asked) -> _Stream:  # noqa: ARG002 - the same of every dialect
        return _Stream(answer, faults)

    def error(self, status: int, message: str, *, param: str | None, code: str | None, faults: Faults) -> bytes:  # noqa: ARG002 - the same of every dialect
        kind, known = _ERRORS.get(status, ("api_error", "Internal server error"))
        told = _MESSAGES.get(code or "", message or known)
        if param is not None:
            told = f"{param}: {told}"
        return _open(text_of({"type": "error", "error": {"type": kind, "message": told}, "request_id": "\1"}))

    def left_headers(self, faults: Faults, *, limited: bool) -> Iterable[str]:
        requests_left = 0 if limited and faults.remaining_requests is None else faults.remaining_requests
        if requests_left is not None:
            yield "anthropic-ratelimit-requests-limit: 500"
            yield f"anthropic-ratelimit-requests-remaining: {requests_left}"
        if faults.remaining_tokens is not None:
            yield f"anthropic-ratelimit-tokens-remaining: {faults.remaining_tokens}"


# ------------------------------------------------------------------ what is asked


def signature(thought: str) -> str:
    """What proves a thought to be ours."""
    return "sig_" + hashlib.blake2b(thought.encode(errors="replace"), digest_size=24, person=b"messages").hexdigest()


def _check_thinking(asked: Body) -> None:
    thinking = asked.thinking
    if thinking is None or thinking.type != "enabled":
        return
    if thinking.budget_tokens is None:
        raise BadRequest("thinking.enabled.budget_tokens: Field required", param="thinking.budget_tokens")
    if thinking.budget_tokens >= asked.max_tokens:
        raise BadRequest("`max_tokens` must be greater than `thinking.budget_tokens`.", param="max_tokens")
    if asked.temperature not in {None, 1.0}:
        raise BadRequest("`temperature` may only be set to 1 when thinking is enabled.", param="temperature")
    if asked.tool_choice is not None and asked.tool_choice.type in {"any", "tool"}:
        raise BadRequest("Thinking may not be enabled when tool_choice forces tool use.", param="tool_choice")


def _messages(asked: Body) -> Iterator[requests.Message]:
    if asked.system:
        text = asked.system if isinstance(asked.system, str) else "".join(block.text for block in asked.system)
        yield requests.Message(role="system", content=text)
    open_calls: dict[str, None] = {}
    last = None
    for index, message in enumerate(asked.messages):
        # Neighbours of one role are one turn: only another's turn closes the calls of the last.
        yield from _turn(message, f"messages.{index}", open_calls, turned=message.role != last)
        last = message.role
    if open_calls and last == "user":
        _unanswered(f"messages.{len(asked.messages) - 1}", open_calls)


def _turn(message: Message, path: str, open_calls: dict[str, None], *, turned: bool) -> Iterator[requests.Message]:
    blocks = message.blocks
    if not blocks:
        raise BadRequest("at least one block is needed", param=f"{path}.content")
    if message.role == "assistant":
        if turned and open_calls:
            _unanswered(path, open_calls)
        yield _said(blocks, path, open_calls)
        return
    results = [block for block in blocks if block.type == "tool_result"]
    for at, block in enumerate(results):
        here = f"{path}.content.{at}"
        if blocks[at] is not block:
            raise BadRequest("tool_result blocks must come first in a message", param=here)
        if block.tool_use_id not in open_calls:
            raise BadRequest(
                "unexpected `tool_use_id` found in `tool_result` blocks. Each `tool_result` block must have a "
                "corresponding `tool_use` block in the previous message.",
                param=here,
            )
        del open_calls[block.tool_use_id]
        yield requests.Message(role="tool", tool_call_id=block.tool_use_id, content=_result(block, here))
    if turned and open_calls:
        _unanswered(path, open_calls)
    parts = [_part(block, f"{path}.content.{at}") for at, block in enumerate(blocks) if block.type != "tool_result"]
    if parts:
        yield requests.Message(role="user", content=parts)


def _unanswered(path: str, open_calls: dict[str, None]) -> None:
    raise BadRequest(
        f"`tool_use` ids were found without `tool_result` blocks immediately after: {', '.join(open_calls)}. Each "
        "`tool_use` block must have a corresponding `tool_result` block in the next message.",
        param=path,
    )


def _said(blocks: list[Block], path: str, open_calls: dict[str, None]) -> requests.Message:
    text: list[str] = []
    calls: list[requests.ToolCall] = []
    for at, block in enumerate(blocks):
        here = f"{path}.content.{at}"
        match block.type:
            case "text":
                if not block.text:
                    raise BadRequest("text content blocks must be non-empty", param=here)
                text.append(block.text)
            case "thinking":
                if calls:
                    raise BadRequest("thinking must come before tool use", param=here)
                if block.signature is None or block.signature != signature(block.thinking or ""):
                    raise BadRequest("Invalid `signature` in `thinking` block", param=here)
            case "redacted_thinking":
                if not block.data:
                    raise BadRequest("Field required", param=f"{here}.data")
            case "tool_use":
                if block.id is None or block.name is None or block.input is None:
                    raise BadRequest("id, name and input are required", param=here)
                arguments = msgspec.json.encode(block.input).decode()
                calls.append(requests.ToolCall(block.id, requests.CalledFunction(block.name, arguments)))
                open_calls[block.id] = None
            case _:
                raise BadRequest(f"{block.type} is not allowed in an assistant message", param=here)
    return requests.Message(role="assistant", content="".join(text) or None, tool_calls=calls or None)


def _result(block: Block, path: str) -> list[requests.Part] | str:
    if block.content is None or isinstance(block.content, str):
        return block.content or ""
    return [_part(inner, f"{path}.content.{at}") for at, inner in enumerate(block.content)]


def _part(block: Block, path: str) -> requests.Part:
    match block.type:
        case "text":
            if not block.text:
                raise BadRequest("text content blocks must be non-empty", param=path)
            return requests.Part(type="text", text=block.text)
        case "image" | "document":
            source = block.source
            if source is None:
                raise BadRequest("Field required", param=f"{path}.source")
            needed = {"base64": source.data, "text": source.data, "url": source.url, "file": source.file_id}
            if not needed[source.type] or (source.type == "base64" and not source.media_type):
                raise BadRequest("the source is not complete", param=f"{path}.source.{source.type}")
            return requests.Part(type="image_url" if block.type == "image" else "file")
        case "search_result":
            return requests.Part(type="text", text=block.title or "")
        case _:
            raise BadRequest(f"{block.type} is not allowed in a user message", param=path)


def _choice_of(asked: Body) -> Literal["none", "auto", "required"] | requests.NamedChoice | None:
    choice = asked.tool_choice
    if choice is None:
        return None
    names = {tool.name for tool in asked.tools or ()}
    if not names:
        raise BadRequest("tool_choice may only be specified while providing tools", param="tool_choice")
    match choice.type:
        case "tool":
            if choice.name not in names:
                raise BadRequest("Tool not found in provided tools", param="tool_choice.name")
            return requests.NamedChoice(type="function", function=requests.NamedFunction(choice.name or ""))
        case "any":
            return "required"
        case "auto" | "none":
            return choice.type


def _format_of(config: OutputConfig | None) -> requests.ResponseFormat | None:
    if config is None or config.format is None:
        return None
    return requests.ResponseFormat(
        type="json_schema", json_schema=requests.JsonSchema(name="answer", schema=config.format.schema)
    )


# ------------------------------------------------------------------ what is answered


def _open(data: bytes) -> bytes:
    """What was written as an escaped place becomes one that is filled in while playing."""
    return data.replace(b'"\\u0000"', b'"msg_' + NUMBER + b'"').replace(b'"\\u0001"', b'"req_' + NUMBER + b'"')


def _envelope(answer: Answer) -> dict[str, Any]:
    return {"id": "\0", "type": "message", "role": "assistant", "model": answer.model}


def _usage(answer: Answer, output: int) -> dict[str, Any]:
    told = {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "output_tokens": output,
        "service_tier": answer.service_tier or "standard",
    }
    return {**told, "server_tool_use": {"web_search_requests": answer.searches}} if answer.searches else told


def _contents(choice: Choice) -> Iterator[tuple[str, str, str, str]]:
    """Kind, text, id of a call and its tool, of each block of content."""
    arguments = {call_id: (name, text) for call_id, name, text in choice.calls()}
    for run in choice.runs:
        if run.kind == "call":
            name, text = arguments[run.call_id]
            yield "call", text, run.call_id, name
        elif run.kind != "arguments":
            yield run.kind, "".join(run.tokens), "", ""


def _block(kind: str, text: str, call_id: str, name: str) -> dict[str, Any]:
    match kind:
        case "reasoning":
            return {"type": "thinking", "thinking": text, "signature": signature(text)}
        case "call":
            try:
                given = msgspec.json.decode(text or "{}")
            except msgspec.DecodeError:
                given = {}  # the limit cut it
            return {"type": "tool_use", "id": _tool_id(call_id), "name": name, "input": given}
        case _:
            return {"type": "text", "text": text}


def _tool_id(call_id: str) -> str:
    return call_id.replace("call_", "toolu_", 1)


def _stop_reason(choice: Choice, faults: Faults) -> str:
    if faults.finish is not None:
        return faults.finish
    if any(run.kind == "refusal" for run in choice.runs):
        return "refusal"
    return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[choice.finish_reason]


class _Stream:
    def __init__(self, answer: Answer, faults: Faults) -> None:
        self._answer = answer
        self._faults = faults
        self._index = -1
        #: Kind and call of the block that is open, and what was thought in it.
        self._block: tuple[str, int] | None = None
        self._thought: list[str] = []

    def opening(self) -> list[Frame]:
        message = {**_envelope(self._answer), "content": [], "stop_reason": None, "stop_sequence": None}
        if self._faults.usage != "none":
            told = self._answer.completion_tokens if self._faults.usage == "early" else 1
            message["usage"] = _usage(self._answer, told)
        return [Frame(_event("message_start", message=message)), Frame(_event("ping"))]

    def pieces(self) -> list[Frame]:
        whole = self._faults.whole_arguments
        return [
            Frame(self._piece(piece), tokens, piece=True)
            for _, piece, tokens in taking_turns(self._answer, whole_arguments=whole)
        ]

    def _piece(self, piece: Piece) -> bytes:
        data = b""
        block = ("call" if piece.kind == "arguments" else piece.kind, piece.call)
        if block != self._block or piece.kind == "call":
            data = self._stop() + self._start(piece)
            self._block = block
        match piece.kind:
            case "reasoning":
                self._thought.append(piece.text)
                return data + self._delta(type="thinking_delta", thinking=piece.text)
            case "call":
                return data
            case "arguments":
                return data + self._delta(type="input_json_delta", partial_json=piece.text)
            case "text" | "refusal":
                return data + self._delta(type="text_delta", text=piece.text)

    def _start(self, piece: Piece) -> bytes:
        self._index += 1
        match piece.kind:
            case "reasoning":
                block: dict[str, Any] = {"type": "thinking", "thinking": "", "signature": ""}
            case "call":
                block = {"type": "tool_use", "id": _tool_id(piece.call_id), "name": piece.text, "input": {}}
            case _:
                block = {"type": "text", "text": ""}
        return _event("content_block_start", index=self._index, content_block=block)

    def _stop(self) -> bytes:
        if self._block is None:
            return b""
        signed = b""
        if self._block[0] == "reasoning":
            signed = self._delta(type="signature_delta", signature=signature("".join(self._thought)))
        return signed + _event("content_block_stop", index=self._index)

    def _delta(self, **delta: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def error(self) -> list[Frame]:
        return [Frame(_event("error", error={"type": "overloaded_error", "message": "Overloaded"}))]

    def closing(self) -> tuple[list[Frame], Ended]:
        faults = self._faults
        ended = Ended.COMPLETE if faults.terminal in {None, "two"} else Ended.UNPROVEN
        if faults.terminal == "none":
            return [], ended
        frames = [Frame(self._stop())] if self._block is not None else []
        if faults.terminal != "no_finish":
            stopped: dict[str, Any] = {
                "delta": {"stop_reason": _stop_reason(self._answer.choices[0], faults), "stop_sequence": None}
            }
            match faults.usage:
                case "none" | "early":
                    pass
                case "zeros_after":
                    stopped["usage"] = {
                        "input_tokens": 0,
                        "cache_read_input_tokens": 0,
                        "output_tokens": self._answer.completion_tokens,
                    }
                case _:
                    stopped["usage"] = {"output_tokens": self._answer.completion_tokens}
            frames += [Frame(_event("message_delta", **stopped))] * (2 if faults.terminal == "two" else 1)
        if faults.terminal != "no_done":
            frames.append(Frame(_event("message_stop"), proof=True))
        return frames, ended


def _event(name: str, **fields: Any) -> bytes:
    return event(_open(text_of({"type": name, **fields})), name)


_ERRORS: dict[int, tuple[str, str]] = {
    400: ("invalid_request_error", "Invalid request"),
    401: ("authentication_error", "invalid x-api-key"),
    402: ("billing_error", "Your credit balance is too low to access the API."),
    403: ("permission_error", "Your API key does not have permission to use the specified resource."),
    404: ("not_found_error", "model: not found"),
    409: ("conflict_error", "The request conflicts with another."),
    413: ("request_too_large", "Request exceeds the maximum size"),
    429: ("rate_limit_error", "This request would exceed your organization's rate limit."),
    500: ("api_error", "Internal server error"),
    504: ("timeout_error", "The request timed out."),
    529: ("overloaded_error", "Overloaded"),
}
_MESSAGES = {"context_length_exceeded": "prompt is too long: 208310 tokens > 200000 maximum"}
