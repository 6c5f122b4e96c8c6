"""Routing over the real line: what is dropped and told, why others were not tried, and what is learned of speed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adapters.chat import ChatRequest, Message, Role, Text
from adapters.protocols import PROTOCOLS
from gateway.call import Call, Order, Unsupported
from gateway.errors import AdmissionRefused, AllRoutesFailed, InvalidRequest
from gateway.outcome import LeftOut
from tests.fakes.simulated import SimulatedProvider, simulated
from tests.fakes.whole_line import WholeLine, call, read, whole_line


@asynccontextmanager
async def two(
    database_url: str, tmp_path: Path, models: str, *, first: str = "", second: str = ""
) -> AsyncIterator[tuple[WholeLine, SimulatedProvider, SimulatedProvider]]:
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(simulated())
        other = await stack.enter_async_context(simulated())
        text = "".join(
            f'[providers.{name}]\nprotocol = "chat_completions"\nbase_url = "{at.url}"\n{more}\n'
            for name, at, more in (("first", one, first), ("second", other, second))
        )
        line = await stack.enter_async_context(whole_line(database_url, tmp_path, text + models))
        yield line, one, other


def asking(model: str, **fields: Any) -> Call:
    """A request that came in no wire protocol, as over gRPC."""
    options = {
        name: fields.pop(name) for name in ("unsupported", "order", "explain", "role", "debit_id") if name in fields
    }
    chat = ChatRequest(
        messages=(Message(role=Role.USER, content=(Text(text="hi"),)),), **{"max_output_tokens": 50, **fields}
    )
    return msgspec.structs.replace(call(model, **options), chat=chat)


BY_MESSAGES = '[models.m]\nproviders = [{ provider = "first", model = "sim-fast", protocol = "anthropic_messages" }]\n'


@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "plain"])
async def test_a_parameter_without_a_word_is_refused_by_its_path_or_dropped_and_told(
    database_url: str, tmp_path: Path, streamed: bool
) -> None:
    async with two(database_url, tmp_path, BY_MESSAGES) as (line, first, _):
        asked = asking("m", seed=7, frequency_penalty=0.5)
        with pytest.raises(InvalidRequest) as refused:
            await line.pipeline.complete(asked)
        assert refused.value.param in {"seed", "frequency_penalty"}
        assert await first.dispatches() == []

        dropping = asking("m", seed=7, frequency_penalty=0.5, unsupported=Unsupported.DROP)
        if streamed:
            async with line.pipeline.stream(dropping) as items:
                _, end = await read(items)
            assert end is not None
            outcome = end.outcome
        else:
            outcome = (await line.pipeline.complete(dropping)).outcome
        assert sorted(outcome.warnings) == [
            "frequency_penalty: dropped, first was not sent it",
            "seed: dropped, first was not sent it",
        ]
        assert len(outcome.attempts) == 1
        [sent] = await first.dispatches()
        assert {"seed", "frequency_penalty"}.isdisjoint(sent["fields"])
        await line.audit()


@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "plain"])
async def test_what_a_profile_omits_is_told_where_it_was_asked_for(
    database_url: str, tmp_path: Path, streamed: bool
) -> None:
    models = '[models.m]\nproviders = [{ provider = "first", model = "sim-fast" }]\n'
    async with two(database_url, tmp_path, models, first='omit = ["seed", "verbosity"]') as (line, first, _):
        asked = asking("m", seed=7)
        if streamed:
            async with line.pipeline.stream(asked) as items:
                _, end = await read(items)
            assert end is not None
            outcome = end.outcome
        else:
            outcome = (await line.pipeline.complete(asked)).outcome
        assert outcome.warnings == ("seed: dropped, first was not sent it",)
        [sent] = await first.dispatches()
        assert "seed" not in sent["fields"]


async def test_what_is_refused_or_dropped_of_a_job_is_named_within_its_body(database_url: str, tmp_path: Path) -> None:
    """The caller's own words, and where they stood: an Anthropic's body, asked of a provider that speaks Responses."""
    models = '[models.m]\nproviders = [{ provider = "first", model = "sim-fast", protocol = "responses" }]\n'
    body = b'{"model":"m","max_tokens":50,"messages":[{"role":"user","content":"hi"}],"system":"x","top_k":3%b}'
    async with two(database_url, tmp_path, models) as (line, first, _):

        def job(more: bytes, **options: Any) -> Call:
            chat = PROTOCOLS["anthropic_messages"].parse_request(body % more)
            return msgspec.structs.replace(call("m", **options), chat=chat, transport="job")

        with pytest.raises(InvalidRequest) as refused:
            await line.pipeline.complete(job(b""))
        assert refused.value.param == "body.top_k"
        with pytest.raises(InvalidRequest) as refused:
            await line.pipeline.complete(job(b',"stop_sequences":["a"]', unsupported=Unsupported.DROP))
        assert refused.value.param == "body.stop_sequences"
        assert await first.dispatches() == []
        completion = await line.pipeline.complete(job(b"", unsupported=Unsupported.DROP))
        assert completion.outcome.warnings == ("body.top_k: dropped, first was not sent it",)


async def test_what_no_route_can_do_is_named_as_the_caller_wrote_it(database_url: str, tmp_path: Path) -> None:
    models = '[models.m]\nproviders = [{ provider = "first", model = "sim-fast" }]\n'
    async with two(database_url, tmp_path, models, first='cannot = ["reasoning"]') as (line, _, _):
        chat = PROTOCOLS["anthropic_messages"].parse_request(
            b'{"model":"m","max_tokens":4000,"messages":[{"role":"user","content":"hi"}],'
            b'"thinking":{"type":"enabled","budget_tokens":2000}}'
        )
        with pytest.raises(InvalidRequest) as refused:
            await line.pipeline.complete(msgspec.structs.replace(call("m"), chat=chat))
        assert refused.value.param == "thinking.budget_tokens"


async def test_a_fallback_that_cannot_be_told_all_says_which_field_that_is(database_url: str, tmp_path: Path) -> None:
    models = """
    [models.m]
    providers = [{ provider = "first", model = "sim-fast" }]
    fallback = [{ provider = "second", model = "sim-fast", protocol = "responses" }]
    """
    async with two(database_url, tmp_path, models) as (line, first, second):
        await first.set_faults(status=404)
        with pytest.raises(AllRoutesFailed) as failed:
            await line.pipeline.complete(asking("m", seed=7))
        assert "; not tried: second/sim-fast: unsupported_field (seed: " in str(failed.value)
        assert failed.value.outcome is not None
        assert {attempt.route.provider for attempt in failed.value.outcome.attempts} == {"first"}
        assert await second.dispatches() == []


async def test_what_must_not_be_dropped_is_refused_all_the_same(database_url: str, tmp_path: Path) -> None:
    async with two(database_url, tmp_path, BY_MESSAGES) as (line, first, _):
        with pytest.raises(InvalidRequest) as refused:
            await line.pipeline.complete(asking("m", n=2, unsupported=Unsupported.DROP))
        assert refused.value.param == "n"
        assert await first.dispatches() == []


async def test_what_a_route_is_known_not_to_do_is_dropped_before_it_is_sent(database_url: str, tmp_path: Path) -> None:
    models = '[models.m]\nproviders = [{ provider = "first", model = "sim-fast" }]\n'
    async with two(database_url, tmp_path, models, first='cannot = ["logprobs"]\nunsupported = "drop"') as made:
        line, first, _ = made
        native = PROTOCOLS["chat_completions"].parse_request(
            b'{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"x"}],"logprobs":true,"seed":1}'
        )
        completion = await line.pipeline.complete(msgspec.structs.replace(call("m"), chat=native))
        assert completion.outcome.warnings == ("logprobs: dropped, first was not sent it",)
        [sent] = await first.dispatches()
        assert "seed" in sent["fields"]
        assert "logprobs" not in sent["fields"]


async def test_who_asks_is_told_why_others_were_not_tried_and_the_row_knows_it_anyhow(
    database_url: str, tmp_path: Path
) -> None:
    models = """
    [models.m]
    providers = [{ provider = "first", model = "sim-fast" }, { provider = "second", model = "sim-small" }]
    """
    async with two(database_url, tmp_path, models, first='cannot = ["n"]') as (line, _, _second):
        told = (await line.pipeline.complete(asking("m", n=2, explain=True))).outcome
        assert told.left_out == (LeftOut(provider="first", model="sim-fast", reason="capability: n"),)
        assert told.route is not None
        assert told.route.provider == "second"
        # Where nothing is left of them, the error has them.
        with pytest.raises(AdmissionRefused) as refused:
            await line.pipeline.complete(asking("m", n=2, explain=True, debit_id=told.debit_id))
        assert refused.value.left_out[:1] == told.left_out
        quiet = (await line.pipeline.complete(asking("m", n=2))).outcome
        assert quiet.left_out == ()
        rows = [msgspec.json.decode(row["left_out"]) for row in await line.invocations()]
        assert rows == [[{"provider": "first", "model": "sim-fast", "reason": "capability: n"}]] * 2


async def test_a_credential_that_is_rejected_takes_its_provider_out_and_the_next_route_says_so(
    database_url: str, tmp_path: Path
) -> None:
    models = """
    [models.m]
    providers = [{ provider = "first", model = "sim-fast" }, { provider = "second", model = "sim-small" }]
    """
    async with two(database_url, tmp_path, models) as (line, first, second):
        await first.set_faults(status=401)
        once = (await line.pipeline.complete(asking("m", explain=True))).outcome
        assert [attempt.route.provider for attempt in once.attempts] == ["first", "second"]
        assert once.left_out == ()
        again = (await line.pipeline.complete(asking("m", explain=True))).outcome
        assert [attempt.route.provider for attempt in again.attempts] == ["second"]
        assert again.left_out == (LeftOut(provider="first", model="sim-fast", reason="provider_unavailable"),)
        assert [len(await provider.dispatches()) for provider in (first, second)] == [1, 2]
        kept = [row["left_out"] for row in await line.invocations()]
        assert [None if row is None else msgspec.json.decode(row) for row in kept] == [
            None,
            None,
            [{"provider": "first", "model": "sim-fast", "reason": "provider_unavailable"}],
        ]


async def test_the_line_learns_which_route_is_quick(database_url: str, tmp_path: Path) -> None:
    models = """
    [models.m]
    order = "latency"
    providers = [{ provider = "first", model = "sim-fast" }, { provider = "second", model = "sim-fast" }]
    """
    async with two(database_url, tmp_path, models, first="first_byte_s = 5", second="first_byte_s = 5") as made:
        line, first, second = made
        await first.set_faults(latency=0.3)
        # Each once, as nobody had tried them, and the quicker one from then on.
        for _ in range(4):
            async with line.pipeline.stream(asking("m")) as items:
                await read(items)
        assert [len(await provider.dispatches()) for provider in (first, second)] == [1, 3]
        # One that fails is not quick, however soon it fails.
        await second.set_faults(status=500)
        async with line.pipeline.stream(asking("m")) as items:
            _, end = await read(items)
        assert end is not None
        assert [attempt.route.provider for attempt in end.outcome.attempts] == ["second", "first"]
        async with line.pipeline.stream(asking("m")) as items:
            _, end = await read(items)
        assert end is not None
        assert [attempt.route.provider for attempt in end.outcome.attempts] == ["first"]
        # A caller may wish for another order.
        async with line.pipeline.stream(asking("m", order=Order.PRIORITY)) as items:
            _, end = await read(items)
        assert end is not None
        assert end.outcome.route is not None
        assert end.outcome.route.provider == "first"


async def test_a_role_is_served_and_its_price_is_that_of_the_model_it_chose(database_url: str, tmp_path: Path) -> None:
    models = """
    [roles.planner]
    [models.m]
    price = {{ input = "1", output = "1" }}
    providers = [{{ provider = "first", model = "sim-fast", qualified_for = {{ planner = "{}" }} }}]
    """
    async with two(database_url, tmp_path, models.format("0" * 16)) as (line, first, _):
        plain = await line.pipeline.complete(asking("m"))
        assert plain.outcome.route is not None
    url = first.url
    text = f'[providers.first]\nprotocol = "chat_completions"\nbase_url = "{url}"\n'
    async with simulated() as again:
        # Another port is another route: the id is taken from where it runs now.
        text = text.replace(url, again.url)
        async with whole_line(database_url, tmp_path, text + models.format("0" * 16)) as line:
            outcome = (await line.pipeline.complete(asking("m"))).outcome
            assert outcome.route is not None
            current = outcome.route.route_id
        async with whole_line(database_url, tmp_path, text + models.format(current)) as line:
            served = (await line.pipeline.complete(asking("", role="planner"))).outcome
            assert served.route == outcome.route
            assert served.cost.state == "charged"
            assert served.cost.usd is not None
            assert served.cost.usd > Decimal(0)
            row = (await line.invocations())[-1]
            assert (row["requested_model"], row["role"]) == ("m", "planner")
