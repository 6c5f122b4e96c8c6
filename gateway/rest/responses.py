"""
Responses in the background: OpenAI's API over the table of jobs.

A request with `background: true` is committed as a job and answered at once; the response is looked up by its id until
it has ended, and may be cancelled meanwhile. Only these are kept: any other response is told whole when it is made.
What belongs to another key is answered exactly as what never was.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from aiohttp import web
from typing_extensions import TypedDict

from adapters.chat import ChatRequest
from adapters.protocols.responses import kept
from gateway.call import Scope
from gateway.errors import Code, Conflict, GatewayError, InvalidRequest, NotFound
from gateway.jobs import formats
from gateway.jobs.intake import Idempotency, Intake
from gateway.jobs.model import TERMINAL, ResponseView, Status
from gateway.jobs.store import JobStore
from gateway.jobs.submission import Asked
from gateway.jobs.watch import Watch
from gateway.rest.apis import RESPONSES, attribution
from gateway.rest.chat import named_model
from gateway.rest.endpoint import Endpoint, Exchange, answer_headers
from gateway.rest.fields import OF_JOBS, options_from_headers, wishes_from_headers
from gateway.rest.files import bounds, id_of, limit_of, seconds
from gateway.rest.jobs import Cancels, awaited, content_store
from gateway.rest.operation import OF_CONTENT, Content, Operation

#: Seconds for which the answer to a cancel waits for the call to be taken back.
CANCEL_PATIENCE_S: Final = 5.0
#: Input items of a page: where nothing is said, and at most. OpenAI's.
_LIMIT, _MAX_LIMIT = 20, 100

_ONLY_HERE: Final = "no such response: only those with `background: true` are kept to be fetched"
_NOT_STREAMED: Final = "a response in the background is not streamed: fetch it by its id until it has ended"
_HEADER_OF: Final = {field.name: field.header for field in OF_JOBS}


class _Query(msgspec.Struct, frozen=True, kw_only=True):
    """What the clients may send. It is refused where it asks for something."""

    include: str | None = None
    includes: str | None = msgspec.field(default=None, name="include[]")
    #: Nothing is obfuscated.
    include_obfuscation: str | None = None
    starting_after: Literal["false"] | None = None
    stream: Literal["false"] | None = None


class _ItemsPage(msgspec.Struct, frozen=True, kw_only=True):
    after: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=_MAX_LIMIT)] = _LIMIT
    order: Literal["asc", "desc"] = "desc"


class ResponseDeleted(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(TypedDict):
    """A page of the items of a request, in its own words."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Responses:
    """The handlers."""

    def __init__(
        self,
        *,
        store: JobStore,
        intake: Intake,
        watch: Watch,
        runner: Cancels,
        cancel_patience_s: float = CANCEL_PATIENCE_S,
    ) -> None:
        self._cancel_patience_s = cancel_patience_s
        self._store = store
        self._intake = intake
        self._watch = watch
        self._runner = runner

    def routes(self) -> list[Endpoint]:
        """The endpoints of this module. What makes a response is `gateway.rest.chat`'s, which hands it to `create`."""
        one = "/v1/responses/{response_id}"
        response = (Content(type=RESPONSES.answer, required=("id", "model", "output", "status")),)
        looked_at = Operation(
            summary="A response in the background",
            query=_Query,
            gives=response,
            errors=OF_CONTENT | {Code.UNSUPPORTED_FIELD},
            attributed=True,
        )
        deleted = Operation(
            summary="Delete a response",
            gives=(Content(type=ResponseDeleted),),
            errors=OF_CONTENT | {Code.CONFLICT},
        )
        cancelled = Operation(summary="Cancel a response", gives=response, errors=OF_CONTENT, attributed=True)
        items = Operation(
            summary="The input of a response", query=_ItemsPage, gives=(Content(type=InputItems),), errors=OF_CONTENT
        )
        return [
            Endpoint(method=method, path=path, access=Scope.CHAT, handler=handler, apis=(RESPONSES,), told=told)
            for method, path, handler, told in (
                ("GET", one, self.get, looked_at),
                ("DELETE", one, self.delete, deleted),
                ("POST", f"{one}/cancel", self.cancel, cancelled),
                ("GET", f"{one}/input_items", self.input_items, items),
            )
        ]

    async def create(self, exchange: Exchange, chat: ChatRequest) -> web.StreamResponse:
        """Answers after the commit and never before."""
        asked, key = _asked(exchange, chat)
        idempotency = None if key is None else Idempotency(key=key, digest=lambda: _digest(asked))
        try:
            job_id, repeated = await self._intake.take(exchange.caller.key_id, asked, idempotency)
        except GatewayError as error:
            if error.param in _HEADER_OF:
                raise InvalidRequest(error.message, code=error.code, param=_HEADER_OF[error.param]) from error
            raise
        if repeated:
            return _answer(exchange, await self._found(exchange, job_id), {"Idempotent-Replayed": "true"})
        body = kept.unanswered(_head(job_id, asked.model, asked.response_head), "queued")
        return web.Response(body=body, headers=answer_headers(exchange.request_id, RESPONSES))

    async def get(self, exchange: Exchange) -> web.StreamResponse:
        query = exchange.query(("include", "include[]", "include_obfuscation", "starting_after", "stream"))
        for name in ("starting_after", "stream"):
            if query.get(name, "false") != "false":
                raise InvalidRequest(_NOT_STREAMED, code=Code.UNSUPPORTED_FIELD, param=name)
        if "include" in query or "include[]" in query:
            raise InvalidRequest(
                "what is included is said when the response is made", code=Code.UNSUPPORTED_FIELD, param="include"
            )
        return _answer(exchange, await self._found(exchange, _job_id(exchange)))

    async def cancel(self, exchange: Exchange) -> web.StreamResponse:
        exchange.query(())
        key_id = exchange.caller.key_id
        view = await self._found(exchange, _job_id(exchange))
        with content_store():
            if view.status not in TERMINAL:
                status = await self._store.cancel(key_id, view.job_id)
                if status is Status.RUNNING:
                    self._runner.cancel(view.job_id)
                    await awaited(exchange, self._store, self._watch, view.job_id, self._cancel_patience_s)
                elif status is not None:
                    self._watch.ended([view.job_id])
        return _answer(exchange, await self._found(exchange, view.job_id))

    async def delete(self, exchange: Exchange) -> web.StreamResponse:
        exchange.query(())
        view = await self._found(exchange, _job_id(exchange))
        with content_store():
            deleted = await self._store.delete(exchange.caller.key_id, view.job_id)
        if not deleted:
            await self._found(exchange, view.job_id)
            raise Conflict("the response has not ended: cancel it first")
        gone: ResponseDeleted = {"id": _response_id(view.job_id), "object": "response", "deleted": True}
        return exchange.answer(gone)

    async def input_items(self, exchange: Exchange) -> web.StreamResponse:
        query = exchange.query(("after", "limit", "order"))
        limit = limit_of(query.get("limit"), _LIMIT, _MAX_LIMIT)
        order = query.get("order", "desc")
        if order not in {"asc", "desc"}:
            raise InvalidRequest("must be asc or desc", param="order")
        job_id = _job_id(exchange)
        with content_store():
            body = await self._store.response_body(exchange.caller.key_id, job_id)
        if body is None:
            raise NotFound(_ONLY_HERE)
        items = kept.input_items(_response_id(job_id), body.encode())
        if order == "desc":
            items.reverse()
        if "after" in query:
            places = [place for place, item in enumerate(items, 1) if item["id"] == query["after"]]
            if not places:
                raise NotFound("no such item", param="after")
            items = items[places[0] :]
        told: InputItems = {
            "object": "list",
            "data": items[:limit],
            **bounds([item["id"] for item in items[:limit]]),
            "has_more": len(items) > limit,
        }
        return exchange.answer(told)

    async def _found(self, exchange: Exchange, job_id: uuid.UUID) -> ResponseView:
        with content_store():
            view = await self._store.response(exchange.caller.key_id, job_id)
        if view is None:
            raise NotFound(_ONLY_HERE)
        return view


# ------------------------------------------------------------------ reading


def _asked(exchange: Exchange, chat: ChatRequest) -> tuple[Asked, str | None]:
    """What is asked for, and the idempotency key. Raises InvalidRequest."""
    envelope = RESPONSES.envelope(chat)
    if envelope.stream:
        raise InvalidRequest(_NOT_STREAMED, code=Code.UNSUPPORTED_FIELD, param="stream")
    if chat.store is False:
        raise InvalidRequest(
            "a response in the background is kept until it is deleted: leave `store` out",
            code=Code.UNSUPPORTED_FIELD,
            param="store",
        )
    options = options_from_headers(exchange.request.headers, job=True)
    asked = Asked(
        url=formats.RESPONSES,
        model=named_model(envelope.model, role=options.role),
        body=kept.request_body(chat).decode(),
        response_head=kept.repeated(chat).decode(),
        options=msgspec.structs.replace(options, idempotency_key=None),
        wishes=wishes_from_headers(exchange.request.headers),
    )
    return asked, options.idempotency_key


def _digest(asked: Asked) -> bytes:
    return hashlib.sha256(b"response\n" + msgspec.json.encode(asked, order="sorted")).digest()


def _job_id(exchange: Exchange) -> uuid.UUID:
    job_id = id_of(exchange.path_args["response_id"], kept.ID_PREFIX)
    if job_id is None:
        raise NotFound(_ONLY_HERE)
    return job_id


# ------------------------------------------------------------------ rendering


def _response_id(job_id: uuid.UUID) -> str:
    return kept.ID_PREFIX + job_id.hex


def _head(job_id: uuid.UUID, model: str, repeated: str) -> kept.Head:
    return kept.Head(
        response_id=_response_id(job_id),
        # The id tells the time, so that it is the same before the store has been asked as after.
        created=(job_id.int >> 80) // 1000,
        model=model,
        repeated=repeated.encode(),
    )


def _answer(exchange: Exchange, view: ResponseView, more: Mapping[str, str] = {}) -> web.StreamResponse:
    headers = {**answer_headers(exchange.request_id, RESPONSES), **more}
    if view.outcome is not None and view.status in TERMINAL:
        headers.update(attribution(view.outcome))
    if view.error_code is not None:
        headers["x-tollbridge-code"] = view.error_code
    return web.Response(body=_rendered(view), headers=headers)


def _rendered(view: ResponseView) -> bytes:
    head = _head(view.job_id, view.model, view.head)
    match view.status:
        case Status.QUEUED:
            return kept.unanswered(head, "queued")
        case Status.RUNNING:
            return kept.unanswered(head, "in_progress")
        case Status.CANCELLED:
            return kept.unanswered(head, "cancelled")
        case Status.FAILED | Status.EXPIRED:
            return kept.unanswered(head, "failed", error=_error(view))
        case Status.SUCCEEDED:
            assert view.result is not None
            route = None if view.outcome is None else view.outcome.route
            return kept.answered(
                head,
                view.result.encode(),
                own=route is not None and route.protocol == RESPONSES.protocol.name,
                completed=None if view.ended_at is None else seconds(view.ended_at),
            )


def _error(view: ResponseView) -> dict[str, str]:
    """The response's error has no place for the field that is at fault: the message names it."""
    at = "" if view.error_param is None else f"{view.error_param.removeprefix('body.')}: "
    return {"code": view.error_code or Code.INTERNAL.value, "message": at + (view.error_message or "")}
