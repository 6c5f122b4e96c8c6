"""
What is told of usage, over a real ledger: whatever it is grouped by, the groups add up to what is told without.

The settlements and corrections are made by the ledger's own function, as a settlement calls it.
"""

from __future__ import annotations

import asyncio
import csv
import io
import json
import random
import re
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from importlib.resources import files
from typing import Any

import httpx
import msgspec
import pytest

from gateway import database
from gateway.call import Caller, Scope
from gateway.errors import Unauthenticated
from gateway.rest import usage
from gateway.rest.app import RestSettings, serve
from metering.grouping import DIMENSIONS, Grouped, Question
from metering.ledger import GROUPS_TIMEOUT_MS, Ledger

FIRST = date(2026, 9, 28)
DAYS = 40
KEYS = [uuid.UUID(int=n) for n in (1, 2, 3)]
ADDED = (
    "charged_usd",
    "attempts",
    "unknown_attempts",
    "unknown_upper_bound_usd",
    "unbounded_attempts",
    "reserved_attempts",
    "reserved_usd",
    "unbounded_reserved",
    "input_tokens",
    "output_tokens",
)
Attempt = dict[str, Any]

_RECORD = """
select control.record_v2($1::smallint, array[row($2::uuid, $3::text, $4::text, $5::timestamptz, $6::date, $7::uuid,
                                                 $8::text, $9::int, 'g', $10::text::jsonb)::control.ledger_line])
"""
_AT_WORK = """
insert into control.ticket (ticket_id, group_id, number, class, model, owner_id, key_id, debit_id, attempt, state,
                            waits_for_cooldown, execution_limit, isolation, queued_at, queue_deadline, intent,
                            granted_at, hard_deadline, quarantined_until, day, endpoint)
values ($1, 'g', $2, 0, 'm', $1, $3, $4, 1, $5, false, '1 minute', '1 minute', $6, $6, $7, $6, $6, $6, $8, 'e')
"""


class World:
    """A ledger, and by the side what was put into it."""

    def __init__(self, pool: database.Pool) -> None:
        self.pool = pool
        self.ledger = Ledger(pool, zone="Europe/Berlin")
        #: Every attempt as it stands.
        self.attempts: list[Attempt] = []

    async def settle(self, attempt: Attempt, state: str, record: Mapping[str, Any], *, shard: int = 0) -> None:
        """The settlement of an attempt, or its correction."""
        was = attempt.get("state", "open")
        intent = attempt["intent"] if was == "open" else {}
        record = {"status": "success", "ended": "complete", **record}
        facts = msgspec.json.encode({**intent, **record}).decode()
        await self.pool.execute(
            _RECORD,
            shard,
            attempt["ticket_id"],
            was,
            state,
            attempt["granted_at"],
            attempt["day"],
            attempt["key"],
            attempt["ticket_id"].hex,
            1,
            facts,
        )
        if was == "open":
            self.attempts.append(attempt)
        attempt["state"], attempt["record"] = state, {**attempt.get("record", {}), **record}

    async def begin(self, attempt: Attempt, state: str = "active") -> None:
        """An attempt that is not settled."""
        await self.pool.execute(
            _AT_WORK,
            attempt["ticket_id"],
            len(self.attempts),
            attempt["key"],
            attempt["ticket_id"].hex,
            state,
            attempt["granted_at"],
            msgspec.json.encode(attempt["intent"]).decode(),
            attempt["day"],
        )
        if state != "queued":
            attempt["state"] = "open"
            self.attempts.append(attempt)


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[World]:
    async with database.open_pool(url, name="test", size=4) as pool:
        yield World(pool)


def made(day: date = FIRST, key: uuid.UUID = KEYS[0], **intent: Any) -> Attempt:
    return {
        "ticket_id": uuid.uuid4(),
        "granted_at": datetime(day.year, day.month, day.day, 12, tzinfo=UTC),
        "day": day,
        "key": key,
        "intent": {"provider": "p", "requested_model": "m", "upstream_model": "u", "transport": "rest", **intent},
    }


def drawn(rng: random.Random) -> Attempt:
    def perhaps(**values: Any) -> dict[str, Any]:
        return {name: value for name, value in values.items() if rng.random() < 0.6}

    tags = perhaps(team=rng.choice(["search", "=ads", "ünï"]), env=rng.choice(["prod", ""]))
    return made(
        FIRST + timedelta(days=rng.randrange(DAYS)),
        rng.choice(KEYS),
        provider=rng.choice(["openai", "local"]),
        requested_model=rng.choice(["large", "small, {x}"]),
        upstream_model=rng.choice(["u1", "u2"]),
        transport=rng.choice(["rest", "grpc"]),
        **perhaps(
            run_id=rng.choice(["r1", 'r"2']),
            step_id=rng.choice(["s1", "s2"]),
            session_id=rng.choice(["one", "two"]),
            skill="k",
            tool="t",
            role="planner",
            upper_bound_usd=money(rng),
        ),
        **({"tags": tags} if tags else {}),
    )


def money(rng: random.Random) -> str:
    return f"{rng.randrange(10**15)}e-12"


async def lived(world: World, rng: random.Random, size: int) -> None:
    """Attempts of every kind, some of them corrected later, some at work."""
    for _ in range(size):
        attempt = drawn(rng)
        tokens = {"input_total": rng.randrange(1000), "output_total": rng.randrange(1000)}
        match rng.randrange(6):
            case 0:
                await world.begin(attempt, rng.choice(["active", "quarantined"]))
            case 1:
                await world.settle(attempt, "zero", {"usd": "0", "status": "error"}, shard=rng.randrange(3))
            case 2 | 3:
                bound = {"upper_bound_usd": money(rng)} if rng.random() < 0.5 else {}
                record = {**bound, "status": "unknown", **(tokens if rng.random() < 0.5 else {})}
                await world.settle(attempt, "unknown", record, shard=rng.randrange(3))
                if rng.random() < 0.6:
                    state = rng.choice(["charged", "zero"])
                    usd = {"usd": money(rng)} if state == "charged" else {}
                    await world.settle(attempt, state, {**usd, **tokens}, shard=rng.randrange(3))
            case _:
                await world.settle(attempt, "charged", {"usd": money(rng), **tokens}, shard=rng.randrange(3))
    await world.begin(drawn(rng), "queued")


def value(attempt: Attempt, word: str) -> str | None:
    """What an attempt is of, told from what was put in."""
    intent = attempt["intent"]
    if word.startswith("tag:"):
        found = intent.get("tags", {}).get(word[4:])
        return None if found is None else str(found)
    named = {"model": "requested_model", "run": "run_id", "step": "step_id", "session": "session_id"}
    match word:
        case "day":
            return str(attempt["day"])
        case "month":
            return str(attempt["day"])[:7]
        case "key":
            return str(attempt["key"])
        case "status":
            return "open" if attempt["state"] == "open" else str(attempt["record"]["status"])
        case _:
            found = intent.get(named.get(word, word))
            return None if found is None else str(found)


def sums(attempts: list[Attempt]) -> dict[str, Any]:
    """What the sums of these should be."""
    added: Counter[str] = Counter()
    usd = dict.fromkeys(("charged_usd", "unknown_upper_bound_usd", "reserved_usd"), Decimal(0))
    for attempt in attempts:
        record = {**attempt["intent"], **attempt.get("record", {})}
        bound = record.get("upper_bound_usd")
        if attempt["state"] == "open":
            usd["reserved_usd"] += Decimal(bound or 0)
            added.update(reserved_attempts=1, unbounded_reserved=bound is None)
            continue
        added.update(attempts=1, input_tokens=record.get("input_total", 0), output_tokens=record.get("output_total", 0))
        if attempt["state"] == "charged":
            usd["charged_usd"] += Decimal(record["usd"])
        if attempt["state"] == "unknown":
            usd["unknown_upper_bound_usd"] += Decimal(bound or 0)
            added.update(unknown_attempts=1, unbounded_attempts=bound is None)
    return {name: usd[name] if name in usd else added[name] for name in ADDED}


def exact(told: Mapping[str, Any]) -> dict[str, Any]:
    return {name: Decimal(told[name]) if name.endswith("_usd") else told[name] for name in ADDED}


def grouped(attempts: list[Attempt], group_by: tuple[str, ...]) -> dict[tuple[str | None, ...], list[Attempt]]:
    found: dict[tuple[str | None, ...], list[Attempt]] = {}
    for attempt in attempts:
        tags = attempt["intent"].get("tags", {}).items() if "tag" in group_by else [("", "")]
        for name, tag in tags:
            names = tuple(f"{name}:{tag}" if word == "tag" else value(attempt, word) for word in group_by)
            found.setdefault(names, []).append(attempt)
    return found


def ordered(names: tuple[str | None, ...]) -> list[tuple[bool, str]]:
    return [(name is None, name or "") for name in names]


async def asked(world: World, question: Question) -> str:
    """Asks in pages of three, and compares each figure with what it should be; answers the source."""
    own = [
        attempt
        for attempt in world.attempts
        if (question.first or FIRST) <= attempt["day"] <= (question.last or date.max)
        and question.own in {None, attempt["key"]}
        and question.key in {None, attempt["key"]}
        and all(value(attempt, name) == wanted for name, wanted in question.values.items())
        and (question.tag is None or value(attempt, f"tag:{question.tag[0]}") == question.tag[1])
    ]
    expected = grouped(own, question.group_by)
    told: list[tuple[tuple[str | None, ...], dict[str, Any]]] = []
    page = await world.ledger.grouped(question)
    while True:
        assert exact(page.sum) == sums(own), question
        told += [(names, exact(figures)) for names, figures in page.groups]
        if not page.more:
            break
        assert len(page.groups) == question.limit
        page = await world.ledger.grouped(msgspec.structs.replace(question, after=page.groups[-1][0]))
    assert dict(told) == {names: sums(attempts) for names, attempts in expected.items()}, question
    assert [names for names, _ in told] == sorted(expected, key=ordered), question
    if "tag" not in question.group_by:
        for name in ADDED:
            assert sum(figures[name] for _, figures in told) == exact(page.sum)[name], (name, question)
    return page.source


@pytest.mark.parametrize("seed", [1, 2])
async def test_whatever_usage_is_grouped_by_the_groups_are_exact_and_add_up_to_the_sum(database_url, seed):
    rng = random.Random(seed)
    async with opened(database_url) as world:
        await lived(world, rng, 120)
        whole = Question(first=FIRST, last=FIRST + timedelta(days=DAYS), limit=3)
        sources: Counter[str] = Counter()
        words = [*DIMENSIONS, "tag:team", "tag:env"]
        several: list[tuple[str, ...]] = [("run", "step"), ("month", "tag:team"), ("step",), ()]
        asking = [msgspec.structs.replace(whole, group_by=(word,), limit=1000) for word in words]
        asking += [msgspec.structs.replace(whole, group_by=group_by) for group_by in several]
        for _ in range(60):
            some = rng.choice([words[:6], [*words[:3], "run", "step"], [*words[:3], rng.choice(words[-3:])], words])
            first = FIRST + timedelta(days=rng.randrange(DAYS))
            example = rng.choice(world.attempts)
            known = {word: found for word in words[3:13] if (found := value(example, word)) is not None}
            narrowed = rng.sample(sorted(known), k=min(len(known), rng.choice([0, 0, 1, 2])))
            tags = example["intent"].get("tags", {})
            asking.append(
                Question(
                    group_by=tuple(rng.sample(some, k=rng.randrange(min(len(some), 4) + 1))),
                    first=rng.choice([FIRST, first]),
                    last=first + timedelta(days=rng.randrange(DAYS)),
                    own=rng.choice([None, None, *KEYS]),
                    key=rng.choice([None, None, None, *KEYS]),
                    values={word: known[word] for word in narrowed if word != "transport"},
                    tag=rng.choice([None, None, next(iter(tags.items()), None)]),
                    limit=rng.choice([3, 1000]),
                )
            )
        for question in asking:
            try:
                sources[await asked(world, question)] += 1
            except AssertionError as error:
                error.add_note(f"seed {seed}")
                raise
        assert sources["counters"] > 10
        assert sources["log"] > 10
        # Without groups, over all days, it is the same.
        plain = await world.ledger.usage(session_id=None, day=FIRST, key_id=None, session_key=KEYS[0])
        assert exact(plain["total"]) == sums(world.attempts)
        assert exact(plain["day"]) == sums([one for one in world.attempts if one["day"] == FIRST])
        own = await world.ledger.usage(session_id="one", day=FIRST, key_id=KEYS[0], session_key=KEYS[0])
        mine = [one for one in world.attempts if one["key"] == KEYS[0]]
        assert exact(own["total"]) == sums(mine)
        assert exact(own["session"]) == sums([one for one in mine if value(one, "session") == "one"])


# ------------------------------------------------------------------ over HTTP


class Told:
    """The ledger, as the endpoint reads it."""

    def __init__(self, ledger: Ledger, timeout_ms: int) -> None:
        self.zone = ledger.zone
        self._ledger = ledger
        self._timeout_ms = timeout_ms

    async def grouped(self, question: Question) -> Grouped:
        return await self._ledger.grouped(question, timeout_ms=self._timeout_ms)

    async def read(
        self, *, session_id: str | None, day: date | None, key_id: uuid.UUID | None, session_key: uuid.UUID
    ) -> Mapping[str, object]:
        return await self._ledger.usage(session_id=session_id, day=day, key_id=key_id, session_key=session_key)


class InMemory:
    """An administrator, and a key that is none."""

    callers: Mapping[str | None, Caller] = {
        "admin": Caller(key_id=KEYS[2], name="admin", scopes=frozenset(Scope)),
        "own": Caller(key_id=KEYS[0], name="own", scopes=frozenset({Scope.USAGE_READ})),
    }

    async def authenticate(self, token: str | None) -> Caller:
        if token not in self.callers:
            raise Unauthenticated
        return self.callers[token]


@asynccontextmanager
async def served(world: World, timeout_ms: int = GROUPS_TIMEOUT_MS) -> AsyncIterator[httpx.AsyncClient]:
    endpoints = usage.routes(usage=Told(world.ledger, timeout_ms))
    async with serve(RestSettings(port=0), endpoints, InMemory()) as server:
        url = f"http://127.0.0.1:{server.port}"
        async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
            yield client


async def test_usage_by_group_over_http(database_url):
    async with opened(database_url) as world, served(world) as client:
        for key, model in ((KEYS[0], "=SUM(A1)"), (KEYS[0], 'b, "c"'), (KEYS[1], 'b, "c"')):
            attempt = made(key=key, requested_model=model, session_id="s", run_id="r", tags={"team": "search"})
            await world.settle(attempt, "charged", {"usd": "0.5", "input_total": 3, "output_total": 4})
        await world.settle(
            made(FIRST + timedelta(1), run_id="r"), "unknown", {"upper_bound_usd": "2", "status": "timeout"}
        )
        await world.begin(made(FIRST, upper_bound_usd="0.25"))

        async def ask(params: Mapping[str, str], key: str = "admin", **headers: str) -> httpx.Response:
            return await client.get("/v1/usage", params=params, headers={"authorization": f"Bearer {key}", **headers})

        days = {"from": str(FIRST), "to": str(FIRST + timedelta(2))}
        by_model = {**days, "group_by": "model"}
        told = (await ask(by_model)).json()
        groups = told.pop("groups")
        assert [(group["model"], group["charged_usd"], group["attempts"]) for group in groups] == [
            ("=SUM(A1)", "0.5", 1),
            ('b, "c"', "1", 2),
            ("m", "0", 1),
        ]
        assert (groups[2]["unknown_upper_bound_usd"], groups[2]["reserved_usd"]) == ("2", "0.25")
        assert exact(told.pop("sum")) == sums(world.attempts)
        assert told == {
            **days,
            "zone": "Europe/Berlin",
            "group_by": ["model"],
            "source": "counters",
            "complete": True,
            "kept_from": None,
            "next_cursor": None,
        }

        # Page by page it is the same.
        paged, params = [], {**by_model, "limit": "2"}
        while True:
            page = (await ask(params)).json()
            paged += page["groups"]
            if page["next_cursor"] is None:
                break
            params = {**by_model, "limit": "2", "cursor": page["next_cursor"]}
        assert paged == groups

        # As lines, by the parameter or by what is accepted.
        for answer in (await ask({**by_model, "format": "jsonl"}), await ask(by_model, accept="application/jsonl")):
            *lines, last = map(json.loads, answer.text.splitlines())
            assert lines == groups
            assert (last["end"], last["rows"], last["complete"], exact(last["sum"])) == (
                True,
                3,
                True,
                sums(world.attempts),
            )
        for answer in (await ask({**by_model, "format": "csv"}), await ask(by_model, accept="text/csv")):
            assert answer.headers["transfer-encoding"] == "chunked"
            rows = list(csv.DictReader(io.StringIO(answer.text, newline=""), strict=True))
            assert [row["model"] for row in rows] == ["'=SUM(A1)", 'b, "c"', "m"]
            assert [row["charged_usd"] for row in rows] == ["0.5", "1", "0"]
        rows = list(csv.DictReader(io.StringIO((await ask({"format": "csv", "session": "s"})).text, newline="")))
        assert [(row["of"], row["charged_usd"]) for row in rows] == [("session", "0"), ("day", "0"), ("total", "1.5")]

        # Another key sees what it used itself, whatever it names.
        own = (await ask(by_model, "own")).json()
        assert exact(own["sum"]) == sums([one for one in world.attempts if one["key"] == KEYS[0]])
        assert (await ask({**days, "key": str(KEYS[1])}, "own")).json()["groups"] == []
        both = (await ask({**days, "session": "s"})).json()
        assert (both["source"], both["sum"]["charged_usd"], len(both["groups"])) == ("log", "1.5", 1)

        # One day, and none said: this month up to today, in which nothing was used.
        one = (await ask({"day": str(FIRST), "group_by": "day"})).json()
        assert (one["from"], one["to"], one["sum"]["charged_usd"]) == (str(FIRST), str(FIRST), "1.5")
        none = (await ask({"group_by": "run"})).json()
        assert (none["from"], none["groups"]) == (none["to"][:8] + "01", [])
        refused = await ask({"from": "2026-02-02", "to": "2026-02-01"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "from")


async def test_what_the_log_cannot_add_up_in_time_is_refused_and_says_what_to_do(database_url):
    async with opened(database_url) as world, served(world, 200) as client:
        await world.settle(made(), "charged", {"usd": "1"})
        async with world.pool.acquire() as holder, holder.transaction():
            # Whoever reads the log waits for as long as this holds it.
            await holder.execute("lock table control.invocation in access exclusive mode")
            answers = [
                await client.get(
                    "/v1/usage",
                    params={"group_by": "skill", "from": str(FIRST), "to": str(FIRST), "format": form},
                    headers={"authorization": "Bearer admin"},
                )
                for form in ("json", "jsonl")
            ]
        for answer in answers:
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "range_too_wide")
            assert "narrow" in answer.json()["error"]["message"]


async def test_what_the_log_has_no_longer_is_told(database_url):
    async with opened(database_url) as world:
        for n in range(4):
            for _ in range(2):
                await world.settle(made(FIRST + timedelta(n), skill="k", run_id="r"), "charged", {"usd": "1"})
        asking = Question(group_by=("skill",), first=FIRST, last=FIRST + timedelta(10))

        async def kept(first: int = 0) -> tuple[str, int | None]:
            told = await world.ledger.grouped(msgspec.structs.replace(asking, first=FIRST + timedelta(first)))
            since = None if told.kept_from is None else (told.kept_from - FIRST).days
            return told.sum["charged_usd"], since

        assert await kept() == ("8", None)
        # Up to the middle of a day, a whole day, all.
        await world.pool.execute(
            "delete from control.invocation where ctid = any (array(select ctid from control.invocation limit 3))"
        )
        assert [await kept(), await kept(1), await kept(2)] == [("5", 2), ("5", 2), ("4", None)]
        await world.pool.execute("delete from control.invocation where day < $1", FIRST + timedelta(2))
        assert [await kept(), await kept(2)] == [("4", 2), ("4", None)]
        await world.pool.execute("delete from control.invocation")
        assert [await kept(), await kept(4)] == [("0", 4), ("0", None)]
        # The counters have all.
        told = await world.ledger.grouped(msgspec.structs.replace(asking, group_by=("run",)))
        assert (told.sum["charged_usd"], told.kept_from) == ("8", None)


async def test_what_was_used_before_it_was_counted_is_counted_by_the_migration(database_url):
    counted = (
        "select kind, name, day, key_id, names, sum(charged_usd), sum(attempts), sum(unknown_attempts),"
        " sum(unknown_upper_bound_usd), sum(unbounded_attempts), sum(input_tokens), sum(output_tokens)"
        " from control.counter where day is not null group by 1, 2, 3, 4, 5 order by 1, 2"
    )
    migration = files("metering").joinpath("sql", "migrations", "0004_counts.sql").read_text()
    [backfill] = re.findall(r"^insert into control\.counter.*?;", migration, re.MULTILINE | re.DOTALL)
    async with opened(database_url) as world:
        rng = random.Random(4)
        told: dict[str, Any] = {"run_id": "r", "step_id": "s", "tags": {"team": "search"}}
        for attempt in [*(drawn(rng) for _ in range(30)), made(**told), made(step_id="alone")]:
            await world.settle(attempt, rng.choice(["charged", "zero", "unknown"]), {"usd": "0.25", "input_total": 7})
        before = await world.pool.fetch(counted)
        assert {row["kind"] for row in before} == {"route_day", "run_day", "step_day", "tag_day"}
        await world.pool.execute("delete from control.counter where day is not null")
        await world.pool.execute(backfill)
        assert await world.pool.fetch(counted) == before


async def test_a_sum_is_of_one_moment_while_attempts_are_settled(database_url):
    """Each attempt is at work, or charged: never both, and never neither."""
    async with opened(database_url) as world:
        attempts = [made(run_id="r", upper_bound_usd="1") for _ in range(40)]
        for attempt in attempts:
            await world.begin(attempt)

        async def settle() -> None:
            for attempt in attempts:
                async with world.pool.acquire() as connection, connection.transaction():
                    await connection.execute("delete from control.ticket where ticket_id = $1", attempt["ticket_id"])
                    await connection.execute(
                        _RECORD,
                        0,
                        attempt["ticket_id"],
                        "open",
                        "charged",
                        attempt["granted_at"],
                        attempt["day"],
                        attempt["key"],
                        attempt["ticket_id"].hex,
                        1,
                        '{"usd": "1", "status": "success", "run_id": "r"}',
                    )

        settling = asyncio.create_task(settle())
        seen = set()
        while True:
            last = settling.done()
            for group_by in (("run",), ("skill",), ("tag",)):
                told = await world.ledger.grouped(Question(group_by=group_by, first=FIRST, last=FIRST))
                assert Decimal(told.sum["charged_usd"]) + Decimal(told.sum["reserved_usd"]) == len(attempts)
            plain = await world.ledger.usage(session_id=None, day=FIRST, key_id=None, session_key=KEYS[0])
            for sum_ in (plain["day"], plain["total"]):
                assert Decimal(sum_["charged_usd"]) + Decimal(sum_["reserved_usd"]) == len(attempts)
            seen.add(plain["total"]["reserved_attempts"])
            if last:
                break
        await settling
        assert 0 in seen
