"""
Batches over HTTP, in the shapes of OpenAI's Batch API, over the table of jobs.

What belongs to another key is answered exactly as what never was.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Annotated, Literal

import msgspec
from aiohttp import web
from typing_extensions import TypedDict

from gateway.call import Scope
from gateway.errors import Code, Conflict, InvalidRequest, NotFound
from gateway.jobs.batch_store import BatchView, NewBatch
from gateway.jobs.batches import Batches
from gateway.jobs.formats import PROTOCOL_OF
from gateway.jobs.submission import new_submission_id
from gateway.rest.endpoint import Endpoint, Exchange
from gateway.rest.fields import refuse_headers
from gateway.rest.files import Identified, bounds, id_of, limit_of, seconds
from gateway.rest.jobs import content_store, idempotency_key
from gateway.rest.operation import OF_CONTENT, Content, Link, Operation

#: Batches of a page of the list: where nothing is said, and at most. OpenAI's.
_LIMIT, _MAX_LIMIT = 20, 100
#: What callers may name as the window, in seconds.
WINDOWS = {"24h": 86_400.0}


class OutputExpiry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    anchor: str
    seconds: Annotated[int, msgspec.Meta(ge=3600, le=2_592_000)]


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: (
        Annotated[
            dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=512)]],
            msgspec.Meta(max_length=16),
        ]
        | None
    ) = None
    output_expires_after: OutputExpiry | None = None
    #: Ours.
    webhook_url: str | None = None


class _Page(msgspec.Struct, frozen=True, kw_only=True):
    after: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=_MAX_LIMIT)] = _LIMIT


class BatchFault(TypedDict):
    """What is wrong with a batch, or with a line of its file."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchFaults(TypedDict):
    object: Literal["list"]
    data: list[BatchFault]


class BatchCounts(TypedDict):
    total: int
    completed: int
    failed: int


class BatchInputDetails(TypedDict):
    cached_tokens: int


class BatchOutputDetails(TypedDict):
    reasoning_tokens: int


class BatchUsage(TypedDict):
    input_tokens: int
    input_tokens_details: BatchInputDetails
    output_tokens: int
    output_tokens_details: BatchOutputDetails
    total_tokens: int


class Batch(Identified):
    """A batch, as OpenAI has it."""

    object: Literal["batch"]
    endpoint: str
    errors: BatchFaults | None
    input_file_id: str | None
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    metadata: Mapping[str, str] | None
    usage: BatchUsage | None


class BatchPage(TypedDict):
    """A page of batches."""

    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


def routes(*, batches: Batches, may_be_told: Callable[[str], object]) -> list[Endpoint]:
    """The endpoints of this module. `may_be_told` raises InvalidRequest for a URL that nothing may be sent to."""
    store = batches.store

    async def create(exchange: Exchange) -> web.StreamResponse:
        exchange.query(())
        refuse_headers(exchange.request.headers)
        key = idempotency_key(exchange)
        asked = await exchange.json(BatchRequest)
        if asked.webhook_url is not None:
            may_be_told(asked.webhook_url)
        view, repeated = await batches.create(
            exchange.caller.key_id, _new(asked), idempotency_key=key, digest=_digest(asked)
        )
        return exchange.answer(await rendered(view), headers={"Idempotent-Replayed": "true"} if repeated else None)

    async def page(exchange: Exchange) -> web.StreamResponse:
        query = exchange.query(("after", "limit"))
        limit = limit_of(query.get("limit"), _LIMIT, _MAX_LIMIT)
        after = None if "after" not in query else id_of(query["after"], "batch_")
        if "after" in query and after is None:
            raise NotFound("no such batch", param="after")
        with content_store():
            views = await store.page(exchange.caller.key_id, after=after, limit=limit + 1)
            entries = [await rendered(view) for view in views[:limit]]
        told: BatchPage = {
            "object": "list",
            "data": entries,
            **bounds([entry["id"] for entry in entries]),
            "has_more": len(views) > limit,
        }
        return exchange.answer(told)

    async def get(exchange: Exchange) -> web.StreamResponse:
        exchange.query(())
        view = await found(exchange)
        with content_store():
            return exchange.answer(await rendered(view))

    async def cancel(exchange: Exchange) -> web.StreamResponse:
        exchange.query(())
        view = await found(exchange)
        with content_store():
            asked = await batches.cancel(exchange.caller.key_id, view.batch_id)
            view = await found(exchange)
            if not asked and view.status not in ("cancelling", "cancelled"):
                raise Conflict(f"the batch is {view.status}: there is nothing to cancel")
            return exchange.answer(await rendered(view))

    async def found(exchange: Exchange) -> BatchView:
        batch_id = id_of(exchange.path_args["batch_id"], "batch_")
        if batch_id is not None:
            with content_store():
                view = await store.get(exchange.caller.key_id, batch_id)
            if view is not None:
                return view
        raise NotFound("no such batch")

    async def rendered(view: BatchView) -> Batch:
        completed, failed = await batches.counts(view)
        return _rendered(view, completed, failed)

    one, cancelled = "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel"
    created = Operation(
        summary="Start a batch",
        takes=(
            Content(
                type=BatchRequest,
                example={
                    "input_file_id": "file-0123456789abcdef0123456789abcdef",
                    "endpoint": "/v1/chat/completions",
                    "completion_window": "24h",
                },
            ),
        ),
        gives=(Content(type=Batch),),
        errors=OF_CONTENT | {Code.NOT_FOUND},
        repeatable=True,
        links={
            "get": Link(method="GET", path=one, parameters={"batch_id": "/id"}),
            "cancel": Link(method="POST", path=cancelled, parameters={"batch_id": "/id"}),
        },
    )
    listed = Operation(
        summary="List batches", query=_Page, gives=(Content(type=BatchPage),), errors=OF_CONTENT | {Code.NOT_FOUND}
    )
    looked_at = Operation(summary="A batch", gives=(Content(type=Batch),), errors=OF_CONTENT)
    taken_back = Operation(summary="Cancel a batch", gives=(Content(type=Batch),), errors=OF_CONTENT | {Code.CONFLICT})
    return [
        Endpoint(method="POST", path="/v1/batches", access=Scope.JOBS, handler=create, told=created),
        Endpoint(method="GET", path="/v1/batches", access=Scope.JOBS, handler=page, told=listed),
        Endpoint(method="GET", path=one, access=Scope.JOBS, handler=get, told=looked_at),
        Endpoint(method="POST", path=cancelled, access=Scope.JOBS, handler=cancel, told=taken_back),
    ]


def _new(asked: BatchRequest) -> NewBatch:
    if asked.endpoint not in PROTOCOL_OF:
        raise InvalidRequest(f"must be one of: {', '.join(PROTOCOL_OF)}", param="endpoint")
    if asked.completion_window not in WINDOWS:
        raise InvalidRequest(f"must be one of: {', '.join(WINDOWS)}", param="completion_window")
    expiry = asked.output_expires_after
    if expiry is not None and expiry.anchor != "created_at":
        raise InvalidRequest("must be created_at", param="output_expires_after.anchor")
    file_id = id_of(asked.input_file_id, "file-")
    return NewBatch(
        batch_id=new_submission_id(),
        # An id that is none of ours names nothing, like one of another key.
        input_file_id=uuid.UUID(int=0) if file_id is None else file_id,
        endpoint=asked.endpoint,
        completion_window=asked.completion_window,
        window_s=WINDOWS[asked.completion_window],
        metadata=asked.metadata,
        output_retention_s=None if expiry is None else float(expiry.seconds),
        webhook_url=asked.webhook_url,
    )


def _digest(asked: BatchRequest) -> bytes:
    return hashlib.sha256(b"batch\n" + msgspec.json.encode(asked, order="sorted")).digest()


def _rendered(view: BatchView, completed: int, failed: int) -> Batch:
    def ended(*statuses: str) -> int | None:
        return at(view.ended_at) if view.status in statuses else None

    def at(time: datetime | None) -> int | None:
        return None if time is None else seconds(time)

    usage = view.usage
    return {
        "id": f"batch_{view.batch_id.hex}",
        "object": "batch",
        "endpoint": view.endpoint,
        "errors": {
            "object": "list",
            "data": [
                {"code": fault.code, "message": fault.message, "param": fault.param, "line": fault.line or None}
                for fault in view.errors
            ],
        }
        if view.errors
        else None,
        "input_file_id": _file_id(view.input_file_id),
        "completion_window": view.completion_window,
        "status": view.status,
        "output_file_id": _file_id(view.output_file_id),
        "error_file_id": _file_id(view.error_file_id),
        "created_at": seconds(view.created_at),
        "in_progress_at": at(view.in_progress_at),
        "expires_at": seconds(view.deadline_at),
        "finalizing_at": at(view.finalizing_at),
        "completed_at": ended("completed"),
        "failed_at": ended("failed"),
        "expired_at": ended("expired"),
        "cancelling_at": at(view.cancelling_at),
        "cancelled_at": ended("cancelled"),
        "request_counts": {"total": view.total, "completed": completed, "failed": failed},
        "metadata": view.metadata,
        "usage": None
        if usage is None
        else {
            "input_tokens": usage.input_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.input_tokens + usage.output_tokens,
        },
    }


def _file_id(file_id: uuid.UUID | None) -> str | None:
    return None if file_id is None else f"file-{file_id.hex}"
