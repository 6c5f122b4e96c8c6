"""
Streams made by hand, and what they must become: `tests/wire/<protocol>/<case>.sse` beside `<case>.json`.

A protocol takes part by having such a folder. With TOLLBRIDGE_UPDATE_WIRE set to its name, the expected side is
written anew (a new case needs a `.json` with its `endpoint` only); the difference is then for a human to read.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from adapters.chat import Finished
from adapters.contract import Endpoint
from tests.fakes.answers import gathered, parsed, told_error
from tests.fakes.protocols import EVERY

_FOLDER = Path(__file__).parents[1] / "wire"
CASES = [(protocol, path.stem) for protocol in sorted(EVERY) for path in sorted((_FOLDER / protocol).glob("*.sse"))]


@pytest.mark.parametrize(("protocol", "case"), CASES)
def test_a_stream_becomes_the_events_beside_it(protocol, case):
    at = _FOLDER / protocol / f"{case}.json"
    expected = json.loads(at.read_text())
    endpoint = Endpoint(provider="p", protocol=protocol, base_url="", **expected["endpoint"])
    events, error = parsed(EVERY[protocol].new_parser(endpoint, {}), [at.with_suffix(".sse").read_bytes()])
    told = {
        "endpoint": expected["endpoint"],
        "answer": gathered(events),
        "error": None if error is None else told_error(error),
    }
    if os.environ.get("TOLLBRIDGE_UPDATE_WIRE") == protocol:
        at.write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n")
    else:
        assert told == expected
    assert (error is None) == any(isinstance(event, Finished) for event in events)


@pytest.mark.parametrize(("protocol", "case"), CASES)
def test_split_at_every_byte_it_becomes_the_same(protocol, case):
    at = _FOLDER / protocol / f"{case}.sse"
    endpoint = Endpoint(
        provider="p", protocol=protocol, base_url="", **json.loads(at.with_suffix(".json").read_text())["endpoint"]
    )
    body = at.read_bytes()
    whole, error = parsed(EVERY[protocol].new_parser(endpoint, {}), [body])
    split, split_error = parsed(EVERY[protocol].new_parser(endpoint, {}), [bytes([byte]) for byte in body])
    assert gathered(split) == gathered(whole)
    assert str(split_error) == str(error)


@pytest.mark.parametrize(("protocol", "case"), CASES)
def test_no_message_of_a_failed_stream_repeats_what_the_provider_quoted(protocol, case):
    endpoint = Endpoint(provider="p", protocol=protocol, base_url="")
    body = (_FOLDER / protocol / f"{case}.sse").read_bytes()
    _, error = parsed(EVERY[protocol].new_parser(endpoint, {}), [body])
    assert error is None or "SECRET" not in f"{error} {error.code} {error!r}"


@pytest.mark.parametrize("protocol", sorted(EVERY))
def test_every_protocol_has_cases_of_its_own(protocol):
    assert sum(known == protocol for known, _ in CASES) >= 10
