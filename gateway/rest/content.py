"""What was asked and answered, where an operator has it kept; for keys of scope `admin`."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable
from datetime import datetime
from typing import Any, Literal, Protocol, TypeVar

import msgspec
from aiohttp import web
from typing_extensions import TypedDict

from gateway.call import Scope
from gateway.capture.store import Captured
from gateway.database import StoreUnavailable
from gateway.errors import Code, GatewayError, NotFound
from gateway.rest.endpoint import Endpoint, Exchange, plain
from gateway.rest.operation import OF_CONTENT, Content, Operation

T = TypeVar("T")


class Captures(Protocol):
    """`gateway.capture.store` is it. Raises StoreUnavailable."""

    async def found(self, request_id: str) -> Captured | None: ...

    async def delete(self, request_id: str) -> bool: ...


class CapturedContent(TypedDict):
    """What was asked and answered in one request, without what was redacted."""

    request_id: str
    key_id: uuid.UUID
    debit_id: str
    transport: str
    model: str
    session_id: str | None
    #: "complete", the code of an error, or "cancelled".
    ended: str
    #: null: it was larger than is kept.
    request: dict[str, Any] | None
    #: What is larger than is kept is not there.
    request_bytes: int
    #: null: there was none, or it was larger than is kept.
    answer: dict[str, Any] | None
    answer_bytes: int
    captured_at: datetime
    expires_at: datetime


class Deleted(TypedDict):
    request_id: str
    deleted: Literal[True]


def routes(*, captures: Captures) -> list[Endpoint]:
    """The endpoints of this module."""

    async def read(exchange: Exchange) -> web.StreamResponse:
        exchange.query(())
        found = await _stored(captures.found(exchange.path_args["request_id"]))
        if found is None:
            raise _nothing()
        row = plain(found.row)
        for name in ("request", "answer"):
            row[name] = None if row[name] is None else msgspec.Raw(row[name].encode())
        return exchange.answer({**row, "captured_at": found.captured_at, "expires_at": found.expires_at})

    async def delete(exchange: Exchange) -> web.StreamResponse:
        exchange.query(())
        request_id = exchange.path_args["request_id"]
        if not await _stored(captures.delete(request_id)):
            raise _nothing()
        done: Deleted = {"request_id": request_id, "deleted": True}
        return exchange.answer(done)

    path = "/v1/content/{request_id}"
    errors = OF_CONTENT | {Code.NOT_FOUND}
    told = Operation(
        summary="What was asked and answered in a request", gives=(Content(type=CapturedContent),), errors=errors
    )
    deleted = Operation(
        summary="Forget what was asked and answered in a request", gives=(Content(type=Deleted),), errors=errors
    )
    return [
        Endpoint(method="GET", path=path, access=Scope.ADMIN, handler=read, told=told),
        Endpoint(method="DELETE", path=path, access=Scope.ADMIN, handler=delete, told=deleted),
    ]


async def _stored(asked: Awaitable[T]) -> T:
    try:
        return await asked
    except StoreUnavailable as error:
        raise GatewayError(
            "the content store cannot be reached", code=Code.CONTENT_STORE_UNAVAILABLE, retry_after_s=1.0
        ) from error


def _nothing() -> NotFound:
    return NotFound(
        "nothing is kept of such a request: captures are off, past their retention, or were not written yet"
    )
