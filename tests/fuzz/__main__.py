"""
Fuzzing at length.

    python -m tests.fuzz --minutes 10                         every target in turn, the seed is printed
    python -m tests.fuzz --minutes 2 --protocol gemini        the streams, answers and requests of one; or `sse`
    python -m tests.fuzz --seed 7 --minutes 1                 the same inputs again
    python -m tests.fuzz --replay fuzz-found/gemini.stream-1.json

A finding is made small and written to a file; the exit code is then 1. Mended, its file belongs into
`tests/fuzz/mended`, where the tests replay it.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from tests.fuzz.fuzzing import fuzz, read, replay, write
from tests.fuzz.targets import Finding, targets


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz the parsers.")
    parser.add_argument("--minutes", type=float, default=1.0, help="in all, shared by the targets")
    parser.add_argument("--protocol", action="append", help="a protocol, `sse`, or one target such as `gemini.stream`")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--found", type=Path, default=Path("fuzz-found"), help="where reproducers are written")
    parser.add_argument("--replay", type=Path, help="run one reproducer again")
    given = parser.parse_args()
    known = targets()
    if given.replay is not None:
        try:
            replay(read(given.replay), known)
        except Finding as finding:
            print(f"still so: {finding}")  # noqa: T201
            return 1
        print("no longer so")  # noqa: T201
        return 0
    wanted = [
        target
        for target in known
        if given.protocol is None or not {target.name, target.name.partition(".")[0]}.isdisjoint(given.protocol)
    ]
    if not wanted:
        parser.error("no such target; there are: " + ", ".join(target.name for target in known))
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(2**32)
    print(f"seed {seed}", flush=True)  # noqa: T201
    failed = False
    for target in wanted:
        tally = fuzz(target, seed=seed, seconds=given.minutes * 60 / len(wanted))
        told = f"{tally.inputs:9,} inputs  {tally.kinds:6,} kinds  {len(tally.found)} findings"
        print(f"{target.name:28} {told}", flush=True)  # noqa: T201
        for found in tally.found:
            failed = True
            print(f"    {write(found, given.found)}: {found.told}", flush=True)  # noqa: T201
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
