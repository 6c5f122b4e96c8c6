from __future__ import annotations

import json

from adapters.simulator.ledger import Dispatch, Ended, Ledger


def begin(ledger: Ledger, model: str = "m", *, tokens: int = 0) -> Dispatch:
    dispatch = ledger.begin(model=model, correlation=None, question=None, fields=[], stream=False)
    dispatch.tokens_in = dispatch.tokens_out = tokens
    return dispatch


def finish(ledger: Ledger, dispatch: Dispatch, ended: Ended = Ended.COMPLETE) -> None:
    ledger.end(dispatch, ended)
    ledger.release(dispatch)


def test_the_peak_is_how_many_there_were_at_once() -> None:
    ledger = Ledger()
    first, second = begin(ledger, "a"), begin(ledger, "b")
    finish(ledger, first)
    third = begin(ledger, "a")
    summary = ledger.summary()
    assert (summary["active"], summary["peak_concurrency"], summary["dispatches"]) == (2, 2, 3)
    assert summary["by_model"]["a"]["peak_concurrency"] == 1
    finish(ledger, second)
    finish(ledger, third)
    assert ledger.active == 0


def test_work_that_goes_on_still_occupies_after_its_end() -> None:
    ledger = Ledger()
    dispatch = begin(ledger)
    ledger.end(dispatch, Ended.CLIENT_GONE)
    assert ledger.summary()["ended"] == {"client_gone": 1}
    assert ledger.active == ledger.active_of("m") == 1
    ledger.release(dispatch)
    assert ledger.active == ledger.active_of("m") == 0


def test_tokens_of_unfinished_answers_are_summed_apart() -> None:
    ledger = Ledger()
    finish(ledger, begin(ledger, tokens=5))
    finish(ledger, begin(ledger, tokens=3), Ended.DIED)
    summary = ledger.summary()
    assert (summary["tokens_in"], summary["tokens_out"], summary["completed"]) == (5, 5, 1)
    assert (summary["unfinished_tokens_in"], summary["unfinished_tokens_out"]) == (3, 3)


def test_a_reset_forgets_all_but_what_still_occupies() -> None:
    ledger = Ledger()
    finish(ledger, begin(ledger))
    running, lingering = begin(ledger), begin(ledger)
    ledger.end(lingering, Ended.CLIENT_GONE)
    ledger.reset()
    summary = ledger.summary()
    assert (summary["dispatches"], summary["active"], summary["peak_concurrency"]) == (2, 2, 2)
    assert (summary["completed"], summary["ended"]) == (0, {"client_gone": 1})
    ledger.release(lingering)
    finish(ledger, running)
    assert (ledger.active, ledger.summary()["completed"]) == (0, 1)


def test_sums_outlive_single_records() -> None:
    ledger = Ledger(keep=2)
    for _ in range(5):
        finish(ledger, begin(ledger))
    assert ledger.summary()["dispatches"] == 5
    assert [json.loads(line)["number"] for line in ledger.lines()] == [4, 5]
