"""Events that differ in their text alone are read together, and mean just what they mean one by one."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from adapters.alike import Alike, Piece, learned
from adapters.chat import Event, TextDelta
from adapters.contract import Endpoint, StreamParser
from adapters.errors import ProviderError
from adapters.protocols import PROTOCOLS
from adapters.protocols.chat_completions import schema
from adapters.relay import RelayedStream
from tests.fakes.answers import joined, parsed


def new(protocol: str) -> StreamParser:
    return PROTOCOLS[protocol].new_parser(Endpoint(provider="p", protocol=protocol, base_url=""), {})


def chat_event(text: bytes) -> bytes:
    before = b'data: {"id":"x","model":"m","choices":[{"index":0,"delta":{"content":"'
    return before + text + b'"},"finish_reason":null}]}\n\n'


def message_event(text: bytes) -> bytes:
    before = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
    return before + b'"delta":{"type":"text_delta","text":"' + text + b'"}}\n\n'


CHAT_END = b'data: {"id":"x","model":"m","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
MESSAGE_START = (
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"x","model":"m"}}\n\n'
    b"event: content_block_start\n"
    b'data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}\n\n'
)
MESSAGE_STOP = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
MESSAGE_END = (
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"}}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)
FORMATS: dict[str, tuple[Callable[[bytes], bytes], bytes, bytes]] = {
    "chat_completions": (chat_event, b"", CHAT_END),
    "anthropic_messages": (message_event, MESSAGE_START, MESSAGE_STOP + MESSAGE_END),
}

#: Good texts as they stand in JSON, and what is no text, or no text by itself.
_good = st.one_of(
    st.text(max_size=6).map(lambda text: json.dumps(text)[1:-1].encode(errors="replace")),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6).map(lambda text: msgspec.json.encode(text)[1:-1]),
)
_odd = st.sampled_from(
    [
        *(b"\\", b'\\"', b'"', b"\x7f", b"\\u007f", b"\xc3", b"\xa9", b"\\ud83d", b"\\ude00", b"\\u", b"0041"),
        *(b"\x01", b"\r", b"\n", b"\r\n", b"\\n", b"\n\ndata: x", b"text of another event"),
        *(b'","refusal":"no', b'"},"finish_reason":null}]}'),
    ]
)


def outcome(protocol: str, pieces: list[bytes]) -> tuple[list[Event], ProviderError | None, int, bytes]:
    parser = new(protocol)
    relay = RelayedStream(parser)
    events, error = parsed(relay, pieces)
    return events, error, parser.payloads, (relay.take() or b"") + relay.terminal


@pytest.mark.parametrize("protocol", FORMATS)
@given(texts=st.lists(_good | _odd, min_size=2, max_size=24), data=st.data())
@settings(deadline=None)
@example(texts=[b"a", b"b", b"c\\", b"nd", b"e"], data=None)
@example(texts=[b"a", b"b", b"\xc3", b"\xa9"], data=None)
@example(texts=[b"a", b"b", b"\\ud83d", b"\\ude00"], data=None)
@example(texts=[b"a", b"b\x7f", b"c", b"\\u007fd"], data=None)
def test_they_mean_the_same_however_they_are_cut(protocol, texts, data):
    event, start, end = FORMATS[protocol]
    events = [start, *map(event, texts), end]
    body = b"".join(events)
    if data is None:
        pieces = [start + events[1], *events[2:4], b"".join(events[4:])]
    else:
        cuts = sorted(data.draw(st.sets(st.integers(1, len(body) - 1), max_size=8)))
        ends = [sum(map(len, events[:n])) for n in data.draw(st.sets(st.integers(2, len(events)), max_size=4))]
        places = sorted({0, len(body), *cuts, *ends})
        pieces = [body[a:b] for a, b in pairwise(places)]
    # Byte by byte nothing is ever read together.
    whole, whole_error, payloads, _ = outcome(protocol, [body[i : i + 1] for i in range(len(body))])
    split, split_error, split_payloads, raw = outcome(protocol, pieces)
    assert joined(split) == joined(whole)
    assert str(split_error) == str(whole_error)
    assert split_payloads == payloads
    assert body.startswith(raw)
    assert split_error is not None or raw == body


@pytest.mark.parametrize("protocol", FORMATS)
def test_what_came_together_is_one_delta_and_goes_on_as_it_came(protocol):
    event, start, end = FORMATS[protocol]
    relay = RelayedStream(new(protocol))
    relay.feed(start + event(b"a"))
    relay.take()
    together = b"".join(event(text.encode()) for text in "bcd")
    assert relay.feed(together) == [TextDelta("bcd")]
    assert relay.take() == together
    assert relay.feed(event(b"e") + end[:9]) == [TextDelta("e")]
    assert relay.take() == event(b"e")


def test_a_long_read_is_learned_from_in_its_midst_and_passed_on_up_to_its_terminal():
    texts = [f"t{i}" for i in range(50)]
    said = b"".join(chat_event(text.encode()) for text in texts)
    relay = RelayedStream(new("chat_completions"))
    events = relay.feed(said + CHAT_END + b": late\n\n")
    told = [event.text for event in events if isinstance(event, TextDelta)]
    assert (told[-1], "".join(told)) == ("".join(texts[3:]), "".join(texts))
    assert (relay.take() or b"") + relay.terminal == said + CHAT_END
    assert relay.terminal == b"data: [DONE]\n\n"
    assert relay.payloads == 52


def test_text_of_a_block_that_was_closed_is_an_error_though_it_is_like_what_came_before():
    parser = new("anthropic_messages")
    parser.feed(MESSAGE_START + message_event(b"a"))
    assert list(parser.feed(message_event(b"b") + MESSAGE_STOP)) == [TextDelta("b")]
    with pytest.raises(ProviderError, match="not open"):
        parser.feed(message_event(b"c"))


def test_no_text_comes_behind_the_proof():
    parser = new("chat_completions")
    parser.feed(chat_event(b"a"))
    parser.feed(chat_event(b"b") + CHAT_END)
    assert parser.finished
    assert not parser.feed(chat_event(b"c"))


def test_it_is_learned_only_where_the_text_is_all_that_may_change():
    def read(data: bytes) -> Piece | None:
        told = msgspec.json.decode(data)
        return Piece(told["text"], id=told.get("id"))

    alike = learned("", b'{"id":"one","text":"two"}', read)
    assert isinstance(alike, Alike)
    assert alike.read(b'data: {"id":"one","text":"a"}\n\ndata: {"id":"one","text":"b"}\n\nda') == ("ab", 2, 62)
    assert alike.read(b'data: {"id":"another","text":"a"}\n\n') == ("", 0, 0)
    # The text stands twice, and the last of them is another field.
    assert learned("", b'{"text":"two","id":"two"}', read) is None
    assert learned("", b'{"text":""}', read) is None
    assert learned("", b'{"text":"written \\u006fdd"}', read) is None


def test_a_chunk_of_text_alone_has_a_word_on_every_field_that_is_read():
    for short, full in (
        (schema.TextChunk, schema.AnswerOut),
        (schema.TextChoice, schema.ChoiceOut),
        (schema.TextContent, schema.Content),
    ):
        assert set(short.__struct_fields__) == set(full.__struct_fields__)
