"""What docs/simulator.md and the command's help say of the simulated provider is what it has."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from adapters.simulator import server
from adapters.simulator.faults import PRESETS, Faults
from adapters.simulator.ledger import Dispatch, Tally
from gateway.cli import main

DOCUMENT = (Path(__file__).parents[4] / "docs/simulator.md").read_text()
HELP = CliRunner().invoke(main, ["simulate", "--help"]).output
#: As the server matches them.
CONTROL = re.findall(r'case "(GET|POST)", "(/_control/\w+)"', Path(server.__file__).read_text())


def test_every_fault_is_in_the_table_and_no_other() -> None:
    table = DOCUMENT.partition("| keys | |")[2].partition("\n\n")[0]
    told = [key for keys in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE) for key in re.findall(r"`(\w+)`", keys)]
    assert len(told) == len(set(told))
    assert set(told) == {field.name for field in msgspec.structs.fields(Faults)}


@pytest.mark.parametrize("told", [DOCUMENT, HELP], ids=["document", "help"])
def test_every_call_of_the_control_interface_is_told_with_what_can_be_asked(told: str) -> None:
    assert len(CONTROL) >= 5
    for method, path in CONTROL:
        assert re.search(rf"{method} +{path}", told), (method, path)
    assert "?model=" in told
    assert "/_control/ledger?detail=1" in told


def test_the_help_names_faults_that_there_are() -> None:
    named = re.findall(r"\w+", HELP.partition("What most try first:")[2].partition("Examples")[0])
    faults = {field.name for field in msgspec.structs.fields(Faults)}
    assert {
        "latency",
        "pace",
        "status",
        "retry_after",
        "rate",
        "fail_first",
        "capacity",
        "hang",
        "die",
        "terminal",
    } <= (set(named) & faults)


def test_what_the_ledger_tells_is_what_the_document_says_it_tells() -> None:
    sums = set(Tally().summary())
    rows = set(Dispatch.__slots__)
    for name in ("dispatches", "completed", "active", "peak_concurrency", "ended", "statuses"):
        assert name in sums
        assert f"`{name}`" in DOCUMENT
    for name in ("model", "status", "ended", "started", "finished", "released", "fields"):
        assert name in rows
        assert f"`{name}`" in DOCUMENT


def test_models_with_ways_of_their_own_are_named_as_they_are() -> None:
    named = set(re.findall(r"`(sim-\w+)`", DOCUMENT.partition("## Control")[0]))
    assert named <= set(PRESETS)
    assert {name for name, preset in PRESETS.items() if preset} - named <= {"sim-cached"}
