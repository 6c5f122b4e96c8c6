"""
Many schedules through PostgreSQL's functions and the pure core, each from its seed, in virtual time.

    python -m tests.differential --schedules 2000 --steps 50      as many as that, and a table of what they came to
    python -m tests.differential --steps 50 --seed 17 --schedules 1   one of them again

It fails where the two differ, or an invariant does not hold of what PostgreSQL holds: then it says what, after which
events, of a schedule made as short as it could be. Of a thousand schedules and more it also fails if something never
happened: what never happens is not compared.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from gateway.embedded import EmbeddedPostgres
from tests.differential.tally import SHOWN, Tally, run
from tests.postgres import TEST_SETTINGS, execute, sweep, url_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--schedules", type=int, default=200, help="how many")
    parser.add_argument("--steps", type=int, default=50, help="how long each is")
    parser.add_argument("--seed", type=int, default=0, help="of the first; each has the next")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes, each with a database")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the sums there")
    given = parser.parse_args()
    began = time.monotonic()
    sweep()
    tally = Tally()
    with (
        tempfile.TemporaryDirectory(prefix="tollbridge-tests-") as directory,
        EmbeddedPostgres.start(Path(directory), settings=TEST_SETTINGS) as server,
    ):
        jobs = []
        for job in range(min(given.jobs, given.schedules)):
            execute(server.url, f"create database differential_{job}")
            seeds = range(given.seed + job, given.seed + given.schedules, given.jobs)
            jobs.append((url_of(server.url, f"differential_{job}"), seeds, given.steps))
        with multiprocessing.get_context("spawn").Pool(len(jobs)) as pool:
            for part in pool.imap_unordered(run, jobs):
                tally.add(part)
    width = max(len(what) for what in tally.seen) if tally.seen else 0
    for what, count in sorted(tally.seen.items()):
        sys.stdout.write(f"{what:<{width}}  {count:>8}\n")
    sys.stdout.write(
        f"{tally.schedules} schedules of {given.steps} steps, {len(tally.failures)} failed, "
        f"{time.monotonic() - began:.0f} s\n"
    )
    for seed, what in sorted(tally.failures)[:SHOWN]:
        sys.stdout.write(f"\nseed {seed}: {what}\n")
        sys.stdout.write(
            f"    replay: python -m tests.differential --schedules 1 --steps {given.steps} --seed {seed}\n"
        )
    # A few schedules cannot show everything.
    never = tally.never() if given.schedules >= 1000 else []
    for what in never:
        sys.stdout.write(f"never happened: {what}\n")
    if given.json is not None:
        sums = {
            "schedules": tally.schedules,
            "steps": tally.schedules * given.steps,
            "failures": len(tally.failures) + len(never),
        }
        given.json.write_bytes(msgspec.json.encode(sums))
    return 1 if tally.failures or never else 0


if __name__ == "__main__":
    sys.exit(main())
