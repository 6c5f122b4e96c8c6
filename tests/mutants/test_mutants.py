"""The list of planted bugs fits the code, and a few of them are planted; `python -m tests.mutants` plants all."""

from __future__ import annotations

import re

import pytest

from tests.mutants.listed import MUTANTS
from tests.mutants.running import ROOT, End, Mutant, Stale, check, hunt_all

#: What admission, breaker, streams, money, time and database promise, by number.
INVARIANTS = {*range(1, 18), *range(24, 38)}


def test_every_old_text_is_found_exactly_once_and_every_name_is_used_once():
    check(MUTANTS)


def test_every_invariant_has_a_planted_bug():
    assert {mutant.invariant for mutant in MUTANTS} == INVARIANTS


def test_the_table_of_rules_names_tests_and_planted_bugs_that_are_there():
    text = (ROOT / "docs/proof.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in re.findall(r"^\| (\d+ \|.*) \|$", text, re.MULTILINE)]
    assert {int(row[0]) for row in rows} == INVARIANTS
    named = {mutant.name: mutant.invariant for mutant in MUTANTS}
    for number, *_, tests, planted in rows:
        assert named[planted.strip("`")] == int(number)
        for test, file in re.findall(r"`(\w+)`(?: in `([\w/.]+)`)?", tests):
            known = (ROOT / (file or "tests/integration/test_admission_rules.py")).read_text(encoding="utf-8")
            assert f"def test_{test}(" in known, test


def test_every_test_that_is_to_notice_one_is_there():
    for mutant in MUTANTS:
        for test in mutant.tests:
            file, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), mutant.name


@pytest.mark.timeout(400)
def test_a_sample_of_them_is_noticed():
    sample = [mutant for mutant in MUTANTS if mutant.fast][::15]
    results = hunt_all(sample, lambda _: None)
    assert all(result.end is End.KILLED for result in results), [
        f"{result.mutant.name}: {result.end}\n{result.said}" for result in results if result.end is not End.KILLED
    ]


@pytest.mark.timeout(400)
def test_one_that_changes_nothing_that_is_tested_survives_and_one_that_does_not_load_is_no_kill():
    harmless = Mutant(
        name="harmless",
        invariant=36,
        file="admission/combiner.py",
        old="BATCH = 128",
        new="BATCH = 129",
        tests=("tests/unit/admission/test_combiner.py::test_one_bad_element_fails_alone",),
    )
    broken = Mutant(
        name="broken",
        invariant=36,
        file="admission/combiner.py",
        old="BATCH = 128",
        new="BATCH = no_such_name",
        tests=harmless.tests,
    )
    ends = {result.mutant.name: result.end for result in hunt_all([harmless, broken], lambda _: None)}
    assert ends == {"harmless": End.SURVIVED, "broken": End.BROKEN}


def test_an_old_text_that_is_not_there_is_an_error_and_not_a_mutant_less():
    gone = Mutant(name="gone", invariant=1, file="admission/combiner.py", old="nowhere", new="", tests=())
    with pytest.raises(Stale):
        check([gone])
