"""Answers of Chat Completions: what is common to a whole one and to chunks, and the whole ones both ways."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec

from adapters.body import ABSENT
from adapters.chat import ChatResponse, Choice, Reasoning, StopReason, ToolCall
from adapters.classify import request_id
from adapters.errors import Broken
from adapters.protocols.chat_completions import failures
from adapters.protocols.chat_completions.schema import (
    AnswerOut,
    ChoiceOut,
    Content,
    LooseAnswer,
    ToolCallOut,
    UsageOut,
)
from metering.usage import NOTHING, Usage

NAME = "chat_completions"

#: Native words for how a choice ended; the rest are OTHER.
_STOP: dict[str, StopReason] = {
    "stop": StopReason.STOP,
    "eos": StopReason.STOP,
    "eos_token": StopReason.STOP,
    "end_turn": StopReason.STOP,
    "stop_sequence": StopReason.STOP,
    "length": StopReason.LENGTH,
    "max_tokens": StopReason.LENGTH,
    "model_length": StopReason.LENGTH,
    "tool_calls": StopReason.TOOL_CALLS,
    "function_call": StopReason.TOOL_CALLS,
    "content_filter": StopReason.CONTENT_FILTER,
    "sensitive": StopReason.CONTENT_FILTER,
}
#: The word a canonical reason is told by, where no native one fits.
_FINISH: dict[StopReason, str] = {
    StopReason.LENGTH: "length",
    StopReason.TOOL_CALLS: "tool_calls",
    StopReason.CONTENT_FILTER: "content_filter",
}

#: No single call costs more, and no price is finer: beyond this the figure is nonsense.
_MOST_USD = Decimal(1_000_000)
_COST_CHARACTERS = 40

_answer = msgspec.json.Decoder(AnswerOut)
_loose_answer = msgspec.json.Decoder(LooseAnswer)


def stop_reason(native: str, *, refused: bool, called: bool) -> StopReason:
    """`called` and `refused`: a plain `stop` is also said where a tool was called or the model refused."""
    reason = _STOP.get(native.lower(), StopReason.OTHER)
    if reason is StopReason.STOP:
        if called:
            return StopReason.TOOL_CALLS
        if refused:
            return StopReason.REFUSAL
    return reason


def decode_answer(data: bytes) -> AnswerOut:
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
        raise Broken("what came is no chat completion", code="malformed") from error
    return AnswerOut(id=loose.id, model=loose.model, choices=loose.choices, error=loose.error)


def read_usage(wire: UsageOut | None) -> tuple[Usage, str | None]:
    """Usage, and the cost in USD where the provider tells it there. A figure that is no count is no figure."""
    if wire is None:
        return NOTHING, None
    prompt, completion = wire.prompt_tokens_details, wire.completion_tokens_details
    total_in, total_out = _count(wire.prompt_tokens), _count(wire.completion_tokens)
    cached = prompt.cached_tokens if prompt and prompt.cached_tokens is not None else wire.prompt_cache_hit_tokens
    usage = Usage(
        input_total=total_in,
        # More cached than sent, or more thought than said, was seen at Azure and OpenRouter: a part is never more than
        # its whole.
        cache_read=_part(cached if cached is not None else wire.cached_tokens, total_in),
        cache_write_5m=_part(prompt.cache_write_tokens if prompt else None, total_in),
        output_total=total_out,
        reasoning=_part(completion.reasoning_tokens if completion else None, total_out),
    )
    return usage, read_cost(wire.cost)


def read_cost(raw: msgspec.Raw) -> str | None:
    """A cost in USD as a plain decimal number, digit for digit as the provider wrote it; None for what is no amount."""
    if raw is ABSENT:
        return None
    text = bytes(raw).strip()
    if text[:1] == b"{":
        try:
            text = bytes(msgspec.json.decode(text, type=dict[str, msgspec.Raw]).get("total_cost", b""))
        except (msgspec.DecodeError, RecursionError):
            return None
    if not 0 < len(text) <= _COST_CHARACTERS:
        return None
    try:
        amount = Decimal(text.strip(b'"').decode("ascii"))
    except (InvalidOperation, UnicodeDecodeError):
        return None
    if not amount.is_finite() or not 0 <= amount <= _MOST_USD or (amount and amount.adjusted() < -_COST_CHARACTERS):
        return None
    return format(amount, "f")


def texts(content: Content) -> Iterator[tuple[str, bool]]:
    """Pieces of text in order, each with whether it is reasoning. Mistral sends a list with `thinking` parts."""
    thought = content.reasoning_content or content.reasoning
    if thought:
        yield thought, True
    elif content.reasoning_details:
        for detail in content.reasoning_details:
            if detail.text:
                yield detail.text, True
    if isinstance(content.content, str):
        if content.content:
            yield content.content, False
    elif content.content:
        for part in content.content:
            yield from _part_texts(part)


def _part_texts(part: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    text, thinking = part.get("text"), part.get("thinking")
    if isinstance(thinking, str) and thinking:
        yield thinking, True
    elif isinstance(thinking, list):
        for inner in thinking:
            if isinstance(inner, dict) and isinstance(inner.get("text"), str) and inner["text"]:
                yield inner["text"], True
    elif isinstance(text, str) and text:
        yield text, False


def signature(content: Content) -> str | None:
    return next((d.signature for d in content.reasoning_details or () if d.signature), None)


def arguments_of(call: ToolCallOut) -> str:
    given = call.function.arguments if call.function else None
    if given is None or isinstance(given, str):
        return given or ""
    return msgspec.json.encode(given).decode()


def _count(value: int | None) -> int | None:
    return value if value is not None and 0 <= value < 2**31 else None


def _part(value: int | None, whole: int | None) -> int | None:
    count = _count(value)
    return count if count is None or whole is None else min(count, whole)


def parse_answer(headers: Mapping[str, str], body: bytes) -> ChatResponse:
    """Raises `Rejected` for an error in place of an answer, `Broken` for a body without its stop field."""
    wire = decode_answer(body)
    if wire.error is not None:
        raise failures.from_error(wire.error, headers=headers)
    if not wire.choices:
        raise Broken("the answer has no choices", code="malformed")
    usage, cost = read_usage(wire.usage)
    return ChatResponse(
        choices=tuple(_choice(choice, wire.id, headers) for choice in wire.choices),
        usage=usage,
        response_id=wire.id or None,
        served_model=wire.model or None,
        provider_request_id=request_id(headers),
        reported_cost_usd=read_cost(wire.cost) or cost,
        native=msgspec.Raw(body.strip()),
        native_protocol=NAME,
    )


def _choice(choice: ChoiceOut, response_id: str | None, headers: Mapping[str, str]) -> Choice:
    native = choice.finish_reason
    if native is None:
        raise Broken("a choice of the answer has no finish reason", code="no_terminal")
    content = choice.message or Content()
    pieces = list(texts(content))
    for reason in (native, choice.native_finish_reason):
        if reason is not None and failures.is_failed_finish(reason):
            rejected = failures.from_finish_reason(reason, headers=headers)
            rejected.after_content = bool(pieces or all_calls(content) or content.refusal)
            raise rejected
    thought = "".join(text for text, is_reasoning in pieces if is_reasoning)
    signed = signature(content)
    calls = tuple(
        ToolCall(
            id=call.id or made_id(response_id or "", choice.index, number),
            name=(call.function.name if call.function else None) or "",
            arguments=arguments_of(call),
        )
        for number, call in enumerate(all_calls(content))
    )
    return Choice(
        index=choice.index,
        text="".join(text for text, is_reasoning in pieces if not is_reasoning),
        refusal=content.refusal or "",
        reasoning=(Reasoning(text=thought, signature=signed),) if thought or signed else (),
        tool_calls=calls,
        stop_reason=stop_reason(native, refused=bool(content.refusal), called=bool(calls)),
        native_stop_reason=native,
    )


def all_calls(content: Content) -> tuple[ToolCallOut, ...]:
    """Tool calls, the one function call of the older form among them."""
    calls = content.tool_calls or ()
    return (*calls, ToolCallOut(index=0, function=content.function_call)) if content.function_call else calls


def made_id(seed: str, choice: int, index: int) -> str:
    """An id for a tool call whose provider gave none: the same for the same call of the same answer."""
    return f"call_{seed[-32:]}_{choice}_{index}"


def render_answer(response: ChatResponse) -> bytes:
    """A `chat.completion` object; the provider's own, untouched, where it spoke this protocol."""
    if response.native is not None and response.native_protocol == NAME:
        return bytes(response.native)
    body: dict[str, Any] = {
        "id": response.response_id or "",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": response.served_model or "",
        "choices": [_render_choice(choice) for choice in response.choices],
    }
    if response.usage != NOTHING:
        body["usage"] = render_usage(response.usage)
    return msgspec.json.encode(body)


def _render_choice(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": choice.text or None,
        "refusal": choice.refusal or None,
    }
    thought = "".join(piece.text for piece in choice.reasoning)
    if thought:
        message["reasoning_content"] = thought
    if choice.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.tool_calls
        ]
    return {
        "index": choice.index,
        "message": message,
        "logprobs": None,
        "finish_reason": finish_reason(choice.stop_reason),
    }


def finish_reason(reason: StopReason) -> str:
    """The word of this protocol for a canonical reason. What it has no word for ended without a fault: `stop`."""
    return _FINISH.get(reason, "stop")


def render_usage(usage: Usage) -> dict[str, Any]:
    """Figures that are not known are left out, not told as zero."""
    known: dict[str, Any] = {"prompt_tokens": usage.input_total, "completion_tokens": usage.output_total}
    if usage.input_total is not None and usage.output_total is not None:
        known["total_tokens"] = usage.input_total + usage.output_total
    written = (usage.cache_write_5m or 0) + (usage.cache_write_1h or 0)
    details = {"cached_tokens": usage.cache_read, "cache_write_tokens": written or None}
    known["prompt_tokens_details"] = {k: v for k, v in details.items() if v is not None} or None
    if usage.reasoning is not None:
        known["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning}
    return {key: value for key, value in known.items() if value is not None}
