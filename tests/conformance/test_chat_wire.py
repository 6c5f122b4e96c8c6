"""
Streams made by hand, and what they must become: `tests/wire/chat_completions/<case>.sse` beside `<case>.json`.

With TOLLBRIDGE_UPDATE_WIRE set, the expected side is written anew; the difference is then for a human to read.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from adapters.chat import Finished
from adapters.contract import Endpoint
from adapters.protocols.chat_completions import ChatCompletions
from tests.fakes.answers import gathered, parsed, told_error

_FOLDER = Path(__file__).parents[1] / "wire" / "chat_completions"
CASES = sorted(path.stem for path in _FOLDER.glob("*.sse"))
PROTOCOL = ChatCompletions()


@pytest.mark.parametrize("case", CASES)
def test_a_stream_becomes_the_events_beside_it(case):
    expected = json.loads((_FOLDER / f"{case}.json").read_text())
    endpoint = Endpoint(provider="p", protocol="chat_completions", base_url="", **expected["endpoint"])
    events, error = parsed(PROTOCOL.new_parser(endpoint, {}), [(_FOLDER / f"{case}.sse").read_bytes()])
    told = {
        "endpoint": expected["endpoint"],
        "answer": gathered(events),
        "error": None if error is None else told_error(error),
    }
    if "TOLLBRIDGE_UPDATE_WIRE" in os.environ:
        (_FOLDER / f"{case}.json").write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n")
    else:
        assert told == expected
    assert (error is None) == any(isinstance(event, Finished) for event in events)


def test_no_message_of_a_failed_stream_repeats_what_the_provider_quoted():
    for case in CASES:
        endpoint = Endpoint(provider="p", protocol="chat_completions", base_url="")
        _, error = parsed(PROTOCOL.new_parser(endpoint, {}), [(_FOLDER / f"{case}.sse").read_bytes()])
        assert error is None or "SECRET" not in f"{error} {error.code} {error!r}"
