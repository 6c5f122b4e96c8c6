"""Jobs over REST: submitted now, collected later. A job and a result are the JSON objects that REST documents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, TypeAlias

import httpx
import msgspec

from gateway.client import errors

Json: TypeAlias = dict[str, Any]

ENDED: Final = frozenset({"succeeded", "failed", "cancelled", "expired"})
#: Seconds that one request asks the gateway to wait for a job's end.
POLL_S: Final = 30


class Jobs:
    """The jobs of one API key. Every method raises `CallFailed`."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def submit(self, jobs: Iterable[Mapping[str, Any]], *, idempotency_key: str | None = None) -> Json:
        """
        Hand in jobs, each an object of the OpenAI batch input format, as one submission.

        When it returns they are stored. With an `idempotency_key` it may be repeated: the same jobs are then the same
        submission.
        """
        body = b"\n".join(msgspec.json.encode(job) for job in jobs) + b"\n"
        return await self.submit_lines(body, idempotency_key=idempotency_key)

    async def submit_lines(self, lines: bytes, *, idempotency_key: str | None = None) -> Json:
        """As `submit`, for a file of JSON lines as it is. A line that is not valid comes back with its own error."""
        headers = {"content-type": "application/x-ndjson"}
        if idempotency_key is not None:
            headers["idempotency-key"] = idempotency_key
        return await self._json("POST", "/v1/jobs", content=lines, headers=headers)

    async def get(self, job_id: str) -> Json:
        return await self._json("GET", f"/v1/jobs/{job_id}")

    async def wait(self, job_id: str, *, timeout_s: float | None = None) -> Json:
        """The job once it has ended. Raises `TimeoutError` when that takes longer than `timeout_s`."""
        async with asyncio.timeout(timeout_s):
            while True:
                job = await self._json("GET", f"/v1/jobs/{job_id}", params={"wait": str(POLL_S)})
                if job["status"] in ENDED:
                    return job

    async def cancel(self, job_id: str) -> Json:
        return await self._json("POST", f"/v1/jobs/{job_id}/cancel")

    @asynccontextmanager
    async def results(self, **filters: str) -> AsyncIterator[AsyncIterator[Json]]:
        """The results that the filters select, in the OpenAI batch output format, read as they are taken."""
        try:
            async with self._http.stream("GET", "/v1/jobs/results", params=filters) as response:
                if response.is_error:
                    await response.aread()
                    raise errors.from_http(response)
                async with aclosing(_objects(response.aiter_bytes())) as results:
                    yield results
        except httpx.TransportError as failed:
            raise errors.from_transport(failed) from failed

    async def _json(self, method: str, path: str, **request: Any) -> Json:
        try:
            response = await self._http.request(method, path, **request)
        except httpx.TransportError as failed:
            raise errors.from_transport(failed) from failed
        if response.is_error:
            raise errors.from_http(response)
        answer: Json = msgspec.json.decode(response.content)
        return answer


async def _objects(pieces: AsyncIterator[bytes]) -> AsyncGenerator[Json, None]:
    # Not by a text's lines: those end at U+2028 too, which JSON has inside strings.
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line:
                yield msgspec.json.decode(line)
    if rest:
        yield msgspec.json.decode(rest)
