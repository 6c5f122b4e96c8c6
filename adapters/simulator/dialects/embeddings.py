"""
Embeddings as OpenAI, Gemini and Workers AI have them.

Each input is answered by one choice of the simulated answer, whose text is hashed into a vector: the same texts get the
same vectors in every protocol, and no two inputs of one request the same.

Sources: https://platform.openai.com/docs/api-reference/embeddings, https://ai.google.dev/api/embeddings,
https://developers.cloudflare.com/workers-ai/models/bge-base-en-v1.5/
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import unquote

import msgspec
from typing_extensions import override

from adapters.simulator.content import Answer
from adapters.simulator.dialect import AS_ASKED, Asked, Writer, decode, field_names, refuse_unshown, text_of
from adapters.simulator.dialects import openai
from adapters.simulator.dialects.gemini import Gemini
from adapters.simulator.dialects.workers_ai import WorkersAi, model_in, wrapped
from adapters.simulator.faults import Faults
from adapters.simulator.ledger import Ended
from adapters.simulator.requests import BadRequest, Message, Request

DIMENSIONS = 8

_Text = Annotated[str, msgspec.Meta(min_length=1)]
_Tokens = Annotated[list[int], msgspec.Meta(min_length=1)]
_INPUT: Any = _Text | Annotated[list[_Text | int | _Tokens], msgspec.Meta(min_length=1)]


class _Request(msgspec.Struct):
    model: Annotated[str, msgspec.Meta(min_length=1)]
    input: msgspec.Raw
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None
    simulate: dict[str, Any] | None = None


class Embeddings:
    """A `Dialect`."""

    request_id_header = "x-request-id"
    statuses = AS_ASKED

    def check(self, faults: Faults) -> None:
        refuse_unshown(faults, {"terminal": (), "finish": ()})

    def parse(self, path: str, query: str, body: bytes) -> Asked:  # noqa: ARG002 - the same of every dialect
        asked = decode(body, _Request)
        inputs: Any = decode(bytes(asked.input), _INPUT)
        texts = [inputs] if isinstance(inputs, str) or isinstance(inputs[0], int) else inputs
        if len(texts) > 128:
            raise BadRequest("Too many inputs.", param="input")
        request = _request(asked.model, texts, user=asked.user, simulate=asked.simulate)
        return Asked(request=request, fields=field_names(body))

    def models(self, names: Sequence[str]) -> bytes:
        return openai.models(names)

    def whole(self, answer: Answer, faults: Faults) -> tuple[bytes, Ended]:
        body: dict[str, Any] = {
            "object": "list",
            "model": answer.model,
            "data": [
                {"object": "embedding", "index": index, "embedding": vector}
                for index, vector in enumerate(_vectors(answer))
            ],
        }
        if faults.usage != "none":
            body["usage"] = {"prompt_tokens": answer.prompt_tokens, "total_tokens": answer.prompt_tokens}
        return text_of(body), Ended.COMPLETE

    def writer(self, answer: Answer, faults: Faults, asked: Asked) -> Writer:
        raise NotImplementedError("embeddings are not streamed")

    def error(self, status: int, message: str, *, param: str | None, code: str | None, faults: Faults) -> bytes:
        return openai.error_body(status, message, param=param, code=code, faults=faults)

    def left_headers(self, faults: Faults, *, limited: bool) -> Iterable[str]:
        return openai.left_headers(faults, limited=limited)


# ------------------------------------------------------------------ Gemini

_EMBED = re.compile(r"/v1beta/models/(?P<model>[^/]+):(?P<method>embedContent|batchEmbedContents)")
_MOST_AT_ONCE = 100


class _GeminiPart(msgspec.Struct, forbid_unknown_fields=True):
    text: _Text


class _GeminiContent(msgspec.Struct, forbid_unknown_fields=True):
    parts: Annotated[list[_GeminiPart], msgspec.Meta(min_length=1)]
    role: str | None = None


class _GeminiEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    content: _GeminiContent
    model: str | None = None
    task_type: (
        Literal[
            "TASK_TYPE_UNSPECIFIED",
            "RETRIEVAL_QUERY",
            "RETRIEVAL_DOCUMENT",
            "SEMANTIC_SIMILARITY",
            "CLASSIFICATION",
            "CLUSTERING",
            "QUESTION_ANSWERING",
            "FACT_VERIFICATION",
            "CODE_RETRIEVAL_QUERY",
        ]
        | None
    ) = None
    title: str | None = None
    #: The rest is cut off at the end.
    output_dimensionality: Annotated[int, msgspec.Meta(ge=1, le=DIMENSIONS)] | None = None
    simulate: dict[str, Any] | None = None


class _GeminiBatch(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    requests: Annotated[list[_GeminiEntry], msgspec.Meta(min_length=1, max_length=_MOST_AT_ONCE)]
    simulate: dict[str, Any] | None = None


class GeminiEmbeddings(Gemini):
    """A `Dialect`: one text, or many. Answers of a batch are cut to `sizes`, one for each entry."""

    def __init__(self, *, batch: bool = True, sizes: Sequence[int | None] = ()) -> None:
        self._batch = batch
        self._sizes = sizes

    @override
    def check(self, faults: Faults) -> None:
        super().check(faults)
        refuse_unshown(faults, {"terminal": (), "finish": ()})

    @override
    def parse(self, path: str, query: str, body: bytes) -> Asked:
        called = _EMBED.fullmatch(path)
        assert called is not None, "the server sends us only what fits"
        batch, model = called["method"] == "batchEmbedContents", unquote(called["model"])
        simulate: dict[str, Any] | None
        if batch:
            many = decode(body, _GeminiBatch)
            entries, simulate = many.requests, many.simulate
        else:
            entries = [decode(body, _GeminiEntry)]
            simulate = entries[0].simulate
        for index, entry in enumerate(entries):
            # Only a batch has to say it again.
            if entry.model != f"models/{model}" and (batch or entry.model is not None):
                at = f"requests[{index}].model" if batch else "model"
                raise BadRequest("The model must match the one in the path.", param=at)
        texts = ["".join(part.text for part in entry.content.parts) for entry in entries]
        sizes = [entry.output_dimensionality for entry in entries]
        return Asked(
            request=_request(model, texts, simulate=simulate),
            fields=field_names(body),
            dialect=GeminiEmbeddings(batch=batch, sizes=sizes),
        )

    @override
    def whole(self, answer: Answer, faults: Faults) -> tuple[bytes, Ended]:
        told = [{"values": vector[:size]} for vector, size in zip(_vectors(answer), self._sizes, strict=True)]
        body: dict[str, Any] = {"embeddings": told} if self._batch else {"embedding": told[0]}
        if faults.usage != "none":
            body["usageMetadata"] = {"promptTokenCount": answer.prompt_tokens}
        return text_of(body), Ended.COMPLETE


# ------------------------------------------------------------------ Workers AI


class _WorkersBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    text: _Text | Annotated[list[_Text], msgspec.Meta(min_length=1, max_length=_MOST_AT_ONCE)]
    pooling: Literal["mean", "cls"] = "mean"
    simulate: dict[str, Any] | None = None


class WorkersEmbeddings(WorkersAi):
    """A `Dialect`. All of this API has one path: what has `text` is to be embedded, all else is a chat."""

    def __init__(self, pooling: str = "mean") -> None:
        self._pooling = pooling

    @override
    def check(self, faults: Faults) -> None:
        super().check(faults)
        refuse_unshown(faults, {"terminal": (), "finish": ()})

    @override
    def parse(self, path: str, query: str, body: bytes) -> Asked:
        fields = field_names(body)
        if "text" not in fields:
            return msgspec.structs.replace(super().parse(path, query, body), dialect=_WORKERS_CHAT)
        asked = decode(body, _WorkersBody)
        texts = [asked.text] if isinstance(asked.text, str) else asked.text
        return Asked(
            request=_request(model_in(path, query), texts, simulate=asked.simulate),
            fields=fields,
            dialect=WorkersEmbeddings(asked.pooling),
        )

    @override
    def whole(self, answer: Answer, faults: Faults) -> tuple[bytes, Ended]:
        result: dict[str, Any] = {
            "shape": [len(answer.choices), DIMENSIONS],
            "data": _vectors(answer),
            "pooling": self._pooling,
        }
        if faults.usage != "none":
            result["usage"] = {"prompt_tokens": answer.prompt_tokens, "total_tokens": answer.prompt_tokens}
        return wrapped(result), Ended.COMPLETE


_WORKERS_CHAT = WorkersAi()


# ------------------------------------------------------------------ vectors


def _request(
    model: str, texts: Sequence[object], *, user: str | None = None, simulate: dict[str, Any] | None = None
) -> Request:
    said = Message(role="user", content=text_of(texts).decode())
    return Request(model=model, messages=[said], n=len(texts), user=user, simulate=simulate)


def _vectors(answer: Answer) -> list[list[float]]:
    return [_vector(str(index), answer) for index in range(len(answer.choices))]


def _vector(place: str, answer: Answer) -> list[float]:
    digest = hashlib.blake2b(f"{place} {answer.choices}".encode(), digest_size=DIMENSIONS).digest()
    # Eighths, which 32-bit floats hold exactly.
    return [byte / 8 - 16 for byte in digest]
