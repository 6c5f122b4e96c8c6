"""What every protocol's parser does with a body, whatever its events mean."""

from __future__ import annotations

import pytest

from adapters.contract import Endpoint, StreamParser
from adapters.errors import Broken
from adapters.protocols import PROTOCOLS
from adapters.skeleton import Skeleton
from adapters.sse import MAX_EVENT_BYTES, MAX_VALUES

_ALL = {**PROTOCOLS, "skeleton": Skeleton()}


@pytest.fixture(params=sorted(_ALL))
def parser(request: pytest.FixtureRequest) -> StreamParser:
    name: str = request.param
    return _ALL[name].new_parser(Endpoint(provider="p", protocol=name, base_url=""), {})


def test_an_event_that_is_too_large_breaks_the_stream_and_goes_on_to(parser: StreamParser) -> None:
    with pytest.raises(Broken) as first:
        parser.feed(b"data: " + b"x" * (MAX_EVENT_BYTES + 1))
    with pytest.raises(Broken) as again:
        parser.feed(b"")
    assert first.value.code == "response_too_large"
    assert again.value is first.value
    assert not parser.finished


def test_an_event_found_too_large_when_the_body_ends_breaks_the_stream(parser: StreamParser) -> None:
    assert not parser.feed(b"data: [" + b"," * (MAX_VALUES + 1))
    with pytest.raises(Broken) as broken:
        parser.close()
    assert broken.value.code == "response_too_large"


@pytest.mark.parametrize("body", [b"", b"\n\n", b": idle\n\n", b"data: {", b"data: {\n"])
def test_a_body_that_ends_with_no_answer_in_it_proves_nothing(parser: StreamParser, body: bytes) -> None:
    assert not parser.feed(body)
    with pytest.raises(Broken) as broken:
        parser.close()
    assert broken.value.code == "no_terminal"
    assert not parser.finished


@pytest.mark.parametrize("blank", [b"data:\n\n", b"data: \n\n", b"data\n\n", b"data:\ndata: \n\n"])
def test_an_event_of_blanks_says_nothing_and_keeps_no_clock_from_running(parser: StreamParser, blank: bytes) -> None:
    assert not parser.feed(blank)
    assert parser.payloads == 0
    assert not parser.feed(b": idle\n\n")


def test_json_in_place_of_a_stream_is_one_piece_of_payload_when_it_has_ended(parser: StreamParser) -> None:
    assert not parser.feed(b'{"nothing":')
    assert not parser.feed(b" 1}")
    assert parser.payloads == 0
    with pytest.raises(Broken):
        parser.close()
    assert parser.payloads == 1
