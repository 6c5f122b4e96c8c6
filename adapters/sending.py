"""
A request's last steps on its way to a provider, once a protocol has written its fields: what the caller added, what the
profile says of the provider, and the HTTP around it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from adapters.chat import ChatRequest, Message, ResponseFormat, Text
from adapters.contract import Endpoint, HttpRequest
from adapters.errors import RequestNotExpressible

_encode = msgspec.json.Encoder().encode
_object_in = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text_in = msgspec.json.Decoder(str)


def add_extra(fields: dict[str, Any], request: ChatRequest, ours: Collection[str]) -> None:
    """
    The `extra` fields of the request, beside those it has. Raises `RequestNotExpressible` for one that is there already
    or is `ours` to write.
    """
    for name, value in request.extra.items():
        if name in fields or name in ours:
            raise RequestNotExpressible(f"extra.{name}", "the request has this field already")
        fields[name] = value


def described_schema(wanted: ResponseFormat) -> msgspec.Raw | None:
    """
    The schema, for a protocol that has no other place for what is said of it: that is then the schema's own
    description, before the one that it has. Raises `RequestNotExpressible` for a schema that can have none.
    """
    if wanted.schema is None or not wanted.description:
        return wanted.schema
    try:
        fields = _object_in.decode(wanted.schema)
        own = _text_in.decode(fields["description"]) if "description" in fields else ""
    except msgspec.ValidationError as error:
        raise RequestNotExpressible(
            "response_format.schema", "a schema with a description must be an object"
        ) from error
    if own == wanted.description:
        return wanted.schema
    told = "\n\n".join(filter(None, (wanted.description, own)))
    return msgspec.Raw(_encode({**fields, "description": told}))


def failure_told(message: Message) -> Message:
    """A tool's result that is an error, for a protocol that has no mark for it: its text says so."""
    for at, part in enumerate(message.content):
        if isinstance(part, Text):
            if part.text.casefold().startswith("error"):
                return message
            told = msgspec.structs.replace(part, text=f"Error: {part.text}")
            return msgspec.structs.replace(message, content=(*message.content[:at], told, *message.content[at + 1 :]))
    return msgspec.structs.replace(message, content=(*message.content, Text(text="Error")))


def post(
    path: str, fields: dict[str, Any], dropped: list[str], *, stream: bool, headers: Mapping[str, str] | None = None
) -> HttpRequest:
    """JSON to the path, with these headers beside the usual ones."""
    return HttpRequest(
        path=path,
        headers={
            "content-type": "application/json",
            "accept": "text/event-stream" if stream else "application/json",
            **(headers or {}),
        },
        body=_encode(fields),
        dropped=tuple(dropped),
    )


def omit(fields: dict[str, Any], endpoint: Endpoint, dropped: list[str]) -> None:
    """Takes out what is never sent to this provider; what is then forced in its place is not dropped."""
    for name in sorted(endpoint.omit & fields.keys()):
        if name not in endpoint.force:
            dropped.append(name)
        del fields[name]
