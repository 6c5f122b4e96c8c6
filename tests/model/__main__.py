"""
The model check of admission: `python -m tests.model`, or with `--quick` a first look of some seconds.

Tests try schedules; this visits all of them. Two models in Promela say what the rules of admission allow every party
to do, in every order, and Spin looks at each state that can come of it. Then every planted bug of a list is put into
its model, and the check must find an error in each: a check that cannot fail proves nothing. A statement that no path
reaches is an error too. Needs Debian's `spin` and `gcc` (apt-get install spin gcc libc6-dev) and 3 GB of memory.

`slots.pml`: requests of two owners over the slots of one group. Acquires, confirmations and settlements whose
acknowledgement is lost before or after the commit, or that commit after their sender gave up; the same ticket asked for
again; tombstones; grants by another process that expire; heartbeats that lapse, processes that die; the hard deadline;
quarantine, isolation, providers that stop when the connection closes; settlements replayed, corrections with and
without proof of the end. Held in every state:
- occupied slots, unconfirmed and quarantined ones included, never exceed the limit; nor do executions at the provider;
- an execution never outlives its ticket: no slot is freed under one that may still run;
- a ticket has one lease for ever, no edge leads back, an attempt that has ended or was abandoned does not begin again;
- one dispatch a ticket, only while it is active in the store and has no tombstone and no end;
- one settlement, at most one correction (only of an unknown one), at most one charge, none without a dispatch; nothing
  dispatched stays without an end; a charge that was acknowledged is in the counters;
- faults over, everything drains: no dead end but the empty group, and no cycle at all.

`breaker.pml`: attempts under a breaker and a floor. Results of any generation at any later time, probes that are lost,
taken back, refused or slow. Held in every state:
- nothing is granted while the breaker is open or a floor is in force; a floor never comes down before its time;
- at most one undecided probe, and only in half-open;
- it opens only for enough failures of its own closed period, each counted once, or for its own probe; it closes only on
  the word of a probe granted since it opened; what is open is not opened again; a probe taken back does not open it;
- the generation grows with each change; after closing 1, 2, then all attempts are under way;
- every request is served in the end, and the probe's place is never lost.

What the models leave out, so that nobody takes them for more:
- Transactions are atomic steps. That the SQL makes them so (locks, snapshots, SKIP LOCKED, READ COMMITTED) is for the
  tests against PostgreSQL; that it does in a step what the model does, for the comparison with the pure core.
- Time is order without length. That the remote end has ended at hard deadline + isolation, and that a holder stops
  trusting itself before the store does, are assumptions here. A process stopped between its last check and the first
  byte breaks the first one physically, and so may a clock that jumps.
- Nobody is the first in line: waiters are granted in any order, so the models say nothing of order, classes, shares
  and fairness. One group, one limit: no per-model limits, allowances, headroom, queue bound, changed limits, budgets,
  fences, debits, merged groups. One floor: not one for each credential and model, and no unavailable ones.
- The store never forgets a commit and never leaves for long: no failover, no journal, no reclaim pause. A lost owner is
  not seen again under its name. An acquire is under way at most twice at once, a confirmation or abandoning once.
- Every abandoned ticket without an end gets a tombstone; the controller spares those whose acquire was acknowledged.
- A probe that is abandoned, rather than settled as not dispatched, is a lost one and reopens: so say the rules.
- The breaker has no slow answers, its window forgets all failures at once, and the growing cooldown is a moment.
- The sizes are small (the table says which), and so is the number of faults. Bugs that need more are not found.

A confirmation, by the rules as written, does not look at the breaker. So what was granted before an opening, to
another process, may be confirmed and sent after it, within the 2 s of an unconfirmed grant. The model allows that.
`fenced` in the table is the stricter rule (confirm only in the generation of the grant and under no floor), by which
nothing is confirmed into an open breaker at all; the bug "unfenced confirmation" is the rule as written, against that
property.

Both searches use Spin's partial order reduction, which keeps assertions, dead ends and cycles of steps; nearly all
steps touch shared state, so it hardly reduces. States are stored whole. Two reductions are made in the models:
requests of one owner begin in order and free slots are taken in order, being alike; and what can have no effect any
more is forgotten.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.model.spin import Found, Search, Unusable, require_tools, search
from tests.progress import Progress

HERE: Final = Path(__file__).parent
SLOTS: Final = HERE / "slots.pml"
BREAKER: Final = HERE / "breaker.pml"

#: As many checkers at once as memory allows.
AT_ONCE: Final = min(2, os.cpu_count() or 1)


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the first table: a search that must find nothing."""

    name: str
    search: Search


class Mutant(msgspec.Struct, frozen=True, kw_only=True):
    """A planted bug: a search that must find something."""

    name: str
    search: Search


def _slots(requests: int, limit: int, faults: int) -> dict[str, int | None]:
    return {"N": requests, "LIMIT": limit, "FAULTS": faults}


def _breaker(limit: int, attempts: int, faults: int) -> dict[str, int | None]:
    return {"LIMIT": limit, "ATTEMPTS": attempts, "FAULTS": faults}


STRICT: Final[Mapping[str, int | None]] = {"FENCED": None, "STRICT": None}

FULL: Final = [
    Check(name=name, search=Search(model=model, defines=defines, cycles="no cycle" in name))
    for name, model, defines in (
        ("slots: 3 requests over 2, 2 faults", SLOTS, _slots(3, 2, 2)),
        ("slots: 3 requests over 1, 2 faults", SLOTS, _slots(3, 1, 2)),
        ("slots: no cycle, 3 over 2, 1 fault", SLOTS, _slots(3, 2, 1)),
        ("breaker: 7 attempts over 4, 1 fault", BREAKER, _breaker(4, 7, 1)),
        ("breaker: 6 attempts over 4, 2 faults", BREAKER, _breaker(4, 6, 2)),
        ("breaker: no cycle, 5 over 4, 2 faults", BREAKER, _breaker(4, 5, 2)),
        ("breaker fenced: 6 over 4, 1 fault", BREAKER, {**_breaker(4, 6, 1), **STRICT}),
    )
]
QUICK: Final = [
    Check(name=name, search=Search(model=model, defines=defines, cycles="no cycle" in name, long=False))
    for name, model, defines in (
        ("slots: 2 requests over 1, 2 faults", SLOTS, _slots(2, 1, 2)),
        ("slots: no cycle, 2 over 1, 1 fault", SLOTS, _slots(2, 1, 1)),
        ("breaker: 5 attempts over 3, 1 fault", BREAKER, _breaker(3, 5, 1)),
        ("breaker: no cycle, 4 over 3, 1 fault", BREAKER, _breaker(3, 4, 1)),
        ("breaker fenced: 5 over 3, 1 fault", BREAKER, {**_breaker(3, 5, 1), **STRICT}),
    )
]

#: What each switch of the models does wrong.
SLOT_BUGS: Final = {
    "BUG_CANCEL_FREES": "a cancelled attempt's slot is freed without quarantine",
    "BUG_CONFIRM_UNGUARDED": "a confirmation takes a ticket that went back to the queue",
    "BUG_CORRECTION_FREES": "a correction without proof of the end frees the slot",
    "BUG_ENDED_IS_NEW": "an acquire of an ended ticket is taken for a new one",
    "BUG_GRANT_BOUNCES": "an unconfirmed grant goes to and fro for ever",
    "BUG_GRANT_NEVER_RETURNS": "an unconfirmed grant is never taken back",
    "BUG_HEARTBEAT_FREES": "a lost heartbeat frees an active slot",
    "BUG_LOST_UNSETTLED": "quarantine ends without a settlement",
    "BUG_NO_RECHECK": "a lease is not checked again before its dispatch",
    "BUG_NO_TOMBSTONE": "a late commit revives an abandoned ticket",
    "BUG_OWNER_REVIVES": "a late heartbeat revives a lapsed owner",
    "BUG_QUARANTINE_FOR_EVER": "quarantine never ends",
    "BUG_QUARANTINE_IS_FREE": "quarantined slots are not counted",
    "BUG_REPLAY_CHARGES": "a replayed settlement charges again",
    "BUG_UNCONFIRMED_DISPATCH": "a grant by another process is sent unconfirmed",
    "BUG_UNCONFIRMED_IS_FREE": "unconfirmed grants are not counted",
    "BUG_WINDOW_FROM_LAPSE": "a lost owner's window does not wait for the hard deadline",
}
BREAKER_BUGS: Final = {
    "BUG_CANCELLED_PROBE_OPENS": "a probe taken back before its dispatch opens",
    "BUG_FLOOR_LOWERED": "an older, shorter Retry-After lowers the floor",
    "BUG_GENERATION_STAYS": "half-open keeps the generation",
    "BUG_NO_RAMP": "all at once after closing",
    "BUG_OLD_FAILURE_REOPENS": "a late failure of an old generation opens",
    "BUG_OLD_RESULTS_COUNT": "failures of an old generation count",
    "BUG_OLD_SUCCESS_CLOSES": "a late success of an old generation closes",
    "BUG_OPEN_GRANTS": "an open breaker grants",
    "BUG_PROBE_FOR_EVER": "a lost probe keeps its place",
    "BUG_REPLAY_COUNTS": "a replayed failure counts again",
    "BUG_TWO_PROBES": "a second probe beside an undecided one",
}
#: Only going round in circles is wrong with it.
CIRCLES: Final = {"BUG_GRANT_BOUNCES"}
#: It takes two that wait for one slot to be granted it both.
SIZES: Final = {"BUG_UNCONFIRMED_IS_FREE": _slots(3, 1, 1)}

MUTANTS: Final = [
    *(
        Mutant(
            name=f"slots: {text}",
            search=Search(
                model=SLOTS, defines={**SIZES.get(bug, _slots(2, 1, 2)), bug: None}, cycles=bug in CIRCLES, long=False
            ),
        )
        for bug, text in SLOT_BUGS.items()
    ),
    *(
        Mutant(
            name=f"breaker: {text}", search=Search(model=BREAKER, defines={**_breaker(4, 5, 1), bug: None}, long=False)
        )
        for bug, text in BREAKER_BUGS.items()
    ),
    Mutant(
        name="breaker: unfenced confirmation",
        search=Search(model=BREAKER, defines={**_breaker(4, 5, 1), "STRICT": None}, long=False),
    ),
]


class _Watched:
    """Searches, some at once, and tells of each that has ended."""

    def __init__(self, total: int) -> None:
        self._progress = Progress(total)
        self._done = 0
        self._lock = threading.Lock()

    def __call__(self, one: Check | Mutant) -> Found:
        with self._lock:
            self._progress.tell(self._done, f"{one.name} ...", always=True)
        found = search(one.search)
        planted = isinstance(one, Mutant)
        well = (found.error is not None) if planted else (found.error is None and not found.unreached)
        said = ("found" if well else "SURVIVED") if planted else f"{found.states:,} states"
        with self._lock:
            self._done += 1
            self._progress.tell(self._done, f"{one.name}: {said}", wrong=not well, always=True)
        return found


def _print_checks(console: Console, checks: Sequence[Check], found: Sequence[Found]) -> int:
    table = Table(
        "model", *(f"{name:>11}" for name in ("states", "transitions", "depth", "seconds", "errors")), box=box.SIMPLE
    )
    for column in table.columns[1:]:
        column.justify = "right"
    wrong = 0
    for check, one in zip(checks, found, strict=True):
        problems = int(one.error is not None) or len(one.unreached)
        wrong += problems > 0
        table.add_row(
            check.name, f"{one.states:,}", f"{one.transitions:,}", f"{one.depth}", f"{one.seconds:.1f}", f"{problems}"
        )
    console.print(table)
    for check, one in zip(checks, found, strict=True):
        if one.error is not None:
            _print_trail(console, check.name, one, len(one.trail))
        elif one.unreached:
            console.print(
                f"{check.name}: nothing ever reaches", *one.unreached, sep="\n  ", markup=False, highlight=False
            )
    return wrong


def _print_trail(console: Console, name: str, one: Found, last: int) -> None:
    console.print(f"\n{name}: {one.error}", *one.trail[-last:], sep="\n", markup=False, highlight=False, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables. 1: an error, or a bug that was not found. 2: the tools are missing or failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.model", description="Checks the models of admission with Spin."
    )
    parser.add_argument("--quick", action="store_true", help="smaller models: under 20 seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the sums there")
    parser.add_argument("--jobs", type=int, default=AT_ONCE, help="searches at once (%(default)s)")
    parser.add_argument("--trails", action="store_true", help="show how each planted bug is found")
    chosen = parser.parse_args(arguments)
    console = Console(width=max(150, Console().width))
    checks = QUICK if chosen.quick else FULL
    began = time.monotonic()
    try:
        require_tools()
        watched = _Watched(len(checks) + len(MUTANTS))
        with ThreadPoolExecutor(max_workers=chosen.jobs) as pool:
            # The short ones first: they have something to say within seconds.
            planted = [pool.submit(watched, mutant) for mutant in MUTANTS]
            running = [pool.submit(watched, check) for check in checks]
            bugs = [one.result() for one in planted]
            found = [one.result() for one in running]
    except Unusable as error:
        print(f"tests.model: {error}", file=sys.stderr)  # noqa: T201
        return 2
    wrong = _print_checks(console, checks, found)
    table = Table("planted bug", "found by", "", box=box.SIMPLE)
    for mutant, one in zip(MUTANTS, bugs, strict=True):
        where = next((line[line.index("assert") :] for line in one.trail if "FAILED" in line), one.error or "nothing")
        table.add_row(
            mutant.name, escape(where), "killed" if one.error else "SURVIVED", style=None if one.error else "red"
        )
    console.print(table)
    if chosen.trails:
        for mutant, one in zip(MUTANTS, bugs, strict=True):
            _print_trail(console, mutant.name, one, 40)
    killed = sum(one.error is not None for one in bugs)
    states = sum(one.states for one in found)
    console.print(
        f"{states:,} states, {wrong} of {len(checks)} checks with errors, "
        f"{killed} of {len(MUTANTS)} planted bugs found, {time.monotonic() - began:.0f} s"
    )
    if chosen.json is not None:
        sums = {
            "states": states,
            "checks": len(checks),
            "planted": len(MUTANTS),
            "killed": killed,
            "failures": wrong + len(MUTANTS) - killed,
            "broken": [
                {"what": name, "again": "python -m tests.model --trails"}
                for name in (
                    *(c.name for c, one in zip(checks, found, strict=True) if one.error or one.unreached),
                    *(m.name for m, one in zip(MUTANTS, bugs, strict=True) if one.error is None),
                )
            ],
        }
        chosen.json.write_bytes(msgspec.json.encode(sums))
    return int(wrong > 0 or killed < len(MUTANTS))


if __name__ == "__main__":
    raise SystemExit(main())
