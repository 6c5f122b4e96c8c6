from __future__ import annotations

import re
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from admission.ids import new_id
from gateway.call import Options, Resend
from gateway.errors import (
    AdmissionRefused,
    AllRoutesFailed,
    Cancelled,
    Code,
    GatewayError,
    Internal,
    InvalidRequest,
    NoRoute,
    StreamBroken,
    Unauthenticated,
    UpstreamRejected,
)
from gateway.jobs import model
from gateway.jobs.model import (
    CANCELLED,
    EXPIRED,
    POISON,
    TERMINAL,
    TRANSITIONS,
    UNCERTAIN,
    Claimed,
    Complete,
    End,
    Event,
    GiveBack,
    Held,
    Status,
    Wait,
)
from gateway.jobs.settings import JobsSettings
from gateway.outcome import AttemptReport, Cost, Outcome, RouteReport
from gateway.standing import Cause
from metering.usage import Usage

SETTINGS = JobsSettings()
ROUTE = RouteReport(route_id="r", provider="p", model="m", protocol="chat_completions")
ZERO = Cost(state="zero", usd=Decimal(0), reason="error")


def claimed(**changes: Any) -> Claimed:
    job = Claimed(
        job_id=new_id(),
        key_id=new_id(),
        url="/v1/chat/completions",
        model="m",
        body="{}",
        options=Options(debit_id="d"),
        claims=1,
        returned=0,
        runs=0,
        attempts_allowed=3,
        attempts=0,
        outcome=None,
        remaining_s=60.0,
    )
    return msgspec.structs.replace(job, **changes)


def held(**changes: Any) -> Held:
    job = Held(
        job_id=uuid.uuid4(),
        key_id=uuid.uuid4(),
        url="/v1/chat/completions",
        options=Options(debit_id="d"),
        claims=1,
        returned=0,
        runs=0,
        attempts_allowed=3,
        attempts=0,
        intent_attempt=None,
        cancel_requested=False,
        outcome=None,
        result=None,
        result_attempt=None,
    )
    return msgspec.structs.replace(job, **changes)


def outcome(*attempts: AttemptReport, ended: str = "failed", cost: Cost = ZERO, usage: Usage = Usage()) -> Outcome:  # noqa: B008
    return Outcome(
        request_id="q", debit_id="d", ended=ended, attempts=attempts, cost=cost, settlement="settled", usage=usage
    )


def attempt(
    number: int = 1, status: str = "error", error_class: str | None = "transient", cost: Cost = ZERO
) -> AttemptReport:
    return AttemptReport(number=number, route=ROUTE, status=status, error_class=error_class, cost=cost)


RESEND = Options(debit_id="d", resend_uncertain=Resend.BEFORE_FIRST_BYTE)


def test_nothing_leaves_a_terminal_state() -> None:
    assert {Status.SUCCEEDED, Status.FAILED, Status.CANCELLED, Status.EXPIRED} == TERMINAL
    assert not [state for state, _ in TRANSITIONS if state in TERMINAL]


def test_every_event_and_every_state_is_used() -> None:
    assert {event for _, event in TRANSITIONS} == set(Event)
    assert set(TRANSITIONS.values()) == set(Status)


@pytest.mark.parametrize("code", sorted(model.NOT_NOW))
def test_a_refusal_for_now_gives_the_job_back_without_counting_the_run(code: Code) -> None:
    error = AdmissionRefused("not now", code=code, retry_after_s=7.0)
    decision = model.after_error(error, claimed(runs=2), sent=False, settings=SETTINGS)
    assert isinstance(decision, GiveBack)
    assert decision.reason == model.waits_for(error)
    assert decision.reason is not Wait.RETRY
    assert not decision.counts
    if code in (Code.QUEUE_FULL, Code.KEY_LIMIT, Code.BUDGET_RESERVED):
        # It keeps its place.
        assert decision.delay_s == 0.0
    elif code is Code.QUEUE_TIMEOUT:
        # What it was told is a guess of the queue that it waits in again.
        assert SETTINGS.refused_delay_s <= decision.delay_s <= SETTINGS.refused_delay_s * 1.25
    else:
        assert 7.0 <= decision.delay_s <= 8.75
    # Other keys may have room.
    assert decision.of_key is (code in (Code.KEY_LIMIT, Code.BUDGET_RESERVED))


def test_a_refusal_after_an_attempt_counts_the_run() -> None:
    error = AdmissionRefused("not now", outcome=outcome(attempt()))
    decision = model.after_error(error, claimed(), sent=True, settings=SETTINGS)
    assert isinstance(decision, GiveBack)
    assert decision.counts


def test_a_run_that_failed_for_reasons_that_may_pass_is_repeated_until_the_runs_are_used_up() -> None:
    error = AllRoutesFailed("all", outcome=outcome(attempt()))
    assert isinstance(model.after_error(error, claimed(runs=1), sent=True, settings=SETTINGS), GiveBack)
    last = model.after_error(error, claimed(runs=2), sent=True, settings=SETTINGS)
    assert last == End(status=Status.FAILED, code="all_routes_failed", message="all")


def test_a_run_that_failed_for_reasons_that_stay_is_not_repeated() -> None:
    error = AllRoutesFailed("all", outcome=outcome(attempt(error_class="ours")))
    decision = model.after_error(error, claimed(), sent=True, settings=SETTINGS)
    assert isinstance(decision, End)
    assert decision.code == "all_routes_failed"


@pytest.mark.parametrize(
    "error",
    [
        AllRoutesFailed("all", outcome=outcome(attempt(status="unknown"), ended="uncertain")),
        AllRoutesFailed("all", outcome=outcome(attempt(status="unknown"))),
        StreamBroken("broken", outcome=outcome(attempt(status="unknown"), ended="uncertain")),
        GatewayError("late", code=Code.DEADLINE_EXCEEDED),
        Internal("a bug"),
    ],
    ids=["uncertain", "last_attempt_unknown", "broken", "deadline_without_outcome", "internal_without_outcome"],
)
def test_an_uncertain_end_is_told_and_never_repeated_by_itself(error: GatewayError) -> None:
    assert model.after_error(error, claimed(), sent=True, settings=SETTINGS) == UNCERTAIN


def test_an_uncertain_end_is_repeated_where_the_caller_allows_it() -> None:
    error = AllRoutesFailed("all", outcome=outcome(attempt(status="unknown"), ended="uncertain"))
    decision = model.after_error(error, claimed(options=RESEND), sent=True, settings=SETTINGS)
    assert isinstance(decision, GiveBack)
    assert decision.counts


def test_the_providers_refusal_ends_the_job_with_its_code_and_field() -> None:
    error = UpstreamRejected("bad", outcome=outcome(attempt(error_class="fatal")), param="body.tools")
    decision = model.after_error(error, claimed(), sent=True, settings=SETTINGS)
    assert decision == End(status=Status.FAILED, code="upstream_rejected", message="bad", param="body.tools")


@pytest.mark.parametrize("error", [InvalidRequest("no tools there", param="tools"), Unauthenticated(), NoRoute("none")])
def test_a_fault_of_the_request_that_is_found_after_an_intent_is_not_uncertain(error: GatewayError) -> None:
    decision = model.after_error(error, claimed(), sent=True, settings=SETTINGS)
    assert isinstance(decision, End)
    assert decision.code == error.code.value


def test_a_deadline_before_anything_was_sent_expires_the_job() -> None:
    error = AdmissionRefused("late", code=Code.DEADLINE_EXCEEDED)
    assert model.after_error(error, claimed(), sent=False, settings=SETTINGS) == EXPIRED


def test_an_executor_of_the_same_job_that_is_not_over_is_waited_for() -> None:
    job = claimed()
    error = AdmissionRefused("twice", code=Code.DUPLICATE_DEBIT)
    own = msgspec.structs.replace(job, options=Options(debit_id=str(job.job_id)))
    assert isinstance(model.after_error(error, own, sent=False, settings=SETTINGS), GiveBack)
    decision = model.after_error(error, job, sent=False, settings=SETTINGS)
    assert isinstance(decision, End)
    assert decision.code == "duplicate_debit"


def test_a_cancelled_run_ends_cancelled_whatever_was_sent() -> None:
    assert model.after_error(Cancelled("c"), claimed(), sent=True, settings=SETTINGS) == CANCELLED


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (held(result="{}", intent_attempt=1), Complete()),
        (held(result="{}", intent_attempt=1, cancel_requested=True), Complete()),
        (held(), GiveBack(delay_s=0.0, reason=None, counts=False, in_order=False)),
        (held(cancel_requested=True), CANCELLED),
        (held(intent_attempt=1), UNCERTAIN),
        (held(intent_attempt=1, claims=9), UNCERTAIN),
        (held(intent_attempt=1, cancel_requested=True, options=RESEND), UNCERTAIN),
        (held(intent_attempt=1, options=RESEND), GiveBack(delay_s=0.0, reason=None, counts=True, in_order=False)),
        (held(intent_attempt=1, options=RESEND, runs=2), UNCERTAIN),
        (held(claims=4), GiveBack(delay_s=0.0, reason=None, counts=False, in_order=False)),
        (held(claims=5), POISON),
        (held(claims=50, returned=46), GiveBack(delay_s=0.0, reason=None, counts=False, in_order=False)),
        (held(claims=50, returned=45), POISON),
        (held(claims=5, intent_attempt=1, options=RESEND), POISON),
    ],
    ids=[
        "answer_stored",
        "answer_stored_beats_cancel",
        "never_sent",
        "never_sent_and_taken_back",
        "sent",
        "sent_is_uncertain_before_it_is_poison",
        "sent_and_taken_back",
        "sent_resend_allowed",
        "sent_resend_allowed_but_no_runs_left",
        "four_crashes",
        "five_crashes",
        "claims_given_back_are_no_crashes",
        "claims_given_back_and_five_crashes",
        "five_crashes_resend_allowed",
    ],
)
def test_what_the_death_of_a_process_means_for_a_job(job: Held, expected: object) -> None:
    assert model.after_crash(job, SETTINGS) == expected


#: Its run was stopped, and its answer read to the end by nobody.
SPENT = attempt(status="cancelled", cost=Cost(state="charged", usd=Decimal("0.1")))


@pytest.mark.parametrize(
    ("known", "sent", "options", "expected"),
    [
        (None, False, Options(), "queued"),
        (None, True, Options(), "uncertain"),
        (outcome(attempt(status="unknown")), True, Options(), "uncertain"),
        (outcome(attempt()), True, Options(), "counted"),
        (outcome(SPENT), True, Options(), "uncertain"),
        (outcome(SPENT), True, RESEND, "counted"),
        (None, True, RESEND, "counted"),
    ],
    ids=[
        "not_sent",
        "sent_nothing_known",
        "sent_unknown",
        "sent_and_refused",
        "read_on_and_charged",
        "read_on_and_charged_resend_allowed",
        "resend_allowed",
    ],
)
def test_what_a_stop_of_the_process_means_for_a_job(
    known: Outcome | None, sent: bool, options: Options, expected: str
) -> None:
    decision = model.after_stop(claimed(options=options), known, sent=sent)
    if expected == "uncertain":
        assert decision == UNCERTAIN
    else:
        assert isinstance(decision, GiveBack)
        assert decision.counts == (expected == "counted")
        assert decision.in_order


def test_a_full_queue_costs_a_job_no_place_and_gives_its_model_a_rest() -> None:
    decision = model.after_error(
        AdmissionRefused("full", code=Code.QUEUE_FULL, retry_after_s=1.0), claimed(), sent=False, settings=SETTINGS
    )
    assert decision == GiveBack(delay_s=0.0, reason=Wait.QUEUE_FULL, counts=False, hold_s=SETTINGS.full_hold_s)


@pytest.mark.parametrize("returned", [0, 40])
def test_another_refusal_delays_a_job_as_long_as_it_says_however_often_it_comes(returned: int) -> None:
    for asked, least in ((None, SETTINGS.refused_delay_s), (20.0, 20.0)):
        error = AdmissionRefused("cooling", code=Code.COOLDOWN, retry_after_s=asked)
        decision = model.after_error(error, claimed(returned=returned), sent=False, settings=SETTINGS)
        assert isinstance(decision, GiveBack)
        assert least <= decision.delay_s <= least * 1.25
        assert 0 < decision.hold_s <= SETTINGS.refused_hold_s


def test_the_outcomes_of_several_runs_add_up() -> None:
    charged = Cost(state="charged", usd=Decimal("0.25"), price_version="v1")
    first = outcome(attempt(1, cost=charged), cost=charged, usage=Usage(input_total=3))
    second = outcome(attempt(2, cost=charged), cost=charged, usage=Usage(input_total=4, output_total=1))
    whole = model.joined(first, second)
    assert whole is not None
    assert [a.number for a in whole.attempts] == [1, 2]
    assert whole.cost == Cost(state="charged", usd=Decimal("0.50"), price_version="v1")
    assert whole.usage == Usage(input_total=7, output_total=1)


def test_one_unknown_cost_makes_the_sum_unknown_with_a_bound() -> None:
    charged = Cost(state="charged", usd=Decimal("0.25"))
    unknown = Cost(state="unknown", upper_bound_usd=Decimal(2), reason="uncertain")
    whole = model.joined(outcome(attempt(1, cost=unknown), cost=unknown), outcome(attempt(2, cost=charged)))
    assert whole is not None
    assert whole.cost.state == "unknown"
    assert whole.cost.usd is None
    assert whole.cost.upper_bound_usd == Decimal("2.25")


def test_what_was_unknown_when_a_job_ended_is_told_as_the_ledger_has_it_now() -> None:
    charged = Cost(state="charged", usd=Decimal("0.25"), price_version="v1")
    unknown = Cost(state="unknown", upper_bound_usd=Decimal(2), reason="uncertain")
    left = msgspec.structs.replace(attempt(2, status="cancelled", cost=unknown), message="the caller left")
    written = outcome(attempt(1, cost=charged), left, ended="uncertain", cost=unknown)
    read_on = attempt(2, status="success", error_class=None, cost=charged)
    now = outcome(attempt(1, cost=charged), read_on, ended="complete", cost=charged, usage=Usage(output_total=7))
    whole = model.as_settled(written, now)
    assert whole.cost == Cost(state="charged", usd=Decimal("0.50"), price_version="v1")
    assert [(a.status, a.message) for a in whole.attempts] == [("error", None), ("success", "the caller left")]
    assert (whole.ended, whole.usage) == ("complete", Usage(output_total=7))
    # One that nobody knows yet stays so, and one of a later run changes nothing of this one.
    assert model.as_settled(written, outcome(attempt(1, cost=charged), left)) is written
    later = outcome(left, attempt(3, cost=charged), ended="complete")
    assert model.as_settled(written, later) is written


def test_an_outcome_that_already_has_the_earlier_attempts_is_left_alone() -> None:
    later = outcome(attempt(1), attempt(2))
    assert model.joined(outcome(attempt(1)), later) is later
    assert model.joined(None, later) is later
    assert model.joined(later, None) is later


@pytest.mark.parametrize("code", sorted(Code))
def test_whatever_gives_a_job_back_has_a_reason_of_the_documented_table_and_the_groups_it_waits_for(code: Code) -> None:
    table = (Path(__file__).parents[4] / "docs/operations.md").read_text().partition("**Why a request waits.**")[2]
    documented = re.findall(r"^\| `(\w+)` \|", table.partition("\n## ")[0], re.MULTILINE)
    for error in (
        AdmissionRefused("not now", code=code, groups=("g", "h")),
        AdmissionRefused("not now", code=code, groups=("g", "h"), outcome=outcome(attempt())),
    ):
        decision = model.after_error(error, claimed(), sent=False, settings=SETTINGS)
        if isinstance(decision, GiveBack):
            assert decision.reason in documented
            nobodys = model.waits_for(error) in {
                Wait.STORE_UNAVAILABLE,
                Wait.DUPLICATE_DEBIT,
                Wait.KEY_LIMIT,
                Wait.BUDGET_RESERVED,
            }
            assert decision.groups == (() if nobodys else ("g", "h"))


def test_every_reason_is_in_the_documented_table() -> None:
    table = (Path(__file__).parents[4] / "docs/operations.md").read_text().partition("**Why a request waits.**")[2]
    documented = re.findall(r"^\| `(\w+)` \|", table.partition("\n## ")[0], re.MULTILINE)
    of_admission = {"capacity", "model_capacity", "rate", "cooldown", "quarantine", "stopped", "store"}
    causes = set(Cause)
    assert set(documented) == of_admission | {wait.value for wait in Wait} | {cause.value for cause in causes}
    assert len(documented) == len(set(documented))
    assert {cause.value for cause in causes} <= set(Wait)


@pytest.mark.parametrize(
    ("stored", "wait"),
    [(None, Wait.RUNNER), ("rate_limited", Wait.RATE_LIMITED), ("all_routes_failed", Wait.RETRY),
     ("control_store_unavailable", Wait.STORE_UNAVAILABLE), ("of a later version", Wait.RETRY)],
)  # fmt: skip
def test_a_reason_that_another_version_stored_is_told_in_todays_words(stored: str | None, wait: Wait) -> None:
    assert model.wait_of(stored) is wait
