"""
What it takes to read usage from full counters: without groups, and by group over a month.

    python -m tests.benchmarks.bench_usage [--keys N] [--days N] [--routes N] [--log N] [--times N]

The counters are filled as settlements of two processes would leave them, in a real PostgreSQL of its own; the log has
`--log` attempts, spread over the same days, keys and routes. Times are of `metering.ledger` by itself, the median of
`--times`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from datetime import date, timedelta
from pathlib import Path

from gateway import database
from gateway.embedded import EmbeddedPostgres
from metering.grouping import Question
from metering.ledger import Ledger
from tests.stopping import command

FIRST = date(2026, 11, 1)
_KEYS = "md5('key' || k)::uuid"
#: Two shards of each, as two processes leave them.
_COUNTERS = f"""
insert into control.counter (kind, name, shard, day, key_id, names, charged_usd, attempts, input_tokens, output_tokens)
select 'route_day', {_KEYS} || '/' || d || array['p' || r % 4, 'm' || r, 'u' || r]::text, s, $1::date + d, {_KEYS},
       array['p' || r % 4, 'm' || r, 'u' || r], 0.001, 1, 10, 10
  from generate_series(1, $2::int) k, generate_series(0, $3::int - 1) d, generate_series(1, $4::int) r,
       generate_series(0, 1) s
"""
_SUMS = """
insert into control.counter (kind, name, shard, charged_usd, attempts, input_tokens, output_tokens)
select k.kind, k.name, c.shard, sum(c.charged_usd), sum(c.attempts), sum(c.input_tokens), sum(c.output_tokens)
  from control.counter c
 cross join lateral (values ('total', ''), ('day', c.day::text), ('key', c.key_id::text),
                            ('key_day', c.key_id || '/' || c.day)) as k (kind, name)
 where c.kind = 'route_day' group by k.kind, k.name, c.shard
"""
_LOG = """
insert into control.invocation (ticket_id, correction, granted_at, settled_at, day, key_id, debit_id, attempt, group_id,
                                session_id, skill, provider, requested_model, upstream_model, state, usd, status)
select gen_random_uuid(), 0, ($1::date + n % $3::int)::timestamp at time zone 'UTC' + n * interval '1 ms', now(),
       $1::date + n % $3::int, md5('key' || 1 + n % $2::int)::uuid, 'd' || n, 1, 'g', 's' || n % 10000, 'k' || n % 20,
       'p' || n % 4, 'm' || n % $4::int, 'u' || n % $4::int, 'charged', 0.001, 'success'
  from generate_series(0, $5::int - 1) n
"""


async def measure(url: str, arguments: argparse.Namespace) -> None:
    await database.migrate(url)
    async with database.open_pool(url, name="bench", size=2) as pool:
        shape = (FIRST, arguments.keys, arguments.days, arguments.routes)
        await pool.execute(_COUNTERS, *shape, timeout=600)
        await pool.execute(_SUMS, timeout=600)
        if arguments.log:
            await pool.execute(_LOG, *shape, arguments.log, timeout=600)
        await pool.execute("vacuum analyze control.counter", timeout=600)
        await pool.execute("vacuum analyze control.invocation", timeout=600)
        ledger = Ledger(pool, zone="UTC")
        key = await pool.fetchval("select md5('key1')::uuid")
        month = Question(first=FIRST, last=FIRST + timedelta(days=arguments.days - 1), limit=10_000)

        async def ungrouped() -> None:
            await ledger.usage(session_id=None, day=FIRST, key_id=None, session_key=uuid.UUID(int=1))

        def grouped(*group_by: str, **more: object) -> Callable[[], Awaitable[None]]:
            async def ask() -> None:
                fields = {name: getattr(month, name) for name in month.__struct_fields__}
                await ledger.grouped(Question(**{**fields, "group_by": group_by, **more}), timeout_ms=60_000)

            return ask

        cases = {
            "ungrouped": ungrouped,
            "a month by provider,model": grouped("provider", "model"),
            "the same of one key": grouped("provider", "model", own=key),
            "a month by day": grouped("day"),
            "a month by key": grouped("key"),
            "a month by day,key (its first 10,000)": grouped("day", "key"),
            "a month by skill, from the log": grouped("skill"),
            "one session by day, from the log": grouped("day", values={"session": "s7"}),
        }
        sys.stdout.write(f"{' x '.join(map(str, shape[1:]))} routes, twice; {arguments.log} attempts in the log\n")
        for name, ask in cases.items():
            await ask()
            took = []
            for _ in range(arguments.times):
                began = time.perf_counter()
                await ask()
                took.append(time.perf_counter() - began)
            sys.stdout.write(f"{name:40} {statistics.median(took) * 1000:10.1f} ms\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("keys", 1000), ("days", 30), ("routes", 20), ("log", 1_000_000), ("times", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="tollbridge-bench-") as directory,
        EmbeddedPostgres.start(Path(directory), settings={"fsync": "off"}) as server,
    ):
        asyncio.run(measure(server.url, arguments))


if __name__ == "__main__":
    command(main)
