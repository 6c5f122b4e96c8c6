"""What a list of events amounts to, in a form that can be compared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from adapters.chat import (
    ChatResponse,
    Event,
    Finished,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    UsageReport,
)
from adapters.contract import StreamParser
from adapters.errors import ProviderError, Rejected
from metering.usage import NOTHING, Usage


def gathered(events: Iterable[Event]) -> dict[str, Any]:
    """Text, reasoning, refusal and calls by choice; usage, cost and ends. Joins deltas, so any batching is equal."""
    choices: dict[int, dict[str, Any]] = {}
    usage, cost, finished = NOTHING, None, None

    def choice(index: int) -> dict[str, Any]:
        return choices.setdefault(index, {"text": "", "reasoning": "", "refusal": "", "tool_calls": []})

    for event in events:
        assert finished is None, "an event after the last one"
        match event:
            case TextDelta():
                choice(event.choice)["text"] += event.text
            case ReasoningDelta():
                choice(event.choice)["reasoning"] += event.text
            case RefusalDelta():
                choice(event.choice)["refusal"] += event.text
            case ToolCallStart():
                calls = choice(event.choice)["tool_calls"]
                assert event.index == len(calls)
                calls.append({"id": event.id, "name": event.name, "arguments": ""})
            case ToolCallDelta():
                choice(event.choice)["tool_calls"][event.index]["arguments"] += event.arguments
            case UsageReport():
                usage = usage.merge(event.usage)
                cost = event.reported_cost_usd if event.reported_cost_usd is not None else cost
            case Finished():
                finished = event
    for end in finished.ends if finished else ():
        choice(end.choice)["end"] = [str(end.stop_reason), end.native_stop_reason]
    return {
        "choices": {str(index): known for index, known in sorted(choices.items())},
        "usage": told(usage),
        "cost": cost,
        "finished": finished is not None,
        "response_id": finished.response_id if finished else None,
        "served_model": finished.served_model if finished else None,
    }


def gathered_response(response: ChatResponse) -> dict[str, Any]:
    """The same of a whole answer."""
    return {
        "choices": {
            str(choice.index): {
                "text": choice.text,
                "reasoning": "".join(piece.text for piece in choice.reasoning),
                "refusal": choice.refusal,
                "tool_calls": [
                    {"id": call.id, "name": call.name, "arguments": call.arguments} for call in choice.tool_calls
                ],
                "end": [str(choice.stop_reason), choice.native_stop_reason],
            }
            for choice in response.choices
        },
        "usage": told(response.usage),
        "cost": response.reported_cost_usd,
        "finished": True,
        "response_id": response.response_id,
        "served_model": response.served_model,
    }


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
