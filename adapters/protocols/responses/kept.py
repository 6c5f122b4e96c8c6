"""
Responses that are kept, to be looked up by their id: those that are made in the background.

Whoever waits for one reads the same object again and again, before there is an answer and after. So what it repeats of
its request is put aside when that comes, and laid under whatever is known by the time it is asked for.

https://platform.openai.com/docs/guides/background
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from adapters.body import given
from adapters.chat import ChatRequest
from adapters.protocols.responses.answers import response_object

#: How the ids of these begin. No provider's do, so that one which comes back as `previous_response_id` is known.
ID_PREFIX: Final = "resp_bg_"

#: What an answer repeats of its request.
_REPEATED: Final = (
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "parallel_tool_calls",
    "previous_response_id",
    "prompt_cache_key",
    "reasoning",
    "safety_identifier",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
    "truncation",
    "user",
)
#: Of a request, what is about how it is served and asks nothing of a model.
_SERVING: Final = ("background", "stream", "stream_options")
#: A field that says nothing.
_NOTHING: Final = frozenset({b"null", b"{}", b"[]"})
_COMPLETED: Final = b'"completed"'

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text = msgspec.json.Decoder(str)
_input = msgspec.json.Decoder(str | list[dict[str, Any]] | None)


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a kept response from its first moment on."""

    response_id: str
    #: Unix time, in seconds.
    created: int
    #: As its request named it.
    model: str
    #: From `repeated`.
    repeated: bytes


def in_background(request: ChatRequest) -> bool:
    """Whether this request of the protocol asks for an answer that is made in the background."""
    return request.native is not None and "background" in request.native.unmapped


def goes_on_from_kept(request: ChatRequest) -> bool:
    """Whether it goes on from a response that is kept here, of which no provider knows."""
    raw = _given(request, "previous_response_id")
    try:
        return raw is not None and _text.decode(raw).startswith(ID_PREFIX)
    except msgspec.ValidationError:
        return False


def request_body(request: ChatRequest) -> bytes:
    """The request as it is to be answered: how it is served is no matter of the provider's."""
    assert request.native is not None
    return msgspec.json.encode({name: raw for name, raw in request.native.fields.items() if name not in _SERVING})


def repeated(request: ChatRequest) -> bytes:
    """What the response will repeat: a JSON object."""
    return msgspec.json.encode({name: raw for name in _REPEATED if (raw := _given(request, name)) is not None})


def _given(request: ChatRequest, name: str) -> msgspec.Raw | None:
    raw = None if request.native is None else request.native.fields.get(name)
    return None if raw is None else given(raw)


# ------------------------------------------------------------------ looking up


def unanswered(head: Head, status: str, *, error: Mapping[str, str] | None = None) -> bytes:
    """One without an answer: `queued`, `in_progress`, `cancelled`, or `failed` with a `code` and a `message`."""
    told = response_object(
        response_id=head.response_id,
        model=head.model,
        created=head.created,
        status=status,
        output=(),
        error=None if error is None else dict(error),
    )
    return msgspec.json.encode({**told, **_object.decode(head.repeated), "background": True, "store": True})


def answered(head: Head, answer: bytes, *, own: bool, completed: int | None) -> bytes:
    """
    One whose answer is `answer`, a response object. `own`: it is the provider's, whose word on what it was asked
    stands, where it has one. `completed`: Unix time.
    """
    fields: dict[str, Any] = dict(_object.decode(answer))
    for name, raw in _object.decode(head.repeated).items():
        if not own or bytes(fields.get(name, b"null")) in _NOTHING:
            fields[name] = raw
    fields |= {"id": head.response_id, "created_at": head.created, "background": True, "store": True}
    if bytes(fields.get("status", b"")) == _COMPLETED:
        fields["completed_at"] = completed
    return msgspec.json.encode(fields)


def input_items(response_id: str, body: bytes) -> list[dict[str, Any]]:
    """The items of a request that was kept, each with an id: its own, or one that is made of its place."""
    raw = _object.decode(body).get("input")
    given_input = None if raw is None else _input.decode(raw)
    if isinstance(given_input, str):
        given_input = [{"role": "user", "content": given_input}]
    return [_item(item, f"msg_{response_id}_{place}") for place, item in enumerate(given_input or ())]


def _item(item: dict[str, Any], item_id: str) -> dict[str, Any]:
    kind = item.get("type") or "message"
    told = {**item, "id": item.get("id") or item_id, "type": kind}
    content = item.get("content")
    if kind == "message" and isinstance(content, str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        told["content"] = [{"type": part, "text": content}]
    return told
