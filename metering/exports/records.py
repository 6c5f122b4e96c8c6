"""
One row of a CSV or one result of a JSON page, as fields that know where they stand.

Providers write the same figures as numbers, as text and with an exponent (`0E-6176` and `59200.0` are real); this is
the one place that turns them into exact values or names the place where it cannot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any

from metering.exports.lines import Refused

#: Digits, and places before and after the point, above which a figure is not believed.
_DIGITS = 60
_PLACES = 40
#: As in the ledger.
_LIMIT_COUNT = 10**15
#: Far from the ends of the calendar, so that a day more or less is always a date.
_YEARS = range(2000, 2200)
_DAY = timedelta(days=1)


class Record:
    """Fields by name. In a page, the field of an object in an object is `object.field`; in a CSV `object_field`."""

    __slots__ = ("_file", "_joint", "_place", "_values")

    def __init__(self, file: str, place: str, values: Mapping[str, Any], *, joint: str = ".") -> None:
        self._file = file
        self._place = place
        self._values = values
        self._joint = joint

    def _name(self, name: str) -> str:
        return name.replace(".", self._joint)

    def refuse(self, name: str, message: str) -> Refused:
        return Refused(self._file, message, place=f"{self._place}, {self._name(name)}")

    def has(self, name: str) -> bool:
        """The field is there, if only empty."""
        return self._name(name) in self._values

    def text(self, name: str) -> str | None:
        """None where it is absent or empty."""
        found = self._values.get(self._name(name))
        if found is None:
            return None
        if isinstance(found, bool):
            return "true" if found else "false"
        if isinstance(found, (dict, list)):
            raise self.refuse(name, "must be a single value")
        return str(found).strip() or None

    def flag(self, name: str) -> bool:
        return (self.text(name) or "").lower() in {"true", "1", "1.0"}

    def amount(self, name: str) -> Decimal | None:
        """An exact decimal, of either sign. Raises `Refused`."""
        found = self.text(name)
        if found is None:
            return None
        try:
            number = Decimal(found)
        except InvalidOperation:
            raise self.refuse(name, f"{found[:40]!r} is no number") from None
        if not number.is_finite():
            raise self.refuse(name, f"{found[:40]!r} is no number")
        if not number:
            return Decimal(0)
        sign, digits, exponent = number.as_tuple()
        assert isinstance(exponent, int)
        while digits[-1] == 0:
            digits, exponent = digits[:-1], exponent + 1
        if len(digits) > _DIGITS or exponent < -_PLACES or exponent + len(digits) > _PLACES:
            raise self.refuse(name, f"{found[:40]!r} has more digits than an amount")
        return Decimal((sign, digits, exponent))

    def count(self, name: str) -> int | None:
        """A whole number from 0. Raises `Refused`."""
        number = self.amount(name)
        if number is None:
            return None
        if number < 0 or number != number.to_integral_value() or number > _LIMIT_COUNT:
            raise self.refuse(name, f"{self.text(name)!r} is no count")
        return int(number)

    def moment(self, *names: str) -> datetime:
        """The first of these that is given: seconds since the epoch, or ISO 8601; without an offset it is UTC."""
        for name in names:
            found = self.text(name)
            if found is None:
                continue
            try:
                if found.replace(".", "", 1).isdigit() and len(found.partition(".")[0]) > 8:
                    moment = datetime.fromtimestamp(int(Decimal(found)), UTC)
                else:
                    moment = datetime.fromisoformat(found)
                moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
            except (ValueError, OverflowError, OSError):
                raise self.refuse(name, f"{found[:40]!r} is no time") from None
            if moment.year not in _YEARS:
                raise self.refuse(name, f"{found[:40]!r} is no time of an export")
            return moment
        raise self.refuse(names[0], "is missing")

    def dimensions(self, names: tuple[str, ...]) -> dict[str, str]:
        return {name: found for name in names if (found := self.text(name)) is not None}


def flat(value: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of an object, those of objects in it by `object.field`."""
    left: list[tuple[str, Any]] = list(value.items())
    while left:
        name, found = left.pop()
        if isinstance(found, dict):
            left += [(f"{name}.{inner}", of_it) for inner, of_it in found.items()]
        else:
            yield name, found


def within_a_day(record: Record, name: str, start: datetime, end: datetime) -> datetime:
    """
    The start of a bucket that lies in one day of UTC.

    Raises `Refused` where it lies in two: what was used before and after midnight cannot be told apart.
    """
    if not start < end <= datetime.combine(start.date(), time(), UTC) + _DAY:
        raise record.refuse(name, f"the bucket from {start.isoformat()} to {end.isoformat()} is not of one day in UTC")
    return start
