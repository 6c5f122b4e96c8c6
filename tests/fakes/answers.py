"""What a list of events amounts to, in a form that can be compared."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from adapters.chat import (
    ChatResponse,
    Event,
    Finished,
    Image,
    ImageOutput,
    LogprobsDelta,
    Reasoning,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    ToolCallStart,
    UsageReport,
)
from adapters.contract import StreamParser
from adapters.errors import ProviderError, Rejected
from metering.usage import NOTHING, Usage


class _Gathered:
    """One choice as its deltas add up."""

    def __init__(self) -> None:
        self.text = ""
        self.refusal = ""
        self.blocks: dict[int, Reasoning] = {}
        self.calls: list[ToolCall] = []
        self.images: list[Image] = []
        self.logprobs: tuple[TokenLogprob, ...] | None = None

    def think(self, event: ReasoningDelta) -> None:
        known = self.blocks.get(event.block, Reasoning())
        assert event.block in {*self.blocks, len(self.blocks)}, "blocks are counted from 0"
        assert event.signature is None or known.signature is None, "a second signature of one block"
        self.blocks[event.block] = Reasoning(
            text=known.text + event.text,
            signature=event.signature or known.signature,
            redacted=event.redacted or known.redacted,
            id=event.id or known.id,
        )


def joined(events: Iterable[Event]) -> list[Event]:
    """The same events, with text that follows text of its choice in one: how much comes in one event, reads decide."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta) and event.choice == last.choice:
            found[-1] = TextDelta(last.text + event.text, event.choice)
        else:
            found.append(event)
    return found


def gathered(events: Iterable[Event]) -> dict[str, Any]:
    """
    Text, reasoning, refusal and calls by choice; usage, cost and ends. Joins deltas, so any batching is equal. What is
    rare (signed reasoning, pictures, log probabilities, `omitted`) has a key only where it is there.
    """
    choices: dict[int, _Gathered] = {}
    usage, cost, finished = NOTHING, None, None

    for event in events:
        assert finished is None, "an event after the last one"
        if isinstance(event, UsageReport):
            usage = usage.merge(event.usage)
            cost = event.reported_cost_usd if event.reported_cost_usd is not None else cost
            continue
        if isinstance(event, Finished):
            finished = event
            continue
        choice = choices.setdefault(event.choice, _Gathered())
        match event:
            case TextDelta():
                choice.text += event.text
            case ReasoningDelta():
                choice.think(event)
            case RefusalDelta():
                choice.refusal += event.text
            case ToolCallStart():
                assert event.index == len(choice.calls)
                choice.calls.append(ToolCall(id=event.id, name=event.name, arguments="", signature=event.signature))
            case ToolCallDelta():
                call = choice.calls[event.index]
                choice.calls[event.index] = msgspec.structs.replace(call, arguments=call.arguments + event.arguments)
            case ImageOutput():
                choice.images.append(event.image)
            case LogprobsDelta():
                choice.logprobs = (choice.logprobs or ()) + event.tokens
    ends = {end.choice: end for end in finished.ends} if finished else {}
    for index in ends:
        choices.setdefault(index, _Gathered())
    told_choices = {}
    for index, choice in sorted(choices.items()):
        told_choices[str(index)] = _told_choice(
            choice.text,
            tuple(choice.blocks.values()),
            choice.refusal,
            choice.calls,
            choice.images,
            choice.logprobs,
        )
        if index in ends:
            told_choices[str(index)]["end"] = [str(ends[index].stop_reason), ends[index].native_stop_reason]
    return {
        "choices": told_choices,
        "usage": told(usage),
        "cost": cost,
        "finished": finished is not None,
        "response_id": finished.response_id if finished else None,
        "served_model": finished.served_model if finished else None,
        **({"omitted": list(finished.omitted)} if finished and finished.omitted else {}),
    }


def gathered_response(response: ChatResponse) -> dict[str, Any]:
    """The same of a whole answer."""
    return {
        "choices": {
            str(choice.index): _told_choice(
                choice.text, choice.reasoning, choice.refusal, choice.tool_calls, choice.images, choice.logprobs
            )
            | {"end": [str(choice.stop_reason), choice.native_stop_reason]}
            for choice in response.choices
        },
        "usage": told(response.usage),
        "cost": response.reported_cost_usd,
        "finished": True,
        "response_id": response.response_id,
        "served_model": response.served_model,
        **({"omitted": list(response.omitted)} if response.omitted else {}),
    }


def _told_choice(
    text: str,
    reasoning: Sequence[Reasoning],
    refusal: str,
    calls: Sequence[ToolCall],
    images: Sequence[Image],
    logprobs: Sequence[TokenLogprob] | None,
) -> dict[str, Any]:
    told_choice: dict[str, Any] = {
        "text": text,
        "reasoning": "".join(block.text for block in reasoning),
        "refusal": refusal,
        "tool_calls": [
            {"id": call.id, "name": call.name, "arguments": call.arguments}
            | ({"signature": call.signature} if call.signature is not None else {})
            for call in calls
        ],
    }
    if len(reasoning) > 1 or any(block.signature or block.redacted or block.id for block in reasoning):
        told_choice["blocks"] = [msgspec.to_builtins(block) for block in reasoning]
    if images:
        told_choice["images"] = [
            {"url": image.url, "media_type": image.media_type}
            | ({"data": base64.b64encode(image.data).decode()} if image.data is not None else {})
            for image in images
        ]
    if logprobs is not None:
        told_choice["logprobs"] = msgspec.json.decode(msgspec.json.encode(logprobs))
    return told_choice


def told(usage: Usage) -> dict[str, int]:
    return {name: value for name in usage.__struct_fields__ if (value := getattr(usage, name)) is not None}


def told_error(error: ProviderError) -> dict[str, Any]:
    told: dict[str, Any] = {
        "kind": type(error).__name__,
        "code": error.code,
        "class": str(error.error_class),
        "status": error.status,
    }
    if isinstance(error, Rejected):
        told |= {
            "retry_after_s": error.retry_after_s,
            "rate_limited": error.rate_limited,
            "credential_fault": error.credential_fault,
        }
    return told


def parsed(parser: StreamParser, pieces: Iterable[bytes]) -> tuple[list[Event], ProviderError | None]:
    """Everything a stream gives, however it ends; what came behind its terminal is put before it."""
    events: list[Event] = []
    error: ProviderError | None = None
    try:
        for piece in pieces:
            events += parser.feed(piece)
        while batch := parser.close():
            events += batch
    except ProviderError as failed:
        error = failed
    return sorted(events, key=lambda event: isinstance(event, Finished)), error
