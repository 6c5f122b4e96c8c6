"""What is set from outside: groups as they are configured, an operator's reset, a store that is closed."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from admission.breaker import Breaker, BreakerLimits
from admission.clock import MILLISECOND, microseconds
from admission.core.work import Work
from admission.settings import GroupSettings
from admission.state import Allowance, Answers, Close, Configure, Group, Reset


def configure(w: Work, event: Configure) -> Answers:
    seen: dict[str, int] = {}
    for group_id in sorted(event.groups):
        given = event.groups[group_id]
        # Whether a limit is the built-in one, and which endpoints there are, is no limit.
        bare = replace(given, concurrency_is_default=False, endpoints=())
        version = seen[f"group {group_id}"] = _seen(w, f"group {group_id}", (event.revision, bare))
        known = w.groups.view.get(group_id)
        if known is None:
            w.groups.put(group_id, Group(settings=given, version=version, limits=limits_of(given)))
        elif known.version < version:
            w.groups.put(group_id, replace(known, settings=given, version=version, limits=limits_of(given)))
        else:
            continue
        _configure_allowances(w, group_id, given)
    endpoints = {e: group_id for group_id, given in event.groups.items() for e in given.endpoints or (group_id,)}
    for endpoint in sorted(endpoints):
        subject = f"endpoint {endpoint}"
        version = seen[subject] = _seen(w, subject, (event.revision, endpoints[endpoint]))
        if version == _newest(w, subject):
            _move(w, endpoint, endpoints[endpoint])
    other = {subject.split(" ", 1)[1] for subject, version in seen.items() if _newest(w, subject) > version}
    return Answers(groups=tuple(sorted(other)))


def _seen(w: Work, subject: str, given: object) -> int:
    """The version of these settings: what was first seen last is in force."""
    key = (subject, msgspec.json.encode(given, order="deterministic"))
    if key not in w.versions.view:
        w.versions.put(key, len(w.versions.view) + 1)
    return w.versions.view[key]


def _newest(w: Work, subject: str) -> int:
    return max(version for (of, _), version in w.versions.view.items() if of == subject)


def limits_of(given: GroupSettings) -> BreakerLimits:
    return BreakerLimits(
        concurrency=given.concurrency,
        failure_threshold=given.failure_threshold,
        failure_window=microseconds(given.failure_window_s),
        first_cooldown=microseconds(given.first_cooldown_s),
        longest_cooldown=microseconds(given.longest_cooldown_s),
    )


def _configure_allowances(w: Work, group_id: str, given: GroupSettings) -> None:
    """New buckets are full; one that is there already keeps what it holds, up to its new size."""
    wanted = given.allowances
    for key in [key for key in w.allowances.view if key[0] == group_id and key[1] not in wanted]:
        w.allowances.drop(key)
    for model, limits in wanted.items():
        known = w.allowances.view.get((group_id, model), Allowance()).at(w.now)
        bucket = Allowance(
            concurrency=limits.concurrency,
            requests_per_minute=limits.requests_per_minute,
            tokens_per_minute=limits.tokens_per_minute,
            requests_left=_size(limits.requests_per_minute, known.requests_per_minute, known.requests_left),
            tokens_left=_size(limits.tokens_per_minute, known.tokens_per_minute, known.tokens_left),
            filled_at=w.now,
        )
        w.allowances.put((group_id, model), bucket)


def _size(per_minute: int | None, was: int | None, left: float) -> float:
    if per_minute is None:
        return 0.0
    return float(per_minute) if was is None else min(float(per_minute), left)


def _move(w: Work, endpoint: str, group_id: str) -> None:
    """The endpoint is of this group from now on, and so are its live tickets and what was said of its credentials."""
    left = w.endpoints.view.get(endpoint)
    if left == group_id:
        return
    w.endpoints.put(endpoint, group_id)
    if left is None:
        return
    group, old = w.groups.view[group_id], w.groups.view[left]
    w.groups.put(group_id, replace(group, next_number=max(group.next_number, old.next_number)))
    for ticket in list(w.tickets.view.values()):
        if ticket.endpoint == endpoint and ticket.group == left:
            # A generation of the other group's breaker means nothing here.
            generation = None if ticket.generation is None else 0
            w.tickets.put(ticket.ticket_id, replace(ticket, group=group_id, generation=generation))
    # A group that nothing belongs to any more keeps nothing back: what comes to it later brings its floors along.
    deserted = left not in w.endpoints.view.values()
    for key, floor in list(w.floors.view.items()):
        if key[0] == left:
            there = w.floors.view.get((group_id, *key[1:]))
            until = floor.until if there is None else max(there.until, floor.until)
            w.floors.put((group_id, *key[1:]), replace(there or floor, until=until))
            if deserted:
                w.floors.drop(key)


def reset(w: Work, event: Reset) -> Answers:
    group = w.groups.view.get(event.group)
    if group is None:
        return Answers()
    w.put_breaker(event.group, Breaker(generation=group.breaker.generation + 1), "reset")
    for key in [key for key in w.floors.view if key[0] == event.group]:
        w.floors.drop(key)
    return Answers(groups=(event.group,))


def close(w: Work, event: Close) -> Answers:
    w.closed_until = max(w.closed_until, w.now + event.for_ms * MILLISECOND)
    return Answers()
