"""
A request's last steps on its way to a provider, once a protocol has written its fields: what the caller added, what the
profile says of the provider, and the HTTP around it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from adapters.chat import ChatRequest
from adapters.contract import Endpoint, HttpRequest
from adapters.errors import RequestNotExpressible

_encode = msgspec.json.Encoder().encode


def add_extra(fields: dict[str, Any], request: ChatRequest, ours: Collection[str]) -> None:
    """
    The `extra` fields of the request, beside those it has. Raises `RequestNotExpressible` for one that is there already
    or is `ours` to write.
    """
    for name, value in request.extra.items():
        if name in fields or name in ours:
            raise RequestNotExpressible(f"extra.{name}", "the request has this field already")
        fields[name] = value


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
