"""Three processes hammer one PostgreSQL, one of them killed and one stopped meanwhile, and a fourth watches."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import Counter

import asyncpg
import msgspec
import pytest

from admission.controller import Controller
from admission.store import Store
from tests.differential import sides
from tests.differential.hammer import LIMITS, MODEL_LIMITS, SETTINGS

SEED = 3
SECONDS = 4.0

WATCHED = """
select g.group_id, g.breaker, g.generation, g.probe,
       count(t) filter (where t.state <> 'queued') as slots,
       count(t) filter (where t.state in ('granted', 'active')) as active,
       count(t) filter (where t.state = 'granted') as unconfirmed,
       count(t) filter (where t.state = 'quarantined') as quarantined,
       count(t) filter (where t.state = 'queued') as queued,
       count(t) filter (where t.state in ('granted', 'active') and t.generation = g.generation) as of_now,
       count(t) filter (where t.state in ('granted', 'active') and t.ticket_id = g.probe) as probes
  from control.capacity_group g left join control.ticket t on t.group_id = g.group_id
 group by g.group_id
"""


def wrong(row, was_generation: int) -> list[str]:
    """What is not as it must be of a group in one snapshot."""
    limit, headroom = LIMITS[row["group_id"]]
    found = []
    if row["active"] > limit or row["slots"] > limit + headroom:
        found.append(f"{row['active']} active and {row['slots']} slots at a limit of {limit} + {headroom}")
    if row["breaker"] == "open" and row["of_now"]:
        found.append("something granted since the breaker opened")
    if row["breaker"] == "half_open" and (row["of_now"] > 1 or row["of_now"] != row["probes"]):
        found.append(f"{row['of_now']} granted while half-open, {row['probes']} of them the probe")
    if row["generation"] < was_generation:
        found.append("the generation fell")
    if row["queued"] > SETTINGS.groups[row["group_id"]].queue + limit:
        found.append(f"{row['queued']} wait")
    return found


async def watch(url: str, stop: asyncio.Event, seen: Counter[str]) -> list[str]:
    """One snapshot after the other, each of one instant."""
    connection = await asyncpg.connect(url)
    generations: Counter[str] = Counter()
    found: list[str] = []
    try:
        while not stop.is_set() and not found:
            async with connection.transaction(isolation="repeatable_read", readonly=True):
                for row in await connection.fetch(WATCHED):
                    found += [f"{row['group_id']}: {what}" for what in wrong(row, generations[row["group_id"]])]
                    generations[row["group_id"]] = row["generation"]
                    seen[row["breaker"]] += 1
                    seen["full"] += row["slots"] >= LIMITS[row["group_id"]][0]
                    for what in ("unconfirmed", "quarantined", "queued"):
                        seen[what] += row[what] > 0
                for row in await connection.fetch(
                    "select group_id, model, count(*) from control.ticket where state <> 'queued' group by 1, 2"
                ):
                    if row["count"] > MODEL_LIMITS.get((row["group_id"], row["model"]), 99):
                        found.append(f"{row['count']} of {row['group_id']} {row['model']}")
                if seen["snapshots"] % 20 == 0:
                    found += [row[0] for row in await connection.fetch(sides.LEDGER)]
            seen["snapshots"] += 1
            await asyncio.sleep(0)
    finally:
        await connection.close()
    return found


async def start(url: str, seed: int, seconds: float) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.differential.hammer",
        url,
        str(seed),
        str(seconds),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@pytest.mark.timeout(400)
async def test_several_processes_never_hold_more_than_the_limits_and_settle_each_attempt_once(database_url):
    store = Store(database_url, SETTINGS)
    await store.configure()
    seen: Counter[str] = Counter()
    stop = asyncio.Event()
    watching = asyncio.create_task(watch(database_url, stop, seen))
    processes = [await start(database_url, SEED + number, SECONDS) for number in range(3)]
    try:
        granted = "select count(*) from control.attempt where key_id is not null"
        # All three are there: one that is stopped before it has said so is never missed.
        begun = f"select ({granted}) > 30 and (select count(distinct owner_id) from control.attempt) >= 3"
        await _until(database_url, begun, watching)
        os.kill(processes[0].pid, signal.SIGKILL)
        await processes[0].wait()
        os.kill(processes[1].pid, signal.SIGSTOP)
        # Until its heartbeat has lapsed: its tickets are lost meanwhile, and it must find that out.
        lapsed = "select exists (select from control.owner where expires_at < clock_timestamp() - interval '1 s')"
        await _until(database_url, lapsed, watching)
        os.kill(processes[1].pid, signal.SIGCONT)
        processes[0] = await start(database_url, SEED + 10, SECONDS / 2)
        came_to: Counter[str] = Counter()
        for process in processes:
            out, errors = await process.communicate()
            assert process.returncode == 0, errors.decode()[-3000:]
            came_to.update(msgspec.json.decode(out, type=dict[str, int]))
        async with Controller(store, SETTINGS).opened():
            await _until(database_url, "select not exists (select from control.ticket)", watching, within_s=25)
        stop.set()
        assert await watching == [], f"seed {SEED}"
    finally:
        stop.set()
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.wait()
        await store.close()
        watching.cancel()
    connection = await asyncpg.connect(database_url)
    try:
        assert [row[0] for row in await connection.fetch(sides.LEDGER)] == []
        attempts = await connection.fetchval(granted)
    finally:
        await connection.close()
    assert attempts >= came_to["settled"] > 100, came_to
    # What never happened was not watched.
    for what in ("closed", "open", "half_open", "full", "unconfirmed", "quarantined", "queued"):
        assert seen[what], (what, seen)
    for what in ("granted", "cancelled", "forgotten", "corrected"):
        assert came_to[what], (what, came_to)
    assert seen["snapshots"] > 100


async def _until(url: str, true: str, watching: asyncio.Task[list[str]], within_s: float = 25.0) -> None:
    """Raises what is wrong as soon as it is seen."""
    connection = await asyncpg.connect(url)
    give_up = time.monotonic() + within_s
    try:
        while not await connection.fetchval(true):
            if watching.done():
                pytest.fail(f"seed {SEED}: {await watching}")
            if time.monotonic() > give_up:
                left = await connection.fetch("select ticket_id, group_id, state, owner_id from control.ticket")
                pytest.fail(f"in {within_s} s it did not become true: {true}\n{left}")
            await asyncio.sleep(0.05)
    finally:
        await connection.close()
