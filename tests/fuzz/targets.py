"""
What is fuzzed, and what must hold of whatever comes.

- Nothing is raised but what the seam declares; a parser that failed fails again in the same way.
- Any split of the bytes gives the same events and the same error.
- `Finished` comes only where the bytes hold the proof of the end.
- No message of an error holds content.
- Memory stays in proportion to the input, and twice the input takes about twice the time.

A violation is a `Finding`. What a check returns tells what kind of input it was, so that new kinds can be kept.
"""

from __future__ import annotations

import contextlib
import gc
import json
import random
import re
import time
import tracemalloc
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from adapters.chat import ChatRequest, ChatResponse, Event, Finished
from adapters.contract import AnswerHead, Endpoint, StreamParser, UpstreamCall, WireProtocol
from adapters.errors import Broken, MalformedRequest, ProviderError, Rejected, RequestNotExpressible
from adapters.protocols.chat_completions import ChatCompletions
from adapters.sse import EventDecoder, EventsOrJson
from tests.fakes.answers import gathered
from tests.fakes.conversations import BODIES
from tests.fakes.protocols import EVERY
from tests.fakes.recorded import CORPUS, body_of, tables
from tests.fuzz.mutation import CANARY
from tests.fuzz.proof import PROOF, events_of, is_json

_WIRE = Path(__file__).parents[1] / "wire"
_HEAD = AnswerHead(id="x", model="m", created=1)
_MADE = re.compile(r"[0-9a-f]{24}")

#: Bytes of the two inputs whose times are compared, and how much longer the larger may take. Twice would be exact.
_LONG = 64 * 1024
_MOST_TIMES = 3.0
#: Memory: what a parser may take whatever comes, and for each byte that came. A value of JSON is a byte or two as text
#: and some hundred once it is decoded; the events are held by the check, and counted with it.
_PEAK_BYTES = 4 * 1024 * 1024
_PEAK_TIMES = 150


class Finding(AssertionError):
    """Something does not hold."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    seeds: tuple[bytes, ...]
    #: Raises `Finding`. The generator makes the choices that the input leaves open.
    check: Callable[[bytes, random.Random], Hashable]
    #: The same for what is slow to measure: time and memory.
    weigh: Callable[[bytes, random.Random], None]


def pieces_of(data: bytes, rng: random.Random) -> list[bytes]:
    """Some split of the bytes."""
    if len(data) < 3000 and rng.random() < 0.3:
        return [data[at : at + 1] for at in range(len(data))]
    cuts = sorted(rng.randint(0, len(data)) for _ in range(rng.choice((1, 2, 5, 30))))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


# ------------------------------------------------------------------- streams


def _run(parser: StreamParser, pieces: Sequence[bytes]) -> tuple[list[Event], ProviderError | None]:
    events: list[Event] = []
    error: ProviderError | None = None
    try:
        for piece in pieces:
            events += parser.feed(piece)
        while batch := parser.close():
            events += batch
    except ProviderError as failed:
        error = failed
    except Exception as raised:
        raise Finding(f"a parser raised {type(raised).__name__}: {raised}") from raised
    if error is not None:
        try:
            parser.feed(b"")
        except ProviderError as again:
            if again is not error:
                raise Finding("a parser that failed fails in another way when asked again") from again
        else:
            raise Finding("a parser that failed goes on")
    return events, error


def _summed(events: Sequence[Event], error: ProviderError | None) -> str:
    """Comparable: how deltas were batched does not count, nor what ids were made up."""
    finished = [isinstance(event, Finished) for event in events]
    if sum(finished) > 1:
        raise Finding("Finished came twice")
    ordered = sorted(events, key=lambda event: isinstance(event, Finished))
    try:
        told = gathered(ordered)
    except (AssertionError, IndexError) as broken:
        raise Finding(f"events that do not fit together: {broken!r}") from broken
    return _MADE.sub("made", repr((told, type(error), str(error), error and error.code)))


def _silent(error: Exception) -> None:
    told = f"{error} {error!r} {getattr(error, 'code', '')} {getattr(error, 'path', '')}"
    if CANARY in told:
        raise Finding(f"content in the message of an error: {told[:300]}")


def _kind(events: Sequence[Event], error: Exception | None) -> Hashable:
    at = None
    if error is not None:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        at = (type(error), getattr(error, "code", None), trace.tb_lineno if trace is not None else 0)
    return frozenset(type(event) for event in events), at, min(len(events), 3)


def _endpoint(protocol: str, rng: random.Random) -> Endpoint:
    return Endpoint(provider="p", protocol=protocol, base_url="", no_sentinel=rng.random() < 0.2)


def check_stream(protocol: WireProtocol, data: bytes, rng: random.Random) -> Hashable:
    endpoint = _endpoint(protocol.name, rng)
    parser = protocol.new_parser(endpoint, {})
    events, error = _run(parser, [data])
    pieces = pieces_of(data, rng)
    split, split_error = _run(protocol.new_parser(endpoint, {}), pieces)
    if (whole := _summed(events, error)) != (other := _summed(split, split_error)):
        raise Finding(f"another split, other events: {whole[:2000]} and {other[:2000]}")
    finished = any(isinstance(event, Finished) for event in events)
    if finished != parser.finished:
        raise Finding("`finished` and the events differ")
    if finished and not PROOF[protocol.name](data, endpoint.no_sentinel):
        raise Finding("finished without proof in the bytes")
    if not finished and error is None:
        raise Finding("neither finished nor failed")
    if error is not None:
        _silent(error)
        if not isinstance(error, Rejected | Broken):
            raise Finding(f"a stream ended in {type(error).__name__}")
    _tell(events, rng)
    return _kind(events, error)


def _tell(events: Sequence[Event], rng: random.Random) -> None:
    """Whatever a provider said, a caller can be told, in any protocol."""
    protocol = EVERY[rng.choice(list(EVERY))]
    try:
        protocol.new_renderer(_HEAD).feed(sorted(events, key=lambda event: isinstance(event, Finished)))
    except Exception as raised:
        raise Finding(f"{protocol.name} cannot tell these events: {type(raised).__name__}: {raised}") from raised


# ------------------------------------------------- answers, errors, requests


def _headers(rng: random.Random) -> dict[str, str]:
    headers = {}
    if rng.random() < 0.3:
        headers["retry-after"] = rng.choice(("3", "-1", "1e400", "nan", "Wed, 21 Oct 2026 07:28:00 GMT", "x" * 99))
    if rng.random() < 0.2:
        headers["retry-after-ms"] = rng.choice(("250", "", "inf"))
    if rng.random() < 0.2:
        headers["x-request-id"] = rng.choice(("req_1", "a b", CANARY))
    return headers


def check_answer(protocol: WireProtocol, data: bytes, rng: random.Random) -> Hashable:
    status, headers = rng.choice((200, 200, 200, 201, 400, 401, 404, 429, 500, 302)), _headers(rng)
    error: ProviderError | None = None
    try:
        response = protocol.parse_response(status, headers, data)
    except ProviderError as failed:
        error = failed
    except Exception as raised:
        raise Finding(f"an answer raised {type(raised).__name__}: {raised}") from raised
    else:
        if not 200 <= status < 300:
            raise Finding("an answer under the status of an error")
        if not PROOF[protocol.name](data, False):
            raise Finding("a whole answer without its stop field")
        _tell_whole(response, rng)
        return (tuple(sorted({type(part).__name__ for part in response.choices})), response.omitted)
    _silent(error)
    told = _error_of(protocol, status, headers, data)
    return _kind((), error), type(told), told.code if len(told.code) < 20 else ""


def _error_of(protocol: WireProtocol, status: int, headers: dict[str, str], data: bytes) -> ProviderError:
    try:
        error = protocol.parse_error(status, headers, data)
    except Exception as raised:
        raise Finding(f"the error of an answer raised {type(raised).__name__}: {raised}") from raised
    if not isinstance(error, ProviderError):
        raise Finding("the error of an answer is none")
    _silent(error)
    return error


def _tell_whole(response: ChatResponse, rng: random.Random) -> None:
    protocol = EVERY[rng.choice(list(EVERY))]
    try:
        told = protocol.render_response(msgspec.structs.replace(response, native=None))
        json.loads(told)
    except Exception as raised:
        raise Finding(f"{protocol.name} cannot tell this answer: {type(raised).__name__}: {raised}") from raised


def check_request(protocol: WireProtocol, data: bytes, rng: random.Random) -> Hashable:
    try:
        request = protocol.parse_request(data)
    except MalformedRequest as refused:
        _silent(refused)
        return "malformed", re.sub(r"\d+", "0", refused.path)[:40], refused.reason[:20]
    except Exception as raised:
        raise Finding(f"a request raised {type(raised).__name__}: {raised}") from raised
    other = EVERY[rng.choice([protocol.name, *EVERY])]
    return "read", other.name, _sent(request, other, rng)


_OMITS = (
    "messages.cache",
    "messages.is_error",
    "messages.reasoning",
    "messages.name",
    "messages.detail",
    "messages.citations",
    "messages.place",
    "temperature",
    "metadata",
)


def _sent(request: ChatRequest, protocol: WireProtocol, rng: random.Random) -> Hashable:
    endpoint = Endpoint(
        provider="p",
        protocol=protocol.name,
        base_url="",
        omit=frozenset(rng.sample(_OMITS, rng.randint(0, len(_OMITS)))),
        reasoning=rng.choice((None, "effort", "budget", "off")),
        reasoning_field=rng.choice((None, None, "reasoning_content", "reasoning_details", "content", "extra_content")),
        cache_control=rng.random() < 0.5,
    )
    call = UpstreamCall(endpoint=endpoint, model="m", request=request, deadline=0)
    try:
        sent = protocol.render_request(call, stream=rng.random() < 0.5)
    except RequestNotExpressible as refused:
        _silent(refused)
        return "refused", re.sub(r"\d+", "0", refused.path)[:40]
    except Exception as raised:
        raise Finding(f"{protocol.name} cannot be sent this: {type(raised).__name__}: {raised}") from raised
    try:
        json.loads(sent.body)
    except ValueError as raised:
        raise Finding(f"{protocol.name} sends what is no JSON: {raised}") from raised
    return "sent", len(sent.dropped) > 0


# ------------------------------------------------------------------ sse alone


def _decoded(decoder: EventDecoder | EventsOrJson, pieces: Sequence[bytes]) -> list[tuple[str, bytes]]:
    try:
        found = [event for piece in pieces for event in decoder.feed(piece)]
        return [*found, *decoder.close()]
    except Exception as raised:
        raise Finding(f"the decoder raised {type(raised).__name__}: {raised}") from raised


def check_sse(data: bytes, rng: random.Random) -> Hashable:
    expected = events_of(data)
    for pieces in ([data], pieces_of(data, rng)):
        if (found := _decoded(EventDecoder(), pieces)) != expected:
            raise Finding(f"not the events of the standard: {found[:5]!r} for {expected[:5]!r}")
        decoder = EventsOrJson()
        found = _decoded(decoder, pieces)
        if is_json(data):
            if found or decoder.json != data.removeprefix(b"\xef\xbb\xbf").lstrip(b" \t\r\n"):
                raise Finding("a body of JSON is not given whole")
        elif decoder.json is not None or found != expected:
            raise Finding("a body of events is not read as one")
    whole, split = EventDecoder(keep_stray=True), EventDecoder(keep_stray=True)
    if _decoded(whole, [data]) != _decoded(split, pieces_of(data, rng)) or whole.stray != split.stray:
        raise Finding("another split, other strays")
    return min(len(expected), 4), is_json(data), whole.stray is None, b"\r" in data


# ------------------------------------------------------------ time and memory


def weigh(run: Callable[[bytes], None], data: bytes, rng: random.Random) -> None:
    """One event of the input is repeated until it is long; twice as often may take only about twice as long."""
    events = data.split(b"\n\n")
    at = rng.randrange(len(events))
    before, unit, after = b"\n\n".join(events[:at]), events[at] + b"\n\n", b"\n\n".join(events[at + 1 :])
    if rng.random() < 0.3:
        # Or any piece of it: lines without an end, values without end in one event.
        start = rng.randint(0, len(data))
        end = start + rng.randint(1, 60)
        before, unit, after = data[:start], data[start:end] or b"x", data[end:]
    elif before:
        before += b"\n\n"
    times = max(1, _LONG // len(unit))
    short, double = before + unit * times + after, before + unit * (2 * times) + after
    for _ in range(4):
        least, most = _seconds(run, short), _seconds(run, double)
        if most <= _MOST_TIMES * least + 0.01:
            break
    else:
        raise Finding(f"twice the input took {most / least:.1f} times as long: {unit[:200]!r} {times} times")
    gc.collect()
    tracemalloc.start()
    try:
        run(short)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    if peak > _PEAK_BYTES + _PEAK_TIMES * len(short):
        raise Finding(f"{peak} bytes of memory for {len(short)} of input: {unit[:200]!r} {times} times")


def _seconds(run: Callable[[bytes], None], data: bytes) -> float:
    """CPU time, of the best of three: what another process does on this machine is not counted."""
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        run(data)
        best = min(best, time.process_time() - start)
    return best


def _of_protocol(protocol: WireProtocol, seeds: dict[str, tuple[bytes, ...]]) -> list[Target]:
    def stream(size: int, data: bytes) -> None:
        endpoint = Endpoint(provider="p", protocol=protocol.name, base_url="")
        _run(protocol.new_parser(endpoint, {}), [data[at : at + size] for at in range(0, len(data), size)])

    def answer(data: bytes) -> None:
        check_answer(protocol, data, random.Random(0))

    def request(data: bytes) -> None:
        check_request(protocol, data, random.Random(0))

    return [
        Target(
            name=f"{protocol.name}.stream",
            seeds=seeds["stream"],
            check=lambda data, rng: check_stream(protocol, data, rng),
            weigh=lambda data, rng: weigh(partial(stream, rng.choice((1, 100, 65536))), data, rng),
        ),
        Target(
            name=f"{protocol.name}.answer",
            seeds=seeds["answer"],
            check=lambda data, rng: check_answer(protocol, data, rng),
            weigh=lambda data, rng: weigh(answer, data, rng),
        ),
        Target(
            name=f"{protocol.name}.request",
            seeds=seeds["request"],
            check=lambda data, rng: check_request(protocol, data, rng),
            weigh=lambda data, rng: weigh(request, data, rng),
        ),
    ]


def _seeds(protocol: str) -> dict[str, tuple[bytes, ...]]:
    """The hand-made cases, and the recorded ones where they are present."""
    streams = [path.read_bytes() for path in sorted((_WIRE / protocol).glob("*.sse"))]
    answers = [body for body in streams if is_json(body)]
    requests = [json.dumps(bodies[protocol]).encode() for bodies in BODIES.values() if protocol in bodies]
    requests = requests or list(_rendered(EVERY[protocol]))
    table = tables().get(protocol) if CORPUS.is_dir() else None
    for case in (table.cases if table is not None else {}).values():
        body = body_of(case)
        (streams if "text" in case["response"] and case["response"]["status"] == 200 else answers).append(body)
        if isinstance(case["request"].get("body"), dict):
            requests.append(json.dumps(case["request"]["body"]).encode())
    return {"stream": tuple(streams), "answer": tuple(answers or streams), "request": tuple(requests)}


def _rendered(protocol: WireProtocol) -> Iterator[bytes]:
    """The conversations in the words of a protocol that they are not written down for, as far as it can say them."""
    endpoint = Endpoint(provider="p", protocol=protocol.name, base_url="", omit=frozenset({"temperature"}))
    for bodies in BODIES.values():
        request = ChatCompletions().parse_request(json.dumps(bodies["chat_completions"]).encode())
        with contextlib.suppress(RequestNotExpressible):
            call = UpstreamCall(endpoint=endpoint, model="m", request=request, deadline=0)
            yield protocol.render_request(call, stream=True).body


def _weigh_sse(data: bytes, rng: random.Random) -> None:
    size = rng.choice((1, 100, 65536))

    def run(long: bytes) -> None:
        for decoder in (EventDecoder(keep_stray=True), EventsOrJson()):
            _decoded(decoder, [long[at : at + size] for at in range(0, len(long), size)])

    weigh(run, data, rng)


def targets() -> list[Target]:
    seeds = {name: _seeds(name) for name in EVERY}
    found = [target for name, protocol in EVERY.items() for target in _of_protocol(protocol, seeds[name])]
    streams = tuple(body for of_one in seeds.values() for body in of_one["stream"])
    return [Target(name="sse", seeds=streams, check=check_sse, weigh=_weigh_sse), *found]
