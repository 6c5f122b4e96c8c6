"""What is asked and answered is kept where an operator wants it, redacted, and nothing waits or fails for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import msgspec
import pytest
from structlog.testing import capture_logs

from adapters.contract import EmbeddingRequest
from gateway import capture
from gateway.answer import Item
from gateway.capture import Capture, CaptureSettings
from gateway.capture.store import Captured, CaptureStore, Row
from gateway.database import StoreUnavailable
from gateway.errors import GatewayError
from tests.fakes.simulated import SimulatedProvider, simulated
from tests.fakes.whole_line import CALLER, call, whole_line


class Kept:
    """The line with its captures, and the provider behind it."""

    def __init__(self, line: Capture, store: CaptureStore, provider: SimulatedProvider) -> None:
        self.line = line
        self.store = store
        self.provider = provider

    async def found(self, request_id: str) -> Captured:
        """Once it is there."""
        async with asyncio.timeout(30):
            while (found := await self.store.found(request_id)) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return found


@asynccontextmanager
async def kept(url: str, tmp_path: Any, **settings: Any) -> AsyncIterator[Kept]:
    async with simulated() as provider, asyncpg.create_pool(url, min_size=1, max_size=2) as pool:
        toml = f"""
        [providers.first]
        protocol = "chat_completions"
        base_url = "{provider.url}"
        models = ["sim-embed"]
        [models.sim-fast]
        providers = [{{ provider = "first", model = "sim-fast" }}]
        [models.sim-embed]
        providers = [{{ provider = "first", model = "sim-embed" }}]
        """
        async with whole_line(url, tmp_path, toml) as whole:
            store = CaptureStore(pool)
            given = CaptureSettings(enabled=True, **settings)
            async with Capture(line=whole.pipeline, store=store, settings=given).opened() as line:
                yield Kept(line, store, provider)


async def read(items: AsyncIterator[Item], most: int = 1_000_000) -> None:
    async for _ in items:
        most -= 1
        if not most:
            return


def said(row: Row) -> tuple[Any, Any]:
    return json.loads(row.request or "null"), json.loads(row.answer or "null")


async def test_plain_and_streamed_answers_are_kept_as_they_were_said(database_url, tmp_path):
    async with kept(database_url, tmp_path) as world:
        plain = call("sim-fast", session_id="s", debit_id="d")
        completion = await world.line.complete(plain)
        row = (await world.found(plain.request_id)).row
        asked, answer = said(row)
        assert (row.ended, row.key_id, row.debit_id, row.session_id) == ("complete", CALLER.key_id, "d", "s")
        assert (row.transport, row.model) == ("rest", "sim-fast")
        assert asked["protocol"] == "chat_completions"
        assert asked["body"]["messages"] == [{"role": "user", "content": "what is a bridge?"}]
        assert answer["choices"][0]["text"] == completion.response.choices[0].text

        streamed = call("sim-fast")
        async with world.line.stream(streamed) as items:
            await read(items)
        row = (await world.found(streamed.request_id)).row
        assert row.ended == "complete"
        assert said(row)[1]["choices"][0]["text"]


async def test_what_broke_or_was_left_is_kept_as_far_as_it_came(database_url, tmp_path):
    async with kept(database_url, tmp_path) as world:
        left = call("sim-fast")
        async with world.line.stream(left) as items:
            await read(items, 2)
        row = (await world.found(left.request_id)).row
        assert row.ended == "cancelled"
        assert said(row)[1]["choices"][0]["text"]

        await world.provider.set_faults(die="rst", die_after=3)
        broken = call("sim-fast")
        with pytest.raises(GatewayError) as error:
            async with world.line.stream(broken) as items:
                await read(items)
        row = (await world.found(broken.request_id)).row
        assert row.ended == error.value.code.value
        assert said(row)[1]["choices"][0]["text"]

        refused = call("no-such-model")
        with pytest.raises(GatewayError):
            await world.line.complete(refused)
        row = (await world.found(refused.request_id)).row
        assert (row.ended, row.answer, row.answer_bytes) == ("model_not_found", None, 0)


async def test_what_is_too_large_is_told_by_its_size_and_what_is_past_its_time_is_gone(database_url, tmp_path):
    async with kept(database_url, tmp_path, max_bytes=60, retention_s=0.5) as world:
        asked = call("sim-fast")
        await world.line.complete(asked)
        async with asyncio.timeout(30):
            async with asyncpg.create_pool(database_url, min_size=1, max_size=1) as pool:
                while (row := await pool.fetchrow("select * from content.capture")) is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            assert (row["request"], row["answer"]) == (None, None)
            assert row["request_bytes"] > 60 < row["answer_bytes"]
            while await world.store.found(asked.request_id) is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            assert await world.store.purge(10) == 1


async def test_embeddings_are_kept_without_their_vectors(database_url, tmp_path):
    async with kept(database_url, tmp_path) as world:
        asked = msgspec.structs.replace(call("sim-embed"), embedding=EmbeddingRequest(inputs=("ada@mail.example",)))
        await world.line.embed(asked)
        row = (await world.found(asked.request_id)).row
        assert said(row) == (
            {"protocol": "tollbridge", "body": json.loads(row.request or "")["body"] | {"inputs": ["[email]"]}},
            None,
        )


class Away(CaptureStore):
    """A store that cannot be reached."""

    def __init__(self) -> None:
        self.tried = 0

    async def write(self, rows: Sequence[Row], retention_s: float) -> None:
        self.tried += 1
        raise StoreUnavailable("away")

    async def purge(self, most: int) -> int:
        raise StoreUnavailable("away")


async def test_a_store_that_is_away_holds_nobody_up_and_what_is_lost_is_counted(database_url, tmp_path, monkeypatch):
    monkeypatch.setattr(capture, "_LAST_WRITES_S", 0.1)
    async with simulated() as provider:
        toml = f"""
        [providers.first]
        protocol = "chat_completions"
        base_url = "{provider.url}"
        [models.sim-fast]
        providers = [{{ provider = "first", model = "sim-fast" }}]
        """
        async with whole_line(database_url, tmp_path, toml) as whole:
            away = Away()
            one = Capture(line=whole.pipeline, store=away, settings=CaptureSettings(enabled=True))
            with capture_logs() as logs:
                async with one.opened() as line:
                    monkeypatch.setattr(capture, "_MOST_WAITING", 1000)
                    for _ in range(8):
                        await line.complete(call("sim-fast"))
                    async with asyncio.timeout(30):
                        while not away.tried:  # noqa: ASYNC110
                            await asyncio.sleep(0.02)
            assert sum(entry["count"] for entry in logs if entry["event"] == "gateway.captures_lost") == 8
