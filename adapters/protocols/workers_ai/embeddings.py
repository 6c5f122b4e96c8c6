"""
Embeddings of Workers AI, both ways.

Source: https://developers.cloudflare.com/workers-ai/models/bge-base-en-v1.5/
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from adapters.body import ABSENT, read_fields, typed
from adapters.chat import NativeRequest
from adapters.classify import request_id
from adapters.contract import EmbeddingCall, EmbeddingRequest, EmbeddingResponse, HttpRequest
from adapters.errors import Broken
from adapters.paths import Paths, Words
from adapters.protocols.workers_ai import failures, schema
from adapters.protocols.workers_ai.answers import NAME, read_usage
from adapters.protocols.workers_ai.rendering import render_usage
from adapters.protocols.workers_ai.requests import path_of
from adapters.sending import Sending
from metering.usage import NOTHING

#: Canonical names to those of this format.
_WORDS: Words = {"inputs": ("text",)}

_encode = msgspec.json.Encoder().encode
_envelope = msgspec.json.Decoder(schema.EmbeddingsEnvelope)


def parse_request(body: bytes) -> EmbeddingRequest:
    """Raises `MalformedRequest` with the field's path."""
    fields = read_fields(body)
    wire = typed(body, schema.EmbeddingsIn, "")
    return EmbeddingRequest(
        inputs=(wire.text,) if isinstance(wire.text, str) else wire.text,
        native=NativeRequest(
            protocol=NAME, fields=fields, unmapped=tuple(name for name in fields if name not in {"text", "model"})
        ),
        paths=Paths(words=_WORDS),
    )


def render_response(response: EmbeddingResponse) -> bytes:
    if response.native is not None and response.native_protocol == NAME:
        return bytes(response.native)
    result: dict[str, Any] = {
        "shape": [len(response.vectors), len(response.vectors[0]) if response.vectors else 0],
        "data": response.vectors,
    }
    if response.usage != NOTHING:
        result["usage"] = render_usage(response.usage)
    return _encode({"result": result, "success": True, "errors": [], "messages": []})


def render_request(call: EmbeddingCall) -> HttpRequest:
    """Raises `RequestNotExpressible` before anything is sent."""
    request, native = call.request, call.request.native
    sending = Sending(call, NAME, _WORDS)
    fields: dict[str, Any]
    if native is not None and native.protocol == NAME:
        fields = {name: raw for name, raw in native.fields.items() if name != "model"}
    else:
        sending.refuse_unmapped()
        for name in ("dimensions", "purpose", "end_user"):
            if getattr(request, name) is not None:
                sending.refuse(name, "has no such field")
        for i, text in enumerate(request.inputs):
            if not isinstance(text, str):
                raise sending.refusal(f"inputs[{i}]", f"{NAME} takes only text, no numbers of tokens")
        fields = {"text": list(request.inputs)}
    sending.as_profiled(fields)
    return sending.post(path_of(call.model), fields, stream=False)


def parse_response(headers: Mapping[str, str], body: bytes) -> EmbeddingResponse:
    """Raises `Rejected` for an error, and `Broken` for what are no vectors."""
    body = body.strip()
    try:
        wire = _envelope.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Broken("what came are no embeddings", code="malformed") from error
    if wire.success is False or (wire.errors is not ABSENT and bytes(wire.errors) not in {b"[]", b"null"}):
        raise failures.from_body(body, headers=headers)
    data = wire.result.data if wire.result is not None else wire.data
    if not data or not all(data):
        raise Broken("the answer has no vectors", code="malformed")
    usage = wire.result.usage if wire.result is not None else None
    return EmbeddingResponse(
        vectors=data,
        usage=read_usage(usage) if usage is not None else NOTHING,
        provider_request_id=request_id(headers),
        native=msgspec.Raw(body),
        native_protocol=NAME,
    )
