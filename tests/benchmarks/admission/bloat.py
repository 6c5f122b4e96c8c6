"""Whether the tables of admission stay as small as what is in them, however many requests have passed through."""

from __future__ import annotations

import time
from collections.abc import Sequence

import asyncpg
import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from gateway import database
from tests.benchmarks.admission.cases import Case
from tests.benchmarks.admission.worker import Order
from tests.benchmarks.admission.world import World

#: Must not grow with the number of admissions.
FLAT = ("ticket", "capacity_group", "counter", "owner")
#: Grow by a row or more an admission, on purpose.
GROWING = ("attempt", "invocation")
SAMPLES = 10
#: Over the last four tenths. More than this is growth.
_GROWTH = 1.25
#: A table this small says nothing.
_SMALL = 4 << 20


class Size(msgspec.Struct, frozen=True, kw_only=True):
    admissions: int
    table: str
    #: None: the table itself.
    index: str | None
    bytes: int
    live: int
    dead: int


_SIZES = """
    select c.relname as table, i.relname as index, pg_relation_size(coalesce(i.oid, c.oid)) as bytes
      from pg_class c
      left join pg_inherits h on h.inhrelid = c.oid
      left join pg_class p on p.oid = h.inhparent
      left join lateral (select x.indexrelid from pg_index x where x.indrelid = c.oid
                         union all select null::oid) k on true
      left join pg_class i on i.oid = k.indexrelid
     where c.relnamespace = 'control'::regnamespace and c.relkind = 'r' and coalesce(p.relname, c.relname) = any ($1)
     order by 1, 2 nulls first
"""


async def _sample(connection: asyncpg.Connection, admissions: int) -> list[Size]:
    sizes = []
    for row in await connection.fetch(_SIZES, [*FLAT, *GROWING]):
        live = dead = 0
        if row["index"] is None and row["table"] in FLAT:
            tuples = await connection.fetchrow("select * from pgstattuple($1::regclass)", f"control.{row['table']}")
            assert tuples is not None
            live, dead = tuples["tuple_count"], tuples["dead_tuple_count"]
        sizes.append(Size(admissions=admissions, live=live, dead=dead, **dict(row)))
    return sizes


class Bloat(msgspec.Struct, frozen=True, kw_only=True):
    sizes: Sequence[Size]
    seconds: float
    #: Of each interval, opening the controllers included.
    pairs_per_s: Sequence[float]
    #: Those of FLAT and of their indexes that still grew towards the end.
    grown: Sequence[str]
    #: Too short to tell: autovacuum has not come round twice, so that everything it cleans is still there.
    short: bool
    #: What attempt and invocation keep of one admission, indexes included.
    bytes_each: float


async def run(world: World, case: Case, admissions: int, console: Console) -> Bloat:
    """Makes so many admissions with settlement and looks at the tables at intervals."""
    sizes: list[Size] = []
    rates: list[float] = []
    began = time.monotonic()
    each = max(admissions // (SAMPLES * case.processes * case.clients), 1)
    async with database.open_connection(world.url, name="bloat") as connection:
        await connection.execute("create extension pgstattuple")
        sizes += await _sample(connection, world.pairs)
        for number in range(1, SAMPLES + 1):
            sent, before = time.monotonic(), world.pairs
            await world.run(Order(groups=case.groups, clients=case.clients, count=each), case.processes)
            rates.append((world.pairs - before) / (time.monotonic() - sent))
            sizes += await _sample(connection, world.pairs)
            console.print(f"{world.pairs:,} admissions, {rates[-1]:,.0f} a second, {number} of {SAMPLES}", style="dim")
        swept = await connection.fetch(
            "select relname, autovacuum_count, n_tup_upd, n_tup_hot_upd from pg_stat_user_tables"
            " where schemaname = 'control' and relname = any ($1) order by 1",
            [*FLAT, *GROWING],
        )
        naptime = await connection.fetchval(
            "select extract(epoch from current_setting('autovacuum_naptime')::interval)"
        )
    seconds = time.monotonic() - began
    first, last = sizes[0].admissions, sizes[-1].admissions
    kept = sum(s.bytes * ((s.admissions == last) - (s.admissions == first)) for s in sizes if s.table not in FLAT)
    found = Bloat(
        sizes=sizes,
        seconds=seconds,
        pairs_per_s=rates,
        grown=_grown(sizes),
        short=seconds < 2 * float(naptime),
        bytes_each=kept / (last - first),
    )
    console.print(_table(found))
    for row in swept:
        hot = f", {row['n_tup_hot_upd'] / row['n_tup_upd']:.0%} of its updates HOT" if row["n_tup_upd"] else ""
        console.print(f"control.{row['relname']}: vacuumed {row['autovacuum_count']} times{hot}", style="dim")
    console.print(f"{found.bytes_each:,.0f} bytes for each admission, on purpose: attempt and invocation")
    if found.short:
        console.print(
            f"{seconds:.0f} s are too short to tell growth from what is not vacuumed yet: autovacuum comes round every "
            f"{naptime:.0f} s",
            style="yellow",
        )
    elif found.grown:
        console.print(f"GROWS: {', '.join(found.grown)}", style="red")
    else:
        console.print("everything else stays flat")
    return found


def _grown(sizes: Sequence[Size]) -> list[str]:
    moments = sorted({size.admissions for size in sizes})
    earlier, last = moments[len(moments) * 6 // 10], moments[-1]
    at = {(size.admissions, size.table, size.index): size.bytes for size in sizes}
    return [
        size.index or size.table
        for size in sizes
        if size.admissions == last
        and size.table in FLAT
        and size.bytes > _SMALL
        and size.bytes > _GROWTH * at.get((earlier, size.table, size.index), 0)
    ]


def _table(found: Bloat) -> Table:
    sizes = found.sizes
    moments = sorted({size.admissions for size in sizes})
    first, last = moments[0], moments[-1]
    shown = [moments[n] for n in sorted({0, *range(2, len(moments), 2), len(moments) - 1})]
    table = Table(box=box.SIMPLE, header_style="bold", pad_edge=False, title="KiB after so many admissions")
    table.add_column("table or index")
    for moment in shown:
        table.add_column(f"{moment:,}", justify="right")
    for name in ("most", "live, most", "dead, most", "bytes each"):
        table.add_column(name, justify="right")
    for key in dict.fromkeys((size.table, size.index) for size in sizes):
        mine = {size.admissions: size for size in sizes if (size.table, size.index) == key}
        grows = key[0] not in FLAT
        each = (mine[last].bytes - mine[first].bytes) / (last - first) if {first, last} <= set(mine) else 0.0
        name = key[1] or key[0]
        counts = key[1] is None and not grows
        table.add_row(
            ("  " if key[1] else "") + name,
            *(f"{mine[moment].bytes / 1024:,.0f}" if moment in mine else "" for moment in shown),
            f"{max(size.bytes for size in mine.values()) / 1024:,.0f}",
            f"{max(size.live for size in mine.values()):,}" if counts else "",
            f"{max(size.dead for size in mine.values()):,}" if counts else "",
            f"{each:,.0f}" if grows else (("" if found.short else "GROWS") if name in found.grown else "flat"),
            style=None if key[1] else "bold",
        )
    return table
