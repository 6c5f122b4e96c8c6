"""What the ledger does not take, whatever sends it: nothing of it is written, and no counter is raised."""

from __future__ import annotations

import uuid
from datetime import UTC, date, datetime
from typing import Any, Final

import asyncpg
import msgspec
import pytest

from gateway import database

_RECORD: Final = """
select control.record_v2(0::smallint, array[row($1::uuid, 'open', $2::text, $3::timestamptz, $4::date, $1::uuid, 'd', 1,
                                                'g', $5::text::jsonb)::control.ledger_line])
"""
_GRANTED: Final = datetime(2026, 11, 30, 12, tzinfo=UTC)

#: The state, and what is wrong with its record.
REFUSED: Final[list[tuple[str, dict[str, Any]]]] = [
    ("charged", {"usd": "-0.000000000001"}),
    ("charged", {"usd": "1000000000"}),
    ("charged", {"usd": "NaN"}),
    ("charged", {}),
    ("charged", {"usd": "1", "list_usd": "-1"}),
    ("charged", {"usd": "1", "list_usd": "1000000000"}),
    ("unknown", {"upper_bound_usd": "-1"}),
    ("unknown", {"upper_bound_usd": "1000000000"}),
    ("unknown", {"upper_bound_usd": "1", "list_usd": "NaN"}),
    ("charged", {"usd": "1", "status": "fine"}),
    ("charged", {"usd": "1", "status": None}),
    ("spent", {"usd": "1"}),
]


async def test_amounts_out_of_range_and_words_that_nobody_knows_are_refused(database_url):
    async with database.open_connection(database_url, name="tests") as connection:

        async def record(state: str, facts: dict[str, Any]) -> None:
            said = msgspec.json.encode({"status": "success", "ended": "complete", **facts}).decode()
            await connection.execute(_RECORD, uuid.uuid4(), state, _GRANTED, date(2026, 11, 30), said)

        async def written() -> list[int]:
            return [
                await connection.fetchval(f"select count(*) from control.{table}")
                for table in ("invocation", "counter")
            ]

        for state, facts in REFUSED:
            with pytest.raises(asyncpg.IntegrityConstraintViolationError):
                await record(state, facts)
        assert await written() == [0, 0]
        await record("charged", {"usd": "999999999.999999999999", "list_usd": "0"})
        await record("unknown", {"upper_bound_usd": None})
        [rows, counters] = await written()
        assert rows == 2
        assert counters > 0
