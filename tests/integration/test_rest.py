"""The REST server over real sockets, with real keys: who gets in, what is refused, how it stops."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import date
from decimal import Decimal
from io import BytesIO
from typing import Any
from uuid import UUID

import aiohttp
import msgspec
import pytest
from aiohttp import web
from multidict import CIMultiDict
from structlog.testing import capture_logs

from admission.ids import new_id
from gateway import database
from gateway.call import Caller, Scope
from gateway.database import StoreUnavailable
from gateway.errors import AdmissionRefused, NotFound, Unauthenticated
from gateway.keys import Keys
from gateway.policy import Policy
from gateway.rest import models, operators, usage
from gateway.rest.app import RestServer, RestSettings, serve
from gateway.rest.auth import Authenticator
from gateway.rest.endpoint import REQUEST_ID, Access, BodyLimits, Endpoint, Exchange, usd
from gateway.rest.models import ModelEntry, ModelPlace, Prices
from metering.grouping import Grouped, Question

SECRET_TEXT = "the-quick-brown-canary"

BODY = BodyLimits(max_json_bytes=1024**2, max_body_bytes=2 * 1024**2, body_grace_s=0.3, body_min_rate=1024**2)
SETTINGS = RestSettings(port=0, body=BODY, header_timeout_s=0.5, drain_s=5.0)


class FakeReadiness:
    def __init__(self) -> None:
        self.parts = {"control_store": "answers"}

    def ready(self) -> tuple[bool, dict[str, str]]:
        return self.parts["control_store"] == "answers", self.parts

    def providers(self) -> dict[str, str]:
        return {"openai": "not_ready", "local": "ready"}


def place(provider: str, *, ready: bool) -> ModelPlace:
    return ModelPlace(
        id=provider,
        model="gpt-4o",
        protocol="chat_completions",
        ready=ready,
        context_window=128_000,
        prices=Prices(input="2.5", output="10", version="v1"),
        capabilities={"tools": None, "audio": False},
    )


def allowed(model: str, policy: Policy) -> set[tuple[str, str]]:
    entry = next(entry for entry in FakeCatalogue().models() if entry.name == model)
    return {(place.id, place.model) for place in entry.providers if policy.allows(place.id, place.model, model)}


class FakeCatalogue:
    def models(self) -> Sequence[ModelEntry]:
        return [
            ModelEntry(name="gpt-4o", providers=(place("openai", ready=False), place("local", ready=True))),
            ModelEntry(name="local/meta/llama", providers=(place("local", ready=True),)),
            ModelEntry(name="nobody-has-it", providers=(place("openai", ready=False),)),
        ]


class FakeUsage:
    zone = "UTC"

    def __init__(self) -> None:
        self.asked: list[tuple[str | None, date | None, UUID | None]] = []
        self.lost = False

    async def read(
        self, *, session_id: str | None, day: date | None, key_id: UUID | None, session_key: UUID
    ) -> Mapping[str, object]:
        if self.lost:
            raise StoreUnavailable("gone")
        self.asked.append((session_id, day, key_id))
        return {"session": None, "day": {"charged_usd": Decimal("1E-7")}, "total": {"charged_usd": Decimal("12.50")}}

    async def grouped(self, question: Question) -> Grouped:
        raise AssertionError("nobody asks for groups here")


class FakeGroups:
    def __init__(self) -> None:
        self.keys: list[object] = []

    async def groups(self) -> Sequence[Mapping[str, Any]]:
        slots = [
            {"key_id": str(key), "debit_id": f"order-{n}", "ticket_id": f"t{n}", "state": "active"}
            for n, key in enumerate(self.keys)
        ]
        waiting = [
            {"position": n + 1, "key_id": str(key), "debit_id": f"order-w{n}", "reason": "capacity"}
            for n, key in enumerate(self.keys)
        ]
        return [
            {
                "group": "https://api.example:443",
                "spent": Decimal("0E-12"),
                "slots": slots,
                "waiting": waiting,
                "floors": [{"credential": "OPENAI_API_KEY", "cause": "rate_limited"}],
            },
        ]

    async def reset(self, group: str) -> str:
        if group == "lost":
            raise StoreUnavailable("gone")
        if group != "https://api.example":
            raise NotFound("there is no such group", param="group")
        return "https://api.example:443"


class Thing(msgspec.Struct, forbid_unknown_fields=True):
    name: str = ""
    weight: float = 0.0
    rest: Any = None


class World:
    """A server with every kind of endpoint, and a key of every kind."""

    def __init__(self) -> None:
        self.readiness = FakeReadiness()
        self.usage = FakeUsage()
        self.groups = FakeGroups()
        self.entered = asyncio.Event()
        self.go = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.secrets: dict[str, str] = {}
        self.server: RestServer
        self.client: aiohttp.ClientSession
        self.port: int
        self.authenticator: Authenticator
        #: Where they are real.
        self.keys: Keys

    def endpoints(self) -> list[Endpoint]:
        async def take(exchange: Exchange) -> web.StreamResponse:
            thing = await exchange.json(Thing)
            return exchange.answer({"name": thing.name, "by": exchange.caller.name})

        async def count(exchange: Exchange) -> web.StreamResponse:
            total = 0
            async for piece in exchange.chunks():
                total += len(piece)
            return exchange.answer({"bytes": total})

        async def one(exchange: Exchange) -> web.StreamResponse:
            exchange.query(("wait",))
            return exchange.answer({"id": exchange.path_args["thing_id"]})

        async def many(exchange: Exchange) -> web.StreamResponse:
            return exchange.answer({"id": None})

        async def slow(exchange: Exchange) -> web.StreamResponse:
            self.entered.set()
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
            return exchange.answer({"done": True})

        async def fault(exchange: Exchange) -> web.StreamResponse:
            raise RuntimeError(SECRET_TEXT)

        async def full(exchange: Exchange) -> web.StreamResponse:
            raise AdmissionRefused("the queue is full", retry_after_s=1.2)

        async def breaks(exchange: Exchange) -> web.StreamResponse:
            response = exchange.stream("application/x-ndjson")
            await response.prepare(exchange.request)
            await response.write(b'{"line": 1}\n')
            raise RuntimeError(SECRET_TEXT)

        return [
            *models.routes(catalogue=FakeCatalogue(), allowed=allowed),
            *operators.routes(readiness=self.readiness, groups=self.groups),
            *usage.routes(usage=self.usage),
            Endpoint(method="POST", path="/v1/things", access=Scope.JOBS, handler=take),
            Endpoint(method="POST", path="/v1/lines", access=Scope.CHAT, handler=count),
            Endpoint(method="GET", path="/v1/things/{thing_id}", access=Scope.JOBS, handler=one),
            Endpoint(method="DELETE", path="/v1/things/{thing_id}", access=Scope.ADMIN, handler=one),
            Endpoint(method="GET", path="/v1/things/all", access=Scope.JOBS, handler=many),
            Endpoint(method="GET", path="/slow", access=Access.ANY_KEY, handler=slow),
            Endpoint(method="POST", path="/slow", access=Access.ANY_KEY, handler=slow),
            Endpoint(method="GET", path="/fault", access=Access.ANY_KEY, handler=fault),
            Endpoint(method="GET", path="/full", access=Access.ANY_KEY, handler=full),
            Endpoint(method="GET", path="/breaks", access=Access.ANY_KEY, handler=breaks),
        ]

    def key(self, name: str = "all") -> dict[str, str]:
        return {"authorization": f"Bearer {self.secrets[name]}"}

    async def ask(self, method: str, path: str, **given: Any) -> tuple[int, Any, Mapping[str, str]]:
        given.setdefault("headers", self.key())
        async with self.client.request(method, path, **given) as response:
            text = await response.text()
            return response.status, json.loads(text) if text else None, response.headers

    async def raw(self, sent: bytes) -> tuple[int, dict[str, Any]]:
        """What comes back for these bytes, until the server closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        try:
            writer.write(sent)
            got = await asyncio.wait_for(reader.read(), 30)
        finally:
            writer.close()
        head, _, body = got.partition(b"\r\n\r\n")
        return int(head.split(b" ")[1]), json.loads(body)


class FakeKeys:
    """Keys in memory, for what is not about keys."""

    def __init__(self) -> None:
        self.callers: dict[str, Caller] = {}

    def create(self, name: str, scopes: Iterable[Scope]) -> str:
        secret = f"tb_{name}_secret".replace(" ", "_")
        self.callers[secret] = Caller(key_id=new_id(), name=name, scopes=frozenset(scopes))
        return secret

    async def authenticate(self, token: str | None) -> Caller:
        if token not in self.callers:
            raise Unauthenticated
        return self.callers[token]


@asynccontextmanager
async def served(world: World, keys: Authenticator) -> AsyncIterator[World]:
    async with (
        serve(SETTINGS, world.endpoints(), keys) as world.server,
        aiohttp.ClientSession(f"http://127.0.0.1:{world.server.port}") as world.client,
    ):
        world.port = world.server.port
        world.authenticator = keys
        yield world
        world.go.set()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """With keys in memory."""
    world, keys = World(), FakeKeys()
    for scope in Scope:
        world.secrets[scope.value] = keys.create(f"only {scope.value}", [scope])
    world.secrets["all"] = keys.create("all", Scope)
    async with served(world, keys):
        yield world


@pytest.fixture
async def real_world(database_url: str) -> AsyncIterator[World]:
    """With real keys."""
    world = World()
    async with database.open_pool(database_url, name="test-rest", size=2) as pool, Keys.open(pool) as world.keys:
        for scope in Scope:
            _, world.secrets[scope.value] = await world.keys.create(f"only {scope.value}", [scope])
        _, world.secrets["all"] = await world.keys.create("all", Scope)
        async with served(world, world.keys):
            yield world


def is_error(body: Any, code: str) -> bool:
    error = body["error"]
    return bool(
        # Only in our own words there is a place for it.
        set(error) - {"dispatched"} == {"code", "message", "type", "param", "request_id"}
        and error["code"] == code
        and error["message"]
        and error["type"]
        and len(error["request_id"]) == 32
    )


# ------------------------------------------------------------------ who gets in


async def test_every_endpoint_lets_in_exactly_the_keys_it_says(real_world: World):
    real_world.go.set()
    for endpoint in real_world.server.endpoints:
        path = endpoint.path.replace("{thing_id}", "x")
        for name, secret in [("nobody", None), ("wrong", "tb_wrong"), *real_world.secrets.items()]:
            headers = {} if secret is None else {"authorization": f"Bearer {secret}"}
            try:
                status, body, _ = await real_world.ask(endpoint.method, path, headers=headers)
            except aiohttp.ClientPayloadError:
                status, body = 200, {}
            if endpoint.access is Access.PUBLIC:
                assert status == 200, (path, name)
            elif name in {"nobody", "wrong"}:
                assert (status, is_error(body, "unauthenticated")) == (401, True), (path, name)
            elif endpoint.access is Access.ANY_KEY or name in {"all", endpoint.access.value}:
                assert status not in {401, 403}, (path, name)
            else:
                assert (status, is_error(body, "permission_denied")) == (403, True), (path, name)


async def test_only_health_and_the_document_are_public(world: World):
    public = {endpoint.path for endpoint in world.server.endpoints if endpoint.access is Access.PUBLIC}
    assert public == {"/healthz", "/readyz", "/openapi.json"}


async def test_every_wrong_key_gets_the_same_401(real_world: World):
    good = real_world.secrets["all"]
    headers: list[list[tuple[str, str]]] = [
        [],
        [("authorization", "")],
        [("authorization", "Bearer")],
        [("authorization", "Bearer ")],
        [("authorization", good)],
        [("authorization", f"Basic {good}")],
        [("authorization", f"Bearer {good}"), ("authorization", f"Bearer {good}")],
        [("authorization", f"Bearer {good}"), ("authorization", "Bearer x")],
        [("authorization", f"Bearer {good}, Bearer {good}")],
        [("authorization", "Bearer ' or '1'='1")],
        [("authorization", "Bearer tb_\N{SNOWMAN}")],
        [("authorization", "Bearer " + "x" * 15_000)],
        [("authorization", "Bearer " + "x" * 10 * 1024**2)],
        [("authorization", f"Bearer {good[:-1]}")],
        [("authorization", f"Bearer {good}x")],
        [("x-api-key", good), ("x-api-key", good)],
        [("x-api-key", f"Bearer {good}")],
        [("x-api-key", good), ("authorization", "Bearer x")],
        [("x-api-key", "x"), ("authorization", f"Bearer {good}")],
        [("x-api-key", "' or '1'='1")],
        [("x-api-key", "")],
        [("api-key", f"Bearer {good}")],
        [("x-goog-api-key", good)],
    ]
    answers = set()
    for pairs in headers:
        status, body, got = await real_world.ask("GET", "/v1/groups", headers=CIMultiDict(pairs))
        assert status == 401, pairs[0][1][:40]
        assert got["WWW-Authenticate"] == "Bearer"
        error = body["error"]
        assert got[REQUEST_ID] == error.pop("request_id")
        answers.add(json.dumps(error))
        assert good not in json.dumps(body)
    assert len(answers) == 1


async def test_a_key_may_come_as_anthropics_clients_send_it(real_world: World):
    good = real_world.secrets["all"]
    for pairs in ([("x-api-key", good)], [("x-api-key", good), ("authorization", f"Bearer {good}")]):
        assert (await real_world.ask("GET", "/v1/models", headers=CIMultiDict(pairs)))[0] == 200


async def test_a_key_in_the_url_is_no_key(real_world: World):
    good = real_world.secrets["all"]
    for path in (f"/v1/models?api_key={good}", f"/v1/models?authorization=Bearer%20{good}"):
        assert (await real_world.ask("GET", path, headers={}))[0] == 401


async def test_the_host_header_and_the_spelling_of_the_url_change_nothing(world: World):
    for host in ("x/healthz", "x?/healthz", "x#/healthz", "healthz", ""):
        status, body = await world.raw(f"GET /v1/models HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
        assert (status, body["error"]["code"]) in {(401, "unauthenticated"), (400, "invalid_request")}, host
    for target in (
        "/v1/models?/healthz",
        "/v1/models?x=/healthz",
        "http://other/v1/models",
        "//healthz",
        "/healthz/../v1/models",
        "/healthz%2f..%2fv1%2fmodels",
        "/v1/models/",
        "/V1/models",
        "/v1//models",
        "/v1/models;/healthz",
        "*",
    ):
        status, body = await world.raw(f"GET {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        assert status in {401, 404, 400}, target
        assert "data" not in body


#: As clients in use spell `GET /v1/models`, and what they are not to be taken for.
SPELLINGS = [
    "/v1/models",
    "/v1/models/",
    "/models",
    "/models/",
    "/v1/v1/models",
    "/openai/models?api-version=2024-10-21",
    "/openai/v1/models?api-version=preview",
    "/openai/v1/models/",
    "/anthropic/v1/models",
]
STRANGE = [
    "//v1/models",
    "/v1//models",
    "/v1/models//",
    "/V1/models",
    "/v1/Models",
    "/v1%2fmodels",
    "/x/../v1/models",
    "/v1/./models",
    "/v2/models",
    "/openai/deployments/m/models",
    "/openai/deployments//chat/completions",
    "/openai/openai/models",
    "/v1/v1/v1/models",
    "/modelsx",
    "/v1/things/all/",
    "/things/all",
    "/openai/things/all",
]


async def test_the_paths_of_clients_in_use_are_served_and_each_asks_for_the_key(world: World):
    for path in SPELLINGS:
        status, body, _ = await world.ask("GET", path)
        assert (status, body["object"]) == (200, "list"), path
        for wrong in ({}, {"authorization": "Bearer wrong"}):
            status, body, _ = await world.ask("GET", path, headers=wrong)
            assert (status, body["error"]["code"]) == (401, "unauthenticated"), path
    status, body, _ = await world.ask("GET", "/models/local/meta/llama/")
    assert (status, body["id"]) == (200, "local/meta/llama")
    # Elsewhere a parameter that nobody reads is refused, also this one.
    status, body, _ = await world.ask("GET", "/v1/things/x?api-version=1")
    assert (status, body["error"]["param"]) == (400, "api-version")


async def test_no_other_spelling_is_served_with_or_without_a_key(world: World):
    for path in STRANGE:
        for key in (world.key(), {}):
            sent = "".join(f"{name}: {value}\r\n" for name, value in key.items())
            status, body = await world.raw(
                f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{sent}\r\n".encode()
            )
            assert (status, body["error"]["code"]) == (404, "not_found"), path


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("//v1/models", "/v1/models may be meant"),
        ("/V1/Models/", "/v1/models may be meant"),
        ("/v1//things/x", "/v1/things/{thing_id} may be meant"),
        ("/v1/completions", "/v1/chat/completions"),
        ("/v1/audio/speech", "not served here"),
        ("/v1/nothing", "no such path"),
    ],
)
async def test_a_path_that_is_not_served_is_told_which_may_be_meant(world: World, path, said):
    status, body = await world.raw(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    assert (status, said in body["error"]["message"]) == (404, True)


async def test_a_path_that_is_not_served_is_refused_in_the_words_of_the_api_it_is_of(world: World):
    async def kind(path: str, **headers: str) -> set[str]:
        status, body, _ = await world.ask("POST", path, headers=headers)
        assert status == 404
        return set(body)

    assert await kind("/v1/messages/nothing") == {"type", "error", "request_id"}
    assert await kind("/v1/nothing", **{"anthropic-version": "2023-06-01"}) == {"type", "error", "request_id"}
    assert await kind("/v1/chat/nothing") == {"error"}
    _, body, _ = await world.ask("POST", "/v1/chat/nothing", headers={})
    assert "dispatched" not in body["error"]
    _, body, _ = await world.ask("POST", "/v1/jobz", headers={})
    assert "dispatched" in body["error"]


async def test_a_key_may_come_as_azures_clients_send_it_and_never_beside_another(world: World):
    good = world.secrets["all"]
    both = CIMultiDict([("api-key", good), ("authorization", f"Bearer {good}"), ("x-api-key", good)])
    for headers in (CIMultiDict({"api-key": good}), both):
        status, _, _ = await world.ask("GET", "/v1/models", headers=headers)
        assert status == 200
    other = world.secrets["chat"]
    for headers in (
        CIMultiDict([("api-key", good), ("api-key", good)]),
        CIMultiDict([("api-key", good), ("x-api-key", other)]),
        CIMultiDict([("api-key", good), ("authorization", f"Bearer {other}")]),
        CIMultiDict([("api-key", good), ("authorization", f"Basic {good}")]),
        CIMultiDict([("api-key", "")]),
    ):
        status, body, _ = await world.ask("GET", "/v1/models", headers=headers)
        assert (status, body["error"]["code"]) == (401, "unauthenticated"), headers


async def test_a_revoked_key_is_refused_from_the_next_request_on(real_world: World):
    assert (await real_world.ask("GET", "/v1/models"))[0] == 200
    await real_world.keys.revoke("all")
    assert (await real_world.ask("GET", "/v1/models"))[0] == 401


# ------------------------------------------------------------------ operators


async def test_ready_follows_the_stores_and_alive_does_not(world: World):
    assert (await world.ask("GET", "/readyz", headers={}))[:2] == (
        200,
        {
            "status": "ready",
            "parts": {"control_store": "answers"},
            "providers": {"openai": "not_ready", "local": "ready"},
        },
    )
    world.readiness.parts["control_store"] = "lost"
    assert (await world.ask("GET", "/readyz", headers={}))[0] == 503
    assert (await world.ask("GET", "/healthz", headers={}))[0] == 200


async def test_models_are_listed_as_openai_clients_expect_them_and_none_that_nobody_is_ready_to_serve(world: World):
    status, body, _ = await world.ask("GET", "/v1/models", headers=world.key("chat"))
    assert status == 200
    assert [entry["id"] for entry in body["data"]] == ["gpt-4o", "local/meta/llama"]
    told = body["data"][0]
    assert [(place["id"], place["ready"]) for place in told.pop("providers")] == [("openai", False), ("local", True)]
    assert told == {
        "id": "gpt-4o",
        "object": "model",
        "created": 0,
        "owned_by": "local",
        "ready": True,
        "context_window": 128_000,
        "max_output_tokens": None,
        "prices": {"input": "2.5", "output": "10", "cache_read": None, "version": "v1"},
        "capabilities": {"tools": None, "audio": False},
    }


@pytest.mark.parametrize("path", ["local/meta/llama", "local%2Fmeta%2Fllama", "local/meta%2Fllama"])
async def test_a_model_with_slashes_in_its_name_is_found_however_they_are_written(world: World, path: str):
    status, body, _ = await world.ask("GET", f"/v1/models/{path}", headers=world.key("chat"))
    assert (status, body["id"]) == (200, "local/meta/llama")


async def test_a_model_that_is_not_there_or_that_nobody_is_ready_to_serve_is_not_found(world: World):
    for name in ("nobody-has-it", "what", "a/b/c/d/e/f"):
        status, body, _ = await world.ask("GET", f"/v1/models/{name}", headers=world.key("chat"))
        assert (status, body["error"]["code"], body["error"]["type"]) == (404, "model_not_found", "not_found_error")


async def test_anthropics_clients_get_the_list_in_pages_and_errors_in_their_own_shape(world: World):
    headers = {**world.key("chat"), "anthropic-version": "2023-06-01"}
    status, body, _ = await world.ask("GET", "/v1/models?limit=1", headers=headers)
    assert (status, body["has_more"], body["first_id"], body["last_id"]) == (200, True, "gpt-4o", "gpt-4o")
    assert (body["data"][0]["type"], body["data"][0]["max_input_tokens"]) == ("model", 128_000)
    _, body, _ = await world.ask("GET", "/v1/models?after_id=gpt-4o", headers=headers)
    assert ([entry["id"] for entry in body["data"]], body["has_more"]) == (["local/meta/llama"], False)
    _, body, _ = await world.ask("GET", "/v1/models?before_id=local/meta/llama", headers=headers)
    assert ([entry["id"] for entry in body["data"]], body["has_more"]) == (["gpt-4o"], False)
    for query in ("limit=0", "limit=x", "limit=1001", "after_id=nobody", "before_id=a&after_id=b", "what=1"):
        status, body, got = await world.ask("GET", f"/v1/models?{query}", headers=headers)
        assert (status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
        assert body["request_id"] == got["request-id"]
    status, body, _ = await world.ask("GET", "/v1/models/what", headers=headers)
    assert (status, body["type"], body["error"]["type"]) == (404, "error", "not_found_error")


async def test_usage_is_the_keys_own_unless_it_may_see_all_and_money_is_text(world: World):
    status, body, _ = await world.ask(
        "GET", "/v1/usage?session_id=s%201&day=2026-02-28", headers=world.key("usage:read")
    )
    assert status == 200
    assert body["day"]["charged_usd"] == "0.0000001"
    assert body["total"]["charged_usd"] == "12.5"
    await world.ask("GET", "/v1/usage")
    status, body, _ = await world.ask("GET", "/v1/usage?session_id=a&session=")
    assert (status, body["error"]["param"]) == (400, "session")
    own = await world.authenticator.authenticate(world.secrets["usage:read"])
    assert world.usage.asked == [("s 1", date(2026, 2, 28), own.key_id), (None, None, None)]


async def test_groups_are_told_as_the_store_has_them(world: World):
    status, body, _ = await world.ask("GET", "/v1/groups")
    [group] = body["groups"]
    assert (status, group["group"], group["spent"], group["slots"]) == (200, "https://api.example:443", "0", [])


@pytest.mark.parametrize(
    ("key", "slots", "waits"),
    [
        ("all", ["order-0", "order-1"], ["order-w0", "order-w1"]),
        ("usage:read", [None, "order-1"], [None, "order-w1"]),
    ],
)
async def test_whose_a_slot_or_a_place_is_only_administrators_and_its_own_key_are_told(world: World, key, slots, waits):
    caller = await world.authenticator.authenticate(world.secrets["usage:read"])
    world.groups.keys = [new_id(), caller.key_id]
    _, body, _ = await world.ask("GET", "/v1/groups", headers=world.key(key))
    [group] = body["groups"]
    assert [slot["debit_id"] for slot in group["slots"]] == slots
    for slot in group["slots"]:
        # That there is a slot, and how it is, is everybody's to know.
        assert slot["state"] == "active"
        assert (slot["key_id"] is None) == (slot["ticket_id"] is None) == (slot["debit_id"] is None)
    assert [waiting["debit_id"] for waiting in group["waiting"]] == waits
    # The name of a variable is for whoever can set it.
    told = "OPENAI_API_KEY" if key == "all" else None
    assert group["floors"] == [{"credential": told, "cause": "rate_limited"}]
    for position, waiting in enumerate(group["waiting"], start=1):
        assert (waiting["position"], waiting["reason"]) == (position, "capacity")
        assert (waiting["key_id"] is None) == (waiting["debit_id"] is None)
        assert "ticket_id" not in waiting


async def test_an_administrator_may_reset_a_group(world: World):
    asked = {"json": {"group": "https://api.example"}, "headers": world.key("admin")}
    status, body, _ = await world.ask("POST", "/v1/groups/reset", **asked)
    assert (status, body) == (200, {"group": "https://api.example:443", "reset": True})


@pytest.mark.parametrize(
    ("key", "body", "status", "code"),
    [
        ("usage:read", {"group": "https://api.example"}, 403, "permission_denied"),
        ("admin", {"group": "https://other.example"}, 404, "not_found"),
        ("admin", {"group": "lost"}, 503, "control_store_unavailable"),
        ("admin", {"group": ""}, 400, "invalid_request"),
        ("admin", {}, 400, "invalid_request"),
        ("admin", {"group": "g", "force": True}, 400, "invalid_request"),
    ],
)
async def test_a_group_is_not_reset_for_just_anybody_or_anything(world: World, key, body, status, code):
    told, refusal, _ = await world.ask("POST", "/v1/groups/reset", json=body, headers=world.key(key))
    assert (told, refusal["error"]["code"]) == (status, code)


async def test_a_lost_store_is_said_so(world: World):
    world.usage.lost = True
    status, body, headers = await world.ask("GET", "/v1/usage")
    assert (status, body["error"]["code"], headers["Retry-After"]) == (503, "control_store_unavailable", "1")


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("sesion=x", "sesion"),
        ("session=a&session=b", "session"),
        ("session_id=a&session_id=b", "session_id"),
        ("session=", "session_id"),
        ("session_id=a%00b", "session_id"),
        ("session=%ff", "query"),
        ("session=" + "x" * 257, "session_id"),
        ("session", "query"),
        ("&".join("a=1" for _ in range(100)), "query"),
        ("day=20260228", "day"),
        ("day=2026-02-30", "day"),
        ("day=2026-W09-6", "day"),
        ("day=2026-02-28&from=2026-02-28", "from"),
        ("from=2026-02-30", "from"),
        ("to=2026-2-3", "to"),
        ("group_by=", "group_by"),
        ("group_by=day,modell", "group_by"),
        ("group_by=day,,model", "group_by"),
        ("group_by=day,day", "group_by"),
        ("group_by=tag:", "group_by"),
        ("group_by=tag:" + "x" * 65, "group_by"),
        ("group_by=day,month,key,provider,model,upstream_model,run,step,session", "group_by"),
        ("key=mine", "key"),
        ("run=", "run"),
        ("provider=" + "x" * 257, "provider"),
        ("tag=team", "tag"),
        ("tag=:search", "tag"),
        ("format=xml", "format"),
        ("group_by=day&limit=0", "limit"),
        ("group_by=day&limit=10001", "limit"),
        ("group_by=day&cursor=here", "cursor"),
        ("group_by=day&cursor=W1siZGF5Il0sWyJhIiwiYiJdXQ", "cursor"),
        ("group_by=day&cursor=W1sibW9udGgiXSxbIjIwMjYtMTEiXV0", "cursor"),
        ("group_by=day&cursor=W1siZGF5Il0sWyJcdTAwMDAiXV0", "cursor"),
        ("group_by=day&format=csv&limit=3", "limit"),
        ("group_by=day&format=jsonl&cursor=W1siZGF5Il0sWyJhIl1d", "cursor"),
        ("%0a=1", "query"),
    ],
)
async def test_a_query_that_is_not_exactly_right_is_refused_by_name(world: World, query: str, param: str):
    got = await world.raw(
        f"GET /v1/usage?{query} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {world.secrets['all']}\r\n"
        "connection: close\r\n\r\n".encode()
    )
    assert got[0] == 400
    assert got[1]["error"]["param"] == param
    assert world.usage.asked == []


# ------------------------------------------------------------------ answers


async def test_head_options_404_and_405_keep_the_shape(world: World):
    status, body, headers = await world.ask("HEAD", "/v1/models")
    assert (status, body) == (200, None)
    assert int(headers["Content-Length"]) > 0
    status, _, headers = await world.ask("OPTIONS", "/v1/things/x", headers={})
    assert (status, headers["Allow"]) == (204, "DELETE, GET, HEAD, OPTIONS")
    status, body, headers = await world.ask("PUT", "/v1/things/x")
    assert (status, is_error(body, "method_not_allowed")) == (405, True)
    assert headers["Allow"] == "DELETE, GET, HEAD, OPTIONS"
    status, body, headers = await world.ask("GET", "/v1/nothing")
    assert (status, is_error(body, "not_found")) == (404, True)
    assert headers[REQUEST_ID] == body["error"]["request_id"]
    assert "aiohttp" not in str(headers).lower()


async def test_a_literal_path_wins_and_a_segment_is_decoded(world: World):
    assert (await world.ask("GET", "/v1/things/all"))[1] == {"id": None}
    assert (await world.ask("GET", "/v1/things/a%20b"))[1] == {"id": "a b"}
    assert (await world.ask("GET", "/v1/things/"))[0] == 404
    for path in ("/v1/things/a%00b", "/v1/things/%ff"):
        request = f"GET {path} HTTP/1.1\r\nhost: x\r\n{''.join(f'{k}: {v}' for k, v in world.key().items())}\r\n"
        status, body = await world.raw(f"{request}connection: close\r\n\r\n".encode())
        assert (status, is_error(body, "invalid_request")) == (400, True)


async def test_a_refusal_that_waiting_can_mend_says_how_long_in_whole_seconds(world: World):
    status, body, headers = await world.ask("GET", "/full")
    assert (status, body["error"]["code"], headers["Retry-After"]) == (429, "queue_full", "2")


async def test_a_fault_is_internal_and_tells_nobody_its_message(world: World):
    with capture_logs() as events:
        status, body, headers = await world.ask("GET", "/fault")
    assert (status, is_error(body, "internal")) == (500, True)
    assert SECRET_TEXT not in json.dumps(body)
    fault = next(event for event in events if event["event"] == "gateway.request_fault")
    assert fault["request_id"] == headers[REQUEST_ID]
    assert SECRET_TEXT not in str({name: value for name, value in fault.items() if name != "exc_info"})


async def test_an_answer_that_breaks_half_way_does_not_pass_for_a_whole_one(world: World):
    with pytest.raises(aiohttp.ClientPayloadError):
        await world.ask("GET", "/breaks")


# ------------------------------------------------------------------ what is sent


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"name": "a\x00b"}',
        b'{"weight": NaN}',
        b'{"weight": 1e400}',
        b'{"name": "a", "name": "b"}',
        b'{"nmae": "a"}',
        b'{"name": "\\ud800"}',
        b'{"name": "a\\u0000b"}',
        b'{"rest": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b"\xff",
        b"[]",
    ],
)
async def test_json_that_is_not_exactly_right_is_a_400(world: World, body: bytes):
    status, answer, _ = await world.ask(
        "POST", "/v1/things", data=body, headers=world.key() | {"content-type": "application/json"}
    )
    assert status == 400
    assert answer["error"]["code"] in {"invalid_json", "invalid_request"}


async def test_json_is_taken_with_and_without_a_charset_and_nothing_else_is(world: World):
    for media, expected in [("application/json", 200), ("application/json; charset=utf-8", 200), ("text/plain", 415)]:
        headers = world.key() | {"content-type": media}
        status, body, _ = await world.ask("POST", "/v1/things", data=b'{"name": "x"}', headers=headers)
        assert status == expected
        if status == 200:
            assert body == {"name": "x", "by": "all"}


async def test_a_large_document_is_parsed_aside(world: World):
    body = json.dumps({"name": "x" * 900_000}).encode()
    status, _, _ = await world.ask(
        "POST", "/v1/things", data=body, headers=world.key() | {"content-type": "application/json"}
    )
    assert status == 200


async def test_a_body_over_the_limit_is_a_413_with_and_without_a_declared_length(world: World):
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b" " * 65_536

    headers = world.key() | {"content-type": "application/json"}
    for data in (BytesIO(b" " * (BODY.max_json_bytes + 1)), pieces()):
        status, body, _ = await world.ask("POST", "/v1/things", data=data, headers=headers)
        assert (status, is_error(body, "payload_too_large")) == (413, True)
    assert (await world.ask("POST", "/v1/lines", data=BytesIO(b" " * BODY.max_body_bytes)))[1] == {
        "bytes": BODY.max_body_bytes
    }
    status, _, _ = await world.ask("POST", "/v1/lines", data=BytesIO(b" " * (BODY.max_body_bytes + 1)))
    assert status == 413


async def test_a_compressed_body_is_refused_unopened(world: World):
    bomb = gzip.compress(b"\0" * 50 * 1024**2)
    headers = world.key() | {"content-encoding": "gzip"}
    status, body, _ = await world.ask("POST", "/v1/lines", data=bomb, headers=headers)
    assert (status, is_error(body, "unsupported_media_type")) == (415, True)


async def test_a_client_that_asks_first_is_told_before_it_sends(world: World):
    status, body, _ = await world.ask("POST", "/v1/lines", data=b"x" * 100_000, expect100=True)
    assert (status, body) == (200, {"bytes": 100_000})
    # The refusal comes without a body having been sent at all.
    status, body = await world.raw(
        b"POST /v1/lines HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\nexpect: 100-continue\r\n\r\n"
    )
    assert (status, is_error(body, "unauthenticated")) == (401, True)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello tls\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer a\x00b\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\ncookie: " + b"x" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /v1/lines HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/lines HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 200 + b"\r\n",
    ],
    ids=["header", "tls", "nul", "cookie", "line", "cl+te", "two lengths", "many headers"],
)
async def test_what_is_not_http_gets_a_400_in_our_shape_and_the_connection_ends(world: World, sent: bytes):
    status, body = await world.raw(sent)
    assert (status, is_error(body, "invalid_request")) == (400, True)
    assert "secret" not in str(body)


#: Where a body ends is what an intermediary and we must not see differently.
HIDDEN = "0\r\n\r\nPOST /v1/things HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        ("GET /healthz HTTP/2.0\r\nhost: x\r\n\r\n", "HTTP/2.0 is not spoken here"),
        ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP/1.1 and HTTP/1.0 are spoken here"),
        ("GET /healthz HTTP/1.2\r\nhost: x\r\n\r\n", "HTTP/1.1 and HTTP/1.0 are spoken here"),
        ("GET /healthz HTTP/0.9\r\nhost: x\r\n\r\n", "HTTP/0.9 is not spoken here"),
        ("GET /healthz\r\n\r\n", "HTTP/0.9 is not spoken here"),
        ("GET /healthz HTTP/1.1\r\n\r\n", "it has no `Host` header"),
        ("GET /healthz HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n", "more than one `Host` header"),
        (f"POST /v1/lines HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 5\r\n\r\n{HIDDEN}", "one number"),
        (f"POST /v1/lines HTTP/1.1\r\nhost: x\r\ncontent-length: 5, 5\r\n\r\n{HIDDEN}", "one number"),
        (f"POST /v1/lines HTTP/1.1\r\nhost: x\r\ncontent-length: +5\r\n\r\n{HIDDEN}", "one number"),
        (
            f"POST /v1/lines HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n{HIDDEN}",
            "both `Content-Length` and `Transfer-Encoding`",
        ),
        (f"POST /v1/lines HTTP/1.1\r\nhost: x\r\ntransfer-encoding: xchunked\r\n\r\n{HIDDEN}", "is not `chunked`"),
        (f"POST /v1/lines HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n{HIDDEN}", "`chunked` alone"),
        (f"POST /v1/lines HTTP/1.1\r\nhost: x\r\ntransfer-encoding:\r\n chunked\r\n\r\n{HIDDEN}", "well-formed"),
        ("GET /healthz HTTP/1.1\r\nhost: x\r\na: 1\r\n  secret\r\n\r\n", "a header goes on in a second line"),
        ("GET /healthz HTTP/1.1\r\nhost: x\r\na: secret\0\r\n\r\n", "a character that it may not have"),
        ("GE(T /secret HTTP/1.1\r\nhost: x\r\n\r\n", "no known method"),
        ("GET http://[::1/secret HTTP/1.1\r\nhost: x\r\n\r\n", "well-formed"),
        ("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "this is TLS"),
    ],
)
async def test_a_request_that_others_may_read_differently_is_refused_with_the_reason_and_nothing_after_it_is_run(
    world: World, sent: str, told: str
):
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    writer.write(sent.encode("latin-1"))
    async with asyncio.timeout(20):
        got = await reader.read()
    writer.close()
    head, _, body = got.partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == b"400"
    # One answer, and that is all.
    error = json.loads(body)["error"]
    assert (error["code"], told in error["message"], "secret" in error["message"]) == ("invalid_request", True, False)


async def test_a_target_in_absolute_form_is_the_path_in_it(world: World):
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    writer.write(b"GET http://elsewhere.example/healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    async with asyncio.timeout(20):
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_a_slow_body_is_cut_and_a_slow_head_too(world: World):
    async def trickle(first: bytes) -> bytes:
        """What came before the connection was ended. By itself it would go on for half an hour."""
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(first)

        async def drip() -> None:
            while not writer.is_closing():
                writer.write(b"x")
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        got = b""
        # Piece by piece: what came before a reset counts.
        with contextlib.suppress(ConnectionResetError):
            async with asyncio.timeout(60):
                while piece := await reader.read(4096):
                    got += piece
        dripping.cancel()
        writer.close()
        return got

    auth = f"authorization: Bearer {world.secrets['all']}\r\n".encode()
    body = await trickle(b"POST /v1/lines HTTP/1.1\r\nhost: x\r\n" + auth + b"content-length: 100000\r\n\r\n")
    assert b" 408 " in body
    assert b"too slowly" in body
    await trickle(b"GET /v1/models HTTP/1.1\r\nhost: x\r\ncookie: ")


async def test_a_body_that_breaks_off_or_is_badly_framed_is_no_fault(world: World):
    with capture_logs() as events:
        await break_off(world)
    assert not [event for event in events if event["event"] == "gateway.request_fault"]


async def break_off(world: World) -> None:
    head = f"POST /v1/lines HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {world.secrets['all']}\r\n"
    status, body = await world.raw(f"{head}transfer-encoding: chunked\r\n\r\nzz\r\nhello\r\n".encode())
    assert (status, is_error(body, "invalid_request")) == (400, True)
    _, writer = await asyncio.open_connection("127.0.0.1", world.port)
    writer.write(f"{head}content-length: 1000\r\n\r\nhello".encode())
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await world.ask("GET", "/v1/models"))[0] == 200


# ------------------------------------------------------------------ connections, and stopping


async def test_one_connection_too_many_is_told_so(world: World):
    async with AsyncExitStack() as stack:
        few = msgspec.structs.replace(SETTINGS, max_connections=2)
        server = await stack.enter_async_context(serve(few, world.endpoints(), world.authenticator))
        for _ in range(2):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            stack.callback(writer.close)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        stack.callback(writer.close)
        got = await asyncio.wait_for(reader.read(), 30)
        assert got.startswith(b"HTTP/1.1 429 ")
        assert is_error(json.loads(got.partition(b"\r\n\r\n")[2]), "queue_full")


async def test_a_client_that_goes_away_cancels_its_handler(world: World):
    asking = asyncio.create_task(world.ask("GET", "/slow"))
    await world.entered.wait()
    asking.cancel()
    await asyncio.wait_for(world.cancelled.wait(), 30)


async def half_closed(port: int, request: bytes) -> bytes:
    """All that comes to a client which shuts its side once it has sent its request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    writer.write_eof()
    async with asyncio.timeout(20):
        got = await reader.read()
    writer.close()
    return got


async def test_what_reads_is_answered_though_its_client_has_shut_its_side(world: World):
    got = await half_closed(world.port, b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 200 ")
    assert got.endswith(b'{"status":"alive"}')
    got = await half_closed(world.port, b"this is not HTTP\r\n\r\n")
    assert got.startswith(b"HTTP/1.0 400 ")


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_what_takes_long_is_taken_back_from_a_client_that_has_shut_its_side_and_it_is_told(
    world: World, method: str
):
    key = world.key()["authorization"]
    sent = f"{method} /slow HTTP/1.1\r\nhost: x\r\nauthorization: {key}\r\ncontent-length: 0\r\n\r\n"
    asking = asyncio.create_task(half_closed(world.port, sent.encode()))
    if method == "GET":
        # A change may be taken back before it has begun.
        await world.entered.wait()
        await asyncio.wait_for(world.cancelled.wait(), 20)
    head, _, body = (await asking).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 499 Client Closed Request\r\n")
    assert b"x-should-retry: false" in head
    assert is_error(json.loads(body), "cancelled")


class Raw:
    """One connection, kept alive by its client, who does not look whether it was closed before it sends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, path: str, key: Mapping[str, str]) -> None:
        self._writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: {key['authorization']}\r\n\r\n".encode())
        await self._writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        async with asyncio.timeout(20):
            first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().rstrip().split("\r\n")
            headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
            body = await self._reader.readexactly(int(headers["content-length"]))
        return int(first.split()[1]), headers, json.loads(body)

    async def ended(self) -> bool:
        async with asyncio.timeout(20):
            return await self._reader.read() == b""


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()


async def until_refused(port: int) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                return
            writer.close()
            await asyncio.sleep(0.01)


async def test_draining_finishes_what_runs_and_takes_nothing_new(world: World):
    asking = asyncio.create_task(world.ask("GET", "/slow"))
    await world.entered.wait()
    stopping = asyncio.create_task(world.server.drain())
    await until_refused(world.port)
    assert not stopping.done()
    world.go.set()
    status, body, headers = await asking
    assert (status, body) == (200, {"done": True})
    assert headers["Connection"] == "close"
    await asyncio.wait_for(stopping, 30)


async def test_a_request_on_a_connection_that_is_still_open_while_draining_is_refused_in_words(world: World):
    async with (
        connected(world.port) as used,
        connected(world.port) as unused,
        connected(world.port) as busy,
        connected(world.port) as watching,
    ):
        await used.send("/v1/models", world.key())
        assert (await used.answer())[0] == 200
        await busy.send("/slow", world.key())
        await world.entered.wait()
        stopping = asyncio.create_task(world.server.drain())
        await until_refused(world.port)
        await watching.send("/readyz", world.key())
        status, _, body = await watching.answer()
        assert (status, body["status"]) == (503, "not_ready")
        for each in (used, unused):
            with capture_logs() as logged:
                await each.send("/v1/models", world.key())
                status, headers, body = await each.answer()
            assert [line["code"] for line in logged if line["event"] == "gateway.request_refused"] == ["shutting_down"]
            assert status == 503
            assert (headers["connection"], headers["retry-after"]) == ("close", "1")
            assert (headers["x-tollbridge-dispatched"], body["error"]["code"]) == ("false", "shutting_down")
            assert await each.ended()
        assert not stopping.done()
        world.go.set()
        status, headers, _ = await busy.answer()
        assert (status, headers["connection"]) == (200, "close")
    await asyncio.wait_for(stopping, 20)


async def test_while_the_port_is_still_open_all_is_served_while_readiness_says_no(world: World):
    patient = msgspec.structs.replace(SETTINGS, drain_delay_s=600.0)
    async with serve(patient, world.endpoints(), world.authenticator) as server:
        stopping = asyncio.create_task(server.drain())
        port = server.port
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
            async with asyncio.timeout(20):
                while (await client.get("/readyz")).status != 503:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            for path, status in (("/readyz", 503), ("/v1/models", 200)):
                async with client.get(path, headers=world.key()) as answer:
                    assert answer.status == status
                    assert answer.headers["Connection"] == "close"
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        await until_refused(port)


async def test_draining_does_not_wait_for_idle_connections(world: World):
    patient = msgspec.structs.replace(SETTINGS, drain_s=600.0)
    async with (
        serve(patient, world.endpoints(), world.authenticator) as server,
        aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as client,
    ):
        async with client.get("/v1/models", headers=world.key()) as answer:
            assert answer.status == 200
        async with asyncio.timeout(60):
            await server.drain()


async def test_what_has_not_ended_at_the_drain_deadline_is_ended_waited_for_and_told(world: World):
    short = msgspec.structs.replace(SETTINGS, drain_s=0.05)
    async with (
        serve(short, world.endpoints(), world.authenticator) as server,
        aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as client,
    ):
        asking = asyncio.create_task(client.get("/slow", headers=world.key()))
        await world.entered.wait()
        await server.drain()
        assert world.cancelled.is_set()
        answer = await asking
        assert (answer.status, answer.headers["retry-after"], answer.headers["connection"]) == (503, "1", "close")
        error = (await answer.json())["error"]
        assert (error["code"], error["dispatched"]) == ("shutting_down", False)


async def test_a_submission_that_the_stop_ends_is_not_called_safe_to_repeat(world: World):
    short = msgspec.structs.replace(SETTINGS, drain_s=0.05)
    async with (
        serve(short, world.endpoints(), world.authenticator) as server,
        aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as client,
    ):
        asking = asyncio.create_task(client.post("/slow", headers=world.key()))
        await world.entered.wait()
        await server.drain()
        answer = await asking
        assert (answer.status, answer.headers["x-should-retry"]) == (503, "false")
        error = (await answer.json())["error"]
        assert (error["code"], error["dispatched"]) == ("shutting_down", None)


async def test_two_processes_may_share_a_port(world: World):
    shared = msgspec.structs.replace(SETTINGS, reuse_port=True)
    async with serve(shared, world.endpoints(), world.authenticator) as one:
        same = msgspec.structs.replace(shared, port=one.port)
        async with serve(same, world.endpoints(), world.authenticator) as two:
            assert one.port == two.port
    async with serve(SETTINGS, world.endpoints(), world.authenticator) as alone:
        with pytest.raises(OSError, match="in use"):
            async with serve(
                msgspec.structs.replace(SETTINGS, port=alone.port), world.endpoints(), world.authenticator
            ):
                pass


def test_money_is_written_without_an_exponent():
    assert usd(Decimal("1E-7")) == "0.0000001"
    assert usd(Decimal("1E+3")) == "1000"


def test_a_request_id_is_an_ordered_uuid():
    assert new_id().version == 7
