"""Embeddings of Gemini, both ways."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from adapters.chat import NativeRequest
from adapters.contract import EmbeddingCall, EmbeddingRequest, EmbeddingResponse, Endpoint, HttpRequest
from adapters.errors import Broken, ErrorClass, MalformedRequest, Rejected, RequestNotExpressible
from adapters.protocols.gemini import Gemini
from metering.usage import Usage

PROTOCOL = Gemini()


def rendered(request: EmbeddingRequest, model: str = "emb", **endpoint: Any) -> HttpRequest:
    return PROTOCOL.render_embedding_request(
        EmbeddingCall(
            endpoint=Endpoint(provider="p", protocol="gemini", base_url="", **endpoint),
            model=model,
            request=request,
            deadline=0.0,
        )
    )


def content(text: str) -> dict[str, Any]:
    return {"parts": [{"text": text}]}


def test_texts_are_sent_as_one_batch():
    sent = rendered(EmbeddingRequest(inputs=("a", "b"), dimensions=8, purpose="query"))
    assert sent.path == "/models/emb:batchEmbedContents"
    entry = {"model": "models/emb", "taskType": "RETRIEVAL_QUERY", "outputDimensionality": 8}
    assert json.loads(sent.body) == {
        "requests": [{**entry, "content": content("a")}, {**entry, "content": content("b")}]
    }


@pytest.mark.parametrize(
    ("purpose", "word"), [("document", "RETRIEVAL_DOCUMENT"), ("clustering", "CLUSTERING"), (None, None)]
)
def test_a_purpose_has_googles_word(purpose, word):
    (entry,) = json.loads(rendered(EmbeddingRequest(inputs=("a",), purpose=purpose)).body)["requests"]
    assert entry.get("taskType") == word


def test_what_cannot_be_said_is_refused():
    with pytest.raises(RequestNotExpressible) as caught:
        rendered(EmbeddingRequest(inputs=("a", (1, 2))))
    assert caught.value.path == "inputs[1]"
    with pytest.raises(RequestNotExpressible) as caught:
        rendered(EmbeddingRequest(inputs=("a",), end_user="u"))
    assert caught.value.path == "end_user"
    assert rendered(EmbeddingRequest(inputs=("a",), end_user="u"), omit=frozenset({"end_user"})).dropped == (
        "end_user",
    )
    native = NativeRequest(protocol="other", fields={}, unmapped=("x",))
    with pytest.raises(RequestNotExpressible) as caught:
        rendered(EmbeddingRequest(inputs=("a",), native=native))
    assert caught.value.path == "x"


def test_a_callers_batch_is_read_and_goes_on_with_the_models_name_only():
    body = {
        "requests": [
            {"model": "models/alias", "content": content("a"), "taskType": "RETRIEVAL_DOCUMENT", "title": "t"},
            {"model": "models/alias", "content": {"parts": {"text": "b"}}, "task_type": "RETRIEVAL_DOCUMENT"},
        ]
    }
    request = PROTOCOL.parse_embedding_request(json.dumps(body).encode())
    assert (request.inputs, request.purpose, request.dimensions) == (("a", "b"), "document", None)
    assert request.native is not None
    assert request.native.unmapped == ("requests[0].title",)
    body["requests"] = [{**entry, "model": "models/emb"} for entry in body["requests"]]
    assert json.loads(rendered(request).body) == body


def test_a_callers_single_request_is_read_and_sent_as_a_batch_of_one():
    body = {"content": content("a"), "outputDimensionality": 4}
    request = PROTOCOL.parse_embedding_request(json.dumps(body).encode())
    assert (request.inputs, request.dimensions) == (("a",), 4)
    assert json.loads(rendered(request).body) == {"requests": [{**body, "model": "models/emb"}]}


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({}, "content"),
        ({"requests": []}, "requests"),
        ({"requests": [{}]}, "requests[0].content"),
        ({"requests": [{"content": {}}]}, "requests[0].content.parts"),
        ({"content": {"parts": [{"inlineData": {}}]}}, "content.parts[0].text"),
        ({"content": content("a"), "outputDimensionality": 0}, "outputDimensionality"),
    ],
)
def test_a_fault_is_named_by_its_path(body, path):
    with pytest.raises(MalformedRequest) as caught:
        PROTOCOL.parse_embedding_request(json.dumps(body).encode())
    assert caught.value.path == path


def test_vectors_are_read_and_told():
    body = b'{"embeddings": [{"values": [0.5, 1]}, {"values": [2, 3]}], "usageMetadata": {"promptTokenCount": 7}}'
    response = PROTOCOL.parse_embedding_response(200, {}, body)
    assert response.vectors == ((0.5, 1.0), (2.0, 3.0))
    assert response.usage == Usage(input_total=7)
    assert PROTOCOL.render_embedding_response(response, base64=False) == body
    told = json.loads(PROTOCOL.render_embedding_response(msgspec.structs.replace(response, native=None), base64=False))
    assert told == {
        "embeddings": [{"values": [0.5, 1.0]}, {"values": [2.0, 3.0]}],
        "usageMetadata": {"promptTokenCount": 7, "totalTokenCount": 7},
    }
    one = json.loads(PROTOCOL.render_embedding_response(EmbeddingResponse(vectors=((1.0,),)), base64=False))
    assert one == {"embeddings": [{"values": [1.0]}], "embedding": {"values": [1.0]}}


@pytest.mark.parametrize("body", [b"{}", b"no", b'{"embeddings": []}', b'{"embeddings": [{"values": []}]}'])
def test_what_are_no_vectors_is_no_answer(body):
    with pytest.raises(Broken):
        PROTOCOL.parse_embedding_response(200, {}, body)


def test_an_error_is_an_error_under_any_status():
    body = b'{"error": {"code": 429, "status": "RESOURCE_EXHAUSTED"}}'
    for status in (200, 429):
        with pytest.raises(Rejected) as caught:
            PROTOCOL.parse_embedding_response(status, {}, body)
        assert caught.value.error_class is ErrorClass.TRANSIENT
        assert caught.value.rate_limited
