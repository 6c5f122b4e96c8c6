"""What `make prove` makes of its parts: nothing is left out, and nothing counts as shown without its figures."""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests import progress, prove
from tests.faults.pooler import PoolerMissing
from tests.prove import Board, Broken, Figures, Part, Ran, broken, run_all, summary

GIVEN = argparse.Namespace(seeds=1, schedules=1, rounds=1)
PART = Part(name="p", shows="something", module="tests.model")


def ran(figures: Figures | None, code: int = 0) -> Ran:
    return Ran(part=PART, code=code, seconds=60.0, figures=figures)


def test_what_is_missing_is_named_with_its_packages_and_nothing_is_run(monkeypatch, capsys, tmp_path):
    def no_pooler() -> str:
        raise PoolerMissing("PgBouncer is needed")

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(prove, "run", lambda *_: pytest.fail("it was run"))
    monkeypatch.setattr(prove, "faketime_library", lambda: "there")
    monkeypatch.setattr(prove, "pgbouncer", no_pooler)
    assert prove.main([]) == 2
    told = capsys.readouterr().out
    assert "Nothing was run" in told
    assert "apt-get install spin gcc libc6-dev pgbouncer" in told


def test_a_part_holds_only_with_its_figures_and_without_failures():
    assert ran(Figures(failures=0)).well
    assert not ran(Figures(failures=1)).well
    assert not ran(None).well
    assert not ran(Figures(failures=0), code=1).well


def test_the_sums_are_of_all_parts_and_what_nobody_counts_is_empty():
    one = Figures(failures=0, kills=2, unknown=3, over_admissions=0, faults={"cut": 4})
    two = Figures(failures=0, kills=5, planted=7, killed=7, faults={"cut": 1, "stop": 1})
    table, faults = summary([ran(one), ran(two)], 90.0)
    together = dict(zip(table.columns[0].cells, table.columns[-1].cells, strict=True))
    assert [together[name] for name in ("kills", "attempts of unknown cost", "over-admissions")] == ["7", "3", "0"]
    assert [together[name] for name in ("states", "planted bugs noticed", "minutes")] == ["", "7 of 7", "1.5"]
    assert faults == "cut 5, stop 1"


def test_each_failure_is_told_with_the_command_that_shows_it_again():
    one = Figures(failures=1, broken=[Broken(what="seed 3: two at once", again="python -m x --seed 3")])
    two = Figures(failures=2, alive=["a bug"], never=["an outage"])
    lines = "\n".join(broken([ran(Figures(failures=0)), ran(one), ran(two), ran(None, code=3)]))
    for said in ("seed 3: two at once", "python -m x --seed 3", "--only 'a bug'", "never happened: an outage"):
        assert said in lines
    assert "it ended with 3" in lines
    assert broken([ran(Figures(failures=0))]) == []


def test_what_could_not_be_run_is_counted():
    table, _ = summary([ran(Figures(failures=0, skipped=["a_full_disk: needs root"]))], 1.0)
    together = dict(zip(table.columns[0].cells, table.columns[-1].cells, strict=True))
    assert "1" in str(together["scenarios not run"])


@pytest.mark.parametrize("part", prove.parts(GIVEN), ids=lambda part: part.name)
def test_every_part_is_there_and_tells_its_figures(part: Part):
    source = prove.ROOT / Path(*part.module.split(".")) / "__main__.py"
    text = source.read_text(encoding="utf-8")
    options = ["--json", *(argument for argument in part.arguments if argument.startswith("--"))]
    for option in [*options, *(["--jobs"] if part.computes else [])]:
        assert f'"{option}"' in text, option


def test_a_line_of_progress_is_read_as_it_was_told(capsys):
    told = progress.Progress(40, every_s=0.0)
    told.tell(1_200, "3 kills")
    told.tell(7, "seed 5: two at once\nand more", wrong=True)
    steps = [progress.read(line) for line in capsys.readouterr().out.splitlines()]
    assert steps == [progress.Step(1_200, 40, "3 kills"), progress.Step(7, 40, "FAILED seed 5: two at once")]
    assert [step.wrong for step in steps if step is not None] == [False, True]
    assert progress.read("  3/9   12.0 s  SURVIVED  I4   a bug") == progress.Step(3, 9, "12.0 s  SURVIVED  I4   a bug")
    assert progress.read("0 of 7 checks with errors") is None


def test_a_part_that_says_nothing_too_often_is_heard_of_all_the_same(monkeypatch, tmp_path):
    module = tmp_path / "a_part.py"
    module.write_text(
        "import json, sys\n"
        "print('      1/3  nothing wrong')\n"
        "print('      2/3  FAILED seed 9: two at once')\n"
        "print('a table')\n"
        "open(sys.argv[sys.argv.index('--json') + 1], 'w').write(json.dumps({'failures': 1}))\n"
        "sys.exit(1)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(sys.path)}")
    out = io.StringIO()
    part = Part(name="p", shows="something", module="a_part")
    [done] = run_all([part], Board([part], Console(file=out, width=200)))
    assert not done.well
    assert done.said == "a table\n"
    assert "2 of 3, 1 wrong  FAILED seed 9: two at once" in out.getvalue()
    assert "FAILED after" in out.getvalue()
