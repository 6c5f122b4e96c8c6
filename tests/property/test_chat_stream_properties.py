"""Any split of a stream gives the same events, and no cut of one counts as complete."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.chat import Finished
from adapters.contract import Endpoint
from adapters.errors import Broken
from adapters.protocols.chat_completions import ChatCompletions
from tests.fakes.answers import gathered, joined, parsed

PROTOCOL = ChatCompletions()
ENDPOINT = Endpoint(provider="p", protocol="chat_completions", base_url="")

_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_usage = st.none() | st.fixed_dictionaries(
    {"prompt_tokens": st.integers(0, 99), "completion_tokens": st.integers(0, 99)}
)
_tool = st.builds(
    lambda index, name, arguments: {
        "tool_calls": [{"index": index, "id": f"call_{index}", "function": {"name": name, "arguments": arguments}}]
    },
    st.integers(0, 2),
    st.just("f"),
    _text,
)
_delta = st.one_of(
    st.builds(lambda text: {"content": text}, _text),
    st.builds(lambda text: {"reasoning_content": text}, _text),
    st.builds(lambda text: {"refusal": text}, _text),
    _tool,
    st.just({}),
    st.none(),
)
_chunk = st.builds(
    lambda index, delta, usage: {"id": "x", "choices": [{"index": index, "delta": delta}], "usage": usage},
    st.integers(0, 1),
    _delta,
    _usage,
)
_noise = st.sampled_from([b": keep-alive", b"id: 1", b"retry: 5", b"event: message"])


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """The events of a complete stream, each with its blank line."""
    chunks = draw(st.lists(_chunk, min_size=1, max_size=8))
    seen = {choice["index"] for chunk in chunks for choice in chunk["choices"]}
    chunks += [{"choices": [{"index": index, "delta": {}, "finish_reason": "stop"}]} for index in sorted(seen)]
    if draw(st.booleans()):
        chunks.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4, "cost": 0.01}})
    end = draw(st.sampled_from([b"\n", b"\r\n", b"\r"]))
    ascii_only = draw(st.booleans())
    events = []
    for payload in [json.dumps(chunk, ensure_ascii=ascii_only).encode() for chunk in chunks] + [b"[DONE]"]:
        lines = [*draw(st.lists(_noise, max_size=2)), b"data: " + payload, b""]
        events.append(b"".join(line + end for line in lines))
    return events


@given(streams(), st.data())
@settings(deadline=None)
def test_any_split_of_the_bytes_gives_the_same_events(events, data):
    body = b"".join(events)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(body) - 1), max_size=20)))
    pieces = [body[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    whole, error = parsed(PROTOCOL.new_parser(ENDPOINT, {}), [body])
    assert error is None
    assert gathered(whole)["finished"]
    split, error = parsed(PROTOCOL.new_parser(ENDPOINT, {}), pieces)
    assert error is None
    assert joined(split) == joined(whole)


@given(streams(), st.data())
@settings(deadline=None)
def test_a_stream_cut_before_its_sentinel_never_finishes(events, data):
    kept = data.draw(st.integers(0, len(events) - 1))
    found, error = parsed(PROTOCOL.new_parser(ENDPOINT, {}), events[:kept])
    assert isinstance(error, Broken)
    assert error.code == "no_terminal"
    assert not any(isinstance(event, Finished) for event in found)


@given(streams(), st.data())
@settings(deadline=None)
def test_a_stream_cut_inside_an_event_never_finishes(events, data):
    body = b"".join(events)
    sentinel = body.rindex(b"[DONE]") + len(b"[DONE]")
    found, error = parsed(PROTOCOL.new_parser(ENDPOINT, {}), [body[: data.draw(st.integers(0, sentinel - 1))]])
    assert isinstance(error, Broken)
    assert not any(isinstance(event, Finished) for event in found)


@given(st.lists(st.binary(max_size=40), max_size=20))
@settings(deadline=None)
def test_bytes_that_are_no_stream_end_in_an_error_and_never_in_a_crash(pieces):
    found, error = parsed(PROTOCOL.new_parser(ENDPOINT, {}), [b"data: ", *pieces])
    assert error is not None
    assert not any(isinstance(event, Finished) for event in found)
