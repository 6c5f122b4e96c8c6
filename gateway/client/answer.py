"""An answer as a program wants it, whether it came at once or in pieces. Pure: both faces use it."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from decimal import Decimal

from protos.tollbridge.v1 import gateway_pb2 as pb


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. `choices` and `outcome` are those of the contract; what is beside them is of the first choice."""

    choices: tuple[pb.Choice, ...]
    #: Who served it, the attempts, what it cost.
    outcome: pb.Outcome

    @property
    def text(self) -> str:
        return self.choices[0].text if self.choices else ""

    @property
    def tool_calls(self) -> tuple[pb.ToolCall, ...]:
        return tuple(self.choices[0].tool_calls) if self.choices else ()

    @property
    def finish_reason(self) -> str:
        """One of "stop", "length", "tool_calls", "content_filter", "refusal", "pause", "other"."""
        name = pb.FinishReason.Name(self.choices[0].finish_reason) if self.choices else "FINISH_REASON_OTHER"
        return name.removeprefix("FINISH_REASON_").lower()

    @property
    def message(self) -> pb.Message:
        """What to put behind the messages of the request to go on from here, signatures included."""
        if not self.choices:
            return pb.Message(role="assistant")
        choice = self.choices[0]
        message = pb.Message(
            role="assistant", refusal=choice.refusal, tool_calls=choice.tool_calls, reasoning=choice.reasoning
        )
        if choice.images:
            texts = [pb.Part(text=choice.text)] if choice.text else []
            message.parts.parts.extend([*texts, *(pb.Part(image=image) for image in choice.images)])
        elif choice.text:
            message.text = choice.text
        return message

    @property
    def cost_usd(self) -> Decimal | None:
        """None: not known, which is not zero."""
        return Decimal(self.outcome.cost.usd) if self.outcome.cost.HasField("usd") else None


def text_of(chunk: pb.CompletionChunk) -> str:
    """The new text of the first choice."""
    return "".join([piece.text for piece in chunk.delta.pieces if piece.choice == 0])


class Gathered:
    """The pieces of one stream, put together."""

    def __init__(self) -> None:
        self._choices: defaultdict[int, _Choice] = defaultdict(_Choice)
        self._outcome: pb.Outcome | None = None

    def add(self, chunk: pb.CompletionChunk) -> None:
        match chunk.WhichOneof("chunk"):
            case "delta":
                for piece in chunk.delta.pieces:
                    self._choices[piece.choice].add(piece)
            case "finished":
                self._outcome = chunk.finished.outcome
                for end in chunk.finished.ends:
                    self._choices[end.choice].end = end
            case _:
                pass

    def answer(self) -> Answer:
        """Raises RuntimeError where it is not the whole one."""
        if self._outcome is None:
            raise RuntimeError("the stream did not finish: there is no whole answer")
        choices = [choice.whole(index) for index, choice in sorted(self._choices.items())]
        return Answer(choices=tuple(choices), outcome=self._outcome)


class _Choice:
    def __init__(self) -> None:
        self._texts: list[str] = []
        self._refusals: list[str] = []
        self._thoughts: defaultdict[int, pb.Reasoning] = defaultdict(pb.Reasoning)
        self._thinking: defaultdict[int, list[str]] = defaultdict(list)
        self._calls: defaultdict[int, pb.ToolCall] = defaultdict(pb.ToolCall)
        self._arguments: defaultdict[int, list[str]] = defaultdict(list)
        self._images: list[pb.Image] = []
        self._logprobs: pb.Logprobs | None = None
        self.end = pb.ChoiceEnd()

    def add(self, piece: pb.Piece) -> None:
        block = piece.reasoning_block
        match piece.WhichOneof("piece"):
            case "text":
                self._texts.append(piece.text)
            case "refusal":
                self._refusals.append(piece.refusal)
            case "reasoning":
                self._thinking[block].append(piece.reasoning)
            case "reasoning_signature":
                self._thoughts[block].signature = piece.reasoning_signature
            case "reasoning_redacted":
                self._thoughts[block].redacted = piece.reasoning_redacted
            case "reasoning_id":
                self._thoughts[block].id = piece.reasoning_id
            case "tool_call":
                start = piece.tool_call
                call = self._calls[start.index]
                call.id, call.name, call.signature = start.id, start.name, start.signature
            case "tool_arguments":
                self._arguments[piece.tool_arguments.index].append(piece.tool_arguments.arguments)
            case "image":
                self._images.append(piece.image)
            case "logprobs":
                if self._logprobs is None:
                    self._logprobs = pb.Logprobs()
                self._logprobs.tokens.extend(piece.logprobs.tokens)
            case _:
                # Of a newer contract.
                pass

    def whole(self, index: int) -> pb.Choice:
        for block, pieces in self._thinking.items():
            self._thoughts[block].text = "".join(pieces)
        for at, pieces in self._arguments.items():
            self._calls[at].arguments = "".join(pieces)
        return pb.Choice(
            index=index,
            text="".join(self._texts),
            refusal="".join(self._refusals),
            reasoning=[thought for _, thought in sorted(self._thoughts.items())],
            tool_calls=[call for _, call in sorted(self._calls.items())],
            finish_reason=self.end.finish_reason,
            native_finish_reason=self.end.native_finish_reason,
            images=self._images,
            logprobs=self._logprobs,
        )
