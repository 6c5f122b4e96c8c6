"""What is told of a response that is kept, before its answer and after, whoever answered."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from adapters.chat import ChatRequest
from adapters.errors import MalformedRequest
from adapters.protocols import PROTOCOLS
from adapters.protocols.responses import kept

PROTOCOL = PROTOCOLS["responses"]
ASKED = {"instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0.5, "tools": [], "truncation": "auto"}
ANSWER = {
    "id": "resp_theirs",
    "object": "response",
    "created_at": 5,
    "status": "completed",
    "background": False,
    "model": "m-2026",
    "temperature": 1.0,
    "metadata": {},
    "instructions": None,
    "service_tier": "default",
    "unheard_of": {"x": 1.50},
    "output": [],
}


def parse(**fields: Any) -> ChatRequest:
    return PROTOCOL.parse_request(json.dumps({"model": "m", "input": "hi", **fields}).encode())


def head(request: ChatRequest) -> kept.Head:
    return kept.Head(response_id="resp_ours", created=7, model="m", repeated=kept.repeated(request))


def answered(*, own: bool, **answer: Any) -> dict[str, Any]:
    body = json.dumps(ANSWER | answer).encode()
    told: dict[str, Any] = json.loads(kept.answered(head(parse(background=True, **ASKED)), body, own=own, completed=9))
    return told


def test_only_a_wish_that_is_true_makes_one():
    assert kept.in_background(parse(background=True))
    for given in ({}, {"background": False}, {"background": None}):
        assert not kept.in_background(parse(**given))
    with pytest.raises(MalformedRequest):
        parse(background="yes")


def test_what_is_answered_is_the_request_without_how_it_is_served():
    request = parse(background=True, stream=False, stream_options={"include_obfuscation": False}, store=True, **ASKED)
    assert json.loads(kept.request_body(request)) == {"model": "m", "input": "hi", "store": True, **ASKED}
    assert kept.request_body(parse(new={"n": 1.50})).endswith(b'"new":{"n": 1.5}}')


def test_before_it_is_answered_it_repeats_what_was_asked():
    told = json.loads(kept.unanswered(head(parse(background=True, **ASKED)), "queued"))
    assert {name: told[name] for name in ASKED} == ASKED
    assert (told["id"], told["created_at"], told["model"]) == ("resp_ours", 7, "m")
    assert (told["status"], told["output"], told["error"], told["background"]) == ("queued", [], None, True)
    failed = json.loads(kept.unanswered(head(parse()), "failed", error={"code": "c", "message": "m"}))
    assert (failed["status"], failed["error"]) == ("failed", {"code": "c", "message": "m"})


def test_a_providers_own_word_stands_and_is_filled_up_where_it_has_none():
    told = answered(own=True)
    assert (told["id"], told["created_at"], told["background"], told["store"]) == ("resp_ours", 7, True, True)
    assert (told["model"], told["service_tier"], told["unheard_of"]) == ("m-2026", "default", {"x": 1.5})
    assert told["temperature"] == 1.0
    assert (told["instructions"], told["metadata"], told["truncation"]) == ("Be brief.", {"a": "b"}, "auto")
    assert told["completed_at"] == 9


def test_in_an_answer_that_we_have_rendered_what_was_asked_stands():
    told = answered(own=False)
    assert {name: told[name] for name in ASKED} == ASKED
    assert told["model"] == "m-2026"


def test_one_that_is_not_complete_was_completed_at_no_time():
    told = answered(own=True, status="incomplete", incomplete_details={"reason": "max_output_tokens"})
    assert (told["status"], told["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert "completed_at" not in told


@pytest.mark.parametrize(
    ("given", "goes_on"),
    [(None, False), (5, False), ("resp_68ab", False), (kept.ID_PREFIX + "0" * 32, True)],
)
def test_a_request_that_goes_on_from_one_of_ours_is_known(given, goes_on):
    assert kept.goes_on_from_kept(parse(previous_response_id=given)) is goes_on
    assert not kept.goes_on_from_kept(parse())


def test_a_request_that_was_kept_has_its_items_even_where_there_are_none():
    assert kept.input_items("r", msgspec.json.encode({"model": "m"})) == []
    (item,) = kept.input_items("r", msgspec.json.encode({"input": [{"role": "assistant", "content": "x"}]}))
    assert item == {
        "id": "msg_r_0",
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "x"}],
    }
