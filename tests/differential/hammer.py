"""
One process of several that hammer one store: demands, endings of every kind, cancelled callers, leases that nobody
settles, and a heartbeat so short that a pause makes it lapse.

    python -m tests.differential.hammer <database URL> <seed> <seconds>
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections import Counter
from typing import Final

import msgspec
import structlog

from admission.controller import Controller
from admission.ids import new_id
from admission.lease import Class, Demand, Ending, Fence, Lease, Settlement, Verdict
from admission.settings import AdmissionSettings, GroupSettings, ModelLimits
from admission.store import Store
from tests.differential.schedule import CREDENTIALS, KEYS, MODELS

LIMITS: Final = {"a": (4, 1), "b": (2, 0)}
#: How many of a model may run at once.
MODEL_LIMITS: Final = {("a", "m1"): 1, ("a", "m2"): 2}
CLIENTS: Final = 12

SETTINGS: Final = AdmissionSettings(
    groups={
        "a": GroupSettings(
            concurrency=4,
            quarantine_headroom=1,
            queue=20,
            failure_threshold=4,
            failure_window_s=0.5,
            first_cooldown_s=0.1,
            longest_cooldown_s=0.4,
            models={"m1": ModelLimits(concurrency=1), "m2": ModelLimits(concurrency=2, requests_per_minute=900)},
        ),
        "b": GroupSettings(
            concurrency=2,
            queue=8,
            failure_threshold=3,
            failure_window_s=0.5,
            first_cooldown_s=0.1,
            longest_cooldown_s=0.3,
        ),
    },
    lease_s=1.2,
    margin_s=0.2,
    unconfirmed_grant_s=0.2,
    rescan_s=0.1,
    unavailable_s=0.1,
    longest_hold_s=2.0,
    connections=2,
)

#: How often each is said.
_VERDICTS: Final = {
    Verdict.ANSWERED: 12.0,
    Verdict.TRANSIENT: 3.0,
    Verdict.RATE_LIMITED: 1.0,
    Verdict.SLOW: 1.0,
    Verdict.CREDENTIAL_REJECTED: 0.2,
    Verdict.QUOTA_EXHAUSTED: 0.1,
    Verdict.NONE: 3.0,
}
_RECORDS: Final = {
    "charged": b'{"usd":"0.25","status":"success","input_total":3}',
    "zero": b'{"status":"error"}',
    "unknown": b'{"status":"unknown"}',
}


def demand(rng: random.Random, debit: str, attempt: int, place: int | None) -> Demand:
    group = rng.choice(("a", "a", "b"))
    return Demand(
        ticket_id=new_id(),
        group=group,
        model=rng.choice(MODELS),
        credential=rng.choice(CREDENTIALS),
        klass=rng.choice((Class.INTERACTIVE, Class.INTERACTIVE, Class.BATCH)),
        key_id=KEYS[0],
        debit_id=debit,
        attempt=attempt,
        place=place,
        tokens=10,
        fence=Fence(scope_id="s", run_id=str(rng.randrange(40)), number=rng.randrange(3))
        if rng.random() < 0.05
        else None,
        execution_limit_s=rng.choice((0.2, 0.5, 1.0)),
        isolation_s=rng.choice((0.0, 0.1, 0.3)),
        queue_timeout_s=rng.choice((0.05, 0.3, 1.0)),
        waits_for_cooldown=rng.random() < 0.6,
        intent=b'{"session_id":"s"}',
    )


def settlement(rng: random.Random, lease: Lease) -> Settlement:
    ending = rng.choices(list(Ending), (8, 1, 2))[0]
    verdict = rng.choices(list(_VERDICTS), list(_VERDICTS.values()))[0]
    state = {Ending.CONFIRMED: "charged", Ending.NOT_DISPATCHED: "zero", Ending.UNCERTAIN: "unknown"}[ending]
    return Settlement(
        lease=lease,
        ending=ending,
        verdict=Verdict.NONE if ending is Ending.NOT_DISPATCHED else verdict,
        retry_after_s=0.1 if rng.random() < 0.5 else None,
        cancel_confirms_after_s=0.1 if rng.random() < 0.5 else None,
        used_tokens=rng.choice((None, 5)),
        state=state,
        record=_RECORDS[state],
    )


async def client(controller: Controller, rng: random.Random, until: float, came_to: Counter[str]) -> None:
    loop = asyncio.get_running_loop()
    debit, attempt, place = new_id().hex, 1, None
    while loop.time() < until:
        asked = demand(rng, debit, attempt, place)
        patience = 0.03 if rng.random() < 0.1 else 10.0
        try:
            async with asyncio.timeout(patience):
                answer = await controller.admit(asked)
        except TimeoutError:
            came_to["cancelled"] += 1
            debit, attempt, place = new_id().hex, 1, None
            continue
        if not isinstance(answer, Lease):
            came_to[answer.reason] += 1
            await asyncio.sleep(rng.choice((0.0, 0.02)))
            debit, attempt, place = new_id().hex, 1, None
            continue
        came_to["granted"] += 1
        if not controller.valid(answer):
            came_to["not valid"] += 1
        await asyncio.sleep(rng.choice((0.0, 0.0, 0.01, 0.05)))
        if rng.random() < 0.5:
            controller.content_seen(answer)
        if rng.random() < 0.03:
            came_to["forgotten"] += 1
            debit, attempt, place = new_id().hex, 1, None
            continue
        given = settlement(rng, answer)
        settled = controller.settle(given)
        if rng.random() < 0.1:
            controller.settle_unheard(given)
        came_to["settled"] += (await settled).applied
        if given.state == "unknown" and rng.random() < 0.5:
            corrected = msgspec.structs.replace(
                given, ending=Ending.CONFIRMED, verdict=Verdict.NONE, state="charged", record=_RECORDS["charged"]
            )
            came_to["corrected"] += (await controller.settle(corrected)).applied
        if rng.random() < 0.4:
            attempt, place = attempt + 1, answer.number
        else:
            debit, attempt, place = new_id().hex, 1, None


async def main(url: str, seed: int, seconds: float) -> Counter[str]:
    came_to: Counter[str] = Counter()
    store = Store(url, SETTINGS)
    try:
        await store.configure()
        async with Controller(store, SETTINGS).opened() as controller:
            until = asyncio.get_running_loop().time() + seconds
            async with asyncio.TaskGroup() as group:
                for number in range(CLIENTS):
                    group.create_task(client(controller, random.Random(seed * 100 + number), until, came_to))
    finally:
        with contextlib.suppress(TimeoutError):
            await store.close()
    return came_to


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    found = asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
