"""
The hot statements read what they are about, however much has been written: on connections whose plans were made while
the tables were empty, on new ones, with statistics and without.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from decimal import Decimal
from typing import Final

import asyncpg
import msgspec
import pytest

from admission.ids import new_id
from admission.lease import Class, Demand, Ending, Fence, Lease, Settlement, Verdict
from admission.settings import AdmissionSettings, GroupSettings, ModelLimits
from admission.store import Store
from tests.integration.plans import Seen, Watched, faults

#: Slots are free and nobody waits.
USUAL: Final = "http://usual.test:80"
#: Slots are free; most wait for a model that is full, some in other queues, some behind a floor.
BUSY: Final = "http://busy.test:80"
#: All slots are taken and all wait in one queue.
LONG: Final = "http://long.test:80"
#: All slots and many of those that wait are past their time: the next admission reconciles.
DUE: Final = "http://due.test:80"

SLOTS: Final = 100
#: Queues of BUSY beside the one of the model that is full.
LANES: Final = 20
GIVEN: Final = AdmissionSettings(
    groups={
        USUAL: GroupSettings(concurrency=4 * SLOTS, queue=100_000),
        BUSY: GroupSettings(
            concurrency=SLOTS + 4,
            queue=100_000,
            requests_per_minute=1_000_000,
            models={"full": ModelLimits(concurrency=5), "m3": ModelLimits(tokens_per_minute=1_000_000)},
        ),
        LONG: GroupSettings(concurrency=SLOTS, queue=100_000),
        DUE: GroupSettings(concurrency=SLOTS, queue=100_000),
    },
    lease_s=3600,
    statement_s=60,
)

OWNER, TICKET, PAST, KEY = 1, 2, 3, 4


def made(kind: int, number: int) -> uuid.UUID:
    return uuid.UUID(f"{kind:08x}-0000-7000-8000-{number:012x}")


FILL: Final = """
create or replace function pg_temp.made(kind integer, number bigint) returns uuid language sql immutable as
$$ select (lpad(to_hex(kind), 8, '0') || '-0000-7000-8000-' || lpad(to_hex(number), 12, '0'))::uuid $$;

insert into control.owner (owner_id, expires_at, host, pid)
select pg_temp.made(1, n), now() + interval '1 hour', 'h', n from generate_series(0, 49) n on conflict do nothing;

insert into control.attempt (ticket_id, key_id, debit_id, attempt, group_id, owner_id, granted_at, day, state,
                             settled_at)
select pg_temp.made(3, n), pg_temp.made(4, n % 20), 'd' || n, 1, 'http://usual.test:80', pg_temp.made(1, n % 50), g.at,
       g.at::date, case when n % 100 = 0 then 'unknown' else 'charged' end, g.at
  from generate_series(0, {attempts} - 1) n, lateral (select now() - n * interval '80 days' / {attempts} as at) g;

insert into control.invocation (ticket_id, correction, granted_at, settled_at, day, key_id, debit_id, attempt, group_id,
                                state, usd, status, session_id, input_total, output_total)
select a.ticket_id, 0, a.granted_at, a.granted_at, a.day, a.key_id, a.debit_id, 1, a.group_id, a.state,
       case a.state when 'charged' then 0.01 end, case a.state when 'charged' then 'success' else 'unknown' end,
       's' || a.debit_id, 10, 20
  from control.attempt a;

insert into control.counter (kind, name, shard, charged_usd, attempts)
select 'session', pg_temp.made(4, n % 20) || '/sd' || n, n % 4, 1, 1 from generate_series(0, {attempts} / 4 - 1) n
union all select 'total', '', n, 1, 1 from generate_series(0, 3) n
union all select 'day', (current_date - d)::text, n, 1, 1 from generate_series(0, 3) n, generate_series(0, 89) d
union all select k.kind, k.name, n, 1, 1
  from generate_series(0, 3) n, generate_series(0, 19) key, generate_series(0, 89) d,
       lateral (values ('key_day', pg_temp.made(4, key) || '/' || (current_date - d))) k (kind, name);

-- Keys that have limits, with a little at work each.
select control.limit_key_v1(pg_temp.made(4, 100 + n),
                            '{{"concurrency": 1000, "requests_per_minute": 1000000, "tokens_per_minute": 1000000,
                               "budget_day_usd": "1e6", "budget_month_usd": "1e6", "budget_total_usd": "1e6"}}')
  from generate_series(0, 15) n;
insert into control.counter (kind, name, shard, charged_usd, attempts)
select 'key_day', pg_temp.made(4, 100 + n) || '/' || (current_date - d), shard, 1, 1
  from generate_series(0, 15) n, generate_series(0, 3) shard, generate_series(0, 89) d
union all
select 'key', pg_temp.made(4, 100 + n)::text, shard, 1, 1 from generate_series(0, 15) n, generate_series(0, 3) shard;

insert into control.fence (key_id, scope_id, run_id, number, seen_at)
select pg_temp.made(4, n % 20), 's', 'r' || n, 1, now() from generate_series(0, {attempts} / 20 - 1) n;

insert into control.ticket (ticket_id, group_id, endpoint, number, class, model, credential, owner_id, key_id, debit_id,
                            attempt, state, waits_for_cooldown, execution_limit, isolation, queued_at, queue_deadline,
                            intent, generation, granted_at, day, hard_deadline)
select pg_temp.made(2, g.base + n), g.name, g.name, n + 1, 0, case when n < 5 then 'full' else 'm' || n % 10 end, 'c',
       pg_temp.made(1, n % 4), pg_temp.made(4, n % 20), 'live' || g.base + n, 1, 'active', true, '1 hour', '5 s', now(),
       now(), '{{"session_id": "s"}}', 1, now(), current_date, now() + interval '1 hour'
  from (values (0, 'http://usual.test:80'), (1000, 'http://busy.test:80'), (2000, 'http://long.test:80'),
               (3000, 'http://due.test:80')) g (base, name),
       generate_series(0, 99) n;

-- Granted to this owner by another process, and not confirmed yet.
update control.ticket set state = 'granted', hard_deadline = null, grant_expires_at = now() + interval '1 hour',
                          owner_id = pg_temp.made(1, 0)
 where ticket_id between pg_temp.made(2, 80) and pg_temp.made(2, 95);

insert into control.ticket (ticket_id, group_id, endpoint, number, class, model, credential, owner_id, key_id, debit_id,
                            attempt, state, waits_for_cooldown, execution_limit, isolation, queued_at, queue_deadline,
                            intent)
select pg_temp.made(2, g.base + n), g.name, g.name, {first} + n, 0, 'full', 'c', pg_temp.made(1, n % 50),
       pg_temp.made(4, n % 20), 'live' || g.base + n, 1, 'queued', true, interval '60 s', interval '5 s',
       now(), now() + interval '1 hour', '{{}}'
  from (values (100000, 'http://busy.test:80'), (200000, 'http://long.test:80'),
               (400000, 'http://due.test:80')) g (base, name),
       generate_series(0, {waiting} - 1) n
union all
select pg_temp.made(2, 300000 + n), 'http://busy.test:80', 'http://busy.test:80', {first} + {waiting} + n, n % 2,
       'm' || n % 10, 'c' || n % {lanes} / 10, pg_temp.made(1, n % 50), pg_temp.made(4, n % 20), 'live' || 300000 + n,
       1, 'queued', true, interval '60 s', interval '5 s', now(), now() + interval '1 hour', '{{}}'
  from generate_series(0, {others} - 1) n;

update control.ticket set hard_deadline = now() where group_id = 'http://due.test:80' and number <= 50;
update control.ticket set state = 'quarantined', quarantined_until = now()
 where group_id = 'http://due.test:80' and state = 'active' and number > 50;
update control.ticket set queue_deadline = now() - interval '1 minute'
 where group_id = 'http://due.test:80' and state = 'queued' and number % 4 = 0;

update control.ticket set key_id = pg_temp.made(4, 100 + (number % 16)::integer), reserved_usd = 1
 where group_id = 'http://usual.test:80' and number <= 48;

-- Sessions, of which all but those of key 50 have a budget.
update control.ticket set session_id = 'sd' || number % 50, reserved_usd = 1 where key_id < pg_temp.made(4, 100);
insert into control.session_budget (key_id, session_id, own_usd)
select pg_temp.made(4, n % 20), 'sd' || n, 1e6 from generate_series(0, {attempts} / 4 - 1) n;

insert into control.floor (group_id, credential, model, kind, since, until)
select 'http://busy.test:80', 'c' || n, 'm' || n, 'rate_limit', now(), now() + interval '1 hour'
  from generate_series(0, 1) n;
"""

EMPTY: Final = """
delete from control.ticket; delete from control.attempt; delete from control.invocation; delete from control.counter;
delete from control.fence; delete from control.floor; delete from control.session_budget;
"""

#: Months of the ledger that are over, and tables that nothing but the test takes statistics of.
PREPARE: Final = """
do $$
declare
    m date;
    t regclass;
begin
    perform control.partition_invocations_v1();
    for m in select (date_trunc('month', now() at time zone 'UTC') - n * interval '1 month')::date
               from generate_series(1, 3) n
    loop
        execute format('create table control.%I partition of control.invocation for values from (%L) to (%L)',
                       'invocation_' || to_char(m, 'YYYY_MM'), m::timestamp at time zone 'UTC',
                       (m + interval '1 month') at time zone 'UTC');
    end loop;
    for t in select c.oid::regclass from pg_class c where c.relnamespace = 'control'::regnamespace and c.relkind = 'r'
    loop
        execute format('alter table %s set (autovacuum_enabled = off)', t);
    end loop;
end $$;
"""

#: Numbers are not given twice.
SMALL: Final = {"first": 1_000, "attempts": 2_000, "waiting": 1_000, "others": 100}
LARGE: Final = {"first": 100_000, "attempts": 30_000, "waiting": 6_000, "others": 500}


def demand(group: str, **changes) -> Demand:
    return msgspec.structs.replace(
        Demand(
            ticket_id=new_id(),
            group=group,
            model="m5",
            credential="c0",
            klass=Class.INTERACTIVE,
            key_id=made(KEY, 1),
            debit_id=new_id().hex,
            attempt=1,
            execution_limit_s=30,
            isolation_s=5,
            queue_timeout_s=100,
            waits_for_cooldown=True,
            intent=b'{"session_id":"s"}',
        ),
        **changes,
    )


def ending(ticket: uuid.UUID, ending: Ending = Ending.CONFIRMED, **changes) -> Settlement:
    lease = Lease(
        ticket_id=ticket,
        group="",
        generation=1,
        probe=False,
        hard_deadline=0,
        granted_at=datetime.now(UTC),
        day=datetime.now(UTC).date(),
        queued_s=0,
    )
    return msgspec.structs.replace(
        Settlement(
            lease=lease,
            ending=ending,
            verdict=Verdict.ANSWERED,
            state="charged",
            record=b'{"usd":"0.25","status":"success","input_total":3,"output_total":4}',
        ),
        **changes,
    )


Call = Callable[[Store], Awaitable[object]]


def acquire(*demands: Demand, group: str) -> Call:
    return lambda store: store.acquire(group, made(OWNER, 0), [(each, 0.0) for each in demands])


def settle(*settlements: Settlement, judged: bool = False) -> Call:
    return lambda store: store.settle(1, settlements, judged=judged)


def abandon(tickets: list[uuid.UUID]) -> Call:
    return lambda store: store.abandon(1, tickets, tombstone=True)


def waits(debits: list[str]) -> Call:
    return lambda store: store.waits(debits)


def hot() -> dict[str, tuple[int, Call]]:
    """Each hot statement, and how many elements are in it."""
    unknown = [ending(made(PAST, 100 * n)) for n in range(16)]
    found: dict[str, tuple[int, Call]] = {}
    for n in (1, 16):
        live = {base: [made(TICKET, base + each) for each in range(n)] for base in (0, 1000, 2000)}
        found |= {
            f"acquire, usual, {n}": (n, acquire(*(demand(USUAL) for _ in range(n)), group=USUAL)),
            f"acquire, the next attempt, {n}": (
                n,
                acquire(
                    *(demand(USUAL, key_id=made(KEY, d % 20), debit_id=f"d{d}", attempt=2) for d in range(n)),
                    group=USUAL,
                ),
            ),
            f"acquire, duplicates, {n}": (
                n,
                acquire(*(demand(USUAL, key_id=made(KEY, d % 20), debit_id=f"d{d}") for d in range(n)), group=USUAL),
            ),
            f"acquire, fenced, {n}": (
                n,
                acquire(
                    *(
                        demand(USUAL, key_id=made(KEY, d), fence=Fence(scope_id="s", run_id=f"r{d}", number=2 + d % 2))
                        for d in range(n)
                    ),
                    group=USUAL,
                ),
            ),
            f"acquire, keys with limits, {n}": (
                n,
                acquire(
                    *(demand(USUAL, key_id=made(KEY, 100 + d), reserved_usd=Decimal(1), tokens=5) for d in range(n)),
                    group=USUAL,
                ),
            ),
            f"acquire, sessions, {n}": (
                n,
                acquire(
                    *(
                        demand(USUAL, key_id=made(KEY, 50), session_id=f"sd{d}", most_usd=Decimal(1), tokens=5)
                        for d in range(n)
                    ),
                    group=USUAL,
                ),
            ),
            f"acquire, sessions with a budget, {n}": (
                n,
                acquire(
                    *(
                        demand(USUAL, key_id=made(KEY, d % 20), session_id=f"sd{d}", most_usd=Decimal(1), tokens=5)
                        for d in range(n)
                    ),
                    group=USUAL,
                ),
            ),
            f"acquire, replayed, {n}": (
                n,
                acquire(
                    *(
                        demand(USUAL, ticket_id=made(TICKET, d), key_id=made(KEY, d % 20), debit_id=f"live{d}")
                        for d in range(n)
                    ),
                    group=USUAL,
                ),
            ),
            f"acquire, busy, {n}": (n, acquire(*(demand(BUSY, tokens=5) for _ in range(n)), group=BUSY)),
            f"acquire, batch, {n}": (
                n,
                acquire(*(demand(BUSY, klass=Class.BATCH, model="m3", tokens=5) for _ in range(n)), group=BUSY),
            ),
            f"acquire, all taken, {n}": (n, acquire(*(demand(LONG) for _ in range(n)), group=LONG)),
            f"settle, clean, {n}": (n, settle(*map(ending, live[0]))),
            f"settle, clean, busy, {n}": (n, settle(*map(ending, live[1000]))),
            f"settle, clean, many wait, {n}": (n, settle(*map(ending, live[2000]))),
            f"settle, judged, {n}": (n, settle(*map(ending, live[1000]), judged=True)),
            f"settle, failed, {n}": (
                n,
                settle(*(ending(t, verdict=Verdict.TRANSIENT, state="zero") for t in live[0]), judged=True),
            ),
            f"settle, uncertain, {n}": (
                n,
                settle(
                    *(ending(t, Ending.UNCERTAIN, state="unknown", record=b'{"status":"unknown"}') for t in live[2000])
                ),
            ),
            f"settle, replayed, {n}": (n, settle(*(ending(made(PAST, each + 1)) for each in range(n)))),
            f"settle, corrected, {n}": (n, settle(*unknown[:n])),
            f"settle, never heard of, {n}": (n, settle(*(ending(new_id()) for _ in range(n)))),
            f"abandon, waiting, {n}": (
                n,
                abandon([made(TICKET, 200000 + each) for each in range(n)]),
            ),
            f"abandon, granted, {n}": (n, abandon(live[1000])),
            f"abandon, unknown, {n}": (
                n,
                abandon([new_id() for _ in range(n)]),
            ),
            f"rescan, granted, {n}": (n, rescan(USUAL, [made(TICKET, 80 + each) for each in range(n)])),
            f"rescan, many wait, {n}": (n, rescan(LONG, [made(TICKET, 200000 + 50 * each) for each in range(n)])),
            f"rescan, busy, {n}": (n, rescan(BUSY, [made(TICKET, 100000 + 50 * each) for each in range(n)])),
            f"rescan, let go, {n}": (n, rescan(BUSY, [new_id() for _ in range(n)])),
            f"waits, {n}": (n, waits([f"live{200000 + each}" for each in range(n)])),
        }
    return found | {
        "acquire, usual, nothing": (0, acquire(group=USUAL)),
        "acquire, busy, nothing": (0, acquire(group=BUSY)),
        "acquire, all taken, nothing": (0, acquire(group=LONG)),
        # Who would not outlive it is let go: of those under it the first thousand are looked at.
        "settle, rate limited": (
            3,
            settle(
                ending(made(TICKET, 1001), verdict=Verdict.RATE_LIMITED, state="zero", retry_after_s=5), judged=True
            ),
        ),
        "settle, opens the breaker": (
            3,
            settle(
                *(ending(made(TICKET, 2000 + n), verdict=Verdict.TRANSIENT, state="zero") for n in range(20)),
                judged=True,
            ),
        ),
        # A hundred of each kind.
        "acquire, reconciles": (100, acquire(group=DUE)),
        "renew": (0, lambda store: store.renew(made(OWNER, 0), made(OWNER, 1), first=False)),
        "decide": (1, lambda store: store.decide(BUSY, made(TICKET, 1000), 1)),
        "dead": (2, lambda store: store.dead([made(OWNER, 0), new_id()])),
        "fenced": (1, lambda store: store.fenced(made(KEY, 1), Fence(scope_id="s", run_id="r1", number=1))),
        "notify": (2, lambda store: store.notify([made(OWNER, 0), made(OWNER, 1)])),
    }


def rescan(group: str, tickets: list[uuid.UUID]) -> Call:
    demands = [demand(group, ticket_id=ticket) for ticket in tickets]
    return lambda store: store.rescan(made(OWNER, 0), demands)


def rare() -> dict[str, Call]:
    """
    What may read all that wait, and no more than that: operators' pages and the sweep of a process that watches time
    go by read everybody there is.
    """
    return {
        "groups": lambda store: store.groups(),
        "overdue": lambda store: store.overdue(),
        "bury": lambda store: store.bury([made(OWNER, 7)]),
        "reset": lambda store: store.reset(BUSY),
    }


async def check_rare(when: str, watched: Watched, sizes: dict[str, int]) -> None:
    waiting = 3 * sizes["waiting"] + sizes["others"] + 4 * SLOTS
    # An operator is shown the first twenty of each group; why each waits is a look at its group's slots.
    bound = 2 * waiting + 4 * 20 * SLOTS
    wrong = []
    for name, call in rare().items():
        await watched.run(call)
        seen = await watched.see(call)
        wrong += [
            f"{name}: {fault}: {plan.query.strip()[:80]}"
            for plan in seen.plans
            for fault in set(faults(plan))
            if not fault.endswith("ticket")
        ]
        rows, node, plan = seen.most_rows()
        if rows > bound:
            wrong.append(
                f"{name}: {rows} rows in {node['Node Type']} by {node.get('Index Name')}"
                f" {node.get('Index Cond')}, {waiting} live: {plan.query.strip()[:80]}"
            )
    assert not wrong, "\n".join([f"{when}:", *wrong])


async def look(watched: Watched) -> dict[str, Seen]:
    """Every hot statement, as it goes once it has gone before."""
    found = {}
    for name, (_, call) in hot().items():
        await watched.run(call)
        found[name] = await watched.see(call)
    return found


def check(when: str, seen: dict[str, Seen], small: dict[str, Seen]) -> None:
    wrong = []
    for name, (elements, _) in hot().items():
        of = seen[name]
        wrong += [f"{name}: {fault}: {plan.query.strip()[:80]}" for plan in of.plans for fault in set(faults(plan))]
        rows, node, plan = of.most_rows()
        if rows > 300 * elements + 300:
            wrong.append(
                f"{name}: {rows} rows in {node['Node Type']} of {node.get('Relation Name')}"
                f" by {node.get('Index Name')} {node.get('Index Cond')}: {plan.query.strip()[:80]}"
            )
        # Trees are a level or two deeper, and what the fills before have left is passed over.
        if of.buffers > 2 * small[name].buffers + 40 * (elements + 1):
            wrong.append(f"{name}: {of.buffers} pages, where it is {small[name].buffers} with small tables")
    assert not wrong, "\n".join([f"{when}:", *wrong])


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Watched]:
    watched = Watched(url, GIVEN)
    try:
        await watched.open()
        yield watched
    finally:
        await watched.close()


async def warm(watched: Watched) -> None:
    for _, call in hot().values():
        await watched.run(call)


@pytest.mark.parametrize("counted", [False, True], ids=["never analysed", "analysed while empty"])
async def test_hot_statements_read_no_more_when_the_tables_are_full(database_url, counted):
    async def fill(sizes: dict[str, int]) -> None:
        await admin.execute(EMPTY + FILL.format(lanes=LANES, **sizes))

    admin = await asyncpg.connect(database_url)
    try:
        await admin.execute(PREPARE)
        async with opened(database_url) as old, opened(database_url) as second:
            await old.store.configure()
            await old.store.renew(made(OWNER, 0), made(OWNER, 1), first=True)
            await admin.execute("update control.capacity_group set next_number = 1000000")
            if counted:
                await admin.execute("vacuum analyze")
            await warm(old)
            await fill(SMALL)
            await warm(second)
            small = await look(old)
            await check_rare("small", second, SMALL)
            await fill(LARGE)
            check("planned while empty", await look(old), small)
            if not counted:
                check("planned while small", await look(second), small)
                await check_rare("planned while small", second, LARGE)
            async with opened(database_url) as new:
                check("planned now", await look(new), small)
            if counted:
                await admin.execute("vacuum analyze")
                check("analysed now", await look(old), small)
                await check_rare("analysed now", second, LARGE)
    finally:
        await admin.close()


#: What a round of admissions leaves behind is used again by the next.
SIZES: Final = """
select c.relname, pg_relation_size(c.oid) / 8192 as pages
  from pg_class c
 where c.oid in ('control.ticket'::regclass, 'control.capacity_group'::regclass, 'control.owner'::regclass,
                 'control.counter'::regclass)
    or c.oid in (select i.indexrelid from pg_index i where i.indrelid = 'control.ticket'::regclass)
"""


async def test_tables_of_the_living_grow_no_further_however_many_have_passed_through(database_url):
    store = Store(database_url, GIVEN)
    admin = await asyncpg.connect(database_url)

    settled: dict[str, int] = {}
    last: dict[str, int] = {}

    async def round_of(batches: int) -> dict[str, int]:
        for _ in range(batches):
            asked = [demand(USUAL) for _ in range(100)]
            rows = await store.acquire(USUAL, made(OWNER, 0), [(each, 0.0) for each in asked])
            assert {row.answer for row in rows} == {"granted"}
            await store.settle(1, [ending(each.ticket_id) for each in asked], judged=False)
            await store.renew(made(OWNER, 0), made(OWNER, 1), first=False)
        await admin.execute("vacuum control.ticket, control.capacity_group, control.owner, control.counter")
        return {row["relname"]: row["pages"] for row in await admin.fetch(SIZES)}

    try:
        await store.configure()
        await store.renew(made(OWNER, 0), made(OWNER, 1), first=True)
        # Autovacuum comes after 2,000 dead tickets; here it is asked for, after as many. An index page that it empties
        # is used again after the next.
        for _ in range(4):
            settled = await round_of(20)
        for _ in range(4):
            last = await round_of(20)
        grown = {name: (pages, last[name]) for name, pages in settled.items() if last[name] > 1.5 * pages + 8}
        assert not grown, grown
    finally:
        await admin.close()
        await store.close()
