"""
Limits of keys: what is in the gateway of a key at once, its requests and tokens per minute, its budgets and those of
its sessions.

They are looked at when a ticket is enqueued. What a ticket has reserved ends with it, or when the ledger has its cost
or its bound.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Final
from zoneinfo import ZoneInfo

import msgspec
from msgspec.structs import replace

from admission.clock import SECOND, moment, to_ms
from admission.contract import TicketRow
from admission.core.work import Work
from admission.lease import Demand, KeyLimit
from admission.settings import KeyLimits
from admission.state import Answers, Bucket, LimitedKey, LimitKey, LimitSession, SessionBudget, Spent, Ticket

_ZERO: Final = Decimal(0)
_MINUTE_MS: Final = 60_000


class _Money(msgspec.Struct):
    """A budget, and what is known of it."""

    name: str
    most: Decimal | None
    spent: Decimal
    unknown: Decimal
    reserved: Decimal
    #: When it starts anew, on the store's clock.
    ends: int | None


class Room:
    """What one key has left, as its elements are enqueued one by one."""

    def __init__(self, w: Work, key_id: uuid.UUID, limited: LimitedKey, sessions: Sessions) -> None:
        self._w = w
        self._limits = limited.limits
        tickets = [t for t in w.tickets.view.values() if t.key_id == key_id]
        self._debits = {ticket.debit_id for ticket in tickets}
        held = [t.quarantined_until for t in tickets if t.state == "quarantined" and t.quarantined_until is not None]
        self._first_out = min(held) if held and len(held) == len(tickets) else None
        bucket = bucket_at(w, key_id, limited)
        self._requests = bucket.requests_left
        self._tokens = bucket.tokens_left - sum(t.tokens for t in tickets if t.reserved is not None)
        self._total, *self._periods = _budgets(w, key_id, limited, tickets)
        self._sessions = sessions

    def refusal(self, demand: Demand) -> TicketRow | None:
        """Why it has no room; None where it has, which is taken then."""
        limits, tokens = self._limits, demand.tokens
        wanted = demand.reserved_usd or _ZERO
        if limits.tokens_per_minute is not None and tokens > limits.tokens_per_minute:
            return _row(demand, "too_large", KeyLimit(name="tokens_per_minute", most=Decimal(limits.tokens_per_minute)))
        session = self._sessions.of(demand)
        if session is not None and demand.most_usd is None:
            return _not_bounded(demand, session)
        # The longest period first: what is over there is over for longest.
        budgets = [self._total, *([] if session is None else [session]), *self._periods]
        if exceeded := _exceeded(self._w, demand, budgets, wanted):
            return exceeded
        at_once = len(self._debits - {demand.debit_id})
        if limits.concurrency is not None and at_once >= limits.concurrency:
            wait_ms = None if self._first_out is None else max(to_ms(self._first_out - self._w.now), 100)
            most = KeyLimit(name="concurrency", most=Decimal(limits.concurrency))
            return _row(demand, "key_limit", most, wait_ms)
        first = demand.attempt == 1
        if limits.requests_per_minute is not None and first and self._requests < 1:
            wait_ms = _refilled_ms(1 - self._requests, limits.requests_per_minute)
            most = KeyLimit(name="requests_per_minute", most=Decimal(limits.requests_per_minute))
            return _row(demand, "key_limit", most, wait_ms)
        if limits.tokens_per_minute is not None and self._tokens < tokens:
            wait_ms = _refilled_ms(tokens - self._tokens, limits.tokens_per_minute)
            most = KeyLimit(name="tokens_per_minute", most=Decimal(limits.tokens_per_minute))
            return _row(demand, "key_limit", most, wait_ms)
        if lacking := _lacking(demand, budgets, wanted):
            return lacking
        self._take(demand)
        for money in budgets:
            money.reserved += wanted
        return None

    def _take(self, demand: Demand) -> None:
        self._debits.add(demand.debit_id)
        self._first_out = None
        self._requests -= demand.attempt == 1
        self._tokens -= demand.tokens


class Sessions:
    """Those of one batch that have a budget, as their elements are enqueued one by one."""

    def __init__(self, w: Work) -> None:
        self._w = w
        self._money: dict[tuple[uuid.UUID, str], _Money] = {}

    def of(self, demand: Demand) -> _Money | None:
        """None where its session has no budget, or it has no session."""
        if demand.session_id is None:
            return None
        name = (demand.key_id, demand.session_id)
        said = self._w.session_budgets.view.get(name, SessionBudget())
        limited = None if demand.reserved_usd is None else self._w.limited.view.get(demand.key_id)
        of_key = None if limited is None else limited.limits.budget_session_usd
        bounds = [usd for usd in (said.own, of_key if said.given is None else said.given) if usd is not None]
        if not bounds:
            return None
        if name not in self._money:
            self._money[name] = self._looked_up(*name)
        self._money[name].most = min(bounds)
        return self._money[name]

    def refusal(self, demand: Demand) -> TicketRow | None:
        """As `Room.refusal`, for one of a key that is taken for one without limits."""
        session = self.of(demand)
        if session is None:
            return None
        if demand.most_usd is None:
            return _not_bounded(demand, session)
        wanted = demand.most_usd if demand.reserved_usd is None else demand.reserved_usd
        refusal = _exceeded(self._w, demand, [session], wanted) or _lacking(demand, [session], wanted)
        if refusal is None:
            session.reserved += wanted
        return refusal

    def _looked_up(self, key_id: uuid.UUID, session_id: str) -> _Money:
        w = self._w
        spent = w.sessions.view.get((key_id, session_id), Spent())
        at_work = (t for t in w.tickets.view.values() if (t.key_id, t.session) == (key_id, session_id))
        return _Money(
            name="budget_session_usd",
            most=None,
            spent=spent.usd,
            unknown=spent.unknown,
            reserved=sum((t.reserved for t in at_work if t.reserved is not None), _ZERO),
            ends=None,
        )


class Rooms:
    """Of the keys of one batch."""

    def __init__(self, w: Work) -> None:
        self._w = w
        self._sessions = Sessions(w)
        self._rooms: dict[uuid.UUID, Room] = {}

    def refusal(self, demand: Demand) -> TicketRow | None:
        """As `Room.refusal`. A demand that reserves nothing is of a key without limits, or is taken for one."""
        limited = self._w.limited.view.get(demand.key_id)
        if demand.reserved_usd is None or limited is None:
            return self._sessions.refusal(demand)
        if demand.key_id not in self._rooms:
            self._rooms[demand.key_id] = Room(self._w, demand.key_id, limited, self._sessions)
        return self._rooms[demand.key_id].refusal(demand)


def use(w: Work, enqueued: Iterable[Demand]) -> None:
    """Takes what these use of the buckets of their keys: a request of each first attempt."""
    requests: dict[uuid.UUID, int] = {}
    for demand in enqueued:
        if demand.reserved_usd is not None:
            requests[demand.key_id] = requests.get(demand.key_id, 0) + (demand.attempt == 1)
    for key_id, many in requests.items():
        limited = w.limited.view.get(key_id)
        if limited is None:
            continue
        if limited.limits.requests_per_minute is None and limited.limits.tokens_per_minute is None:
            continue
        bucket = bucket_at(w, key_id, limited)
        left = bucket.requests_left - many if limited.limits.requests_per_minute is not None else 0.0
        w.limited.put(key_id, replace(limited, bucket=replace(bucket, requests_left=left)))


def limit_key(w: Work, event: LimitKey) -> Answers:
    """A bucket that is new begins full; one whose size changes keeps its level."""
    known = w.limited.view.get(event.key_id)
    limits = event.limits
    if limits == KeyLimits():
        if known is not None:
            w.limited.drop(event.key_id)
        return Answers()
    was = Bucket() if known is None else bucket_at(w, event.key_id, known)
    before = KeyLimits() if known is None else known.limits
    bucket = Bucket(
        requests_left=_size(limits.requests_per_minute, before.requests_per_minute, was.requests_left),
        tokens_left=_size(limits.tokens_per_minute, before.tokens_per_minute, was.tokens_left),
        tokens_seen=_tokens_told(w, event.key_id),
        filled_at=w.now,
    )
    w.limited.put(event.key_id, LimitedKey(limits=limits, bucket=bucket))
    return Answers()


def limit_session(w: Work, event: LimitSession) -> Answers:
    """Whoever may not raise it is told what the session may cost at most."""
    name = (event.key_id, event.session_id)
    was = w.session_budgets.view.get(name, SessionBudget())
    limited = w.limited.view.get(event.key_id)
    most = was.given
    if most is None and limited is not None:
        most = limited.limits.budget_session_usd
    if event.own or not event.raises:
        raised = event.usd is not None and most is not None and event.usd > most
        if raised or (event.usd is None and was.given is not None and not event.own):
            return Answers(most_usd=most)
    now = replace(was, own=event.usd) if event.own else replace(was, given=event.usd)
    if now != SessionBudget():
        w.session_budgets.put(name, now)
    elif name in w.session_budgets.view:
        w.session_budgets.drop(name)
    return Answers()


def _size(per_minute: int | None, before: int | None, left: float) -> float:
    if per_minute is None:
        return 0.0
    return float(per_minute) if before is None else min(float(per_minute), left)


def bucket_at(w: Work, key_id: uuid.UUID, limited: LimitedKey) -> Bucket:
    """Filled up to now, and less what the ledger was told since it was looked at."""
    bucket, limits = limited.bucket, limited.limits
    told = _tokens_told(w, key_id)
    seconds = max(w.now - bucket.filled_at, 0) / SECOND
    return Bucket(
        requests_left=_filled(bucket.requests_left, limits.requests_per_minute, seconds),
        tokens_left=_filled(bucket.tokens_left - (told - bucket.tokens_seen), limits.tokens_per_minute, seconds),
        tokens_seen=told,
        filled_at=max(bucket.filled_at, w.now),
    )


def _filled(left: float, per_minute: int | None, seconds: float) -> float:
    return 0.0 if per_minute is None else min(float(per_minute), left + per_minute * seconds / 60)


def _tokens_told(w: Work, key_id: uuid.UUID) -> int:
    return sum(spent.tokens for (of, _), spent in w.spent.view.items() if of == key_id)


def _refilled_ms(lacking: float, per_minute: int) -> int:
    return max(math.ceil(lacking * _MINUTE_MS / per_minute), 1)


def _budgets(w: Work, key_id: uuid.UUID, limited: LimitedKey, tickets: list[Ticket]) -> Iterable[_Money]:
    """Altogether, of the month and of the day."""
    limits = limited.limits
    today = w.day(w.now)
    month = today.replace(day=1)
    next_month = (month + timedelta(days=31)).replace(day=1)
    spent = [(day, found) for (of, day), found in w.spent.view.items() if of == key_id]
    reserved = [(t.reserved, today if t.granted_at is None else w.day(t.granted_at)) for t in tickets]
    for name, most, begins, over in (
        ("budget_total_usd", limits.budget_total_usd, None, None),
        ("budget_month_usd", limits.budget_month_usd, month, next_month),
        ("budget_day_usd", limits.budget_day_usd, today, today + timedelta(days=1)),
    ):
        within = [found for day, found in spent if begins is None or (over is not None and begins <= day < over)]
        yield _Money(
            name=name,
            most=most,
            spent=sum((found.usd for found in within), _ZERO),
            unknown=sum((found.unknown for found in within), _ZERO),
            # Of an attempt that was granted in an earlier period the charge will belong there.
            reserved=sum((r for r, day in reserved if r is not None and (begins is None or day >= begins)), _ZERO),
            ends=None if over is None else _midnight(w, over),
        )


def _midnight(w: Work, day: date) -> int:
    """When a day begins, on the store's clock."""
    begins = datetime.combine(day, time(), ZoneInfo(w.was.zone))
    return (begins - moment(0)) // timedelta(microseconds=1) + w.was.ahead


def _told(money: _Money, most: Decimal, wanted: Decimal) -> KeyLimit:
    return KeyLimit(
        name=money.name,
        most=most,
        spent=money.spent,
        unknown=money.unknown,
        reserved=money.reserved,
        wanted=wanted,
    )


def _exceeded(w: Work, demand: Demand, budgets: Iterable[_Money], wanted: Decimal) -> TicketRow | None:
    for money in budgets:
        if wanted > 0 and money.most is not None and money.spent + money.unknown + wanted > money.most:
            wait_ms = None if money.ends is None else to_ms(money.ends - w.now)
            return _row(demand, "budget_exceeded", _told(money, money.most, wanted), wait_ms)
    return None


def _lacking(demand: Demand, budgets: Iterable[_Money], wanted: Decimal) -> TicketRow | None:
    for money in budgets:
        if wanted > 0 and money.most is not None and money.spent + money.unknown + money.reserved + wanted > money.most:
            return _row(demand, "budget_reserved", _told(money, money.most, wanted))
    return None


def _not_bounded(demand: Demand, session: _Money) -> TicketRow:
    assert session.most is not None
    return _row(demand, "cost_not_bounded", KeyLimit(name=session.name, most=session.most))


def _row(demand: Demand, answer: str, limit: KeyLimit, wait_ms: int | None = None) -> TicketRow:
    return TicketRow(demand.ticket_id, answer, wait_ms=wait_ms, key_limit=limit)
