"""
Times of admission are whole microseconds on the store's clock, which is the UNIX time.

Here is how they come from seconds, and how they are told: in milliseconds, as a moment, as a day in a zone.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo

SECOND: Final = 1_000_000
MILLISECOND: Final = 1_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def microseconds(seconds: float) -> int:
    """As the store is told: in whole milliseconds."""
    return milliseconds(seconds) * MILLISECOND


def milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def to_ms(duration: int) -> int:
    """To the nearest."""
    return (duration + MILLISECOND // 2) // MILLISECOND


def moment(at: int) -> datetime:
    return _EPOCH + timedelta(microseconds=at)


def day_of(at: int, zone: str) -> date:
    return moment(at).astimezone(ZoneInfo(zone)).date()
