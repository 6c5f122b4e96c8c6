"""
Events to the stream of a caller, as OpenAI sends it: every piece announced, told in deltas, and repeated whole when it
is done; the last event repeats the whole response.

A text ends where something else begins. Calls, and blocks of reasoning that still wait for their signature, stay open
until the end: their pieces may come interleaved.
"""

from __future__ import annotations

from typing import Any

import msgspec

from adapters import openai_errors
from adapters.chat import (
    Finished,
    ImageOutput,
    LogprobsDelta,
    ReasoningDelta,
    RefusalDelta,
    StopReason,
    TextDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    ToolCallStart,
    UsageReport,
)
from adapters.contract import AnswerHead, Batch, ToldError
from adapters.protocols.responses import answers
from metering.usage import NOTHING

_encode = msgspec.json.Encoder().encode


def render_error(error: ToldError) -> bytes:
    """OpenAI's envelope, with our stable code in it."""
    return _encode({"error": openai_errors.told(error)})


class _Part:
    """A part of a message, or the summary of a block, as it is told."""

    __slots__ = ("index", "kind", "logprobs", "pieces")

    def __init__(self, index: int, kind: str) -> None:
        self.index = index
        self.kind = kind
        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprob] = []


class _Message:
    __slots__ = ("content", "id", "part", "place")

    def __init__(self, place: int, item_id: str) -> None:
        self.place = place
        self.id = item_id
        self.content: list[dict[str, Any]] = []
        self.part: _Part | None = None


class _Thought:
    __slots__ = ("id", "part", "place", "redacted", "signature", "summary")

    def __init__(self, place: int, item_id: str) -> None:
        self.place = place
        self.id = item_id
        self.summary: list[str] = []
        self.part: _Part | None = None
        self.signature: str | None = None
        self.redacted = False


class _Call:
    __slots__ = ("call_id", "id", "name", "pieces", "place", "signature")

    def __init__(self, place: int, item_id: str, start: ToolCallStart) -> None:
        self.place = place
        self.id = item_id
        self.call_id = start.id
        self.name = start.name
        self.signature = start.signature
        self.pieces: list[str] = []


class EventRenderer:
    """One stream; a `StreamRenderer`. It tells the first choice: this protocol has no other."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._out: list[bytes] = []
        self._number = 0
        self._begun = False
        self._over = False
        self._usage = NOTHING
        #: What is done, by its place.
        self._output: dict[int, dict[str, Any]] = {}
        self._places = 0
        self._message: _Message | None = None
        self._refused = False
        #: Blocks of reasoning that are open, by their number.
        self._thoughts: dict[int, _Thought] = {}
        #: The one whose text goes on.
        self._thinking: _Thought | None = None
        self._calls: dict[int, _Call] = {}
        #: Text that waits for what may join it.
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def feed(self, batch: Batch) -> bytes:
        for event in batch:
            if self._over:
                break
            if isinstance(event, UsageReport):
                self._usage = self._usage.merge(event.usage)
                continue
            self._begin()
            if isinstance(event, Finished):
                self._finish(event)
            elif event.choice == 0:
                self._delta(event)
        self._say()
        return self._taken()

    def fail(self, error: ToldError) -> bytes:
        """
        Two events, as OpenAI sends them: clients look for the one or for the other. Our code is in the first; the
        second has room only for the few codes of its schema.
        """
        self._say()
        self._begin()
        inner = openai_errors.told(error)
        told = {name: inner[name] for name in ("code", "message", "param")}
        self._event("error", **told, error=inner)
        failed = {"code": _failed_code(error.status), "message": error.message}
        self._event("response.failed", response=self._response("failed", error=failed))
        self._over = True
        return self._taken()

    # -------------------------------------------------------------- events

    def _event(self, kind: str, **fields: Any) -> None:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        self._out.append(b"event: " + kind.encode() + b"\ndata: " + _encode(data) + b"\n\n")

    def _taken(self) -> bytes:
        out = b"".join(self._out)
        self._out.clear()
        return out

    def _response(self, status: str, *, reason: str | None = None, error: dict[str, Any] | None = None) -> Any:
        head = self._head
        return answers.response_object(
            response_id=head.id,
            model=head.model,
            created=head.created,
            status=status,
            reason=reason,
            output=[self._output[place] for place in sorted(self._output)],
            usage=self._usage,
            error=error,
        )

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._event("response.created", response=self._response("in_progress"))
            self._event("response.in_progress", response=self._response("in_progress"))

    def _place(self, prefix: str) -> tuple[int, str]:
        place = self._places
        self._places += 1
        return place, answers.item_name(prefix, self._head.id, place)

    def _delta(
        self,
        event: TextDelta | ReasoningDelta | RefusalDelta | ToolCallStart | ToolCallDelta | ImageOutput | LogprobsDelta,
    ) -> None:
        match event:
            case TextDelta():
                self._text.append(event.text)
            case LogprobsDelta():
                self._logprobs += event.tokens
            case _:
                self._say()
        match event:
            case RefusalDelta():
                self._refused = True
                message, part = self._message_part("refusal")
                part.pieces.append(event.text)
                self._event("response.refusal.delta", **_at(message, part), delta=event.text)
            case ReasoningDelta():
                self._think(event)
            case ToolCallStart():
                self._call(event)
            case ToolCallDelta():
                self._arguments(event)
            case ImageOutput():
                self._image(event)
            case _:
                pass

    def _added(self, place: int, item: dict[str, Any]) -> None:
        self._event("response.output_item.added", output_index=place, item=item)

    def _done(self, place: int, item: dict[str, Any]) -> None:
        self._output[place] = item
        self._event("response.output_item.done", output_index=place, item=item)

    # ---------------------------------------------------------------- text

    def _say(self) -> None:
        """The text that waits, in one delta."""
        if not self._text and not self._logprobs:
            return
        text, logprobs = "".join(self._text), list(self._logprobs)
        self._text.clear()
        self._logprobs.clear()
        message, part = self._message_part("output_text")
        part.pieces.append(text)
        part.logprobs += logprobs
        self._event(
            "response.output_text.delta",
            **_at(message, part),
            delta=text,
            logprobs=[answers.render_logprob(token) for token in logprobs],
        )

    def _message_part(self, kind: str) -> tuple[_Message, _Part]:
        """The open part of the open message, opened where it is not."""
        message = self._message
        if message is None:
            self._end_summary()
            message = self._message = _Message(*self._place("msg"))
            self._added(message.place, answers.message_item(message.id, [], status="in_progress"))
        part = message.part
        if part is not None and part.kind == kind:
            return message, part
        self._end_part(message)
        part = message.part = _Part(len(message.content), kind)
        self._event("response.content_part.added", **_at(message, part), part=_content(part))
        return message, part

    def _end_part(self, message: _Message) -> None:
        part = message.part
        if part is None:
            return
        message.part = None
        content = _content(part)
        message.content.append(content)
        if part.kind == "refusal":
            self._event("response.refusal.done", **_at(message, part), refusal=content["refusal"])
        else:
            told = {"text": content["text"], "logprobs": content["logprobs"]}
            self._event("response.output_text.done", **_at(message, part), **told)
        self._event("response.content_part.done", **_at(message, part), part=content)

    def _end_message(self, status: str = "completed") -> None:
        message = self._message
        if message is not None:
            self._message = None
            self._end_part(message)
            self._done(message.place, answers.message_item(message.id, message.content, status=status))

    # ----------------------------------------------------------- reasoning

    def _think(self, event: ReasoningDelta) -> None:
        thought = self._thoughts.get(event.block)
        if thought is None:
            if not event.text and event.signature is None:
                return
            self._end_message()
            self._end_summary()
            place, item_id = self._place(answers.MADE_THOUGHT)
            thought = self._thoughts[event.block] = _Thought(place, event.id or item_id)
            self._added(place, answers.reasoning_item(thought.id, (), None, status="in_progress"))
        thought.redacted = thought.redacted or event.redacted
        if event.text:
            self._end_message()
            part = self._summary_part(thought)
            part.pieces.append(event.text)
            self._event("response.reasoning_summary_text.delta", **_of(thought, part), delta=event.text)
        if event.signature is not None:
            thought.signature = event.signature
            self._end_thought(event.block)

    def _summary_part(self, thought: _Thought) -> _Part:
        if thought.part is None:
            self._end_summary()
            self._thinking = thought
            thought.part = _Part(len(thought.summary), "summary_text")
            empty = {"type": "summary_text", "text": ""}
            self._event("response.reasoning_summary_part.added", **_of(thought, thought.part), part=empty)
        return thought.part

    def _end_summary(self) -> None:
        """What follows ends the text of a block, though the block may still wait for its signature."""
        thought = self._thinking
        if thought is None or thought.part is None:
            return
        part, thought.part, self._thinking = thought.part, None, None
        text = "".join(part.pieces)
        thought.summary.append(text)
        self._event("response.reasoning_summary_text.done", **_of(thought, part), text=text)
        whole = {"type": "summary_text", "text": text}
        self._event("response.reasoning_summary_part.done", **_of(thought, part), part=whole)

    def _end_thought(self, block: int, status: str = "completed") -> None:
        thought = self._thoughts.pop(block)
        if not thought.summary and not thought.redacted:
            self._summary_part(thought)
        if thought.part is not None:
            self._end_summary()
        item = answers.reasoning_item(thought.id, thought.summary, thought.signature, status=status)
        self._done(thought.place, item)

    # ---------------------------------------------------- calls and pictures

    def _call(self, event: ToolCallStart) -> None:
        self._end_message()
        self._end_summary()
        place, item_id = self._place("fc")
        call = self._calls[event.index] = _Call(place, item_id, event)
        self._added(place, _call_item(call, "in_progress"))

    def _arguments(self, event: ToolCallDelta) -> None:
        call = self._calls.get(event.index)
        if call is not None:
            call.pieces.append(event.arguments)
            self._event(
                "response.function_call_arguments.delta",
                item_id=call.id,
                output_index=call.place,
                delta=event.arguments,
            )

    def _end_call(self, call: _Call, status: str) -> None:
        item = _call_item(call, status)
        told = {"name": call.name, "arguments": item["arguments"]}
        self._event("response.function_call_arguments.done", item_id=call.id, output_index=call.place, **told)
        self._done(call.place, item)

    def _image(self, event: ImageOutput) -> None:
        self._end_message()
        self._end_summary()
        place, item_id = self._place("ig")
        added = {"id": item_id, "type": "image_generation_call", "status": "in_progress", "result": None}
        self._added(place, added)
        self._done(place, answers.image_item(item_id, event.image))

    # ----------------------------------------------------------------- end

    def _finish(self, event: Finished) -> None:
        self._say()
        stop = next((end.stop_reason for end in event.ends if end.choice == 0), StopReason.OTHER)
        status, reason = answers.ending(stop)
        if stop is StopReason.REFUSAL and not self._refused:
            # It refused and said nothing of it: an empty refusal is how that is told.
            self._message_part("refusal")
        for block in list(self._thoughts):
            self._end_thought(block)
        self._end_message(status)
        for call in self._calls.values():
            self._end_call(call, status)
        self._event(f"response.{status}", response=self._response(status, reason=reason))
        self._over = True


def _failed_code(status: int) -> str:
    if status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if 400 <= status < 500 else "server_error"


def _at(message: _Message, part: _Part) -> dict[str, Any]:
    return {"item_id": message.id, "output_index": message.place, "content_index": part.index}


def _of(thought: _Thought, part: _Part) -> dict[str, Any]:
    return {"item_id": thought.id, "output_index": thought.place, "summary_index": part.index}


def _content(part: _Part) -> dict[str, Any]:
    said = "".join(part.pieces)
    return answers.refusal_part(said) if part.kind == "refusal" else answers.text_part(said, part.logprobs)


def _call_item(call: _Call, status: str) -> dict[str, Any]:
    told = ToolCall(id=call.call_id, name=call.name, arguments="".join(call.pieces), signature=call.signature)
    return answers.call_item(call.id, told, status=status)
