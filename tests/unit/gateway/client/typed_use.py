"""
How a program uses the client, for mypy: `make types` fails where the types that a user sees are others than these.

It is never run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from decimal import Decimal
from typing import Any, assert_type

from gateway.client import (
    Answer,
    AsyncClient,
    AsyncStream,
    Batch,
    BatchResult,
    CallFailed,
    Client,
    CompletionChunk,
    Job,
    Message,
    Receipt,
    Stream,
    ToolCall,
)


def with_threads(client: Client) -> None:
    answer = assert_type(client.complete("Hello?", model="m", tags={"a": "b"}, max_cost_usd=Decimal("0.1")), Answer)
    assert_type(answer.text, str)
    assert_type(answer.cost_usd, Decimal | None)
    assert_type(answer.tool_calls, tuple[ToolCall, ...])
    client.complete([{"role": "user", "content": "Hello?"}, answer.message, Message(role="user")], model="m")
    with client.stream("Hello?", model="m", order="cost", timeout_s=3) as stream:
        assert_type(stream, Stream)
        for chunk in stream:
            assert_type(chunk, CompletionChunk)
        assert_type(stream.text(), Iterator[str])
        assert_type(stream.answer(), Answer)
    receipt = assert_type(client.jobs.submit([{"custom_id": "a"}]), Receipt)
    for job in client.jobs.as_completed(receipt, "id", timeout_s=60):
        assert_type(job, Job)
        assert_type(job.answer(), Any)
    batch = assert_type(client.batches.submit("lines.jsonl"), Batch)
    with client.batches.results(client.batches.wait(batch.id, progress=print)) as results:
        assert_type(results, Iterator[BatchResult])
    client.complete("Hello?", mode="m")  # type: ignore[call-arg]
    client.complete("Hello?", order="best")  # type: ignore[arg-type]
    client.complete(7, model="m")  # type: ignore[arg-type]


async def in_a_loop(client: AsyncClient) -> None:
    assert_type(await client.complete("Hello?", model="m"), Answer)
    async with client.stream("Hello?", model="m") as stream:
        assert_type(stream, AsyncStream)
        async for chunk in stream:
            assert_type(chunk, CompletionChunk)
        assert_type(await stream.answer(), Answer)
    receipt = assert_type(await client.jobs.submit([{"custom_id": "a"}]), Receipt)
    assert_type(client.jobs.as_completed(receipt), AsyncIterator[Job])
    async with client.batches.results("batch_1", with_requests=True) as results:
        assert_type(results, AsyncIterator[BatchResult])


def of_errors(failed: CallFailed) -> None:
    assert_type((failed.code, failed.param), tuple[str, str | None])
    assert_type((failed.retry_after_s, failed.attempts), tuple[float | None, int | None])
    assert_type(failed.dispatched, bool | None)
