"""Whose CPU is read, and where a process runs: a mistake in either is in every figure."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.benchmarks import cores, cpu

#: Works for a while and tells its own clock before it is looked at and after.
WORKING = """
import sys, time
while time.process_time() < 0.1: pass
for _ in range(2):
    print(time.process_time(), flush=True)
    sys.stdin.readline()
"""
#: Where there are only ticks, one at each end.
TICKS_S = 0.03


def test_the_cpu_of_a_process_is_that_of_its_own_clock() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        before = float(process.stdout.readline())
        seen = cpu.spent([process.pid])
        print(file=process.stdin, flush=True)
        after = float(process.stdout.readline())
        print(file=process.stdin, flush=True)

    assert before - TICKS_S <= seen <= after + TICKS_S


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says where a process may run")
def test_what_is_started_inside_runs_on_those_cores_and_the_caller_comes_back() -> None:
    mine = os.sched_getaffinity(0)
    one = {max(mine)}
    with cores.started_on(frozenset(one)):
        child = subprocess.run(
            [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip

    assert child.stdout.strip() == str(one)
    assert os.sched_getaffinity(0) == mine


def test_what_is_measured_shares_no_core_with_the_load() -> None:
    divided = cores.divided(pin=True)

    assert cores.divided(pin=False) is None
    assert divided is None or not divided.measured & divided.others
    assert divided is None or divided.measured | divided.others == cores.ALLOWED
