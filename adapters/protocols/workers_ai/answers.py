"""Answers of Workers AI: what is common to a whole one and to chunks, and the whole ones as they are read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from adapters.body import ABSENT, given, raw_text
from adapters.chat import (
    ChatResponse,
    Choice,
    Event,
    Reasoning,
    ReasoningDelta,
    RefusalDelta,
    StopReason,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallStart,
)
from adapters.classify import request_id
from adapters.errors import Broken
from adapters.protocols.workers_ai import failures, schema
from metering.usage import NOTHING, Usage

NAME = "workers_ai"

#: Words for how a choice ended, of the models that say it. The native shape has none.
_STOP: dict[str, StopReason] = {
    "": StopReason.STOP,
    "stop": StopReason.STOP,
    "eos": StopReason.STOP,
    "length": StopReason.LENGTH,
    "max_tokens": StopReason.LENGTH,
    "tool_calls": StopReason.TOOL_CALLS,
    "function_call": StopReason.TOOL_CALLS,
    "content_filter": StopReason.CONTENT_FILTER,
}
#: The word a canonical reason is told by.
_FINISH: dict[StopReason, str] = {
    StopReason.LENGTH: "length",
    StopReason.TOOL_CALLS: "tool_calls",
    StopReason.CONTENT_FILTER: "content_filter",
}
_FAILED = frozenset({"error", "abort"})

_answer = msgspec.json.Decoder(schema.AnswerOut)
_items = msgspec.json.Decoder(schema.ItemsOut)
_loose_answer = msgspec.json.Decoder(schema.LooseAnswer)
_text = msgspec.json.Decoder(str)
_encode = msgspec.json.Encoder().encode


def decode_answer(data: bytes | msgspec.Raw) -> schema.AnswerOut:
    """
    An answer or a chunk. Figures that are no figures cost only themselves, not the answer. Raises `Broken` (code
    "malformed").
    """
    try:
        return _answer.decode(data)
    except msgspec.ValidationError:
        pass
    except (msgspec.DecodeError, RecursionError) as error:
        raise Broken("what came is not JSON", code="malformed") from error
    try:
        loose = _loose_answer.decode(data)
    except msgspec.DecodeError as error:
        raise Broken("what came is no answer of this protocol", code="malformed") from error
    return schema.AnswerOut(**{name: getattr(loose, name) for name in loose.__struct_fields__})


def is_failed(wire: schema.LooseAnswer) -> bool:
    """It holds an error, or says that there was one."""
    if wire.success is False:
        return True
    return any(
        raw is not ABSENT and bytes(raw).strip() not in {b"null", b"[]", b"{}", b'""'}
        for raw in (wire.errors, wire.error)
    )


def stop_reason(native: str, *, refused: bool, called: bool) -> StopReason:
    """`called` and `refused`: a plain stop, or no word at all, is also said where a tool was called."""
    reason = _STOP.get(native.lower(), StopReason.OTHER)
    if reason is StopReason.STOP:
        return StopReason.TOOL_CALLS if called else StopReason.REFUSAL if refused else reason
    return reason


def finish_reason(reason: StopReason) -> str:
    return _FINISH.get(reason, "stop")


def read_usage(wire: schema.UsageOut) -> Usage:
    """A figure that is no count is no figure."""
    prompt, completion = wire.prompt_tokens_details, wire.completion_tokens_details
    total_in = _count(wire.prompt_tokens if wire.prompt_tokens is not None else wire.input_tokens)
    total_out = _count(wire.completion_tokens if wire.completion_tokens is not None else wire.output_tokens)
    return Usage(
        input_total=total_in,
        cache_read=_part(prompt.cached_tokens if prompt else None, total_in),
        output_total=total_out,
        reasoning=_part(completion.reasoning_tokens if completion else None, total_out),
    )


def _count(value: int | None) -> int | None:
    return value if value is not None and 0 <= value < 2**31 else None


def _part(value: int | None, whole: int | None) -> int | None:
    count = _count(value)
    return count if count is None or whole is None else min(count, whole)


class _Call:
    """A tool call as it comes in."""

    __slots__ = ("held", "id", "index", "number", "started")

    def __init__(self, number: int, call_id: str | None) -> None:
        #: Counted from 0 in the order in which calls came, for the id of one that has none.
        self.number = number
        #: And in the order in which they are told, whatever the provider counts from.
        self.index = -1
        self.id = call_id
        #: Arguments that came before the name.
        self.held: list[str] = []
        self.started = False


class Reader:
    """One choice, piece by piece, to events. The native shape is the choice 0."""

    __slots__ = ("_calls", "_current", "_index", "_started", "finish", "refused", "said")

    def __init__(self, index: int) -> None:
        self._index = index
        self._calls: list[_Call] = []
        #: Calls that were told.
        self._started = 0
        #: The provider's index of a call to the call it now stands for.
        self._current: dict[int, _Call] = {}
        self.finish: str | None = None
        self.refused = False
        self.said = False

    @property
    def called(self) -> bool:
        return bool(self._calls)

    def text(self, text: str, events: list[Event]) -> None:
        if text:
            self.said = True
            events.append(TextDelta(text, self._index))

    def think(self, text: str | None, events: list[Event]) -> None:
        if text:
            self.said = True
            events.append(ReasoningDelta(text, self._index))

    def take(self, content: schema.Content, payload: bytes, answer_id: str | None, events: list[Event]) -> None:
        self.think(content.reasoning_content or content.reasoning, events)
        self.text(content.content or "", events)
        if content.refusal:
            self.said = self.refused = True
            events.append(RefusalDelta(content.refusal, self._index))
        if content.tool_calls:
            self.call(content.tool_calls, payload, answer_id, events)

    def call(
        self, wires: Sequence[schema.ToolCallOut], payload: bytes, answer_id: str | None, events: list[Event]
    ) -> None:
        for wire in wires:
            events.extend(self._take_call(wire, payload, answer_id))

    def _take_call(self, wire: schema.ToolCallOut, payload: bytes, answer_id: str | None) -> Iterator[Event]:
        name = wire.name or (wire.function.name if wire.function else None)
        piece = _arguments(wire)
        call = self._call_of(wire, name, piece)
        if call is None:
            return
        self.said = True
        if not call.started:
            if not name:
                call.held.append(piece)
                return
            yield self._start(call, name, payload, answer_id)
            piece = "".join((*call.held, piece))
        if piece:
            yield ToolCallDelta(call.index, piece, self._index)

    def _start(self, call: _Call, name: str, payload: bytes, answer_id: str | None) -> ToolCallStart:
        call.started, call.index = True, self._started
        self._started += 1
        call.id = call.id or f"call_{_seed(payload, answer_id)}_{self._index}_{call.number}"
        return ToolCallStart(call.index, call.id, name, self._index)

    def _call_of(self, wire: schema.ToolCallOut, name: str | None, piece: str) -> _Call | None:
        """
        The call a piece belongs to. Whole ones have no index and each a name of its own; None for the object of nulls
        that ends a call in a stream.
        """
        if wire.index is None:
            call = None if name else (self._calls[-1] if self._calls else None)
            if call is None and not name:
                return None
            key = len(self._calls)
        else:
            key = wire.index
            call = self._current.get(key)
            if call is not None and call.started and name and wire.id and wire.id != call.id:
                call = None
        if call is None:
            if not name and not wire.id and not piece:
                return None
            call = _Call(len(self._calls), wire.id)
            self._calls.append(call)
            self._current[key] = call
        elif not call.started and wire.id:
            call.id = wire.id
        return call

    def end(self, payload: bytes, answer_id: str | None, events: list[Event]) -> None:
        """Calls that never got a name are told without one."""
        for call in self._calls:
            if not call.started:
                events.append(self._start(call, "", payload, answer_id))
                events.extend(ToolCallDelta(call.index, piece, self._index) for piece in call.held if piece)


def _arguments(wire: schema.ToolCallOut) -> str:
    """As JSON text, byte for byte where they came as an object."""
    return json_text(wire.function.arguments if wire.function else wire.arguments)


def _seed(payload: bytes, answer_id: str | None) -> str:
    """For the id of a call that has none: the same for the same call of the same answer."""
    return answer_id[-32:] if answer_id else hashlib.sha256(payload).hexdigest()[:24]


def json_text(raw: msgspec.Raw) -> str:
    """
    `response` as text: in JSON mode it is the value itself, which is then kept byte for byte. Raises `Broken` where
    that is not UTF-8.
    """
    text = given(raw)
    if text is None:
        return ""
    if bytes(text)[:1] != b'"':
        return raw_text(text)
    try:
        return _text.decode(text)
    except msgspec.DecodeError as error:
        raise Broken("what came is not UTF-8", code="malformed") from error


def unwrapped(body: bytes, *, headers: Mapping[str, str]) -> tuple[schema.AnswerOut, bytes]:
    """The answer in its envelope, or bare. Raises `Rejected` and `Broken`."""
    wire = decode_answer(body)
    if is_failed(wire):
        raise failures.from_body(body, headers=headers)
    inner = given(wire.result)
    if inner is None:
        return wire, body
    if bytes(inner)[:1] == b'"':
        return schema.AnswerOut(response=inner), bytes(inner)
    answer = decode_answer(inner)
    if is_failed(answer):
        raise failures.from_body(inner, headers=headers)
    return answer, bytes(inner)


def parse_answer(headers: Mapping[str, str], body: bytes) -> ChatResponse:
    """Raises `Rejected` for an error in place of an answer, `Broken` for a body that is no whole answer."""
    body = body.strip()
    wire, payload = unwrapped(body, headers=headers)
    choices = []
    omitted: tuple[str, ...] = ()
    if wire.output is not ABSENT and wire.response is ABSENT and not wire.choices:
        choice, omitted = _choice_of_items(wire, payload, headers)
        choices.append(choice)
    for out in wire.choices or ():
        reader, events = Reader(out.index), list[Event]()
        reader.take(out.message or schema.Content(), payload, wire.id, events)
        if out.finish_reason is None:
            raise Broken("a choice of the answer has no finish reason", code="no_terminal")
        choices.append(_choice(out.index, reader, events, out.finish_reason, payload, wire, headers))
    if not choices:
        if wire.response is ABSENT and wire.tool_calls is None:
            raise Broken("the answer has neither a response nor choices", code="malformed")
        reader, events = Reader(0), list[Event]()
        reader.think(wire.reasoning_content, events)
        reader.text(json_text(wire.response), events)
        reader.call(wire.tool_calls or (), payload, wire.id, events)
        if not events and not reader.said and not wire.tool_calls and not wire.finish_reason:
            raise Broken("the answer has nothing in it, and does not say why", code="no_terminal")
        choices.append(_choice(0, reader, events, wire.finish_reason or "", payload, wire, headers))
    return ChatResponse(
        choices=tuple(choices),
        usage=read_usage(wire.usage) if wire.usage is not None else NOTHING,
        response_id=wire.id or None,
        served_model=wire.model or None,
        provider_request_id=request_id(headers),
        native=msgspec.Raw(body),
        native_protocol=NAME,
        omitted=omitted,
    )


#: Why an answer in the Responses shape is not complete, by the words of the other shapes.
_INCOMPLETE = {"max_output_tokens": "length", "content_filter": "content_filter"}
_MOST_OMITTED, _KIND_CHARACTERS = 16, 64


def _choice_of_items(
    wire: schema.AnswerOut, payload: bytes, headers: Mapping[str, str]
) -> tuple[Choice, tuple[str, ...]]:
    """
    An answer in the Responses shape, and the kinds of its items that are not carried. Raises as `parse_answer`.
    https://developers.cloudflare.com/workers-ai/models/gpt-oss-120b/
    """
    try:
        told = _items.decode(payload)
    except msgspec.DecodeError as error:
        raise Broken("what came is no answer of this protocol", code="malformed") from error
    reader, events = Reader(0), list[Event]()
    omitted: dict[str, None] = {}
    for item in told.output:
        pieces = item.content or ()
        match item.type:
            case "reasoning":
                reader.think("".join(piece.text or "" for piece in pieces or item.summary or ()), events)
            case "message":
                said = "".join(piece.text or "" for piece in pieces)
                refusal = "".join(piece.refusal or "" for piece in pieces)
                reader.take(schema.Content(content=said, refusal=refusal), payload, wire.id, events)
            case "function_call":
                arguments = msgspec.Raw(_encode(item.arguments or ""))
                call = schema.ToolCallOut(id=item.call_id, name=item.name, arguments=arguments)
                reader.call((call,), payload, wire.id, events)
            case kind:
                omitted[kind[:_KIND_CHARACTERS]] = None
    match told.status:
        case "completed":
            finish = "stop"
        case "incomplete":
            reason = told.incomplete_details.reason if told.incomplete_details is not None else None
            finish = _INCOMPLETE.get(reason or "", reason or told.status)
        case "failed" | "cancelled":
            finish = "error"
        case _:
            raise Broken("the answer does not say that it is complete", code="no_terminal")
    return _choice(0, reader, events, finish, payload, wire, headers), tuple(omitted)[:_MOST_OMITTED]


def is_failed_finish(reason: str) -> bool:
    return reason.lower() in _FAILED


def _choice(
    index: int,
    reader: Reader,
    events: list[Event],
    native: str,
    payload: bytes,
    wire: schema.AnswerOut,
    headers: Mapping[str, str],
) -> Choice:
    if is_failed_finish(native):
        rejected = failures.from_finish_reason(native, headers=headers)
        rejected.after_content = reader.said
        raise rejected
    reader.end(payload, wire.id, events)
    thought = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    calls: list[ToolCall] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            calls.append(ToolCall(id=event.id, name=event.name, arguments=""))
        elif isinstance(event, ToolCallDelta):
            known = calls[event.index]
            calls[event.index] = msgspec.structs.replace(known, arguments=known.arguments + event.arguments)
    return Choice(
        index=index,
        text="".join(event.text for event in events if isinstance(event, TextDelta)),
        refusal="".join(event.text for event in events if isinstance(event, RefusalDelta)),
        reasoning=(Reasoning(text=thought),) if thought else (),
        tool_calls=tuple(calls),
        stop_reason=stop_reason(native, refused=reader.refused, called=reader.called),
        native_stop_reason=native,
    )
