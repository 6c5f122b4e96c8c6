"""
A sample of the fault scenarios, on real processes with short leases. `python -m tests.faults` runs all of them, longer.

What each one shows is in its docstring; what must hold after every one of them is in `tests/faults/audit.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.scenarios import SCENARIOS, run
from tests.faults.server import Server

#: `python -m tests.faults` draws others.
SEED = 1
#: Of the scenario that makes a number of them; `--requests 10000` makes more.
REQUESTS = 60

SAMPLE = [name for name, chosen in SCENARIOS.items() if chosen.sample]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all of them: what kills it also brings it back."""
    server = Server(tmp_path_factory.mktemp("faults"))
    yield server
    server.stop()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", SAMPLE)
def test_everything_adds_up_after(name: str, server: Server) -> None:
    asyncio.run(run(SCENARIOS[name], SEED, server, times=1, requests=REQUESTS))


def test_every_scenario_says_what_it_does_and_what_must_have_happened() -> None:
    for chosen in SCENARIOS.values():
        assert chosen.play.__doc__
        assert chosen.faults


def test_the_sample_needs_nothing_but_python_packages() -> None:
    assert not [
        chosen.name
        for chosen in map(SCENARIOS.__getitem__, SAMPLE)
        if chosen.clock is not None or chosen.pooled or chosen.small is not None
    ]
    assert Path(__file__).parent.name == "faults"
