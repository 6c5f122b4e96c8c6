"""What is left of a request whose parameters a route cannot be told."""

from __future__ import annotations

from adapters.chat import ChatRequest, Image, Message, Role, Text
from adapters.protocols import PROTOCOLS
from gateway.needs import Capability, field_of, lacking, without

ASKED = PROTOCOLS["chat_completions"].parse_request(
    b'{"model":"m","messages":[{"role":"user","content":"x"}],"logprobs":true,"top_logprobs":2,'
    b'"reasoning_effort":"low","user":"u","seed":1}'
)


def test_parameters_go_from_the_canonical_and_the_native_form_alike() -> None:
    left, names = lacking(ASKED, frozenset({Capability.LOGPROBS, Capability.REASONING, Capability.IMAGES}))
    assert names == ("logprobs", "top_logprobs", "reasoning_effort")
    assert (left.logprobs, left.top_logprobs, left.reasoning_effort, left.seed) == (None, None, None, 1)
    assert left.native is not None
    assert set(left.native.fields) == {"model", "messages", "user", "seed"}
    assert without(ASKED, ["end_user"]).native.fields.keys() == ASKED.native.fields.keys() - {"user"}  # type: ignore[union-attr]


def test_what_was_not_asked_for_is_not_told_as_dropped() -> None:
    left, names = lacking(without(ASKED, ["logprobs", "top_logprobs"]), frozenset({Capability.LOGPROBS}))
    assert names == ()
    assert left.seed == 1


def test_a_part_that_shows_a_need_is_named_by_its_path():
    picture = Image(url="https://x/a.png")
    chat = ChatRequest(messages=(Message(role=Role.USER, content=(Text(text="see"), picture)),), n=2)
    assert field_of(chat, Capability.IMAGES) == "messages[0].content[1]"
    assert field_of(chat, Capability.N) == "n"
