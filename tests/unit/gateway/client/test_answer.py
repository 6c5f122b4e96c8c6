"""The pieces of a stream amount to what a plain answer has."""

from __future__ import annotations

import pytest

from adapters.chat import (
    ChatResponse,
    Choice,
    ChoiceEnd,
    Delta,
    Image,
    ImageOutput,
    LogprobsDelta,
    Reasoning,
    ReasoningDelta,
    RefusalDelta,
    StopReason,
    TextDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    ToolCallStart,
)
from gateway.answer import Ended
from gateway.call import Completion
from gateway.client.answer import Answer, Gathered, text_of
from gateway.rpc import codec
from protos.tollbridge.v1 import gateway_pb2 as pb
from tests.fakes.line import BACKUP, ROUTE, outcome

LOGPROBS = (TokenLogprob(token="a", logprob=-0.5, bytes=(97,), top=()),)
DELTAS: tuple[tuple[Delta, ...], ...] = (
    (ReasoningDelta(choice=0, block=0, text="Let me "), ReasoningDelta(choice=0, block=0, text="think.")),
    (ReasoningDelta(choice=0, block=0, text="", signature="sig", id="r1"),),
    (ReasoningDelta(choice=0, block=1, text="", redacted=True, signature="hidden"),),
    (TextDelta("Hel"), TextDelta("lo"), TextDelta("Other", choice=1)),
    (LogprobsDelta(choice=0, tokens=LOGPROBS),),
    (
        ToolCallStart(choice=0, index=0, id="c1", name="f", signature="s"),
        ToolCallDelta(choice=0, index=0, arguments="{"),
    ),
    (ToolCallStart(choice=0, index=1, id="c2", name="g"),),
    (ToolCallDelta(choice=0, index=0, arguments='"a":1}'), ToolCallDelta(choice=0, index=1, arguments="{}")),
    (ImageOutput(choice=0, image=Image(data=b"png", media_type="image/png")),),
    (RefusalDelta(choice=1, text="No"), RefusalDelta(choice=1, text=".")),
)
ENDS = (
    ChoiceEnd(choice=0, stop_reason=StopReason.TOOL_CALLS, native_stop_reason="tool_calls"),
    ChoiceEnd(choice=1, stop_reason=StopReason.REFUSAL, native_stop_reason="stop"),
)
WHOLE = ChatResponse(
    choices=(
        Choice(
            index=0,
            text="Hello",
            reasoning=(
                Reasoning(text="Let me think.", signature="sig", id="r1"),
                Reasoning(text="", signature="hidden", redacted=True),
            ),
            tool_calls=(
                ToolCall(id="c1", name="f", arguments='{"a":1}', signature="s"),
                ToolCall(id="c2", name="g", arguments="{}"),
            ),
            images=(Image(data=b"png", media_type="image/png"),),
            logprobs=LOGPROBS,
            stop_reason=StopReason.TOOL_CALLS,
            native_stop_reason="tool_calls",
        ),
        Choice(index=1, text="Other", refusal="No.", stop_reason=StopReason.REFUSAL, native_stop_reason="stop"),
    )
)


def gathered() -> Answer:
    stream = Gathered()
    stream.add(codec.encode_started(ROUTE, 1))
    stream.add(codec.encode_started(BACKUP, 2))
    for deltas in DELTAS:
        stream.add(codec.encode_deltas(deltas))
    stream.add(codec.encode_ended(Ended(ends=ENDS, outcome=outcome())))
    return stream.answer()


def test_a_stream_amounts_to_the_whole_answer() -> None:
    whole = codec.encode_completion(Completion(response=WHOLE, outcome=outcome()))
    answer = gathered()
    assert list(answer.choices) == list(whole.choices)
    assert answer.outcome == whole.outcome


def test_a_stream_that_did_not_finish_is_no_answer() -> None:
    stream = Gathered()
    stream.add(codec.encode_deltas((TextDelta("Hel"),)))
    with pytest.raises(RuntimeError, match="did not finish"):
        stream.answer()


def test_an_answer_shows_its_first_choice_and_can_be_sent_back() -> None:
    answer = gathered()
    assert (answer.text, answer.finish_reason, [call.name for call in answer.tool_calls]) == (
        "Hello",
        "tool_calls",
        ["f", "g"],
    )
    asked = codec.decode_request(pb.CompletionRequest(model="m", messages=[answer.message]))
    [message] = asked.chat.messages
    assert message.reasoning == WHOLE.choices[0].reasoning
    assert message.tool_calls == WHOLE.choices[0].tool_calls
    assert len(message.content) == 2


def test_a_cost_that_is_not_known_is_none() -> None:
    unknown = pb.Outcome(cost=pb.Cost(state="unknown"))
    assert Answer(choices=(), outcome=unknown).cost_usd is None
    assert Answer(choices=(), outcome=pb.Outcome(cost=pb.Cost(state="zero", usd="0"))).cost_usd == 0


def test_the_text_of_a_chunk_is_that_of_the_first_choice() -> None:
    assert text_of(codec.encode_deltas((TextDelta("a"), TextDelta("b", choice=1), TextDelta("c")))) == "ac"
    assert text_of(codec.encode_started(ROUTE, 1)) == ""
