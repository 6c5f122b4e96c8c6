"""The flows, with the gateway played by hand: what is asked, when it is asked again, and what comes of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from gateway.client import Busy, CallFailed, Conflict, Internal, NotFound, OutOfTime, Unreachable, errors
from gateway.client import batches as batch_flows
from gateway.client import flow as flows
from gateway.client import jobs as job_flows
from gateway.client.flow import Ask, Emit, Hear, Listen, Open, Opened, Patience, Pause, Read, Send
from protos.tollbridge.v1 import gateway_pb2 as pb

QUESTION = pb.CompletionRequest(model="m")
RESPONSE = pb.CompletionResponse(choices=[pb.Choice(text="Hello")])
DELTA = pb.CompletionChunk(delta=pb.Delta(pieces=[pb.Piece(text="Hello")]))
QUEUED = pb.CompletionChunk(queued=pb.Queued(position=1))
FINISHED = pb.CompletionChunk(finished=pb.Finished())


def refusal(code: str = "queue_full", *, after: float | None = None, dispatched: bool | None = False) -> CallFailed:
    return errors.failure("no", code=code, status="UNAVAILABLE", retry_after_s=after, dispatched=dispatched)


def played(flow: Any, answer: Callable[[Any], Any]) -> tuple[Any, list[Any], list[Any]]:
    """
    The result, the items and the steps of a flow. `answer` says what comes of a step; a CallFailed is thrown.

    Pauses take no time.
    """
    items: list[Any] = []
    steps: list[Any] = []
    try:
        step = next(flow)
        while True:
            if isinstance(step, Emit):
                items.append(step.item)
                step = next(flow)
                continue
            steps.append(step)
            given = None if isinstance(step, Pause) else answer(step)
            step = flow.throw(given) if isinstance(given, CallFailed) else flow.send(given)
    except StopIteration as end:
        return end.value, items, steps


def in_turn(*answers: Any) -> Callable[[Any], Any]:
    left: Iterator[Any] = iter(answers)
    return lambda step: next(left)


def pauses(steps: list[Any]) -> list[float]:
    return [step.seconds for step in steps if isinstance(step, Pause)]


# ------------------------------------------------------------------ patience


def test_what_was_refused_is_asked_again_and_not_before_its_time() -> None:
    answers = in_turn(refusal(after=2.0), refusal("cooldown", after=0.0), refusal("queue_timeout"), RESPONSE)
    result, _, steps = played(flows.complete(QUESTION, None, 60.0), answers)
    assert result is RESPONSE
    first, second, third = pauses(steps)
    assert 2.0 <= first <= 2.5
    assert 0.4 <= second <= 0.5
    assert 0.8 <= third <= 1.0


@pytest.mark.parametrize(
    "failed",
    [
        refusal("all_routes_failed", after=1.0, dispatched=True),
        refusal("queue_full", dispatched=True),
        refusal("queue_full", dispatched=None),
        refusal("invalid_request"),
        refusal("no_route"),
        refusal("internal", dispatched=None),
        refusal("unreachable", dispatched=None),
        refusal("deadline_exceeded", dispatched=None),
    ],
    ids=lambda failed: f"{failed.code} {failed.dispatched}",
)
def test_what_may_have_been_dispatched_or_cannot_pass_is_not_asked_again(failed: CallFailed) -> None:
    with pytest.raises(CallFailed) as raised:
        played(flows.complete(QUESTION, None, 60.0), in_turn(failed))
    assert raised.value is failed


def test_with_an_idempotency_key_a_call_that_nobody_answered_is_asked_again() -> None:
    request = pb.CompletionRequest(model="m", idempotency_key="k")
    answers = in_turn(refusal("unreachable"), refusal("idempotency_in_progress", dispatched=None), RESPONSE)
    result, _, steps = played(flows.complete(request, None, 60.0), answers)
    assert result is RESPONSE
    assert [step.request for step in steps if isinstance(step, Ask)] == [request] * 3
    with pytest.raises(CallFailed):
        played(flows.complete(request, None, 60.0), in_turn(refusal("all_routes_failed", after=1.0, dispatched=True)))


@pytest.mark.parametrize(("budget_s", "timeout_s"), [(0.0, None), (5.0, None), (3600.0, 5.0)])
def test_a_wait_that_is_too_long_is_not_begun(budget_s: float, timeout_s: float | None) -> None:
    with pytest.raises(Busy):
        played(flows.complete(QUESTION, timeout_s, budget_s), in_turn(refusal(after=10.0)))


def test_pauses_grow_to_a_bound() -> None:
    patience = Patience(3600.0)
    seconds = [patience.after(refusal()).seconds for _ in range(10)]
    assert all(0.2 * 2**number <= one for number, one in enumerate(seconds[:5]))
    assert max(seconds) <= 5.0 * 1.25


def test_a_page_that_is_no_gateways_is_not_asked_for_again() -> None:
    with pytest.raises(Unreachable):
        played(job_flows.get(ID % 1, 60.0), in_turn(httpx.Response(404, text="<html>")))


# ------------------------------------------------------------------ streams


def test_a_stream_is_asked_again_as_long_as_no_content_has_come() -> None:
    answers = in_turn("first", QUEUED, refusal("queue_timeout"), "second", QUEUED, DELTA, FINISHED)
    _, items, steps = played(flows.stream(QUESTION, None, 60.0), answers)
    assert items == [QUEUED, QUEUED, DELTA, FINISHED]
    assert [step.call for step in steps if isinstance(step, Hear)] == ["first"] * 2 + ["second"] * 3


def test_a_stream_that_gave_content_is_never_asked_again() -> None:
    request = pb.CompletionRequest(model="m", idempotency_key="k")
    with pytest.raises(Unreachable):
        played(flows.stream(request, None, 60.0), in_turn("call", DELTA, refusal("unreachable")))


def test_what_failed_says_of_the_outcome_is_in_the_error() -> None:
    told = pb.Outcome(request_id="r", attempts=[pb.Attempt(number=1)])
    chunk = pb.CompletionChunk(failed=pb.Failed(code="internal", outcome=told))
    with pytest.raises(Internal) as failed:
        played(flows.stream(QUESTION, None, 60.0), in_turn("call", DELTA, chunk, refusal("internal", dispatched=True)))
    assert failed.value.outcome == told


def test_a_stream_without_its_end_is_broken() -> None:
    with pytest.raises(CallFailed) as failed:
        played(flows.stream(QUESTION, None, 60.0), in_turn("call", DELTA, None))
    assert failed.value.code == "upstream_broken"


def test_a_call_gets_what_is_left_of_the_deadline() -> None:
    _, _, steps = played(flows.stream(QUESTION, 50.0, 0.0), in_turn("call", FINISHED))
    assert isinstance(steps[0], Listen)
    assert steps[0].timeout_s is not None
    assert 0 < steps[0].timeout_s <= 50.0


# ------------------------------------------------------------------ jobs

ID = "00000000-0000-0000-0000-%012d"


class Store:
    """The jobs of a gateway, by line. Whenever it is asked to wait for one, the next of `ends` ends."""

    def __init__(self, lines: int, ends: list[list[int]], page: int = 1000) -> None:
        self.ended_at: dict[int, float] = {}
        self.lines = lines
        self.ends = iter(ends)
        self.page = page
        self.waits: list[int] = []
        self.looks = 0

    def job(self, line: int) -> dict[str, Any]:
        ended = self.ended_at.get(line)
        return {
            "id": ID % line,
            "submission_id": "s",
            "line": line,
            "status": "running" if ended is None else "succeeded",
            "ended_at": None if ended is None else f"2026-01-01T00:00:{ended:09.6f}Z",
        }

    def answer(self, step: Any) -> httpx.Response | CallFailed:
        assert isinstance(step, Send)
        if step.path == "/v1/jobs":
            assert step.params["submission_id"] == "s"
            self.looks += 1
            after = step.params.get("cursor")
            first = 1 if after is None else int(after[-12:]) + 1
            lines = range(first, min(first + self.page, self.lines + 1))
            more = lines.stop <= self.lines
            page = {"data": [self.job(line) for line in lines], "next_cursor": ID % (lines.stop - 1) if more else None}
            return httpx.Response(200, json=page)
        line = int(step.path[-12:])
        if "wait" in step.params:
            self.waits.append(line)
            for number in next(self.ends):
                self.ended_at[number] = float(len(self.ended_at))
        return httpx.Response(200, json=self.job(line))


def test_jobs_come_in_the_order_of_their_ends() -> None:
    store = Store(7, [[4, 2], [], [7, 1], [6, 3], [5]], page=2)
    _, items, _ = played(job_flows.as_completed(["s"], None, 60.0), store.answer)
    assert [job.line for job in items] == [4, 2, 7, 1, 6, 3, 5]
    # It waits for the oldest that has not ended.
    assert store.waits == [1, 1, 1, 3, 5]


def test_jobs_that_have_ended_before_come_at_once() -> None:
    store = Store(3, [])
    store.ended_at = {1: 2.0, 2: 0.0, 3: 1.0}
    _, items, _ = played(job_flows.as_completed(["s"], None, 60.0), store.answer)
    assert [job.line for job in items] == [2, 3, 1]
    assert store.looks == 1


def test_what_ended_at_the_head_of_a_list_is_not_looked_at_again() -> None:
    store = Store(6, [[1, 2, 3, 4], [5, 6]], page=2)
    _, items, _ = played(job_flows.as_completed(["s"], None, 60.0), store.answer)
    assert [job.line for job in items] == [1, 2, 3, 4, 5, 6]
    assert store.looks == 3 + 3 + 1


def test_a_gateway_that_restarts_does_not_end_the_collection() -> None:
    store = Store(2, [[2], [1]])
    outages = iter([False, True, True, False, True, False, True])

    def answer(step: Any) -> httpx.Response | CallFailed:
        return refusal("unreachable", dispatched=None) if next(outages, False) else store.answer(step)

    _, items, _ = played(job_flows.as_completed(["s"], None, 60.0), answer)
    assert [job.line for job in items] == [2, 1]


def test_a_submission_that_is_not_there_is_not_found() -> None:
    with pytest.raises(NotFound):
        played(job_flows.as_completed(["s"], None, 60.0), Store(0, []).answer)


def test_a_collection_has_a_limit() -> None:
    with pytest.raises(TimeoutError):
        played(job_flows.as_completed(["s"], 0.0, 60.0), Store(1, []).answer)


# ------------------------------------------------------------------ batches


class Files:
    """The contents of files, given in pieces of a few bytes."""

    def __init__(self, **contents: list[dict[str, Any]]) -> None:
        self.contents = {
            name: "".join(json.dumps(line) + "\n" for line in lines).encode() for name, lines in contents.items()
        }

    def answer(self, step: Any) -> Any:
        if isinstance(step, Open):
            content = self.contents[step.path.split("/")[3]]
            pieces = iter([content[at : at + 7] for at in range(0, len(content), 7)])
            return Opened(httpx.Response(200), pieces)
        assert isinstance(step, Read)
        return next(step.opened.pieces, b"")


def result(custom_id: str, **fields: Any) -> dict[str, Any]:
    return {"id": f"batch_req_{custom_id}", "custom_id": custom_id, "response": None, "error": None, **fields}


BATCH = batch_flows.Batch(
    id="batch_1",
    status="completed",
    endpoint="/v1/chat/completions",
    input_file_id="in",
    output_file_id="out",
    error_file_id="err",
)
FAULT = {"code": "batch_expired", "message": "late", "param": None, "dispatched": False}
ANSWERED = {"status_code": 200, "request_id": "r", "body": {"a": 1}}
CONTENTS = {
    "in": [{"custom_id": custom_id, "body": {"n": n}} for n, custom_id in enumerate("abcde")],
    "out": [result("b", response=ANSWERED), result("d", response=ANSWERED)],
    "err": [result("a", error=FAULT), result("c", error=FAULT), result("e", error=FAULT)],
}


def test_results_are_the_answers_and_then_the_failures() -> None:
    _, items, _ = played(batch_flows.results(BATCH, False, 60.0), Files(**CONTENTS).answer)
    assert [item.custom_id for item in items] == ["b", "d", "a", "c", "e"]
    assert items[0].answer() == {"a": 1}
    with pytest.raises(OutOfTime) as failed:
        items[2].answer()
    assert (failed.value.code, failed.value.dispatched) == ("batch_expired", False)


def test_results_joined_with_their_requests_come_in_the_order_of_the_input() -> None:
    _, items, _ = played(batch_flows.results(BATCH, True, 60.0), Files(**CONTENTS).answer)
    assert [(item.custom_id, item.request["body"]["n"], item.error is None) for item in items] == [
        ("a", 0, False),
        ("b", 1, True),
        ("c", 2, False),
        ("d", 3, True),
        ("e", 4, False),
    ]


def test_a_line_without_a_result_is_not_passed_over() -> None:
    lacking = Files(**{**CONTENTS, "err": CONTENTS["err"][:1]})
    with pytest.raises(NotFound, match="'c'"):
        played(batch_flows.results(BATCH, True, 60.0), lacking.answer)


def test_a_batch_that_runs_has_no_results() -> None:
    running = batch_flows.Batch(id="batch_1", status="in_progress", endpoint="/v1/chat/completions")
    with pytest.raises(Conflict):
        played(batch_flows.results(running, False, 60.0), in_turn())


def test_an_upload_is_sent_again_from_its_beginning_under_the_same_key() -> None:
    sent: list[bytes] = []
    keys: set[str] = set()

    def answer(step: Any) -> httpx.Response | CallFailed:
        assert step.file is not None
        _, file = step.file
        flows.body_of(step)
        sent.append(file.read())
        keys.add(step.headers["idempotency-key"])
        if len(sent) < 3:
            return refusal("unreachable", dispatched=None)
        return httpx.Response(200, json={"id": "file-1", "bytes": 1, "filename": "batch.jsonl", "created_at": 1})

    requests = [{"custom_id": "a", "body": {}}, {"custom_id": "b", "url": "/v1/messages", "body": {}}]
    file, _, _ = played(batch_flows.upload(requests, None, "/v1/embeddings", None, 60.0), answer)
    assert file.id == "file-1"
    assert len(keys) == 1
    assert len(sent) == 3
    assert [json.loads(line)["url"] for line in sent[0].splitlines()] == ["/v1/embeddings", "/v1/messages"]
    assert sent[0] == sent[1] == sent[2]


def test_progress_is_told_of_every_change_and_of_nothing_else() -> None:
    states = [("validating", 0), ("in_progress", 0), ("in_progress", 0), ("in_progress", 2), ("completed", 3)]
    answers = [
        httpx.Response(
            200,
            json={"id": "b", "status": status, "endpoint": "e", "request_counts": {"total": 3, "completed": completed}},
        )
        for status, completed in states
    ]
    seen: list[tuple[str, int]] = []
    progress = lambda batch: seen.append((batch.status, batch.request_counts.completed))  # noqa: E731
    batch, _, steps = played(batch_flows.wait("b", None, progress, 60.0), in_turn(*answers))
    assert batch.ended
    assert seen == [states[0], states[1], states[3], states[4]]
    assert pauses(steps) == sorted(pauses(steps))
