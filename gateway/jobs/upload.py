"""
Takes a file while it comes: its lines are written as they arrive, under a name that nobody sees before the last one.

A file is not one transaction. That would hold a connection at the pace of its sender; and a submission's spool would
write everything twice. What a sender leaves half-way is removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import uuid
from collections.abc import AsyncIterator, Iterable

from admission.ids import new_id
from gateway.database import StoreUnavailable, store_errors
from gateway.errors import Code, Conflict, GatewayError, InvalidRequest
from gateway.jobs.batch_store import BatchStore, FileView
from gateway.jobs.intake import as_gateway_error, matching
from gateway.jobs.settings import JobsSettings
from gateway.jobs.store import INSERT_ROWS, SPAN, Accepted
from gateway.jobs.submission import FileSplitter

_WRITE_BYTES = 1024 * 1024


class Upload:
    """One file that is coming. Made by `uploading`."""

    def __init__(self, store: BatchStore, settings: JobsSettings, key_id: uuid.UUID) -> None:
        self.file_id = new_id()
        self.ready = False
        self._store = store
        self._settings = settings
        self._key_id = key_id
        self._splitter = FileSplitter(max_line_bytes=settings.max_line_bytes)
        self._digest = hashlib.sha256(b"file\n")
        self._size = 0
        self._count = 0
        self._lines: list[tuple[int, bytes]] = []
        self._held = 0

    async def add(self, data: bytes) -> None:
        """Raises `payload_too_large`, `content_store_unavailable`."""
        self._size += len(data)
        if self._size > self._settings.max_file_bytes:
            raise GatewayError(
                f"a file may have {self._settings.max_file_bytes} bytes", code=Code.PAYLOAD_TOO_LARGE, param="file"
            )
        self._digest.update(data)
        await self._keep(self._splitter.feed(data))

    async def finish(self, *, filename: str, kept_s: float, idempotency_key: str | None) -> tuple[FileView, bool]:
        """
        The whole file is here. The file, and whether it was uploaded before under this key.

        Raises InvalidRequest for one without a line, IdempotencyMismatch, Conflict, and what `add` raises.
        """
        await self._keep(self._splitter.close())
        if not self._count:
            raise InvalidRequest("the file is empty", param="file")
        await self._write()
        self._digest.update(f"\n{filename}".encode("utf-8", "replace"))
        with as_gateway_error(), store_errors():
            file_id, repeated = await self._end(filename, kept_s, idempotency_key)
            file = await self._store.file(self._key_id, file_id)
        if file is None:
            raise Conflict("the file was deleted")
        return file, repeated

    async def _end(self, filename: str, kept_s: float, key: str | None) -> tuple[uuid.UUID, bool]:
        async with self._store.jobs.transaction() as connection:
            if key is not None:
                accepted = Accepted(submission_id=self.file_id, digest=self._digest.digest(), answer="{}")
                if not await self._store.jobs.accept(connection, self._key_id, key, accepted):
                    earlier = await self._store.jobs.submission(self._key_id, key, connection)
                    assert earlier is not None
                    return matching(earlier, accepted.digest).submission_id, True
            if not await self._store.file_ready(
                connection, self.file_id, filename=filename, size=self._size, kept_s=kept_s
            ):
                raise GatewayError("the file came too slowly", code=Code.REQUEST_TIMEOUT, param="file")
        self.ready = True
        return self.file_id, False

    async def _keep(self, lines: Iterable[tuple[int, bytes]]) -> None:
        for number, text in lines:
            self._count += bool(text.strip())
            if self._count > self._settings.max_lines or number > SPAN:
                raise GatewayError(
                    f"a file may have {self._settings.max_lines} lines", code=Code.PAYLOAD_TOO_LARGE, param="file"
                )
            self._lines.append((number, text))
            self._held += len(text)
            if len(self._lines) >= INSERT_ROWS or self._held >= _WRITE_BYTES:
                await self._write()

    async def _write(self) -> None:
        lines, self._lines, self._held = self._lines, [], 0
        if lines:
            with as_gateway_error():
                await self._store.add_lines(self.file_id, lines)


@contextlib.asynccontextmanager
async def uploading(store: BatchStore, settings: JobsSettings, key_id: uuid.UUID) -> AsyncIterator[Upload]:
    """What is not finished in the block is removed. Raises `content_store_unavailable`."""
    upload = Upload(store, settings, key_id)
    with as_gateway_error():
        await store.begin_file(key_id, upload.file_id)
    try:
        yield upload
    finally:
        if not upload.ready:
            # Where this fails, too, it is given up after `upload_patience_s`.
            with contextlib.suppress(StoreUnavailable):
                await store.forget_file(upload.file_id)
