"""
Files over HTTP, in the shapes of OpenAI's Files API: the inputs of batches, and their outputs.

Nothing of a file is held longer than it takes to pass it on, in either direction. What belongs to another key is
answered exactly as what never was.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Annotated, Literal

import msgspec
from aiohttp import web
from typing_extensions import TypedDict

from gateway.call import Scope
from gateway.errors import Code, Conflict, GatewayError, InvalidRequest, NotFound
from gateway.jobs.batch_store import BatchStore, FileView, last_job_id
from gateway.jobs.output import batch_line
from gateway.jobs.settings import JobsSettings
from gateway.jobs.upload import uploading
from gateway.rest.endpoint import Endpoint, Exchange
from gateway.rest.jobs import content_store, idempotency_key
from gateway.rest.multipart import FormParser, Part, boundary_of
from gateway.rest.operation import OF_CONTENT, Content, Link, Operation

#: Files of a page of the list: where nothing is said, and at most. OpenAI's.
_LIMIT, _MAX_LIMIT = 10_000, 10_000
#: OpenAI's bounds of `expires_after`.
_SHORTEST_S, _LONGEST_S = 3600, 2_592_000
_MAX_FIELD_BYTES = 1024
_MAX_FILENAME_CHARS = 255

_Seconds = Annotated[int, msgspec.Meta(ge=_SHORTEST_S, le=_LONGEST_S)]


class FileUpload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A form. Its file is read as it comes, line by line; the other fields are text."""

    file: bytes
    purpose: Literal["batch"]
    anchor: Literal["created_at"] = msgspec.field(default="created_at", name="expires_after[anchor]")
    #: The retention of jobs, where that is shorter.
    expires_s: _Seconds = msgspec.field(default=_LONGEST_S, name="expires_after[seconds]")


_FIELDS = frozenset(field.encode_name for field in msgspec.structs.fields(FileUpload)) - {"file"}


class _Page(msgspec.Struct, frozen=True, kw_only=True):
    after: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=_MAX_LIMIT)] = _LIMIT
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


class Identified(TypedDict):
    id: str


class File(Identified):
    """A file, as OpenAI has it."""

    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None


class FileDeleted(Identified):
    object: Literal["file"]
    deleted: Literal[True]


class FilePage(TypedDict):
    """A page of files."""

    object: Literal["list"]
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


def routes(*, store: BatchStore, settings: JobsSettings) -> list[Endpoint]:
    """The endpoints of this module."""

    async def upload(exchange: Exchange) -> web.StreamResponse:
        exchange.query(())
        key = idempotency_key(exchange)
        if exchange.media_type != "multipart/form-data":
            raise GatewayError(
                "send `content-type: multipart/form-data`", code=Code.UNSUPPORTED_MEDIA_TYPE, param="content-type"
            )
        form = FormParser(boundary_of(exchange.request.headers.get("Content-Type", "")))
        fields: dict[str, bytes] = {}
        filename: str | None = None
        async with uploading(store, settings, exchange.caller.key_id) as coming:
            part: Part | None = None
            # Room for the form around the file.
            async for piece in exchange.chunks(settings.max_file_bytes + 64 * 1024):
                for item in form.feed(piece):
                    if isinstance(item, Part):
                        part = item
                        if part.name == "file" and filename is None:
                            filename = _filename(part.filename)
                        elif part.name in _FIELDS and part.name not in fields:
                            fields[part.name] = b""
                        else:
                            raise InvalidRequest("unknown field, or given twice", param=_shown(part.name))
                    elif part is not None and part.name == "file":
                        await coming.add(item)
                    elif part is not None:
                        fields[part.name] += item
                        if len(fields[part.name]) > _MAX_FIELD_BYTES:
                            raise InvalidRequest("too long", param=part.name)
            if not form.ended:
                raise InvalidRequest("the form ends too early", param="body")
            if filename is None:
                raise InvalidRequest("is required", param="file")
            kept_s = _kept_s(fields, settings.retention_s)
            file, repeated = await coming.finish(filename=filename, kept_s=kept_s, idempotency_key=key)
        return exchange.answer(rendered(file), headers={"Idempotent-Replayed": "true"} if repeated else None)

    async def page(exchange: Exchange) -> web.StreamResponse:
        query = exchange.query(("after", "limit", "order", "purpose"))
        limit = limit_of(query.get("limit"), _LIMIT, _MAX_LIMIT)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest("must be asc or desc", param="order")
        after = None if "after" not in query else id_of(query["after"], "file-")
        if "after" in query and after is None:
            raise NotFound("no such file", param="after")
        with content_store():
            files = await store.files(
                exchange.caller.key_id,
                after=after,
                purpose=query.get("purpose"),
                newest_first=order == "desc",
                limit=limit + 1,
            )
        entries = [rendered(file) for file in files[:limit]]
        told: FilePage = {
            "object": "list",
            "data": entries,
            **bounds([entry["id"] for entry in entries]),
            "has_more": len(files) > limit,
        }
        return exchange.answer(told)

    async def get(exchange: Exchange) -> web.StreamResponse:
        exchange.query(())
        return exchange.answer(rendered(await found(exchange)))

    async def content(exchange: Exchange) -> web.StreamResponse:
        exchange.query(())
        file = await found(exchange)
        pieces = _output(store, exchange.caller.key_id, file) if file.batch_id else _input(store, file)
        # An error of the store is told as long as nothing is out.
        first = await anext(pieces, b"")
        response = exchange.stream("application/octet-stream")
        await response.prepare(exchange.request)
        if first:
            await response.write(first)
        async for piece in pieces:
            await response.write(piece)
        await response.write_eof()
        return response

    async def delete(exchange: Exchange) -> web.StreamResponse:
        exchange.query(())
        file = await found(exchange)
        with content_store():
            deleted = await store.delete_file(exchange.caller.key_id, file)
        if not deleted:
            # Another call may have been faster; then there is no such file any more.
            await found(exchange)
            raise Conflict("a batch that has not ended reads the file: cancel it first")
        gone: FileDeleted = {"id": f"file-{file.file_id.hex}", "object": "file", "deleted": True}
        return exchange.answer(gone)

    async def found(exchange: Exchange) -> FileView:
        file_id = id_of(exchange.path_args["file_id"], "file-")
        if file_id is not None:
            with content_store():
                file = await store.file(exchange.caller.key_id, file_id)
            if file is not None:
                return file
        raise NotFound("no such file")

    one, inside = "/v1/files/{file_id}", "/v1/files/{file_id}/content"
    uploaded = Operation(
        summary="Upload a file for a batch",
        takes=(Content(type=FileUpload, media_type="multipart/form-data"),),
        gives=(Content(type=File),),
        errors=OF_CONTENT,
        repeatable=True,
        links={
            "get": Link(method="GET", path=one, parameters={"file_id": "/id"}),
            "content": Link(method="GET", path=inside, parameters={"file_id": "/id"}),
            "delete": Link(method="DELETE", path=one, parameters={"file_id": "/id"}),
        },
    )
    listed = Operation(
        summary="List files", query=_Page, gives=(Content(type=FilePage),), errors=OF_CONTENT | {Code.NOT_FOUND}
    )
    looked_at = Operation(summary="A file", gives=(Content(type=File),), errors=OF_CONTENT)
    gone_one = Operation(
        summary="Delete a file", gives=(Content(type=FileDeleted),), errors=OF_CONTENT | {Code.CONFLICT}
    )
    read = Operation(
        summary="What is in a file",
        gives=(Content(type=bytes, media_type="application/octet-stream"),),
        errors=OF_CONTENT,
    )
    return [
        Endpoint(method="POST", path="/v1/files", access=Scope.JOBS, handler=upload, told=uploaded),
        Endpoint(method="GET", path="/v1/files", access=Scope.JOBS, handler=page, told=listed),
        Endpoint(method="GET", path=one, access=Scope.JOBS, handler=get, told=looked_at),
        Endpoint(method="DELETE", path=one, access=Scope.JOBS, handler=delete, told=gone_one),
        Endpoint(method="GET", path=inside, access=Scope.JOBS, handler=content, told=read),
    ]


async def _input(store: BatchStore, file: FileView) -> AsyncIterator[bytes]:
    after = 0
    while True:
        with content_store():
            lines = await store.lines(file.file_id, after)
        if not lines:
            return
        after = lines[-1][0]
        yield b"".join(text for _, text in lines)


async def _output(store: BatchStore, key_id: uuid.UUID, file: FileView) -> AsyncIterator[bytes]:
    assert file.batch_id is not None
    last = last_job_id(file.batch_id)
    after = file.batch_id
    while True:
        with content_store():
            results = await store.output((key_id, after, last), failures=bool(file.failures))
        if not results:
            return
        after = results[-1][0].job_id
        yield b"".join(batch_line(result) for result, _ in results)


def rendered(file: FileView) -> File:
    return {
        "id": f"file-{file.file_id.hex}",
        "object": "file",
        "bytes": file.bytes,
        "created_at": seconds(file.created_at),
        "expires_at": seconds(file.expires_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


class Bounds(TypedDict):
    """Where a page begins and ends."""

    first_id: str | None
    last_id: str | None


def bounds(ids: Sequence[str]) -> Bounds:
    """Of a page in OpenAI's shape, by the ids of its entries."""
    return {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}


def seconds(time: datetime) -> int:
    """Unix time."""
    return int(time.timestamp())


def id_of(text: str, prefix: str) -> uuid.UUID | None:
    """None for what is no id of ours."""
    digits = text.removeprefix(prefix)
    if digits == text or len(digits) != 32 or not set(digits) <= set("0123456789abcdef"):
        return None
    return uuid.UUID(digits)


def limit_of(text: str | None, default: int, most: int) -> int:
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and 1 <= int(text) <= most):
        raise InvalidRequest(f"must be from 1 to {most}", param="limit")
    return int(text)


def _filename(given: str | None) -> str:
    name = (given or "").replace("\\", "/").rpartition("/")[2]
    if not name or len(name) > _MAX_FILENAME_CHARS or not name.isprintable():
        raise InvalidRequest(f"needs a file name of 1 to {_MAX_FILENAME_CHARS} printable characters", param="file")
    return name


def _kept_s(fields: dict[str, bytes], longest_s: float) -> float:
    purpose = fields.get("purpose")
    if purpose is None:
        raise InvalidRequest("is required", param="purpose")
    if purpose != b"batch":
        raise InvalidRequest("only files for batches are kept: must be batch", param="purpose")
    given = fields.get("expires_after[seconds]")
    if fields.get("expires_after[anchor]", b"created_at") != b"created_at":
        raise InvalidRequest("must be created_at", param="expires_after.anchor")
    if given is None:
        return longest_s
    text = given.decode("ascii", "replace")
    if not (text.isdigit() and len(text) <= 9 and _SHORTEST_S <= int(text) <= _LONGEST_S):
        raise InvalidRequest(f"must be from {_SHORTEST_S} to {_LONGEST_S}", param="expires_after.seconds")
    return min(float(text), longest_s)


def _shown(name: str) -> str | None:
    return name[:64] if name.isprintable() else None
