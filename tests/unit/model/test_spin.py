"""What the model check reads from Spin's reports: only a whole search without errors passes."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from tests.model.__main__ import BREAKER_BUGS, FULL, MUTANTS, QUICK, SLOT_BUGS, main
from tests.model.spin import DEPTH, Found, Search, Unusable, parsed, readable

PASSED = """
(Spin Version 6.5.2 -- 6 December 2019)
	+ Partial Order Reduction

Full statespace search for:
	never claim         	- (none specified)
	assertion violations	+
	cycle checks       	- (disabled by -DSAFETY)
	invalid end states	+

State-vector 116 byte, depth reached 54, errors: 0
 20297236 states, stored
1.3589912e+08 states, matched
1.5619636e+08 transitions (= stored+matched)
       20 atomic steps
hash conflicts:   5774058 (resolved)

unreached in proctype Request
	slots.pml:348, state 1293, "-end-"
	(1 of 1293 states)
unreached in init
	(0 of 13 states)

pan: elapsed time 74.1 seconds
pan: rate 273900 states/second
"""

FAILED = """pan:1: assertion violated ( !(running[i])||(ticket[i]==2)) (at depth 38)
pan: wrote slots.pml.trail

(Spin Version 6.5.2 -- 6 December 2019)
Warning: Search not completed
	+ Partial Order Reduction

Full statespace search for:
	never claim         	- (none specified)

State-vector 148 byte, depth reached 45, errors: 1
      371 states, stored
      320 states, matched
      691 transitions (= stored+matched)

pan: elapsed time 0 seconds
"""

MODEL = """byte slots;
:: d_step { slots == 0 -> slots++ }
assert(slots < 1);
"""

REPLAY = """  1:	proc  0 (:init::1) small.pml:2 (state 1)	[j = 0]
  2:	proc  1 (Request:1) small.pml:2 (state 3)	[((slots==0))]
  2:	proc  1 (Request:1) small.pml:2 (state 2)	[slots = (slots+1)]
		slots = 1
spin: small.pml:3, Error: assertion violated
#processes: 2
		slots = 1
		held[0] = 0
		ticket[0] = queued
"""


def test_a_whole_search_is_read() -> None:
    found = parsed(PASSED)
    assert (found.states, found.transitions, found.depth, found.seconds) == (20297236, 156196360, 54, 74.1)
    assert found.error is None
    assert not found.unreached


def test_an_error_keeps_the_checkers_words() -> None:
    assert parsed(FAILED).error == "assertion violated ( !(running[i])||(ticket[i]==2))"


def test_a_dead_end_and_a_cycle_are_errors() -> None:
    for words in ("invalid end state", "non-progress cycle"):
        assert parsed(re.sub(r"assertion violated .*(?= \(at)", words, FAILED)).error == words


def test_statements_that_nothing_reaches_are_listed() -> None:
    report = PASSED.replace('state 1293, "-end-"', 'state 12, "held[i] = 1"')
    assert parsed(report).unreached == ['slots.pml:348, state 12, "held[i] = 1"']


@pytest.mark.parametrize(
    "report",
    [
        pytest.param("error: max search depth too small\n" + PASSED, id="cut by depth"),
        pytest.param("pan: out of memory\n" + PASSED, id="out of memory"),
        pytest.param(PASSED.replace("Full statespace search", "Bit statespace search"), id="bit states"),
        pytest.param("Warning: Search not completed\n" + PASSED, id="not completed"),
        pytest.param(PASSED.replace("errors: 0", "errors: 1"), id="an error without a name"),
        pytest.param(PASSED.split("State-vector", maxsplit=1)[0], id="killed"),
        pytest.param("", id="empty"),
    ],
)
def test_less_than_a_whole_search_never_passes(report: str) -> None:
    with pytest.raises(Unusable):
        parsed(report)


def test_a_trail_is_told_in_the_words_of_the_model() -> None:
    assert readable(REPLAY, MODEL) == [
        "   2  Request 0, line 2: :: d_step { slots == 0 -> slots++ }",
        "      FAILED  line 3: assert(slots < 1);",
        "      ENDS    slots=1  ticket[0]=queued",
    ]


def test_every_planted_bug_of_the_models_is_tried_and_every_one_tried_is_in_its_model() -> None:
    for model, bugs in (("slots.pml", SLOT_BUGS), ("breaker.pml", BREAKER_BUGS)):
        source = next(check.search.model for check in FULL if check.search.model.name == model).read_text(
            encoding="utf-8"
        )
        assert set(re.findall(r"\bBUG_\w+", source)) == set(bugs)
    assert (
        len({msgspec.json.encode(mutant.search.defines) for mutant in MUTANTS})
        == len(SLOT_BUGS) + len(BREAKER_BUGS) + 1
    )


def test_no_check_has_a_bug_in_it_or_a_size_that_its_model_does_not_know() -> None:
    for check in (*FULL, *QUICK):
        source = check.search.model.read_text(encoding="utf-8")
        for name in check.search.defines:
            assert not name.startswith("BUG_")
            assert re.search(rf"#if(?:n?def|.*defined\() ?{name}\b", source), name
    assert DEPTH >= 10_000


def test_missing_tools_are_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["--quick"]) == 2
    said = capsys.readouterr().err
    assert "needs spin and gcc" in said
    assert "apt-get install spin gcc" in said


@pytest.mark.parametrize(
    ("fails", "unreached", "survives", "code"),
    [
        pytest.param(False, (), False, 0, id="all is well"),
        pytest.param(True, (), False, 1, id="a check finds an error"),
        pytest.param(False, ("slots.pml:1, state 1",), False, 1, id="a statement is never reached"),
        pytest.param(False, (), True, 1, id="a planted bug survives"),
    ],
)
def test_the_exit_code_says_whether_all_is_well(
    monkeypatch: pytest.MonkeyPatch, *, fails: bool, unreached: tuple[str, ...], survives: bool, code: int
) -> None:
    def pretended(what: Search) -> Found:
        planted = (
            any(name.startswith("BUG_") or name == "STRICT" for name in what.defines) and "FENCED" not in what.defines
        )
        wrong = (planted and not (survives and "BUG_NO_RAMP" in what.defines)) or (not planted and fails)
        error = "invalid end state" if wrong else None
        return Found(states=1, transitions=1, depth=1, seconds=0.0, error=error, unreached=() if planted else unreached)

    monkeypatch.setattr("tests.model.__main__.search", pretended)
    monkeypatch.setattr("tests.model.__main__.require_tools", lambda: None)
    assert main([]) == code
