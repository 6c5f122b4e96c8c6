"""API keys over REST, on a real PostgreSQL: made, shown once, changed, rotated, revoked; none gives what it has not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import asyncpg
import httpx
import msgspec
import pytest

from gateway import database
from gateway.call import Scope
from gateway.keys import Change, Keys, KeysSettings, Limits
from gateway.rest import app as rest
from gateway.rest import keys as rest_keys
from tests.postgres import execute

FAST = KeysSettings(poll_s=0.05)


class World:
    def __init__(self, url: str, keys: Keys, client: httpx.AsyncClient) -> None:
        self.url = url
        self.keys = keys
        self._client = client

    async def made(self, name: str, *scopes: Scope, **given: Any) -> str:
        """The secret of a new key, made by an operator."""
        return (await self.keys.create(name, scopes, **given))[1]

    async def ask(self, secret: str, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        return await self._client.request(
            method, path, json=body, headers={"authorization": f"Bearer {secret}", **headers}
        )


@asynccontextmanager
async def opened(url: str, settings: KeysSettings = FAST) -> AsyncIterator[World]:
    async with (
        database.open_pool(url, name="test-keys", size=3) as pool,
        Keys.open(pool, settings) as keys,
        rest.serve(rest.RestSettings(port=0), rest_keys.routes(keys=keys), keys) as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False) as client,
    ):
        yield World(url, keys, client)


@pytest.fixture
async def world(database_url: str) -> AsyncIterator[World]:
    async with opened(database_url) as world:
        yield world


async def test_a_key_is_made_shown_once_and_listed_without_its_secret(world: World) -> None:
    admin = await world.made("admin", *Scope)
    body = {
        "name": "ci",
        "scopes": ["chat"],
        "description": "builds",
        "models": ["gpt-*"],
        "providers": ["openai"],
        "tags": {"team": "core"},
        "expires_at": (datetime.now(UTC) + timedelta(days=1)).isoformat(),
    }
    made = await world.ask(admin, "POST", "/v1/keys", body)
    assert made.status_code == 201
    assert made.headers["cache-control"] == "no-store"
    secret = made.json()["secret"]
    caller = await world.keys.authenticate(secret)
    assert caller.policy.models == ("gpt-*",)
    assert caller.policy.providers == frozenset({"openai"})
    assert caller.tags == {"team": "core"}
    told = await world.ask(admin, "GET", f"/v1/keys/{made.json()['id']}")
    told = told.json()
    nothing = {"spent_usd": "0", "unknown_upper_bound_usd": "0", "reserved_usd": "0"}
    used = told.pop("used")
    assert (used["concurrency"], used["total"]) == (0, nothing)
    assert (used["requests_left"], used["tokens_left"]) == (None, None)
    limits = {"requests_per_minute": 30, "tokens_per_minute": 5000}
    await world.ask(admin, "PATCH", f"/v1/keys/{made.json()['id']}", {"limits": limits})
    full = (await world.ask(admin, "GET", f"/v1/keys/{made.json()['id']}")).json()["used"]
    assert (full["requests_left"], full["tokens_left"]) == (30, 5000)
    await world.ask(admin, "PATCH", f"/v1/keys/{made.json()['id']}", {"limits": {}})
    assert used["day"] == {"day": used["day"]["day"], **nothing}
    assert used["month"] == {"month": used["day"]["day"][:7], **nothing}
    assert {**told, "secret": secret} == made.json()
    listed = await world.ask(admin, "GET", "/v1/keys")
    assert [key["name"] for key in listed.json()["data"]] == ["admin", "ci"]
    assert secret not in listed.text
    assert listed.json()["data"][1]["limits"]["budget_total_usd"] is None


async def test_the_list_comes_in_pages(world: World) -> None:
    admin = await world.made("admin", *Scope)
    for number in range(4):
        await world.made(f"k{number}", Scope.CHAT)
    first = (await world.ask(admin, "GET", "/v1/keys?limit=3")).json()
    assert first["has_more"]
    rest_of_them = (await world.ask(admin, "GET", f"/v1/keys?limit=3&after={first['data'][-1]['id']}")).json()
    assert not rest_of_them["has_more"]
    assert [key["name"] for key in first["data"] + rest_of_them["data"]] == ["admin", "k0", "k1", "k2", "k3"]


@pytest.mark.parametrize("scopes", [{Scope.CHAT}, {Scope.JOBS}, {Scope.USAGE_READ}, set(Scope) - {Scope.ADMIN}])
async def test_only_an_admin_key_gets_to_keys(world: World, scopes: set[Scope]) -> None:
    secret = await world.made("other", *scopes)
    record = (await world.keys.list())[0]
    for method, path in (
        ("POST", "/v1/keys"),
        ("GET", "/v1/keys"),
        ("GET", f"/v1/keys/{record.key_id}"),
        ("PATCH", f"/v1/keys/{record.key_id}"),
        ("DELETE", f"/v1/keys/{record.key_id}"),
        ("POST", f"/v1/keys/{record.key_id}/rotate"),
    ):
        refused = await world.ask(secret, method, path, {"name": "x", "scopes": ["admin"]})
        assert refused.status_code == 403, (method, path)
        assert (await world.ask("wrong", method, path, {})).status_code == 401
    assert len(await world.keys.list()) == 1


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"scopes": ["admin", "chat", "jobs"]}, "scopes"),
        ({"models": ["gpt-*", "claude-*"]}, "models"),
        ({"models": None}, "models"),
        ({"providers": None}, "providers"),
        ({"expires_at": None}, "expires_at"),
    ],
)
async def test_an_admin_key_cannot_raise_its_own_rights_by_any_way(
    world: World, change: dict[str, Any], param: str
) -> None:
    end = datetime.now(UTC) + timedelta(days=1)
    own = await world.made("own", Scope.ADMIN, Scope.CHAT, models=["gpt-*"], providers=["openai"], expires_at=end)
    wide = await world.made("wide", *Scope)
    ids = {record.name: record.key_id for record in await world.keys.list()}
    itself = await world.ask(own, "PATCH", f"/v1/keys/{ids['own']}", change)
    assert (itself.status_code, itself.json()["error"]["param"]) == (403, param)
    child = {
        "name": "child",
        "scopes": ["chat"],
        "models": ["gpt-4o"],
        "providers": ["openai"],
        "expires_at": end.isoformat(),
    }
    by_another = await world.ask(own, "POST", "/v1/keys", {**child, **change})
    assert (by_another.status_code, by_another.json()["error"]["param"]) == (403, param)
    assert (await world.ask(own, "POST", "/v1/keys", child)).status_code == 201
    # The secret of a key that may do more.
    taken = await world.ask(own, "POST", f"/v1/keys/{ids['wide']}/rotate", {"overlap_s": 0})
    assert taken.status_code == 403
    await world.keys.authenticate(wide)


async def test_a_change_says_what_it_changes_and_leaves_the_rest(world: World) -> None:
    admin = await world.made("admin", *Scope)
    secret = await world.made("ci", Scope.CHAT, Scope.JOBS, models=["gpt-*"], tags={"team": "core"})
    key_id = (await world.keys.list())[1].key_id
    changed = await world.ask(admin, "PATCH", f"/v1/keys/{key_id}", {"models": None, "scopes": ["chat"]})
    assert changed.status_code == 200
    caller = await world.keys.authenticate(secret)
    assert caller.scopes == {Scope.CHAT}
    assert caller.policy.models is None
    assert caller.tags == {"team": "core"}
    assert changed.json()["changed_at"] is not None
    renamed = await world.ask(admin, "PATCH", f"/v1/keys/{key_id}", {"name": "admin"})
    assert (renamed.status_code, renamed.json()["error"]["code"]) == (409, "conflict")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"name": "x"}, None),
        ({"name": "x", "scopes": []}, "scopes"),
        ({"name": "x", "scopes": ["root"]}, "scopes[0]"),
        ({"name": "", "scopes": ["chat"]}, "name"),
        ({"name": "environment", "scopes": ["chat"]}, "name"),
        ({"name": "a\x00b", "scopes": ["chat"]}, "name"),
        ({"name": "x", "scopes": ["chat"], "models": []}, "models"),
        ({"name": "x", "scopes": ["chat"], "models": [""]}, "models"),
        ({"name": "x", "scopes": ["chat"], "providers": ["a\u0000"]}, "providers[0]"),
        ({"name": "x", "scopes": ["chat"], "tags": {"": "x"}}, "tags"),
        ({"name": "x", "scopes": ["chat"], "description": "x" * 501}, "description"),
        ({"name": "x", "scopes": ["chat"], "expires_at": "2020-01-01T00:00:00Z"}, "expires_at"),
        ({"name": "x", "scopes": ["chat"], "expires_at": "2099-01-01T00:00:00"}, "expires_at"),
        ({"name": "x", "scopes": ["chat"], "digest": "00"}, "digest"),
        ({"name": "x", "scopes": ["chat"], "key_id": "00"}, "key_id"),
        ({"name": "x", "scopes": ["chat"], "secret": "mine"}, "secret"),
        *(
            ({"name": "x", "scopes": ["chat"], "limits": {name: limit}}, f"limits.{name}")
            for name, limits in (
                ("budget_day_usd", (-1, "-0.5", "NaN", "Infinity", "1e9", "1e-13", "0e99999", "5 USD", True)),
                ("concurrency", (0, -1, 1.5, "3", 10**10)),
                ("tokens_per_minute", (0,)),
            )
            for limit in limits
        ),
        ({"name": "x", "scopes": ["chat"], "limits": {"requests": 3}}, "limits.requests"),
    ],
)
async def test_what_a_key_cannot_have_is_refused_with_its_field(
    world: World, body: dict[str, Any], param: str | None
) -> None:
    admin = await world.made("admin", *Scope)
    refused = await world.ask(admin, "POST", "/v1/keys", body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param, refused.text
    assert len(await world.keys.list()) == 1


async def test_a_provider_that_nobody_has_is_refused_with_its_place(database_url: str) -> None:
    async with opened(database_url, msgspec.structs.replace(FAST, providers=frozenset({"openai"}))) as world:
        admin = await world.made("admin", *Scope)
        body = {"name": "k", "scopes": ["chat"], "providers": ["openai", "opnai"]}
        refused = await world.ask(admin, "POST", "/v1/keys", body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "providers.1")
        made = await world.ask(admin, "POST", "/v1/keys", {**body, "providers": ["openai"]})
        path = f"/v1/keys/{made.json()['id']}"
        refused = await world.ask(admin, "PATCH", path, {"providers": ["opnai"]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "providers.0")
        assert (await world.ask(admin, "PATCH", path, {"name": "other"})).json()["providers"] == ["openai"]
    # One that has left the configuration may stay in a key that has it.
    async with opened(database_url, msgspec.structs.replace(FAST, providers=frozenset())) as world:
        assert (await world.ask(admin, "PATCH", path, {"name": "again"})).json()["providers"] == ["openai"]


async def held(world: World) -> list[asyncpg.Record]:
    async with database.open_connection(world.url, name="test") as connection:
        return await connection.fetch("select * from control.key_limit")


async def test_limits_are_changed_as_a_whole_and_their_row_with_them(world: World) -> None:
    admin = await world.made("admin", *Scope)
    await world.made("ci", Scope.CHAT)
    key_id = (await world.keys.list())[1].key_id
    given = {"concurrency": 2, "tokens_per_minute": 90, "budget_month_usd": "12.50"}
    changed = await world.ask(admin, "PATCH", f"/v1/keys/{key_id}", {"limits": given})
    assert {name: limit for name, limit in changed.json()["limits"].items() if limit is not None} == given
    [row] = await held(world)
    assert (row["key_id"], row["concurrency"], row["tokens_left"]) == (key_id, 2, 90)
    assert row["budget_month_usd"] == Decimal("12.5")
    await world.ask(admin, "PATCH", f"/v1/keys/{key_id}", {"description": "its limits stay"})
    assert len(await held(world)) == 1
    assert (await world.ask(admin, "PATCH", f"/v1/keys/{key_id}", {"limits": {}})).status_code == 200
    assert await held(world) == []


async def test_a_limit_that_this_version_does_not_know_is_not_taken_for_none(world: World) -> None:
    admin = await world.made("admin", *Scope)
    secret = await world.made("ci", Scope.CHAT)
    key_id = (await world.keys.list())[1].key_id
    execute(world.url, """update control.api_key set limits = '{"concurrency": 1, "images": 1}' where name = 'ci'""")
    await world.keys.change("admin", Change(description="read them again"))
    listed = await world.ask(admin, "GET", f"/v1/keys/{key_id}")
    assert listed.json()["limits"]["concurrency"] == 1
    assert (await world.ask(secret, "GET", "/v1/keys")).json()["error"]["code"] == "permission_denied"
    assert (await world.ask(admin, "GET", "/v1/keys")).status_code == 200


async def test_a_key_that_has_limits_gives_none_of_them_to_another(world: World) -> None:
    """Else it would use its own, and those of the keys it made."""
    limits = {"budget_day_usd": "5", "concurrency": 2}
    own = await world.made("own", *Scope, limits=Limits(budget_day_usd=Decimal(5), concurrency=2))
    await world.made("free", Scope.CHAT)
    await world.made("tight", Scope.CHAT, limits=Limits(budget_day_usd=Decimal(9), concurrency=1))
    ids = {record.name: record.key_id for record in await world.keys.list()}
    body = {"name": "child", "scopes": ["chat"]}
    for given, param in (
        ({}, "limits.concurrency"),
        (limits, "limits.concurrency"),
        ({"budget_day_usd": "0.01", "concurrency": 1}, "limits.concurrency"),
    ):
        made = await world.ask(own, "POST", "/v1/keys", {**body, "limits": given})
        assert (made.status_code, made.json()["error"]["param"]) == (403, param)
    changes: tuple[tuple[str, dict[str, Any], int], ...] = (
        ("own", {"budget_day_usd": "6", "concurrency": 2}, 403),
        ("own", {"budget_day_usd": "5"}, 403),
        ("own", {"budget_day_usd": "4", "concurrency": 2, "requests_per_minute": 1}, 200),
        ("tight", {"budget_day_usd": "9", "concurrency": 2}, 403),
        ("tight", {"budget_day_usd": "8", "concurrency": 1}, 200),
        ("free", {"concurrency": 1}, 200),
        ("free", {"concurrency": 2}, 403),
    )
    for name, given, status in changes:
        changed = await world.ask(own, "PATCH", f"/v1/keys/{ids[name]}", {"limits": given})
        assert changed.status_code == status, (name, given, changed.text)
    assert (await world.ask(own, "POST", f"/v1/keys/{ids['free']}/rotate", {"overlap_s": 0})).status_code == 403
    assert (await world.ask(own, "POST", f"/v1/keys/{ids['own']}/rotate", {"overlap_s": 60})).status_code == 200


async def test_two_secrets_are_good_for_the_overlap_and_no_longer(world: World) -> None:
    admin = await world.made("admin", *Scope)
    first = await world.made("ci", Scope.ADMIN)
    key_id = (await world.keys.list())[1].key_id
    rotated = await world.ask(admin, "POST", f"/v1/keys/{key_id}/rotate", {"overlap_s": 3600})
    assert rotated.status_code == 200
    second = rotated.json()["secret"]
    callers = [await world.keys.authenticate(secret) for secret in (first, second)]
    assert callers[0] == callers[1]
    assert rotated.json()["previous_secret_until"] is not None
    third = (await world.ask(admin, "POST", f"/v1/keys/{key_id}/rotate", {"overlap_s": 3600})).json()["secret"]
    for secret, status in ((first, 401), (second, 200), (third, 200)):
        assert (await world.ask(secret, "GET", "/v1/keys")).status_code == status
    execute(
        world.url, "update control.api_key set previous_until = clock_timestamp() - interval '1 s' where name = 'ci'"
    )
    await world.keys.change("ci", Change(description="read them again"))
    assert (await world.ask(second, "GET", "/v1/keys")).status_code == 401
    await world.ask(admin, "POST", f"/v1/keys/{key_id}/rotate", {"overlap_s": 0})
    assert (await world.ask(third, "GET", "/v1/keys")).status_code == 401


async def test_a_revoked_key_takes_both_its_secrets_along(world: World) -> None:
    admin = await world.made("admin", *Scope)
    first = await world.made("ci", Scope.ADMIN)
    record, second = await world.keys.rotate("ci", 3600)
    gone = await world.ask(admin, "DELETE", f"/v1/keys/{record.key_id}")
    assert gone.status_code == 200
    assert gone.json()["revoked_at"] is not None
    for secret in (first, second):
        assert (await world.ask(secret, "GET", "/v1/keys")).status_code == 401
    assert (await world.ask(admin, "DELETE", f"/v1/keys/{record.key_id}")).status_code == 404
    assert (await world.ask(admin, "PATCH", f"/v1/keys/{record.key_id}", {"scopes": ["chat"]})).status_code == 404


async def test_the_environments_key_is_ruled_by_the_environment(world: World) -> None:
    await world.keys.bootstrap("an-operators-own-key-0001")
    admin = "an-operators-own-key-0001"
    key_id = (await world.keys.list())[0].key_id
    assert (await world.ask(admin, "POST", f"/v1/keys/{key_id}/rotate", {"overlap_s": 0})).status_code == 400
    assert (await world.ask(admin, "PATCH", f"/v1/keys/{key_id}", {"name": "mine"})).status_code == 400
    assert (await world.ask(admin, "PATCH", f"/v1/keys/{key_id}", {"description": "ours"})).status_code == 200


async def test_a_secret_is_not_repeated_under_an_idempotency_key(world: World) -> None:
    admin = await world.made("admin", *Scope)
    refused = await world.ask(admin, "POST", "/v1/keys", {"name": "ci", "scopes": ["chat"]}, **{"idempotency-key": "k"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "idempotency-key")


async def test_an_id_that_is_none_is_an_unknown_one(world: World) -> None:
    admin = await world.made("admin", *Scope)
    for path in ("/v1/keys/nothing", "/v1/keys/' or 1=1 --", "/v1/keys/00000000-0000-0000-0000-000000000000"):
        assert (await world.ask(admin, "GET", path)).status_code == 404, path
        assert (await world.ask(admin, "DELETE", path)).status_code == 404, path
