"""Answers of Chat Completions: what is common to a whole one and to chunks, and the whole ones both ways."""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from adapters import signatures
from adapters.body import ABSENT, to_data_url
from adapters.chat import ChatResponse, Choice, Image, Reasoning, StopReason, TokenLogprob, ToolCall
from adapters.classify import request_id
from adapters.errors import Broken
from adapters.figures import cost_usd, count, service_tier
from adapters.protocols.chat_completions import failures
from adapters.protocols.chat_completions.schema import (
    AnswerOut,
    ChoiceOut,
    Content,
    LogprobsOut,
    LooseAnswer,
    ReasoningDetail,
    TokenOut,
    ToolCallOut,
    TopTokenOut,
    UsageOut,
)
from metering.usage import NOTHING, Usage

NAME = "chat_completions"
#: Whose the signatures of calls are: no other provider has any, whichever format it is asked in.
SIGNED_CALL = "gemini:call"

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
    except (msgspec.DecodeError, RecursionError) as error:
        raise Broken("what came is no chat completion", code="malformed") from error
    return AnswerOut(
        id=loose.id,
        model=loose.model,
        choices=loose.choices,
        error=loose.error,
        citations=loose.citations,
        search_results=loose.search_results,
        service_tier=loose.service_tier,
    )


def read_usage(wire: UsageOut | None) -> tuple[Usage, str | None]:
    """Usage, and the cost in USD where the provider tells it there. A figure that is no count is no figure."""
    if wire is None:
        return NOTHING, None
    total_in, total_out = count(wire.prompt_tokens), count(wire.completion_tokens)
    prompt, completion = wire.prompt_tokens_details, wire.completion_tokens_details
    cached = prompt.cached_tokens if prompt and prompt.cached_tokens is not None else wire.prompt_cache_hit_tokens
    # More cached than sent, or more thought than said, was seen at Azure and OpenRouter: a part is never more than its
    # whole.
    parts: dict[str, int | None] = {"cache_read": cached if cached is not None else wire.cached_tokens}
    if prompt:
        parts["cache_write_5m"] = prompt.cache_write_tokens
        parts["input_image"] = prompt.image_tokens
        parts["input_audio"] = prompt.audio_tokens
        parts["input_video"] = prompt.video_tokens
    told = {name: _part_of(part, total_in) for name, part in parts.items() if part is not None}
    if completion:
        parts = {
            "reasoning": completion.reasoning_tokens,
            "output_image": completion.image_tokens,
            "output_audio": completion.audio_tokens,
        }
        told |= {name: _part_of(part, total_out) for name, part in parts.items() if part is not None}
    usage = Usage(input_total=total_in, output_total=total_out, units=_units(wire), **told)
    return usage, read_cost(wire.cost)


def _units(wire: UsageOut) -> dict[str, int] | None:
    if wire.num_search_queries is None and wire.num_sources_used is None:
        return None
    told = {"web_search": count(wire.num_search_queries), "search_source": count(wire.num_sources_used)}
    return {kind: number for kind, number in told.items() if number} or None


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
    return cost_usd(msgspec.Raw(text))


class Thought(msgspec.Struct, frozen=True):
    """A piece of reasoning. Pieces of one kind and one index follow each other in one block."""

    text: str
    signature: str | None = None
    redacted: bool = False
    id: str | None = None
    #: The provider's own count of its blocks; None where it does not count.
    index: int | None = None


class Blocks:
    """Tells pieces of reasoning apart into blocks, counted from 0. One for each choice."""

    __slots__ = ("_index", "_number", "_redacted", "_signature")

    def __init__(self) -> None:
        self._number = -1
        self._index: int | None = None
        self._redacted = False
        #: Of the current block, which it ends.
        self._signature: str | None = None

    def block_of(self, piece: Thought) -> int | None:
        """The number of the block the piece belongs to; None where it only says again what was said."""
        if (
            piece.signature is not None
            and piece.signature == self._signature
            and not piece.text
            and piece.index in {None, self._index}
        ):
            return None
        same = (
            self._number >= 0
            and not piece.redacted
            and not self._redacted
            and (piece.index is None or piece.index == self._index)
            and self._signature is None
        )
        if not same:
            self._number += 1
            self._index = piece.index if piece.index is not None else self._number
            self._redacted = piece.redacted
            self._signature = None
        if piece.signature is not None:
            self._signature = piece.signature
        return self._number


def thoughts(content: Content, omitted: dict[str, None]) -> Iterator[Thought]:
    """
    The reasoning of a message or delta beside its content. OpenRouter tells it twice, as text and as details: the
    details count where they hold the text, since only they tell blocks and signatures.
    """
    details = read_details(content.reasoning_details, omitted) if content.reasoning_details else []
    plain = content.reasoning_content or content.reasoning
    if plain and not any(detail.text for detail in details):
        yield Thought(plain)
    yield from details


def read_details(raw: object, omitted: dict[str, None]) -> list[Thought]:
    """Pieces of reasoning in OpenRouter's form. Of a kind that is not known, `reasoning_details` is omitted."""
    found = []
    for item in raw if isinstance(raw, list) else ():
        try:
            detail = msgspec.convert(item, ReasoningDetail)
        except msgspec.ValidationError:
            omitted["reasoning_details"] = None
            continue
        match _read_detail(detail):
            case None:
                omitted["reasoning_details"] = None
            case thought:
                found.append(thought)
    return found


def _read_detail(detail: ReasoningDetail) -> Thought | None:
    """None for a type that is not known and holds no text."""
    text = detail.text or detail.summary or ""
    if detail.type == "reasoning.encrypted":
        return Thought("", signatures.heard(NAME, detail.data), redacted=True, id=detail.id, index=detail.index)
    if detail.type not in {"reasoning.text", "reasoning.summary", None} and not text:
        return None
    return Thought(text, signatures.heard(NAME, detail.signature), id=detail.id, index=detail.index)


def pieces_of(content: Content, omitted: dict[str, None]) -> Iterator[str | Thought | Image]:
    """Text, reasoning and pictures in order. Mistral sends a list of parts as content."""
    if content.reasoning_content or content.reasoning or content.reasoning_details:
        yield from thoughts(content, omitted)
    if isinstance(content.content, str):
        if content.content:
            yield content.content
    elif content.content:
        for part in content.content:
            yield from _part(part, omitted)
    if content.images:
        for item in content.images if isinstance(content.images, list) else ():
            yield from _picture(item, omitted)
    note_omitted(content, omitted)


def _part(part: Mapping[str, Any], omitted: dict[str, None]) -> Iterator[str | Thought | Image]:
    match part:
        case {"thinking": str() | list() as thinking}:
            if text := thinking_text(thinking):
                yield Thought(text)
        case {"text": str() as text}:
            if text:
                yield text
        case {"type": "image_url"}:
            yield from _picture(part, omitted)
        case {"type": "reference"}:  # Mistral's
            omitted["citations"] = None
        case _:
            omitted["content_part"] = None


def thinking_text(thinking: object) -> str:
    """Of Mistral's `thinking` part: a text, or a list of text parts."""
    if isinstance(thinking, str):
        return thinking
    pieces = thinking if isinstance(thinking, list | tuple) else ()
    texts = (piece.get("text") for piece in pieces if isinstance(piece, dict))
    return "".join(text for text in texts if isinstance(text, str))


def _picture(item: object, omitted: dict[str, None]) -> Iterator[Image]:
    match item:
        case {"image_url": {"url": str() as url}} | {"image_url": str() as url}:
            pass
        case _:
            omitted["image"] = None
            return
    if not url.startswith("data:"):
        yield Image(url=url)
        return
    head, _, data = url.partition(",")
    try:
        content = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        content = b""
    if content and head.endswith(";base64"):
        yield Image(data=content, media_type=head[5:].split(";", 1)[0] or None)
    else:
        omitted["image"] = None


def note_omitted(content: Content, omitted: dict[str, None]) -> None:
    """Names what the canonical form does not carry."""
    if content.annotations:
        omitted["citations"] = None
    if content.audio:
        omitted["audio"] = None
    if content.executed_tools:
        omitted["executed_tools"] = None


def note_sources(answer: AnswerOut, omitted: dict[str, None]) -> None:
    if answer.citations:
        omitted["citations"] = None
    if answer.search_results:
        omitted["search_results"] = None


def read_logprobs(raw: object, omitted: dict[str, None]) -> tuple[TokenLogprob, ...] | None:
    """Of the text, where they are in OpenAI's form; what else there is of them is named as omitted."""
    if not isinstance(raw, dict):
        omitted["logprobs"] = None
        return None
    if raw.get("refusal"):
        omitted["refusal_logprobs"] = None
    try:
        content = msgspec.convert(raw, LogprobsOut).content
    except msgspec.ValidationError:
        omitted["logprobs"] = None
        return None
    if content is None and raw.get("token_logprobs"):
        omitted["logprobs"] = None
    return None if content is None else tuple(_token(token) for token in content)


def _token(token: TokenOut | TopTokenOut) -> TokenLogprob:
    whole = token.bytes is None or token.token.encode(errors="replace") == _as_bytes(token.bytes)
    top = token.top_logprobs if isinstance(token, TokenOut) else None
    return TokenLogprob(
        token=token.token,
        logprob=token.logprob,
        bytes=None if whole else token.bytes,
        top=tuple(map(_token, top or ())),
    )


def _as_bytes(numbers: tuple[int, ...]) -> bytes | None:
    try:
        return bytes(numbers)
    except ValueError:
        return None


def signature_in(extra_content: object) -> str | None:
    """Of a tool call, in the canonical form."""
    return signatures.heard(SIGNED_CALL, told_signature(extra_content))


def told_signature(extra_content: object) -> str | None:
    """Of a tool call, as it stands where Gemini's own compatible endpoint puts it."""
    match extra_content:
        case {"google": {"thought_signature": str(signed)}}:
            return signed
        case _:
            return None


def call_parts(call: ToolCallOut, omitted: dict[str, None]) -> tuple[str | None, str, str | None]:
    """Name, arguments and signature of a call, or of a piece of one. A custom tool's input stands for arguments."""
    signed = signature_in(call.extra_content)
    if call.extra_content and signed is None:
        omitted["extra_content"] = None
    if call.custom is not None and call.function is None:
        omitted["custom_tool_call"] = None
        return call.custom.name, call.custom.input or "", signed
    return (call.function.name if call.function else None), arguments_of(call), signed


def arguments_of(call: ToolCallOut) -> str:
    given = call.function.arguments if call.function else None
    if given is None or isinstance(given, str):
        return given or ""
    return msgspec.json.encode(given).decode()


def _part_of(value: int | None, whole: int | None) -> int | None:
    known = count(value)
    return known if known is None or whole is None else min(known, whole)


def parse_answer(headers: Mapping[str, str], body: bytes) -> ChatResponse:
    """Raises `Rejected` for an error in place of an answer, `Broken` for a body without its stop field."""
    wire = decode_answer(body)
    if wire.error is not None:
        raise failures.from_error(wire.error, headers=headers)
    if not wire.choices:
        raise Broken("the answer has no choices", code="malformed")
    usage, cost = read_usage(wire.usage)
    omitted: dict[str, None] = {}
    note_sources(wire, omitted)
    return ChatResponse(
        choices=tuple(_choice(choice, wire.id, headers, omitted) for choice in wire.choices),
        usage=usage,
        response_id=wire.id or None,
        served_model=wire.model or None,
        provider_request_id=request_id(headers),
        reported_cost_usd=read_cost(wire.cost) or cost,
        service_tier=service_tier(wire.service_tier),
        native=msgspec.Raw(body.strip()),
        native_protocol=NAME,
        omitted=tuple(omitted),
    )


def _choice(choice: ChoiceOut, response_id: str | None, headers: Mapping[str, str], omitted: dict[str, None]) -> Choice:
    native = choice.finish_reason
    if native is None:
        raise Broken("a choice of the answer has no finish reason", code="no_terminal")
    content = choice.message or Content()
    text = text_alone(content)
    pieces = list(pieces_of(content, omitted)) if text is None else []
    told = all_calls(content) if content.tool_calls or content.function_call else ()
    for reason in (native, choice.native_finish_reason):
        if reason is not None and failures.is_failed_finish(reason):
            rejected = failures.from_finish_reason(reason, headers=headers)
            rejected.after_content = bool(pieces or text or told or content.refusal)
            raise rejected
    calls = (
        tuple(
            ToolCall(
                id=call.id or made_id(response_id or "", choice.index, number),
                name=name or "",
                arguments=arguments,
                signature=signed,
            )
            for number, call in enumerate(told)
            for name, arguments, signed in (call_parts(call, omitted),)
        )
        if told
        else ()
    )
    return Choice(
        index=choice.index,
        text="".join(piece for piece in pieces if isinstance(piece, str)) if text is None else text,
        refusal=content.refusal or "",
        reasoning=joined(piece for piece in pieces if isinstance(piece, Thought)) if pieces else (),
        tool_calls=calls,
        images=tuple(piece for piece in pieces if isinstance(piece, Image)) if pieces else (),
        logprobs=None if choice.logprobs is None else read_logprobs(choice.logprobs, omitted),
        stop_reason=stop_reason(native, refused=bool(content.refusal), called=bool(calls)),
        native_stop_reason=native,
    )


def text_alone(content: Content) -> str | None:
    """Its text, where there is nothing beside it but calls and a refusal, as nearly everywhere; None elsewhere."""
    text = content.content
    if type(text) is not str or (
        content.reasoning_content
        or content.reasoning
        or content.reasoning_details
        or content.images
        or content.annotations
        or content.audio
        or content.executed_tools
    ):
        return None
    return text


def joined(pieces: Iterable[Thought]) -> tuple[Reasoning, ...]:
    """Pieces of reasoning to whole blocks."""
    blocks, found = Blocks(), list[Reasoning]()
    for piece in pieces:
        number = blocks.block_of(piece)
        if number is None:
            continue
        if number == len(found):
            found.append(Reasoning())
        known = found[number]
        found[number] = Reasoning(
            text=known.text + piece.text,
            signature=piece.signature if piece.signature is not None else known.signature,
            redacted=known.redacted or piece.redacted,
            id=piece.id or known.id,
        )
    return tuple(found)


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
    if (usage := render_usage(response.usage)) is not None:
        body["usage"] = usage
    return msgspec.json.encode(body)


def _render_choice(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": choice.text or None,
        "refusal": choice.refusal or None,
    }
    thought = "".join(block.text for block in choice.reasoning)
    if thought:
        message["reasoning_content"] = thought
    if len(choice.reasoning) > 1 or any(block.signature or block.redacted or block.id for block in choice.reasoning):
        message["reasoning_details"] = render_details(choice.reasoning)
    if choice.images:
        message["images"] = [render_image(image, number) for number, image in enumerate(choice.images)]
    if choice.tool_calls:
        message["tool_calls"] = [
            render_call(call.id, call.name, call.arguments, call.signature) for call in choice.tool_calls
        ]
    told = None
    if choice.logprobs is not None:
        told = {"content": [render_logprob(token) for token in choice.logprobs], "refusal": None}
    return {
        "index": choice.index,
        "message": message,
        "logprobs": told,
        "finish_reason": finish_reason(choice.stop_reason),
    }


def render_details(blocks: Iterable[Reasoning]) -> list[dict[str, Any]]:
    return [
        render_detail(block.text, block.signature, redacted=block.redacted, block_id=block.id, block=number)
        for number, block in enumerate(blocks)
    ]


def render_detail(
    text: str, signature: str | None, *, redacted: bool, block_id: str | None, block: int
) -> dict[str, Any]:
    """One of OpenRouter's `reasoning_details`: https://openrouter.ai/docs/use-cases/reasoning-tokens."""
    detail: dict[str, Any]
    if redacted:
        detail = {"type": "reasoning.encrypted", "data": signatures.told(NAME, signature) or ""}
    else:
        detail = {"type": "reasoning.text"}
        if text:
            detail["text"] = text
        if signature is not None:
            detail["signature"] = signatures.told(NAME, signature)
    if block_id is not None:
        detail["id"] = block_id
    return {**detail, "index": block}


def render_image(image: Image, number: int) -> dict[str, Any]:
    """As OpenRouter does: https://openrouter.ai/docs/features/multimodal/image-generation."""
    url = image.url if image.url is not None else to_data_url(image.media_type or "image/png", image.data or b"")
    return {"type": "image_url", "image_url": {"url": url}, "index": number}


def render_call(call_id: str, name: str, arguments: str, signature: str | None) -> dict[str, Any]:
    call: dict[str, Any] = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    if signature is not None:
        # Gemini's own compatible endpoint: https://ai.google.dev/gemini-api/docs/thought-signatures
        call["extra_content"] = {"google": {"thought_signature": signature}}
    return call


def render_logprob(token: TokenLogprob) -> dict[str, Any]:
    raw = token.bytes if token.bytes is not None else tuple(token.token.encode(errors="replace"))
    return {
        "token": token.token,
        "logprob": token.logprob,
        "bytes": raw,
        "top_logprobs": [
            {key: value for key, value in render_logprob(top).items() if key != "top_logprobs"} for top in token.top
        ],
    }


def finish_reason(reason: StopReason) -> str:
    """The word of this protocol for a canonical reason. What it has no word for ended without a fault: `stop`."""
    return _FINISH.get(reason, "stop")


def render_usage(usage: Usage) -> dict[str, Any] | None:
    """
    None unless both totals are known: the schema demands all three of its figures, and one that is not known is not
    told as zero. Parts that are not known are left out.
    """
    if usage.input_total is None or usage.output_total is None:
        return None
    known: dict[str, Any] = {
        "prompt_tokens": usage.input_total,
        "completion_tokens": usage.output_total,
        "total_tokens": usage.input_total + usage.output_total,
    }
    written = (usage.cache_write_5m or 0) + (usage.cache_write_1h or 0)
    details = {"cached_tokens": usage.cache_read, "cache_write_tokens": written or None}
    known["prompt_tokens_details"] = {k: v for k, v in details.items() if v is not None} or None
    if usage.reasoning is not None:
        known["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning}
    return {key: value for key, value in known.items() if value is not None}
