"""
What of an answer a caller's format cannot say.

A format without a place for pictures, or without a word for how an answer ended, would else tell its caller a smaller
answer, or another end, as if that were all. Each protocol says what it cannot tell (`WireProtocol.untold`), in the
words below; whoever answers a caller keeps an `Untold` beside the answer and passes on what it found.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from adapters.chat import (
    ChatResponse,
    Event,
    Finished,
    ImageOutput,
    LogprobsDelta,
    ReasoningDelta,
    RefusalDelta,
    StopReason,
    ToolCallDelta,
    ToolCallStart,
)
from metering.usage import Usage

IMAGE: Final = "image"
LOGPROBS: Final = "logprobs"
#: A second choice, and those after it.
CHOICE: Final = "choice"
#: The signature of a call.
CALL_SIGNATURE: Final = "call_signature"
REASONING: Final = "reasoning"
#: The signature of a thought.
SIGNATURE: Final = "signature"
#: That the usage is not known: the format has figures all the same, and zeros stand in their place.
NO_USAGE: Final = "no_usage"
#: A call whose arguments are no JSON object, in a whole answer: the format has them as one.
BROKEN_CALL: Final = "broken_call"

_WORD = re.compile(r"[\w.:-]{1,64}", re.ASCII)


def ending(reason: StopReason) -> str:
    """The word for: that an answer ended so."""
    return f"end:{reason.value}"


def endings(*reasons: StopReason) -> frozenset[str]:
    return frozenset(map(ending, reasons))


def is_object(arguments: str) -> bool:
    """Arguments of a call are a JSON object, or none at all."""
    if not arguments.strip():
        return True
    try:
        return isinstance(msgspec.json.decode(arguments), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


def breaks(untold: frozenset[str], response: ChatResponse) -> bool:
    """The format would have to leave out a call of the answer, and has no word for that either."""
    return BROKEN_CALL in untold and any(
        choice.stop_reason is not StopReason.LENGTH and not all(is_object(call.arguments) for call in choice.tool_calls)
        for choice in response.choices
    )


class Untold:
    """What was seen of one answer that a format does not tell."""

    __slots__ = ("_cannot", "_ends", "_kinds", "_over", "_refused")

    def __init__(self, cannot: frozenset[str]) -> None:
        self._cannot = cannot
        self._kinds: dict[str, None] = {}
        self._ends: dict[str, None] = {}
        self._refused = False
        self._over = False

    def note(self, event: Event) -> None:
        """
        Takes note of an event, in the order they came. The arguments of a call only where they are whole: a stream
        hands on the pieces of them as they come.
        """
        match event:
            case ImageOutput():
                self._seen(IMAGE)
            case LogprobsDelta():
                self._seen(LOGPROBS)
            case ToolCallStart(signature=str()):
                self._seen(CALL_SIGNATURE)
            case ReasoningDelta():
                if event.text:
                    self._seen(REASONING)
                if event.signature is not None:
                    self._seen(SIGNATURE)
            case ToolCallDelta() if BROKEN_CALL in self._cannot and not is_object(event.arguments):
                self._seen(BROKEN_CALL)
            case RefusalDelta():
                self._refused = True
            case Finished():
                self._over = True
                for end in event.ends:
                    if end.choice:
                        self._seen(CHOICE)
                    # The words of a refusal say by themselves that it is one.
                    if ending(end.stop_reason) in self._cannot and not (
                        end.stop_reason is StopReason.REFUSAL and self._refused
                    ):
                        native = end.native_stop_reason
                        self._ends[native if _WORD.fullmatch(native) else "a word of its own"] = None
            case _:
                pass

    def _seen(self, kind: str) -> None:
        if kind in self._cannot:
            self._kinds[kind] = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of content, each once."""
        return tuple(self._kinds)

    @property
    def ends(self) -> tuple[str, ...]:
        """The provider's own words for endings that are told as another."""
        return tuple(self._ends)

    def usage_is_invented(self, usage: Usage) -> bool:
        """An answer is over, and a total that is not known is told as a figure."""
        return self._over and NO_USAGE in self._cannot and (usage.input_total is None or usage.output_total is None)
