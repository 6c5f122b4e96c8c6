"""
A short run of the fuzzer in every test run, what it has found before, and whether it would find what it looks for.

Another seed each time; a failure tells it, and `python -m tests.fuzz --seed N` runs the same inputs again.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from typing_extensions import override

from adapters.chat import ChatResponse, ChoiceEnd, Event, Finished, StopReason
from adapters.contract import Batch, Endpoint, StreamParser
from adapters.errors import Broken, ProviderError
from adapters.protocols.chat_completions import ChatCompletions
from adapters.protocols.chat_completions.stream import ChatStream
from tests.fakes.protocols import EVERY
from tests.fuzz.fuzzing import fuzz, read, replay, write
from tests.fuzz.mutation import CANARY, Mutator, smaller
from tests.fuzz.proof import PROOF
from tests.fuzz.targets import Finding, Target, check_answer, check_stream, targets, weigh

_MENDED = sorted((Path(__file__).parent / "mended").glob("*.json"))
_SEED = 1
_INPUTS = 1_000
_TARGETS = targets()


@pytest.mark.parametrize("target", _TARGETS, ids=lambda target: target.name)
def test_a_short_run_finds_nothing(target, tmp_path):
    tally = fuzz(target, seed=_SEED, inputs=_INPUTS, most=1)
    for found in tally.found:
        kept = write(found, tmp_path)
        pytest.fail(f"seed {_SEED}, {tally.inputs} inputs: {found.told}; input {found.data!r}; {kept}")
    assert tally.inputs == _INPUTS
    assert tally.kinds > 1


@pytest.mark.parametrize("path", _MENDED, ids=lambda path: path.stem)
def test_what_was_found_before_stays_mended(path):
    found = read(path)
    replay(found, _TARGETS)
    for other in range(12):
        replay(msgspec.structs.replace(found, seed=str(other)), _TARGETS)


def test_every_protocol_is_fuzzed_and_its_proof_is_known():
    assert {target.name.partition(".")[0] for target in _TARGETS} == {*EVERY, "sse"}
    assert PROOF.keys() == EVERY.keys()


def test_a_seed_makes_the_same_inputs_again():
    target = _TARGETS[0]
    first, again = (Mutator(target.seeds, random.Random("7")) for _ in range(2))
    assert [first.make() for _ in range(50)] == [again.make() for _ in range(50)]


# --------------------------------------------------------- would it find it?

_WHOLE = (
    b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":null}]}\n\n'
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
)


class _Crashing(ChatStream):
    @override
    def feed(self, data: bytes) -> Batch:
        if b"\x00" in data:
            raise KeyError("a fault")
        return super().feed(data)


class _Splitting(ChatStream):
    """Loses a piece that is one byte long."""

    @override
    def feed(self, data: bytes) -> Batch:
        return () if len(data) == 1 else super().feed(data)


class _Hasty(ChatStream):
    """Takes the end of the body for the end of the answer."""

    @override
    def close(self) -> Batch:
        try:
            return super().close()
        except Broken:
            self._failure = None
            if self._finished:
                return ()
            self._finished = True
            end = ChoiceEnd(choice=0, stop_reason=StopReason.STOP, native_stop_reason="")
            return (Finished(ends=(end,)),)


class _Talkative(ChatStream):
    @override
    def _take_one(self, event: str, data: bytes, events: list[Event]) -> None:
        if CANARY.encode() in data:
            self._fail(Broken(f"what is {data.decode(errors='replace')}?", code="malformed"))
        super()._take_one(event, data, events)


class _Forgiving(ChatStream):
    """Goes on after a failure."""

    @override
    def feed(self, data: bytes) -> Batch:
        self._failure = None
        return super().feed(data)


class _Slow(ChatStream):
    """Looks at all that came again with each piece."""

    _seen = b""

    @override
    def feed(self, data: bytes) -> Batch:
        self._seen += data
        for _ in range(12):
            self._seen.count(b"x")
        return super().feed(data)


class _Hoarding(ChatStream):
    """Keeps what it needs no more."""

    def __init__(self, endpoint: Endpoint, headers: Mapping[str, str]) -> None:
        super().__init__(endpoint, headers)
        self.hoard: list[bytearray] = []

    @override
    def feed(self, data: bytes) -> Batch:
        self.hoard += [bytearray(1000) for _ in data]
        return super().feed(data)


class _Faulty(ChatCompletions):
    def __init__(self, kind: type[ChatStream]) -> None:
        self._kind = kind

    @override
    def new_parser(self, endpoint: Endpoint, headers: Mapping[str, str]) -> StreamParser:
        return self._kind(endpoint, headers)


def _planted(kind: type[ChatStream]) -> Target:
    protocol = _Faulty(kind)

    def run(data: bytes) -> None:
        parser = protocol.new_parser(Endpoint(provider="p", protocol="p", base_url=""), {})
        try:
            for at in range(0, len(data), 50):
                parser.feed(data[at : at + 50])
        except ProviderError:
            pass

    return Target(
        name="planted",
        seeds=(_WHOLE,),
        check=lambda data, rng: check_stream(protocol, data, rng),
        weigh=lambda data, rng: weigh(run, data, rng),
    )


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (_Crashing, "a parser raised KeyError"),
        (_Splitting, "another split, other events"),
        (_Hasty, "finished without proof"),
        (_Talkative, "content in the message"),
        (_Forgiving, "a parser that failed goes on"),
    ],
)
def test_a_planted_fault_is_found_made_small_and_found_again(fault, told, tmp_path):
    target = _planted(fault)
    tally = fuzz(target, seed=1, seconds=20, most=1)
    (found,) = tally.found
    assert found.told.startswith(told)
    assert len(found.data) <= len(_WHOLE) + len(CANARY)
    again = read(write(found, tmp_path))
    assert again == found
    with pytest.raises(Finding, match=told):
        replay(again, [target])


@pytest.mark.parametrize(("fault", "told"), [(_Slow, "times as long"), (_Hoarding, "bytes of memory")])
def test_a_parser_that_takes_too_much_time_or_memory_is_found(fault, told):
    with pytest.raises(Finding, match=told):
        _planted(fault).weigh(_WHOLE, random.Random(3))


def test_an_answer_without_its_stop_field_is_found():
    class Lenient(ChatCompletions):
        @override
        def parse_response(self, status: int, headers: Mapping[str, str], body: bytes) -> ChatResponse:
            return super().parse_response(status, headers, body.replace(b"null", b'"stop"'))

    body = b'{"choices":[{"index":0,"message":{"content":"hi"},"finish_reason":null}]}'
    target = Target(
        name="planted",
        seeds=(body,),
        check=lambda data, rng: check_answer(Lenient(), data, rng),
        weigh=lambda _data, _rng: None,
    )
    tally = fuzz(target, seed=1, seconds=20, most=1)
    assert [found.told for found in tally.found] == ["a whole answer without its stop field"]


def test_a_finding_is_cut_down_to_what_matters():
    assert smaller(b"a long way to go: X, and back", lambda data: b"X" in data) == b"X"
