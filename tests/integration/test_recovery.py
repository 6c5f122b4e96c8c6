"""What is done for a process that died, over a real database: the cost of an answer it had stored."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from decimal import Decimal

from adapters.chat import ChatResponse, Choice, StopReason
from admission.ids import new_id
from admission.lease import Class, Demand, Lease
from admission.store import Store
from gateway import config, database
from gateway.attempt import Asking, intent
from gateway.billing import Billing
from gateway.call import Options
from gateway.liveness import Liveness
from gateway.recovery import Recovery
from gateway.router import Plan
from metering.ledger import Ledger
from metering.library_prices import Library
from metering.prices import PriceBook
from metering.usage import Usage
from tests.fakes.whole_line import KEY, call, whole_line

TOML = """
[providers.p]
protocol = "chat_completions"
base_url = "http://127.0.0.1:9/v1"
[models.m]
providers = ["p"]
price = { input = "2.50", output = "10.00" }
"""

ANSWER = ChatResponse(
    choices=(Choice(index=0, text="yes", stop_reason=StopReason.STOP, native_stop_reason="stop"),),
    usage=Usage(input_total=1000, output_total=200),
)


async def test_an_answer_that_was_stored_is_charged_after_its_process_died(database_url, tmp_path):
    debit = new_id().hex
    async with (
        whole_line(database_url, tmp_path, TOML) as dead,
        whole_line(database_url, tmp_path, TOML) as alive,
        database.open_pool(database_url, name="test", size=2) as pool,
    ):
        settings = config.load(tmp_path / "tollbridge.toml", {})
        billing = Billing(
            PriceBook(models=settings.prices_by_model, routes=settings.prices_by_route, published=Library)
        )
        asked = call("m", debit_id=debit, session_id="s")
        plan: Plan = dead.pipeline._router.plan(asked)
        lease = await dead.controller.admit(
            Demand(
                ticket_id=new_id(),
                group="http://127.0.0.1:9",
                endpoint="http://127.0.0.1:9#p",
                model="m",
                klass=Class.BATCH,
                key_id=KEY,
                debit_id=debit,
                attempt=1,
                execution_limit_s=60,
                isolation_s=30,
                queue_timeout_s=5,
                intent=intent(
                    Asking(asked, plan.routes[0], billing),
                    left_out=plan.left_out,
                    created_at=datetime.now(UTC).isoformat(),
                    reports=(),
                ),
            )
        )
        assert isinstance(lease, Lease)
        store = Store(database_url, settings.admission)
        recovery = Recovery(
            liveness=Liveness(tmp_path),
            controller=alive.controller,
            store=store,
            ledger=Ledger(pool, zone="UTC"),
            billing=billing,
            providers=dict(settings.providers),
        )
        assert await recovery.dead([dead.controller.process, alive.controller.process]) == set()
        await alive.controller.bury([dead.controller.owner, dead.controller.process])
        assert await recovery.dead([dead.controller.process, alive.controller.process]) == {dead.controller.process}

        unknown = await recovery.outcome_of(key_id=KEY, debit_id=debit)
        assert unknown is not None
        assert (unknown.ended, unknown.cost.state, unknown.cost.usd) == ("uncertain", "unknown", None)
        assert unknown.cost.upper_bound_usd is not None

        for _ in range(2):  # once more changes nothing
            outcome = await recovery.settle_stored(
                key_id=KEY, options=Options(debit_id=debit), attempt=1, response=ANSWER
            )
            assert outcome is not None
            assert (outcome.ended, outcome.cost.state, outcome.cost.usd) == ("complete", "charged", Decimal("0.0045"))
        assert await alive.slots() == []
        rows = await alive.invocations()
        assert [(row["state"], row["correction"]) for row in rows] == [("unknown", 0), ("charged", 1)]
        await alive.audit()
        assert (
            await recovery.settle_stored(
                key_id=uuid.uuid4(), options=Options(debit_id=debit), attempt=1, response=ANSWER
            )
            is None
        )
        await store.close()
