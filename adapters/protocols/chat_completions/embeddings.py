"""
Embeddings as OpenAI has them, both ways: https://platform.openai.com/docs/api-reference/embeddings.

A vector comes as numbers or as base64 of little-endian 32-bit floats; a caller gets what it asked for, whichever of the
two the provider gave.
"""

from __future__ import annotations

import base64
import binascii
import math
import sys
from array import array
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from adapters.body import ABSENT, Wire, read_fields, typed
from adapters.chat import NativeRequest
from adapters.classify import request_id
from adapters.contract import EmbeddingCall, EmbeddingRequest, EmbeddingResponse, HttpRequest
from adapters.errors import Broken, MalformedRequest
from adapters.paths import Paths, Words
from adapters.protocols.chat_completions import answers, failures
from adapters.protocols.chat_completions.answers import NAME
from adapters.protocols.chat_completions.schema import Count, Name, UsageOut
from adapters.sending import Sending
from metering.usage import NOTHING, Usage

_PATH = "/embeddings"
_ENVELOPE = frozenset({"model", "encoding_format"})

_Tokens = Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)]

_encode = msgspec.json.Encoder().encode


class EmbeddingRequestIn(Wire):
    input: msgspec.Raw
    model: Name | None = None
    encoding_format: str | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    user: str | None = None
    #: NVIDIA's and others': "query" or "passage".
    input_type: str | None = None


class _Item(Wire):
    embedding: tuple[float, ...] | str
    index: int | None = None


class EmbeddingAnswerOut(Wire):
    data: tuple[_Item, ...] | None = None
    model: str | None = None
    usage: msgspec.Raw = ABSENT
    error: Any = None


class _Shape(Wire):
    embedding: msgspec.Raw


class _Shapes(Wire):
    data: tuple[_Shape, ...]


_answer = msgspec.json.Decoder(EmbeddingAnswerOut)
_usage = msgspec.json.Decoder(UsageOut | None)
_shapes = msgspec.json.Decoder(_Shapes)

#: Canonical names to those of this format.
_WORDS: Words = {"inputs": ("input",), "purpose": ("input_type",), "end_user": ("user",)}
_PATHS = Paths(words=_WORDS)
_MAPPED = frozenset(field.name for field in msgspec.structs.fields(EmbeddingRequestIn))


class EmbeddingEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says of how it wants to be served."""

    model: str | None = None
    base64: bool = False


def embedding_envelope(request: EmbeddingRequest) -> EmbeddingEnvelope:
    """Of a request that `parse_request` gave."""
    fields = request.native.fields if request.native is not None and request.native.protocol == NAME else {}
    told = {name: msgspec.json.decode(fields[name]) for name in _ENVELOPE & fields.keys()}
    return EmbeddingEnvelope(model=told.get("model"), base64=told.get("encoding_format") == "base64")


def parse_request(body: bytes) -> EmbeddingRequest:
    """Raises `MalformedRequest`, which names the field and repeats none of its content."""
    fields = read_fields(body)
    wire = typed(body, EmbeddingRequestIn, "")
    if wire.encoding_format not in {None, "float", "base64"}:
        raise MalformedRequest("encoding_format", "is not one of the allowed values")
    return EmbeddingRequest(
        inputs=_inputs(wire.input),
        dimensions=wire.dimensions,
        purpose=wire.input_type,
        end_user=wire.user,
        native=NativeRequest(
            protocol=NAME, fields=fields, unmapped=tuple(name for name in fields if name not in _MAPPED)
        ),
        paths=_PATHS,
    )


def _inputs(raw: msgspec.Raw) -> tuple[str | tuple[int, ...], ...]:
    """One text, texts, one text's tokens, or tokens of many: each shape is told by how it begins."""
    start = bytes(raw)[:64].replace(b" ", b"")
    inputs: tuple[str | tuple[int, ...], ...]
    if start[:1] == b'"':
        inputs = (typed(raw, str, "input"),)
    elif start[:2] == b'["':
        inputs = typed(raw, tuple[str, ...], "input")
    elif start[:2] == b"[[":
        inputs = typed(raw, tuple[_Tokens, ...], "input")
    else:
        inputs = (typed(raw, _Tokens, "input"),)
    if any(not item for item in inputs):
        raise MalformedRequest("input", "holds an empty text")
    return inputs


def render_request(call: EmbeddingCall) -> HttpRequest:
    """Raises `RequestNotExpressible` for what this protocol has no word for."""
    request = call.request
    native = request.native
    sending = Sending(call, NAME, _WORDS)
    fields: dict[str, Any]
    if native is not None and native.protocol == NAME:
        fields = dict(native.fields)
    else:
        sending.refuse_unmapped()
        fields = {
            "input": request.inputs if len(request.inputs) > 1 else request.inputs[0],
            "dimensions": request.dimensions,
            "input_type": request.purpose,
            "user": request.end_user,
        }
        fields = {name: value for name, value in fields.items() if value is not None}
    fields["model"] = call.model
    sending.as_profiled(fields)
    return sending.post(_PATH, fields, stream=False)


def parse_response(headers: Mapping[str, str], body: bytes) -> EmbeddingResponse:
    """Raises `Rejected` for an error in place of an answer, `Broken` for what has no vectors in order."""
    try:
        wire = _answer.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Broken("what came is no list of embeddings", code="malformed") from error
    if wire.error is not None:
        raise failures.from_error(wire.error, headers=headers)
    if not wire.data:
        raise Broken("the answer has no embeddings", code="malformed")
    vectors: dict[int, tuple[float, ...]] = {}
    for place, item in enumerate(wire.data):
        vectors[place if item.index is None else item.index] = _vector(item.embedding)
    if vectors.keys() != set(range(len(wire.data))):
        raise Broken("the embeddings are not numbered from 0", code="malformed")
    usage, cost = _read_usage(wire.usage)
    return EmbeddingResponse(
        vectors=tuple(vectors[place] for place in range(len(vectors))),
        usage=usage,
        served_model=wire.model or None,
        provider_request_id=request_id(headers),
        reported_cost_usd=cost,
        native=msgspec.Raw(body.strip()),
        native_protocol=NAME,
    )


def _vector(given: tuple[float, ...] | str) -> tuple[float, ...]:
    if isinstance(given, str):
        try:
            numbers = array("f", base64.b64decode(given, validate=True))
        except (binascii.Error, ValueError) as error:
            raise Broken("an embedding is no base64 of 32-bit floats", code="malformed") from error
        if sys.byteorder == "big":
            numbers.byteswap()
        given = tuple(numbers)
    if not given or not all(map(math.isfinite, given)):
        raise Broken("an embedding is empty or holds no numbers", code="malformed")
    return given


def _read_usage(raw: msgspec.Raw) -> tuple[Usage, str | None]:
    """Figures that are no figures cost only themselves, not the answer."""
    if raw is ABSENT:
        return NOTHING, None
    try:
        return answers.read_usage(_usage.decode(raw))
    except (msgspec.DecodeError, RecursionError):
        return NOTHING, None


def render_response(response: EmbeddingResponse, *, base64_wanted: bool) -> bytes:
    """OpenAI's list; the provider's own, untouched, where that is in this protocol and in the shape that is wanted."""
    if response.native is not None and response.native_protocol == NAME and _is_as(response.native, base64_wanted):
        return bytes(response.native)
    body: dict[str, Any] = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _packed(vector) if base64_wanted else vector}
            for index, vector in enumerate(response.vectors)
        ],
        "model": response.served_model or "",
    }
    if response.usage.input_total is not None:
        body["usage"] = {"prompt_tokens": response.usage.input_total, "total_tokens": response.usage.input_total}
    return _encode(body)


def _is_as(native: msgspec.Raw, base64_wanted: bool) -> bool:
    try:
        shapes = _shapes.decode(native)
    except (msgspec.DecodeError, RecursionError):
        return False
    return all((bytes(item.embedding)[:1] == b'"') is base64_wanted for item in shapes.data)


def _packed(vector: tuple[float, ...]) -> str:
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
