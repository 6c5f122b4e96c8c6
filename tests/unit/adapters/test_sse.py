from __future__ import annotations

import pytest

from adapters.sse import EventDecoder, EventTooLarge


def decoded(*pieces: bytes, limit: int = 1000) -> list[tuple[str, bytes]]:
    decoder = EventDecoder(max_event_bytes=limit)
    return [event for piece in pieces for event in decoder.feed(piece)]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["LF", "CRLF", "CR"])
def test_every_line_end_of_the_standard_ends_a_line(end):
    text = f"event: a{end}data: 1{end}data: 2{end}{end}: no{end}id: 3{end}retry: 4{end}data: 5{end}{end}"
    assert decoded(text.encode()) == [("a", b"1\n2"), ("", b"5")]


def test_a_line_end_split_between_its_two_bytes_counts_once():
    assert decoded(b"data: 1\r", b"\ndata: 2\r", b"\n\r", b"\n", b"data: 3\n\n") == [("", b"1\n2"), ("", b"3")]


def test_an_event_is_given_at_the_carriage_return_that_ends_it_without_waiting_for_more():
    assert decoded(b"data: 1\r\n\r") == [("", b"1")]


def test_only_the_line_ends_of_the_standard_split_lines():
    data = "\u2028 \u2029 \u0085 \x0b \x0c \x1c \x1e".encode()
    assert decoded(b"data: " + data + b"\n\n") == [("", data)]


@pytest.mark.parametrize("split", range(6))
def test_a_byte_order_mark_is_dropped_at_the_start_only(split):
    stream = b"\xef\xbb\xbfdata: 1\n\n\xef\xbb\xbfdata: 2\n\n"
    assert decoded(stream[:split], stream[split:]) == [("", b"1")]


def test_one_space_after_the_colon_belongs_to_the_format():
    assert decoded(b"data:1\n\ndata:  2\n\nevent:x\ndata\n\n") == [("", b"1"), ("", b" 2"), ("x", b"")]


def test_an_event_without_data_is_none_and_its_name_does_not_reach_the_next():
    assert decoded(b"event: ping\n\ndata: 1\n\n") == [("", b"1")]


def test_other_fields_and_comments_are_passed_over():
    assert decoded(b"dataset: 0\n:data: 0\nfoo\ndata: 1\n\n") == [("", b"1")]


def test_close_gives_the_event_whose_blank_line_is_missing():
    decoder = EventDecoder()
    assert decoder.feed(b"event: e\ndata: 1\ndata: 2") == []
    assert decoder.close() == [("e", b"1\n2")]
    assert decoder.close() == []


@pytest.mark.parametrize(
    "stream",
    [b"data: " + b"x" * 2000, b"data: " + b"x" * 2000 + b"\n\n", b"data: 123456789\n" * 200],
    ids=["a line without end", "a line", "many lines"],
)
@pytest.mark.parametrize("step", [1, 64, 100_000])
def test_an_event_beyond_the_limit_is_refused_however_it_comes(stream, step):
    with pytest.raises(EventTooLarge):
        decoded(*(stream[i : i + step] for i in range(0, len(stream), step)))


def test_a_comment_without_end_is_refused():
    with pytest.raises(EventTooLarge):
        decoded(*[b":" + b"x" * 100] * 20)


def test_many_small_events_never_reach_the_limit():
    assert len(decoded(*[b"data: 123456789\n\n"] * 500)) == 500


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_bare_json_value_that_breaks_off_a_stream_is_kept_where_that_is_asked_for(size):
    stream = b'data: 1\n\n{\n  "error": {\n    "code": 499\n  }\n}\n\ndata: 2\n\n'
    decoder = EventDecoder(keep_stray=True)
    events = [event for at in range(0, len(stream), size) for event in decoder.feed(stream[at : at + size])]
    assert [*events, *decoder.close()] == [("", b"1")]
    assert decoder.stray is not None
    assert decoder.stray.startswith(b'{\n  "error": {\n    "code": 499\n  }\n}\n')
    assert decoded(stream) == [("", b"1"), ("", b"2")]


def test_a_bare_json_value_is_held_within_the_limit():
    decoder = EventDecoder(max_event_bytes=100, keep_stray=True)
    decoder.feed(b"{\n")
    for _ in range(49):
        decoder.feed(b"\n\n")
    with pytest.raises(EventTooLarge):
        decoder.feed(b"\n")
