"""
OpenAI's Responses, as the simulated provider speaks it.

Source: https://platform.openai.com/docs/api-reference/responses. As strict as the real one about unknown parameters,
about outputs that answer no call, and about encrypted reasoning, which is checked when it comes back. Nothing is
stored: what refers to an earlier response is refused.
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
    TIME,
    Asked,
    Frame,
    decode,
    event,
    field_names,
    refuse_unshown,
    text_of,
)
from adapters.simulator.dialects import openai
from adapters.simulator.faults import Faults
from adapters.simulator.ledger import Ended
from adapters.simulator.requests import BadRequest

_SHOWN: dict[str, tuple[object, ...]] = {
    "usage": ("none",),
    "terminal": ("none", "no_done", "two", "error_word"),
    "error_done": (False,),
    "finish": (),
}


class _Strict(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    pass


class Part(_Strict):
    type: Literal["input_text", "input_image", "input_file", "output_text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_id: str | None = None
    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = None
    detail: Literal["low", "high", "auto"] | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class Summary(_Strict):
    type: Literal["summary_text"]
    text: str


class Item(_Strict):
    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    summary: list[Summary] | None = None
    encrypted_content: str | None = None


class Tool(_Strict):
    type: Literal["function"]
    name: Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(_Strict):
    type: Literal["function"]
    name: str


class Format(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(_Strict):
    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(_Strict):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class Body(_Strict):
    model: Annotated[str, msgspec.Meta(min_length=1)]
    input: str | list[Item]
    instructions: str | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_tool_calls: int | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    include: list[str] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    simulate: dict[str, Any] | None = None


class Responses:
    """The protocol; a `Dialect`."""

    request_id_header = "x-request-id"
    statuses = AS_ASKED

    def check(self, faults: Faults) -> None:
        refuse_unshown(faults, _SHOWN)

    def parse(self, path: str, query: str, body: bytes) -> Asked:  # noqa: ARG002 - the same of every dialect
        fields = field_names(body)
        asked = decode(body, Body)
        if asked.previous_response_id is not None or asked.conversation is not None:
            raise BadRequest(
                "Previous response not found.", param="previous_response_id", code="previous_response_not_found"
            )
        if asked.background:
            raise BadRequest("Background responses are not simulated.", param="background")
        request = requests.Request(
            model=asked.model,
            messages=list(_messages(asked)),
            stream=asked.stream,
            tools=[
                requests.Tool(
                    type="function",
                    function=requests.Function(tool.name, tool.description, tool.parameters, tool.strict),
                )
                for tool in asked.tools or ()
            ]
            or None,
            tool_choice=_choice_of(asked),
            parallel_tool_calls=asked.parallel_tool_calls,
            response_format=_format_of(asked.text),
            max_completion_tokens=asked.max_output_tokens,
            user=asked.user or asked.safety_identifier,
            metadata=asked.metadata,
            simulate=asked.simulate,
        )
        encrypted = "reasoning.encrypted_content" in (asked.include or ())
        return Asked(request=request, fields=fields, stream=asked.stream is True, include_usage=encrypted)

    def models(self, names: Sequence[str]) -> bytes:
        return openai.models(names)

    def whole(self, answer: Answer, faults: Faults) -> tuple[bytes, Ended]:
        ended = _ended(faults)
        status = _status(answer, faults)
        if ended is Ended.UNPROVEN:
            status = "in_progress"
        # Without its own request at hand a whole answer always holds the encrypted form: it harms nobody.
        searches = [_search(number) for number in range(answer.searches)]
        return _response(answer, status, searches + list(_items(answer.choices[0])), faults), ended

    def writer(self, answer: Answer, faults: Faults, asked: Asked) -> _Stream:  # noqa: ARG002 - the same of every dialect
        return _Stream(answer, faults)

    def error(self, status: int, message: str, *, param: str | None, code: str | None, faults: Faults) -> bytes:
        return openai.error_body(status, message, param=param, code=code, faults=faults)

    def left_headers(self, faults: Faults, *, limited: bool) -> Iterable[str]:
        return openai.left_headers(faults, limited=limited)


# ------------------------------------------------------------------ what is asked


def encrypted(thought: str) -> str:
    """What stands for a thought that only we can read."""
    return "enc_" + hashlib.blake2b(thought.encode(errors="replace"), digest_size=24, person=b"responses").hexdigest()


def _messages(asked: Body) -> Iterator[requests.Message]:
    if asked.instructions is not None:
        yield requests.Message(role="system", content=asked.instructions)
    if isinstance(asked.input, str):
        yield requests.Message(role="user", content=asked.input)
        return
    if not asked.input:
        raise BadRequest("Invalid 'input': empty array.", param="input", code="empty_array")
    open_calls: dict[str, None] = {}
    said: list[str] = []
    calls: list[requests.ToolCall] = []

    def turn() -> Iterator[requests.Message]:
        if said or calls:
            yield requests.Message(role="assistant", content="".join(said) or None, tool_calls=list(calls) or None)
        said.clear()
        calls.clear()

    for index, item in enumerate(asked.input):
        path = f"input[{index}]"
        match item.type:
            case "reasoning":
                _check_reasoning(item, path)
            case "function_call":
                if item.call_id is None or item.name is None or item.arguments is None:
                    raise BadRequest(f"Missing required parameter: '{path}.call_id'.", param=path)
                calls.append(requests.ToolCall(item.call_id, requests.CalledFunction(item.name, item.arguments)))
                open_calls[item.call_id] = None
            case "function_call_output":
                yield from turn()
                if item.call_id not in open_calls:
                    raise BadRequest("No tool call found for function call output with this call_id.", param="input")
                del open_calls[item.call_id]
                output = item.output if isinstance(item.output, str) else _parts(item.output or [], f"{path}.output")
                yield requests.Message(role="tool", tool_call_id=item.call_id, content=output)
            case "message":
                if item.role is None or item.content is None:
                    raise BadRequest(f"Missing required parameter: '{path}.role'.", param=f"{path}.role")
                if item.role == "assistant":
                    said.append(_text(item.content))
                    continue
                yield from turn()
                if open_calls:
                    _unanswered(open_calls)
                content = item.content
                told = content if isinstance(content, str) else _parts(content, f"{path}.content")
                yield requests.Message(role=item.role, content=told)
    yield from turn()
    if open_calls:
        _unanswered(open_calls)


def _unanswered(open_calls: dict[str, None]) -> None:
    raise BadRequest(f"No tool output found for function call {next(iter(open_calls))}.", param="input")


def _check_reasoning(item: Item, path: str) -> None:
    # The reference wants an id, too, but the API takes an item with its encrypted content alone.
    if item.summary is None:
        raise BadRequest(f"Missing required parameter: '{path}.summary'.", param=f"{path}.summary")
    if item.encrypted_content is None:
        raise BadRequest(
            f"Item '{item.id}' not found. Items are not persisted when `store` is set to false.", param="input"
        )
    if item.encrypted_content != encrypted("".join(part.text for part in item.summary)):
        raise BadRequest("The encrypted content could not be verified.", param=f"{path}.encrypted_content")


def _text(content: str | list[Part]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text or part.refusal or "" for part in content)


def _parts(parts: list[Part], path: str) -> list[requests.Part]:
    made = []
    for at, part in enumerate(parts):
        match part.type:
            case "input_text":
                made.append(requests.Part(type="text", text=part.text))
            case "input_image":
                if part.image_url is None and part.file_id is None:
                    raise BadRequest("an image needs a URL or a file", param=f"{path}[{at}]")
                made.append(requests.Part(type="image_url"))
            case "input_file":
                if part.file_data is None and part.file_id is None and part.file_url is None:
                    raise BadRequest("a file needs its data, its URL or its id", param=f"{path}[{at}]")
                made.append(requests.Part(type="file"))
            case _:
                raise BadRequest(f"Invalid value: '{part.type}'.", param=f"{path}[{at}]", code="invalid_value")
    return made


def _choice_of(asked: Body) -> Literal["none", "auto", "required"] | requests.NamedChoice | None:
    choice = asked.tool_choice
    if not isinstance(choice, NamedTool):
        return choice
    if choice.name not in {tool.name for tool in asked.tools or ()}:
        raise BadRequest("Tool choice names no tool of this request.", param="tool_choice")
    return requests.NamedChoice(type="function", function=requests.NamedFunction(choice.name))


def _format_of(config: TextConfig | None) -> requests.ResponseFormat | None:
    form = config.format if config else None
    if form is None:
        return None
    if form.type != "json_schema":
        return requests.ResponseFormat(type=form.type)
    if form.name is None or form.schema is None:
        raise BadRequest("Missing required parameter: 'text.format.schema'.", param="text.format.schema")
    return requests.ResponseFormat(
        type="json_schema", json_schema=requests.JsonSchema(form.name, form.schema, form.strict, form.description)
    )


# ------------------------------------------------------------------ what is answered


def _items(choice: Choice) -> Iterator[dict[str, Any]]:
    """The output items, whole, in order."""
    calls = {call_id: (name, arguments) for call_id, name, arguments in choice.calls()}
    done = "incomplete" if choice.finish_reason == "length" else "completed"
    for number, run in enumerate(run for run in choice.runs if run.kind != "arguments"):
        text = "".join(run.tokens)
        match run.kind:
            case "reasoning":
                yield _reasoning(number, text)
            case "call":
                name, arguments = calls[run.call_id]
                yield _function_call(number, run.call_id, name, arguments, "completed")
            case _:
                yield _message(number, [_content(run.kind, text)], done)


def _reasoning(number: int, text: str) -> dict[str, Any]:
    summary = [{"type": "summary_text", "text": text}] if text else []
    item = {"id": f"rs_\0_{number}", "type": "reasoning", "summary": summary}
    return {**item, "encrypted_content": encrypted(text)} if text else item


def _message(number: int, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
    return {"id": f"msg_\0_{number}", "type": "message", "status": status, "role": "assistant", "content": content}


def _content(kind: str, text: str) -> dict[str, Any]:
    if kind == "refusal":
        return {"type": "refusal", "refusal": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _function_call(number: int, call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    return {
        "id": f"fc_\0_{number}",
        "type": "function_call",
        "status": status,
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }


def _status(answer: Answer, faults: Faults) -> str:
    if faults.terminal == "error_word":
        return "failed"
    return "incomplete" if answer.choices[0].finish_reason == "length" else "completed"


def _ended(faults: Faults) -> Ended:
    match faults.terminal:
        case "none" | "no_done":
            return Ended.UNPROVEN
        case "error_word":
            return Ended.ERROR_IN_STREAM
        case _:
            return Ended.COMPLETE


_FAILED = {"code": "server_error", "message": "The simulated server had an error while answering."}


def _response(answer: Answer, status: str, output: list[dict[str, Any]], faults: Faults) -> bytes:
    done = status in {"completed", "incomplete", "failed"}
    body = {
        "id": "resp_\0",
        "object": "response",
        "created_at": "\1",
        "status": status,
        "error": _FAILED if status == "failed" else None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "metadata": {},
        "model": answer.model,
        "output": output,
        "parallel_tool_calls": True,
        "service_tier": (answer.service_tier or "default") if done else "auto",
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "usage": _usage(answer) if done and faults.usage != "none" else None,
    }
    return _open(text_of(body))


def _search(number: int) -> dict[str, Any]:
    return {
        "type": "web_search_call",
        "id": f"ws_\0_{number}",
        "status": "completed",
        "action": {"type": "search", "query": "what was asked"},
    }


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": answer.cached_tokens,
            "cache_write_tokens": 0,
            **({"image_tokens": answer.image_tokens} if answer.image_tokens else {}),
            **({"audio_tokens": answer.audio_tokens} if answer.audio_tokens else {}),
        },
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": answer.reasoning_tokens,
            **({"audio_tokens": answer.audio_out_tokens} if answer.audio_out_tokens else {}),
        },
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _open(data: bytes) -> bytes:
    """What was written as an escaped place becomes one that is filled in while playing."""
    return data.replace(b'"\\u0001"', TIME).replace(b"_\\u0000", b"_" + NUMBER)


class _Stream:
    def __init__(self, answer: Answer, faults: Faults) -> None:
        self._answer = answer
        self._faults = faults
        self._sequence = 0
        #: The item that is open: its number, kind, call, and what it holds so far.
        self._number = -1
        self._kind: str | None = None
        self._call: Piece | None = None
        self._text: list[str] = []
        self._output: list[dict[str, Any]] = []

    def _event(self, name: str, /, **fields: Any) -> bytes:
        return self._raw(name, _open(text_of(fields)))

    def _raw(self, name: str, fields: bytes) -> bytes:
        head = b'{"type":%b,"sequence_number":%d' % (text_of(name), self._sequence)
        self._sequence += 1
        return event(head + (b"," + fields[1:] if fields != b"{}" else b"}"), name)

    def _whole(self, name: str, status: str) -> bytes:
        return self._raw(name, b'{"response":' + _response(self._answer, status, self._output, self._faults) + b"}")

    def opening(self) -> list[Frame]:
        created = self._whole("response.created", "in_progress")
        frames = [Frame(created), Frame(self._whole("response.in_progress", "in_progress"))]
        for number in range(self._answer.searches):
            self._number, item = number, _search(number)
            self._output.append(item)
            frames.append(Frame(self._event("response.output_item.added", output_index=number, item=item)))
            frames.append(Frame(self._event("response.output_item.done", output_index=number, item=item)))
        return frames

    def pieces(self) -> list[Frame]:
        whole = self._faults.whole_arguments
        return [
            Frame(self._piece(piece), tokens, piece=True)
            for _, piece, tokens in taking_turns(self._answer, whole_arguments=whole)
        ]

    def _piece(self, piece: Piece) -> bytes:
        kind = "call" if piece.kind == "arguments" else piece.kind
        data = b""
        if kind != self._kind or piece.kind == "call":
            data = self._close("completed") + self._start(piece)
        delta = b""
        match piece.kind:
            case "call":
                return data
            case "arguments":
                delta = self._event("response.function_call_arguments.delta", **self._at(), delta=piece.text)
            case "reasoning":
                delta = self._event(
                    "response.reasoning_summary_text.delta", **self._at(), summary_index=0, delta=piece.text
                )
            case "refusal":
                delta = self._event("response.refusal.delta", **self._at(), content_index=0, delta=piece.text)
            case "text":
                delta = self._event(
                    "response.output_text.delta", **self._at(), content_index=0, delta=piece.text, logprobs=[]
                )
        self._text.append(piece.text)
        return data + delta

    def _at(self) -> dict[str, Any]:
        prefix = {"call": "fc", "reasoning": "rs"}.get(self._kind or "", "msg")
        return {"item_id": f"{prefix}_\0_{self._number}", "output_index": self._number}

    def _start(self, piece: Piece) -> bytes:
        self._number += 1
        self._kind = "call" if piece.kind in {"call", "arguments"} else piece.kind
        self._text = []
        number = self._number
        match self._kind:
            case "call":
                self._call = piece
                item = _function_call(number, piece.call_id, piece.text, "", "in_progress")
            case "reasoning":
                item = _reasoning(number, "")
            case _:
                item = _message(number, [], "in_progress")
        data = self._event("response.output_item.added", output_index=number, item=item)
        match self._kind:
            case "call":
                return data
            case "reasoning":
                part: dict[str, Any] = {"type": "summary_text", "text": ""}
                return data + self._event(
                    "response.reasoning_summary_part.added", **self._at(), summary_index=0, part=part
                )
            case kind:
                part = _content(kind, "")
                return data + self._event("response.content_part.added", **self._at(), content_index=0, part=part)

    def _close(self, status: str) -> bytes:
        """The item that is open, told whole once more."""
        if self._kind is None:
            return b""
        text, at, number = "".join(self._text), self._at(), self._number
        match self._kind:
            case "call":
                call = self._call
                assert call is not None, "a call's item begins with its call"
                item = _function_call(number, call.call_id, call.text, text, status)
                data = self._event("response.function_call_arguments.done", **at, name=call.text, arguments=text)
            case "reasoning":
                item = _reasoning(number, text)
                part: dict[str, Any] = {"type": "summary_text", "text": text}
                data = self._event("response.reasoning_summary_text.done", **at, summary_index=0, text=text)
                data += self._event("response.reasoning_summary_part.done", **at, summary_index=0, part=part)
            case kind:
                part = _content(kind, text)
                item = _message(number, [part], status)
                told = {"refusal": text} if kind == "refusal" else {"text": text, "logprobs": []}
                name = "response.refusal.done" if kind == "refusal" else "response.output_text.done"
                data = self._event(name, **at, content_index=0, **told)
                data += self._event("response.content_part.done", **at, content_index=0, part=part)
        self._output.append(item)
        self._kind = None
        return data + self._event("response.output_item.done", output_index=number, item=item)

    def error(self) -> list[Frame]:
        if self._faults.error_in_stream == "event":
            return [Frame(self._event("error", **_FAILED, param=None))]
        return [Frame(self._whole("response.failed", "failed"))]

    def closing(self) -> tuple[list[Frame], Ended]:
        faults, ended = self._faults, _ended(self._faults)
        if faults.terminal == "none":
            return [], ended
        status = _status(self._answer, faults)
        frames = [Frame(self._close("incomplete" if status == "incomplete" else "completed"))]
        if faults.terminal == "no_done":
            return frames, ended
        ends = 2 if faults.terminal == "two" else 1
        frames += [Frame(self._whole(f"response.{status}", status), proof=True) for _ in range(ends)]
        return frames, ended
