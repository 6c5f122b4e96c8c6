"""
The security checklist on a running gateway: what its callers know are the two ports, and what they send is on sockets.

One gateway, at log level debug, is asked everything, so that what no answer and no log line may hold is looked for in
all of them. What is asked follows from the published document and the protos: an operation, a parameter or a field that
is new is tried without anybody thinking of it. docs/security.md says which test holds what.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import json
import re
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import asyncpg
import grpc
import httpx
import pytest
import pytest_asyncio
from grpc_reflection.v1alpha import reflection_pb2
from typing_extensions import override

from protos.tollbridge.v1 import gateway_pb2 as pb
from tests.fakes.gateway_process import KEY, METADATA, GatewayProcess, batch_line, completion, gateway_process
from tests.fakes.postgres_proxy import Proxy, postgres_proxy
from tests.fakes.simulated import SimulatedProvider, simulated_process
from tests.postgres import execute, url_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

JSON = "application/json"
SCOPES = ("chat", "jobs", "usage:read", "admin")
#: Any of these scopes will do, which a document of OpenAPI has no word for.
ANY_OF = {("PUT", "/v1/sessions/{session_id}"): ("chat", "jobs", "admin")}
PUBLIC = {("GET", "/healthz"), ("GET", "/readyz"), ("GET", "/openapi.json")}
#: What the wire formats of providers leave open: what is not known there is the provider's to judge.
OPEN = {
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
}
PATIENCE_S = 60.0
#: None of these may be found where it does not belong.
SECRETS = {
    "the provider's key": "canary-provider-key-7f3a",
    "the database's password": "canary-database-password-51bc",
    "the secret of webhooks": "Y2FuYXJ5LXdlYmhvb2stc2VjcmV0LTAwMDA=",
    "the operator's key": KEY,
}
PROMPT = "canary-prompt-9c21"
SYNTAX = {400, 413, 431}
MiB = 1024**2

CONFIGURATION = """
[jobs]
max_attempts = 1
batch_poll_s = 0.2
purge_s = 0.3
[admission]
lease_s = 9
margin_s = 1
[routing]
backoff_s = []
[webhooks]
allowed_hosts = ["hooks.example.com"]
secret_env = "HOOK_SECRET"

[providers.chat]
protocol = "chat_completions"
base_url = "{url}"
credentials = ["PROVIDER_KEY"]
first_byte_s = 20
[providers.messages]
protocol = "anthropic_messages"
base_url = "{url}"
credentials = ["PROVIDER_KEY"]
[providers.responses]
protocol = "responses"
base_url = "{url}"
credentials = ["PROVIDER_KEY"]

[models.chat]
providers = [{{ provider = "chat", model = "sim-fast" }}]
[models.responses]
providers = [{{ provider = "responses", model = "sim-fast" }}]
[models.bomb]
providers = [{{ provider = "chat", model = "sim-fast?compressed_bomb=536870912" }}]
[models.line]
providers = [{{ provider = "chat", model = "sim-fast?endless_line=268435456" }}]
[models.huge]
providers = [{{ provider = "chat", model = "sim-fast?huge=134217728" }}]
# Those of the document's examples.
[models."gpt-4o"]
providers = [{{ provider = "chat", model = "sim-fast" }}]
[models."claude-sonnet"]
providers = [{{ provider = "messages", model = "sim-fast" }}]
[models."text-embedding-3-small"]
providers = [{{ provider = "chat", model = "sim-embed" }}]
[groups."{group}"]
concurrency = 1000
queue = 1000
failure_threshold = 1000000
"""


class Recording(httpx.AsyncBaseTransport):
    """Keeps every answer; of one that breaks off, what came of it."""

    def __init__(self, told: list[bytes]) -> None:
        self._told = told
        self._inner = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=16))

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = await self._inner.handle_async_request(request)
        assert isinstance(answer.stream, httpx.AsyncByteStream)
        pieces = []
        try:
            async for piece in answer.stream:
                pieces.append(piece)  # noqa: PERF401
        except httpx.RemoteProtocolError:
            pass
        finally:
            await answer.stream.aclose()
        content = b"".join(pieces)
        self._told.append(repr(answer.headers.raw).encode() + content)
        return httpx.Response(answer.status_code, headers=answer.headers, content=content)

    @override
    async def aclose(self) -> None:
        await self._inner.aclose()


class World:
    """The gateway, and all that it has ever answered here."""

    def __init__(self, gateway: GatewayProcess, provider: SimulatedProvider, proxy: Proxy, database: str) -> None:
        self.gateway = gateway
        self.provider = provider
        self.proxy = proxy
        #: Past the proxy.
        self.database = database
        self.told: list[bytes] = []
        self.secrets: dict[str, str] = {}
        self.document: dict[str, Any] = {}
        self.client = httpx.AsyncClient(
            base_url=gateway.rest_url,
            timeout=PATIENCE_S,
            trust_env=False,
            transport=Recording(self.told),
        )

    async def key(self, name: str, *scopes: str) -> str:
        """The secret of a new key."""
        asked = {"name": name, "scopes": list(scopes)}
        made = await self.client.post("/v1/keys", json=asked, headers=bearer(KEY))
        assert made.status_code == 201, made.text
        # The one answer that shows it.
        self.told.pop()
        secret: str = made.json()["secret"]
        self.secrets[f"the key {name}"] = secret.rpartition("_")[2]
        return secret

    @property
    def operations(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        for path, methods in self.document["paths"].items():
            for method, operation in methods.items():
                yield method.upper(), path, operation

    def example(self, operation: dict[str, Any]) -> Any:
        """The document's example of a JSON body; None where there is no such body."""
        return operation.get("requestBody", {"content": {}})["content"].get(JSON, {}).get("example")

    def parameters(self, operation: dict[str, Any], place: str) -> list[str]:
        known = self.document["components"]["parameters"]
        found = [
            known[one["$ref"].rpartition("/")[2]] if "$ref" in one else one for one in operation.get("parameters", ())
        ]
        return [one["name"] for one in found if one["in"] == place]

    async def raw(self, sent: bytes) -> bytes:
        """Everything that comes back until the gateway closes."""
        at = urlsplit(self.gateway.rest_url)
        reader, writer = await asyncio.open_connection(at.hostname, at.port)
        got = b""
        try:
            # A refusal may come, and the connection be reset, while the rest is still being sent.
            with contextlib.suppress(ConnectionError):
                writer.write(sent)
                await writer.drain()
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(PATIENCE_S):
                    while piece := await reader.read(65536):
                        got += piece
        finally:
            writer.close()
        self.told.append(got)
        return got

    async def every_row(self) -> dict[str, str]:
        """By table, all that is stored, as text."""
        connection = await asyncpg.connect(self.database)
        try:
            names = await connection.fetch(
                "select format('%I.%I', table_schema, table_name) as name from information_schema.tables"
                " where table_schema not in ('pg_catalog', 'information_schema') and table_type = 'BASE TABLE'"
            )
            return {
                table["name"]: "\n".join(
                    repr(tuple(row.values())) for row in await connection.fetch(f"select * from {table['name']}")
                )
                for table in names
            }
        finally:
            await connection.close()


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def chat(model: str = "chat", text: str = PROMPT, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **fields}


def filled(path: str, value: str = "x") -> str:
    return re.sub(r"\{[^}]*\}", value, path)


async def until(so: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await so():  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def at_once(calls: list[Callable[[], Any]], most: int = 8) -> list[Any]:
    waiting, found = iter(calls), []

    async def works() -> None:
        for call in waiting:
            found.append(await call())  # noqa: PERF401

    await asyncio.gather(*(works() for _ in range(most)))
    return found


@asynccontextmanager
async def opened(database: str, directory: Path) -> AsyncIterator[World]:
    async with simulated_process() as provider, postgres_proxy(database) as proxy:
        at, name = urlsplit(provider.url), urlsplit(database).path.removeprefix("/")
        password = SECRETS["the database's password"]
        started = gateway_process(
            directory,
            CONFIGURATION.format(url=provider.url, group=f"{at.scheme}://{at.netloc}"),
            arguments=("--log-level", "debug"),
            TOLLBRIDGE_DATABASE_URL=proxy.url(name).replace("postgres@", f"postgres:{password}@"),
            PROVIDER_KEY=SECRETS["the provider's key"],
            HOOK_SECRET="whsec_" + SECRETS["the secret of webhooks"],
        )
        async with started as gateway:
            world = World(gateway, provider, proxy, database)
            async with world.client:
                world.document = (await world.client.get("/openapi.json")).json()
                yield world


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(
    database_server: str, database_template: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    name = f"tollbridge_test_{uuid.uuid4().hex}"
    await asyncio.to_thread(execute, database_server, f"create database {name} template {database_template}")
    async with opened(url_of(database_server, name), tmp_path_factory.mktemp("security")) as found:
        yield found
    await asyncio.to_thread(execute, database_server, f"drop database {name} with (force)")


# ------------------------------------------------------------------ 2: who may


async def test_every_operation_lets_in_the_keys_that_it_says_and_no_others(world: World) -> None:
    keys = {scope: await world.key(f"only {scope}", scope) for scope in SCOPES}
    assert {(method, path) for method, path, one in world.operations if not one["security"]} == PUBLIC

    async def asks(method: str, path: str, roles: tuple[str, ...] | None, who: str, secret: str | None) -> None:
        given = bearer(secret) if secret is not None else {}
        answer = await world.client.request(method, filled(path), headers=given)
        if roles is None:
            assert answer.status_code == 200, (method, path, who)
        elif who in {"nobody", "unknown"}:
            assert answer.status_code == 401, (method, path, who)
        elif roles and who not in roles:
            assert answer.status_code == 403, (method, path, who)
        else:
            assert answer.status_code not in {401, 403}, (method, path, who, answer.text)
            assert answer.status_code < 500, (method, path, who, answer.text)

    calls: list[Callable[[], Any]] = []
    for method, path, operation in world.operations:
        roles = None
        if operation["security"]:
            [roles] = {tuple(scopes) for way in operation["security"] for scopes in way.values()}
            roles = ANY_OF.get((method, path), roles)
        for who, secret in [("nobody", None), ("unknown", "tb_unknown000_" + "0" * 43), *keys.items()]:
            calls.append(partial(asks, method, path, roles, who, secret))
    await at_once(calls)
    assert len(calls) > 200


async def test_every_rpc_lets_in_the_keys_of_its_scope_and_no_others(world: World) -> None:
    async with grpc.aio.insecure_channel(world.gateway.grpc_target) as channel:
        ask: Any = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        call = ask(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        services = {one.name for one in (await call.read()).list_services_response.service}
        service = pb.DESCRIPTOR.services_by_name["Gateway"]
        # Health and reflection tell nothing of anybody.
        assert services == {service.full_name, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        keys = {scope: await world.key(f"rpc only {scope}", scope) for scope in SCOPES}
        given: list[tuple[str, tuple[tuple[str, str], ...]]] = [
            ("UNAUTHENTICATED", ()),
            ("UNAUTHENTICATED", (("authorization", "Bearer ' or '1'='1"),)),
            ("UNAUTHENTICATED", (("authorization", f"Bearer {keys['chat']}"),) * 2),
            ("UNAUTHENTICATED", (("x-api-key", keys["chat"]),)),
            *(
                ("OK" if scope == "chat" else "PERMISSION_DENIED", (("authorization", f"Bearer {secret}"),))
                for scope, secret in keys.items()
            ),
        ]
        for method in service.methods:
            path = f"/{service.full_name}/{method.name}"
            for expected, metadata in given:
                made: Any = channel.unary_stream(path) if method.server_streaming else channel.unary_unary(path)
                call = made(completion("chat").SerializeToString(), metadata=metadata)
                if method.server_streaming:
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        async for _ in call:
                            pass
                assert ((await call.code()).name, method.name, metadata) == (expected, method.name, metadata)
                world.told.append((await call.details() or "").encode())


async def test_every_wrong_key_gets_the_very_same_answer(world: World) -> None:
    good = await world.key("good", "usage:read")
    named = [b"authorization: Bearer " + good.encode()]
    values = [
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer \t",
        b"Basic " + good.encode(),
        b"Bearer " + good.encode()[:-1],
        b"Bearer " + good.encode() + b"x",
        b"Bearer " + good.upper().encode(),
        b"Bearer " + good.encode() + b", Bearer " + good.encode(),
        b"Bearer ' or '1'='1",
        b"Bearer '; drop table control.api_key; --",
        b"Bearer %27%20or%201=1",
        b"Bearer tb_\xe2\x98\x83",
        b"Bearer \xff\xfe",
        b"Bearer \xed\xa0\x80",
        "Bearer \uff54\uff42_".encode(),
        b"Bearer ../../etc/passwd",
        b"Bearer " + hashlib.sha256(good.encode()).hexdigest().encode(),
        b"Bearer " + b"x" * 15_000,
        b"Bearer " + b"x" * 10 * MiB,
    ]
    heads = [[], named * 2, [b"x-api-key: " + good.encode()] * 2, [*named, b"x-api-key: x"], [*named, b"api-key: x"]]
    heads += [[b"authorization: " + value] for value in values] + [[b"x-api-key: " + value] for value in values[:-2]]
    seen: dict[bytes, Any] = {}
    for head in heads:
        lines = [b"GET /v1/usage HTTP/1.1", b"host: x", b"connection: close", *head, b"", b""]
        got = await world.raw(b"\r\n".join(lines))
        top, _, body = got.partition(b"\r\n\r\n")
        # A head too long to be read is answered before its version is known.
        assert re.match(rb"HTTP/1\.[01] 401 ", top), (head[:1], got[:300])
        for secret in (good, hashlib.sha256(good.encode()).hexdigest(), "passwd", "drop table"):
            assert secret.encode() not in got
        names = sorted({line.partition(b":")[0].lower() for line in top.split(b"\r\n")[1:]} - {b"connection"})
        told = json.loads(body)
        told["error"].pop("request_id")
        seen.setdefault(json.dumps([told, repr(names)]).encode(), head)
    assert len(seen) == 1, list(seen)
    lines = [b"GET /v1/usage HTTP/1.1", b"host: x", b"connection: close", *named, b"", b""]
    assert (await world.raw(b"\r\n".join(lines))).startswith(b"HTTP/1.1 200 ")


# ------------------------------------------------------------------ 3: the Host header


async def test_no_host_header_and_no_spelling_of_a_target_gets_past_the_key(world: World) -> None:
    hosts = ["x/healthz", "x?/healthz", "x#/healthz", "/healthz", "x/healthz?a=", "healthz#", "x:80/healthz", "@", ""]
    targets = ["/v1/usage", "/v1/usage?/healthz", "http://x/v1/usage", "/healthz/../v1/usage", "/healthz#/v1/usage"]
    targets += ["/healthz;/../v1/usage", "/healthz%2f..%2fv1%2fusage", "//healthz/v1/usage", "/v1/usage#/healthz"]
    for host in hosts:
        for target in targets:
            got = await world.raw(f"GET {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
            status = int(got.split(b" ")[1])
            # What stands behind a # is no part of a target, and what stands before it may be health.
            assert status in {400, 401, 404} or target.startswith("/healthz#"), (host, target, got)
            assert b"charged" not in got


# ------------------------------------------------------------------ 4: tenants


async def test_what_is_anothers_is_answered_as_what_never_was_by_every_operation(world: World) -> None:
    owner = await world.key("tenant a", "chat", "jobs", "usage:read")
    other = await world.key("tenant b", "chat", "jobs", "usage:read")
    mine: dict[str, Any] = {"headers": bearer(owner)}

    async def done(path: str, field: str, *ends: str) -> dict[str, Any]:
        found: dict[str, Any] = {}

        async def ended() -> bool:
            found.update((await world.client.get(path, **mine)).json())
            return found[field] in ends

        await until(ended)
        return found

    line = batch_line("chat", 1, session_id="session-of-a")
    submitted = (await world.client.post("/v1/jobs", json={"jobs": [line]}, **mine)).json()
    file = {"file": ("a.jsonl", json.dumps(batch_line("chat", 1)).encode(), "application/jsonl")}
    upload = (await world.client.post("/v1/files", files=file, data={"purpose": "batch"}, **mine)).json()
    asked = {"input_file_id": upload["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = (await world.client.post("/v1/batches", json=asked, **mine)).json()
    background = {"model": "responses", "input": PROMPT, "background": True}
    response = (await world.client.post("/v1/responses", json=background, **mine)).json()
    params = {"model": "claude-sonnet", "max_tokens": 9, "messages": [{"role": "user", "content": PROMPT}]}
    requests = {"requests": [{"custom_id": "a", "params": params}]}
    messages = (await world.client.post("/v1/messages/batches", json=requests, **mine)).json()
    output = (await done(f"/v1/batches/{batch['id']}", "status", "completed"))["output_file_id"]
    await done(f"/v1/messages/batches/{messages['id']}", "processing_status", "ended")
    await done(f"/v1/responses/{response['id']}", "status", "completed")
    [job_id] = [job["id"] for job in submitted["jobs"]]
    await done(f"/v1/jobs/{job_id}", "status", "succeeded")
    attempts = (await world.client.get("/v1/invocations", params={"session": "session-of-a"}, **mine)).json()["data"]
    owned = {
        ("/v1/invocations", "ticket_id"): [attempts[0]["ticket_id"]],
        ("/v1/jobs", "job_id"): [job_id],
        ("/v1/files", "file_id"): [upload["id"], output],
        ("/v1/batches", "batch_id"): [batch["id"]],
        ("/v1/messages/batches", "batch_id"): [messages["id"]],
        ("/v1/responses", "response_id"): [response["id"]],
    }

    def absent(one: str) -> str:
        """Of the same form, and nobody's."""
        return re.sub(r"[0-9a-f]{12}$", lambda end: end[0][::-1] if end[0] != end[0][::-1] else "0" * 12, one)

    async def told(method: str, path: str, one: str, **given: Any) -> tuple[int, str, dict[str, str]]:
        answer = await world.client.request(method, path, headers=bearer(other), **given)
        headers = {name: value for name, value in answer.headers.items() if name not in {"date", "content-length"}}
        text = json.dumps([answer.text, headers])
        request_id = answer.headers["x-tollbridge-request-id"]
        text, shown = json.loads(text.replace(request_id, "R").replace(one, "I"))
        return answer.status_code, text, shown

    async def before() -> list[Any]:
        """What its owner sees of it."""
        found = [
            (await world.client.get(f"{base}/{one}", **mine)).json() for (base, _), ids in owned.items() for one in ids
        ]
        return [[one, (await world.client.get(f"/v1/files/{output}/content", **mine)).text] for one in found]

    seen, tried = await before(), 0
    for method, path, operation in world.operations:
        names = world.parameters(operation, "path")
        if not names or path.startswith(("/v1/models", "/v1/keys", "/v1/content", "/v1/sessions")):
            # Models are nobody's, keys and content are seen by administrators alone, and a session has its key's name.
            continue
        [name] = names
        ids = next(ids for (base, known), ids in owned.items() if (path.startswith(base + "/{"), known) == (True, name))
        body = world.example(operation)
        given = {} if body is None else {"json": body}
        for one in ids:
            answers = [await told(method, path.format(**{name: each}), each, **given) for each in (one, absent(one))]
            assert answers[0] == answers[1], (method, path)
            assert answers[0][0] == 404, (method, path, answers[0])
            tried += 1
    assert tried >= 18
    session: dict[str, Any] = {"params": {"session_id": "session-of-a"}}

    def filtered(name: str, one: str) -> dict[str, Any]:
        return {"params": {name: one, "from": "2026-01-01", "to": "2999-01-01"}}

    alike: list[tuple[str, str, str, str, Callable[[str], dict[str, Any]]]] = [
        ("DELETE", "/v1/jobs", submitted["submission_id"], "", lambda one: {"params": {"submission_id": one}}),
        ("GET", "/v1/jobs", submitted["submission_id"], "", lambda one: {"params": {"submission_id": one}}),
        ("GET", "/v1/jobs/results", submitted["submission_id"], "", lambda one: {"params": {"submission_id": one}}),
        ("GET", "/v1/jobs", "session-of-a", "session-of-x", lambda one: {"params": {"session_id": one}}),
        ("GET", "/v1/usage", "session-of-a", "session-of-x", lambda one: {"params": {"session_id": one}}),
        *(
            ("GET", path, attempts[0][field], never, partial(filtered, name))
            for path in ("/v1/invocations", "/v1/stats")
            for name, field, never in (("session", "session_id", "session-of-x"), ("key", "key_id", ""))
        ),
        ("GET", "/v1/files", upload["id"], "", lambda one: {"params": {"after": one}}),
        ("GET", "/v1/batches", batch["id"], "", lambda one: {"params": {"after": one}}),
        ("GET", "/v1/messages/batches", messages["id"], "", lambda one: {"params": {"after_id": one}}),
        ("POST", "/v1/batches", upload["id"], "", lambda one: {"json": {**asked, "input_file_id": one}}),
        ("POST", "/v1/batches", output, "", lambda one: {"json": {**asked, "input_file_id": one}}),
    ]
    for method, path, one, never, made in alike:
        answers = [await told(method, path, each, **made(each)) for each in (one, never or absent(one))]
        assert answers[0] == answers[1], (method, path)
    for path in ("/v1/jobs", "/v1/files", "/v1/batches", "/v1/messages/batches"):
        listed = await world.client.get(path, headers=bearer(other))
        assert listed.json()["data"] == [], path
    theirs = [await told("GET", f"/v1/sessions/{name}", name) for name in ("session-of-a", "session-of-x")]
    assert theirs[0] == theirs[1]
    assert theirs[0][0] == 404
    used = [await world.client.get("/v1/usage", headers=bearer(key), **session) for key in (owner, other)]
    assert used[0].json()["session"] != used[1].json()["session"]
    # A word that one has used as an idempotency key is free to the other, and says nothing of what it stood for.
    named = {"idempotency-key": "a-word"}
    for path, body in (("/v1/chat/completions", chat()), ("/v1/jobs", batch_line("chat", 7))):
        for number, key in enumerate((owner, other)):
            sent = {**body, **({"max_tokens": 9} if path != "/v1/jobs" and number else {})}
            answer = await world.client.post(path, json=sent, headers={**bearer(key), **named})
            assert answer.status_code < 300, answer.text
            assert "idempotent-replayed" not in answer.headers
            assert "kept" not in answer.headers.get("x-tollbridge-warnings", "")
    assert await before() == seen


# ------------------------------------------------------------------ 5: fields that nobody asked for


async def test_no_body_takes_a_field_that_it_does_not_know(world: World) -> None:
    known = {(method, path) for method, path, one in world.operations if world.example(one) is not None}
    assert {path for _, path in known} >= OPEN
    made = await world.client.post("/v1/keys", json={"name": "changed", "scopes": ["chat"]}, headers=bearer(KEY))
    unknown = {"is_admin": True, "key_id": str(uuid.uuid4()), "user_role": "proxy_admin", "__proto__": {"a": 1}}
    for method, path, operation in world.operations:
        if (method, path) not in known or path in OPEN:
            continue
        for name, value in unknown.items():
            body = {**world.example(operation), name: value}
            # The place of a job is in a list of them.
            at = filled(path, made.json()["id"])
            answer = await world.client.request(method, at, json=body, headers=bearer(KEY))
            assert answer.status_code == 400, (method, path, answer.text)
            assert answer.json()["error"]["param"].endswith(name), (method, path, answer.text)
    # Where the provider's API is open, what is ours is taken from headers alone.
    plain = await world.key("plain", "chat")
    for name, value in {"key_id": "x", "scopes": ["admin"], "tenant": "a", "cost_usd": "0", "debit_id": "d"}.items():
        answer = await world.client.post("/v1/chat/completions", json={**chat(), name: value}, headers=bearer(plain))
        assert answer.status_code < 500
    assert (await world.client.get("/v1/keys", headers=bearer(plain))).status_code == 403


async def test_nothing_is_configured_and_nothing_is_run_over_the_ports(world: World) -> None:
    for path in (
        *("/config/update", "/get/config/callbacks", "/model/new", "/model/delete", "/key/generate", "/user/new"),
        *("/v1/config", "/v1/providers", "/v1/models", "/mcp-rest/test/connection", "/guardrails/test_custom_code"),
        *("/v1/exec", "/v1/eval", "/v1/admin", "/debug", "/debug/pprof", "/metrics", "/actuator", "/_control/faults"),
        *("/docs", "/redoc", "/admin", "/console", "/shutdown", "/.env", "/tollbridge.toml"),
    ):
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            answer = await world.client.request(method, path, headers=bearer(KEY), content=b"{}")
            assert answer.status_code in {404, 405}, (method, path)
        if path != "/v1/models":
            assert (await world.client.get(path, headers=bearer(KEY))).status_code == 404, path


# ------------------------------------------------------------------ 7: the slow


async def test_five_hundred_that_send_too_slowly_hold_nobody_up_and_are_cut(world: World) -> None:
    at = urlsplit(world.gateway.rest_url)
    key = await world.key("slow", "chat")
    begun = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
    whole = f"{begun}content-type: application/json\r\ncontent-length: 100000\r\n\r\n"
    cut: Counter[str] = Counter()
    all_open, healthy = asyncio.Event(), asyncio.Event()
    opening = 0

    async def slow(number: int) -> None:
        nonlocal opening
        kind = ("head", "body", "nothing", "half a head")[number % 4]
        reader, writer = await asyncio.open_connection(at.hostname, at.port)
        opening += 1
        if opening == 500:
            all_open.set()
        first = {"head": begun + "cookie: ", "body": whole, "nothing": "", "half a head": begun.removesuffix("\r\n")}
        writer.write(first[kind].encode())

        async def drips() -> None:
            while kind != "nothing" and not writer.is_closing():
                writer.write(b"x")
                await asyncio.sleep(1)

        dripping = asyncio.create_task(drips())
        got = b""
        try:
            with contextlib.suppress(ConnectionError):
                while piece := await reader.read(4096):
                    got += piece
            cut[kind + (" told" if b" 408 " in got else "")] += 1
        finally:
            dripping.cancel()
            writer.close()

    async with asyncio.timeout(120):
        tasks = [asyncio.create_task(slow(number)) for number in range(500)]
        await all_open.wait()
        answers = await at_once(
            [lambda: world.client.post("/v1/chat/completions", json=chat(), headers=bearer(key)) for _ in range(40)]
        )
        healthy.set()
        await asyncio.gather(*tasks)
    assert {answer.status_code for answer in answers} == {200}
    assert sum(cut.values()) == 500
    # Whose head has come is told why. To send on after that may reset the connection before it is read.
    assert cut["body told"] > 60, cut


# ------------------------------------------------------------------ 8: sizes


async def test_what_is_larger_than_it_may_be_is_refused_before_it_costs_anything(world: World) -> None:
    key = await world.key("large", "chat", "jobs")
    before = (await world.provider.ledger())["dispatches"]
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
    head += "content-type: application/json\r\n"
    body = json.dumps(chat()).encode()

    async def sends(lines: str, content: bytes, expected: set[int]) -> None:
        got = await world.raw(head.encode() + lines.encode() + b"\r\n" + content)
        assert int(got.split(b" ")[1]) in expected, (lines[:60], got[:300])

    large: list[tuple[str, bytes, set[int]]] = [
        # Declared and never sent.
        (f"content-length: {33 * MiB}\r\n", b"", {413}),
        ("content-length: 999999999999999999999999\r\n", b"", {400, 413}),
        ("transfer-encoding: chunked\r\n", (b"%x\r\n" % MiB + b" " * MiB + b"\r\n") * 33, {413}),
        (f"content-length: {len(body)}\r\ncontent-encoding: gzip\r\n", body, {415}),
        (f"content-length: {len(body)}\r\nx-a: {'x' * 17_000}\r\n", body, {400}),
        (f"content-length: {len(body)}\r\n" + "x-a: b\r\n" * 120, body, {400}),
    ]
    await asyncio.gather(*(sends(*one) for one in large))
    many = {f"k{number}": "v" for number in range(2000)}
    for named, fields in {
        "depth": {"x": nested(400)},
        "n": {"n": 10**9},
        "n below": {"n": -1},
        "max_tokens": {"max_tokens": 10**30},
        "max_tokens below": {"max_tokens": -5},
        "values": {"x": [0] * 500_000},
        "tags": {},
    }.items():
        headers = {"x-tollbridge-tags": ",".join(f"{k}={v}" for k, v in list(many.items())[:50])}
        given = {**bearer(key), **(headers if named == "tags" else {})}
        answer = await world.client.post("/v1/chat/completions", json=chat(**fields), headers=given)
        assert answer.status_code in {400, 413}, (named, answer.status_code, answer.text[:300])
    file = {"endpoint": "/v1/chat/completions", "completion_window": "24h", "input_file_id": "file-x"}
    metadata = await world.client.post("/v1/batches", json={**file, "metadata": many}, headers=bearer(key))
    assert (metadata.status_code, metadata.json()["error"]["param"]) == (400, "metadata")
    assert (await world.provider.ledger())["dispatches"] == before


def nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return found


async def test_a_large_message_over_grpc_is_refused_also_where_it_is_small_on_the_wire(world: World) -> None:
    before = (await world.provider.ledger())["dispatches"]
    large = completion("chat", text="0" * 17 * MiB)
    async with world.gateway.stub() as stub:
        for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip, grpc.Compression.Deflate):
            call = stub.Complete(large, metadata=METADATA, compression=compression)
            assert (await call.code()) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await world.provider.ledger())["dispatches"] == before


def peak_rss(pid: int, *, anew: bool = False) -> int:
    """Bytes. `anew` forgets what was taken before."""
    if anew:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


async def test_a_providers_bomb_is_cut_off_by_what_it_unpacks_to(world: World) -> None:
    before = peak_rss(world.gateway.pid, anew=True)
    never = {"x-tollbridge-resend-uncertain": "never"}
    for model in ("bomb", "line", "huge"):
        for stream in (False, True):
            answer = await world.client.post(
                "/v1/chat/completions", json=chat(model, stream=stream), headers={**bearer(KEY), **never}
            )
            said = answer.text[-2000:]
            assert answer.status_code >= 500 or '"error"' in said, (model, stream, answer.status_code, said)
            del answer, said
            world.told.pop()
    # Each of them is half a gigabyte, a quarter, and an eighth.
    assert peak_rss(world.gateway.pid) - before < 256 * MiB
    assert (await world.client.post("/v1/chat/completions", json=chat(), headers=bearer(KEY))).status_code == 200


# ------------------------------------------------------------------ 10: smuggling


async def test_no_request_hides_in_another(world: World) -> None:
    key = await world.key("smuggler", "chat", "usage:read")
    before = (await world.provider.ledger())["dispatches"]
    hidden = f"GET /v1/usage HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\nx-hidden: 1\r\n\r\n"
    body = f"0\r\n\r\n{hidden}"
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
    head += "content-type: application/json\r\n"
    length = f"content-length: {len(body)}\r\n"
    sent = {
        "CL+TE": f"{head}{length}transfer-encoding: chunked\r\n\r\n{body}",
        "TE+CL": f"{head}transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n{body}",
        "two lengths": f"{head}content-length: 0\r\n{length}\r\n{body}",
        "lengths in one": f"{head}content-length: 0, {len(body)}\r\n\r\n{body}",
        "signed length": f"{head}content-length: +{len(body)}\r\n\r\n{body}",
        "hex length": f"{head}content-length: 0x10\r\n\r\n{body}",
        "unknown coding": f"{head}transfer-encoding: xchunked\r\n\r\n{body}",
        "chunked twice": f"{head}transfer-encoding: chunked, chunked\r\n\r\n{body}",
        "chunked not last": f"{head}transfer-encoding: chunked, identity\r\n\r\n{body}",
        "space before colon": f"{head}transfer-encoding : chunked\r\n{length}\r\n{body}",
        "folded": f"{head}transfer-encoding:\r\n chunked\r\n{length}\r\n{body}",
        "bare LF": f"{head}x-a: b\ntransfer-encoding: chunked\r\n{length}\r\n{body}",
        "bare LF ends the head": f"{head}\n{hidden}",
        "bare CR": f"{head}x-a: b\rtransfer-encoding: chunked\r\n{length}\r\n{body}",
        "NUL": f"{head}x-a: \0\r\n{length}\r\n{body}",
        "negative chunk": f"{head}transfer-encoding: chunked\r\n\r\n-1\r\n\r\n{body}",
        "chunk size in words": f"{head}transfer-encoding: chunked\r\n\r\n0x5\r\nhello\r\n{body}",
        "chunk without an end": f"{head}transfer-encoding: chunked\r\n\r\n5\r\nhelloX{body}",
        "chunk of bare LF": f"{head}transfer-encoding: chunked\r\n\r\n5\nhello\n{body}",
    }
    for name, content in sent.items():
        got = await world.raw(content.encode())
        statuses = re.findall(rb"HTTP/1\.1 (\d+) ", got)
        assert len(statuses) <= 1, (name, got)
        assert b"charged" not in got, (name, got)
        assert statuses in ([], [b"400"], [b"501"]), (name, got)
    assert (await world.provider.ledger())["dispatches"] == before


async def test_no_value_of_a_caller_becomes_a_header_of_ours(world: World) -> None:
    evil = "a\r\nx-evil: 1\r\n\r\nHTTP/1.1 200 OK"
    for body in (chat(evil), chat(user=evil), chat(metadata={evil: evil}), chat(stream=True, model=f"chat/{evil}")):
        answer = await world.client.post("/v1/chat/completions", json=body, headers=bearer(KEY))
        assert "x-evil" not in answer.headers
        assert answer.status_code in {200, 400, 404}
    for path in (f"/v1/models/{quote(evil, safe='')}", f"/v1/jobs/{quote(evil, safe='')}", f"/{quote(evil, safe='')}"):
        answer = await world.client.get(path, headers=bearer(KEY))
        assert "x-evil" not in answer.headers
        assert answer.status_code in {400, 404}
    [passed] = [await world.client.post("/v1/chat/completions", json=chat(), headers=bearer(KEY))]
    ours = {"content-type", "content-length", "date", "server", "x-request-id"}
    assert {name for name in passed.headers if not name.startswith("x-tollbridge-")} <= ours


# ------------------------------------------------------------------ 12: what is no JSON, and no text

#: A value as it is written, and whether there is any place for it.
BROKEN = {
    "escaped NUL": b'"a\\u0000b"',
    "1e400": b"1e400",
    "-1e400": b"-1e400",
    "NUL": b'"a\0b"',
    "surrogate": b'"\\ud800"',
    "not UTF-8": b'"\xff"',
    "CESU-8": b'"\xed\xa0\x80"',
    "NaN": b"NaN",
    "Infinity": b"-Infinity",
    "hex": b"0x10",
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "twice": b'{"a": 1, "a": 2}',
    "twice escaped": b'{"a": 1, "\\u0061": 2}',
    "open": b'{"a": [',
    "comment": b"1 /* a */",
}
#: JSON, and seldom what is meant.
STRANGE = {
    "1e-400": b"1e-400",
    "digits": b"9" * 5000,
    "null": b"null",
    "empty": b'""',
    "list": b"[[]]",
    "object": b'{"": {"": null}}',
    "true": b"true",
    "RLO": '"\u202e\u2066"'.encode(),
}


def with_value(example: dict[str, Any]) -> Iterator[tuple[str, Callable[[bytes], bytes]]]:
    """Each place of a body that a value may be put in."""

    def places(value: Any, at: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        yield at
        if isinstance(value, dict):
            for name in value:
                yield from places(value[name], (*at, name))
        elif isinstance(value, list) and value:
            yield from places(value[0], (*at, 0))

    for place in places(example, ()):
        if not place:
            continue
        body = copy.deepcopy(example)
        inside: Any = body
        for step in place[:-1]:
            inside = inside[step]
        inside[place[-1]] = "@"
        head, tail = json.dumps(body).encode().split(b'"@"', 1)
        yield ".".join(map(str, place)), partial(between, head, tail)


def between(head: bytes, tail: bytes, value: bytes) -> bytes:
    return head + value + tail


async def test_what_is_no_json_or_no_text_is_refused_by_every_operation_and_breaks_none(world: World) -> None:
    seen: Counter[tuple[str, int]] = Counter()
    wrong: list[tuple[Any, ...]] = []

    async def posts(method: str, path: str, place: str, kind: str, body: bytes) -> None:
        headers = {**bearer(KEY), "content-type": JSON}
        answer = await world.client.request(method, filled(path, key_id), content=body, headers=headers)
        where = (method, path, place, kind, answer.status_code, answer.text[:300])
        if answer.status_code >= 500 or (kind not in STRANGE and answer.status_code not in SYNTAX):
            wrong.append(where)
        seen[kind, answer.status_code] += 1

    calls: list[Callable[[], Any]] = []
    # What is not there is said to be absent before its body is read.
    there = {"name": "odd", "scopes": ["chat"]}
    key_id = (await world.client.post("/v1/keys", json=there, headers=bearer(KEY))).json()["id"]
    for method, path, operation in world.operations:
        example = world.example(operation)
        if example is None:
            continue
        ask, values = partial(posts, method, path), {**BROKEN, **STRANGE}
        for place, made in with_value(example):
            calls.extend(partial(ask, place, kind, made(value)) for kind, value in values.items())
        whole = json.dumps(example)
        documents = [b"", b"\xef\xbb\xbf" + whole.encode(), whole.encode() + b"{}", b"[]", whole.encode("utf-16")]
        calls.extend(partial(ask, "", "no document", body) for body in documents)
    await at_once(calls)
    assert wrong == []
    assert {kind for kind, _ in seen} == {"no document", *BROKEN, *STRANGE}
    assert len(calls) > 500, len(calls)


# ------------------------------------------------------------------ 6 and 13: what is kept


async def test_no_secret_and_no_prompt_is_where_it_does_not_belong(world: World) -> None:
    key = await world.key("errors", "chat", "jobs", "admin")
    never = {**bearer(key), "x-tollbridge-resend-uncertain": "never"}
    told: Counter[int] = Counter()

    async def through(*, stored: bool = True) -> None:
        asked: list[tuple[str, dict[str, Any]]] = [
            ("/v1/chat/completions", chat()),
            ("/v1/chat/completions", chat(stream=True)),
            ("/v1/messages", chat("claude-sonnet", max_tokens=9)),
            ("/v1/responses", {"model": "responses", "input": PROMPT}),
            ("/v1/chat/completions", chat("nothing")),
            ("/v1/jobs", {"jobs": [{**batch_line("chat", 1, body=chat()), "resend_uncertain": "never"}]}),
            ("/v1/keys", {"name": "x", "secret": key}),
        ]
        # Without the database what stores first is refused after ten seconds, and the rest at once.
        asked = [one for one in asked if stored or one[0] not in {"/v1/jobs", "/v1/keys"}]
        calls = [
            world.client.post(path, json=body, headers=bearer(key) if path == "/v1/jobs" else never)
            for path, body in asked
        ]
        broken_off = b'{"' + PROMPT.encode()
        calls.append(world.client.post("/v1/jobs", content=broken_off, headers={**bearer(key), "content-type": JSON}))
        told.update(answer.status_code for answer in await asyncio.gather(*calls))
        async with world.gateway.stub() as stub:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stub.Complete(completion("chat", text=PROMPT), metadata=(("authorization", f"Bearer {key}"),))

    broken: list[dict[str, Any]] = [{"status": status} for status in (400, 401, 404, 500)]
    broken += [{"json": word} for word in ("bad", "truncated", "not_object", "html", "empty")]
    broken += [{"die": "rst"}, {"die": "fin_before_headers"}, {"error_in_stream": "chunk"}, {"terminal": "none"}]
    try:
        for faults in [*broken, {"status": 500, "body": "text"}]:
            await world.provider.set_faults(**faults)
            await through()
            await world.client.post("/v1/groups/reset", json={"group": group_of(world)}, headers=bearer(KEY))
    finally:
        await world.provider.set_faults()
    world.proxy.refusing = True
    world.proxy.cut()
    try:
        await through(stored=False)
    finally:
        world.proxy.refusing = False

    async def ready() -> bool:
        return (await world.client.get("/readyz")).status_code == 200

    await until(ready)
    assert set(told) >= {200, 202, 400, 404, 502, 503}, told
    rows, log = await world.every_row(), world.gateway.log.read_text()
    kept = everything_in(world.gateway.data_dir)
    line = command_line(world.gateway.pid)
    assert "gateway.request_refused" in log
    for name, canary in {**SECRETS, **world.secrets}.items():
        assert canary not in log, name
        assert canary.encode() not in line, name
        assert not any(canary in stored for stored in rows.values()), name
        assert canary.encode() not in kept, name
        assert not any(canary.encode() in answer for answer in world.told), name
    assert PROMPT not in log
    # Content is in its own schema.
    assert not [table for table, stored in rows.items() if PROMPT in stored and not table.startswith("content.")]
    assert [table for table, stored in rows.items() if PROMPT in stored]


def everything_in(directory: Path) -> bytes:
    return b"\n".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def group_of(world: World) -> str:
    at = urlsplit(world.provider.url)
    return f"{at.scheme}://{at.netloc}"


async def test_what_is_deleted_or_past_its_retention_is_in_no_table(world: World) -> None:
    key = await world.key("kept", "chat", "jobs")
    mine: dict[str, Any] = {"headers": bearer(key)}
    word = f"canary-kept-{uuid.uuid4().hex}"

    async def holding() -> set[str]:
        return {table for table, stored in (await world.every_row()).items() if word in stored}

    async def everything() -> dict[str, str]:
        """One of everything that keeps content, each ended."""
        params = {"model": "claude-sonnet", "max_tokens": 9, "messages": [{"role": "user", "content": word}]}
        line = batch_line("chat", 1, body=chat(text=word), custom_id=word)
        made: dict[str, Any] = {}

        async def makes(name: str, path: str, **given: Any) -> Any:
            answer = await world.client.post(path, **given)
            assert answer.status_code < 300, (name, answer.text)
            made[name] = answer.json()["id"] if "id" in answer.json() else answer.json()["jobs"][0]["id"]

        await makes("jobs", "/v1/jobs", json={"jobs": [line]}, **mine)
        file = {"file": (f"{word}.jsonl", json.dumps(line).encode(), "application/jsonl")}
        await makes("files", "/v1/files", files=file, data={"purpose": "batch"}, **mine)
        asked = {"input_file_id": made["files"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        await makes("batches", "/v1/batches", json={**asked, "metadata": {"a": word}}, **mine)
        await makes(
            "responses", "/v1/responses", json={"model": "responses", "input": word, "background": True}, **mine
        )
        requests = {"requests": [{"custom_id": word[:60], "params": params}]}
        await makes("messages/batches", "/v1/messages/batches", json=requests, **mine)
        named = {**bearer(key), "idempotency-key": uuid.uuid4().hex}
        await world.client.post("/v1/chat/completions", json=chat(text=word), headers=named)

        async def ended(name: str) -> bool:
            found = (await world.client.get(f"/v1/{name}/{made[name]}", **mine)).json()
            if name == "batches":
                made["output"] = found["output_file_id"]
            return found.get("processing_status", found.get("status")) in {"succeeded", "completed", "ended"}

        for name in ("jobs", "batches", "responses", "messages/batches"):
            await until(partial(ended, name))
        return made

    made = await everything()
    assert await holding()
    for name, path in [("jobs", "jobs"), ("responses", "responses"), ("messages/batches", "messages/batches")]:
        assert (await world.client.delete(f"/v1/{path}/{made[name]}", **mine)).status_code == 200, name
    for name in ("files", "output"):
        assert (await world.client.delete(f"/v1/files/{made[name]}", **mine)).status_code == 200, name

    async def nothing(but: frozenset[str] = frozenset()) -> bool:
        return not await holding() - but

    # What a batch was named by its caller, and the answer under an idempotency key, have no call of their own.
    await until(partial(nothing, frozenset({"content.batch", "content.idempotent_call"})))
    await everything()
    connection = await asyncpg.connect(world.database)
    try:
        timed = await connection.fetch(
            "select format('%I.%I', table_schema, table_name) as name from information_schema.columns"
            " where table_schema = 'content' and column_name = 'expires_at'"
        )
        for table in timed:
            await connection.execute(
                f"update {table['name']} set expires_at = clock_timestamp() - interval '1 day'"
                " where expires_at is not null"
            )
    finally:
        await connection.close()
    # Idempotency keys are looked through each minute, and at a start.
    assert await world.gateway.stop() == 0
    await world.gateway.start()
    await until(nothing)
