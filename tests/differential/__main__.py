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
import queue
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from gateway.embedded import EmbeddedPostgres
from tests.differential.tally import SHOWN, Tally, Told, run
from tests.postgres import TEST_SETTINGS, execute, sweep, url_of
from tests.progress import Progress
from tests.stopping import command


def again(steps: int, seed: int) -> str:
    return f"python -m tests.differential --schedules 1 --steps {steps} --seed {seed}"


def tell(progress: Progress, told: Told, done: Callable[[], bool]) -> None:
    """Until all is done: how many schedules were, and what was wrong with them."""
    schedules = failed = 0
    while not done():
        try:
            seed, wrong = told.get(timeout=0.2)
        except queue.Empty:
            continue
        schedules += 1
        failed += wrong is not None
        if wrong is not None:
            progress.tell(schedules, f"seed {seed}: {wrong}", wrong=True)
        progress.tell(schedules, f"{failed} failed")


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
        multiprocessing.get_context("spawn").Manager() as shared,
        tempfile.TemporaryDirectory(prefix="tollbridge-tests-") as directory,
        EmbeddedPostgres.start(Path(directory), settings=TEST_SETTINGS) as server,
    ):
        told: Told = shared.Queue()
        jobs = []
        for job in range(min(given.jobs, given.schedules)):
            execute(server.url, f"create database differential_{job}")
            seeds = range(given.seed + job, given.seed + given.schedules, given.jobs)
            jobs.append((url_of(server.url, f"differential_{job}"), seeds, given.steps, told))
        with multiprocessing.get_context("spawn").Pool(len(jobs)) as pool:
            running = pool.map_async(run, jobs, chunksize=1)
            tell(Progress(given.schedules), told, running.ready)
            for part in running.get():
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
        sys.stdout.write(f"    replay: {again(given.steps, seed)}\n")
    # A few schedules cannot show everything.
    never = tally.never() if given.schedules >= 1000 else []
    for what in never:
        sys.stdout.write(f"never happened: {what}\n")
    if given.json is not None:
        sums = {
            "schedules": tally.schedules,
            "steps": tally.schedules * given.steps,
            "failures": len(tally.failures) + len(never),
            "broken": [
                {"what": f"seed {seed}: {what}", "again": again(given.steps, seed)}
                for seed, what in sorted(tally.failures)
            ],
            "never": never,
        }
        given.json.write_bytes(msgspec.json.encode(sums))
    return 1 if tally.failures or never else 0


if __name__ == "__main__":
    command(main)
