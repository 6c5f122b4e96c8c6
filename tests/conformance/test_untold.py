"""
What a format does not tell its callers of an answer it says it does not tell, and nothing else: found by rendering
each answer with the thing and without it.
"""

from __future__ import annotations

import itertools

import msgspec
import pytest

from adapters import telling
from adapters.chat import (
    ChatResponse,
    Choice,
    Finished,
    Image,
    Reasoning,
    StopReason,
    TokenLogprob,
    ToolCall,
    as_events,
)
from adapters.contract import AnswerHead
from adapters.telling import Untold
from metering.usage import NOTHING, Usage
from tests.fakes.protocols import EVERY

_HEAD = AnswerHead(id="x1", model="m", created=1767225600)
_CALL = ToolCall(id="call_1", name="look", arguments="{}")
_PLAIN = Choice(index=0, text="Hi", tool_calls=(_CALL,), stop_reason=StopReason.STOP, native_stop_reason="strange")
_ANSWER = ChatResponse(
    choices=(_PLAIN,), usage=Usage(input_total=0, output_total=0), response_id="x1", served_model="m"
)


def _with(**fields: object) -> ChatResponse:
    return msgspec.structs.replace(_ANSWER, choices=(msgspec.structs.replace(_PLAIN, **fields),))


#: What is not told, and an answer with it beside one without.
THINGS = {
    telling.IMAGE: (_with(images=(Image(data=b"\x89PNG", media_type="image/png"),)), _ANSWER),
    telling.LOGPROBS: (_with(logprobs=(TokenLogprob(token="Hi", logprob=-0.5),)), _ANSWER),
    telling.CHOICE: (
        msgspec.structs.replace(_ANSWER, choices=(_PLAIN, msgspec.structs.replace(_PLAIN, index=1))),
        _ANSWER,
    ),
    telling.CALL_SIGNATURE: (
        _with(tool_calls=(msgspec.structs.replace(_CALL, signature="gemini:call:c2lnbmVk"),)),
        _ANSWER,
    ),
    telling.REASONING: (_with(reasoning=(Reasoning(text="Hm."),)), _ANSWER),
    telling.SIGNATURE: (
        _with(reasoning=(Reasoning(text="Hm.", signature="responses:c2lnbmVk"),)),
        _with(reasoning=(Reasoning(text="Hm."),)),
    ),
    telling.NO_USAGE: (msgspec.structs.replace(_ANSWER, usage=NOTHING), _ANSWER),
    **{
        telling.ending(reason): (_with(stop_reason=reason), _ANSWER)
        for reason in StopReason
        # That tools were called the calls themselves say.
        if reason not in {StopReason.STOP, StopReason.TOOL_CALLS}
    },
}


def _whole(protocol: str, answer: ChatResponse) -> bytes:
    return EVERY[protocol].render_response(answer)


def _streamed(protocol: str, answer: ChatResponse) -> bytes:
    return EVERY[protocol].new_renderer(_HEAD).feed(list(as_events(answer)))


@pytest.mark.parametrize("protocol", EVERY)
@pytest.mark.parametrize("rendered", [_whole, _streamed])
def test_what_makes_no_difference_to_what_is_told_is_named_and_nothing_else_is(protocol, rendered, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1767225600.0)
    lost = {
        word
        for word, (with_it, without) in THINGS.items()
        if rendered(protocol, with_it) == rendered(protocol, without)
    }
    assert lost == EVERY[protocol].untold - {telling.BROKEN_CALL}


@pytest.mark.parametrize("word", THINGS)
def test_what_a_format_cannot_tell_is_noted_where_an_answer_has_it_and_only_there(word):
    with_it, without = THINGS[word]

    def noted(answer: ChatResponse, cannot: frozenset[str]) -> bool:
        untold = Untold(cannot)
        for event in as_events(answer):
            untold.note(event)
        return bool(untold.kinds or untold.ends or untold.usage_is_invented(answer.usage))

    assert noted(with_it, frozenset({word}))
    assert not noted(without, frozenset({word}))
    assert not noted(with_it, frozenset(THINGS) - set(itertools.chain([word], [telling.REASONING])))


def test_the_providers_own_word_for_an_end_is_told_where_it_is_one():
    untold = Untold(frozenset({telling.ending(StopReason.OTHER), telling.ending(StopReason.PAUSE)}))
    for reason, native in ((StopReason.PAUSE, "pause_turn"), (StopReason.OTHER, "x\r\ny"), (StopReason.STOP, "stop")):
        answer = _with(stop_reason=reason, native_stop_reason=native)
        untold.note(next(event for event in as_events(answer) if isinstance(event, Finished)))
    assert untold.ends == ("pause_turn", "a word of its own")


def test_a_refusal_in_words_needs_no_word_for_its_end():
    untold = Untold(frozenset({telling.ending(StopReason.REFUSAL)}))
    for event in as_events(_with(stop_reason=StopReason.REFUSAL, refusal="No.")):
        untold.note(event)
    assert untold.ends == ()
