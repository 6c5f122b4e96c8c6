"""Jobs on a real PostgreSQL: each ends exactly once, whoever dies, cancels or comes late."""

from __future__ import annotations

import asyncio
import importlib.resources
import json
import re
import uuid
from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from decimal import Decimal
from functools import partial
from typing import Any

import asyncpg
import msgspec
import pytest

from adapters.chat import ChatResponse
from adapters.protocols import PROTOCOLS
from admission.ids import new_id
from gateway.call import Scope
from gateway.database import open_connection
from gateway.jobs import store as statements
from gateway.jobs.formats import PROTOCOL_OF, formats
from gateway.jobs.model import SUCCEEDED, TRANSITIONS, End, GiveBack, Status, Wait
from gateway.jobs.store import Answer, Ending, Filter, Intent
from gateway.naming import ID_PREFIXES
from gateway.outcome import Outcome
from tests.fakes.job_line import FakeLine, response, vectors
from tests.fakes.job_world import World, line, own_database, until, world_on
from tests.integration.plans import seen


@pytest.fixture(scope="module")
def url(database_server: str, database_template: str) -> Iterator[str]:
    yield from own_database(database_server, database_template)


@pytest.fixture
async def world(url: str) -> AsyncIterator[World]:
    async with world_on(url) as world:
        yield world


def outcome_of(row: dict[str, Any]) -> Outcome:
    return msgspec.json.decode(row["outcome"], type=Outcome)


# ------------------------------------------------------------------ the plain course


async def test_a_job_runs_once_and_keeps_its_answer_and_its_cost(world: World) -> None:
    job_id = await world.one(custom_id="a", session_id="s")
    async with world.runner():
        (row,) = await world.ended(job_id)
    assert row["status"] == "succeeded"
    assert json.loads(row["result"])["choices"][0]["message"]["content"] == "hello"
    assert (row["result_status"], row["attempts"], row["claims"]) == (200, 1, 1)
    assert outcome_of(row).cost.usd == Decimal("0.000000125")
    assert world.line.sent == {str(job_id): 1}
    assert row["expires_at"] > row["ended_at"] >= row["claimed_at"] >= row["created_at"]


async def test_a_job_may_ask_for_a_role_and_no_model(world: World) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}]}
    job_id, other = await world.one(body=asked, role="planner"), await world.one()
    async with world.runner():
        rows = await world.ended(job_id, other)
    assert [row["status"] for row in rows] == ["succeeded", "succeeded"]
    assert (await world.row(job_id))["model"] == ""


ANSWERED = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, ("object", "chat.completion")),
    ("/v1/responses", {"input": "hi"}, ("object", "response")),
    ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}, ("type", "message")),
]


@pytest.mark.parametrize(("path", "body", "named"), ANSWERED, ids=[path for path, _, _ in ANSWERED])
async def test_a_job_is_answered_in_the_format_that_it_was_asked_in(
    world: World, path: str, body: dict[str, Any], named: tuple[str, str]
) -> None:
    job_id = await world.one(url=path, body={"model": "ok", **body})
    async with world.runner():
        (row,) = await world.ended(job_id)
    assert (row["status"], row["url"]) == ("succeeded", path)
    answer = json.loads(row["result"])
    assert answer[named[0]] == named[1]
    assert "hello" in row["result"]


@pytest.mark.parametrize(("path", "body", "named"), ANSWERED, ids=[path for path, _, _ in ANSWERED])
async def test_an_answer_without_an_id_and_a_model_gets_both(
    world: World, path: str, body: dict[str, Any], named: tuple[str, str]
) -> None:
    job_id = await world.one(url=path, body={"model": "nameless", **body})
    async with world.runner():
        (row,) = await world.ended(job_id)
    answer = json.loads(row["result"])
    assert answer["id"] == ID_PREFIXES[PROTOCOL_OF[path]] + job_id.hex, named
    assert answer["model"] == "fake-1"


@pytest.mark.parametrize(("wanted", "kind"), [("float", list), ("base64", str)])
async def test_embeddings_may_be_asked_for_by_a_job(world: World, wanted: str, kind: type) -> None:
    body = {"model": "ok", "input": ["a", "b"], "encoding_format": wanted}
    job_id = await world.one(url="/v1/embeddings", body=body)
    async with world.runner():
        (row,) = await world.ended(job_id)
    assert row["status"] == "succeeded"
    answer = json.loads(row["result"])
    assert answer["object"] == "list"
    assert [type(item["embedding"]) for item in answer["data"]] == [kind, kind]
    assert world.line.sent[str(job_id)] == 1


async def test_vectors_that_a_dead_process_stored_are_settled(world: World) -> None:
    job_id = await world.one(url="/v1/embeddings", body={"model": "ok", "input": "a"})
    dead = new_id()
    (claimed,) = await world.store.claim(dead, 1)
    await world.store.steps(dead, [Intent(job_id=job_id, claims=claimed.claims, attempt=1)])
    format_of = formats(PROTOCOLS)["/v1/embeddings"]
    text = format_of.render(vectors(1), format_of.read(claimed.body.encode())).decode()
    answer = Answer(job_id=job_id, claims=claimed.claims, attempt=1, body=text, status=200)
    await world.store.steps(dead, [answer])
    await world.runner().recover(dead)
    assert await world.status(job_id) is Status.SUCCEEDED
    ((_, _, settled),) = world.recovery.settled
    assert (settled.usage.input_total, settled.usage.output_total) == (10, 0)


@pytest.mark.parametrize(("path", "body", "named"), ANSWERED, ids=[path for path, _, _ in ANSWERED])
async def test_an_answer_that_a_dead_process_stored_is_settled_in_its_own_format(
    world: World, path: str, body: dict[str, Any], named: tuple[str, str]
) -> None:
    job_id = await world.one(url=path, body={"model": "ok", **body})
    dead = new_id()
    (claimed,) = await world.store.claim(dead, 1)
    await world.store.steps(dead, [Intent(job_id=job_id, claims=claimed.claims, attempt=1)])
    format_of = formats(PROTOCOLS)[path]
    text = format_of.render(response(), format_of.read(claimed.body.encode())).decode()
    answer = Answer(job_id=job_id, claims=claimed.claims, attempt=1, body=text, status=200)
    await world.store.steps(dead, [answer])
    await world.runner().recover(dead)
    assert await world.status(job_id) is Status.SUCCEEDED
    ((_, _, settled),) = world.recovery.settled
    assert isinstance(settled, ChatResponse)
    assert settled.choices[0].text == "hello"
    assert settled.usage.output_total == 5


async def test_interactive_jobs_are_claimed_first_and_others_in_the_order_of_their_submission(world: World) -> None:
    slow = [await world.one() for _ in range(3)]
    fast = await world.one(**{"class": "interactive"})
    async with world.runner(concurrency=1):
        await world.ended(*slow, fast)
    assert [debit for debit, _ in world.line.attempts] == [str(job_id) for job_id in (fast, *slow)]


async def test_the_intent_is_committed_before_the_request_is_sent(world: World) -> None:
    job_id = await world.one(model="wait")
    async with world.runner():
        await world.line.inside.wait()
        row = await world.row(job_id)
        assert (row["status"], row["intent_attempt"]) == ("running", 1)
        world.line.gate.set()
        await world.ended(job_id)


async def test_the_answer_is_stored_before_the_attempt_is_settled(world: World) -> None:
    world.line.pause_before_settlement = asyncio.Event()
    job_id = await world.one()
    async with world.runner():

        async def stored() -> bool:
            return (await world.row(job_id))["result"] is not None

        await until(stored)
        assert await world.status(job_id) is Status.RUNNING
        world.line.pause_before_settlement.set()
        await world.ended(job_id)


async def test_a_submission_wakes_the_runner_of_its_own_process(world: World) -> None:
    async with world.runner(poll_longest_s=60.0, poll_shortest_s=60.0) as runner:
        world.local.runner = runner
        await asyncio.sleep(0.05)
        await world.ended(await world.one())


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("model", "code", "sent"),
    [
        ("rejected", "upstream_rejected", 1),
        ("uncertain", "uncertain", 1),
        ("down", "all_routes_failed", 3),
        ("fault", "uncertain", 1),
    ],
)
async def test_a_failed_job_says_why_and_was_sent_as_often_as_it_may(
    world: World, model: str, code: str, sent: int
) -> None:
    bad, good = await world.one(model=model), await world.one()
    async with world.runner():
        row, neighbour = await world.ended(bad, good)
    assert (row["status"], row["error_code"]) == ("failed", code)
    assert row["result"] is None
    assert world.line.sent[str(bad)] == sent
    assert neighbour["status"] == "succeeded"


async def test_each_run_goes_on_with_the_attempt_numbers_and_the_whole_cost_is_kept(world: World) -> None:
    job_id = await world.one(model="flaky")
    async with world.runner():
        (row,) = await world.ended(job_id)
    assert row["status"] == "succeeded"
    assert world.line.attempts == [(str(job_id), 1), (str(job_id), 2)]
    assert [attempt.number for attempt in outcome_of(row).attempts] == [1, 2]
    assert row["attempts"] == 2


async def test_a_job_with_one_attempt_is_not_run_again(world: World) -> None:
    job_id = await world.one(model="down", max_attempts=1)
    async with world.runner():
        await world.ended(job_id)
    assert world.line.sent[str(job_id)] == 1


async def test_a_refused_job_waits_in_the_queue_and_is_never_taken_for_poison(world: World) -> None:
    job_id = await world.one(model="busy")
    async with world.runner():
        await until(lambda: world.line.refused > 2 * world.settings.poison_claims)
        row = await world.row(job_id)
        assert row["claims"] - row["returned"] <= 1
        world.line.free.set()
        (row,) = await world.ended(job_id)
    assert row["status"] == "succeeded"
    assert (row["runs"], row["attempts"]) == (0, 1)


async def test_a_model_that_is_full_does_not_stand_before_the_others(world: World) -> None:
    for _ in range(100):
        await world.one(model="busy")
    job_id = await world.one(model="ok")
    async with world.runner(concurrency=4):
        (row,) = await world.ended(job_id)
        assert row["status"] == "succeeded"
        # Held back after each refusal: the hundred were not tried one after the other.
        assert world.line.refused < 100


async def test_a_key_at_its_limit_does_not_stand_before_the_others(world: World) -> None:
    world.line.at_their_limit = {world.key_id}
    jobs = [await world.one() for _ in range(60)]
    places = [(await world.row(job_id))["not_before"] for job_id in jobs]
    limited, world.key_id = world.key_id, new_id()
    other = await world.one()
    async with world.runner(concurrency=4):
        (row,) = await world.ended(other)
        assert row["status"] == "succeeded"
        assert world.line.refused < 60
        # They wait with their place, and none is taken for poison.
        waiting = [await world.row(job_id) for job_id in jobs]
        assert {row["status"] for row in waiting} <= {"queued", "running"}
        assert {row["wait_reason"] for row in waiting} <= {None, "key_limit"}
        assert [row["not_before"] for row in waiting] == places
        world.line.at_their_limit.discard(limited)
        rows = await world.ended(*jobs)
    assert {row["status"] for row in rows} == {"succeeded"}
    assert {row["runs"] for row in rows} == {0}


async def test_a_group_that_was_reset_makes_its_jobs_due_in_every_process_and_no_others(world: World) -> None:
    world.line.cooling = {"limited": ("g", "h"), "other": ("i",)}
    limited = [await world.one(model="limited", deadline_s=HOUR * 2) for _ in range(3)]
    other = await world.one(model="other", deadline_s=HOUR * 2)
    async with world.runner() as here, world.runner():
        # All of them were refused, and told to come back in an hour.
        for job_id in (*limited, other):

            async def told_to_come_back(job_id: uuid.UUID = job_id) -> bool:
                return bool((await world.row(job_id))["wait_groups"])

            await until(told_to_come_back)
        world.line.cooling = {"other": ("i",)}
        assert await here.release("nobody's") == 0
        assert {await world.status(job_id) for job_id in limited} == {Status.QUEUED}
        # It is the second of its groups that was reset.
        assert await here.release("h") == len(limited)
        for row in await world.ended(*limited):
            assert (row["status"], row["wait_reason"]) == ("succeeded", None)
        waits = await world.row(other)
        assert (waits["status"], waits["wait_groups"]) == ("queued", ["i"])


async def test_jobs_are_due_at_once_for_a_process_that_knows_nothing_of_the_reset(world: World) -> None:
    world.line.cooling = {"limited": ("g",)}
    job_id = await world.one(model="limited", deadline_s=HOUR * 2)
    async with world.runner():

        async def told_to_come_back() -> bool:
            return bool((await world.row(job_id))["wait_groups"])

        await until(told_to_come_back)
    assert await world.store.claim(new_id(), 1) == []
    # As many rounds as there are rows, and one more.
    assert await world.another_store().release("g", 1) == 1
    assert await world.another_store().release("g", 1) == 0
    [job] = await world.another_store().claim(new_id(), 1)
    assert job.job_id == job_id


async def test_models_are_taken_in_turn(world: World) -> None:
    for _ in range(50):
        await world.one(model="a")
    others = [await world.one(model=model) for model in ("b", "c")]
    claimed = await world.store.claim(new_id(), 6)
    assert {job.job_id for job in claimed} > set(others)
    assert len(claimed) == 6


async def test_a_job_that_is_refused_until_its_deadline_expires(world: World) -> None:
    job_id = await world.one(model="busy", deadline_s=0.2)
    async with world.runner():
        (row,) = await world.ended(job_id)
    assert (row["status"], row["error_code"]) == ("expired", "expired")
    assert not world.line.sent


async def test_a_queued_job_expires_though_nobody_has_room_for_it(world: World) -> None:
    blocker = await world.one(model="wait")
    async with world.runner(concurrency=1):
        await world.line.inside.wait()
        late = await world.one(deadline_s=0.05)
        (row,) = await world.ended(late)
        assert row["status"] == "expired"
        world.line.gate.set()
        await world.ended(blocker)


async def test_a_job_whose_key_was_revoked_is_not_run(world: World) -> None:
    job_id = await world.one()
    world.callers.revoked.add(world.key_id)
    async with world.runner():
        (row,) = await world.ended(job_id)
    assert (row["status"], row["error_code"]) == ("failed", "permission_denied")
    assert not world.line.sent


async def test_a_job_whose_key_lost_its_scope_is_not_run(world: World) -> None:
    job_id = await world.one()
    world.callers.scopes = frozenset({Scope.CHAT})
    async with world.runner():
        (row,) = await world.ended(job_id)
    assert (row["status"], row["error_code"]) == ("failed", "permission_denied")
    assert not world.line.sent


# ------------------------------------------------------------------ several processes


async def test_many_runners_never_run_one_job_twice(world: World) -> None:
    receipt = await world.submit(*(line(f"c{n}") for n in range(300)))
    ids = [entry.id for entry in receipt.jobs]
    runners = [world.runner(concurrency=7) for _ in range(4)]
    lines = [FakeLine() for _ in runners]
    for runner, its_line in zip(runners, lines, strict=True):
        runner._line = its_line
        await runner.__aenter__()
    await world.ended(*ids)
    for runner in runners:
        await runner.drain(5.0)
    sent = sum((its_line.sent for its_line in lines), start=type(lines[0].sent)())
    assert sent == {str(job_id): 1 for job_id in ids}
    assert await world.count("succeeded") == 300


async def test_racing_writers_end_a_job_exactly_once(world: World) -> None:
    """Finish, give back, cancel and recovery at once, many times: one transition wins, the others change nothing."""
    owner = new_id()
    for _ in range(30):
        job_id = await world.one()
        (job,) = await world.store.claim(owner, 1)
        claims = job.claims

        async def conclude(decision: End | GiveBack, job_id: uuid.UUID = job_id, claims: int = claims) -> Status | None:
            ending = Ending(job_id=job_id, claims=claims, decision=decision, outcome=None, attempts=0)
            (after,) = await world.store.steps(owner, [ending])
            return after

        answer = Answer(job_id=job_id, claims=claims, attempt=1, body="{}", status=200)
        await world.store.steps(owner, [answer])
        results = await asyncio.gather(
            conclude(SUCCEEDED),
            conclude(End(status=Status.FAILED, code="uncertain")),
            conclude(SUCCEEDED),
            world.store.cancel(world.key_id, job_id),
        )
        *ends, _ = results
        assert sum(end is not None for end in ends) == 1
        final = await world.row(job_id)
        assert final["status"] in {end for end in ends if end is not None}
        assert await conclude(GiveBack(delay_s=0, reason=None, counts=False)) is None
        assert await world.row(job_id) == final


async def test_an_earlier_claim_of_the_same_process_can_no_longer_write(world: World) -> None:
    owner = new_id()
    job_id = await world.one()
    (first,) = await world.store.claim(owner, 1)
    back = GiveBack(delay_s=0, reason=Wait.QUEUE_FULL, counts=False)
    ending = Ending(job_id=job_id, claims=first.claims, decision=back, outcome=None, attempts=0)
    assert await world.store.steps(owner, [ending]) == [Status.QUEUED]
    (second,) = await world.store.claim(owner, 1)
    assert second.claims == first.claims + 1
    assert await world.store.steps(owner, [Intent(job_id=job_id, claims=first.claims, attempt=1)]) == [None]
    assert await world.store.steps(owner, [ending]) == [None]
    assert await world.store.steps(owner, [Intent(job_id=job_id, claims=second.claims, attempt=1)]) == [Status.RUNNING]


async def test_a_process_that_lost_its_job_does_not_send_it(world: World) -> None:
    """It was thought dead while it waited for a slot; its job was given to another."""
    job_id = await world.one(model="queue")
    slow = FakeLine()
    owner = new_id()
    async with world.runner(owner, line=slow, upkeep_s=60.0, concurrency=1) as runner:
        await slow.inside.wait()
        other = world.runner()
        assert await other.recover(owner) == 1
        world.line.gate.set()
        async with other:
            await world.ended(job_id)
        slow.gate.set()
        await until(lambda: runner.running == 0)
    assert world.line.sent == {str(job_id): 1}
    assert not slow.sent


# ------------------------------------------------------------------ cancel


async def test_a_queued_job_is_cancelled_at_once(world: World) -> None:
    job_id = await world.one()
    assert await world.store.cancel(world.key_id, job_id) is Status.CANCELLED
    assert await world.store.cancel(world.key_id, job_id) is None
    async with world.runner():
        await world.ended(await world.one())
    assert str(job_id) not in world.line.sent


@pytest.mark.parametrize("model", ["wait", "queue"])
async def test_a_running_job_is_cancelled_by_its_process_though_another_was_asked(world: World, model: str) -> None:
    job_id = await world.one(model=model)
    async with world.runner():
        await world.line.inside.wait()
        began = asyncio.get_running_loop().time()
        assert await world.store.cancel(world.key_id, job_id) is Status.RUNNING
        (row,) = await world.ended(job_id)
        assert asyncio.get_running_loop().time() - began < 1.0
    assert (row["status"], row["error_code"]) == ("cancelled", "cancelled")
    assert world.line.cancelled == [str(job_id)]


async def test_a_cancel_between_claim_and_dispatch_prevents_the_dispatch(world: World) -> None:
    job_id = await world.one(model="queue")
    async with world.runner(cancel_poll_s=60.0):
        await world.line.inside.wait()
        await world.store.cancel(world.key_id, job_id)
        world.line.gate.set()
        (row,) = await world.ended(job_id)
    assert row["status"] == "cancelled"
    assert not world.line.sent


async def test_an_answer_that_is_stored_wins_over_a_cancel(world: World) -> None:
    world.line.pause_before_settlement = asyncio.Event()
    job_id = await world.one()
    async with world.runner() as runner:

        async def stored() -> bool:
            return (await world.row(job_id))["result"] is not None

        await until(stored)
        await world.store.cancel(world.key_id, job_id)
        runner.cancel(job_id)
        world.line.pause_before_settlement.set()
        (row,) = await world.ended(job_id)
    assert row["status"] == "succeeded"


async def test_another_key_can_neither_see_nor_cancel_nor_delete(world: World) -> None:
    job_id = await world.one()
    stranger = uuid.uuid4()
    assert await world.store.get(stranger, job_id) is None
    assert await world.store.cancel(stranger, job_id) is None
    assert not await world.store.delete(stranger, job_id)
    assert await world.status(job_id) is Status.QUEUED


# ------------------------------------------------------------------ death and recovery


async def died(world: World, **fields: Any) -> tuple[uuid.UUID, uuid.UUID, int]:
    """A job that a process claimed before it died: its id, the process, the claim."""
    owner = new_id()
    job_id = await world.one(**fields)
    (job,) = await world.store.claim(owner, 1)
    return job_id, owner, job.claims


async def test_a_job_that_was_never_sent_goes_back_to_the_queue_and_runs(world: World) -> None:
    job_id, owner, _ = await died(world)
    async with world.runner():
        assert await world.status(job_id) is Status.RUNNING
        world.recovery.dead_owners.add(owner)
        (row,) = await world.ended(job_id)
    assert row["status"] == "succeeded"
    assert world.line.sent == {str(job_id): 1}
    assert row["claims"] == 2


async def test_a_job_that_may_have_been_sent_is_never_sent_again_by_itself(world: World) -> None:
    job_id, owner, claims = await died(world)
    await world.store.steps(owner, [Intent(job_id=job_id, claims=claims, attempt=1)])
    runner = world.runner()
    assert await runner.recover(owner) == 1
    row = await world.row(job_id)
    assert (row["status"], row["error_code"]) == ("failed", "uncertain")
    assert await runner.recover(owner) == 0
    assert not world.line.sent


async def test_a_job_that_may_have_been_sent_is_sent_again_where_its_caller_allows_it(world: World) -> None:
    job_id, owner, claims = await died(world, resend_uncertain="before_first_byte")
    await world.store.steps(owner, [Intent(job_id=job_id, claims=claims, attempt=1)])
    async with world.runner() as runner:
        await runner.recover(owner)
        (row,) = await world.ended(job_id)
    assert row["status"] == "succeeded"
    assert world.line.attempts == [(str(job_id), 2)]


async def test_a_job_whose_answer_was_stored_is_settled_and_ended_without_another_dispatch(world: World) -> None:
    job_id, owner, claims = await died(world)
    await world.store.steps(owner, [Intent(job_id=job_id, claims=claims, attempt=1)])
    format_of = formats(PROTOCOLS)["/v1/chat/completions"]
    body = json.dumps(line()["body"]).encode()
    text = format_of.render(response(), format_of.read(body)).decode()
    answer = Answer(job_id=job_id, claims=claims, attempt=1, body=text, status=200)
    await world.store.steps(owner, [answer])
    await asyncio.gather(*(world.runner().recover(owner) for _ in range(3)))
    row = await world.row(job_id)
    assert row["status"] == "succeeded"
    assert row["result"] == text
    debit, attempt, settled = world.recovery.settled[0]
    assert (debit, attempt, settled.usage.output_total) == (str(job_id), 1, 5)
    assert outcome_of(row).cost.usd == Decimal("0.000000125")
    assert not world.line.sent


async def test_a_job_that_kills_every_process_is_given_up_and_its_neighbours_progress(world: World) -> None:
    poison = await world.one()
    for _ in range(world.settings.poison_claims):
        owner = new_id()
        (job,) = await world.store.claim(owner, 1)
        assert job.job_id == poison
        await world.runner().recover(owner)
    row = await world.row(poison)
    assert (row["status"], row["error_code"]) == ("failed", "poison")
    async with world.runner():
        (neighbour,) = await world.ended(await world.one())
    assert neighbour["status"] == "succeeded"


async def test_a_cancelled_job_of_a_dead_process_is_not_run_again(world: World) -> None:
    job_id, owner, _ = await died(world)
    await world.store.cancel(world.key_id, job_id)
    await world.runner().recover(owner)
    assert await world.status(job_id) is Status.CANCELLED


async def test_recovery_leaves_the_jobs_of_the_living_alone(world: World) -> None:
    job_id = await world.one(model="wait")
    async with world.runner():
        await world.line.inside.wait()
        async with world.runner() as other:
            await other.recover(new_id())
            await other._keep_up()
        assert await world.status(job_id) is Status.RUNNING
        world.line.gate.set()
        (row,) = await world.ended(job_id)
    assert row["claims"] == 1


async def test_a_claim_whose_acknowledgement_was_lost_is_taken_up_by_the_same_process(world: World) -> None:
    job_id = await world.one()
    runner = world.runner()
    await world.store.claim(runner._owner, 1)
    async with runner:
        (row,) = await world.ended(job_id)
    assert row["status"] == "succeeded"


# ------------------------------------------------------------------ stopping


async def test_a_drain_lets_what_runs_end_and_claims_nothing_new(world: World) -> None:
    job_id = await world.one(model="wait")
    async with world.runner(concurrency=5) as runner:
        await world.line.inside.wait()
        drained = asyncio.create_task(runner.drain(5.0))
        await asyncio.sleep(0)
        later = await world.one()
        world.line.gate.set()
        await drained
    assert await world.status(job_id) is Status.SUCCEEDED
    assert await world.status(later) is Status.QUEUED


async def test_a_drain_that_is_over_gives_back_what_was_not_sent_and_tells_what_is_uncertain(world: World) -> None:
    sent, unsent = await world.one(model="wait"), await world.one(model="queue")
    async with world.runner() as runner:
        await until(lambda: runner.running == 2 and world.line.sent[str(sent)] == 1)
        await runner.drain(0.01)
        assert runner.running == 0
    row = await world.row(unsent)
    assert (row["status"], row["claims"] - row["returned"]) == ("queued", 0)
    assert (await world.row(sent))["error_code"] == "uncertain"


# ------------------------------------------------------------------ the store is away


async def test_jobs_go_on_after_every_connection_was_cut(world: World, url: str) -> None:
    receipt = await world.submit(*(line(f"c{n}") for n in range(400)))
    ids = [entry.id for entry in receipt.jobs]

    def sent_at_least(count: int) -> bool:
        return sum(world.line.sent.values()) >= count

    async with world.runner(concurrency=8), open_connection(url, name="cutter") as cutter:
        for threshold in (20, 100, 200):
            await until(partial(sent_at_least, threshold))
            await cutter.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
            )

        async def all_ended() -> bool:
            return not await cutter.fetchval("select count(*) from content.job where ended_at is null")

        await until(all_ended)
        statuses = await cutter.fetch("select status, count(*) from content.job group by status")
    assert {row["status"]: row["count"] for row in statuses} == {"succeeded": 400}
    assert set(world.line.sent.values()) == {1}
    assert len(world.line.sent) == len(ids)


# ------------------------------------------------------------------ the server's clock is set


HOUR = 3600.0
both_ways = pytest.mark.parametrize("step", [-2 * HOUR, 2 * HOUR], ids=["back", "forward"])


@both_ways
async def test_a_step_that_only_this_process_has_noticed_moves_no_due_time_and_no_deadline(
    world: World, step: float
) -> None:
    await world.store.keep_time()
    before = await world.one(deadline_s=HOUR)
    await world.step(step)
    unknowing = world.another_store()
    if step < 0:
        assert not await unknowing.claim(new_id(), 10), "the test's step is none"
    after = await world.one(deadline_s=HOUR)
    assert not await world.store.expire()
    first = await world.store.claim(new_id(), 10)
    assert {job.job_id for job in first} == {before, after}
    assert all(HOUR - 60 < job.remaining_s <= HOUR for job in first)
    later = await world.one(deadline_s=HOUR)
    await world.store.keep_time()
    assert abs(await world.ahead_s()) < 1
    (second,) = await unknowing.claim(new_id(), 10)
    assert second.job_id == later
    assert HOUR - 60 < second.remaining_s <= HOUR


@both_ways
async def test_a_step_is_made_up_for_once_by_however_many_processes(world: World, step: float) -> None:
    stores = [world.another_store() for _ in range(6)]
    for store in stores:
        await store.keep_time()
    await world.step(step)
    await asyncio.gather(*(store.keep_time() for store in stores))
    assert abs(await world.ahead_s()) < 1
    assert await world.pool.fetchval("select steps from control.store") == 1


async def test_who_knows_another_time_learns_from_what_was_made_up_for_since(world: World) -> None:
    """A process that was asleep, or began while a step had not been noticed, must not set the offset back for ever."""
    await world.store.keep_time()
    late = world.another_store()
    await world.step(2 * HOUR)
    await late.keep_time()
    await world.store.keep_time()
    for _ in range(3):
        await late.keep_time()
        await world.store.keep_time()
        assert abs(await world.ahead_s()) < 1
    assert await world.pool.fetchval("select steps from control.store") == 1


async def test_the_clock_is_set_back_and_on_while_jobs_run_and_all_of_them_end_well(world: World) -> None:
    async with world.runner():
        await world.ended(await world.one())
        for step in (-2 * HOUR, 3 * HOUR, -HOUR):
            ahead = await world.ahead_s()
            waiting = [await world.one(deadline_s=HOUR) for _ in range(5)]
            await world.step(step)
            waiting += [await world.one(deadline_s=HOUR) for _ in range(5)]
            waiting.append(await world.one(model="flaky", deadline_s=HOUR))
            for row in await world.ended(*waiting):
                assert row["status"] == "succeeded"
            await until(partial(is_near, world, ahead))


async def is_near(world: World, ahead: float) -> bool:
    return abs(await world.ahead_s() - ahead) < 1


@both_ways
async def test_times_are_shown_by_the_clock_however_far_the_stores_time_is_off(world: World, step: float) -> None:
    await world.step(step)
    now: datetime = await world.pool.fetchval("select clock_timestamp()")
    job_id = await world.one(deadline_s=HOUR)
    refused = (await world.submit(line(), {"no": "job"})).errors[0].id
    owner = new_id()
    for job in await world.store.claim(owner, 10):
        back = GiveBack(delay_s=HOUR / 2, reason=Wait.COOLDOWN, counts=False)
        await world.store.steps(
            owner, [Ending(job_id=job.job_id, claims=job.claims, decision=back, outcome=None, attempts=0)]
        )
    assert not await world.store.claim(owner, 10)
    assert refused is not None
    for view in [
        *await world.store.page(world.key_id, Filter(status=Status.QUEUED), after=None, limit=10),
        await world.store.get(world.key_id, job_id),
        await world.store.get(world.key_id, refused),
    ]:
        assert view is not None
        shown = {
            "created": (view.created_at, 0.0),
            "deadline": (view.deadline_at, {job_id: HOUR, refused: 0.0}.get(view.job_id, world.settings.deadline_s)),
            "not before": (view.not_before, 0.0 if view.job_id == refused else HOUR / 2),
            "claimed": (view.claimed_at, 0.0),
            "ended": (view.ended_at, 0.0),
            "expires": (view.expires_at, world.settings.retention_s),
        }
        for name, (at, seconds) in shown.items():
            if at is not None:
                assert abs((at - now).total_seconds() - seconds) < 60, (name, at, now)
    assert not await world.store.expire()
    assert not await world.store.purge(10)
    # An hour of the store's time later, by whatever clock.
    await world.step(HOUR)
    assert set(await world.store.expire()) == {job_id}
    assert len(await world.store.claim(owner, 10)) == 1
    await world.step(world.settings.retention_s)
    assert await world.store.purge(10) == 2


# ------------------------------------------------------------------ retention


async def test_what_is_past_its_retention_is_deleted_and_nothing_else(world: World) -> None:
    old, young, running = await world.one(), await world.one(), await world.one()
    async with world.runner(concurrency=2):
        await world.ended(old, young, running)
    await world.pool.execute("update content.job set expires_at = clock_timestamp() where job_id = $1", old)
    queued = await world.one()
    assert await world.store.purge(100) == 1
    assert await world.store.get(world.key_id, old) is None
    for job_id in (young, running, queued):
        assert await world.store.get(world.key_id, job_id) is not None


async def test_only_ended_jobs_can_be_deleted(world: World) -> None:
    job_id = await world.one()
    assert not await world.store.delete(world.key_id, job_id)
    await world.store.cancel(world.key_id, job_id)
    assert await world.store.delete(world.key_id, job_id)
    assert await world.store.get(world.key_id, job_id) is None


# ------------------------------------------------------------------ the statements


async def test_the_table_refuses_every_transition_that_the_model_does_not_have(world: World) -> None:
    """Each statement that moves a job names the state it leaves, and the table has no row in a state of its own."""
    queued, running = re.compile(r"status = 'queued'"), re.compile(r"status = 'running'.* and job.owner = ")
    claim, steps = (functions(name) for name in ("30_claim", "40_steps"))
    assert all(queued.search(statement) for statement in (claim, statements.EXPIRE))
    moves = steps.split("update content.job")[1:]
    assert len(moves) == 4
    assert all(running.search(move) for move in moves)
    assert "status in ('queued', 'running')" in statements.CANCEL
    assert {state for state, _ in TRANSITIONS} == {Status.QUEUED, Status.RUNNING}
    job_id = await world.one()
    with pytest.raises(asyncpg.CheckViolationError):
        await world.pool.execute("update content.job set status = 'succeeded' where job_id = $1", job_id)


async def fill(world: World, count: int) -> None:
    await world.pool.execute(
        """
        insert into content.job (job_id, key_id, submission_id, line, custom_id, session_id, klass, body, options,
            status, created_at, not_before, deadline_at, attempts_allowed, owner, claimed_at, ended_at, expires_at,
            error_code, model)
        select ('01900000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, $1,
            '01900000-0000-7000-8000-000000000000', n, 'c' || n, 's' || n % 100, n % 2, '{}', '{"debit_id":"d"}',
            case when n % 10 = 0 then 'queued' when n % 1000 = 1 then 'running' else 'failed' end,
            t, t, t + interval '1 day', 3, gen_random_uuid(), t,
            case when n % 10 <> 0 and n % 1000 <> 1 then t end,
            case when n % 10 <> 0 and n % 1000 <> 1 then t + interval '1 day' end,
            case when n % 10 <> 0 and n % 1000 <> 1 then 'x' end, 'm' || n % 3
        from generate_series(1, $2::int) as n, (select clock_timestamp() as t) as clock
        """,
        world.key_id,
        count,
    )
    await world.pool.execute("analyze content.job")


async def test_the_hot_statements_read_no_more_rows_than_they_need(world: World) -> None:
    await fill(world, 20_000)
    some = [uuid.UUID(int=0x01900000_0000_7000_8000_000000000000 + n) for n in range(1001, 1017)]
    low, high = uuid.UUID(int=0), uuid.UUID(int=(1 << 128) - 1)
    page = (world.key_id, low, high)
    known = tuple(await world.pool.fetchrow(statements.TIME, None, None) or ())
    cases: list[tuple[str, tuple[Any, ...]]] = [
        (statements.CANCEL_REQUESTS, (new_id(),)),
        (statements.ENDED, (some,)),
        (statements.EXPIRE, (16, 1.0, *known)),
        (statements.PURGE, (16, *known)),
        (statements.OWNERS, (new_id(),)),
        (statements.HELD, (new_id(), [], 16)),
        (statements.LIST, (*page, None, None, None, 16)),
        (statements.LIST, (*page, "queued", None, None, 16)),
        (statements.LIST, (*page, None, "s7", None, 16)),
        (statements.LIST, (*page, None, None, "c77", 16)),
        (statements.RESULTS, (*page, None, None, None, 16, 1000)),
        (statements.RESULTS, (*page, "failed", None, None, 16, 1000)),
    ]
    async with world.pool.acquire() as connection:
        for statement, arguments in cases:
            transaction = connection.transaction()
            await transaction.start()
            plan = json.loads(await connection.fetchval(f"explain (analyze, format json) {statement}", *arguments))
            await transaction.rollback()
            assert rows_read(plan[0]["Plan"]) <= 250, (statement, json.dumps(plan, indent=1))


async def test_claims_and_steps_read_no_more_rows_than_they_need_however_full_the_table_was_when_they_were_planned(
    world: World, url: str
) -> None:
    some = [uuid.UUID(int=0x01900000_0000_7000_8000_000000000000 + n) for n in range(1001, 1017)]
    known = await world.pool.fetchrow(statements.TIME, None, None)
    assert known is not None
    owner = new_id()
    ones = [1] * 16
    calls: list[tuple[str, tuple[Any, ...]]] = [
        (statements.GET, (some, [world.key_id] * 16)),
        (statements.CLAIM, (owner, 16, [], [], *known)),
        (statements.CLAIM, (owner, 16, ["m1"], [new_id()], *known)),
        (statements.STEPS, (
            owner, 1.0, *known, some, ones, ones, some, ones, ones, ["{}"] * 16, [200] * 16,
            some, ones, ["failed"] * 16, ["x"] * 16, *([[None] * 16] * 3), ones, *([[None] * 16] * 2),
            some, ones, [0.0] * 16, ones, ones, *([[None] * 16] * 2), ones, ["[]"] * 16,
        )),
    ]  # fmt: skip
    async with open_connection(url, name="plans") as connection:
        for full in (False, True):
            if full:
                await fill(world, 20_000)
            for statement, arguments in calls:
                plans = (await seen(connection, partial(connection.fetch, statement, *arguments))).plans
                of_jobs = [node for plan in plans for node in plan.nodes() if node.get("Relation Name") == "job"]
                assert of_jobs
                for plan in plans:
                    assert rows_read(plan.root) <= 250, plan
                assert not [node for node in of_jobs if node["Node Type"] == "Seq Scan"], statement


def functions(name: str) -> str:
    return importlib.resources.files("gateway.jobs").joinpath(f"sql/functions/{name}.sql").read_text()


def rows_read(node: dict[str, Any]) -> float:
    """Rows that the plan took from the table, those it threw away included."""
    here = 0.0
    if node.get("Relation Name") == "job" and node["Node Type"] != "ModifyTable":
        thrown = node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
        here = (node["Actual Rows"] + thrown) * node["Actual Loops"]
    return here + sum(rows_read(child) for child in node.get("Plans", []))


async def test_pages_follow_each_other_without_gap_or_repeat(world: World) -> None:
    first = await world.submit(*(line(f"a{n}") for n in range(25)))
    second = await world.submit(*(line(f"b{n}") for n in range(5)))
    expected = [entry.id for entry in (*first.jobs, *second.jobs)]
    found: list[uuid.UUID] = []
    while page := await world.store.page(world.key_id, Filter(), after=found[-1] if found else None, limit=7):
        found.extend(job.job_id for job in page)
    assert found == sorted(expected)
    only = await world.store.page(world.key_id, Filter(submission_id=second.submission_id), after=None, limit=1000)
    assert [job.custom_id for job in only] == [f"b{n}" for n in range(5)]


async def test_results_are_read_by_the_page_however_large_an_answer_is(world: World) -> None:
    submitted = await world.submit(*(line(f"a{n}") for n in range(12)))
    large = statements.PAGE_BYTES // 3
    await world.pool.execute(
        """
        update content.job
        set status = 'succeeded', result = repeat('x', case line when 7 then 9 else 1 end * $1::int),
            ended_at = now(), expires_at = now()
        """,
        large,
    )
    found: list[uuid.UUID] = []
    while page := await world.store.results(world.key_id, Filter(), after=found[-1] if found else None):
        assert len(page) == 1 or sum(len(result.result or "") for result in page[:-1]) < statements.PAGE_BYTES
        found.extend(result.job_id for result in page)
    assert found == [entry.id for entry in submitted.jobs]
