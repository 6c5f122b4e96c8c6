"""
Whether a settlement costs the same however full the ledger is: `python -m tests.benchmarks.ledger`.

Two databases of one server are used in turn, in one run. One begins with nothing, the other has ten million rows,
half of them over the eleven months before and half in the present month, with attempts and counters to match. Real
processes hold a controller each and make pairs of an admission and a settlement, with sessions, runs, steps and
tags as agents have them. A figure is the median of the rounds, a ratio the median of the rounds' ratios.

    python -m tests.benchmarks.ledger                              an hour, 25 GB under TMPDIR
    python -m tests.benchmarks.ledger --rows 100000 --rounds 3     a first look
    python -m tests.benchmarks.ledger --without invocation_run     two databases of one row, one without this index
    python -m tests.benchmarks.ledger --keep DIRECTORY --drop      who settles while the oldest month is dropped
    python -m tests.benchmarks.ledger --small-wal                  checkpoints each half minute
    python -m tests.benchmarks.ledger --keep DIRECTORY             the databases stay there, and are used again
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import asyncpg
import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from gateway import database
from metering.retention import Dropped, Retention
from tests.benchmarks.admission.__main__ import BUSY, keep
from tests.benchmarks.admission.worker import KEYS, MODEL, REQUESTS_A_SESSION, REQUESTS_A_STEP, Order, only_warnings
from tests.benchmarks.admission.world import HOT, SERVER, Round, World, opened, second
from tests.stopping import command

ROWS: Final = 10_000_000
#: What is measured: a request alone, whose latency counts, and a busy gateway, whose requests share transactions.
CASES: Final = {"alone": (1, 1), "busy": (2, 16)}
#: Rows of one INSERT.
_CHUNK: Final = 100_000
#: What a server is given that writes so much: its checkpoints come by time. With the embedded server's 1 GB one comes
#: each half minute, and after each every page is written whole once.
_BY_TIME: Final = {"max_wal_size": "16GB", "checkpoint_timeout": "15min"}
#: Of a server that does nothing else, and is started again before anything is measured.
_LOADING: Final = {"shared_buffers": "1GB", "max_wal_size": "16GB"}
#: The goal: within so much of each other.
GOAL: Final = 1.1

#: Rows $1 to $2 of $3, in the order of time. $4 keys, $5 requests of a session, $6 of a step, $7 the model.
_FILL: Final = """
create or replace function bench.fill(p_from bigint, p_to bigint, p_rows bigint, p_keys uuid[], p_session integer,
                                      p_step integer, p_model text) returns void
language sql as $$
with moment as (
    select n, date_trunc('month', now() at time zone 'UTC') at time zone 'UTC' as month
      from generate_series(p_from, p_to - 1) n
), made as materialized (
    select m.n, case when m.n < p_rows / 2 then m.month - interval '11 months' * (1 - m.n / (p_rows / 2.0))
                     else m.month + (now() - m.month) * ((m.n - p_rows / 2) / (p_rows / 2.0)) end as at,
           -- A session is one run. Ten of them are at work at any time.
           md5('session' || (m.n / (10 * p_session) * 10 + m.n % 10)) as session,
           m.n % (10 * p_session) / 10 / p_step as step,
           p_keys[1 + m.n % cardinality(p_keys)] as key_id,
           (m.n % 97 = 0) as failed
      from moment m
), one as materialized (
    select x.*, uuidv7(x.at - clock_timestamp()) as ticket_id, (x.at at time zone 'UTC')::date as day,
           case when x.n % 2 = 0 then replace(uuidv7(x.at - clock_timestamp())::text, '-', '')
                else md5('debit' || x.n) end as debit_id,
           case when x.failed then 'zero' else 'charged' end as state,
           case when x.failed then 0 else 0.00043125 end as usd
      from made x
), attempts as (
    insert into control.attempt (ticket_id, key_id, debit_id, attempt, group_id, owner_id, granted_at, day, state,
                                 settled_at)
    select o.ticket_id, o.key_id, o.debit_id, 1, 'http://hot.test:80', o.key_id, o.at, o.day, o.state, o.at
      from one o order by o.n
), counters as (
    insert into control.counter as c (kind, name, shard, day, key_id, names, charged_usd, attempts, input_tokens,
                                      output_tokens)
    select k.kind, k.name, 0, min(k.day), (array_agg(k.key_id))[1], min(k.names), sum(o.usd), count(*), count(*) * 1275,
           count(*) * 400
      from one o
     cross join lateral (
        values ('total', '', null::date, null::uuid, null::text[]),
               ('day', o.day::text, null, null, null),
               ('key', o.key_id::text, null, null, null),
               ('key_day', o.key_id || '/' || o.day, null, null, null),
               ('session', o.key_id || '/' || o.session, null, o.key_id, array[o.session]),
               ('route_day', o.key_id || '/' || o.day || array['openai', 'plain', p_model]::text, o.day, o.key_id,
                array['openai', 'plain', p_model]),
               ('run_day', o.key_id || '/' || o.day || array['run-' || o.session]::text, o.day, o.key_id,
                array['run-' || o.session]),
               ('step_day', o.key_id || '/' || o.day || array['run-' || o.session, 'step-' || o.step]::text, o.day,
                o.key_id, array['run-' || o.session, 'step-' || o.step]),
               ('tag_day', o.key_id || '/' || o.day || '{team,research}', o.day, o.key_id, '{team,research}'),
               ('tag_day', o.key_id || '/' || o.day || '{experiment,b}', o.day, o.key_id, '{experiment,b}')
           ) k (kind, name, day, key_id, names)
     group by k.kind, k.name
    on conflict (kind, name, shard) do update
       set charged_usd = c.charged_usd + excluded.charged_usd, attempts = c.attempts + excluded.attempts,
           input_tokens = c.input_tokens + excluded.input_tokens,
           output_tokens = c.output_tokens + excluded.output_tokens
)
insert into control.invocation (
    ticket_id, correction, granted_at, settled_at, day, key_id, debit_id, attempt, request_id, transport, session_id,
    scope_id, run_id, step_id, skill, skill_version, role, tags, class, group_id, requested_model, route_id, provider,
    upstream_model, protocol, served_model, provider_request_id, is_fallback, fallback_index, input_total, cache_read,
    output_total, state, usd, price_version, status, ended, created_at, queued_ms, first_byte_ms, total_ms, retries)
select o.ticket_id, 0, o.at, o.at + interval '2.85 s', o.day, o.key_id, o.debit_id, 1,
       replace(uuidv7(o.at - clock_timestamp())::text, '-', ''), 'grpc', o.session, 'nightly', 'run-' || o.session,
       'step-' || o.step, 'summarise', '3', 'writer', '{"team": "research", "experiment": "b"}', 'interactive',
       'http://hot.test:80', 'plain', 'openai/' || p_model, 'openai', p_model, 'chat_completions', p_model,
       'req_' || md5('provider' || o.n), false, 0, 1275, 1024, 400, o.state, o.usd, '2026-11-30',
       case when o.failed then 'error' else 'success' end, case when o.failed then 'error' else 'complete' end, o.at, 3,
       412, 2850, 0
  from one o order by o.n
$$
"""

#: What a row takes, by what holds it. The partitions of the ledger are one.
_SIZES: Final = """
    select coalesce(p.relname, c.relname)::text as name, c.relkind = 'i' as is_index,
           coalesce(pt.relname, t.relname, p.relname, c.relname)::text as of,
           sum(pg_relation_size(c.oid) + coalesce(pg_relation_size(nullif(c.reltoastrelid, 0)), 0))::bigint as bytes
      from pg_class c
      left join pg_inherits h on h.inhrelid = c.oid
      left join pg_class p on p.oid = h.inhparent
      left join pg_index x on x.indexrelid = c.oid
      left join pg_class t on t.oid = x.indrelid
      left join pg_inherits th on th.inhrelid = t.oid
      left join pg_class pt on pt.oid = th.inhparent
     where c.relnamespace = 'control'::regnamespace and c.relkind in ('r', 'i')
       and coalesce(pt.relname, t.relname, p.relname, c.relname) in ('attempt', 'invocation', 'counter')
     group by 1, 2, 3 order by 3, 2, 4 desc
"""


async def _load(world: World, rows: int, console: Console) -> None:
    began = time.monotonic()
    # Checkpoints in between would only make it longer.
    await world.configure(max_wal_size="16GB")
    async with database.open_connection(world.url, name="load") as connection:
        await connection.execute("create schema if not exists bench")
        await connection.execute(_FILL)
        await connection.execute("""
            do $$
            declare m timestamp;
            begin
                for m in select date_trunc('month', now() at time zone 'UTC') - n * interval '1 month'
                           from generate_series(1, 11) n
                loop
                    execute format('create table if not exists control.%I partition of control.invocation'
                                   ' for values from (%L) to (%L)', 'invocation_' || to_char(m, 'YYYY_MM'),
                                   m at time zone 'UTC', (m + interval '1 month') at time zone 'UTC');
                end loop;
            end $$""")
        for start in range(0, rows, _CHUNK):
            await connection.fetchval(
                "select bench.fill($1, $2, $3, $4, $5, $6, $7)",
                start, min(start + _CHUNK, rows), rows, KEYS, REQUESTS_A_SESSION, REQUESTS_A_STEP, MODEL,
                timeout=3600,
            )  # fmt: skip
            if start % (10 * _CHUNK) == 0:
                console.print(f"{start + _CHUNK:,} rows, {time.monotonic() - began:.0f} s", style="dim")
    await world.configure(max_wal_size="1GB")


async def _settle_down(world: World) -> None:
    """What loading left to do is done, before anything is measured."""
    async with database.open_connection(world.url, name="load") as connection:
        await connection.execute("vacuum analyze", timeout=3600)
        await connection.execute("checkpoint", timeout=3600)


class Side(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    world: World
    rounds: dict[str, list[Round]] = msgspec.field(default_factory=lambda: {case: [] for case in CASES})


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one case: the medians of both sides, the median of their ratios, and its lowest and highest."""

    case: str
    words: str
    first: float
    second: float
    ratio: float
    lowest: float
    highest: float


_FIGURES: Final[Mapping[str, Callable[[Round], float]]] = {
    "PostgreSQL CPU, ms a pair": lambda r: r.postgres_s / r.count * 1000,
    "gateway CPU, ms a pair": lambda r: r.clients_s / r.count * 1000,
    "settlement, median ms": lambda r: statistics.median(r.settle_us) / 1000,
    "admission, median ms": lambda r: statistics.median(r.admit_us) / 1000,
    "settlement, 99th percentile ms": lambda r: statistics.quantiles(r.settle_us, n=100)[98] / 1000,
    "WAL, bytes a pair": lambda r: r.wal_bytes / r.count,
}


def figures(first: Side, other: Side) -> list[Figure]:
    found = []
    for case in CASES:
        for words, of in _FIGURES.items():
            pairs = [(of(a), of(b)) for a, b in zip(first.rounds[case], other.rounds[case], strict=True)]
            ratios = [b / a for a, b in pairs]
            found.append(
                Figure(
                    case=case,
                    words=words,
                    first=statistics.median(a for a, _ in pairs),
                    second=statistics.median(b for _, b in pairs),
                    ratio=statistics.median(ratios),
                    lowest=min(ratios),
                    highest=max(ratios),
                )
            )
    return found


async def _measure(sides: Sequence[Side], rounds: int, seconds: float, console: Console) -> None:
    for number in range(rounds):
        for case, (processes, clients) in CASES.items():
            order = Order(groups=[HOT], clients=clients, warmup_s=1.0, seconds=seconds, varied=True)
            # The order turns round, so that none is always the one after the other.
            for side in sides if number % 2 == 0 else sides[::-1]:
                side.rounds[case].append(await side.world.run(order, processes))
        console.print(f"round {number + 1} of {rounds}", style="dim")


async def _count(connection: asyncpg.Connection) -> tuple[int, int, int]:
    row = await connection.fetchrow(
        "select (select count(*) from control.attempt), (select count(*) from control.invocation),"
        " (select coalesce(sum(attempts), 0)::bigint from control.counter where kind = 'total')",
        timeout=600,
    )
    assert row is not None
    return row[0], row[1], row[2]


@asynccontextmanager
async def _audited(sides: Sequence[Side]) -> AsyncIterator[None]:
    """Every pair made meanwhile is in the ledger once, with its counters. Raises RuntimeError."""
    before = []
    for side in sides:
        async with database.open_connection(side.world.url, name="audit") as connection:
            before.append((side.world.pairs, await _count(connection)))
    yield
    for side, (pairs, counts) in zip(sides, before, strict=True):
        async with database.open_connection(side.world.url, name="audit") as connection:
            made = side.world.pairs - pairs
            after = await _count(connection)
        if after != tuple(count + made for count in counts):
            raise RuntimeError(f"{side.name}: {made} pairs were made, and the database went from {counts} to {after}")


def _table(found: Sequence[Figure], names: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE, header_style="bold", pad_edge=False)
    for name in ("case", "figure", *names, "ratio", "lowest", "highest"):
        table.add_column(name, justify="left" if name in ("case", "figure") else "right")
    for f in found:
        table.add_row(f.case, f.words, *(f"{v:,.3f}" for v in (f.first, f.second, f.ratio, f.lowest, f.highest)))
    return table


async def _sizes(world: World, rows: int, console: Console) -> list[dict[str, object]]:
    async with database.open_connection(world.url, name="sizes") as connection:
        found = [dict(row) for row in await connection.fetch(_SIZES)]
    table = Table(box=box.SIMPLE, header_style="bold", pad_edge=False, title=f"bytes an invocation, of {rows:,}")
    table.add_column("table or index")
    table.add_column("bytes", justify="right")
    for row in found:
        table.add_row(("  " if row["is_index"] else "") + str(row["name"]), f"{row['bytes'] / rows:,.1f}")
    console.print(table)
    return found


async def _drop(world: World, seconds: float, console: Console) -> None:
    """Settlements with and without a month that goes meanwhile. The directory has a month less afterwards."""
    order = Order(groups=[HOT], clients=16, warmup_s=1.0, seconds=seconds, varied=True)
    usual = await world.run(order, 2)
    async with database.open_pool(world.url, name="drop", size=1) as pool:
        rows = await pool.fetch(
            "select relname, reltuples from pg_class where relname ~ '^invocation_\\d{4}_\\d{2}$' order by relname"
        )
        oldest = datetime.strptime(rows[0]["relname"], "invocation_%Y_%m").replace(tzinfo=UTC)
        retention = Retention(pool, keep_days=(datetime.now(UTC) - oldest).days - 32)
        took: list[float] = []

        async def dropping() -> Dropped:
            await asyncio.sleep(1.0 + seconds / 2)
            began = time.monotonic()
            dropped = await retention.drop()
            took.append(time.monotonic() - began)
            return dropped

        during, dropped = await asyncio.gather(world.run(order, 2), dropping())
    console.print(f"{dropped.month}: {dropped.answer}, about {dropped.had:,} rows, in {took[0] * 1000:,.0f} ms")
    for name, found in (("without", usual), ("with", during)):
        ordered = sorted(found.settle_us)
        console.print(
            f"{name}: {found.per_s:,.0f} pairs a second, settlements at most {ordered[-1] / 1000:,.1f} ms, "
            f"99th percentile {ordered[len(ordered) * 99 // 100] / 1000:,.1f}, "
            f"median {ordered[len(ordered) // 2] / 1000:,.1f}"
        )


def _settings(options: argparse.Namespace) -> Mapping[str, str]:
    if options.load_only:
        return _LOADING
    return {} if options.small_wal else _BY_TIME


async def _run(options: argparse.Namespace, console: Console) -> bool:
    """False where the goal is missed."""
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(opened(options.keep, {**SERVER, **_settings(options)}))
        full = await second(one, "other")
        for world in (one, full):
            stack.push_async_callback(world.stop_workers)
        if options.without:
            sides = [Side(name="as it is", world=one), Side(name=f"without {options.without}", world=full)]
            async with database.open_connection(full.url, name="index") as connection:
                await connection.execute(f"drop index control.{options.without}")
        else:
            sides = [Side(name="empty", world=one), Side(name=f"{options.rows:,} rows", world=full)]
            async with database.open_connection(full.url, name="load") as connection:
                loaded = await connection.fetchval("select exists (select from control.invocation)")
            if not loaded:
                await _load(full, options.rows, console)
        for world in (one, full):
            await _settle_down(world)
        if options.load_only:
            return True
        if options.drop:
            for _ in range(3):
                await _drop(full, options.seconds, console)
            return True
        sizes = [] if options.without else await _sizes(full, options.rows, console)
        async with _audited(sides):
            await _measure(sides, options.rounds, options.seconds, console)
        found = figures(*sides)
        console.print(_table(found, [side.name for side in sides]))
        rounds = [r for side in sides for case in side.rounds.values() for r in case]
        foreign = statistics.median(r.foreign_s / r.seconds for r in rounds)
        console.print(f"{foreign:.2f} cores were busy with other programs", style="dim" if foreign < BUSY else "yellow")
        met = options.without is not None or all(
            f.ratio <= GOAL for f in found if "CPU" in f.words or f.words == "settlement, median ms"
        )
        if not options.without:
            console.print(f"within {GOAL - 1:.0%} of each other: {'met' if met else 'NOT met'}")
            if options.rows == ROWS and options.keep is None:
                content = {"rows": options.rows, "foreign_cores": foreign, "fsync_us": one.fsync_us, "sizes": sizes}
                keep("ledger", {**content, "figures": [msgspec.to_builtins(f) for f in found]}, console)
        return met


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="tests.benchmarks.ledger", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=ROWS, help="of the full ledger")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each case in a round")
    parser.add_argument("--without", metavar="INDEX", help="what an index costs: two databases of one row")
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="of the server; it stays, and keeps no numbers")
    parser.add_argument("--load-only", action="store_true", help="with --keep: measure another time")
    parser.add_argument("--small-wal", action="store_true", help="with the embedded server's own max_wal_size")
    parser.add_argument("--drop", action="store_true", help="drop three months, one after another")
    options = parser.parse_args()
    only_warnings()
    console = Console(width=None if os.isatty(1) else 160)
    began = time.monotonic()
    met = asyncio.run(_run(options, console))
    console.print(f"{time.monotonic() - began:.0f} s", style="dim")
    raise SystemExit(0 if met else 1)


if __name__ == "__main__":
    command(main)
