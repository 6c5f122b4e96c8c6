"""What an outcome says about its group: allowances, floors, breaker."""

from __future__ import annotations

from typing import Final

from admission.breaker import BreakerState, closed, cooldown, judged
from admission.clock import MILLISECOND, SECOND
from admission.core.floors import KINDS
from admission.core.work import Work
from admission.lease import Ending, Verdict
from admission.state import Answers, Decide, Floor, FloorKind, Outcome, Ticket

_STRIKES: Final = 20


def judge(w: Work, ticket: Ticket, outcome: Outcome) -> None:
    """What an outcome says about its group: allowances, floors, breaker."""
    settlement = outcome.settlement
    verdict, ending = settlement.verdict, settlement.ending
    if ending is Ending.NOT_DISPATCHED:
        w.give_back(ticket.group, ticket.model, 1, ticket.tokens)
    elif settlement.used_tokens is not None:
        w.give_back(ticket.group, ticket.model, 0, ticket.tokens - settlement.used_tokens)
    _told_left(w, ticket, outcome)
    after = None if outcome.retry_after_ms is None else outcome.retry_after_ms * MILLISECOND
    model = "" if settlement.account_wide else ticket.model
    kind = KINDS.get(verdict)
    if kind is not None:
        after = w.was.unavailable if after is None and kind != "rate_limit" else after
        _raise_floor(w, ticket.group, ticket.credential, model, kind, after)
    group = w.groups.view[ticket.group]
    breaker = group.breaker
    if not settlement.lease.generation == ticket.generation == breaker.generation:
        return
    if breaker.state is BreakerState.HALF_OPEN and breaker.probe != ticket.ticket_id:
        return
    cause = "probe_undecided" if verdict is Verdict.NONE else verdict.value
    w.put_breaker(ticket.group, judged(breaker, group.limits, verdict, ending, w.now), cause)


def _told_left(w: Work, ticket: Ticket, outcome: Outcome) -> None:
    """
    Lowers what is left to what the provider said. It need not have counted what was granted after this ticket, of
    which no more than a minute's worth can weigh.
    """
    settlement = outcome.settlement
    left = (settlement.requests_left, settlement.tokens_left)
    if left == (None, None):
        return
    assert ticket.granted_at is not None
    granted_at = max(ticket.granted_at, w.now - 60 * SECOND)
    since = [
        t
        for t in w.tickets.view.values()
        if t.group == ticket.group
        and t.ticket_id != ticket.ticket_id
        and t.state != "queued"
        and t.granted_at is not None
        and t.granted_at >= granted_at
    ]
    for name, allowance in w.allowances_of(ticket.group, ticket.model):
        if allowance.rated and (name or settlement.account_wide):
            counted = [t for t in since if not name or t.model == name]
            told = allowance.told(left, outcome.told_ms * MILLISECOND, counted)
            w.allowances.put((ticket.group, name), told)


def _raise_floor(w: Work, group: str, credential: str, model: str, kind: FloorKind, after: int | None) -> None:
    """It may be raised and is never lowered. Without a time it grows with each one in a row."""
    key = (group, credential, model, kind)
    was = w.floors.view.get(key)
    strikes = 0 if was is None else was.strikes
    if after is None:
        in_a_row = was is not None and w.now <= was.until + (was.until - was.since)
        strikes = min(strikes + 1, _STRIKES) if in_a_row else 0
        after = cooldown(w.group(group).limits, strikes)
    until = max(w.now + after, 0 if was is None else was.until)
    w.floors.put(key, Floor(since=w.now, until=until, strikes=strikes))
    for ticket in w.waiting(group):
        if ticket.credential != credential or model not in ("", ticket.model):
            continue
        if kind != "rate_limit" or not ticket.waits_for_cooldown or ticket.queue_deadline <= until:
            w.tickets.drop(ticket.ticket_id)


def first_content(w: Work, event: Decide) -> Answers:
    """A probe that has given content has decided: the breaker closes, whatever comes later."""
    group = w.groups.view.get(event.group)
    if group is not None:
        breaker = group.breaker
        if breaker.state is BreakerState.HALF_OPEN and (breaker.probe, breaker.generation) == (
            event.ticket,
            event.generation,
        ):
            w.put_breaker(event.group, closed(breaker, group.limits), "first_content")
    return Answers()
