"""What `make prove` makes of its parts: nothing is left out, and nothing counts as shown without its figures."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests import prove
from tests.prove import Figures, Part, Ran, summary

GIVEN = argparse.Namespace(seeds=1, schedules=1, rounds=1)
PART = Part(name="p", shows="something", module="tests.model")


def ran(figures: Figures | None, code: int = 0) -> Ran:
    return Ran(part=PART, code=code, seconds=60.0, figures=figures)


def test_what_is_missing_is_named_and_nothing_is_run(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(prove, "run", lambda *_: pytest.fail("it was run"))
    assert prove.main(["--only", "models", "--only", "simulation"]) == 2
    told = capsys.readouterr().out
    assert "Nothing was run" in told
    assert "apt-get install spin gcc libc6-dev" in told


def test_a_part_holds_only_with_its_figures_and_without_failures():
    assert ran(Figures(failures=0)).well
    assert not ran(Figures(failures=1)).well
    assert not ran(None).well
    assert not ran(Figures(failures=0), code=1).well


def test_the_sums_are_of_all_parts_and_what_nobody_counts_is_empty():
    one = Figures(failures=0, kills=2, unknown=3, over_admissions=0, faults={"cut": 4})
    two = Figures(failures=0, kills=5, planted=7, killed=7, faults={"cut": 1, "stop": 1})
    table, faults = summary([ran(one), ran(two)])
    last = {str(column.header): list(column.cells)[-1] for column in table.columns}
    assert (last["kills"], last["unknown"], last["over-adm."], last["states"]) == ("7", "3", "0", "")
    assert (last["planted bugs"], last["minutes"]) == ("7 of 7", "2.0")
    assert faults == "cut 5, stop 1"


@pytest.mark.parametrize("part", prove.parts(GIVEN), ids=lambda part: part.name)
def test_every_part_is_there_and_tells_its_figures(part: Part):
    source = prove.ROOT / Path(*part.module.split(".")) / "__main__.py"
    text = source.read_text(encoding="utf-8")
    for option in ["--json", *(argument for argument in part.arguments if argument.startswith("--"))]:
        assert f'"{option}"' in text, option
