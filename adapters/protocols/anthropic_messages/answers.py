"""Answers of the Messages API: what is common to a whole one and to a stream, and the whole ones both ways."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from adapters import signatures
from adapters.body import ABSENT, given, raw_text
from adapters.chat import ChatResponse, Choice, Reasoning, StopReason, ToolCall
from adapters.classify import request_id
from adapters.errors import Broken
from adapters.figures import cost_usd, count, service_tier
from adapters.protocols.anthropic_messages import failures
from adapters.protocols.anthropic_messages.schema import (
    BlockOut,
    Figures,
    LooseMessageOut,
    MessageOut,
    TypeOnly,
    UsageOut,
)
from metering.usage import NOTHING, Usage

NAME = "anthropic_messages"

#: Native words for how an answer ended; the rest are OTHER. `compaction` pauses after the context was summed up.
#: https://platform.claude.com/docs/en/build-with-claude/handling-stop-reasons
_STOP: dict[str, StopReason] = {
    "end_turn": StopReason.STOP,
    "stop_sequence": StopReason.STOP,
    "max_tokens": StopReason.LENGTH,
    "model_context_window_exceeded": StopReason.LENGTH,
    "tool_use": StopReason.TOOL_CALLS,
    "refusal": StopReason.REFUSAL,
    "pause_turn": StopReason.PAUSE,
    "compaction": StopReason.PAUSE,
}
#: The word a canonical reason is told by. A filter that stopped the answer is what this API calls a refusal.
_TOLD: dict[StopReason, str] = {
    StopReason.STOP: "end_turn",
    StopReason.LENGTH: "max_tokens",
    StopReason.TOOL_CALLS: "tool_use",
    StopReason.REFUSAL: "refusal",
    StopReason.CONTENT_FILTER: "refusal",
    StopReason.PAUSE: "pause_turn",
    StopReason.OTHER: "end_turn",
}

#: Kinds of block the canonical form carries.
KNOWN_BLOCKS = frozenset({"text", "thinking", "redacted_thinking", "tool_use"})
#: How the `data` of a block begins that holds the signature of a call; the call's number in its message, then that.
_OF_CALL = re.compile(r"call:([0-9]{1,4}):(.+)", re.DOTALL)
_WORD = re.compile(r"[a-z][a-z0-9_]{0,63}")
_MOST_OMITTED = 16

_message = msgspec.json.Decoder(MessageOut)
_loose_message = msgspec.json.Decoder(LooseMessageOut)
_block = msgspec.json.Decoder(BlockOut)
_type_only = msgspec.json.Decoder(TypeOnly)
_usage = msgspec.json.Decoder(UsageOut | None)
_object = msgspec.json.Decoder(dict[str, Any])


def stop_reason(native: str) -> StopReason:
    return _STOP.get(native, StopReason.OTHER)


def told_stop(reason: StopReason, native: str) -> str:
    """The provider's own word where it is one of this API, so that "stop_sequence" stays itself."""
    return native if _STOP.get(native) is reason else _TOLD[reason]


class Omitted:
    """Kinds of an answer's content that the canonical form does not carry, each once, in the order they came."""

    __slots__ = ("words",)

    def __init__(self) -> None:
        self.words: tuple[str, ...] = ()

    def add(self, word: str) -> None:
        known = word if _WORD.fullmatch(word) else "other"
        if known not in self.words and len(self.words) < _MOST_OMITTED:
            self.words = (*self.words, known)


class Tally:
    """
    The figures of one answer as they come in, in the provider's own parts: each is cumulative by itself, so the total
    must be made of the last of each. A zero never overwrites.
    """

    __slots__ = ("_compacted", "_creation", "_input", "_one_hour", "_output", "_read", "_thinking", "_units")

    def __init__(self) -> None:
        self._input: int | None = None
        self._creation: int | None = None
        self._one_hour: int | None = None
        self._read: int | None = None
        self._output: int | None = None
        self._thinking: int | None = None
        self._units: dict[str, int] = {}
        #: Summing up a context is a request of the provider's own, which its totals leave out.
        self._compacted: tuple[Usage, ...] = ()

    def take(self, wire: UsageOut) -> Usage:
        """The usage as it is known now."""
        split = wire.cache_creation
        self._input = _later(self._input, wire.input_tokens)
        self._creation = _later(self._creation, wire.cache_creation_input_tokens)
        self._one_hour = _later(self._one_hour, split.ephemeral_1h_input_tokens if split else None)
        self._read = _later(self._read, wire.cache_read_input_tokens)
        self._output = _later(self._output, wire.output_tokens)
        details = wire.output_tokens_details
        self._thinking = _later(self._thinking, details.thinking_tokens if details else None)
        if wire.iterations:
            self._compacted = tuple(_usage_of(each) for each in wire.iterations if each.type == "compaction")
        usage = _total(self._input, self._creation, self._one_hour, self._read, self._output, self._thinking)
        for extra in self._compacted:
            usage = usage.plus(extra)
        for kind, number in _billed(wire.server_tool_use).items():
            self._units[kind] = number or self._units.get(kind, 0)
        return msgspec.structs.replace(usage, units=dict(self._units)) if self._units else usage


#: Places that nothing was asked to stay in; older models cannot be asked.
_ANYWHERE: Final = frozenset({"global", "not_available"})


def _billed(raw: msgspec.Raw) -> dict[str, int]:
    """
    Uses of the provider's own tools that cost something beside their tokens, by kind: all but fetching a page.
    https://platform.claude.com/docs/en/about-claude/pricing#specific-tool-pricing
    """
    known = given(raw)
    if known is None:
        return {}
    try:
        uses = _object.decode(known)
    except (msgspec.DecodeError, RecursionError):
        return {}
    counts = {
        kind.removesuffix("_requests"): count(told)
        for kind, told in uses.items()
        if kind != "web_fetch_requests" and type(told) is int
    }
    return {kind: number for kind, number in counts.items() if number is not None}


def tier_of(wire: UsageOut | None) -> str | None:
    """
    The tier that served. A call in fast mode is told by its speed, and has prices of its own; one that was to stay in
    some place costs more, and that is told beside the tier: "geo_us", "fast-geo_us".
    https://platform.claude.com/docs/en/build-with-claude/fast-mode
    https://platform.claude.com/docs/en/manage-claude/data-residency
    """
    if wire is None:
        return None
    tier = "fast" if wire.speed == "fast" else service_tier(wire.service_tier)
    place = service_tier(wire.inference_geo)
    if place is None or place in _ANYWHERE:
        return tier
    return f"geo_{place}" if tier is None or tier == "standard" else f"{tier}-geo_{place}"


def _usage_of(wire: Figures) -> Usage:
    split, details = wire.cache_creation, wire.output_tokens_details
    return _total(
        count(wire.input_tokens),
        count(wire.cache_creation_input_tokens),
        count(split.ephemeral_1h_input_tokens if split else None),
        count(wire.cache_read_input_tokens),
        count(wire.output_tokens),
        count(details.thinking_tokens if details else None),
    )


def _total(
    fresh: int | None,
    creation: int | None,
    one_hour: int | None,
    read: int | None,
    output: int | None,
    thinking: int | None,
) -> Usage:
    """Input is told without what was read from or written to the cache; a write that names no time is for 5 minutes."""
    if creation is not None and one_hour is not None:
        one_hour = min(one_hour, creation)
    return Usage(
        input_total=None if fresh is None else fresh + (creation or 0) + (read or 0),
        cache_read=read,
        cache_write_5m=None if creation is None else creation - (one_hour or 0),
        cache_write_1h=one_hour,
        output_total=output,
        reasoning=thinking if thinking is None or output is None else min(thinking, output),
    )


def _later(known: int | None, later: int | None) -> int | None:
    later = count(later)
    return later if later or known is None else known


def read_figures(raw: msgspec.Raw) -> UsageOut | None:
    """A figure that is no number costs only itself and what is nested, never the answer."""
    if raw is ABSENT:
        return None
    try:
        return _usage.decode(raw)
    except msgspec.ValidationError:
        pass
    except RecursionError:
        return None
    try:
        loose = _object.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None
    known = {name: value if type(value) is int else None for name, value in loose.items()}
    return UsageOut(
        input_tokens=known.get("input_tokens"),
        cache_creation_input_tokens=known.get("cache_creation_input_tokens"),
        cache_read_input_tokens=known.get("cache_read_input_tokens"),
        output_tokens=known.get("output_tokens"),
        service_tier=loose.get("service_tier"),
        speed=loose.get("speed"),
        inference_geo=loose.get("inference_geo"),
    )


def decode_message(data: bytes | msgspec.Raw) -> MessageOut:
    """Raises `Broken` (code "malformed")."""
    try:
        return _message.decode(data)
    except msgspec.ValidationError:
        pass
    except (msgspec.DecodeError, RecursionError) as error:
        raise Broken("what came is not JSON", code="malformed") from error
    try:
        loose = _loose_message.decode(data)
        fields = _object.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Broken("what came is no message", code="malformed") from error
    usage = fields.get("usage")
    return MessageOut(
        type=loose.type,
        id=loose.id,
        model=loose.model,
        content=loose.content,
        stop_reason=loose.stop_reason,
        error=loose.error,
        usage=read_figures(msgspec.Raw(msgspec.json.encode(usage))) if isinstance(usage, dict) else None,
    )


def _decode_block(raw: msgspec.Raw) -> BlockOut:
    try:
        return _block.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        kind = _type_only.decode(raw).type
    except (msgspec.DecodeError, RecursionError) as error:
        raise Broken("a block of the answer has no type", code="malformed") from error
    if kind in KNOWN_BLOCKS:
        raise Broken("a block of the answer is not what its type says", code="malformed")
    return BlockOut(type=kind)


def arguments_of(raw: msgspec.Raw) -> str:
    """The input of a tool call as JSON text. A call without any has an empty object for it."""
    known = given(raw)
    return "{}" if known is None else raw_text(known)


def made_id(seed: str, index: int) -> str:
    """An id for a tool call whose provider gave none: the same for the same call of the same answer."""
    return f"toolu_{seed[-32:]}_{index}"


def parse_answer(headers: Mapping[str, str], body: bytes) -> ChatResponse:
    """Raises `Rejected` for an error in place of an answer, `Broken` for a body without its stop field."""
    wire = decode_message(body)
    failed = given(wire.error)
    if failed is not None or wire.type == "error":
        raise failures.from_error(failed if failed is not None else body, headers=headers)
    if wire.content is None:
        raise Broken("the answer has no content", code="malformed")
    if wire.stop_reason is None:
        raise Broken("the answer has no stop reason", code="no_terminal")
    usage = Tally().take(wire.usage) if wire.usage is not None else NOTHING
    choice, omitted, model = _choice(map(_decode_block, wire.content), wire)
    return ChatResponse(
        choices=(choice,),
        usage=usage,
        response_id=wire.id or None,
        served_model=model or wire.model or None,
        provider_request_id=request_id(headers),
        reported_cost_usd=cost_usd(wire.cost),
        service_tier=tier_of(wire.usage),
        native=msgspec.Raw(body.strip()),
        native_protocol=NAME,
        omitted=omitted,
    )


def _choice(blocks: Iterable[BlockOut], wire: MessageOut) -> tuple[Choice, tuple[str, ...], str | None]:
    texts: list[str] = []
    thoughts: list[Reasoning] = []
    calls: list[ToolCall] = []
    signed: dict[int, str] = {}
    omitted = Omitted()
    model: str | None = None
    for block in blocks:
        match block.type:
            case "text":
                texts.append(block.text or "")
                if block.citations:
                    omitted.add("citations")
            case "thinking":
                if block.thinking or block.signature:
                    thoughts.append(
                        Reasoning(text=block.thinking or "", signature=signatures.heard(NAME, block.signature))
                    )
            case "redacted_thinking" if (of_call := signature_of_call(block.data)) is not None:
                signed[of_call[0]] = of_call[1]
            case "redacted_thinking":
                thoughts.append(Reasoning(signature=signatures.heard(NAME, block.data), redacted=True))
            case "tool_use":
                calls.append(
                    ToolCall(
                        id=block.id or made_id(wire.id or "", len(calls)),
                        name=block.name or "",
                        arguments=arguments_of(block.input),
                        signature=signed.get(len(calls)),
                    )
                )
            case kind:
                if kind == "fallback" and block.to is not None:
                    model = block.to.model or model
                omitted.add(kind)
    native = wire.stop_reason or ""
    choice = Choice(
        index=0,
        text="".join(texts),
        refusal=(wire.stop_details.explanation or "") if wire.stop_details else "",
        reasoning=tuple(thoughts),
        tool_calls=tuple(calls),
        stop_reason=stop_reason(native),
        native_stop_reason=native,
    )
    return choice, omitted.words, model


# ------------------------------------------------------------------- writing


def render_answer(response: ChatResponse) -> bytes:
    """
    A `message` object; the provider's own, untouched, where it spoke this protocol. This API has one choice: it is
    the first.
    """
    if response.native is not None and response.native_protocol == NAME:
        return bytes(response.native)
    choice = response.choices[0]
    content: list[dict[str, Any]] = [
        {"type": "redacted_thinking", "data": signatures.told(NAME, thought.signature) or ""}
        if thought.redacted
        else {
            "type": "thinking",
            "thinking": thought.text,
            "signature": signatures.told(NAME, thought.signature) or signatures.NONE,
        }
        for thought in choice.reasoning
    ]
    if choice.text:
        content.append({"type": "text", "text": choice.text})
    for number, call in enumerate(choice.tool_calls):
        arguments = object_of(call.arguments)
        if arguments is None:
            # This API has no place for them, and others are not invented: `telling.BROKEN_CALL`.
            continue
        if call.signature is not None:
            content.append(call_signature(number, call.signature))
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    return msgspec.json.encode(
        {
            "id": response.response_id or "",
            "type": "message",
            "role": "assistant",
            "model": response.served_model or "",
            "content": content,
            **told_end(choice.stop_reason, choice.native_stop_reason, choice.refusal),
            "usage": render_usage(response.usage),
        }
    )


def call_signature(number: int, signature: str) -> dict[str, Any]:
    """
    The signature of a call as a block before it: this API has no place on a call, and clients send such blocks back
    unchanged.
    """
    return {"type": "redacted_thinking", "data": f"call:{number}:{signature}"}


def signature_of_call(data: str | None) -> tuple[int, str] | None:
    """Which call of its message a block signs, and the signature; None for a block that is a thought."""
    found = _OF_CALL.fullmatch(data or "")
    return (int(found[1]), found[2]) if found else None


def told_end(reason: StopReason, native: str, refusal: str) -> dict[str, Any]:
    """The three fields that say how an answer ended. Words of a refusal are its explanation here."""
    told = told_stop(reason, native)
    details = {"type": "refusal", "category": None, "explanation": refusal or None} if told == "refusal" else None
    return {"stop_reason": told, "stop_sequence": None, "stop_details": details}


def object_of(arguments: str) -> msgspec.Raw | None:
    """Arguments of a call as the JSON object they must be here, byte for byte; None for what is none."""
    if not arguments.strip():
        return msgspec.Raw(b"{}")
    try:
        known = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return None
    return msgspec.Raw(arguments.strip().encode()) if isinstance(known, dict) else None


def render_usage(usage: Usage) -> dict[str, Any]:
    """The two figures that this API always has are told as 0 where they are not known; the others are left out."""
    written = None
    if usage.cache_write_5m is not None or usage.cache_write_1h is not None:
        written = (usage.cache_write_5m or 0) + (usage.cache_write_1h or 0)
    cached = (usage.cache_read or 0) + (written or 0)
    told: dict[str, Any] = {
        "input_tokens": max((usage.input_total or 0) - cached, 0),
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": usage.cache_read,
        "output_tokens": usage.output_total or 0,
    }
    if written is not None:
        told["cache_creation"] = {
            "ephemeral_5m_input_tokens": usage.cache_write_5m or 0,
            "ephemeral_1h_input_tokens": usage.cache_write_1h or 0,
        }
    if usage.reasoning is not None:
        told["output_tokens_details"] = {"thinking_tokens": usage.reasoning}
    return {name: value for name, value in told.items() if value is not None}
