"""
Two endpoints become one group and two again, while processes of the one and the other configuration run: what is in
force is what docs/operations.md says, and the limit that is in force is never passed.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from admission.store import Store
from gateway import config
from gateway.reading import described
from tests.fakes.simulated import SimulatedProvider, simulated
from tests.fakes.whole_line import WholeLine, call
from tests.integration.test_limits import host, occupied, processes, profile, queued, start

MERGED = "shared"


def apart(a: SimulatedProvider, b: SimulatedProvider, revision: int = 1, limit: int = 2) -> str:
    return (
        _providers(a, b)
        + f"""
        [groups."{host(a)}"]
        concurrency = {limit}
        [groups."{host(b)}"]
        concurrency = 2
        [admission]
        revision = {revision}
    """
    )


def together(a: SimulatedProvider, b: SimulatedProvider, revision: int = 1) -> str:
    return (
        _providers(a, b)
        + f"""
        [groups.{MERGED}]
        endpoints = ["{host(a)}", "{host(b)}"]
        concurrency = 1
        [admission]
        revision = {revision}
    """
    )


def _providers(a: SimulatedProvider, b: SimulatedProvider) -> str:
    return profile("a", a, 'models = ["sim-fast"]') + profile("b", b, 'models = ["sim-fast"]')


async def configured(url: str, tmp_path: Path, toml: str) -> list[str]:
    """A process starts with this configuration; for which groups and endpoints something else is in force."""
    file = tmp_path / "configured.toml"
    file.write_text(toml)
    settings = config.load(file, {})
    store = Store(url, settings.admission)
    try:
        return await store.configure()
    finally:
        await store.close()


async def places(line: WholeLine) -> dict[str, list[str | None]]:
    """Which providers compete in which group, and nothing of groups that nobody competes in."""
    found = [described(group) for group in await line.controller._store.groups()]
    return {group["group"]: sorted(place["provider"] for place in group["endpoints"]) for group in found}


async def test_a_split_that_was_never_seen_is_in_force_at_once_and_an_undone_one_only_with_a_new_revision(
    database_url, tmp_path
):
    async with simulated() as a, simulated() as b:
        split = {host(a): ["a"], host(b): ["b"]}
        async with processes(database_url, tmp_path, together(a, b)) as (line,):
            assert await places(line) == {MERGED: ["a", "b"]}
            # Never seen: nobody has to say anything.
            assert await configured(database_url, tmp_path, apart(a, b)) == []
            assert await places(line) == split
            # The merge, again, is a step back: it takes a revision.
            assert set(await configured(database_url, tmp_path, together(a, b))) == {f"{host(a)}#a", f"{host(b)}#b"}
            assert await places(line) == split
            assert await configured(database_url, tmp_path, together(a, b, revision=2)) == []
            assert await places(line) == {MERGED: ["a", "b"]}
            # So is the way back from it.
            assert set(await configured(database_url, tmp_path, apart(a, b))) >= {f"{host(a)}#a", f"{host(b)}#b"}
            assert await places(line) == {MERGED: ["a", "b"]}
            assert await configured(database_url, tmp_path, apart(a, b, revision=3)) == []
            assert await places(line) == split


async def test_an_undone_merge_with_a_new_limit_takes_the_limit_and_not_the_endpoint_without_a_revision(
    database_url, tmp_path
):
    async with simulated() as a, simulated() as b, processes(database_url, tmp_path, apart(a, b)) as (line,):
        await configured(database_url, tmp_path, together(a, b))
        # Each group and each endpoint has a history of its own: the limit is new, the places are not.
        others = await configured(database_url, tmp_path, apart(a, b, limit=7))
        assert set(others) == {f"{host(a)}#a", f"{host(b)}#b"}
        assert await places(line) == {MERGED: ["a", "b"]}
        [row] = await line.rows("select concurrency from control.capacity_group where group_id = $1", host(a))
        assert row["concurrency"] == 7


async def test_who_runs_and_who_waits_moves_along_and_no_limit_is_passed_while_processes_restart_one_by_one(
    database_url, tmp_path
):
    async with simulated() as a, simulated() as b:
        old, new = apart(a, b), together(a, b)
        async with processes(database_url, tmp_path, old) as (before,):
            held = [await occupied(before, f"{name}/sim-fast") for name in ("a", "b")]
            # Merged under one slot: both that run are in the group, and count.
            async with processes(database_url, tmp_path, new) as (after,):
                rows = await before.rows("select group_id, state from control.ticket")
                assert [(row["group_id"], row["state"]) for row in rows] == [(MERGED, "active")] * 2
                waits = [
                    start(line.pipeline.complete(call(f"{name}/sim-fast")))
                    for line, name in ((before, "a"), (after, "b"))
                ]
                # The old process still thinks of two groups; the store says where its request belongs.
                await queued(before, 2)
                rows = await before.rows("select distinct group_id from control.ticket")
                assert [row["group_id"] for row in rows] == [MERGED]
                # Split again by a third: whoever waits goes along with its endpoint.
                assert await configured(database_url, tmp_path, apart(a, b, revision=2)) == []
                rows = await before.rows("select group_id, count(*) from control.ticket group by 1 order by 1")
                assert {row["group_id"]: row["count"] for row in rows} == {host(a): 2, host(b): 2}
                for first, gate in held:
                    gate.set()
                    await first
                async with asyncio.timeout(30):
                    await asyncio.gather(*waits)
                # From here on each has its two slots, at the process that was started for one.
                await asyncio.gather(*(after.pipeline.complete(call(f"{name}/sim-fast")) for name in "aabb"))
        for upstream in (a, b):
            assert (await upstream.ledger())["peak_concurrency"] <= 2
