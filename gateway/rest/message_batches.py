"""
Batches in the shapes of Anthropic's Message Batches API, over the same batches and jobs as OpenAI's.

The requests of a batch become the lines of a file, as if that had been uploaded, and the batch is one for
`/v1/messages`: both APIs show it. What is wrong with a request is said at once, with its place, and then nothing is
accepted. What belongs to another key is answered exactly as what never was.

https://platform.claude.com/docs/en/api/creating-message-batches
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime
from typing import Annotated, Any, Final, Literal

import msgspec
from aiohttp import web
from typing_extensions import TypedDict

from adapters.body import refuse_flood
from adapters.contract import ToldError
from adapters.errors import MalformedRequest
from gateway.call import Scope
from gateway.errors import STATUS, Code, Conflict, GatewayError, InvalidRequest, NotFound
from gateway.jobs import formats
from gateway.jobs.batch_store import BatchView, FileView, NewBatch
from gateway.jobs.batches import OPEN, Batches
from gateway.jobs.model import Result, Status
from gateway.jobs.settings import JobsSettings
from gateway.jobs.store import Filter
from gateway.jobs.submission import MAX_CUSTOM_ID_CHARS, new_submission_id, request_in
from gateway.jobs.upload import uploading
from gateway.rest.apis import MESSAGES
from gateway.rest.batches import WINDOWS
from gateway.rest.body import decode
from gateway.rest.chat import BetaQuery, Betas, wanted_betas
from gateway.rest.endpoint import Endpoint, Exchange, answer_headers
from gateway.rest.fields import FIELDS, refuse_headers
from gateway.rest.files import Identified, bounds, id_of, limit_of
from gateway.rest.jobs import content_store, idempotency_key
from gateway.rest.operation import OF_CONTENT, Content, Link, Operation

#: Batches of a page of the list: where nothing is said, and at most. Anthropic's.
_LIMIT, _MAX_LIMIT = 20, 1000
_JSONL: Final = "application/x-jsonl"
_WINDOW: Final = "24h"
_PREFIX: Final = "msgbatch_"
#: Betas that ask for nothing more than what is here.
_BETAS: Final = frozenset({"message-batches-2024-09-24"})
#: Values in one body, and requests that are judged before others get a turn.
_MOST_VALUES: Final = 2_000_000
_TURN_REQUESTS: Final = 32

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_named = msgspec.json.Decoder(dict[str, object])


class _Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The requests are read one by one, so that a fault is told with its place."""

    requests: list[msgspec.Raw]
    #: Ours.
    webhook_url: str | None = None


class _OfARequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a request of a batch has beside the caller fields."""

    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CUSTOM_ID_CHARS)]
    #: As a message is asked for at once.
    params: dict[str, Any]
    deadline_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    max_attempts: Annotated[int, msgspec.Meta(ge=1)] | None = None


#: A request of a batch, as it is told: with the caller fields.
BatchedMessage: Final[Any] = msgspec.defstruct(
    "BatchedMessage",
    [(field.name, field.kind | None, None) for field in FIELDS],
    bases=(_OfARequest,),
    kw_only=True,
    forbid_unknown_fields=True,
)


class NewMessageBatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests, all of which are accepted or none."""

    requests: Annotated[tuple[BatchedMessage, ...], msgspec.Meta(min_length=1)]
    webhook_url: str | None = None


class _Page(msgspec.Struct, frozen=True, kw_only=True):
    after_id: str | None = None
    beta: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=_MAX_LIMIT)] = _LIMIT


class MessageBatchCounts(TypedDict):
    """Of the requests. Their ends are counted when all have ended."""

    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(Identified):
    """A batch, as Anthropic has it."""

    type: Literal["message_batch"]
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: datetime
    expires_at: datetime
    ended_at: datetime | None
    cancel_initiated_at: datetime | None
    archived_at: None
    results_url: str | None


class MessageBatchPage(TypedDict):
    """A page of batches."""

    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class MessageBatchDeleted(TypedDict):
    id: str
    type: Literal["message_batch_deleted"]


class MessageBatchResult(TypedDict):
    """How one request ended."""

    custom_id: str
    #: `type` is `succeeded`, with the `message`; `errored`, with the `error`; `canceled` or `expired`.
    result: dict[str, Any]


def routes(*, batches: Batches, may_be_told: Callable[[str], object], settings: JobsSettings) -> list[Endpoint]:
    """The endpoints of this module. `may_be_told` raises InvalidRequest for a URL that nothing may be sent to."""
    store = batches.store

    async def create(exchange: Exchange) -> web.StreamResponse:
        exchange.query(("beta",))
        _refuse_headers(exchange)
        key = idempotency_key(exchange)
        asked = await exchange.parsed(_read)
        if asked.webhook_url is not None:
            may_be_told(asked.webhook_url)
        lines = await _lines(exchange, asked.requests)
        view, repeated = await batches.create(
            exchange.caller.key_id,
            _new(asked, await _kept(exchange, lines, key)),
            idempotency_key=key,
            digest=hashlib.sha256(b"message batch\n" + msgspec.json.encode([asked.webhook_url, *lines])).digest(),
        )
        return _answer(exchange, await rendered(view), repeated=repeated)

    async def _lines(exchange: Exchange, requests: Sequence[msgspec.Raw]) -> list[str]:
        """The requests as lines of a file, none of which is wrong."""
        judged = batches.lines(exchange.caller.key_id, formats.MESSAGES, WINDOWS[_WINDOW])
        lines: list[str] = []
        if not 1 <= len(requests) <= settings.max_lines:
            raise InvalidRequest(f"must be 1 to {settings.max_lines}", param="requests")
        for place, raw in enumerate(requests):
            if place % _TURN_REQUESTS == 0:
                await asyncio.sleep(0)
            at = f"requests[{place}]"
            text = _line(raw, at)
            fault = None
            if len(text) > settings.max_line_bytes:
                raise GatewayError(f"may have {settings.max_line_bytes} bytes", code=Code.PAYLOAD_TOO_LARGE, param=at)
            if (fault := judged.add(place + 1, text.encode()).fault) is not None:
                path = "" if fault.param is None else "." + _as_params(fault.param)
                raise GatewayError(fault.message, code=Code(fault.code), param=at + path)
            lines.append(text)
        return lines

    async def _kept(exchange: Exchange, lines: Sequence[str], key: str | None) -> FileView:
        # A repetition finds the file of the first, and with it the same batch.
        named = None if key is None else hashlib.sha256(b"requests of " + key.encode()).hexdigest()
        async with uploading(store, settings, exchange.caller.key_id) as coming:
            for line in lines:
                await coming.add(line.encode() + b"\n")
            file, _ = await coming.finish(
                filename="message_batch.jsonl", kept_s=settings.retention_s, idempotency_key=named
            )
        return file

    async def page(exchange: Exchange) -> web.StreamResponse:
        query = exchange.query(("after_id", "beta", "limit"))
        limit = limit_of(query.get("limit"), _LIMIT, _MAX_LIMIT)
        after = None if "after_id" not in query else id_of(query["after_id"], _PREFIX)
        if "after_id" in query and after is None:
            raise NotFound("no such batch", param="after_id")
        with content_store():
            views = await store.page(exchange.caller.key_id, after=after, limit=limit + 1, endpoint=formats.MESSAGES)
            entries = [await rendered(view) for view in views[:limit]]
        told: MessageBatchPage = {
            "data": entries,
            "has_more": len(views) > limit,
            **bounds([entry["id"] for entry in entries]),
        }
        return _answer(exchange, told)

    async def get(exchange: Exchange) -> web.StreamResponse:
        exchange.query(("beta",))
        view = await found(exchange)
        with content_store():
            return _answer(exchange, await rendered(view))

    async def cancel(exchange: Exchange) -> web.StreamResponse:
        exchange.query(("beta",))
        view = await found(exchange)
        with content_store():
            await batches.cancel(exchange.caller.key_id, view.batch_id)
            return _answer(exchange, await rendered(await found(exchange)))

    async def delete(exchange: Exchange) -> web.StreamResponse:
        exchange.query(("beta",))
        view = await found(exchange)
        if view.status in OPEN:
            raise Conflict("the batch has not ended: cancel it first")
        with content_store():
            await store.delete(view)
        gone: MessageBatchDeleted = {"id": _PREFIX + view.batch_id.hex, "type": "message_batch_deleted"}
        return _answer(exchange, gone)

    async def results(exchange: Exchange) -> web.StreamResponse:
        exchange.query(("beta",))
        view = await found(exchange)
        if view.status in OPEN:
            raise Conflict("the batch has not ended: it has no results yet")
        pieces = _of_jobs(view) if view.total else _of_none(view)
        # An error of the store is told as long as nothing is out.
        first = await anext(pieces, b"")
        response = exchange.stream(_JSONL)
        await response.prepare(exchange.request)
        if first:
            await response.write(first)
        async for piece in pieces:
            await response.write(piece)
        await response.write_eof()
        return response

    async def _of_jobs(view: BatchView) -> AsyncIterator[bytes]:
        after = None
        while True:
            with content_store():
                found = await store.jobs.results(view.key_id, Filter(submission_id=view.batch_id), after=after)
            if not found:
                return
            after = found[-1].job_id
            yield b"".join(_result_line(result) for result in found)

    async def _of_none(view: BatchView) -> AsyncIterator[bytes]:
        """It ended before its requests had become jobs: all of them ended as it did."""
        after = 0
        while True:
            with content_store():
                lines = await store.lines(view.input_file_id, after)
            if not lines:
                return
            after = lines[-1][0]
            yield b"".join(_unmade(view, _named.decode(request_in(text)).get("custom_id")) for _, text in lines)

    async def found(exchange: Exchange) -> BatchView:
        batch_id = id_of(exchange.path_args["batch_id"], _PREFIX)
        if batch_id is not None:
            with content_store():
                view = await store.get(exchange.caller.key_id, batch_id)
            if view is not None and view.endpoint == formats.MESSAGES:
                return view
        raise NotFound("no such batch")

    async def rendered(view: BatchView) -> MessageBatch:
        total = view.total or await store.line_count(view.input_file_id)
        counts = MessageBatchCounts(processing=0, succeeded=0, errored=0, canceled=0, expired=0)
        if view.status in OPEN:
            # Its own API counts the ends of requests only when all have ended.
            counts["processing"] = total
        elif view.total:
            counts["canceled"], counts["expired"] = await store.taken_back(view)
            counts["succeeded"] = view.completed or 0
            counts["errored"] = max((view.failed or 0) - counts["canceled"] - counts["expired"], 0)
        else:
            counts[_END_OF_NONE[view.status]] = total
        return _rendered(view, counts)

    one, cancelled = "/v1/messages/batches/{batch_id}", "/v1/messages/batches/{batch_id}/cancel"
    batch = (Content(type=MessageBatch),)
    looked_at = Operation(summary="A message batch", query=BetaQuery, gives=batch, errors=OF_CONTENT)
    made = Operation(
        summary="Start a message batch",
        query=BetaQuery,
        headers=Betas,
        takes=(Content(type=NewMessageBatch, example={"requests": [{"custom_id": "1", "params": MESSAGES.example}]}),),
        gives=batch,
        errors=OF_CONTENT | {Code.UNSUPPORTED_FIELD, Code.MODEL_NOT_FOUND, Code.TOO_LARGE, Code.CONFLICT},
        repeatable=True,
        links={
            "get": Link(method="GET", path=one, parameters={"batch_id": "/id"}),
            "cancel": Link(method="POST", path=cancelled, parameters={"batch_id": "/id"}),
        },
    )
    paged = Operation(
        summary="List message batches",
        query=_Page,
        gives=(Content(type=MessageBatchPage),),
        errors=OF_CONTENT | {Code.NOT_FOUND},
    )
    deleted = Operation(
        summary="Delete a message batch",
        query=BetaQuery,
        gives=(Content(type=MessageBatchDeleted),),
        errors=OF_CONTENT | {Code.CONFLICT},
    )
    collected = Operation(
        summary="Results of a message batch, one a line",
        query=BetaQuery,
        gives=(Content(type=MessageBatchResult, media_type=_JSONL, lines=True),),
        errors=OF_CONTENT | {Code.CONFLICT},
    )
    return [
        Endpoint(method=method, path=path, access=Scope.JOBS, handler=handler, apis=(MESSAGES,), told=told)
        for method, path, handler, told in (
            ("POST", "/v1/messages/batches", create, made),
            ("GET", "/v1/messages/batches", page, paged),
            ("GET", one, get, looked_at),
            ("DELETE", one, delete, deleted),
            ("POST", cancelled, cancel, msgspec.structs.replace(looked_at, summary="Cancel a message batch")),
            ("GET", f"{one}/results", results, collected),
        )
    ]


# ------------------------------------------------------------------ reading


def _read(body: bytes) -> _Body:
    try:
        refuse_flood(body, _MOST_VALUES)
    except MalformedRequest as error:
        raise InvalidRequest(error.reason, code=Code.TOO_LARGE) from error
    return decode(body, _Body)


def _refuse_headers(exchange: Exchange) -> None:
    """What a batch cannot act on. What is asked of a single request is said beside its `params`."""
    refuse_headers(exchange.request.headers)
    for beta in wanted_betas(exchange):
        if beta not in _BETAS:
            raise InvalidRequest(
                "the requests of a batch have no betas", code=Code.UNSUPPORTED_FIELD, param="anthropic-beta"
            )


def _line(raw: msgspec.Raw, at: str) -> str:
    """A request as a line of a file. Line feeds in it stand between its values: in a string they would be escaped."""
    try:
        members = _members.decode(raw)
    except msgspec.ValidationError as error:
        raise InvalidRequest("must be an object", param=at) from error
    for name in ("body", "method", "url"):
        if name in members:
            raise InvalidRequest("unknown field", code=Code.UNSUPPORTED_FIELD, param=f"{at}.{name}")
    if "params" not in members:
        raise InvalidRequest("is required", param=f"{at}.params")
    line = {"url": formats.MESSAGES, **members, "body": members["params"]}
    del line["params"]
    return msgspec.json.encode(line).decode().replace("\n", " ").replace("\r", " ")


def _as_params(path: str) -> str:
    """The path of a field of a line, as it is in a request of a batch."""
    return "params" + path.removeprefix("body") if path == "body" or path.startswith("body.") else path


def _new(asked: _Body, file: FileView) -> NewBatch:
    return NewBatch(
        batch_id=new_submission_id(),
        input_file_id=file.file_id,
        endpoint=formats.MESSAGES,
        completion_window=_WINDOW,
        window_s=WINDOWS[_WINDOW],
        metadata=None,
        output_retention_s=None,
        webhook_url=asked.webhook_url,
    )


# ------------------------------------------------------------------ rendering

#: How the requests ended of a batch that ended before they were jobs.
_END_OF_NONE: Final[dict[str, Literal["errored", "expired", "canceled"]]] = {
    "failed": "errored",
    "expired": "expired",
    "cancelled": "canceled",
}


def _answer(exchange: Exchange, payload: object, *, repeated: bool = False) -> web.StreamResponse:
    headers = answer_headers(exchange.request_id, MESSAGES)
    if repeated:
        headers["Idempotent-Replayed"] = "true"
    return web.Response(body=msgspec.json.encode(payload), headers=headers)


def _rendered(view: BatchView, counts: MessageBatchCounts) -> MessageBatch:
    batch_id = _PREFIX + view.batch_id.hex
    going: Literal["canceling", "in_progress"] = "canceling" if view.status == "cancelling" else "in_progress"
    return {
        "id": batch_id,
        "type": "message_batch",
        "processing_status": going if view.status in OPEN else "ended",
        "request_counts": counts,
        "created_at": view.created_at,
        "expires_at": view.deadline_at,
        "ended_at": view.ended_at,
        "cancel_initiated_at": view.cancelling_at,
        "archived_at": None,
        # Its clients put this behind their base URL. By which name they came here is not to be taken from a header.
        "results_url": None if view.status in OPEN else f"/v1/messages/batches/{batch_id}/results",
    }


def _result_line(result: Result) -> bytes:
    match result.status:
        case Status.SUCCEEDED:
            assert result.result is not None
            told: dict[str, object] = {"type": "succeeded", "message": msgspec.Raw(result.result.encode())}
        case Status.CANCELLED:
            told = {"type": "canceled"}
        case Status.EXPIRED:
            told = {"type": "expired"}
        case _:
            code = result.error_code or Code.INTERNAL.value
            request_id = None if result.outcome is None else result.outcome.request_id
            param = None if result.error_param is None else _as_params(result.error_param)
            told = _errored(code, result.error_message or "", param=param, request_id=request_id)
    return _told(result.custom_id, told)


def _unmade(view: BatchView, custom_id: object) -> bytes:
    end = _END_OF_NONE[view.status]
    if end != "errored" or not view.errors:
        return _told(custom_id, {"type": end})
    fault = view.errors[0]
    return _told(custom_id, _errored(fault.code, f"the batch was refused for request {fault.line}: {fault.message}"))


def _errored(code: str, message: str, *, param: str | None = None, request_id: str | None = None) -> dict[str, object]:
    # Another version may have had codes of its own.
    known = Code(code) if code in frozenset(Code) else Code.INTERNAL
    row = STATUS[known]
    error = ToldError(
        status=row.http, type=row.type, code=code, message=message, param=param, request_id=request_id or ""
    )
    return {"type": "errored", "error": msgspec.Raw(MESSAGES.protocol.render_error(error))}


def _told(custom_id: object, result: dict[str, object]) -> bytes:
    return msgspec.json.encode({"custom_id": custom_id, "result": result}) + b"\n"
