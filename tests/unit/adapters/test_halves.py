"""Characters that a provider cuts in two."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from adapters.halves import Halves, mended

PIECES = st.lists(
    st.sampled_from(
        [
            "a",
            "\\",
            '"',
            "\n",
            "é",
            "漢",
            "\\ud83d",
            "\U0001f600",
            "\ud83d",
            "\ude00",
            "\ud83e\udd16",
            "ud83d",
            "\ufffd",
        ]
    ),
    max_size=8,
).map("".join)
#: JSON escapes each half by itself, and pairs too.
TEXTS = st.lists(PIECES, min_size=1, max_size=6)


def event(text: str, *, name: str = "", end: str = "\n\n") -> bytes:
    head = f"event: {name}{end[: len(end) // 2]}" if name else ""
    return f"{head}data: {json.dumps({'text': text, 'of': 'a'})}{end}".encode()


def through(data: bytes, cuts: Sequence[int]) -> bytes:
    halves = Halves()
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return b"".join(halves.feed(data[a:b]) for a, b in pairwise(edges) if a < b) + halves.take()


def said(stream: bytes) -> list[str]:
    """Read by a decoder that takes no half."""
    lines = [line for line in stream.replace(b"\r", b"\n").split(b"\n") if line.startswith(b"data: ")]
    return [msgspec.json.decode(line[6:])["text"] for line in lines]


@given(TEXTS, st.lists(st.integers(0, 10_000), max_size=6), st.sampled_from(["\n\n", "\r\n\r\n", "\r\r"]))
@example(["\ud83d", "\ude00"], [], "\n\n")
@example(["a\\\ud83d", "\ude00b"], [30], "\r\n\r\n")
def test_however_a_stream_is_cut_every_event_is_json(texts: list[str], cuts: list[int], end: str):
    stream = b"".join(event(text, end=end) for text in texts)
    told = said(through(stream, cuts))
    assert len(told) == len(texts)
    for text in told:
        text.encode()


@given(st.text(min_size=1), st.lists(st.integers(0, 10_000), max_size=4), st.data())
@example("\U0001f600", [], None)
def test_a_text_is_the_same_wherever_it_was_cut(text: str, cuts: list[int], data: st.DataObject | None):
    units = text.encode("utf-16-be")
    at = 1 if data is None else data.draw(st.integers(0, len(units) // 2))
    parts = [units[: 2 * at], units[2 * at :]]
    events = [event(part.decode("utf-16-be", "surrogatepass")) for part in parts]
    assert "".join(said(through(b"".join(events), cuts))) == text


def test_only_an_event_that_may_need_the_next_one_is_held():
    halves = Halves()
    whole = event("a \U0001f600")
    assert halves.feed(whole) == whole
    assert halves.feed(event("\ud83d")) == b""
    assert halves.feed(b": ping\n\n") == event("\ufffd") + b": ping\n\n"
    cut = event("\ud83d")
    assert halves.feed(cut[:-8]) == b""
    assert halves.feed(cut[-8:]) == b""
    assert halves.feed(event("\ude00!")) == event("") + event("\U0001f600!")
    assert halves.take() == b""


@pytest.mark.parametrize(
    "start", [b'data: {"a":"\\ud83d\\ude00', event("x" * 99_999 + "\ud83d") + b'data: {"a":"', b'{"a":"\\ud83d\\ude00']
)
def test_what_is_held_is_read_in_linear_time_however_small_its_pieces_are(start: bytes):
    halves = Halves()
    rest = b"x" * 300_000
    began = time.process_time()
    told = [halves.feed(start), *(halves.feed(rest[at : at + 1]) for at in range(len(rest)))]
    assert time.process_time() - began < 3
    assert b"".join(told) + halves.take() == mended(start + rest)


def test_what_nothing_follows_is_told_with_what_unicode_has_for_it():
    halves = Halves()
    assert halves.feed(event("a\ud83d")) == b""
    assert said(halves.take()) == ["a\ufffd"]
    assert halves.feed(b"x") == b"x"


def test_a_text_that_stands_escaped_in_another_is_left_alone():
    arguments = json.dumps({"face": "\U0001f600", "path": "C:\\ud83d"})
    whole = json.dumps({"arguments": arguments}).encode()
    assert mended(whole) == whole
    assert json.loads(mended(b'{"a":"\\ud83d","b":"\\ude00 \\ud83d\\ude00"}')) == {
        "a": "\ufffd",
        "b": "\ufffd \U0001f600",
    }
