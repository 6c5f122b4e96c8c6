"""
A given number of requests in every way there is: both transports, plain, streamed and as jobs, over several protocols.

Each of them has a key, and most a session, a run, a step and tags, so that every kind of counter is raised. Some
callers leave, some streams break off at the provider, some of its answers are errors. What a request is comes from the
seed and its number; whom it meets does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, Literal

import asyncpg
import httpx

from gateway.client import AsyncClient, CallFailed, CompletionRequest, Message
from tests.fakes.gateway_process import KEY, bearer
from tests.faults.audit import Heard, Kind, Price, Violation
from tests.faults.world import (
    CALL_S,
    EXECUTION_S,
    ISOLATION_S,
    QUEUE_S,
    SHORT_TIMES,
    Gateway,
    Setup,
    World,
    job_accepted,
    streamed,
)
from tests.ledger import counters_that_differ

#: At the provider at once, over all gateways.
LIMIT: Final = 12
#: Callers at once.
CLIENTS: Final = 18
#: Protocol, what becomes of what a caller leaves, and USD for a million tokens; by the provider's model. One price has
#: more digits than an amount: each charge of it is rounded.
MODELS: Final[Mapping[str, tuple[str, str, Price]]] = {
    "sim-fast": ("chat_completions", "drain", (Decimal("2.50"), Decimal("10.00"))),
    "sim-small": ("anthropic_messages", "close", (Decimal("0.333333"), Decimal("1.234567"))),
    "sim-large": ("responses", "drain", (Decimal("0.12345678"), Decimal("7.65432109"))),
}
#: What the provider does wrong, by model, besides what every one of them does. Errors that a breaker would open on are
#: not among them: it would refuse most of what follows.
FAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "sim-fast": {"rate": 0.06, "rate_seed": 1, "die_after": 3},
    "sim-small": {"rate": 0.06, "rate_seed": 2, "status": 400},
    "sim-large": {"rate": 0.06, "rate_seed": 3, "die": "fin", "die_after": 2},
}
#: In the middle of an answer, and before it.
STREAM_BROKEN: Final = "stream broken off at the provider"
REFUSED: Final = "provider answered with an error"
CALLER_LEFT: Final = "caller left"
_WAYS: Final = ("grpc", "grpc stream", "rest", "rest stream", "job")
Way = Literal["grpc", "grpc stream", "rest", "rest stream", "job"]
#: For a key that was just made to be known everywhere.
_KNOWN_WITHIN_S: Final = 120.0
#: Between looks whether the counters are the sums of their rows while they are being raised.
_LOOK_S: Final = 1.0
_LOST = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError)


def configuration(provider_url: str) -> str:
    endpoint = "/".join(provider_url.split("/")[:3])
    profiles = "".join(
        f"""
        [providers.{protocol}]
        protocol = "{protocol}"
        base_url = "{provider_url}"
        first_byte_s = 3
        gap_s = 2
        execution_limit_s = {EXECUTION_S}
        reasoning_execution_limit_s = {EXECUTION_S}
        isolation_s = {ISOLATION_S}
        queue_timeout_s = {QUEUE_S}
        on_cancel = "{on_cancel}"
        [models.{model}]
        providers = ["{protocol}"]
        price = {{ input = "{price_in}", output = "{price_out}" }}
        """
        for model, (protocol, on_cancel, (price_in, price_out)) in MODELS.items()
    )
    return f"""
        [gateway]
        drain_s = 5
        {profiles}
        [groups."{endpoint}"]
        concurrency = {LIMIT}
        queue = 200
        failure_threshold = 50
        first_cooldown_s = 0.3
        longest_cooldown_s = 0.5
        {SHORT_TIMES}
    """


SETUP: Final = Setup(
    configuration=configuration,
    limit=LIMIT,
    prices={model: price for model, (_, _, price) in MODELS.items()},
    # What is charged is the matter here, and not how soon.
    serves_within_s=60.0,
    rests_within_s=120.0,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wish:
    """One request."""

    marker: str
    way: Way
    model: str
    secret: str
    #: Session, run and the like, in the names of the contract.
    fields: Mapping[str, str]
    tags: Mapping[str, str]
    leaves_after_s: float | None
    #: With this chunk, of a stream.
    leaves_at: int | None

    @property
    def body(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "max_tokens": 64,
            "messages": [{"role": "user", "content": f"question {self.marker}"}],
            "user": self.marker,
        }

    @property
    def message(self) -> CompletionRequest:
        request = CompletionRequest(
            model=self.model,
            messages=[Message(role="user", text=f"question {self.marker}")],
            max_output_tokens=64,
            end_user=self.marker,
            debit_id=self.marker,
            tags=self.tags,
        )
        for name, value in self.fields.items():
            setattr(request, name, value)
        return request

    @property
    def headers(self) -> dict[str, str]:
        named = {f"x-tollbridge-{name.replace('_', '-')}": value for name, value in self.fields.items()}
        tags = {"x-tollbridge-tags": ", ".join(f"{name}={value}" for name, value in self.tags.items())}
        return {**bearer(self.secret), "x-tollbridge-debit-id": self.marker, **named, **(tags if self.tags else {})}

    @property
    def line(self) -> dict[str, Any]:
        line = {"custom_id": self.marker, "url": "/v1/chat/completions", "debit_id": self.marker, "body": self.body}
        return {**line, **self.fields, **({"tags": dict(self.tags)} if self.tags else {})}


def wish(seed: int, number: int, secrets: Sequence[str]) -> Wish:
    chance = random.Random(f"request {seed} {number}")
    fields = {
        "session_id": f"session-{chance.randrange(40)}",
        "run_id": f"run-{chance.randrange(20)}",
        "step_id": f"step-{chance.randrange(4)}",
        "skill": chance.choice(("search", "sum")),
        "tool": "probe",
    }
    tags = {"team": chance.choice(("green", "blue")), "env": "test", "case": f"{chance.randrange(10)}"}
    return Wish(
        marker=f"s{seed}-n{number}",
        way=chance.choices(_WAYS, (24, 24, 20, 20, 12))[0],
        model=chance.choice(list(MODELS)),
        secret=chance.choice(secrets),
        fields={name: value for name, value in fields.items() if chance.random() < 0.8},
        tags={name: value for name, value in tags.items() if chance.random() < 0.7},
        leaves_after_s=chance.uniform(0, 0.5) if chance.random() < 0.12 else None,
        leaves_at=chance.randrange(6) if chance.random() < 0.12 else None,
    )


class Traffic:
    """Made with keys that every gateway of the world knows."""

    def __init__(self, world: World, secrets: Sequence[str]) -> None:
        self._world = world
        self._secrets = secrets
        self._begun = 0
        #: Set when the worst has been done: then it ends with the last request that was wanted.
        self.may_end = asyncio.Event()
        #: Snapshots in which the counters were held against their rows.
        self.looks = 0

    @property
    def done(self) -> bool:
        return self._begun >= self._world.requests and self.may_end.is_set()

    async def run(self) -> None:
        """All of them. Counters are held against their rows meanwhile, in whatever snapshot comes."""
        watch = asyncio.create_task(self._watch())
        try:
            await asyncio.gather(*(self._client() for _ in range(CLIENTS)))
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _client(self) -> None:
        world = self._world
        while not self.done:
            usable = [gateway for gateway in world.gateways if gateway.usable]
            if not usable:
                await asyncio.sleep(0.05)
                continue
            number, self._begun = self._begun, self._begun + 1
            wanted = wish(world.seed, number, self._secrets)
            chance = random.Random(f"gateway {world.seed} {number}")
            gateway = chance.choice(usable)
            if wanted.way == "job":
                if not await job_accepted(
                    world, gateway, wanted.line, secret=wanted.secret, leaves_after_s=wanted.leaves_after_s
                ):
                    world.heard.append(Heard(marker=wanted.marker, ended="job not taken", at=time.monotonic()))
                continue
            heard = await self._asked(gateway, wanted)
            world.heard.append(heard)
            gateway.heard.append(heard)
            if heard.ended == "cancelled":
                world.struck(CALLER_LEFT)
            elif heard.ended != "complete":
                # Who is refused does not come back at once: it would only be refused again.
                await asyncio.sleep(chance.uniform(0.05, 0.5))
            if number % 50 == 0:
                world.tell(f"{number} of {world.requests} requests, {sum(world.report.faults.values())} faults")

    async def _asked(self, gateway: Gateway, wanted: Wish) -> Heard:
        heard = Heard(marker=wanted.marker, ended="cancelled")
        client, http = gateway.clients[wanted.secret], gateway.http
        assert http is not None
        try:
            async with asyncio.timeout(2 * CALL_S if wanted.leaves_after_s is None else wanted.leaves_after_s):
                match wanted.way:
                    case "grpc" | "grpc stream":
                        await _over_grpc(client, wanted, heard)
                    case "rest":
                        await _over_rest(http, wanted, heard)
                    case _:
                        await _streamed_over_rest(http, wanted, heard)
        except TimeoutError:
            pass
        except CallFailed as failed:
            heard.ended = failed.code
        except httpx.TransportError as failed:
            heard.ended = f"transport: {type(failed).__name__}"
        heard.at = time.monotonic()
        return heard

    async def _watch(self) -> None:
        world = self._world
        while True:
            with contextlib.suppress(*_LOST):
                connection = await asyncpg.connect(world.url, timeout=2, command_timeout=20)
                try:
                    while True:
                        for said in await counters_that_differ(connection):
                            world.report.violations.append(Violation(Kind.COUNTER, f"under load: {said}"))
                        self.looks += 1
                        await asyncio.sleep(_LOOK_S)
                finally:
                    connection.terminate()
            await asyncio.sleep(0.2)


async def _over_grpc(client: AsyncClient, wanted: Wish, heard: Heard) -> None:
    if wanted.way == "grpc stream":
        outcome = await streamed(client, wanted.message, wanted.leaves_at, CALL_S)
    else:
        outcome = (await client.complete(wanted.message, timeout_s=CALL_S)).outcome
    if outcome is not None:
        heard.ended = "complete"
        heard.settled = outcome.settlement == "settled"
        heard.usd = Decimal(outcome.cost.usd) if outcome.cost.HasField("usd") else None


async def _over_rest(http: httpx.AsyncClient, wanted: Wish, heard: Heard) -> None:
    answer = await http.post("/v1/chat/completions", json=wanted.body, headers=wanted.headers)
    if answer.status_code == httpx.codes.OK:
        heard.ended = "complete"
        heard.settled = answer.headers["x-tollbridge-settlement"] == "settled"
        usd = answer.headers.get("x-tollbridge-cost-usd")
        heard.usd = None if usd is None else Decimal(usd)
    else:
        heard.ended = answer.headers.get("x-tollbridge-code") or f"status {answer.status_code}"


async def _streamed_over_rest(http: httpx.AsyncClient, wanted: Wish, heard: Heard) -> None:
    body = {**wanted.body, "stream": True}
    async with http.stream("POST", "/v1/chat/completions", json=body, headers=wanted.headers) as answer:
        if answer.status_code != httpx.codes.OK:
            heard.ended = answer.headers.get("x-tollbridge-code") or f"status {answer.status_code}"
            return
        chunks = 0
        heard.ended = "broken"
        async for line in answer.aiter_lines():
            if line.startswith('data: {"error"'):
                heard.ended = "error in the stream"
                return
            if line == "data: [DONE]":
                heard.ended = "complete"
                return
            if line.startswith("data: "):
                if wanted.leaves_at is not None and chunks >= wanted.leaves_at:
                    heard.ended = "cancelled"
                    return
                chunks += 1


async def keys_of(world: World, number: int) -> list[str]:
    """The usual key and `number` others, which every gateway knows and its clients have from now on."""
    first = world.gateways[0]
    assert first.http is not None
    secrets = [KEY]
    for name in range(number):
        made = await first.http.post(
            "/v1/keys", json={"name": f"caller-{name}", "scopes": ["chat", "jobs"]}, headers=bearer(KEY)
        )
        assert made.status_code == httpx.codes.CREATED, made.text
        secrets.append(made.json()["secret"])
    for gateway in world.gateways:
        gateway.secrets = secrets
        await gateway.connect()
        assert gateway.http is not None
        async with asyncio.timeout(_KNOWN_WITHIN_S):
            for secret in secrets:
                while not await _knows(gateway.http, secret):  # noqa: ASYNC110  another process does it
                    await asyncio.sleep(0.05)
    return secrets


async def _knows(http: httpx.AsyncClient, secret: str) -> bool:
    return (await http.get("/v1/models", headers=bearer(secret))).status_code == httpx.codes.OK
