"""The real line over a real database, without the servers in front of it: as one process of a gateway has it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg

from adapters.chat import ChatResponse, Delta, Message, Role, Text
from adapters.client import Upstream
from adapters.contract import EmbeddingResponse
from adapters.protocols import PROTOCOLS
from admission.controller import Controller
from admission.ids import new_id
from admission.lease import Waiting
from admission.store import Store
from gateway import config
from gateway.answer import Ended
from gateway.billing import Billing
from gateway.call import Call, Caller, Options, Scope
from gateway.outcome import AttemptReport, RouteReport
from gateway.pipeline import Pipeline
from gateway.router import Router
from gateway.standing import Standing
from metering.library_prices import Library
from metering.prices import PriceBook

KEY = uuid.UUID(int=7)
#: The attempts that have no end yet.
OPEN = (
    "select from control.ticket t where t.state in ('active', 'quarantined')"
    " and not exists (select from control.attempt a where a.ticket_id = t.ticket_id)"
)
#: By what the ledger says of an attempt last: what there should be, with what there is.
_COUNTERS_THAT_DIFFER = """
with last as (
    select distinct on (i.granted_at, i.ticket_id) i.*, i.key_id || '/' || i.day as key_day,
           array[coalesce(i.provider, ''), coalesce(i.requested_model, ''), coalesce(i.upstream_model, '')] as route
      from control.invocation i order by i.granted_at, i.ticket_id, i.correction desc
), due as (
    select n.kind, n.name, sum(coalesce(l.usd, 0)) as charged_usd, count(*) as attempts,
           count(*) filter (where l.state = 'unknown') as unknown_attempts,
           sum(coalesce(l.upper_bound_usd, 0)) as unknown_upper_bound_usd,
           count(*) filter (where l.state = 'unknown' and l.upper_bound_usd is null) as unbounded_attempts,
           sum(coalesce(l.input_total, 0)) as input_tokens, sum(coalesce(l.output_total, 0)) as output_tokens
      from last l
     cross join lateral (
        values ('total', ''), ('day', l.day::text), ('key', l.key_id::text), ('key_day', l.key_day),
               ('session', l.key_id || '/' || l.session_id), ('route_day', l.key_day || l.route::text),
               ('run_day', case when l.run_id is not null then l.key_day || array[l.run_id]::text end),
               ('step_day', case when l.step_id is not null
                                 then l.key_day || array[coalesce(l.run_id, ''), l.step_id]::text end)
        union all
        select 'tag_day', l.key_day || array[t.key, t.value]::text from jsonb_each_text(l.tags) t) as n (kind, name)
     where n.name is not null
     group by n.kind, n.name
), there as (
    select c.kind, c.name, sum(c.charged_usd) as charged_usd, sum(c.attempts) as attempts,
           sum(c.unknown_attempts) as unknown_attempts, sum(c.unknown_upper_bound_usd) as unknown_upper_bound_usd,
           sum(c.unbounded_attempts) as unbounded_attempts, sum(c.input_tokens) as input_tokens,
           sum(c.output_tokens) as output_tokens
      from control.counter c group by c.kind, c.name
)
select coalesce(d.kind, t.kind) as kind, coalesce(d.name, t.name) as name, d as due, t as there
  from due d full join there t on t.kind = d.kind and t.name = d.name
 where d.kind is null or t.kind is null
    or (d.charged_usd, d.attempts, d.unknown_attempts, d.unknown_upper_bound_usd, d.unbounded_attempts, d.input_tokens,
        d.output_tokens)
       <> (t.charged_usd, t.attempts, t.unknown_attempts, t.unknown_upper_bound_usd, t.unbounded_attempts,
           t.input_tokens, t.output_tokens)
"""
CALLER = Caller(key_id=KEY, name="test", scopes=frozenset(Scope))


class Heard:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.waits: list[Waiting] = []
        self.starts: list[tuple[str, int]] = []
        self.stored: list[int] = []
        self.has_started = asyncio.Event()
        self.failures: list[AttemptReport] = []

    def queued(self, waiting: Waiting) -> None:
        self.waits.append(waiting)

    def started(self, route: RouteReport, attempt: int) -> None:
        self.starts.append((route.provider, attempt))
        self.has_started.set()

    def failed(self, report: AttemptReport) -> None:
        self.failures.append(report)

    async def dispatching(self, attempt: int) -> None: ...

    async def completed(self, response: ChatResponse | EmbeddingResponse, attempt: int) -> None:
        self.stored.append(attempt)


class WholeLine:
    settings: config.Settings
    pipeline: Pipeline
    controller: Controller
    standing: Standing

    def __init__(self, url: str) -> None:
        self.revoked = False
        self._url = url

    async def rows(self, statement: str, *arguments: Any) -> list[asyncpg.Record]:
        connection = await asyncpg.connect(self._url)
        try:
            return await connection.fetch(statement, *arguments)
        finally:
            await connection.close()

    async def invocations(self) -> list[asyncpg.Record]:
        return await self.rows("select * from control.invocation order by granted_at, attempt, correction")

    async def slots(self) -> list[str]:
        return [row["state"] for row in await self.rows("select state from control.ticket order by number")]

    async def settled(self) -> None:
        """Until no attempt is open."""
        async with asyncio.timeout(30):
            while await self.rows(OPEN):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def audit(self) -> None:
        """The counters, each by itself, are the sum of what was settled, to the last digit."""
        assert await self.rows(_COUNTERS_THAT_DIFFER) == []


@asynccontextmanager
async def whole_line(url: str, tmp_path: Path, toml: str) -> AsyncIterator[WholeLine]:
    file = tmp_path / "tollbridge.toml"
    file.write_text(toml)
    settings = config.load(file, {})
    store = Store(url, settings.admission)
    prices = PriceBook(
        models=settings.prices_by_model, routes=settings.prices_by_route, published=Library, free=settings.free
    )
    billing = Billing(prices)
    try:
        await store.configure()
        async with Controller(store, settings.admission).opened() as controller, Upstream() as adapter:
            line = WholeLine(url)
            line.settings = settings
            line.controller = controller
            line.standing = Standing(settings.admission)
            line.pipeline = Pipeline(
                router=Router(settings.providers, settings.models, billing, settings.routing, settings.roles),
                controller=controller,
                adapter=adapter,
                billing=billing,
                usable=lambda _: not line.revoked,
                settings=settings.routing,
                standing=line.standing,
            )
            try:
                yield line
            finally:
                await line.pipeline.drain(asyncio.get_running_loop().time())
    finally:
        await store.close()


def call(model: str, *, transport: str = "rest", deadline_s: float | None = None, **options: Any) -> Call:
    return Call(
        request_id=new_id().hex,
        caller=CALLER,
        model=model,
        chat=PROTOCOLS["chat_completions"].parse_request(
            b'{"model":"m","max_tokens":200,"messages":[{"role":"user","content":"what is a bridge?"}]}'
        ),
        options=Options(**options),
        deadline=None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s,
        transport=transport,
    )


async def read(items: AsyncIterator[Sequence[Delta] | Ended]) -> tuple[str, Ended | None]:
    """The text of a streamed answer and its end."""
    text = ""
    async for item in items:
        if isinstance(item, Ended):
            return text, item
        text += "".join(delta.text for delta in item if hasattr(delta, "text"))
    return text, None


__all__ = ["CALLER", "KEY", "Heard", "Message", "Role", "Text", "WholeLine", "call", "read", "whole_line"]
