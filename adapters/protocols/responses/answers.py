"""Answers of Responses: what is common to a whole one and to events, and the whole ones both ways."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from adapters import signatures
from adapters.body import ABSENT, Wire
from adapters.chat import ChatResponse, Choice, Image, Reasoning, StopReason, TokenLogprob, ToolCall
from adapters.classify import request_id
from adapters.errors import Broken, ProviderError, Rejected
from adapters.figures import cost_usd, count, service_tier
from adapters.protocols.responses import failures
from adapters.protocols.responses.schema import (
    CallOut,
    Kind,
    LogprobOut,
    MessageOut,
    PartOut,
    PictureOut,
    ReasoningOut,
    ResponseOut,
    UsageOut,
)
from metering.usage import NOTHING, Usage

NAME = "responses"

#: How the id of a block of reasoning begins that its provider gave none: no provider of this protocol knows it.
MADE_THOUGHT = "rs_made"

#: What is between two parts of a summary, which the canonical form has as one text.
PARTS_APART = "\n\n"

_INCOMPLETE: dict[str, StopReason] = {
    "max_output_tokens": StopReason.LENGTH,
    "max_tokens": StopReason.LENGTH,
    "content_filter": StopReason.CONTENT_FILTER,
}
#: Why a rendered answer is incomplete. An answer that ended for any other reason is completed.
_INCOMPLETE_WORDS: dict[StopReason, str] = {
    StopReason.LENGTH: "max_output_tokens",
    StopReason.CONTENT_FILTER: "content_filter",
    StopReason.PAUSE: "pause",
}

_MOST_OMITTED = 16
_WORD = re.compile(r"[a-z][a-z0-9_.-]{0,63}")

_response = msgspec.json.Decoder(ResponseOut)
_usage = msgspec.json.Decoder(UsageOut)

#: Items that stand for a use of a tool of the provider's own that is billed by the call.
_BILLED_ITEMS: Final = {
    "web_search_call": "web_search",
    "file_search_call": "file_search",
    "code_interpreter_call": "code_interpreter",
    "image_generation_call": "image_generation",
}
_kind = msgspec.json.Decoder(Kind)
_logprobs = msgspec.json.Decoder(tuple[LogprobOut, ...])

ItemOut = MessageOut | CallOut | ReasoningOut | PictureOut
_ITEMS: Final[dict[str, msgspec.json.Decoder[Any]]] = {
    "message": msgspec.json.Decoder(MessageOut),
    "function_call": msgspec.json.Decoder(CallOut),
    "reasoning": msgspec.json.Decoder(ReasoningOut),
    "image_generation_call": msgspec.json.Decoder(PictureOut),
}


class Omitted:
    """Kinds of content that the canonical form does not carry: each once, few, and words only."""

    __slots__ = ("_words",)

    def __init__(self) -> None:
        self._words: list[str] = []

    def add(self, word: str) -> None:
        if word not in self._words and len(self._words) < _MOST_OMITTED and _WORD.fullmatch(word):
            self._words.append(word)

    def words(self) -> tuple[str, ...]:
        return tuple(self._words)


# ------------------------------------------------------------------- reading


def decode_response(data: bytes | msgspec.Raw) -> ResponseOut:
    """Raises `Broken` (code "malformed")."""
    try:
        return _response.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Broken("what came is no response", code="malformed") from error


def read_item(raw: msgspec.Raw) -> tuple[str, ItemOut | None]:
    """An output item and its kind; no item where the kind is one that is not read. Raises `Broken`."""
    try:
        kind = _kind.decode(raw).type or ""
        decoder = _ITEMS.get(kind)
        return kind, None if decoder is None else decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Broken("an item of the answer is not what it says it is", code="malformed") from error


def parts_of(message: MessageOut) -> Sequence[PartOut]:
    content = message.content
    return (PartOut(type="output_text", text=content),) if isinstance(content, str) else content or ()


def reasoning_of(wire: ReasoningOut, omitted: Omitted) -> Reasoning | None:
    """A block of reasoning; None where there is neither a word to read nor anything to send back."""
    parts = wire.content or wire.summary or ()
    if wire.content and wire.summary:
        omitted.add("reasoning_summary")
    text = PARTS_APART.join(part.text for part in parts)
    if not text and wire.encrypted_content is None:
        return None
    signature = signatures.heard(NAME, wire.encrypted_content)
    return Reasoning(text=text, signature=signature, redacted=not parts, id=wire.id or None)


def picture_of(wire: PictureOut) -> Image | None:
    if not wire.result:
        return Image(url=wire.image_url) if wire.image_url else None
    try:
        data = base64.b64decode(wire.result, validate=True)
    except ValueError:
        return None
    return Image(data=data, media_type=f"image/{wire.output_format or 'png'}")


def read_logprobs(raw: msgspec.Raw) -> tuple[TokenLogprob, ...]:
    """Empty for what is none: OpenAI sends an empty list with every piece of text."""
    if raw is ABSENT or bytes(raw) in {b"[]", b"null"}:
        return ()
    try:
        return tokens_of(_logprobs.decode(raw))
    except (msgspec.DecodeError, RecursionError):
        return ()


def tokens_of(tokens: Iterable[LogprobOut]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            token=token.token,
            logprob=token.logprob,
            bytes=_odd_bytes(token.token, token.bytes),
            top=tuple(
                TokenLogprob(token=top.token, logprob=top.logprob, bytes=_odd_bytes(top.token, top.bytes))
                for top in token.top_logprobs or ()
            ),
        )
        for token in tokens
    )


def _odd_bytes(token: str, told: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Only those of a token that is no whole character: the others say nothing that the token does not."""
    return None if told is None or told == tuple(token.encode()) else told


def read_usage(raw: msgspec.Raw) -> tuple[Usage, str | None]:
    """Usage, and the cost in USD where the provider tells it there. What is no figure costs only itself."""
    if raw is ABSENT:
        return NOTHING, None
    try:
        wire = _usage.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return NOTHING, None
    total_in, total_out = count(wire.input_tokens), count(wire.output_tokens)
    inputs, outputs = wire.input_tokens_details, wire.output_tokens_details
    usage = Usage(
        input_total=total_in,
        cache_read=_part(inputs.cached_tokens if inputs else None, total_in),
        cache_write_5m=_part(inputs.cache_write_tokens if inputs else None, total_in),
        output_total=total_out,
        reasoning=_part(outputs.reasoning_tokens if outputs else None, total_out),
        input_image=_part(inputs.image_tokens if inputs else None, total_in),
        input_audio=_part(inputs.audio_tokens if inputs else None, total_in),
        output_image=_part(outputs.image_tokens if outputs else None, total_out),
        output_audio=_part(outputs.audio_tokens if outputs else None, total_out),
    )
    return usage, cost_usd(wire.cost)


class Units:
    """
    Uses of the provider's own tools that are billed by the call. The usage does not tell them: each is an item.
    https://platform.openai.com/docs/pricing
    """

    __slots__ = ("_counted",)

    def __init__(self) -> None:
        self._counted: dict[str, int] = {}

    def note(self, kind: str | None, raw: msgspec.Raw) -> None:
        """An output item."""
        unit = _BILLED_ITEMS.get(kind or "")
        # Of a search on the web only the searching itself is billed, not what is looked at afterwards.
        if unit is not None and (unit != "web_search" or _action(raw) in {None, "search"}):
            self._counted[unit] = self._counted.get(unit, 0) + 1

    def added_to(self, usage: Usage) -> Usage:
        return msgspec.structs.replace(usage, units=dict(self._counted)) if self._counted else usage


class _Acting(Wire):
    type: str | None = None


class _Action(Wire):
    action: _Acting | None = None


_acting = msgspec.json.Decoder(_Action)


def _action(raw: msgspec.Raw) -> str | None:
    try:
        action = _acting.decode(raw).action
    except (msgspec.DecodeError, RecursionError):
        return None
    return None if action is None else action.type


def _part(value: int | None, whole: int | None) -> int | None:
    """A part is never more than its whole: Azure and OpenRouter were seen to say so."""
    part = count(value)
    return part if part is None or whole is None else min(part, whole)


def failure_of(wire: ResponseOut, headers: Mapping[str, str]) -> ProviderError | None:
    """Why this response is no answer, if it is none: it failed, or is not at its end."""
    if wire.error is not None:
        return failures.from_error(wire.error, headers=headers)
    if wire.status in {"failed", "cancelled"}:
        return failures.ended(wire.status, headers=headers)
    if wire.status not in {"completed", "incomplete"}:
        return Broken("the response has no status that ends it", code="no_terminal")
    return None


def stop_reason(wire: ResponseOut, *, refused: bool, called: bool) -> tuple[StopReason, str]:
    """Of a response that is completed or incomplete, and the provider's own word for it."""
    if wire.status == "incomplete":
        reason = (wire.incomplete_details.reason if wire.incomplete_details else None) or "incomplete"
        return _INCOMPLETE.get(reason, StopReason.OTHER), reason
    if called:
        return StopReason.TOOL_CALLS, "completed"
    return StopReason.REFUSAL if refused else StopReason.STOP, "completed"


def made_id(seed: str, index: int) -> str:
    """An id for a tool call whose provider gave none: the same for the same call of the same answer."""
    return f"call_{seed[-32:]}_{index}"


class _Items:
    """Output items as they add up to the one choice there is."""

    def __init__(self, response_id: str) -> None:
        self._response_id = response_id
        self.texts: list[str] = []
        self.refusals: list[str] = []
        self.reasoning: list[Reasoning] = []
        self.calls: list[ToolCall] = []
        self.images: list[Image] = []
        self.logprobs: list[TokenLogprob] = []
        self.omitted = Omitted()
        self.units = Units()

    def take(self, raw: msgspec.Raw) -> None:
        kind, item = read_item(raw)
        self.units.note(kind, raw)
        match item:
            case MessageOut():
                for part in parts_of(item):
                    self._take_part(part)
            case CallOut():
                call_id = item.call_id or item.id or made_id(self._response_id, len(self.calls))
                call = ToolCall(
                    id=call_id, name=item.name or "", arguments=item.arguments or "", signature=item.signature
                )
                self.calls.append(call)
            case ReasoningOut():
                thought = reasoning_of(item, self.omitted)
                if thought is not None:
                    self.reasoning.append(thought)
            case PictureOut():
                image = picture_of(item)
                if image is None:
                    self.omitted.add(kind)
                else:
                    self.images.append(image)
            case None:
                self.omitted.add(kind or "unknown")

    def _take_part(self, part: PartOut) -> None:
        if part.type == "refusal":
            self.refusals.append(part.refusal or "")
        elif part.text is not None:
            self.texts.append(part.text)
            self.logprobs += read_logprobs(part.logprobs)
            if part.annotations:
                self.omitted.add("citations")
        else:
            self.omitted.add(part.type or "unknown")


def parse_answer(headers: Mapping[str, str], body: bytes) -> ChatResponse:
    """Raises `Rejected` for a response that failed, `Broken` for one that is not at its end."""
    wire = decode_response(body)
    failure = failure_of(wire, headers)
    if failure is not None:
        if isinstance(failure, Broken) or not wire.output:
            raise failure
        raise after_content(failure)
    items = _Items(wire.id or "")
    for raw in wire.output or ():
        items.take(raw)
    reason, native = stop_reason(wire, refused=bool(items.refusals), called=bool(items.calls))
    usage, cost = read_usage(wire.usage)
    return ChatResponse(
        choices=(
            Choice(
                index=0,
                text="".join(items.texts),
                refusal="".join(items.refusals),
                reasoning=tuple(items.reasoning),
                tool_calls=tuple(items.calls),
                images=tuple(items.images),
                logprobs=tuple(items.logprobs) or None,
                stop_reason=reason,
                native_stop_reason=native,
            ),
        ),
        usage=items.units.added_to(usage),
        response_id=wire.id or None,
        served_model=wire.model or None,
        provider_request_id=request_id(headers),
        reported_cost_usd=cost_usd(wire.cost) or cost,
        service_tier=service_tier(wire.service_tier),
        native=msgspec.Raw(body.strip()),
        native_protocol=NAME,
        omitted=items.omitted.words(),
    )


def after_content(failure: ProviderError) -> ProviderError:
    if isinstance(failure, Rejected):
        failure.after_content = True
    return failure


# ------------------------------------------------------------------- writing


def render_answer(response: ChatResponse) -> bytes:
    """A `response` object; the provider's own, untouched, where it spoke this protocol."""
    if response.native is not None and response.native_protocol == NAME:
        return bytes(response.native)
    choice = response.choices[0]
    own = response.response_id or ""
    status, reason = ending(choice.stop_reason)
    output: list[dict[str, Any]] = []
    for thought in choice.reasoning:
        if thought.text or thought.signature is not None:
            item_id = thought.id or item_name(MADE_THOUGHT, own, len(output))
            parts = () if thought.redacted else (thought.text,)
            output.append(reasoning_item(item_id, parts, thought.signature, status="completed"))
    content: list[dict[str, Any]] = []
    if choice.text:
        content.append(text_part(choice.text, choice.logprobs or ()))
    if choice.refusal or choice.stop_reason is StopReason.REFUSAL:
        content.append(refusal_part(choice.refusal))
    if content:
        output.append(message_item(item_name("msg", own, len(output)), content, status=status))
    output += [image_item(item_name("ig", own, len(output) + n), image) for n, image in enumerate(choice.images)]
    for call in choice.tool_calls:
        output.append(call_item(item_name("fc", own, len(output)), call, status=status))
    return msgspec.json.encode(
        response_object(
            response_id=own,
            model=response.served_model or "",
            created=int(time.time()),
            status=status,
            reason=reason,
            output=output,
            usage=response.usage,
        )
    )


def ending(reason: StopReason) -> tuple[str, str | None]:
    """The status of a response that ended so, and why it is incomplete, if it is."""
    word = _INCOMPLETE_WORDS.get(reason)
    return ("completed", None) if word is None else ("incomplete", word)


def item_name(prefix: str, own: str, index: int) -> str:
    """An id of an item; OpenAI's own begin so, and are refused by it where they do not."""
    return f"{prefix}_{own[-40:]}_{index}"


def response_object(
    *,
    response_id: str,
    model: str,
    created: int,
    status: str,
    output: Sequence[dict[str, Any]],
    reason: str | None = None,
    usage: Usage = NOTHING,
    error: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Every field that the published schema demands. What it repeats of a request is told as its default."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": status,
        "background": False,
        "error": error,
        "incomplete_details": None if reason is None else {"reason": reason},
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "model": model,
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "usage": render_usage(usage),
        "user": None,
    }


def render_usage(usage: Usage) -> dict[str, Any] | None:
    """
    None unless both totals are known. The schema has no word for a part that is not known, and its readers fail where
    the figure is missing: it is told as zero.
    """
    if usage.input_total is None or usage.output_total is None:
        return None
    return {
        "input_tokens": usage.input_total,
        "input_tokens_details": {
            "cached_tokens": usage.cache_read or 0,
            "cache_write_tokens": (usage.cache_write_5m or 0) + (usage.cache_write_1h or 0),
        },
        "output_tokens": usage.output_total,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning or 0},
        "total_tokens": usage.input_total + usage.output_total,
    }


def text_part(text: str, logprobs: Iterable[TokenLogprob] = ()) -> dict[str, Any]:
    return {
        "type": "output_text",
        "annotations": [],
        "logprobs": [render_logprob(token) for token in logprobs],
        "text": text,
    }


def refusal_part(refusal: str) -> dict[str, Any]:
    return {"type": "refusal", "refusal": refusal}


def render_logprob(token: TokenLogprob) -> dict[str, Any]:
    return {**_one_logprob(token), "top_logprobs": [_one_logprob(top) for top in token.top]}


def _one_logprob(token: TokenLogprob) -> dict[str, Any]:
    told = token.bytes if token.bytes is not None else token.token.encode()
    return {"token": token.token, "bytes": list(told), "logprob": token.logprob}


def message_item(item_id: str, content: Sequence[dict[str, Any]], *, status: str) -> dict[str, Any]:
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": content}


def reasoning_item(item_id: str, parts: Iterable[str], signature: str | None, *, status: str) -> dict[str, Any]:
    """
    Readable reasoning is told as a summary, where every client looks. No part at all says that there never was any to
    read: an empty one, that this block just has none.
    """
    item: dict[str, Any] = {
        "id": item_id,
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": text} for text in parts],
        "status": status,
    }
    if signature is not None:
        item["encrypted_content"] = signatures.told(NAME, signature)
    return item


def call_item(item_id: str, call: ToolCall, *, status: str) -> dict[str, Any]:
    """With the provider's signature of the call, where it has one, in a field of our own: it must come back."""
    item = {
        "id": item_id,
        "type": "function_call",
        "status": status,
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
    }
    return item if call.signature is None else {**item, "signature": call.signature}


def image_item(item_id: str, image: Image) -> dict[str, Any]:
    """A picture that has an address only keeps it, in a field of our own: this protocol has a place for data alone."""
    item: dict[str, Any] = {"id": item_id, "type": "image_generation_call", "status": "completed", "result": None}
    if image.data is None:
        return {**item, "image_url": image.url}
    return {
        **item,
        "result": base64.b64encode(image.data).decode(),
        "output_format": (image.media_type or "image/png").removeprefix("image/"),
    }
