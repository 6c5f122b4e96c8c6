"""
Embeddings of Gemini, both ways: `batchEmbedContents`, and a caller's single `embedContent`.

Source: https://ai.google.dev/api/embeddings
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from adapters.body import given, read_fields, typed
from adapters.chat import NativeRequest
from adapters.classify import request_id
from adapters.contract import EmbeddingCall, EmbeddingRequest, EmbeddingResponse, HttpRequest
from adapters.errors import Broken, MalformedRequest
from adapters.paths import Paths, Words
from adapters.protocols.gemini import failures, requests, schema
from adapters.protocols.gemini.answers import NAME
from adapters.sending import Sending
from metering.usage import NOTHING, Usage

_PURPOSES = {"query": "RETRIEVAL_QUERY", "document": "RETRIEVAL_DOCUMENT"}
_ASKED = {word: purpose for purpose, word in _PURPOSES.items()}

#: Canonical names to those of this format.
_WORDS: Words = {
    "inputs": ("requests", "content"),
    "dimensions": ("requests[0].outputDimensionality", "outputDimensionality"),
    "purpose": ("requests[0].taskType", "taskType"),
}

_encode = msgspec.json.Encoder().encode
_embeddings = msgspec.json.Decoder(schema.EmbeddingsOut)
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


def parse_request(body: bytes) -> EmbeddingRequest:
    """Raises `MalformedRequest` with the field's path."""
    native = read_fields(body)
    fields = requests.fields_of(native)
    unmapped: list[str] = []
    if "requests" in fields:
        unmapped += [name for name in fields if name not in {"requests", "model"}]
        entries = requests.list_of(fields["requests"], "requests")
        if not entries:
            raise MalformedRequest("requests", "is empty")
        paths = [f"requests[{i}]" for i in range(len(entries))]
        found = [requests.object_of(entry, path) for entry, path in zip(entries, paths, strict=True)]
    else:
        paths, found = [""], [fields]
    inputs: list[str] = []
    asked: set[tuple[str | None, int | None]] = set()
    for path, entry in zip(paths, found, strict=True):
        at = f"{path}." if path else ""
        if "content" not in entry:
            raise MalformedRequest(f"{at}content", "is required")
        inputs.append(_text(entry["content"], f"{at}content"))
        asked.add(
            (
                typed(entry["taskType"], str, f"{at}taskType") if "taskType" in entry else None,
                typed(entry["outputDimensionality"], int, f"{at}outputDimensionality")
                if "outputDimensionality" in entry
                else None,
            )
        )
        known = {"model", "content", "taskType", "outputDimensionality", "requests"}
        unmapped += [f"{at}{name}" for name in entry if name not in known and f"{at}{name}" not in unmapped]
    if len(asked) > 1:
        # One answer is asked for in more than one way, which no other protocol can say.
        unmapped += ["requests"]
    purpose, dimensions = next(iter(asked)) if len(asked) == 1 else (None, None)
    if dimensions is not None and not 0 < dimensions < 2**31:
        raise MalformedRequest("outputDimensionality", "is out of range")
    return EmbeddingRequest(
        inputs=tuple(inputs),
        dimensions=dimensions,
        purpose=None if purpose in {None, "TASK_TYPE_UNSPECIFIED"} else _ASKED.get(purpose, purpose.lower()),
        native=NativeRequest(protocol=NAME, fields=native, unmapped=tuple(unmapped)),
        paths=Paths(words=_WORDS),
    )


def _text(raw: msgspec.Raw, path: str) -> str:
    content = requests.object_of(raw, path)
    texts = []
    for i, part in enumerate(requests.list_of(content.get("parts"), f"{path}.parts")):
        fields = requests.object_of(part, f"{path}.parts[{i}]")
        if "text" not in fields:
            raise MalformedRequest(f"{path}.parts[{i}].text", "is required")
        texts.append(typed(fields["text"], str, f"{path}.parts[{i}].text"))
    if not texts:
        raise MalformedRequest(f"{path}.parts", "is required")
    return "".join(texts)


def render_response(response: EmbeddingResponse) -> bytes:
    """In both shapes where there is one vector: a caller of `embedContent` looks for `embedding`."""
    if response.native is not None and response.native_protocol == NAME:
        return bytes(response.native)
    body: dict[str, Any] = {"embeddings": [{"values": vector} for vector in response.vectors]}
    if len(response.vectors) == 1:
        body["embedding"] = body["embeddings"][0]
    if response.usage.input_total is not None:
        body["usageMetadata"] = {
            "promptTokenCount": response.usage.input_total,
            "totalTokenCount": response.usage.input_total,
        }
    return _encode(body)


def render_request(call: EmbeddingCall) -> HttpRequest:
    """Raises `RequestNotExpressible` before anything is sent."""
    request, native = call.request, call.request.native
    path = requests.path_of(call.model, "batchEmbedContents")
    model = call.model if "/" in call.model else f"models/{call.model}"
    sending = Sending(call, NAME, _WORDS)
    fields: dict[str, Any]
    if native is not None and native.protocol == NAME:
        given_fields = requests.fields_of(native.fields)
        entries = (
            [_object.decode(entry) for entry in requests.list_of(given_fields["requests"], "requests")]
            if "requests" in given_fields
            else [dict(native.fields)]
        )
        fields = {name: raw for name, raw in native.fields.items() if "requests" in given_fields and name != "model"}
        fields["requests"] = [{**entry, "model": model} for entry in entries]
    else:
        sending.refuse_unmapped()
        if request.end_user is not None:
            sending.refuse("end_user", "has no such field")
        fields = {"requests": [_entry(call, i, model, sending) for i in range(len(request.inputs))]}
    sending.as_profiled(fields)
    return sending.post(path, fields, stream=False)


def _entry(call: EmbeddingCall, number: int, model: str, sending: Sending) -> dict[str, Any]:
    request, text = call.request, call.request.inputs[number]
    if not isinstance(text, str):
        raise sending.refusal(f"inputs[{number}]", f"{NAME} takes only text, no numbers of tokens")
    entry: dict[str, Any] = {"model": model, "content": {"parts": [{"text": text}]}}
    if request.purpose is not None:
        entry["taskType"] = _PURPOSES.get(request.purpose, request.purpose.upper())
    if request.dimensions is not None:
        entry["outputDimensionality"] = request.dimensions
    return entry


def parse_response(headers: Mapping[str, str], body: bytes) -> EmbeddingResponse:
    """Raises `Rejected` for an error, and `Broken` for what are no vectors."""
    body = body.strip()
    try:
        wire = _embeddings.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Broken("what came are no embeddings", code="malformed") from error
    if (failed := given(wire.error)) is not None:
        raise failures.from_error(failed, headers=headers)
    found = wire.embeddings if wire.embeddings is not None else (wire.embedding,) if wire.embedding else ()
    if not found or not all(embedding.values for embedding in found):
        raise Broken("the answer has no vectors", code="malformed")
    tokens = wire.usage_metadata.prompt_token_count if wire.usage_metadata else None
    return EmbeddingResponse(
        vectors=tuple(embedding.values for embedding in found),
        usage=Usage(input_total=tokens) if tokens is not None and 0 <= tokens < 2**31 else NOTHING,
        provider_request_id=request_id(headers),
        native=msgspec.Raw(body),
        native_protocol=NAME,
    )
