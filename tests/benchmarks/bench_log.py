"""
What a reading of the invocation log costs: pages without a filter, with one that has an index and with one that has
none, and sums over a day and over all.

It starts a PostgreSQL of its own, fills the log by `tests/benchmarks/invocations.sql` and reads it as the gateway does.
Run: `python -m tests.benchmarks.bench_log [--rows 2000000] [--rounds 15]`. Filling takes some minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import asyncpg
import click
import structlog

from gateway import database
from gateway.embedded import EmbeddedPostgres
from metering import log
from tests.postgres import TEST_SETTINGS
from tests.stopping import command

_FILL = Path(__file__).parent / "invocations.sql"


async def filled(url: str, rows: int) -> None:
    await database.migrate(url)
    connection = await asyncpg.connect(url)
    await connection.execute(_FILL.read_text().format(rows=rows))
    await connection.execute("vacuum (analyze) control.invocation")
    await connection.execute("analyze control.attempt")
    await connection.close()


async def measured(call: Callable[[], Awaitable[object]], rounds: int) -> tuple[float, float]:
    """The median and the worst, in ms."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        await call()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times), max(times)


async def report(url: str, rows: int, rounds: int) -> None:
    async with database.open_pool(url, name="bench log", size=4) as pool:
        reader = log.InvocationLog(pool, zone="UTC", readers=4)
        middle = rows // 2
        one = (await pool.fetch("select * from control.invocation where request_id = $1", f"r{middle // 2}"))[0]
        searches = {
            "no filter": log.Search(),
            "request": log.Search(request_id=one["request_id"]),
            "debit, any key": log.Search(debit_id=one["debit_id"]),
            "session": log.Search(session_id=one["session_id"]),
            "run": log.Search(run_id=one["run_id"]),
            "key": log.Search(key_id=one["key_id"]),
            "status=error": log.Search(statuses=("error",)),
            "from, to: a day two months ago": log.Search(since=(day := one["granted_at"].date()), until=day),
            "provider and model (1 in 12)": log.Search(provider="provider1", requested_model="model1"),
            "tag (4 rows in all)": log.Search(tags={"env": "rare"}),
            "nothing has it": log.Search(skill="none"),
        }
        click.echo("| page of 100 | p50 ms | worst ms | rows | read to the end |\n|---|---|---|---|---|")
        for name, search in searches.items():
            found = await reader.page(search, after=None, limit=100, corrections=False)
            median, worst = await measured(
                partial(reader.page, search, after=None, limit=100, corrections=False), rounds
            )
            end = "its time was over" if found.scanned_to else "yes" if found.next is None else "there is a next page"
            click.echo(f"| {name} | {median:.1f} | {worst:.1f} | {len(found.rows)} | {end} |")
        deep = await reader.page(log.Search(until=one["granted_at"]), after=None, limit=100, corrections=False)
        median, worst = await measured(
            lambda: reader.page(log.Search(), after=deep.next, limit=100, corrections=False), rounds
        )
        click.echo(f"| no filter, a cursor in the middle | {median:.1f} | {worst:.1f} | 100 | there is a next page |")
        now = datetime.now(UTC)
        click.echo("\n| sum | s | attempts | groups |\n|---|---|---|---|")
        for name, search, group_by in (
            ("last 24 hours, by provider", log.Search(), ["provider"]),
            ("last 24 hours, by provider, model, status", log.Search(), ["provider", "model", "status"]),
            ("a session of all time, by step", log.Search(session_id=one["session_id"], since=_past()), ["step"]),
            ("7 days, by provider", log.Search(since=now - timedelta(days=7)), ["provider"]),
            ("30 days, by provider", log.Search(since=now - timedelta(days=30)), ["provider"]),
            ("all, ungrouped", log.Search(since=_past()), []),
            ("all, by provider", log.Search(since=_past()), ["provider"]),
            ("all, by day, provider, model", log.Search(since=_past()), ["day", "provider", "model"]),
            ("all, by session", log.Search(since=_past()), ["session"]),
        ):
            began = time.perf_counter()
            try:
                sums = await reader.stats(search, group_by=group_by, order="cost", limit=100)
            except log.RangeTooWide:
                click.echo(f"| {name} | over {log.USUAL.stats_s:.0f}: range_too_wide | | |")
                continue
            took = time.perf_counter() - began
            click.echo(f"| {name} | {took:.2f} | {sums.total['attempts']:,} | {sums.groups_in_all} |")


def _past() -> log.When:
    return log._EPOCH


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench_log", description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--url", help="a database that an earlier run has filled")
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    if given.url:
        asyncio.run(report(given.url, given.rows, given.rounds))
        return
    with (
        tempfile.TemporaryDirectory(prefix="tollbridge-bench-") as directory,
        EmbeddedPostgres.start(Path(directory), settings=TEST_SETTINGS) as server,
    ):
        began = time.perf_counter()
        asyncio.run(filled(server.url, given.rows))
        click.echo(f"{given.rows:,} attempts, filled in {time.perf_counter() - began:.0f} s\n")
        asyncio.run(report(server.url, given.rows, given.rounds))


if __name__ == "__main__":
    command(main)
