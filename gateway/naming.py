"""
The id and the model that every client looks for in an answer, where its provider told none.

Workers AI names neither. A client that keeps answers by their id, or counts by their model, would take them all for
one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

import msgspec

from adapters.chat import ChatResponse
from adapters.contract import EmbeddingResponse

#: What the id of an answer begins with, by the protocol it is told in.
ID_PREFIXES: Final[Mapping[str, str]] = {
    "anthropic_messages": "msg_",
    "chat_completions": "chatcmpl-",
    "responses": "resp_",
}

_R = TypeVar("_R", bound=ChatResponse | EmbeddingResponse)


def named(response: _R, *, protocol: str, answer_id: str, model: str | None) -> _R:
    """The answer with both. `model` is the route's, None where that is not known."""
    served = response.served_model or model
    if isinstance(response, EmbeddingResponse):
        return msgspec.structs.replace(response, served_model=served)
    assert isinstance(response, ChatResponse), "there are two kinds of answers"
    if response.response_id and response.served_model:
        return response
    answer_id = response.response_id or ID_PREFIXES.get(protocol, "") + answer_id
    return msgspec.structs.replace(response, response_id=answer_id, served_model=served)
