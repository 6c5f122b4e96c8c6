"""
Counters equal the sum of the attempts, whatever happens in whatever order: settled, replayed, corrected, abandoned,
their process dead, the connection lost before or after the commit.

The real store over a real PostgreSQL, behind a proxy that loses commits. What an attempt must have come to is kept
here, apart from the ledger; after each step the rows are held against that, and every counter against its rows, in one
snapshot. `pytest --hypothesis-profile=explore` looks for new orders.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import urllib.parse
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from decimal import Decimal
from typing import Any, Final

import asyncpg
import hypothesis
import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from admission.contract import StoreUnavailable, TicketRow
from admission.ids import new_id
from admission.lease import Ending, Settlement
from admission.store import Store
from gateway.settling import Kept, keep, restore
from tests.conformance.test_admission_stores import GROUP, Process, configured, ended, wanted
from tests.fakes.postgres_proxy import Action, Proxy, Rule, postgres_proxy
from tests.ledger import counters_that_differ

KEYS: Final = (uuid.UUID(int=1), uuid.UUID(int=2))
SHARD: Final = st.integers(min_value=0, max_value=2)
LOST: Final = st.sampled_from((None, None, None, Action.DROP_BEFORE, Action.DROP_AFTER, Action.RESET))
#: Words of which a name made of several could be read in two ways.
WORDS: Final = st.sampled_from(("a", "b,a", "a,b", "b/a", "a/b", "NULL"))
USD: Final = st.decimals(min_value=0, max_value=1000, places=12).map(lambda usd: f"{usd:f}")
TOKENS: Final = st.integers(min_value=0, max_value=2**40)


#: Whose an attempt is, and what is written with its grant.
INTENTS: Final = st.lists(
    st.tuples(
        st.sampled_from(KEYS),
        st.fixed_dictionaries(
            {"requested_model": st.just("m")},
            optional={
                **dict.fromkeys(("session_id", "run_id", "step_id", "provider"), WORDS),
                "tags": st.dictionaries(WORDS, WORDS, max_size=2),
                "upper_bound_usd": USD,
            },
        ),
    ),
    min_size=2,
    max_size=5,
)


@dataclasses.dataclass
class Attempt:
    """An attempt, and what must be known of it."""

    row: TicketRow
    #: The bound that was written with its grant.
    promised: str | None
    #: "open", "charged", "zero", "unknown".
    state: str = "open"
    usd: Decimal = Decimal(0)
    bound: Decimal | None = None
    rows: int = 0
    #: What was asked last, whether it was taken or not.
    asked: Settlement | None = None

    @property
    def told(self) -> tuple[str, Decimal | None, Decimal | None, int]:
        """State, charge, bound, rows of it."""
        usd = None if self.state == "unknown" else self.usd
        return self.state, usd, self.bound if self.state == "unknown" else None, self.rows

    def end(self, state: str, usd: str, bound: str | None) -> None:
        """The first end counts, and after an unknown one the first that is known."""
        if self.state == "open" or (self.state == "unknown" and state != "unknown"):
            self.state, self.rows = state, self.rows + 1
            self.usd = Decimal(usd) if state == "charged" else Decimal(0)
            self.bound = None if bound is None else Decimal(bound)


@dataclasses.dataclass
class World:
    """What all examples share: one database, one proxy, one loop."""

    runner: asyncio.Runner
    url: str
    proxy: Proxy
    store: Store
    db: asyncpg.Connection

    async def clear(self) -> None:
        for table in ("ticket", "attempt", "invocation", "counter", "owner", "breaker_event"):
            await self.db.execute(f"delete from control.{table}")


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[tuple[Proxy, Store, asyncpg.Connection]]:
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(postgres_proxy(url))
        db = await asyncpg.connect(url)
        stack.push_async_callback(db.close)
        store = Store(proxy.url(urllib.parse.urlsplit(url).path.removeprefix("/")), configured(concurrency=10_000))
        stack.push_async_callback(store.close)
        await store.configure()
        yield proxy, store, db


class Ledger(RuleBasedStateMachine):
    """Made for each example with a fresh world; see `test_counters_...`."""

    world: World

    def __init__(self) -> None:
        super().__init__()
        self.attempts: list[Attempt] = []
        self.process = Process(self.world.store)

    def do(self, coroutine: Any) -> Any:
        return self.world.runner.run(coroutine)

    async def _begin(self) -> None:
        """As another process, or another life of this one."""
        self.process.owner = new_id()
        await self.world.store.renew(self.process.owner, self.process.process, first=True)

    def teardown(self) -> None:
        self.world.proxy.rules = []

    # ------------------------------------------------------------ steps

    @initialize(intents=INTENTS)
    def first_granted(self, intents: list[tuple[uuid.UUID, dict[str, Any]]]) -> None:
        self.do(self.world.clear())
        self.do(self._begin())
        self.granted_more(intents)

    @rule(intents=INTENTS)
    def granted(self, intents: list[tuple[uuid.UUID, dict[str, Any]]]) -> None:
        self.granted_more(intents)

    def granted_more(self, intents: list[tuple[uuid.UUID, dict[str, Any]]]) -> None:
        demands = [wanted(key_id=key, intent=msgspec.json.encode(intent)) for key, intent in intents]
        rows = self.do(self.process.ask(*demands))
        for demand, (_, intent) in zip(demands, intents, strict=True):
            assert rows[demand.ticket_id].answer == "granted"
            self.attempts.append(Attempt(rows[demand.ticket_id], intent.get("upper_bound_usd")))

    @precondition(lambda self: self.attempts)
    @rule(
        data=st.data(),
        states=st.lists(st.sampled_from(("charged", "zero", "unknown", "unknown")), min_size=2, max_size=5),
        shard=SHARD,
        judged=st.booleans(),
        lost=LOST,
    )
    def settled(self, data: st.DataObject, states: list[str], shard: int, judged: bool, lost: Action | None) -> None:
        """Any attempts in any state, some of them twice; where the commit is lost, asked again until it is answered."""
        asked = [self._end(data, data.draw(st.sampled_from(self.attempts)), state) for state in states]
        self.do(self._asked(asked, shard=shard, judged=judged, lost=lost))

    @precondition(lambda self: any(attempt.state == "unknown" for attempt in self.attempts))
    @rule(
        data=st.data(),
        states=st.lists(st.sampled_from(("charged", "zero")), min_size=1, max_size=3),
        shard=SHARD,
        lost=LOST,
    )
    def corrected(self, data: st.DataObject, states: list[str], shard: int, lost: Action | None) -> None:
        """What was unknown is known, and stays it."""
        unknown = [attempt for attempt in self.attempts if attempt.state == "unknown"]
        asked = [self._end(data, data.draw(st.sampled_from(unknown)), state) for state in states]
        self.do(self._asked(asked, shard=shard, judged=False, lost=lost))

    def _end(self, data: st.DataObject, attempt: Attempt, state: str) -> Settlement:
        record: dict[str, Any] = {"status": "success", "ended": "complete"}
        record |= data.draw(st.fixed_dictionaries({}, optional={"input_total": TOKENS, "output_total": TOKENS}))
        usd, bound = data.draw(USD, label="usd"), data.draw(st.none() | USD, label="bound")
        if state == "charged":
            record["usd"] = usd
        if state == "unknown":
            record |= {"status": "unknown"} | ({} if bound is None else {"upper_bound_usd": bound})
        ending = Ending.UNCERTAIN if state == "unknown" else Ending.CONFIRMED
        attempt.end(state, usd, record.get("upper_bound_usd", attempt.promised))
        attempt.asked = ended(attempt.row, ending, state=state, record=msgspec.json.encode(record))
        return attempt.asked

    @precondition(lambda self: any(attempt.asked for attempt in self.attempts))
    @rule(data=st.data(), shard=SHARD)
    def replayed(self, data: st.DataObject, shard: int) -> None:
        """What was asked before, from a journal: nothing is written again."""
        known = [attempt for attempt in self.attempts if attempt.asked]
        attempt = data.draw(st.sampled_from(known), label="attempt")
        assert attempt.asked is not None
        again = restore(msgspec.json.decode(keep(attempt.asked), type=Kept))
        assert self.do(self._asked([again], shard=shard, judged=False, lost=None)) == [False]

    async def _asked(self, asked: list[Settlement], *, shard: int, judged: bool, lost: Action | None) -> list[bool]:
        if lost is not None:
            self.world.proxy.rules = [Rule(action=lost, statement="settle", times=1)]
        while True:
            try:
                rows = await self.world.store.settle(shard, asked, judged=judged)
            except StoreUnavailable:
                assert lost is not None
            else:
                return [row.applied for row in rows]

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), tombstone=st.booleans(), twice=st.booleans())
    def abandoned(self, data: st.DataObject, tombstone: bool, twice: bool) -> None:
        """A grant that nobody will use is settled as zero. One that has an end, or is in quarantine, keeps it."""
        attempt = data.draw(st.sampled_from(self.attempts), label="attempt")
        ticket = attempt.row.ticket_id
        assert ticket is not None
        for _ in range(1 + twice):
            self.do(self.world.store.abandon(0, [ticket], tombstone=tombstone))
        if attempt.state == "open":
            attempt.end("zero", "0", None)

    @rule()
    def process_dies(self) -> None:
        """What it held is of unknown cost, at most what was promised. Whoever knows better later corrects it."""
        self.do(self._dies())
        for attempt in self.attempts:
            if attempt.state == "open":
                attempt.end("unknown", "0", attempt.promised)

    async def _dies(self) -> None:
        for group in await self.world.store.bury([self.process.owner]):
            assert group == GROUP
        await self._begin()
        await self.process.advance()

    # ------------------------------------------------------------ what must be so after each

    @invariant()
    def counters_are_the_sums_of_their_rows(self) -> None:
        assert self.do(counters_that_differ(self.world.db)) == []

    @invariant()
    def rows_are_what_was_said(self) -> None:
        rows = self.do(
            self.world.db.fetch(
                "select a.ticket_id, a.state, i.state as last, i.usd, i.upper_bound_usd, n.rows from control.attempt a"
                " join lateral (select count(*) as rows, max(correction) as last from control.invocation i"
                " where i.ticket_id = a.ticket_id) n on true"
                " join control.invocation i on i.ticket_id = a.ticket_id and i.correction = n.last"
                " where a.key_id is not null"
            )
        )
        found = {row["ticket_id"]: (row["last"], row["usd"], row["upper_bound_usd"], row["rows"]) for row in rows}
        assert found == {one.row.ticket_id: one.told for one in self.attempts if one.state != "open"}
        assert {row["ticket_id"]: row["state"] for row in rows} == {ticket: told[0] for ticket, told in found.items()}
        assert all(1 <= told[3] <= 2 for told in found.values())


def test_counters_are_the_sum_of_the_attempts_after_any_order_of_ends_replays_corrections_and_crashes(
    database_url: str,
) -> None:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        proxy, store, db = runner.run(stack.enter_async_context(opened(database_url)))
        try:
            world = World(runner, database_url, proxy, store, db)
            machine = type("Machine", (Ledger,), {"world": world})
            usual = hypothesis.settings()
            # Statements are dearer than what other examples are made of, and may take as long as they like.
            fewer = hypothesis.settings(
                usual,
                max_examples=usual.max_examples // 5,
                stateful_step_count=25,
                deadline=None,
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            run_state_machine_as_test(machine, settings=fewer)
        finally:
            runner.run(stack.aclose())


PAIRS: Final = (("a", "b,a"), ("a,b", "a"), ("a", "b/a"), ("a/b", "a"), ('a","b', "a"), ("a", 'b","a'), ("NULL", ""))


async def test_names_of_several_words_are_counted_apart_however_they_are_written(database_url: str) -> None:
    async with opened(database_url) as (_, store, db):
        process = Process(store)
        await store.renew(process.owner, process.process, first=True)
        for first, second in PAIRS:
            intent = {"run_id": first, "step_id": second, "tags": {first: second}}
            intent |= {"provider": first, "requested_model": second, "upstream_model": first}
            row = await process.granted(wanted(intent=msgspec.json.encode(intent)))
            assert await process.settle(ended(row)) == [True]
        for kind in ("step_day", "tag_day", "route_day"):
            assert await db.fetchval("select count(*) from control.counter where kind = $1", kind) == len(PAIRS), kind
        assert await counters_that_differ(db) == []
