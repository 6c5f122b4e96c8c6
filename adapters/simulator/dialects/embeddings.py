"""
Embeddings as OpenAI has them: https://platform.openai.com/docs/api-reference/embeddings.

Each input is answered by one choice of the simulated answer, whose text is hashed into a vector: the same request gets
the same vectors, and no two inputs of one request the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec

from adapters.simulator.content import Answer
from adapters.simulator.dialect import AS_ASKED, Asked, Writer, decode, field_names, refuse_unshown, text_of
from adapters.simulator.dialects import openai
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
        request = Request(
            model=asked.model,
            messages=[Message(role="user", content=text_of(texts).decode())],
            n=len(texts),
            user=asked.user,
            simulate=asked.simulate,
        )
        return Asked(request=request, fields=field_names(body))

    def models(self, names: Sequence[str]) -> bytes:
        return openai.models(names)

    def whole(self, answer: Answer, faults: Faults) -> tuple[bytes, Ended]:
        body: dict[str, Any] = {
            "object": "list",
            "model": answer.model,
            "data": [
                {"object": "embedding", "index": index, "embedding": _vector(str(index), answer)}
                for index in range(len(answer.choices))
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


def _vector(place: str, answer: Answer) -> list[float]:
    digest = hashlib.blake2b(f"{place} {answer.choices}".encode(), digest_size=DIMENSIONS).digest()
    # Eighths, which 32-bit floats hold exactly.
    return [byte / 8 - 16 for byte in digest]
