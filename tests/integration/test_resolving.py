"""What an operator proves of attempts whose cost is unknown, in a real ledger."""

from __future__ import annotations

import asyncio
import uuid
from decimal import Decimal
from typing import Any

import asyncpg
import pytest

from gateway.call import Call
from gateway.errors import StreamBroken
from metering.resolving import Resolution, Resolved, Resolving, Result
from tests.fakes.whole_line import KEY, WholeLine, call
from tests.integration.test_line import two_providers

OPERATOR = uuid.UUID(int=8)
#: A stream that breaks occupies no slot for long.
AT_ONCE = "isolation_s = 0.1\ncancel_confirms_after_s = 0\ncancel_source = 'none'"


async def resolve(line: WholeLine, *resolutions: Resolution) -> list[Resolved]:
    async with asyncpg.create_pool(line._url, min_size=1, max_size=2) as pool:
        return await Resolving(pool).resolve(resolutions, by=OPERATOR)


async def read_to_the_end(line: WholeLine, asked: Call) -> None:
    async with line.pipeline.stream(asked) as items:
        async for _ in items:
            pass


async def broken(line: WholeLine, debit: str, **options: Any) -> uuid.UUID:
    """The ticket of an attempt that broke after some content."""
    with pytest.raises(StreamBroken):
        await read_to_the_end(line, call("only", debit_id=debit, **options))
    await line.settled()
    [row] = [row for row in await line.invocations() if row["debit_id"] == debit]
    assert (row["state"], row["cost_reason"]) == ("unknown", "no_terminal")
    ticket: uuid.UUID = row["ticket_id"]
    return ticket


async def test_what_is_proven_is_another_row_and_moves_every_counter_once(database_url, tmp_path):
    async with two_providers(database_url, tmp_path, of_first=AT_ONCE) as (line, first, _):
        await first.set_faults(die="rst", die_after=2)
        told = {"session_id": "s", "run_id": "r", "step_id": "1", "tags": {"team": "search", "env": "live"}}
        tickets = [await broken(line, f"d{n}", **told) for n in range(4)]
        await line.audit()
        before = await line.invocations()
        proof = Resolution(
            ticket_id=tickets[0], usd=Decimal("0.012300000001"), note="by invoice", evidence="invoice 4711"
        )
        by_debit = Resolution(key_id=KEY, debit_id="d1", attempt=1, usd=Decimal(0))
        [charged, zero] = await resolve(line, proof, by_debit)
        assert (charged.result, charged.state, charged.usd) == (Result.RESOLVED, "charged", proof.usd)
        assert (zero.result, zero.state, zero.ticket_id) == (Result.RESOLVED, "zero", tickets[1])
        await line.audit()

        rows = {(row["ticket_id"], row["correction"]): row for row in await line.invocations()}
        assert [rows[row["ticket_id"], 0] for row in before] == before
        row, was = rows[tickets[0], 1], rows[tickets[0], 0]
        assert (row["state"], row["usd"], row["upper_bound_usd"]) == ("charged", proof.usd, None)
        assert (row["cost_reason"], row["price_version"]) == (None, "resolved")
        assert (row["resolved_by"], row["note"], row["evidence"]) == (OPERATOR, "by invoice", "invoice 4711")
        for name in ("day", "granted_at", "session_id", "run_id", "tags", "provider", "status", "ended", "error_code"):
            assert row[name] == was[name], name
        assert rows[tickets[1], 1]["cost_reason"] == "resolved"

        again, other = await resolve(line, proof), await resolve(line, Resolution(ticket_id=tickets[0], usd=Decimal(1)))
        assert ([one.result for one in again], [one.result for one in other]) == ([Result.UNCHANGED], [Result.SETTLED])
        assert other[0].usd == proof.usd
        twice = (
            Resolution(ticket_id=tickets[2], usd=Decimal(2)),
            Resolution(key_id=KEY, debit_id="d2", attempt=1, usd=Decimal(3)),
        )
        assert [one.result for one in await resolve(line, *twice)] == [Result.RESOLVED, Result.SETTLED]
        both = await asyncio.gather(
            *(resolve(line, Resolution(ticket_id=tickets[3], usd=Decimal(usd))) for usd in range(1, 4))
        )
        assert sorted(one.result for [one] in both) == [Result.RESOLVED, Result.SETTLED, Result.SETTLED]
        assert len({one.usd for [one] in both}) == 1
        assert len(await line.invocations()) == 8
        await line.audit()


async def test_what_is_at_work_or_not_there_is_not_corrected(database_url, tmp_path):
    async with two_providers(database_url, tmp_path) as (line, first, _):
        await first.set_faults(hold=True)
        held = asyncio.create_task(line.pipeline.complete(call("only", debit_id="held")))
        await first.until(lambda ledger: ledger["active"] == 1)
        [at_work, nobody] = await resolve(
            line,
            Resolution(key_id=KEY, debit_id="held", attempt=1, usd=Decimal(1)),
            Resolution(ticket_id=uuid.uuid4(), usd=Decimal(1)),
        )
        assert (at_work.result, nobody.result) == (Result.OPEN, Result.NOT_FOUND)
        await first.set_faults()
        await held
        [known] = await resolve(line, Resolution(key_id=KEY, debit_id="held", attempt=1, usd=Decimal(1)))
        assert (known.result, known.state) == (Result.SETTLED, "charged")
        await line.audit()


async def test_a_correction_frees_no_slot(database_url, tmp_path):
    async with two_providers(database_url, tmp_path) as (line, first, _):
        await first.set_faults(die="rst", die_after=2)
        ticket = await broken(line, "d")
        slots = await line.slots()
        await resolve(line, Resolution(ticket_id=ticket, usd=Decimal(1)))
        assert await line.slots() == slots
