"""
Recorded traffic of real providers, through the parser of each protocol and through a real socket.

What a recording means is told by the protocol's own table, see `tests.fakes.recorded`. Where the corpus is absent these
tests are skipped; `tests/wire` holds cases of our own for the same kinds.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.chat import ChatRequest, Event, Message, Role, Text
from adapters.client import Upstream
from adapters.contract import StreamParser, UpstreamCall
from adapters.errors import Broken, ProviderError, Rejected
from adapters.protocols import PROTOCOLS
from tests.fakes.answers import gathered, gathered_response, joined, parsed
from tests.fakes.raw_provider import Exchange, raw_provider
from tests.fakes.recorded import CORPUS, Case, body_of, tables

TABLES = tables()
CASES: dict[str, dict[str, Case]] = {protocol: table.cases for protocol, table in TABLES.items()}


def _is_stream(case: Case) -> bool:
    return case["response"]["status"] == 200 and "text" in case["response"]


def _is_plain(case: Case) -> bool:
    return case["response"]["status"] == 200 and "body" in case["response"]


def _of(kind: Any) -> list[Any]:
    return [
        pytest.param(protocol, name, id=f"{protocol}-{name}")
        for protocol, cases in CASES.items()
        for name, case in cases.items()
        if kind(case)
    ]


STREAMS, PLAIN = _of(_is_stream), _of(_is_plain)
ERRORS = _of(lambda case: case["response"]["status"] != 200)

pytestmark = pytest.mark.skipif(
    not CORPUS.is_dir(), reason=f"no recorded traffic at {CORPUS.name}: set TOLLBRIDGE_WIRE_CORPUS"
)


def _parser(protocol: str, name: str) -> StreamParser:
    return PROTOCOLS[protocol].new_parser(TABLES[protocol].endpoint(name), {})


def _check_stream(protocol: str, name: str, events: list[Event], error: ProviderError | None) -> None:
    table, facts = TABLES[protocol], CASES[protocol][name]["facts"]
    if name in table.errors_in_200:
        assert not gathered(events)["finished"]
        assert isinstance(error, Rejected)
        assert error.error_class is table.errors_in_200[name]
    elif name not in table.broken and table.complete(name, facts):
        assert error is None
        assert gathered(events)["finished"]
        table.check(name, gathered(events), facts)
    else:
        assert not gathered(events)["finished"]
        assert isinstance(error, Broken)
        assert error.code == table.broken.get(name, "no_terminal")


@pytest.mark.parametrize(("protocol", "name"), STREAMS)
def test_a_recorded_stream_gives_what_an_independent_parser_found_and_ends_only_on_proof(protocol, name):
    _check_stream(protocol, name, *parsed(_parser(protocol, name), [body_of(CASES[protocol][name])]))


@pytest.mark.parametrize(("protocol", "name"), STREAMS)
def test_a_recorded_stream_split_at_every_byte_gives_the_same(protocol, name):
    body = body_of(CASES[protocol][name])
    whole, whole_error = parsed(_parser(protocol, name), [body])
    bytewise, error = parsed(_parser(protocol, name), [body[i : i + 1] for i in range(len(body))])
    assert joined(bytewise) == joined(whole)
    assert type(error) is type(whole_error)
    assert str(error) == str(whole_error)


@pytest.mark.parametrize(("protocol", "name"), STREAMS)
@given(data=st.data())
@settings(deadline=None, max_examples=10)
def test_a_recorded_stream_split_at_random_gives_the_same(protocol, name, data):
    body = body_of(CASES[protocol][name])
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(body) - 1)), max_size=20)))
    pieces = [body[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    whole, whole_error = parsed(_parser(protocol, name), [body])
    split, error = parsed(_parser(protocol, name), pieces)
    assert joined(split) == joined(whole)
    assert str(error) == str(whole_error)


@pytest.mark.parametrize(("protocol", "name"), STREAMS)
@pytest.mark.parametrize("end", [b"\r\n", b"\r"], ids=["CRLF", "CR"])
def test_line_ends_comments_and_a_byte_order_mark_change_nothing(protocol, name, end):
    body = body_of(CASES[protocol][name])
    whole, _ = parsed(_parser(protocol, name), [body])
    if not body.lstrip().startswith((b"data", b"event", b":", b"id")):
        pytest.skip("no event stream")
    dressed = b"\xef\xbb\xbf" + body.replace(b"\r\n", b"\n").replace(b"\n", b"\n: hello\n").replace(b"\n", end)
    undressed, _ = parsed(_parser(protocol, name), [dressed[:7], dressed[7:]])
    # A comment line after a blank one changes nothing; inside an event neither.
    assert gathered(undressed) == gathered(whole)


@pytest.mark.parametrize(("protocol", "name"), STREAMS)
def test_a_recorded_stream_cut_anywhere_before_its_terminal_never_counts_as_complete(protocol, name):
    body = body_of(CASES[protocol][name]).replace(b"\r\n", b"\n")
    for bound in TABLES[protocol].cuts(name, body):
        events, error = parsed(_parser(protocol, name), [body[:bound]])
        assert error is not None
        assert not gathered(events)["finished"]


@pytest.mark.parametrize(("protocol", "name"), PLAIN)
def test_a_recorded_answer_gives_what_an_independent_parser_found(protocol, name):
    table, case = TABLES[protocol], CASES[protocol][name]
    headers, body = case["response"]["headers"], b"\n\n\n" + body_of(case)
    if name in table.errors_in_200:
        with pytest.raises(Rejected) as caught:
            PROTOCOLS[protocol].parse_response(200, headers, body)
        assert caught.value.error_class is table.errors_in_200[name]
    elif name in table.broken_plain:
        with pytest.raises(Broken) as broken:
            PROTOCOLS[protocol].parse_response(200, headers, body)
        assert broken.value.code == table.broken_plain[name]
    else:
        response = PROTOCOLS[protocol].parse_response(200, headers, body)
        table.check(name, gathered_response(response), case["facts"])
        assert json.loads(PROTOCOLS[protocol].render_response(response)) == case["response"]["body"]


@pytest.mark.parametrize(("protocol", "name"), ERRORS)
def test_a_recorded_error_has_the_meaning_its_provider_documents(protocol, name):
    response = CASES[protocol][name]["response"]
    error = PROTOCOLS[protocol].parse_error(response["status"], response["headers"], body_of(CASES[protocol][name]))
    assert isinstance(error, Rejected)
    told = (error.error_class, error.retry_after_s, error.rate_limited, error.credential_fault)
    assert told == TABLES[protocol].errors[name]
    assert error.status == response["status"]


@pytest.mark.parametrize("protocol", CASES)
async def test_every_recorded_case_gives_the_same_over_a_real_socket(protocol):
    table, cases = TABLES[protocol], CASES[protocol]

    async def replay(exchange: Exchange) -> None:
        name = b"/".join(exchange.head.split(b"/replay/")[1].split(b"/")[:2]).decode()
        response = cases[name]["response"]
        headers = {k: v for k, v in response["headers"].items() if k != "date"}
        if _is_stream(cases[name]):
            await exchange.begin(headers)
            body = body_of(cases[name])
            for start in range(0, len(body), 700):
                await exchange.chunk(body[start : start + 700])
            await exchange.end()
        else:
            await exchange.answer(body_of(cases[name]), status=response["status"], headers=headers)

    async def one(name: str) -> None:
        call = UpstreamCall(
            endpoint=table.endpoint(name, f"http://127.0.0.1:{provider.port}/replay/{name}"),
            model="m",
            request=ChatRequest(
                messages=(Message(role=Role.USER, content=(Text(text="hi"),)),), max_output_tokens=100_000
            ),
            deadline=asyncio.get_running_loop().time() + 30,
        )
        if _is_stream(cases[name]):
            events: list[Event] = []
            error: ProviderError | None = None
            try:
                async with upstream.stream(call) as batches:
                    async for batch in batches:
                        events += batch
            except ProviderError as failed:
                error = failed
            _check_stream(protocol, name, events, error)
        elif not _is_plain(cases[name]) or name in table.errors_in_200:
            with pytest.raises(Rejected) as caught:
                await upstream.complete(call)
            expected = table.errors[name][0] if name in table.errors else table.errors_in_200[name]
            assert caught.value.error_class is expected
        elif name in table.broken_plain:
            with pytest.raises(Broken):
                await upstream.complete(call)
        else:
            table.check(name, gathered_response(await upstream.complete(call)), cases[name]["facts"])

    async with raw_provider(replay) as provider, Upstream() as upstream:
        for name in cases:
            await one(name)
    assert len(provider.requests) == len(cases)


@pytest.mark.parametrize("protocol", CASES)
def test_the_whole_share_of_the_corpus_was_run(protocol):
    table, cases = TABLES[protocol], CASES[protocol]
    streams = sum(map(_is_stream, cases.values()))
    plain = sum(map(_is_plain, cases.values()))
    counts = (streams, plain, len(cases) - streams - plain)
    assert all(count >= least for count, least in zip(counts, table.at_least, strict=True)), counts
    errors = {name for name, case in cases.items() if case["response"]["status"] != 200}
    assert table.errors.keys() == errors
    named = {*table.errors_in_200, *table.broken, *table.broken_plain, *table.endpoints}
    assert named <= cases.keys()


def test_every_protocol_has_a_share_of_the_corpus():
    assert TABLES.keys() == PROTOCOLS.keys()
