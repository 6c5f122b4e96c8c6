"""The tier that served is what is charged and recorded, over a real database and a simulated provider."""

from __future__ import annotations

from decimal import Decimal

import msgspec
import pytest

from gateway.call import Call
from gateway.errors import NoRoute
from tests.fakes.simulated import simulated
from tests.fakes.whole_line import call, read, whole_line

#: Input and output cost the same, so that a request's tokens need only be added up.
TOML = """
[providers.p]
protocol = "{protocol}"
base_url = "{url}"
[models.told]
providers = [{{ provider = "p", model = "sim-fast?service_tier=flex" }}]
[models.told.price]
input = "4"
output = "4"
service_tiers = {{ flex = {{ factor = "0.5" }}, priority = {{ input = "8", output = "8" }} }}
[models.unpriced]
providers = [{{ provider = "p", model = "sim-fast?service_tier=scale" }}]
price = {{ input = "4", output = "4" }}
[models.standard]
providers = ["p"]
price = {{ input = "4", output = "4" }}
"""


def asked(model: str, tier: str | None = None) -> Call:
    plain = call(model)
    return msgspec.structs.replace(plain, chat=msgspec.structs.replace(plain.chat, service_tier=tier))


@pytest.mark.parametrize("protocol", ["chat_completions", "responses"])
async def test_the_tier_that_served_is_charged_and_recorded(database_url, tmp_path, protocol):
    async with (
        simulated() as provider,
        whole_line(database_url, tmp_path, TOML.format(protocol=protocol, url=provider.url)) as line,
    ):
        plain = (await line.pipeline.complete(asked("told", "priority"))).outcome
        async with line.pipeline.stream(asked("told")) as items:
            _, ended = await read(items)
        assert ended is not None
        for outcome in (plain, ended.outcome):
            tokens = (outcome.usage.input_total or 0) + (outcome.usage.output_total or 0)
            assert tokens > 0
            assert (outcome.cost.usd, outcome.service_tier) == (Decimal(2) * tokens / 10**6, "flex")

        unpriced = (await line.pipeline.complete(asked("unpriced"))).outcome
        assert (unpriced.cost.state, unpriced.cost.reason) == ("unknown", "unpriced_service_tier")
        assert (unpriced.cost.usd, unpriced.cost.upper_bound_usd) == (None, None)

        # A tier that was asked for and is not told by its name in the answer is the one that the answer names.
        standard = (await line.pipeline.complete(asked("standard", "flex"))).outcome
        assert (standard.cost.state, standard.service_tier) == ("charged", "default")

        rows = await line.invocations()
        assert [row["service_tier"] for row in rows] == ["flex", "flex", "scale", "default"]
        await line.audit()


async def test_a_budget_refuses_a_tier_that_has_no_price(database_url, tmp_path):
    toml = TOML.format(protocol="chat_completions", url="http://127.0.0.1:9")
    async with whole_line(database_url, tmp_path, toml) as line:
        limited = asked("standard", "flex")
        caller = msgspec.structs.replace(limited.caller, budgeted=True)
        with pytest.raises(NoRoute, match="no price is known of the service tier flex"):
            await line.pipeline.complete(msgspec.structs.replace(limited, caller=caller))
