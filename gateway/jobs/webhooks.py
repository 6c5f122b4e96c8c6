"""
Sends word of the ends of jobs and batches, signed, until somebody has taken it.

The table is the queue: a message is written in the transaction that ends its subject, claimed with a lease, and deleted
when its receiver has answered 2xx. A process that dies in between has at worst sent it twice, under the same id. The
scheme is Standard Webhooks' (https://www.standardwebhooks.com), version 1: HMAC-SHA256 over id, time and body.

Here alone the gateway connects to where a caller says. So each connection is made to an address that was looked at, not
to what the name might stand for a moment later; redirects are not followed; of the answer nothing but its status is
read.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import importlib.metadata
import random
import socket
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Final

import aiohttp
import msgspec
import structlog
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from typing_extensions import override

from gateway.database import Pool, StoreUnavailable, store_errors
from gateway.errors import InvalidRequest
from gateway.jobs.destinations import Destinations
from gateway.jobs.rounds import rounds
from gateway.jobs.settings import WebhookSettings
from gateway.jobs.store import JobStore, read_statement

log = structlog.get_logger(__name__)

WEBHOOK_CLAIM: Final = read_statement("webhook_claim")
WEBHOOK_DONE: Final = read_statement("webhook_done")
WEBHOOK_AGAIN: Final = read_statement("webhook_again")

#: Messages on their way at once.
_AT_ONCE = 16
#: Seconds by which a lease outlives the longest try.
_LEASE_MARGIN_S = 5.0
#: The receiver wants no more of it.
_GONE = 410


class Message(msgspec.Struct, frozen=True, kw_only=True):
    webhook_id: uuid.UUID
    url: str
    payload: str
    attempts: int
    age_s: float


def signed(secret: bytes, message_id: str, timestamp: int, body: bytes) -> Mapping[str, str]:
    """The headers of a message."""
    content = f"{message_id}.{timestamp}.".encode() + body
    signature = base64.b64encode(hmac.new(secret, content, hashlib.sha256).digest()).decode()
    return {"webhook-id": message_id, "webhook-timestamp": str(timestamp), "webhook-signature": f"v1,{signature}"}


class _Resolver(AbstractResolver):
    """The system's, without the answers that nothing may be sent to."""

    def __init__(self, destinations: Destinations) -> None:
        self._destinations = destinations
        self._system = ThreadedResolver()

    @override
    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._system.resolve(host, port, family)
        allowed = [one for one in found if self._destinations.address_fault(one["host"]) is None]
        if not allowed:
            raise OSError(None, "the name stands for no public address")
        return allowed

    @override
    async def close(self) -> None:
        await self._system.close()


class Webhooks:
    """The messages of one process. `opened`, it sends what is due."""

    def __init__(self, pool: Pool, jobs: JobStore, settings: WebhookSettings) -> None:
        self._pool = pool
        self._jobs = jobs
        self._settings = settings
        self.destinations = Destinations(
            settings.allowed_hosts, allow_http=settings.allow_http, allow_private=settings.allow_private
        )

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[Webhooks]:
        connector = aiohttp.TCPConnector(
            resolver=_Resolver(self.destinations), use_dns_cache=False, force_close=True, limit=_AT_ONCE
        )
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=self._settings.timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"user-agent": f"tollbridge/{importlib.metadata.version('tollbridge')}"},
            trust_env=False,
        ) as session:
            under_way: set[asyncio.Task[None]] = set()
            loop = asyncio.create_task(rounds("webhooks", lambda: self._send_due(session, under_way)), name="webhooks")
            try:
                yield self
            finally:
                tasks = [loop, *under_way]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _send_due(self, session: aiohttp.ClientSession, under_way: set[asyncio.Task[None]]) -> float:
        """
        Each message by itself: a receiver that hangs holds up one place of `_AT_ONCE`, and for no longer than the
        time of one try.
        """
        if len(under_way) >= _AT_ONCE:
            await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
        claimed = await self.claim(_AT_ONCE - len(under_way))
        for message in claimed:
            task = asyncio.create_task(self._deliver(session, message))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        return 0.0 if claimed else self._settings.poll_s

    async def claim(self, most: int) -> list[Message]:
        if most <= 0 or self._settings.secret is None:
            return []
        lease_s = self._settings.timeout_s + _LEASE_MARGIN_S
        with store_errors():
            rows = await self._pool.fetch(WEBHOOK_CLAIM, most, lease_s, *self._jobs.known())
        return [Message(**dict(row)) for row in rows]

    async def _deliver(self, session: aiohttp.ClientSession, message: Message) -> None:
        fault = await self._send(session, message)
        told = {"webhook_id": str(message.webhook_id), "attempts": message.attempts, "reason": fault}
        # Where the store is away the lease ends, and the message is sent again.
        with contextlib.suppress(StoreUnavailable), store_errors():
            if fault is None:
                await self._pool.execute(WEBHOOK_DONE, message.webhook_id)
                log.info("webhooks.delivered", webhook_id=told["webhook_id"], attempts=message.attempts)
            elif message.age_s >= self._settings.give_up_s or fault == f"status {_GONE}":
                await self._pool.execute(WEBHOOK_DONE, message.webhook_id)
                log.error("webhooks.given_up", **told)
            else:
                delay_s = self._delay(message.attempts)
                await self._pool.execute(
                    WEBHOOK_AGAIN, message.webhook_id, message.attempts, delay_s, *self._jobs.known()
                )
                log.warning("webhooks.failed", **told, again_in_s=round(delay_s, 1))

    async def _send(self, session: aiohttp.ClientSession, message: Message) -> str | None:
        """What went wrong; None: it was taken."""
        assert self._settings.secret is not None
        body = message.payload.encode()
        headers = {
            "content-type": "application/json",
            # The time is that of this try: receivers refuse what is old.
            **signed(self._settings.secret, f"msg_{message.webhook_id.hex}", int(time.time()), body),
        }
        try:
            # Once more: what is allowed may have changed since.
            self.destinations.check(message.url)
            async with session.post(message.url, data=body, headers=headers, allow_redirects=False) as answer:
                return None if 200 <= answer.status < 300 else f"status {answer.status}"
        except InvalidRequest as error:
            return error.message
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            # Its text may hold the address.
            return type(error).__name__

    def _delay(self, attempts: int) -> float:
        grown = min(self._settings.retry_longest_s, self._settings.retry_delay_s * 2.0 ** min(attempts - 1, 20))
        return grown * (1.0 + random.random() * 0.25)  # noqa: S311  not for secrecy
