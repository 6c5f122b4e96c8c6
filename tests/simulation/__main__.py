"""
Many schedules of everything that can go wrong with admission, each from its seed, in virtual time.

    python -m tests.simulation --seeds 50000     as many as that, and a table of what they came to
    python -m tests.simulation --seed 17         one of them again

It fails at the first schedules that break an invariant, saying how to repeat them, and also if something that should
go wrong now and then never did: a fault that never strikes proves nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from pathlib import Path

import msgspec

from tests.progress import Progress
from tests.simulation.tally import Tally, play
from tests.simulation.world import SOMETIMES, run
from tests.stopping import command


def table(tally: Tally, seconds: float) -> str:
    seen = tally.seen
    rows: list[tuple[str, object]] = [
        ("schedules", tally.schedules),
        ("steps", tally.steps),
        ("virtual hours", round(tally.virtual_s / 3600, 1)),
        ("real seconds", round(seconds, 1)),
        ("processes killed", seen["fault killed"]),
    ]
    rows += [(what, seen[what]) for what in sorted(seen) if what.startswith("fault ") and what != "fault killed"]
    rows += [
        ("attempts settled", tally.settled),
        ("attempts corrected", seen["corrected"]),
        *tally.broken.items(),
        ("other violations", len(tally.failures) - sum(tally.broken.values())),
        ("things that happened at least once", f"{len(SOMETIMES) - len(tally.never())} of {len(SOMETIMES)}"),
    ]
    width = max(len(what) for what, _ in rows)
    return "\n".join(f"{what:<{width}}  {value:>14}" for what, value in rows)


def again(seed: int) -> str:
    return f"python -m tests.simulation --seed {seed}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=1000, help="how many schedules")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="only this one, with its traceback")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the sums there")
    given = parser.parse_args()
    if given.seed is not None:
        outcome = run(given.seed)
        sys.stdout.write(
            f"seed {outcome.seed}: {outcome.steps} steps, {outcome.virtual_s:.1f} virtual seconds, all well\n"
        )
        return 0
    began = time.monotonic()
    last = given.first + given.seeds
    parts = [range(first, min(first + 50, last)) for first in range(given.first, last, 50)]
    tally = Tally()
    progress = Progress(given.seeds)
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
        for part in pool.imap_unordered(play, parts):
            tally.add(part)
            for seed, what in part.failures:
                progress.tell(tally.schedules, f"seed={seed}: {what}", wrong=True)
            progress.tell(tally.schedules, f"{len(tally.failures)} failed, {tally.seen['fault killed']:,} kills")
    sys.stdout.write(table(tally, time.monotonic() - began) + "\n")
    for seed, what in sorted(tally.failures)[:20]:
        sys.stdout.write(f"seed={seed}: {what}\n    replay: {again(seed)}\n")
    for what in tally.never():
        sys.stdout.write(f"never happened: {what}\n")
    if given.json is not None:
        broken = [{"what": f"seed {seed}: {what}", "again": again(seed)} for seed, what in sorted(tally.failures)]
        given.json.write_bytes(msgspec.json.encode({**tally.figures(), "broken": broken, "never": tally.never()}))
    return 1 if tally.failures or tally.never() else 0


if __name__ == "__main__":
    command(main)
