"""Answers of Gemini: what is common to a whole one and to chunks, and the whole ones as they are read."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from adapters.body import ABSENT, given, raw_text
from adapters.chat import (
    ChatResponse,
    Choice,
    Event,
    Image,
    ImageOutput,
    LogprobsDelta,
    Reasoning,
    ReasoningDelta,
    StopReason,
    TextDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    ToolCallStart,
)
from adapters.classify import request_id
from adapters.errors import Broken
from adapters.figures import service_tier
from adapters.protocols.gemini import failures, schema, signatures
from adapters.protocols.gemini.partial import PartialCall
from metering.usage import Usage

NAME = "gemini"

#: Native words for how a candidate ended. The rest are OTHER, or a failure.
_STOP: dict[str, StopReason] = {
    "STOP": StopReason.STOP,
    "MAX_TOKENS": StopReason.LENGTH,
    "SAFETY": StopReason.CONTENT_FILTER,
    "RECITATION": StopReason.CONTENT_FILTER,
    "LANGUAGE": StopReason.CONTENT_FILTER,
    "BLOCKLIST": StopReason.CONTENT_FILTER,
    "PROHIBITED_CONTENT": StopReason.CONTENT_FILTER,
    "SPII": StopReason.CONTENT_FILTER,
    "MODEL_ARMOR": StopReason.CONTENT_FILTER,
    "IMAGE_SAFETY": StopReason.CONTENT_FILTER,
    "IMAGE_PROHIBITED_CONTENT": StopReason.CONTENT_FILTER,
    "IMAGE_RECITATION": StopReason.CONTENT_FILTER,
    "IMAGE_OTHER": StopReason.CONTENT_FILTER,
}
#: The word a canonical reason is told by, where no native one fits.
_FINISH: dict[StopReason, str] = {
    StopReason.LENGTH: "MAX_TOKENS",
    StopReason.CONTENT_FILTER: "SAFETY",
}

#: Kinds of content that the canonical form does not carry, by the field they come in.
_OMITTED_PARTS = (
    ("executable_code", "executable_code"),
    ("code_execution_result", "code_execution_result"),
    ("file_data", "file"),
    ("tool_call", "server_tool_call"),
    ("tool_response", "server_tool_response"),
    ("function_response", "function_response"),
)
_OMITTED_OF_CANDIDATE = (
    ("citation_metadata", "citations"),
    ("grounding_metadata", "grounding"),
    ("url_context_metadata", "url_context"),
    ("continuation_token", "continuation_token"),
)
_KNOWN_OF_PART = frozenset(
    {
        *(field.encode_name for field in msgspec.structs.fields(schema.Part)),
        "partMetadata",
        "videoMetadata",
        "mediaResolution",
    }
)

_EMPTY = frozenset({b"", b"null", b"{}", b"[]", b'""'})

_chunk = msgspec.json.Decoder(schema.Chunk)
_loose_chunk = msgspec.json.Decoder(schema.LooseChunk)
_logprobs = msgspec.json.Decoder(schema.LogprobsResult)
_grounding = msgspec.json.Decoder(schema.Grounding)


#: https://ai.google.dev/api/generate-content#Modality. A document counts as text, which it costs as much as.
_PROMPT_PARTS: Final = {"IMAGE": "input_image", "AUDIO": "input_audio", "VIDEO": "input_video"}
_CACHE_PARTS: Final = {"IMAGE": "cache_read_image", "AUDIO": "cache_read_audio"}
_CANDIDATES_PARTS: Final = {"IMAGE": "output_image", "AUDIO": "output_audio"}


def decode_chunk(data: bytes | msgspec.Raw) -> schema.Chunk:
    """
    An answer or a chunk. Figures that are no figures cost only themselves, not the answer. Raises `Broken` (code
    "malformed").
    """
    try:
        return _chunk.decode(data)
    except msgspec.ValidationError:
        pass
    except (msgspec.DecodeError, RecursionError) as error:
        raise Broken("what came is not JSON", code="malformed") from error
    try:
        loose = _loose_chunk.decode(data)
    except msgspec.DecodeError as error:
        raise Broken("what came is no answer of this protocol", code="malformed") from error
    return schema.Chunk(**{name: getattr(loose, name) for name in loose.__struct_fields__})


def stop_reason(native: str, *, called: bool) -> StopReason:
    """`called`: STOP is also said where a function was called."""
    reason = _STOP.get(native, StopReason.OTHER)
    return StopReason.TOOL_CALLS if called and reason is StopReason.STOP else reason


def finish_reason(reason: StopReason, native: str) -> str:
    """The word of this protocol for a canonical reason: the native one where it is one of its own."""
    if _STOP.get(native) is reason:
        return native
    return _FINISH.get(reason, "STOP")


def served_tier(headers: Mapping[str, str], figures: Figures) -> str | None:
    """
    The tier that served: in a header of the answer, and in its usage.
    https://ai.google.dev/gemini-api/docs/priority-inference
    """
    return _tier(headers.get("x-gemini-service-tier")) or figures.tier


def _tier(told: object) -> str | None:
    """Vertex AI has its tiers in the words of its traffic: "ON_DEMAND_PRIORITY"."""
    tier = service_tier(told)
    return None if tier is None else tier.removeprefix("service_tier_").removeprefix("on_demand_")


class Figures:
    """The usage as it is told so far: every chunk may tell it again, in part."""

    __slots__ = ("_cached", "_candidates", "_parts", "_prompt", "_thoughts", "_tool_use", "tier", "usage")

    def __init__(self) -> None:
        self._prompt: int | None = None
        self._cached: int | None = None
        self._candidates: int | None = None
        self._thoughts: int | None = None
        self._tool_use: int | None = None
        #: The parts that are no text, by their names in `Usage`.
        self._parts: dict[str, int] = {}
        self.tier: str | None = None
        self.usage = Usage()

    def take(self, wire: schema.UsageMetadata) -> bool:
        """Whether anything is new. A figure that is no count is no figure, and a zero never overwrites one."""
        changed = False
        if (new := wire.prompt_token_count) != self._prompt and _counts(self._prompt, new):
            self._prompt, changed = new, True
        if (new := wire.cached_content_token_count) != self._cached and _counts(self._cached, new):
            self._cached, changed = new, True
        if (new := wire.candidates_token_count) != self._candidates and _counts(self._candidates, new):
            self._candidates, changed = new, True
        if (new := wire.thoughts_token_count) != self._thoughts and _counts(self._thoughts, new):
            self._thoughts, changed = new, True
        if (new := wire.tool_use_prompt_token_count) != self._tool_use and _counts(self._tool_use, new):
            self._tool_use, changed = new, True
        for names, told in (
            (_PROMPT_PARTS, wire.prompt_tokens_details),
            (_CACHE_PARTS, wire.cache_tokens_details),
            (_CANDIDATES_PARTS, wire.candidates_tokens_details),
        ):
            for part in told or ():
                name = names.get(part.modality or "")
                new = part.token_count
                if name is None or new is None or new == (known := self._parts.get(name)):
                    continue
                if _counts(known, new):
                    self._parts[name], changed = new, True
        self.tier = _tier(wire.service_tier) or _tier(wire.traffic_type) or self.tier
        if changed:
            total_in, cached = self._prompt, self._cached
            if self._tool_use is not None:
                total_in = self._tool_use + (total_in or 0)
            total_out, thoughts = self._candidates, self._thoughts
            if thoughts is not None:
                total_out = thoughts + (total_out or 0)
            self.usage = Usage(
                input_total=total_in,
                # A part is never more than its whole.
                cache_read=cached if cached is None or total_in is None else min(cached, total_in),
                output_total=total_out,
                reasoning=thoughts,
                input_image=self._parts.get("input_image"),
                input_audio=self._parts.get("input_audio"),
                input_video=self._parts.get("input_video"),
                cache_read_image=self._parts.get("cache_read_image"),
                cache_read_audio=self._parts.get("cache_read_audio"),
                output_image=self._parts.get("output_image"),
                output_audio=self._parts.get("output_audio"),
            )
        return changed


def _counts(known: int | None, new: int | None) -> bool:
    """The later figure is one, and takes the place of the one that is known."""
    return new is not None and (new > 0 or (new == 0 and known is None)) and new < 2**31


class Grounded(msgspec.Struct, frozen=True):
    """What was looked up for a candidate. The usage does not tell it, and it is billed beside the tokens."""

    searches: int = 0
    #: Places were looked up, too.
    maps: bool = False

    def and_later(self, raw: msgspec.Raw) -> Grounded:
        """A stream tells it again, in part or whole."""
        if (known := given(raw)) is None:
            return self
        try:
            wire = _grounding.decode(known)
        except (msgspec.DecodeError, RecursionError):
            return self
        return Grounded(
            searches=max(self.searches, len(wire.web_search_queries or ())),
            maps=self.maps or any(given(chunk.maps) is not None for chunk in wire.grounding_chunks or ()),
        )


NOT_GROUNDED: Final = Grounded()
#: Of these a prompt that is answered with searches is billed once, however many there were; of later ones each search.
_BILLED_BY_PROMPT = re.compile(r"(?:models/)?gemini-[12](?![0-9])")


def grounding_of(readers: Iterable[Reader], model: str | None) -> dict[str, int] | None:
    """
    What was looked up, by kind and as it is billed; None: nothing.
    https://ai.google.dev/gemini-api/docs/google-search#pricing
    """
    found = [reader.grounded for reader in readers]
    searches = sum(one.searches for one in found)
    if searches and _BILLED_BY_PROMPT.match(model or ""):
        searches = 1
    units = {"web_search": searches, "maps": int(any(one.maps for one in found))}
    return {kind: count for kind, count in units.items() if count} or None


class Reader:
    """
    One candidate's parts, as they come, to events. Consecutive thoughts are one block, until one is signed.

    `omitted` is shared by the candidates of an answer: what the canonical form does not carry, in the order it came.
    """

    __slots__ = (
        "_calls",
        "_images",
        "_index",
        "_length",
        "_looked_into",
        "_omitted",
        "_open",
        "_partial",
        "block",
        "finish",
        "grounded",
        "said",
    )

    def __init__(self, index: int, omitted: dict[str, None]) -> None:
        self._index = index
        self._omitted = omitted
        self.finish: str | None = None
        #: Of the last block of thought, from 0.
        self.block = -1
        self._open = False
        #: Characters of text so far.
        self._length = 0
        self._images = 0
        self._calls = 0
        self._partial: PartialCall | None = None
        self._looked_into: bytes | None = None
        #: What the provider looked up for it.
        self.grounded = NOT_GROUNDED
        self.said = False

    @property
    def called(self) -> bool:
        return self._calls > 0

    @property
    def pending(self) -> bool:
        """A call whose arguments are still to come."""
        return self._partial is not None

    def take(self, wire: schema.Candidate, payload: bytes, response_id: str | None, events: list[Event]) -> None:
        """One chunk of it. Raises `Broken`."""
        self.finish = wire.finish_reason
        if self.finish == "FINISH_REASON_UNSPECIFIED":
            self.finish = None
        if wire.content is not None and wire.content.parts:
            for part in wire.content.parts:
                text = part.text
                if text and not part.thought and part.thought_signature is None:
                    # What nearly every part is.
                    self._length += len(text)
                    self._open = False
                    self.said = True
                    events.append(TextDelta(text, self._index))
                elif text != "" or part.thought_signature:
                    self._take_part(part, payload, response_id, events)
        if wire.logprobs_result is not ABSENT and (tokens := _read_logprobs(wire.logprobs_result)):
            events.append(LogprobsDelta(tokens, self._index))
        if not (
            wire.citation_metadata
            is wire.grounding_metadata
            is wire.url_context_metadata
            is wire.continuation_token
            is ABSENT
        ):
            self.grounded = self.grounded.and_later(wire.grounding_metadata)
            for field, kind in _OMITTED_OF_CANDIDATE:
                if bytes(getattr(wire, field)) not in _EMPTY:
                    self._omitted[kind] = None

    def _take_part(self, part: schema.Part, payload: bytes, response_id: str | None, events: list[Event]) -> None:
        signature, own = signatures.heard(part.thought_signature) if part.thought_signature else (None, False)
        if part.function_call is not None:
            marked = signatures.of_call(signature) if signature and own else signature
            self._take_call(part.function_call, marked, payload, response_id, events)
        elif part.inline_data is not None:
            self._take_blob(part.inline_data, signature, events, thought=part.thought is True)
        elif part.thought:
            if part.text or signature:
                marked = signatures.of_thought(signature) if signature and own else signature
                self._think(part.text or "", marked, events)
        elif any(self._omit(kind) for field, kind in _OMITTED_PARTS if given(getattr(part, field)) is not None):
            return
        elif part.text is not None or signature:
            start, self._length = self._length, self._length + len(part.text or "")
            self.said, self._open = True, False
            if part.text:
                events.append(TextDelta(part.text, self._index))
            if signature:
                self._sign(signatures.of_text(signature, start, self._length) if own else signature, events)
        else:
            self._omit_unknown(payload)

    def _omit(self, kind: str) -> bool:
        self._omitted[kind] = None
        self.said = True
        self._open = False
        return True

    def _think(self, text: str, signature: str | None, events: list[Event]) -> None:
        if not self._open:
            self.block += 1
        self._open = signature is None
        self.said = True
        events.append(ReasoningDelta(text, self._index, signature, self.block))

    def _sign(self, marked: str, events: list[Event]) -> None:
        self._open = False
        self.block += 1
        events.append(ReasoningDelta("", self._index, marked, self.block))

    def _take_blob(self, blob: schema.Blob, signature: str | None, events: list[Event], *, thought: bool) -> None:
        kind = (blob.mime_type or "").partition("/")[0]
        if thought or kind != "image":
            self._omit("thought_image" if thought else kind if kind in {"audio", "video", "text"} else "inline_data")
            return
        self.said, self._open = True, False
        events.append(ImageOutput(Image(data=blob.data, media_type=blob.mime_type), self._index))
        if signature:
            self._sign(signatures.of_image(signature, self._images), events)
        self._images += 1

    def _take_call(
        self,
        wire: schema.FunctionCall,
        signature: str | None,
        payload: bytes,
        response_id: str | None,
        events: list[Event],
    ) -> None:
        self.said, self._open = True, False
        if self._partial is not None and wire.name:
            self.end_call(payload, response_id, events)
        if self._partial is None and (wire.partial_args or wire.will_continue):
            self._partial = PartialCall(wire.name or "", wire.id, signature)
        if self._partial is not None:
            for piece in wire.partial_args or ():
                self._partial.take(piece)
            if not wire.will_continue:
                self.end_call(payload, response_id, events)
            return
        args = given(wire.args)
        arguments = "{}" if args is None else raw_text(args)
        self._call(wire.id, wire.name or "", arguments, signature, payload, response_id, events)

    def end_call(self, payload: bytes, response_id: str | None, events: list[Event], *, whole: bool = True) -> None:
        """The call in pieces is over. `whole` is False where it was cut off: its arguments then stay open."""
        call, self._partial = self._partial, None
        if call is not None:
            arguments = call.arguments() if whole else call.arguments()[:-1]
            self._call(call.id, call.name, arguments, call.signature, payload, response_id, events)

    def _call(
        self,
        call_id: str | None,
        name: str,
        arguments: str,
        signature: str | None,
        payload: bytes,
        response_id: str | None,
        events: list[Event],
    ) -> None:
        number, self._calls = self._calls, self._calls + 1
        if not call_id:
            call_id = f"call_{_seed(payload, response_id)}_{self._index}_{number}"
        events.append(ToolCallStart(number, call_id, name, self._index, signature))
        if arguments:
            events.append(ToolCallDelta(number, arguments, self._index))

    def _omit_unknown(self, payload: bytes) -> None:
        """A part without a field that is known: empty, or of a kind that is not. Looks into a payload once."""
        if payload is self._looked_into:
            return
        self._looked_into = payload
        try:
            content = msgspec.json.decode(payload)
        except (msgspec.DecodeError, RecursionError) as error:
            raise Broken("what came is not JSON", code="malformed") from error
        for candidate in content.get("candidates") or ():
            for part in (candidate.get("content") or {}).get("parts") or ():
                if not _KNOWN_OF_PART.issuperset(part):
                    self._omit("unknown_part")


def _seed(payload: bytes, response_id: str | None) -> str:
    """For the id of a call that has none: the same for the same call of the same answer, and for no other."""
    return response_id[-32:] if response_id else hashlib.sha256(payload).hexdigest()[:24]


def _read_logprobs(raw: msgspec.Raw) -> tuple[TokenLogprob, ...]:
    try:
        wire = _logprobs.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return ()
    tops: Sequence[schema.TopCandidates] = wire.top_candidates
    return tuple(
        TokenLogprob(
            token=chosen.token,
            logprob=chosen.log_probability,
            top=tuple(
                TokenLogprob(token=top.token, logprob=top.log_probability)
                for top in (tops[i].candidates if i < len(tops) else ())
            ),
        )
        for i, chosen in enumerate(wire.chosen_candidates)
    )


def blocked_by(chunk: schema.Chunk) -> str | None:
    """Why the prompt was not answered at all."""
    reason = chunk.prompt_feedback.block_reason if chunk.prompt_feedback else None
    return reason if reason != "BLOCKED_REASON_UNSPECIFIED" else None


def parse_answer(headers: Mapping[str, str], body: bytes) -> ChatResponse:
    """Raises `Rejected` for an error in place of an answer, `Broken` for a body without its stop field."""
    body = body.strip()
    chunk = decode_chunk(body)
    if (error := given(chunk.error)) is not None:
        raise failures.from_error(error, headers=headers)
    blocked = blocked_by(chunk)
    if not chunk.candidates and blocked is None:
        raise Broken("the answer has no candidates", code="malformed")
    figures, omitted = Figures(), dict[str, None]()
    if chunk.usage_metadata is not None:
        figures.take(chunk.usage_metadata)
    choices, readers = [], []
    for wire in chunk.candidates or ():
        reader, events = Reader(wire.index, omitted), list[Event]()
        readers.append(reader)
        reader.take(wire, body, chunk.response_id, events)
        native = reader.finish or blocked
        if native is None or reader.pending:
            raise Broken("a candidate of the answer has no finish reason", code="no_terminal")
        if native in failures.FAILED_FINISH:
            rejected = failures.from_finish_reason(native, headers=headers)
            rejected.after_content = reader.said
            raise rejected
        reason = stop_reason(native, called=reader.called) if reader.finish else StopReason.CONTENT_FILTER
        choices.append(_gathered(wire.index, events, reason, native))
    if not choices:
        choices.append(Choice(index=0, stop_reason=StopReason.CONTENT_FILTER, native_stop_reason=blocked or ""))
    return ChatResponse(
        choices=tuple(choices),
        usage=msgspec.structs.replace(figures.usage, units=grounding_of(readers, chunk.model_version)),
        response_id=chunk.response_id or None,
        served_model=chunk.model_version or None,
        provider_request_id=request_id(headers),
        service_tier=served_tier(headers, figures),
        native=msgspec.Raw(body),
        native_protocol=NAME,
        omitted=tuple(omitted),
    )


def _gathered(index: int, events: Sequence[Event], reason: StopReason, native: str) -> Choice:
    texts: list[str] = []
    blocks: dict[int, Reasoning] = {}
    calls: list[dict[str, Any]] = []
    images: list[Image] = []
    logprobs: tuple[TokenLogprob, ...] | None = None
    for event in events:
        match event:
            case TextDelta():
                texts.append(event.text)
            case ReasoningDelta():
                known = blocks.get(event.block, Reasoning())
                blocks[event.block] = msgspec.structs.replace(
                    known, text=known.text + event.text, signature=event.signature or known.signature
                )
            case ToolCallStart():
                calls.append({"id": event.id, "name": event.name, "arguments": "", "signature": event.signature})
            case ToolCallDelta():
                calls[event.index]["arguments"] += event.arguments
            case ImageOutput():
                images.append(event.image)
            case LogprobsDelta():
                logprobs = event.tokens
            case _:
                pass
    return Choice(
        index=index,
        text="".join(texts),
        reasoning=tuple(blocks.values()),
        tool_calls=tuple(ToolCall(**call) for call in calls),
        images=tuple(images),
        logprobs=logprobs,
        stop_reason=reason,
        native_stop_reason=native,
    )
