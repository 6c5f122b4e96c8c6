"""Embeddings in OpenAI's format, from a caller and from a provider, and over a real socket."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import struct
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.client import Upstream
from adapters.contract import (
    Clocks,
    EmbeddingCall,
    EmbeddingProtocol,
    EmbeddingRequest,
    EmbeddingResponse,
    Endpoint,
    HttpRequest,
)
from adapters.errors import Broken, ErrorClass, MalformedRequest, ProviderError, Rejected, RequestNotExpressible
from adapters.protocols import PROTOCOLS
from adapters.protocols.chat_completions import ChatCompletions, embedding_envelope
from metering.usage import Usage
from tests.fakes.raw_provider import Exchange, raw_provider

PROTOCOL = ChatCompletions()


def packed(*numbers: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()


def answer(*vectors: object, **more: object) -> bytes:
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
    usage = {"prompt_tokens": 5, "total_tokens": 5}
    return json.dumps({"object": "list", "data": data, "model": "e-1", "usage": usage, **more}).encode()


def parse(**fields: object) -> EmbeddingRequest:
    return PROTOCOL.parse_embedding_request(json.dumps(fields).encode())


def sent(request: EmbeddingRequest, **endpoint: Any) -> HttpRequest:
    target = Endpoint(provider="p", protocol="chat_completions", base_url="http://h/v1", **endpoint)
    call = EmbeddingCall(endpoint=target, model="upstream-model", request=request, deadline=0)
    return PROTOCOL.render_embedding_request(call)


# ------------------------------------------------------------------- requests


@pytest.mark.parametrize(
    ("given_", "inputs"),
    [
        ("hi", ("hi",)),
        (["hi", "ho"], ("hi", "ho")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_every_shape_of_input_is_read(given_, inputs):
    request = parse(input=given_, model="m", dimensions=8, user="u", input_type="query")
    assert request.inputs == inputs
    assert (request.dimensions, request.purpose, request.end_user) == (8, "query", "u")
    assert parse(input=given_).dimensions is None


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", 1]}, "input[1]"),
        ({"input": [[]]}, "input[0]"),
        ({"input": [-1]}, "input[0]"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": None}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "model": ""}, "model"),
    ],
)
def test_a_fault_is_told_by_its_path(fields, path):
    with pytest.raises(MalformedRequest) as caught:
        parse(**fields)
    assert caught.value.path == path


@given(st.binary(max_size=60) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(
    lambda value: json.dumps({"input": value}).encode()
))  # fmt: skip
@settings(deadline=None)
def test_reading_a_request_never_crashes(body):
    with contextlib.suppress(MalformedRequest):
        PROTOCOL.parse_embedding_request(body)


def test_a_native_request_goes_on_untouched_but_for_what_the_profile_says():
    request = parse(input=["a"], model="mine", encoding_format="base64", truncate="END", user="u")
    content = json.loads(sent(request).body)
    assert content == {
        "input": ["a"], "model": "upstream-model", "encoding_format": "base64", "truncate": "END", "user": "u"
    }  # fmt: skip
    told = embedding_envelope(request)
    assert (told.model, told.base64) == ("mine", True)
    rendered = sent(request, omit=frozenset({"user"}), force={"dimensions": msgspec.Raw(b"4")})
    assert json.loads(rendered.body)["dimensions"] == 4
    assert rendered.dropped == ("user",)


def test_a_canonical_request_has_the_fields_it_gives():
    rendered = sent(EmbeddingRequest(inputs=("a", (1, 2)), dimensions=4, purpose="passage"))
    assert rendered.path == "/embeddings"
    assert json.loads(rendered.body) == {
        "input": ["a", [1, 2]], "dimensions": 4, "input_type": "passage", "model": "upstream-model"
    }  # fmt: skip
    assert json.loads(sent(EmbeddingRequest(inputs=("a",))).body)["input"] == "a"


# -------------------------------------------------------------------- answers


@pytest.mark.parametrize("vectors", [([0.5, -1], [2.0, 0]), (packed(0.5, -1), packed(2, 0))], ids=["float", "base64"])
def test_vectors_are_read_in_either_form_and_given_in_the_one_that_was_asked_for(vectors):
    body = answer(*vectors)
    response = PROTOCOL.parse_embedding_response(200, {"x-request-id": "r1"}, body)
    assert response.vectors == ((0.5, -1.0), (2.0, 0.0))
    assert (response.usage.input_total, response.served_model, response.provider_request_id) == (5, "e-1", "r1")
    for wanted in (True, False):
        rendered = PROTOCOL.render_embedding_response(response, base64=wanted)
        assert (rendered == body) is (wanted is isinstance(vectors[0], str)), "the provider's own where it fits"
        told = json.loads(rendered)
        assert told["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
        assert isinstance(told["data"][0]["embedding"], str) is wanted
        assert PROTOCOL.parse_embedding_response(200, {}, rendered).vectors == response.vectors


def test_vectors_come_in_the_order_of_their_numbers():
    body = json.loads(answer([1.0], [2.0]))
    body["data"].reverse()
    assert PROTOCOL.parse_embedding_response(200, {}, json.dumps(body).encode()).vectors == ((1.0,), (2.0,))


def test_an_answer_of_another_protocol_is_rendered_from_its_vectors():
    response = EmbeddingResponse(vectors=((1.0,),), usage=Usage(), served_model="m")
    assert json.loads(PROTOCOL.render_embedding_response(response, base64=False)) == {
        "object": "list", "data": [{"object": "embedding", "index": 0, "embedding": [1.0]}], "model": "m"
    }  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"data":[]}',
        b'{"data":[{"embedding":[]}]}',
        b'{"data":[{"embedding":"%%%"}]}',
        b'{"data":[{"embedding":"AAAA"}]}',
        b'{"data":[{"embedding":"AADAfw=="}]}',  # not a number
        b'{"data":[{"embedding":[1],"index":1}]}',
        b'{"data":[{"embedding":[1],"index":0},{"embedding":[1],"index":0}]}',
        b'{"data":' + b"[" * 100_000,
    ],
)
def test_what_has_no_vectors_is_broken(body):
    with pytest.raises(Broken) as caught:
        PROTOCOL.parse_embedding_response(200, {}, body)
    assert caught.value.code == "malformed"


def test_an_error_under_200_is_rejected_and_usage_of_nonsense_costs_only_itself():
    with pytest.raises(Rejected):
        PROTOCOL.parse_embedding_response(200, {}, b'{"error":{"code":429,"message":"x"}}')
    assert PROTOCOL.parse_embedding_response(200, {}, answer([1.0], usage="much")).usage == Usage()


@given(st.binary(max_size=60))
@settings(deadline=None)
def test_bytes_that_are_no_answer_never_crash(body):
    with contextlib.suppress(ProviderError):
        PROTOCOL.parse_embedding_response(200, {}, body)


# -------------------------------------------------------------------- sockets


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream() as opened:
        yield opened


def call(port: int, *, deadline_s: float = 10.0, inputs: Any = ("a", "b"), **endpoint: Any) -> EmbeddingCall:
    endpoint = {"protocol": "chat_completions", **endpoint}
    return EmbeddingCall(
        endpoint=Endpoint(
            provider="p", base_url=f"http://127.0.0.1:{port}/v1", headers={"authorization": "Bearer key"}, **endpoint
        ),
        model="m",
        request=EmbeddingRequest(inputs=inputs, end_user="u"),
        deadline=asyncio.get_running_loop().time() + deadline_s,
    )


async def test_an_answer_comes_with_its_vectors_and_what_was_dropped(upstream):
    async def handle(exchange: Exchange) -> None:
        left = {"X-RateLimit-Remaining-Requests": "5"}
        await exchange.answer(answer([1.0, 2.0], [3.0, 4.0]), headers=left)

    async with raw_provider(handle) as provider:
        response = await upstream.embed(call(provider.port, omit=frozenset({"user"})))
    assert response.vectors == ((1.0, 2.0), (3.0, 4.0))
    assert response.dropped == ("end_user",)
    assert response.remaining is not None
    assert response.remaining.requests == 5
    assert provider.requests[0].head.startswith(b"POST /v1/embeddings HTTP/1.1")
    assert b"Bearer key" in provider.requests[0].head


async def hang(exchange: Exchange) -> None:
    await exchange.closed()


async def one_vector_for_two(exchange: Exchange) -> None:
    await exchange.answer(answer([1.0]))


async def cut(exchange: Exchange) -> None:
    await exchange.answer(answer([1.0], [2.0]), cut=20)


async def too_large(exchange: Exchange) -> None:
    await exchange.answer(answer([1.0] * 100_000, [2.0]))


@pytest.mark.parametrize(
    ("handler", "code"),
    [
        (hang, "deadline"),
        (one_vector_for_two, "malformed"),
        (cut, "connection_lost"),
        (too_large, "response_too_large"),
    ],
)
async def test_it_fails_as_every_other_call(upstream, handler, code):
    async with raw_provider(handler) as provider:
        with pytest.raises(Broken) as caught:
            await upstream.embed(call(provider.port, deadline_s=0.5, max_response_bytes=65536))
        assert caught.value.code == code


async def test_a_rate_limit_is_rejected_with_its_wait(upstream):
    async def handle(exchange: Exchange) -> None:
        await exchange.answer(b'{"error":{"code":"rate_limit_exceeded"}}', status=429, headers={"retry-after": "3"})

    async with raw_provider(handle) as provider:
        with pytest.raises(Rejected) as caught:
            await upstream.embed(call(provider.port))
    assert (caught.value.error_class, caught.value.retry_after_s) == (ErrorClass.TRANSIENT, 3.0)


async def test_a_protocol_without_embeddings_refuses_before_anything_is_sent(upstream):
    without = [name for name, protocol in PROTOCOLS.items() if not isinstance(protocol, EmbeddingProtocol)]
    for name in without:
        with pytest.raises(RequestNotExpressible):
            await upstream.embed(call(1, protocol=name, clocks=Clocks(connect_s=0.1)))
    assert isinstance(PROTOCOLS["chat_completions"], EmbeddingProtocol)
