"""What the demo ships: it must show what it says it shows."""

from __future__ import annotations

import importlib.resources
from typing import Any

import msgspec
import pytest

from adapters.protocols import PROTOCOLS
from gateway.cli import jobs


@pytest.fixture(scope="module")
def lines() -> list[bytes]:
    return importlib.resources.files("gateway.cli").joinpath("demo_requests.jsonl").read_bytes().splitlines()


def readable(lines: list[bytes]) -> list[dict[str, Any]]:
    found = []
    for line in lines:
        try:
            found.append(msgspec.json.decode(line))
        except msgspec.DecodeError:
            continue
    return found


def test_there_are_200_lines_and_one_of_them_is_malformed(lines):
    assert len(lines) == 200
    assert len(readable(lines)) == 199
    assert len({request["custom_id"] for request in readable(lines)}) == 199


def test_every_other_line_is_a_chat_that_a_provider_would_take(lines):
    for request in readable(lines):
        assert (request["method"], request["url"]) == ("POST", "/v1/chat/completions")
        PROTOCOLS["chat_completions"].parse_request(msgspec.json.encode(request["body"]))


@pytest.mark.parametrize(
    "shown",
    [
        lambda body: [m["role"] for m in body["messages"]] == ["user"],
        lambda body: body["messages"][0]["role"] == "system",
        lambda body: "tools" in body,
        lambda body: any(m["role"] == "tool" for m in body["messages"]),
        lambda body: body.get("response_format", {}).get("type") == "json_schema",
        lambda body: isinstance(body["messages"][-1]["content"], list),
        lambda body: any("\u0590" <= c <= "\u06ff" for c in str(body)),
        lambda body: any(c > "\U0001f000" for c in str(body)),
    ],
    ids=["plain", "system", "tools", "tool result", "json schema", "parts", "right to left", "emoji"],
)
def test_it_shows(lines, shown):
    assert sum(bool(shown(request["body"])) for request in readable(lines)) >= 3


def test_a_session_is_added_to_every_line_that_can_be_read_and_to_no_other(lines):
    content = b"\n".join(lines)
    added = jobs.with_session(content, "s").split(b"\n")
    assert len(added) == len(lines)
    for before, after in zip(lines, added, strict=True):
        try:
            request = msgspec.json.decode(before)
        except msgspec.DecodeError:
            assert after == before
        else:
            assert msgspec.json.decode(after) == {**request, "session_id": "s"}


def test_a_session_that_a_line_names_itself_is_kept():
    assert jobs.with_session(b'{"session_id": "mine"}\n', "s") == b'{"session_id": "mine"}\n'
