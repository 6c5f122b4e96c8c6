"""The invocation log over REST, on a real PostgreSQL: pages, filters, cursors, exports, sums; who sees what."""

from __future__ import annotations

import csv
import io
import json
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

import asyncpg
import httpx
import pytest

from gateway import database
from gateway.call import Scope
from gateway.database import StoreUnavailable
from gateway.keys import Keys
from gateway.rest import app as rest
from gateway.rest import invocations
from metering import log

START: Final = datetime(2026, 3, 31, 22, 0, tzinfo=UTC)
#: In days of which the rows are told: on the last of March it is April there from 22:00 UTC on.
ZONE: Final = "Europe/Vienna"
SMALL: Final = log.Bounds(sizes=(2, 3), page_s=30.0)


def row(number: int, key_id: uuid.UUID, **given: Any) -> dict[str, Any]:
    """An attempt that was granted `number` minutes after START."""
    at = START + timedelta(minutes=number)
    return {
        "ticket_id": uuid.UUID(int=number + 1),
        "correction": 0,
        "granted_at": at,
        "settled_at": at + timedelta(seconds=2),
        "day": datetime(2026, 4, 1, tzinfo=UTC).date(),
        "key_id": key_id,
        "debit_id": f"d{number // 2}",
        "attempt": 1 + number % 2,
        "group_id": "https://api.example:443",
        "state": "charged",
        "usd": Decimal("0.000001") * (number + 1),
        "status": "success",
        "provider": f"p{number % 2}",
        "requested_model": "gpt-4o",
        "total_ms": 100 + number,
        "input_total": 10,
        **given,
    }


async def written(connection: asyncpg.Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    for each in rows:
        names = [f'"{name}"' for name in each]
        places = [f"${at}" for at in range(1, len(each) + 1)]
        await connection.execute(
            f"insert into control.invocation ({', '.join(names)}) values ({', '.join(places)})", *each.values()
        )
        if not each["correction"]:
            columns = ("ticket_id", "key_id", "debit_id", "attempt", "group_id", "granted_at", "day", "state")
            await connection.execute(
                f"insert into control.attempt ({', '.join(columns)}) values ($1, $2, $3, $4, $5, $6, $7, $8)",
                *(each[name] for name in columns),
            )


class World:
    def __init__(self, connection: asyncpg.Connection, keys: Keys, client: httpx.AsyncClient) -> None:
        self.connection = connection
        self.keys = keys
        self.client = client

    async def key(self, name: str, *scopes: Scope) -> tuple[uuid.UUID, dict[str, str]]:
        record, secret = await self.keys.create(name, scopes)
        return record.key_id, {"authorization": f"Bearer {secret}"}

    async def page(self, headers: Mapping[str, str], query: str = "") -> dict[str, Any]:
        answer = await self.client.get(f"/v1/invocations{query}", headers=headers)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def numbers(self, headers: Mapping[str, str], query: str) -> list[int]:
        """Which rows a query finds, in their order."""
        return [uuid.UUID(each["ticket_id"]).int - 1 for each in (await self.page(headers, query))["data"]]

    async def refused(self, headers: Mapping[str, str], path: str) -> tuple[int, str, str | None]:
        answer = await self.client.get(path, headers=headers)
        error = answer.json()["error"]
        return answer.status_code, error["code"], error["param"]


@asynccontextmanager
async def opened(url: str, bounds: log.Bounds = SMALL, readers: int = 2) -> AsyncIterator[World]:
    async with (
        database.open_pool(url, name="test-keys", size=2) as pool,
        database.open_pool(url, name="test-log", size=readers) as reading,
        Keys.open(pool) as keys,
        database.open_connection(url, name="test") as connection,
    ):
        reader = log.InvocationLog(reading, zone=ZONE, readers=readers, bounds=bounds)
        async with (
            rest.serve(rest.RestSettings(port=0), invocations.routes(reader=reader), keys) as server,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False, timeout=60) as client,
        ):
            yield World(connection, keys, client)


@pytest.fixture
async def world(database_url: str) -> AsyncIterator[World]:
    async with opened(database_url) as world:
        yield world


async def test_a_page_has_the_newest_first_and_every_filter_finds_its_rows(world: World) -> None:
    mine, headers = await world.key("mine", Scope.USAGE_READ)
    theirs, _ = await world.key("theirs", Scope.USAGE_READ)
    _, admin = await world.key("admin", Scope.USAGE_READ, Scope.ADMIN)
    texts = {
        "session": "session_id",
        "run": "run_id",
        "step": "step_id",
        "scope": "scope_id",
        "request": "request_id",
        "upstream_model": "upstream_model",
        "ended": "ended",
        "error_code": "error_code",
        "error_class": "error_class",
        "skill": "skill",
        "tool": "tool",
        "role": "role",
        "transport": "transport",
    }
    await written(
        world.connection,
        [
            *(row(number, mine) for number in range(5)),
            row(5, mine, status="error", state="zero", usd=Decimal(0)),
            row(6, mine, status="timeout", state="unknown", usd=None, upper_bound_usd=Decimal("0.5")),
            row(7, mine, tags='{"team": "a", "env": "x:y"}', is_fallback=True, provider="other"),
            row(8, theirs, requested_model="claude"),
            row(9, mine, **{column: f"a {name}" for name, column in texts.items()}),
        ],
    )
    assert await world.numbers(admin, "") == list(range(9, -1, -1))
    assert await world.numbers(headers, "") == [9, 7, 6, 5, 4, 3, 2, 1, 0]
    assert await world.numbers(headers, f"?key={theirs}") == []
    for query, found in {
        f"key={theirs}": [8],
        "debit=d2": [5, 4],
        f"debit=d2&key={theirs}": [],
        "debit=d4": [9, 8],
        "provider=other": [7],
        "model=claude": [8],
        "status=error,timeout": [6, 5],
        "status=error": [5],
        "status=success,error&provider=p1": [9, 5, 3, 1],
        "state=unknown": [6],
        "state=zero": [5],
        "tag=team:a": [7],
        "tag=team:a&tag=env:x:y": [7],
        "tag=team:b": [],
        "fallback=true": [7],
        "fallback=false&limit=3": [9, 8, 6],
        "min_usd=0.000009": [9, 8],
        "min_total_ms=108": [9, 8],
        "from=2026-03-31T22:08:00Z": [9, 8],
        "from=2026-04-01T00:01:00%2B02:00&to=2026-03-31T22:03:00Z": [2, 1],
        "from=2026-04-01&to=2026-04-01": list(range(9, -1, -1)),
        "to=2026-03-31": [],
        "from=2026-04-02": [],
        **{f"{name}=a%20{name}": [9] for name in texts},
    }.items():
        assert await world.numbers(admin, f"?{query}") == found, query
    [told] = (await world.page(headers, "?tag=team:a"))["data"]
    assert set(told) == set(invocations.COLUMNS)
    assert set(told) == {
        each["column_name"]
        for each in await world.connection.fetch(
            "select column_name from information_schema.columns"
            " where table_schema = 'control' and table_name = 'invocation'"
        )
    }
    assert told["tags"] == {"team": "a", "env": "x:y"}
    assert (told["usd"], told["upper_bound_usd"], told["day"]) == ("0.000008", None, "2026-04-01")
    assert told["granted_at"] == "2026-03-31T22:07:00Z"


async def test_the_row_that_holds_is_told_once_and_all_that_were_written_on_demand(world: World) -> None:
    mine, headers = await world.key("mine", Scope.USAGE_READ)
    _, other = await world.key("other", Scope.USAGE_READ)
    operator, admin = await world.key("admin", Scope.USAGE_READ, Scope.ADMIN)
    lost = {"status": "unknown", "state": "unknown", "usd": None, "upper_bound_usd": Decimal("0.5")}
    said = {"resolved_by": operator, "note": "bill of May", "evidence": "invoice 4711"}
    await written(
        world.connection,
        [
            row(0, mine),
            row(1, mine, **lost),
            row(1, mine, correction=1, status="unknown", usd=Decimal("0.25"), **said),
            row(2, mine, **lost),
        ],
    )
    current = (await world.page(headers))["data"]
    assert [(each["attempt"], each["correction"], each["state"], each["usd"]) for each in current] == [
        (1, 0, "unknown", None),
        (2, 1, "charged", "0.25"),
        (1, 0, "charged", "0.000001"),
    ]
    # What was unknown is found by what it is now, whichever index leads to it.
    assert await world.numbers(headers, "?state=unknown") == [2]
    assert await world.numbers(admin, "?state=unknown&status=unknown") == [2]
    assert await world.numbers(headers, "?corrections=all") == [2, 1, 1, 0]
    assert await world.numbers(headers, "?corrections=all&state=unknown") == [2, 1]
    path = f"/v1/invocations/{uuid.UUID(int=2)}"
    history = (await world.client.get(path, headers=headers)).json()
    assert [each["correction"] for each in history["data"]] == [0, 1]
    assert history["data"][1]["note"] is None
    history = (await world.client.get(path, headers=admin)).json()
    assert history["data"][1]["resolved_by"] == str(operator)
    assert (history["data"][1]["note"], history["data"][1]["evidence"]) == ("bill of May", "invoice 4711")
    never = [await world.refused(key, f"/v1/invocations/{uuid.UUID(int=99)}") for key in (headers, admin)]
    assert never == [(404, "not_found", None)] * 2
    assert await world.refused(other, path) == never[0]
    assert await world.refused(other, "/v1/invocations/x") == never[0]


async def test_pages_tell_each_row_once_while_others_are_added(world: World) -> None:
    number = 0
    for query in ("", "&provider=p1", "&status=error", "&corrections=all&status=error,unknown"):
        mine, headers = await world.key(f"mine{number}", Scope.USAGE_READ)
        many = [row(number + at, mine, status=("success", "error")[at // 2 % 2]) for at in range(30)]
        number += 30
        # Many were granted at one moment.
        same = START + timedelta(minutes=number - 10)
        many += [row(number + at, mine, granted_at=same, status="error") for at in range(7)]
        number += 7
        await written(world.connection, many)
        all_at_once = await world.numbers(headers, f"?limit=1000{query}")
        assert len(all_at_once) >= 7
        found: list[int] = []
        cursor = ""
        while True:
            page = await world.page(headers, f"?limit=4{query}{cursor}")
            assert page["scanned_to"] is None
            found += [uuid.UUID(each["ticket_id"]).int - 1 for each in page["data"]]
            # One that is newer.
            await written(world.connection, [row(number, mine, status="error")])
            number += 1
            if not page["has_more"]:
                break
            cursor = f"&cursor={page['next_cursor']}"
        assert page["next_cursor"] is None
        assert found == all_at_once, query


async def test_a_cursor_goes_with_its_filters_and_a_broken_one_is_refused(world: World) -> None:
    mine, headers = await world.key("mine", Scope.USAGE_READ)
    _, other = await world.key("other", Scope.USAGE_READ)
    await written(world.connection, [row(number, mine) for number in range(6)])
    cursor = (await world.page(headers, "?limit=2&provider=p1"))["next_cursor"]
    assert await world.numbers(headers, f"?provider=p1&cursor={cursor}") == [1]
    # The size of a page is no filter.
    assert await world.numbers(headers, f"?limit=1&provider=p1&cursor={cursor}") == [1]
    changed = chr(ord(cursor[20]) ^ 1)
    for key, query in (
        (headers, f"provider=p0&cursor={cursor}"),
        (headers, f"cursor={cursor}"),
        (headers, f"provider=p1&corrections=all&cursor={cursor}"),
        (other, f"provider=p1&cursor={cursor}"),
        (headers, f"provider=p1&cursor={cursor[:-1]}"),
        (headers, f"provider=p1&cursor={cursor[:20]}{changed}{cursor[21:]}"),
        (headers, f"provider=p1&cursor={cursor}A"),
        (headers, "provider=p1&cursor=x"),
        (headers, "provider=p1&cursor=%C3%A9"),
    ):
        assert await world.refused(key, f"/v1/invocations?{query}") == (400, "invalid_request", "cursor"), query


async def test_a_page_whose_time_is_over_says_how_far_it_came(database_url: str) -> None:
    async with opened(database_url, log.Bounds(sizes=(2, 3), page_s=0.0)) as world:
        mine, headers = await world.key("mine", Scope.USAGE_READ)
        await written(
            world.connection, [row(number, mine, skill="rare" if number == 1 else None) for number in range(9)]
        )
        page = await world.page(headers, "?skill=rare&limit=1")
        assert (page["data"], page["has_more"]) == ([], True)
        # Pieces of two rows, of which a page has the time for one.
        assert page["scanned_to"] == "2026-03-31T22:07:00Z"
        found = []
        while page["has_more"]:
            page = await world.page(headers, f"?skill=rare&limit=1&cursor={page['next_cursor']}")
            found += page["data"]
        assert [each["skill"] for each in found] == ["rare"]


async def test_what_cannot_be_meant_is_refused_by_its_name(world: World) -> None:
    _, headers = await world.key("mine", Scope.USAGE_READ)
    for query, param in (
        ("key=x", "key"),
        ("session=", "session"),
        ("status=lost", "status"),
        ("status=error,", "status"),
        ("state=free", "state"),
        ("tag=a", "tag"),
        ("tag=:a", "tag"),
        ("tag=a:b&tag=a:c", "tag"),
        ("session=a&session=b", "session"),
        ("fallback=1", "fallback"),
        ("min_usd=-1", "min_usd"),
        ("min_usd=1e3", "min_usd"),
        ("min_total_ms=4294967296", "min_total_ms"),
        ("from=yesterday", "from"),
        ("from=2026-02-30", "from"),
        ("from=2026-03-31T22:00:00", "from"),
        ("to=1066-10-14", "to"),
        ("from=2026-04-02&to=2026-04-01", "to"),
        ("corrections=some", "corrections"),
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("format=xml", "format"),
        ("format=csv&limit=5", "limit"),
        ("format=jsonl&cursor=x", "cursor"),
        ("sort=up", "sort"),
    ):
        assert await world.refused(headers, f"/v1/invocations?{query}") == (400, "invalid_request", param), query


async def test_an_export_has_the_whole_range_and_shows_that_it_is_whole(world: World) -> None:
    mine, headers = await world.key("mine", Scope.USAGE_READ)
    odd = 'two\nlines, "quoted"'
    await written(
        world.connection,
        [
            *(row(number, mine) for number in range(1100)),
            row(1100, mine, session_id="=1+1", tool=odd, tags='{"a": "=b"}', flags='["odd"]'),
        ],
    )
    lines = (await world.client.get("/v1/invocations?format=jsonl", headers=headers)).text.splitlines()
    assert json.loads(lines[-1]) == {"end": True, "rows": 1101}
    rows = [json.loads(line) for line in lines[:-1]]
    assert [uuid.UUID(each["ticket_id"]).int - 1 for each in rows] == list(range(1100, -1, -1))
    assert rows[0]["session_id"] == "=1+1"
    answer = await world.client.get("/v1/invocations", headers={**headers, "accept": "text/csv"})
    assert answer.headers["content-type"] == "text/csv; charset=utf-8; header=present"
    cells = list(csv.DictReader(io.StringIO(answer.text, newline="")))
    assert len(cells) == 1101
    assert list(cells[0]) == list(invocations.COLUMNS)
    assert (cells[0]["session_id"], cells[0]["tool"]) == ("'=1+1", odd)
    assert (cells[0]["tags"], cells[0]["flags"], cells[0]["run_id"]) == ('{"a":"=b"}', '["odd"]', "")
    assert [each["usd"] for each in cells] == [each["usd"] for each in rows]
    few = await world.client.get("/v1/invocations?format=csv&provider=p1&to=2026-03-31T22:03:00Z", headers=headers)
    assert len(few.text.splitlines()) == 2


class Breaking:
    """A log whose database is gone when half is told."""

    async def page(self, search, *, after, limit, corrections, wait_s=None) -> log.Page:
        if after is not None:
            raise StoreUnavailable("gone")
        found = {**dict.fromkeys(invocations.COLUMNS), "usd": "1"}
        return log.Page(rows=[found], next=log.Place(START, uuid.UUID(int=1), 0))

    async def attempt(self, ticket_id, *, key_id) -> list[dict[str, Any]]:
        raise StoreUnavailable("gone")

    async def stats(self, search, *, group_by, order, limit) -> log.Stats:
        raise log.TooManyReaders


async def read(answer: httpx.Response, received: bytearray) -> None:
    async for piece in answer.aiter_bytes():
        received += piece


async def test_a_part_never_passes_for_the_whole(database_url: str) -> None:
    async with (
        database.open_pool(database_url, name="test-keys", size=2) as pool,
        Keys.open(pool) as keys,
        rest.serve(rest.RestSettings(port=0), invocations.routes(reader=Breaking()), keys) as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False) as client,
    ):
        _, secret = await keys.create("mine", (Scope.USAGE_READ,))
        headers = {"authorization": f"Bearer {secret}"}
        for wanted in ("csv", "jsonl"):
            received = bytearray()
            async with client.stream("GET", f"/v1/invocations?format={wanted}", headers=headers) as answer:
                assert answer.status_code == 200
                with pytest.raises(httpx.RemoteProtocolError):
                    await read(answer, received)
            assert b'"end"' not in received
        lost = await client.get(f"/v1/invocations/{uuid.uuid4()}", headers=headers)
        assert (lost.status_code, lost.json()["error"]["code"]) == (503, "control_store_unavailable")
        busy = await client.get("/v1/stats", headers=headers)
        assert (busy.status_code, busy.json()["error"]["code"], busy.headers["retry-after"]) == (429, "queue_full", "5")


def nearest(values: Sequence[int], share: float) -> int | None:
    """The percentile as a value that there is."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else None


async def test_sums_are_those_of_the_rows_that_hold(world: World) -> None:
    mine, headers = await world.key("mine", Scope.USAGE_READ)
    theirs, _ = await world.key("theirs", Scope.USAGE_READ)
    _, admin = await world.key("admin", Scope.USAGE_READ, Scope.ADMIN)
    statuses = ("success", "success", "error", "timeout", "cancelled", "success", "not_dispatched")
    rows = [
        row(
            number,
            mine if number % 3 else theirs,
            status=statuses[number % 7],
            is_fallback=number % 4 == 0,
            retries=number % 5 // 4,
            queued_ms=number * 7 % 50,
            first_byte_ms=None if number % 6 == 0 else number * 13 % 200,
            tags=json.dumps({"team": f"t{number % 2}"}) if number % 9 else None,
            output_total=number,
        )
        for number in range(40)
    ]
    lost = {"state": "unknown", "usd": None, "status": "unknown"}
    rows[10] |= {**lost, "upper_bound_usd": Decimal("0.125")}
    rows[11] |= lost
    rows[12] |= lost
    fixed = rows[12] | {"correction": 1, "state": "charged", "usd": Decimal("0.5"), "status": "success"}
    await written(world.connection, [*rows, fixed])
    rows[12] = fixed

    def sums(some: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        good = [each for each in some if each["status"] == "success"]
        times = {
            name: [each[name] for each in good if each[name] is not None]
            for name in ("first_byte_ms", "total_ms", "queued_ms")
        }
        count = len(some)
        return {
            "attempts": count,
            "requests": len({(each["key_id"], each["debit_id"]) for each in some}),
            "charged_usd": sum((each["usd"] or 0 for each in some), Decimal(0)),
            "unknown_attempts": sum(each["state"] == "unknown" for each in some),
            "output_tokens": sum(each["output_total"] for each in some),
            "by_status": {
                name: sum(each["status"] == name for each in some)
                for name in ("success", "error", "timeout", "cancelled", "not_dispatched", "unknown")
            },
            "error_rate": round(sum(each["status"] in {"error", "timeout"} for each in some) / count, 6),
            "cancel_rate": round(sum(each["status"] == "cancelled" for each in some) / count, 6),
            "fallback_rate": round(sum(each["is_fallback"] for each in some) / count, 6),
            "retry_rate": round(sum(each["retries"] > 0 for each in some) / count, 6),
            "unknown_rate": round(sum(each["state"] == "unknown" for each in some) / count, 6),
            **{
                name: {f"p{share}": nearest(values, share / 100) for share in (50, 90, 99)}
                for name, values in times.items()
            },
        }

    def told(entry: Mapping[str, Any]) -> dict[str, Any]:
        wanted = sums(rows)
        return {name: Decimal(entry[name]) if name == "charged_usd" else entry[name] for name in wanted}

    async def asked(query: str, key: Mapping[str, str] = admin) -> dict[str, Any]:
        answer = await world.client.get(f"/v1/stats?from=2026-04-01&to=2026-04-01{query}", headers=key)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    everything = await asked("")
    assert told(everything["all"]) == sums(rows)
    assert everything["all"]["unknown_upper_bound_usd"] == "0.125"
    assert everything["all"]["unbounded_attempts"] == 1
    assert (everything["from"], everything["to"]) == ("2026-03-31T22:00:00Z", "2026-04-01T22:00:00Z")
    assert (everything["groups"], everything["groups_in_all"]) == ([], 0)
    assert told((await asked("", headers))["all"]) == sums([each for each in rows if each["key_id"] == mine])
    assert told((await asked("&provider=p1&status=success"))["all"]) == sums(
        [each for each in rows if each["provider"] == "p1" and each["status"] == "success"]
    )
    by_three = await asked("&group_by=key,tag:team,status&order=count")
    assert told(by_three["all"]) == sums(rows)
    counts = [group["attempts"] for group in by_three["groups"]]
    assert counts == sorted(counts, reverse=True)
    assert by_three["groups_in_all"] == len(counts) > 8
    for group in by_three["groups"]:
        some = [
            each
            for each in rows
            if str(each["key_id"]) == group["key"]
            and json.loads(each["tags"] or "{}").get("team") == group["tag:team"]
            and each["status"] == group["status"]
        ]
        assert told(group) == sums(some)
    first = await asked("&group_by=hour&limit=1")
    assert (first["groups"][0]["hour"], first["groups_in_all"]) == ("2026-03-31T22:00:00Z", 1)
    dear = (await asked("&group_by=provider,day&limit=1"))["groups"]
    assert [(group["provider"], group["day"]) for group in dear] == [("p0", "2026-04-01")]
    # A range that nothing is in, and the last day where nothing is said.
    empty = (await world.client.get("/v1/stats?group_by=skill", headers=admin)).json()
    assert (empty["all"]["attempts"], empty["all"]["error_rate"], empty["groups"]) == (0, None, [])
    assert empty["all"]["total_ms"] == {"p50": None, "p90": None, "p99": None}
    assert empty["to"] is None
    until = datetime.now(UTC) - timedelta(hours=24)
    assert abs(datetime.fromisoformat(empty["from"]) - until) < timedelta(hours=1)
    for query, param in (
        ("group_by=color", "group_by"),
        ("group_by=tag:", "group_by"),
        ("group_by=key,key", "group_by"),
        ("group_by=key,run,step,tool", "group_by"),
        ("order=name", "order"),
        ("cursor=x", "cursor"),
    ):
        assert await world.refused(admin, f"/v1/stats?{query}") == (400, "invalid_request", param)


async def test_a_range_that_is_too_large_is_told(database_url: str) -> None:
    async with opened(database_url, log.Bounds(stats_s=0.001, piece_s=0.001)) as world:
        mine, headers = await world.key("mine", Scope.USAGE_READ)
        await world.connection.execute(
            "insert into control.invocation (ticket_id, correction, granted_at, settled_at, day, key_id, debit_id,"
            " attempt, group_id, state, usd, status) select gen_random_uuid(), 0, now() - n * interval '1 s', now(),"
            " now()::date, $1, 'd' || n, 1, 'g', 'charged', 1, 'success' from generate_series(1, 20000) n",
            mine,
        )
        refused = await world.refused(headers, "/v1/stats?group_by=session")
        assert refused == (400, "range_too_wide", "from")


async def test_readings_wait_for_each_other_and_not_for_ever(database_url: str) -> None:
    async with (
        database.open_pool(database_url, name="test-log", size=1) as pool,
        database.open_connection(database_url, name="test") as connection,
    ):
        reader = log.InvocationLog(pool, zone="UTC", readers=1, bounds=log.Bounds(wait_s=0.05))
        async with reader._reading({}, 10.0):
            with pytest.raises(log.TooManyReaders):
                await reader.page(log.Search(), after=None, limit=1, corrections=False)
        assert (await reader.page(log.Search(), after=None, limit=1, corrections=False)).rows == []
        # It has left its transaction.
        idle = "state = 'idle in transaction' and datname = current_database()"
        assert await connection.fetchval(f"select count(*) from pg_stat_activity where {idle}") == 0
