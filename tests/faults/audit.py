"""
The last word on a run: the provider's own ledger against the database, in one snapshot.

Each check is a statement of `Audit.violations` in the end: over-admissions, dispatches that nobody accounts for,
attempts settled twice or never, counters that are not the sum of what they count, charges that are not what the
provider says it worked. Rows that are read one by one while others write would report violations that never were, so
everything comes from one REPEATABLE READ transaction, after the provider has fallen quiet.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final, TypeAlias

import asyncpg
import msgspec

#: USD for a million tokens of input and of output, in the gateways' configuration.
PRICE_IN, PRICE_OUT = Decimal("2.50"), Decimal("10.00")
Price: TypeAlias = tuple[Decimal, Decimal]
_MILLION: Final = 1_000_000
#: Digits of an amount behind the point.
_DIGITS: Final = 12
#: Of each kind, so many are told in full.
_TOLD: Final = 5


class Kind(enum.StrEnum):
    OVER_ADMISSION = "over-admission"
    DOUBLE = "double settlement"
    LOST = "lost settlement"
    COUNTER = "wrong counter"
    CHARGE = "wrong charge"
    LEFT_BEHIND = "left behind"
    JOB = "lost job"
    #: Something did not come to its end in the time it has.
    SLOW = "not in time"
    FAULT = "fault in a gateway"


@dataclasses.dataclass(frozen=True)
class Violation:
    kind: Kind
    said: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.said}"


@dataclasses.dataclass(kw_only=True)
class Heard:
    """What a caller was told of one request."""

    #: Its debit, and the name the provider knows it by.
    marker: str
    #: "complete" where the whole answer arrived; else the error's code, or "cancelled".
    ended: str
    #: The caller was told that the settlement is written.
    settled: bool = False
    usd: Decimal | None = None
    #: The process that answered was killed afterwards.
    killed_after: bool = False
    #: `time.monotonic` at its end.
    at: float = 0.0


@dataclasses.dataclass(kw_only=True)
class Audit:
    violations: list[Violation]
    attempts: int = 0
    charged: int = 0
    zero: int = 0
    unknown: int = 0
    #: Whole answers whose cost is unknown in the end: their process was killed before it was written.
    answered_and_unknown: int = 0

    def count(self, kind: Kind) -> int:
        return sum(violation.kind is kind for violation in self.violations)

    def told(self) -> str:
        """Some of each kind."""
        lines: list[str] = []
        for kind in Kind:
            found = [str(violation) for violation in self.violations if violation.kind is kind]
            lines += found[:_TOLD]
            if len(found) > _TOLD:
                lines.append(f"{kind.value}: and {len(found) - _TOLD} more")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    attempts: Sequence[asyncpg.Record]
    invocations: Sequence[asyncpg.Record]
    counters: Sequence[asyncpg.Record]
    tickets: Sequence[asyncpg.Record]


async def snapshot(url: str) -> Snapshot:
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            return Snapshot(
                attempts=await connection.fetch(
                    "select ticket_id, key_id, debit_id, attempt, state, day, granted_at from control.attempt"
                    " where key_id is not null"
                ),
                invocations=await connection.fetch("select * from control.invocation order by ticket_id, correction"),
                counters=await connection.fetch(
                    "select kind, name, day, key_id, names, sum(charged_usd) as usd, sum(attempts) as attempts,"
                    " sum(unknown_attempts) as unknown, sum(unknown_upper_bound_usd) as bound,"
                    " sum(unbounded_attempts) as unbounded, sum(input_tokens) as tokens_in,"
                    " sum(output_tokens) as tokens_out"
                    " from control.counter group by kind, name, day, key_id, names"
                ),
                tickets=await connection.fetch("select state, debit_id from control.ticket"),
            )
    finally:
        await connection.close()


def audit(
    found: Snapshot,
    *,
    ledger: dict[str, Any],
    dispatches: Sequence[dict[str, Any]],
    heard: Sequence[Heard],
    limit: int,
    prices: Mapping[str, Price],
    lost_before: float | None = None,
) -> Audit:
    """
    `prices`: of the provider's models. `lost_before`: the database was put back to an earlier state at that time
    (`time.monotonic`). What was dispatched before is not expected in it; that it never was too much at once still is.
    """
    result = Audit(violations=[], attempts=len(found.attempts))
    say = _Saying(result)
    if ledger["peak_concurrency"] > limit:
        said = f"the provider had {ledger['peak_concurrency']} at once, the limit is {limit}: "
        say(Kind.OVER_ADMISSION, said + "; ".join(_at_the_peak(dispatches, found)))
    for ticket in found.tickets:
        say(Kind.LEFT_BEHIND, f"a {ticket['state']} ticket of {ticket['debit_id']}")
    last = _settlements(found, result, say)
    expected = [one for one in dispatches if lost_before is None or one["started"] >= lost_before]
    _dispatches(last.values(), expected, say, everything=lost_before is None)
    unclaimed = _charges(last.values(), dispatches, prices, say)
    if lost_before is None:
        _bounds(last.values(), unclaimed, prices, say)
    _counters(found, last.values(), say)
    _heard([one for one in heard if lost_before is None or one.at >= lost_before], last.values(), result, say)
    return result


class _Saying:
    def __init__(self, result: Audit) -> None:
        self._result = result

    def __call__(self, kind: Kind, said: str) -> None:
        self._result.violations.append(Violation(kind, said))


def _at_the_peak(dispatches: Sequence[dict[str, Any]], found: Snapshot) -> list[str]:
    """Who was there when there were most, in order of arrival, and what the database says of them."""
    told = {row["debit_id"]: f"{row['status']}, {row['ended']}, {row['cost_reason']}" for row in found.invocations}

    def there(moment: float) -> list[dict[str, Any]]:
        return [one for one in dispatches if one["started"] <= moment < (one["released"] or math.inf)]

    peak = max((there(one["started"]) for one in dispatches), key=len, default=[])
    last = max((one["started"] for one in peak), default=0.0)
    lines: list[str] = []
    for one in peak:
        closed = "never" if one["finished"] is None else f"{one['finished'] - last:+.2f} s"
        settled = told.get(one["correlation"], "nothing")
        lines.append(
            f"{one['correlation']} since {last - one['started']:.2f} s, closed {closed} ({one['ended']}), {settled}"
        )
    return lines


def _settlements(found: Snapshot, result: Audit, say: _Saying) -> dict[Any, asyncpg.Record]:
    """Each attempt has exactly one settlement, and at most one correction. The last word on each."""
    rows: defaultdict[Any, list[asyncpg.Record]] = defaultdict(list)
    for row in found.invocations:
        rows[row["ticket_id"]].append(row)
    last: dict[Any, asyncpg.Record] = {}
    for attempt in found.attempts:
        name = f"{attempt['debit_id']} attempt {attempt['attempt']} ({attempt['ticket_id']})"
        told = rows.pop(attempt["ticket_id"], [])
        settlements = [row for row in told if row["correction"] == 0]
        corrections = [row for row in told if row["correction"] > 0]
        if attempt["state"] == "open":
            say(Kind.LOST, f"{name} is still open")
        elif not settlements:
            say(Kind.LOST, f"{name} is {attempt['state']} and has no invocation")
        if len(settlements) > 1 or len(corrections) > 1:
            say(Kind.DOUBLE, f"{name} has {len(settlements)} settlements and {len(corrections)} corrections")
        if corrections and (settlements[0]["state"] != "unknown" or corrections[0]["state"] == "unknown"):
            say(Kind.DOUBLE, f"{name} was {settlements[0]['state']} and corrected to {corrections[0]['state']}")
        if told:
            last[attempt["ticket_id"]] = told[-1]
            if told[-1]["state"] != attempt["state"]:
                say(Kind.LOST, f"{name} is {attempt['state']}, its invocation {told[-1]['state']}")
            if any(row["day"] != attempt["day"] for row in told):
                say(Kind.CHARGE, f"{name} was settled on another day than it was granted")
    for ticket, told in rows.items():
        say(Kind.DOUBLE, f"{len(told)} invocations of {ticket}, which is no attempt")
    states = Counter(attempt["state"] for attempt in found.attempts)
    result.charged, result.zero, result.unknown = states["charged"], states["zero"], states["unknown"]
    return last


def _dispatches(
    attempts: Iterable[asyncpg.Record], dispatches: Sequence[dict[str, Any]], say: _Saying, *, everything: bool
) -> None:
    """
    Each dispatch has an attempt of its own, and each attempt at most one dispatch.

    The provider knows a dispatch by its debit. An attempt that got an answer was dispatched; one that ended without
    may have been; one that is settled as not dispatched was not.
    """
    arrived = Counter(one["correlation"] for one in dispatches)
    proven: Counter[str] = Counter()
    possible: Counter[str] = Counter()
    for row in attempts:
        if row["status"] in ("success", "error") or row["http_status"] is not None:
            proven[row["debit_id"]] += 1
        elif row["status"] != "not_dispatched":
            possible[row["debit_id"]] += 1
    for debit in arrived.keys() | proven.keys():
        there, least = arrived[debit], proven[debit]
        if there > least + possible[debit]:
            say(Kind.LOST, f"{debit} was dispatched {there} times and has {least + possible[debit]} attempts for it")
        if there < least and everything:
            say(Kind.DOUBLE, f"{debit} was dispatched {there} times and has {least} attempts that got an answer")


def true_cost(dispatch: Mapping[str, Any], prices: Mapping[str, Price]) -> Decimal:
    """What the provider's work is worth: in whole numbers, rounded once, half to even. Nothing of it is metering's."""
    price_in, price_out = prices[dispatch["model"]]
    exact = (dispatch["tokens_in"] * Fraction(price_in) + dispatch["tokens_out"] * Fraction(price_out)) / _MILLION
    return Decimal(round(exact * 10**_DIGITS)).scaleb(-_DIGITS)


def _charges(
    attempts: Iterable[asyncpg.Record],
    dispatches: Sequence[dict[str, Any]],
    prices: Mapping[str, Price],
    say: _Saying,
) -> dict[str, list[dict[str, Any]]]:
    """What was charged is what the provider says it worked, at the configured price. What is left, by debit."""
    unclaimed = {one["request_id"]: one for one in dispatches}
    by_id = dict(unclaimed)
    anonymous: list[asyncpg.Record] = []
    for row in attempts:
        if row["state"] != "charged":
            continue
        if row["provider_request_id"] is None:
            # An answer stored by a process that died is charged by another, which knows no more than the usage.
            anonymous.append(row)
            continue
        name = _named(row)
        dispatch = by_id.get(row["provider_request_id"])
        if dispatch is None:
            say(Kind.CHARGE, f"{name} names a dispatch that the provider does not know")
        elif unclaimed.pop(row["provider_request_id"], None) is None:
            say(Kind.DOUBLE, f"{name} charges a dispatch that was charged before")
        else:
            worked = (dispatch["tokens_in"], dispatch["tokens_out"])
            if worked != (row["input_total"], row["output_total"]):
                say(Kind.CHARGE, f"{name} has {row['input_total']}/{row['output_total']} tokens, the provider {worked}")
            usd = true_cost(dispatch, prices)
            if usd != row["usd"]:
                say(Kind.CHARGE, f"{name} was charged {row['usd']}, its usage costs {usd}")
    left: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for dispatch in unclaimed.values():
        left[dispatch["correlation"]].append(dispatch)
    for row in anonymous:
        found = next(
            (
                one
                for one in left[row["debit_id"]]
                if (one["tokens_in"], one["tokens_out"]) == (row["input_total"], row["output_total"])
                and true_cost(one, prices) == row["usd"]
            ),
            None,
        )
        if found is None:
            say(Kind.CHARGE, f"{_named(row)} was charged {row['usd']} for what the provider has not done")
        else:
            left[row["debit_id"]].remove(found)
    return left


def _bounds(
    attempts: Iterable[asyncpg.Record],
    unclaimed: Mapping[str, list[dict[str, Any]]],
    prices: Mapping[str, Price],
    say: _Saying,
) -> None:
    """Work that nobody is charged for is that of an attempt of unknown cost, whose bound is no less than its worth."""
    bounds: defaultdict[str, list[Decimal]] = defaultdict(list)
    for row in attempts:
        if row["state"] == "unknown":
            if row["upper_bound_usd"] is None:
                say(Kind.CHARGE, f"{_named(row)} is unknown and has no bound, although its price is known")
            bounds[row["debit_id"]].append(row["upper_bound_usd"] or Decimal(0))
    for debit, dispatches in unclaimed.items():
        costs = sorted((cost for one in dispatches if (cost := true_cost(one, prices))), reverse=True)
        known = sorted(bounds[debit], reverse=True)
        if len(costs) > len(known):
            say(Kind.LOST, f"of {debit} {len(costs)} dispatches are not charged, and {len(known)} attempts are unknown")
        for cost, bound in zip(costs, known, strict=False):
            if cost > bound:
                say(Kind.CHARGE, f"{debit} is unknown and at most {bound}; the provider's work is worth {cost}")


def _named(row: asyncpg.Record) -> str:
    return f"{row['debit_id']} attempt {row['attempt']}"


def _counters(found: Snapshot, last: Iterable[asyncpg.Record], say: _Saying) -> None:
    """Every counter of every kind is the sum of its rows, and there is no other."""
    wanted: defaultdict[tuple[str, ...], list[Any]] = defaultdict(lambda: [Decimal(0), 0, 0, Decimal(0), 0, 0, 0])
    for row in last:
        unknown = row["state"] == "unknown"
        for name in _counted_by(row):
            sums = wanted[name]
            sums[0] += row["usd"] or 0
            sums[1] += 1
            sums[2] += unknown
            sums[3] += (row["upper_bound_usd"] or 0) if unknown else 0
            sums[4] += unknown and row["upper_bound_usd"] is None
            sums[5] += row["input_total"] or 0
            sums[6] += row["output_total"] or 0
    counted: dict[tuple[str, ...], list[Any]] = {}
    for row in found.counters:
        by_day = row["kind"] in _OF_A_DAY
        words = (str(row["day"]), str(row["key_id"]), *row["names"]) if by_day else (row["name"],)
        if (row["kind"], *words) in counted:
            say(Kind.COUNTER, f"{row['kind']} {'/'.join(words)} is counted under two names")
        counted[row["kind"], *words] = list(row.values())[5:]
    for name in wanted.keys() | counted.keys():
        is_there, should_be = counted.get(name), wanted.get(name)
        if is_there != should_be:
            say(Kind.COUNTER, f"{'/'.join(name)} is {is_there}, the invocations make {should_be}")


#: What has its day, its key and its names in columns of their own.
_OF_A_DAY: Final = ("route_day", "run_day", "step_day", "tag_day")


def _counted_by(row: asyncpg.Record) -> Iterable[tuple[str, ...]]:
    """The counters that an attempt is counted in."""
    key, day = str(row["key_id"]), str(row["day"])
    yield from (("total", ""), ("day", day), ("key", key), ("key_day", f"{key}/{day}"))
    if row["session_id"] is not None:
        yield "session", f"{key}/{row['session_id']}"
    route = (row["provider"] or "", row["requested_model"] or "", row["upstream_model"] or "")
    yield "route_day", day, key, *route
    if row["run_id"] is not None:
        yield "run_day", day, key, row["run_id"]
    if row["step_id"] is not None:
        yield "step_day", day, key, row["run_id"] or "", row["step_id"]
    for tag, value in (msgspec.json.decode(row["tags"], type=dict[str, str]) if row["tags"] else {}).items():
        yield "tag_day", day, key, tag, value


def _heard(heard: Sequence[Heard], attempts: Iterable[asyncpg.Record], result: Audit, say: _Saying) -> None:
    """What a caller was told is so: an answer that it has is charged, and one said to be settled at that cost."""
    charged: defaultdict[str, list[Decimal]] = defaultdict(list)
    for row in attempts:
        if row["state"] == "charged":
            charged[row["debit_id"]].append(row["usd"])
    for one in heard:
        if one.ended != "complete":
            continue
        costs = charged[one.marker]
        if not costs:
            if one.settled or not one.killed_after:
                told = "said to be settled" if one.settled else "said to be pending"
                say(Kind.LOST, f"the caller has the answer of {one.marker}, {told}; nothing was charged")
            else:
                result.answered_and_unknown += 1
                say(
                    Kind.LOST, f"the caller has the answer of {one.marker}, its process was killed; nothing was charged"
                )
        elif one.usd is not None and one.usd not in costs:
            say(Kind.CHARGE, f"the caller of {one.marker} was told {one.usd}, charged was {costs}")
