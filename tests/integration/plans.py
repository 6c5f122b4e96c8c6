"""
What the server really does for a statement: the plan of each statement nested in it, with what each node read.

A plan that is good for an empty table and bad for a full one is kept for as long as its connection lives, and nothing
fails: it is only slow. So plans are looked at where they are used, inside functions, by `auto_explain`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final

import asyncpg
import msgspec

from admission.settings import AdmissionSettings
from admission.store import Store

#: The tables that grow with use. Partitions of the ledger have a suffix.
GROWING: Final = ("ticket", "attempt", "invocation", "counter", "fence", "session_budget")

Node = dict[str, Any]


class Plan(msgspec.Struct, frozen=True):
    """One executed statement."""

    query: str
    root: Node

    @property
    def buffers(self) -> int:
        """Pages touched, those of nested statements included."""
        return sum(self.root.get(f"Shared {how} Blocks", 0) for how in ("Hit", "Read"))

    def nodes(self) -> Iterator[Node]:
        pending = [self.root]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.get("Plans", ()))


class Seen(msgspec.Struct, frozen=True):
    """What one call did. The last plan is the call's own; the others are nested in it."""

    plans: Sequence[Plan]

    @property
    def buffers(self) -> int:
        return self.plans[-1].buffers

    def most_rows(self) -> tuple[int, Node, Plan]:
        """The most rows that one node of the call read, counting those it threw away."""
        return max(
            ((rows_read(node), node, plan) for plan in self.plans for node in plan.nodes()), key=lambda entry: entry[0]
        )


def rows_read(node: Node) -> int:
    """The rows that went through a node in all its loops. Averages of the server are rounded up."""
    loops = node.get("Actual Loops", 0)
    each = sum(node.get(name, 0) for name in ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Index Recheck"))
    return -int(-loops * each // 1)


def reads_growing_table(node: Node) -> bool:
    return str(node.get("Relation Name", "")).startswith(GROWING)


def _reads(node: Node) -> bool:
    return reads_growing_table(node) or any(_reads(child) for child in node.get("Plans", ()))


def faults(plan: Plan) -> Iterator[str]:
    """What must not be in the plan of a hot statement, whether or not this call came to it."""
    for node in plan.nodes():
        relation, kind = node.get("Relation Name"), node["Node Type"]
        for child in node.get("Plans", ()):
            hashed = f"(hashed {child.get('Subplan Name')}" in json.dumps(node | {"Plans": []})
            if hashed and _reads(child):
                yield f"hashed {child['Subplan Name']} over a table that grows"
        if not reads_growing_table(node):
            continue
        if kind == "Seq Scan":
            yield f"Seq Scan on {relation}"
        elif kind in {"Index Scan", "Index Only Scan"} and "Index Cond" not in node:
            yield f"all of {node['Index Name']} read on {relation}"
        elif kind == "Bitmap Heap Scan" and str(relation).startswith(("attempt", "invocation")):
            yield f"Bitmap Heap Scan on {relation}"
        elif kind == "Bitmap Heap Scan" and any(
            "Index Cond" not in child for child in node["Plans"] if child["Node Type"] == "Bitmap Index Scan"
        ):
            yield f"Bitmap Heap Scan of all of {relation}"


class Watched:
    """A `Store` with one connection, as admission opens it, whose calls are undone and whose plans can be read."""

    def __init__(self, url: str, settings: AdmissionSettings) -> None:
        self.store = Store(url, msgspec.structs.replace(settings, connections=1))

    async def open(self) -> None:
        await self.store.oldest_snapshot()
        # Heartbeats have a connection of their own; here they share the one that is watched.
        self.store._heartbeat = self._connection

    @property
    def _connection(self) -> asyncpg.Connection:
        [connection] = self.store._open
        return connection

    async def close(self) -> None:
        await self.store.close()

    async def run(self, call: Callable[[Store], Awaitable[object]]) -> object:
        """The call's answer, unwatched."""
        await self._connection.execute("begin")
        try:
            return await call(self.store)
        finally:
            await self._connection.execute("rollback")

    async def see(self, call: Callable[[Store], Awaitable[object]]) -> Seen:
        return await seen(self._connection, lambda: call(self.store))


async def seen(connection: asyncpg.Connection, call: Callable[[], Awaitable[object]]) -> Seen:
    """The plans of what the call does on this connection. It is undone."""
    heard: list[str] = []

    def hear(_: object, message: asyncpg.PostgresLogMessage) -> None:
        heard.append(message.message)

    await connection.execute(
        """load 'auto_explain'; set client_min_messages = notice; set auto_explain.log_level = notice;
           set auto_explain.log_nested_statements = on; set auto_explain.log_analyze = on;
           set auto_explain.log_buffers = on; set auto_explain.log_timing = off; set auto_explain.log_format = json;
           begin"""
    )
    connection.add_log_listener(hear)
    try:
        await connection.execute("set auto_explain.log_min_duration = 0")
        await call()
    finally:
        await connection.execute("reset auto_explain.log_min_duration; rollback")
        # Listeners are called in turns of the loop that come after the answer.
        await asyncio.sleep(0)
        connection.remove_log_listener(hear)
    found = [json.loads(text.partition("plan:\n")[2]) for text in heard if "plan:\n" in text]
    return Seen([Plan(entry["Query Text"], entry["Plan"]) for entry in found])
