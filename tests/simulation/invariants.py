"""
What must hold of the one state after each event, whatever went wrong before. Checked from the outside: nothing here
uses the code that decides.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from decimal import Decimal

import msgspec

from admission.breaker import BreakerState
from admission.clock import SECOND
from admission.lease import Ending
from admission.state import Abandon, Acquire, Answers, Attempt, Event, Group, Rescan, Settle, State, Ticket


class Violation(AssertionError):
    """An invariant does not hold."""


#: What an attempt's end may become: it settles once, and "unknown" is corrected once.
_ENDINGS = {
    (None, "charged"),
    (None, "zero"),
    (None, "unknown"),
    ("unknown", "charged"),
    ("unknown", "zero"),
}


class _Told(msgspec.Struct, frozen=True):
    """What the record of a settlement says of money."""

    usd: Decimal = Decimal(0)
    upper_bound_usd: Decimal | None = None


class Watch:
    """Told of every event that a database applies. Counts what it has seen, and raises `Violation`."""

    def __init__(self, runs: Callable[[uuid.UUID], bool], unconfirmed_grant_s: float) -> None:
        """`runs`: whether the provider still works on a ticket, for all it knows."""
        self._runs = runs
        self._unconfirmed = round(unconfirmed_grant_s * SECOND)
        self.seen: Counter[str] = Counter()
        self.steps = 0
        self.settlements: Counter[uuid.UUID] = Counter()
        #: What each attempt that had its end has cost, or can have.
        self.costs: dict[uuid.UUID, Decimal] = {}
        #: By ticket, of those that have a session: key and name, and the most that it can cost.
        self._of_sessions: dict[uuid.UUID, tuple[tuple[uuid.UUID, str], Decimal]] = {}
        self._last = 0

    def __call__(self, before: State, event: Event, after: State, answers: Answers, now: int) -> None:
        self.steps += 1
        if now < self._last:
            raise Violation("time went back")
        self._last = now
        for row in answers.tickets:
            self.seen[f"answer {row.answer}"] += 1
        granted = self._tickets(before, event, after, now)
        self._attempts(before, event, after)
        self._sessions(before, event, after)
        self._groups(before, event, after, granted, now)
        self._answers(event, after, answers)

    def _tickets(self, before: State, event: Event, after: State, now: int) -> list[Ticket]:
        """The tickets that this event granted."""
        granted: list[Ticket] = []
        if before.tickets is after.tickets:
            return granted
        for ticket_id, ticket in after.tickets.items():
            was = before.tickets.get(ticket_id)
            if was is ticket:
                continue
            # A grant that was not confirmed may return to the queue and be granted again at once.
            occupies = ticket.state in ("granted", "active")
            again = was is not None and was.state == "granted" and occupies and was.granted_at != ticket.granted_at
            if occupies and (was is None or was.state == "queued" or again):
                granted.append(ticket)
                if not isinstance(event, Acquire):
                    raise Violation(f"{type(event).__name__} granted a ticket")
            if was is not None and not again:
                self._moved(was, ticket, event, after, now)
        for ticket_id, ticket in before.tickets.items():
            if ticket_id not in after.tickets:
                self._gone(ticket, event, after, now)
        return granted

    def _moved(self, was: Ticket, ticket: Ticket, event: Event, after: State, now: int) -> None:
        if was.state == ticket.state:
            return
        self.seen[f"{was.state} becomes {ticket.state}"] += 1
        allowed = {
            ("queued", "granted"),
            ("queued", "active"),
            ("granted", "active"),
            ("granted", "queued"),
            ("active", "quarantined"),
        }
        if (was.state, ticket.state) not in allowed:
            raise Violation(f"a ticket that was {was.state} became {ticket.state}")
        if (was.state, ticket.state) == ("granted", "active"):
            if not isinstance(event, Rescan) or event.owner != ticket.owner:
                raise Violation("a grant was confirmed by somebody else than its owner")
            if after.groups[ticket.group].breaker.state is BreakerState.OPEN or _floored(after, ticket, now):
                raise Violation("a grant was confirmed while its breaker is open or a floor is in force")
        if ticket.state == "quarantined" and not isinstance(event, Settle):
            assert ticket.quarantined_until is not None
            assert was.hard_deadline is not None
            if ticket.quarantined_until < max(was.hard_deadline, min(now, was.hard_deadline)) + was.isolation:
                raise Violation("a lost attempt got less than its window of quarantine")

    def _gone(self, ticket: Ticket, event: Event, after: State, now: int) -> None:
        self.seen[f"{ticket.state} is gone"] += 1
        if ticket.state in ("queued", "granted"):
            return
        if ticket.ticket_id not in after.attempts:
            raise Violation(f"an attempt that was {ticket.state} is gone without a settlement")
        ended = isinstance(event, Settle) and any(
            e.settlement.lease.ticket_id == ticket.ticket_id and e.settlement.ending is not Ending.UNCERTAIN
            for e in event.elements
        )
        abandoned = isinstance(event, Abandon) and ticket.state == "active" and ticket.ticket_id in event.tickets
        # Of a lost one with no isolation left the quarantine begins and ends at once.
        until = ticket.quarantined_until or (ticket.hard_deadline or 0) + ticket.isolation
        if not ended and not abandoned and until > now:
            raise Violation(f"a slot that was {ticket.state} came free before its time, by {type(event).__name__}")
        if self._runs(ticket.ticket_id):
            raise Violation(f"a slot came free by {type(event).__name__} while the provider still works on it")

    def _attempts(self, before: State, event: Event, after: State) -> None:
        if before.attempts is after.attempts:
            return
        told = {e.settlement.lease.ticket_id: e.settlement for e in event.elements} if isinstance(event, Settle) else {}
        for ticket_id, attempt in after.attempts.items():
            was = before.attempts.get(ticket_id)
            if was is not attempt:
                self._settled(ticket_id, was, attempt)
                _, bound = self._of_sessions.get(ticket_id, (None, Decimal(0)))
                record = b"{}" if ticket_id not in told else told[ticket_id].record
                said = msgspec.json.decode(record, type=_Told)
                self.costs[ticket_id] = {
                    "charged": said.usd,
                    "zero": Decimal(0),
                    "unknown": bound if said.upper_bound_usd is None else said.upper_bound_usd,
                }[attempt.state]
        if len(after.attempts) < len(before.attempts):
            raise Violation("an attempt's end was forgotten")

    def _sessions(self, before: State, event: Event, after: State) -> None:
        """What a session has cost, can have cost and can still cost is within its budget whenever something begins."""
        if before.tickets is after.tickets or not isinstance(event, Acquire):
            return
        # Of a key that the asker takes for one without limits, only what was said of its sessions holds.
        unheld = {e.demand.ticket_id for e in event.elements if e.demand.reserved_usd is None}
        of_unheld = set()
        begun = set()
        for ticket_id, ticket in after.tickets.items():
            if ticket_id not in before.tickets and ticket.session is not None:
                bound = ticket.reserved or Decimal(0)
                self._of_sessions[ticket_id] = ((ticket.key_id, ticket.session), bound)
                if ticket_id in unheld:
                    of_unheld.add((ticket.key_id, ticket.session))
                if bound:
                    begun.add((ticket.key_id, ticket.session))
        for session in begun:
            said = after.session_budgets.get(session)
            limited = after.limited.get(session[0])
            of_key = None if limited is None or session in of_unheld else limited.limits.budget_session_usd
            given = of_key if said is None or said.given is None else said.given
            bounds = [usd for usd in (given, None if said is None else said.own) if usd is not None]
            known = [
                (ticket_id, bound)
                for ticket_id, (of, bound) in self._of_sessions.items()
                if of == session and (ticket_id in self.costs or ticket_id in after.tickets)
            ]
            most = sum((self.costs.get(ticket_id, bound) for ticket_id, bound in known), Decimal(0))
            self.seen["begun in a session with a budget"] += bool(bounds)
            if bounds and most > min(bounds):
                raise Violation(f"a session can cost {most} where it may cost {min(bounds)}")

    def _settled(self, ticket_id: uuid.UUID, was: Attempt | None, attempt: Attempt) -> None:
        old = None if was is None else was.state
        if (old, attempt.state) not in _ENDINGS or (was is not None and was.corrected):
            raise Violation(f"an attempt that was {old} was settled again as {attempt.state}")
        self.settlements[ticket_id] += 1
        if attempt.key_id is None:
            self.seen["tombstone"] += 1
        elif old is None:
            self.seen[f"settled as {attempt.state}"] += 1
        else:
            self.seen["corrected"] += 1

    def _groups(self, before: State, event: Event, after: State, granted: list[Ticket], now: int) -> None:
        for group_id, group in after.groups.items():
            was = before.groups.get(group_id)
            if was is None:
                continue
            if was.breaker.generation > group.breaker.generation:
                raise Violation("the generation fell")
            if was.breaker.state is not group.breaker.state:
                self.seen[f"breaker {was.breaker.state} becomes {group.breaker.state}"] += 1
                self._told(after, group_id, was, group)
            given = [ticket for ticket in granted if ticket.group == group_id]
            queued = [t for t in after.tickets.values() if t.group == group_id and t.state == "queued"]
            self._occupancy(after, group, group_id, given)
            if given:
                self._order(after, given, queued, now)
                self._gates(after, group, given, now)
            if isinstance(event, Acquire) and event.group == group_id:
                self._bound(before, event, group, queued)
                self._reconciled(after, group_id, now)

    @staticmethod
    def _told(after: State, group_id: str, was: Group, group: Group) -> None:
        breaker = group.breaker
        told = [(change.was, change.became, change.generation) for change in after.changes if change.group == group_id]
        if told[-1:] != [(was.breaker.state, breaker.state, breaker.generation)]:
            raise Violation("a breaker has changed, and nobody is told")
        if group.opened_total - was.opened_total != (breaker.state is BreakerState.OPEN):
            raise Violation("an opening was not counted, or counted twice")
        if (breaker.state is BreakerState.CLOSED) != (group.open_since is None):
            raise Violation("a breaker is closed and open since then")

    def _occupancy(self, after: State, group: Group, group_id: str, given: list[Ticket]) -> None:
        slots = [t for t in after.tickets.values() if t.group == group_id and t.state != "queued"]
        limit = group.settings.concurrency
        active = sum(t.state != "quarantined" for t in slots)
        self.seen["over a lowered limit"] += active > limit
        if given and (active > limit or len(slots) > limit + group.settings.quarantine_headroom):
            raise Violation(f"{active} active and {len(slots)} slots after a grant at a limit of {limit}")
        breaker = group.breaker
        if breaker.ramp is not None and given:
            of_now = sum(t.state != "quarantined" and t.generation == breaker.generation for t in slots)
            if of_now > breaker.ramp:
                raise Violation(f"{of_now} run after closing, where the ramp allows {breaker.ramp}")
        if breaker.state is BreakerState.HALF_OPEN:
            probes = [t.ticket_id for t in slots if t.state != "quarantined" and t.generation == breaker.generation]
            if len(probes) > 1 or (probes and probes != [breaker.probe]):
                raise Violation(f"{len(probes)} probes")

    def _order(self, after: State, given: list[Ticket], queued: list[Ticket], now: int) -> None:
        """First come, first served within a class, those aside that cannot go."""
        for ticket in given:
            for other in queued:
                passed_over = (other.number, other.ticket_id.int) < (ticket.number, ticket.ticket_id.int)
                if (
                    passed_over
                    and other.klass is ticket.klass
                    and after.owners.get(other.owner, 0) > now
                    and other.queue_deadline > now
                    and not _floored(after, other, now)
                    and (other.group, other.model) not in after.allowances
                ):
                    raise Violation(f"ticket {ticket.number} was granted before {other.number}")

    def _gates(self, after: State, group: Group, given: list[Ticket], now: int) -> None:
        if after.closed_until > now:
            raise Violation("a grant while the store is closed")
        if group.breaker.state is BreakerState.OPEN:
            raise Violation("a grant while the breaker is open")
        for ticket in given:
            if after.owners.get(ticket.owner, 0) <= now:
                raise Violation("a grant to an owner that is not heard of")
            if _floored(after, ticket, now):
                raise Violation("a grant while a floor is in force")

    def _bound(self, before: State, event: Acquire, group: Group, queued: list[Ticket]) -> None:
        new = [ticket for ticket in queued if ticket.ticket_id not in before.tickets]
        if new:
            placed = any(e.demand.place is not None for e in event.elements)
            bound = group.settings.queue + (group.settings.concurrency if placed else 0)
            if len(queued) > bound:
                raise Violation(f"{len(queued)} wait where {bound} may")
            self.seen["over the bound by place"] += len(queued) > group.settings.queue

    def _reconciled(self, after: State, group_id: str, now: int) -> None:
        for ticket in after.tickets.values():
            if ticket.group != group_id:
                continue
            overdue = {
                "queued": ticket.queue_deadline + 2 * SECOND < now,
                "granted": (ticket.granted_at or 0) + self._unconfirmed <= now,
                # One that waited past its caller's deadline has no time left when it is granted.
                "active": (ticket.hard_deadline or 0) <= now and ticket.granted_at != now,
                "quarantined": (ticket.quarantined_until or 0) <= now,
            }
            if overdue[ticket.state]:
                raise Violation(f"a ticket is {ticket.state} after its time")

    def _answers(self, event: Event, after: State, answers: Answers) -> None:
        told = Counter(row.ticket_id for row in answers.tickets if row.answer != "notify" and row.ticket_id)
        asked = {e.demand.ticket_id for e in event.elements} if isinstance(event, Acquire) else set()
        if any(times > 1 for times in told.values()) or not asked <= set(told):
            raise Violation("an element was answered twice, or not at all")
        for row in answers.tickets:
            if row.answer == "granted":
                ticket = after.tickets.get(row.ticket_id) if row.ticket_id is not None else None
                if ticket is None or ticket.state != "active" or ticket.owner != getattr(event, "owner", None):
                    raise Violation("granted, it says, but the ticket is not the owner's active one")


def _floored(state: State, ticket: Ticket, now: int) -> bool:
    return any(
        group_id == ticket.group and credential == ticket.credential and model in ("", ticket.model) and f.until > now
        for (group_id, credential, model, _), f in state.floors.items()
    )
