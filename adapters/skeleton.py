"""
A template for the next wire protocol: copy it, rename it, and change it piece by piece into the real one.

It is a whole protocol for a made-up format, the least that has everything: both directions, whole and streamed, tools,
errors, usage and proof of the end. It is not registered, so no provider and no caller can use it; the tests run it
beside the others, and docs/protocols.md tells the steps, which a test follows. A real protocol soon wants a folder:
divide it as the others are.

The format. A request is a POST to `/talk`:

    {"model": "m", "say": [{"who": "user", "text": "Hi"}], "limit": 50, "stream": true,
     "tools": [{"name": "f", "about": "...", "takes": {...}}]}

`who` is "system", "user", "model" or "tool". A model's entry may have `calls: [{"id", "name", "with"}]`, with `with` a
text of JSON; a tool's has `of`, the id of the call it is the result of. The answer:

    {"id": "a1", "model": "m", "text": "Hello", "calls": [...], "end": "done", "used": {"in": 3, "out": 5}}

`end` is "done", "limit" or "calls". A stream has events with a piece of the same: `{"text": "Hel"}`, `{"call": {...}}`,
`{"used": {...}}`. The last is `{"id": "a1", "model": "m", "end": "done"}`, and is the proof that the answer is
complete. An error, under a status of its own or in a stream, is `{"error": {"code": "busy", "message": "..."}}`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import msgspec
from typing_extensions import override

from adapters import telling
from adapters.body import ABSENT, Wire, given, read_fields, typed
from adapters.chat import (
    ChatRequest,
    ChatResponse,
    Choice,
    ChoiceEnd,
    Event,
    Finished,
    Message,
    NativeRequest,
    RefusalDelta,
    Role,
    StopReason,
    Text,
    TextDelta,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolCallStart,
    UsageReport,
)
from adapters.classify import NOT_THERE, Failure, Rule, classify, request_id
from adapters.contract import (
    AnswerHead,
    Batch,
    Endpoint,
    HttpRequest,
    StreamParser,
    StreamRenderer,
    ToldError,
    UpstreamCall,
)
from adapters.errors import Broken, ErrorClass, ProviderError, Rejected
from adapters.figures import count
from adapters.paths import Paths, Words
from adapters.sending import Sending
from adapters.sse import ServerSentEvent
from adapters.streams import ProvenStream
from metering.usage import NOTHING, Usage

NAME = "skeleton"

# ------------------------------------------------- the format, as it is read


class CallWire(Wire):
    name: str
    id: str = ""
    #: JSON text. Of arguments that came as an object keep the raw bytes: see `adapters.body.raw_text`.
    arguments: str = msgspec.field(default="", name="with")


class EntryIn(Wire):
    who: Literal["system", "user", "model", "tool"]
    text: str = ""
    calls: tuple[CallWire, ...] = ()
    of: str | None = None


class ToolIn(Wire):
    name: str
    about: str | None = None
    takes: msgspec.Raw = ABSENT


class RequestIn(Wire):
    say: tuple[EntryIn, ...]
    model: str | None = None
    limit: int | None = None
    stream: bool = False
    tools: tuple[ToolIn, ...] = ()


class UsedOut(Wire):
    into: int | None = msgspec.field(default=None, name="in")
    out: int | None = None


class AnswerOut(Wire):
    """A whole answer, and any event of a stream."""

    id: str | None = None
    model: str | None = None
    text: str | None = None
    calls: tuple[CallWire, ...] = ()
    call: CallWire | None = None
    end: str | None = None
    used: UsedOut | None = None
    error: msgspec.Raw = ABSENT


#: Fields that are ours to write: they say how a request is served, not what is asked.
_ENVELOPE = frozenset({"model", "stream"})
#: Fields whose content the canonical form carries. Of all others another protocol is told, and refuses them.
_MAPPED = frozenset({"model", "stream", "say", "limit", "tools"})
#: Canonical names to those of this format: see `adapters.paths`.
WORDS: Words = {"messages": ("say",), "max_output_tokens": ("limit",), "content": ("text",), "tool_calls": ("calls",)}
_ROLES = {"system": Role.SYSTEM, "user": Role.USER, "model": Role.ASSISTANT, "tool": Role.TOOL}
_STOP = {"done": StopReason.STOP, "limit": StopReason.LENGTH, "calls": StopReason.TOOL_CALLS}

#: The first rule that fits tells what an error means, and so who tries what again. Last are rules on the status alone.
_ERRORS: tuple[Rule, ...] = (
    Rule(codes=frozenset({"bad_key", "no_money"}), error_class=ErrorClass.OURS, credential_fault=True),
    Rule(codes=frozenset({"busy"}), error_class=ErrorClass.TRANSIENT, rate_limited=True),
    Rule(statuses=frozenset({401, 402, 403}), error_class=ErrorClass.OURS, credential_fault=True),
    Rule(statuses=NOT_THERE, error_class=ErrorClass.OURS),
    Rule(statuses=frozenset({429}), error_class=ErrorClass.TRANSIENT, rate_limited=True),
    Rule(statuses=frozenset({408, 425}), error_class=ErrorClass.TRANSIENT),
    Rule(statuses=frozenset(range(300, 400)), error_class=ErrorClass.OURS),
    Rule(statuses=frozenset(range(400, 500)), error_class=ErrorClass.FATAL),
)

_encode = msgspec.json.Encoder().encode
_answer = msgspec.json.Decoder(AnswerOut)
_any = msgspec.json.Decoder()


class Skeleton:
    """The protocol; a `WireProtocol`. It holds nothing and does no I/O."""

    name = NAME
    models_path = "/models"
    untold = frozenset(
        {telling.IMAGE, telling.LOGPROBS, telling.CHOICE, telling.CALL_SIGNATURE, telling.REASONING, telling.SIGNATURE}
    ) | telling.endings(StopReason.CONTENT_FILTER, StopReason.REFUSAL, StopReason.PAUSE, StopReason.OTHER)

    # ------------------------------------------------------------- requests

    def parse_request(self, body: bytes) -> ChatRequest:
        """Raises `MalformedRequest`, which names the field and repeats none of its content."""
        fields = read_fields(body)
        wire = typed(body, RequestIn, "")
        return ChatRequest(
            messages=tuple(_heard(entry) for entry in wire.say),
            tools=tuple(Tool(name=t.name, description=t.about, parameters=given(t.takes)) for t in wire.tools),
            max_output_tokens=wire.limit,
            # The fields as they came: to a provider of this protocol they go untouched, what we do not know too.
            native=NativeRequest(
                protocol=NAME, fields=fields, unmapped=tuple(name for name in fields if name not in _MAPPED)
            ),
            # And how what was read is called here, so that a refusal names what the caller wrote.
            paths=Paths(words=WORDS),
        )

    def render_request(self, call: UpstreamCall, *, stream: bool) -> HttpRequest:
        """Raises `RequestNotExpressible`: what is asked and cannot be said is refused before anything is sent."""
        request, sending = call.request, Sending(call, NAME, WORDS)
        if request.native is not None and request.native.protocol == NAME:
            fields: dict[str, Any] = {k: v for k, v in request.native.fields.items() if k not in _ENVELOPE}
        else:
            fields = _Writer(request, sending).fields()
        fields |= {"model": call.model} | ({"stream": True} if stream else {})
        sending.as_profiled(fields)
        return sending.post("/talk", fields, stream=stream)

    # -------------------------------------------------------------- answers

    def parse_response(self, status: int, headers: Mapping[str, str], body: bytes) -> ChatResponse:
        """Raises `Rejected` for an error, whatever the status, and `Broken` for an answer without its `end`."""
        if not 200 <= status < 300:
            raise self.parse_error(status, headers, body)
        body = body.strip()
        wire = _read(body)
        if (error := given(wire.error)) is not None:
            raise _failed(error, None, headers)
        if wire.end is None:
            raise Broken("the answer has no end", code="no_terminal")
        choice = Choice(
            index=0,
            text=wire.text or "",
            tool_calls=tuple(
                ToolCall(id=call.id or f"call_{n}", name=call.name, arguments=call.arguments)
                for n, call in enumerate(wire.calls)
            ),
            stop_reason=_stop(wire.end),
            native_stop_reason=wire.end,
        )
        return ChatResponse(
            choices=(choice,),
            usage=_usage(wire.used),
            response_id=wire.id,
            served_model=wire.model,
            provider_request_id=request_id(headers),
            native=msgspec.Raw(body),
            native_protocol=NAME,
        )

    def render_response(self, response: ChatResponse) -> bytes:
        if response.native is not None and response.native_protocol == NAME:
            return bytes(response.native)
        choice = response.choices[0]
        told: dict[str, Any] = {"id": response.response_id, "model": response.served_model}
        told |= {"text": choice.text + choice.refusal, "end": _word(choice.stop_reason)}
        if choice.tool_calls:
            told["calls"] = [_call(call) for call in choice.tool_calls]
        if response.usage != NOTHING:
            told["used"] = _used(response.usage)
        return _encode(told)

    def new_parser(self, endpoint: Endpoint, headers: Mapping[str, str]) -> StreamParser:  # noqa: ARG002 - no quirk
        return SkeletonStream(headers)

    def new_renderer(self, head: AnswerHead) -> StreamRenderer:
        return SkeletonRenderer(head)

    # --------------------------------------------------------------- errors

    def parse_error(self, status: int, headers: Mapping[str, str], body: bytes) -> ProviderError:
        """Of any body: a proxy's page has a status, too."""
        try:
            error = given(_answer.decode(body).error)
        except (msgspec.DecodeError, RecursionError):
            error = None
        return _failed(error, status, headers)

    def render_error(self, error: ToldError) -> bytes:
        return _encode({"error": {"code": error.code, "message": error.message}})


# -------------------------------------------------------------------- requests


def _heard(entry: EntryIn) -> Message:
    return Message(
        role=_ROLES[entry.who],
        content=(Text(text=entry.text),) if entry.text else (),
        tool_calls=tuple(ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in entry.calls),
        tool_call_id=entry.of,
    )


#: Settings of a request that this format has no field for, whatever they are set to.
_UNKNOWN = (
    "stop",
    "tool_choice",
    "response_format",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "reasoning_effort",
    "reasoning_budget_tokens",
    "verbosity",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "store",
    "metadata",
    "end_user",
)


class _Writer:
    """One canonical request in this format. What cannot be written is refused or told as dropped, never left out."""

    def __init__(self, request: ChatRequest, sending: Sending) -> None:
        self._request = request
        self._sending = sending

    def fields(self) -> dict[str, Any]:
        request, endpoint = self._request, self._sending.endpoint
        self._sending.refuse_unmapped()
        self._sending.refuse_unknown(_UNKNOWN)
        if request.parallel_tool_calls is False:
            self._sending.refuse("parallel_tool_calls", "has no such field")
        limit = request.max_output_tokens if request.max_output_tokens is not None else endpoint.default_max_tokens
        fields: dict[str, Any] = {"say": [self._entry(m, f"messages[{i}]") for i, m in enumerate(request.messages)]}
        if limit is not None:
            fields[endpoint.max_tokens_field or "limit"] = limit
        if request.tools:
            fields["tools"] = [self._tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
        self._sending.add_extra(fields, _ENVELOPE)
        return fields

    def _entry(self, message: Message, path: str) -> dict[str, Any]:
        texts = [message.refusal] if message.refusal else []
        for j, part in enumerate(message.content):
            if not isinstance(part, Text):
                raise self._sending.refusal(f"{path}.content[{j}]", f"{NAME} takes only text")
            if part.cache is not None:
                self._sending.refuse(f"{path}.content[{j}].cache", "has no cache boundaries", "messages.cache")
            texts.append(part.text)
        # There is no word for what was thought, either.
        self._sending.thoughts(message, path)
        for setting, asked in (("name", message.name), ("is_error", message.is_error)):
            if asked:
                self._sending.refuse(f"{path}.{setting}", "has no word for it", f"messages.{setting}")
        # There is one word for whoever sets the rules.
        role = Role.SYSTEM if message.role is Role.DEVELOPER else message.role
        entry: dict[str, Any] = {"who": next(who for who, known in _ROLES.items() if known is role)}
        entry["text"] = "".join(texts)
        if message.tool_calls:
            entry["calls"] = [_call(call) for call in message.tool_calls]
            # A proof for its own provider, and no other one misses it; but it is told.
            for i, call in enumerate(message.tool_calls):
                if call.signature is not None:
                    self._sending.drop(f"{path}.tool_calls[{i}].signature")
        if message.tool_call_id is not None:
            entry["of"] = message.tool_call_id
        return entry

    def _tool(self, tool: Tool, path: str) -> dict[str, Any]:
        if tool.cache is not None:
            self._sending.refuse(f"{path}.cache", "has no cache boundaries", "messages.cache")
        if tool.strict:
            self._sending.refuse(f"{path}.strict", "has no word for it", "tools.strict")
        told = {"name": tool.name, "about": tool.description, "takes": tool.parameters}
        return {name: value for name, value in told.items() if value is not None}


def _call(call: ToolCall) -> dict[str, str]:
    return {"id": call.id, "name": call.name, "with": call.arguments}


# --------------------------------------------------------------------- answers


def _read(data: bytes) -> AnswerOut:
    try:
        return _answer.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Broken("what came is no answer of this protocol", code="malformed") from error


def _failed(error: msgspec.Raw | None, status: int | None, headers: Mapping[str, str]) -> Rejected:
    """What an error means. What it says in prose is matched by rules and never repeated whole."""
    try:
        content = _any.decode(error) if error is not None else {}
    except (msgspec.DecodeError, RecursionError):
        content = {}
    known = content if isinstance(content, dict) else {}
    code, message = known.get("code"), known.get("message")
    failure = Failure(
        status=status,
        codes=(code,) if isinstance(code, str) else (),
        message=message[:2048] if isinstance(message, str) else "",
        headers=headers,
    )
    return classify(_ERRORS, failure)


def _stop(word: str) -> StopReason:
    return _STOP.get(word, StopReason.OTHER)


def _word(reason: StopReason) -> str:
    return next((word for word, known in _STOP.items() if known is reason), "done")


def _usage(used: UsedOut | None) -> Usage:
    """A figure that is no count is no figure."""
    return NOTHING if used is None else Usage(input_total=count(used.into), output_total=count(used.out))


def _used(usage: Usage) -> dict[str, int]:
    told = {"in": usage.input_total, "out": usage.output_total}
    return {name: value for name, value in told.items() if value is not None}


# --------------------------------------------------------------------- streams


class SkeletonStream(ProvenStream):
    """
    A provider's stream to events; a `StreamParser`.

    Here stands what the events mean; what all parsers share is in `adapters.streams`. Never finished without the `end`:
    that a body ended, even by its framing, proves nothing.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        super().__init__(headers)
        self._calls = 0

    @override
    def _take(self, received: Iterable[ServerSentEvent], events: list[Event]) -> None:
        for _, data in received:
            if not data.strip():
                continue  # a keep-alive
            self._payloads += 1
            try:
                self._take_one(_read(data), events)
            except ProviderError as error:
                self._fail(error)
            if self._failure is not None:
                return

    def _take_one(self, wire: AnswerOut, events: list[Event]) -> None:
        if wire.used is not None:
            self._report(self._usage.merge(_usage(wire.used)), None, events)
        if self._finished:
            return
        if (error := given(wire.error)) is not None:
            raise _failed(error, None, self._headers)
        if wire.text:
            events.append(TextDelta(wire.text))
        if wire.call is not None:
            call, number = wire.call, self._calls
            self._calls += 1
            events.append(ToolCallStart(number, call.id or f"call_{number}", call.name))
            if call.arguments:
                events.append(ToolCallDelta(number, call.arguments))
        if wire.end is not None:
            self._id, self._model = wire.id, wire.model
            self._finish((ChoiceEnd(choice=0, stop_reason=_stop(wire.end), native_stop_reason=wire.end),), events)

    @override
    def _take_whole(self, body: bytes, events: list[Event]) -> None:
        self._take_answer(Skeleton().parse_response(200, self._headers, body), events)


class SkeletonRenderer:
    """Events to the bytes of a caller's stream; a `StreamRenderer`. Read by the parser above, they prove their end."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        #: Calls are told whole here, so each waits for its arguments, which may come by turns.
        self._calls: dict[int, tuple[ToolCallStart, list[str]]] = {}

    def feed(self, batch: Batch) -> bytes:
        return b"".join(self._told(event) for event in batch)

    def fail(self, error: ToldError) -> bytes:
        return _event({"error": {"code": error.code, "message": error.message}})

    def _told(self, event: Event) -> bytes:
        if getattr(event, "choice", 0):
            return b""  # this format has one choice
        match event:
            case TextDelta() | RefusalDelta():
                return _event({"text": event.text}) if event.text else b""
            case ToolCallStart():
                self._calls[event.index] = event, []
                return b""
            case ToolCallDelta():
                self._calls[event.index][1].append(event.arguments)
                return b""
            case UsageReport():
                return _event({"used": _used(event.usage)})
            case Finished(ends=(end, *_)):
                told = {"id": self._head.id, "model": self._head.model, "end": _word(end.stop_reason)}
                return b"".join(self._calls_told()) + _event(told)
            case _:
                # Reasoning, pictures and log probabilities have no place in this format.
                return b""

    def _calls_told(self) -> Iterator[bytes]:
        for start, pieces in self._calls.values():
            yield _event({"call": _call(ToolCall(id=start.id, name=start.name, arguments="".join(pieces)))})


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + _encode(content) + b"\n\n"
