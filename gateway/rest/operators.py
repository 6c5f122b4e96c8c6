"""What operators and load balancers ask: is it alive, what can it serve, what was used, who occupies what."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Annotated, Any, Final, Literal, Protocol
from uuid import UUID

import msgspec
import structlog
from aiohttp import web
from typing_extensions import TypedDict

from gateway.call import Scope
from gateway.database import StoreUnavailable
from gateway.errors import Code, GatewayError, InvalidRequest
from gateway.rest.endpoint import Access, Endpoint, Exchange, plain
from gateway.rest.operation import OF_CONTROL, Content, Operation

log: Final = structlog.get_logger("gateway")

#: Characters of a session id.
MAX_SESSION_ID = 256
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)


class Readiness(Protocol):
    """Whether this process may be sent work."""

    def ready(self) -> tuple[bool, dict[str, str]]:
        """Ready only while the stores answer and the process is not stopping, and how each part is. No I/O."""
        ...

    def providers(self) -> dict[str, str]:
        """By id: "ready" where its credentials are present, else "not_ready", or "disabled". Decides nothing here."""
        ...


class UsageReader(Protocol):
    """The cost counters. `metering.ledger` has them."""

    async def read(
        self, *, session_id: str | None, day: date | None, key_id: UUID | None, session_key: UUID
    ) -> Mapping[str, object]:
        """
        `session` (None where none is asked for), `day` (None means today in the declared zone) and `total`, each with
        charged_usd, unknown_attempts, unknown_upper_bound_usd, attempts, input_tokens and output_tokens.

        Of one key, or of all where `key_id` is None. A session belongs to a key, `session_key`; one that this key never
        used reads as zero, like one that is not there. Raises StoreUnavailable.
        """
        ...


class GroupsReader(Protocol):
    """The capacity groups. `admission.store` knows them."""

    async def groups(self) -> Sequence[Mapping[str, Any]]:
        """One JSON object a group, with its `slots` and who is `waiting`. Raises StoreUnavailable."""
        ...

    async def reset(self, group: str) -> str:
        """
        Closes the group's breaker and forgets why its providers were left alone; jobs that wait for it are due.

        Answers the group's own name.

        Raises NotFound, InvalidRequest, StoreUnavailable.
        """
        ...


class Reset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/groups/reset`."""

    group: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]


_SessionId = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_SESSION_ID)]


class _UsageQuery(msgspec.Struct, frozen=True, kw_only=True):
    #: By either name.
    session_id: _SessionId | None = None
    session: _SessionId | None = None
    #: None: today in the declared zone.
    day: date | None = None


class Alive(TypedDict):
    status: Literal["alive"]


class Ready(TypedDict):
    """Whether this process may be sent work, and how each part is."""

    status: Literal["ready", "not_ready"]
    parts: dict[str, str]
    providers: dict[str, str]


class Sums(TypedDict):
    """What was used."""

    #: A decimal string.
    charged_usd: str
    #: Attempts of which nobody knows what they cost, and the most that they can have.
    unknown_attempts: int
    unknown_upper_bound_usd: str
    #: Those of which there is no such bound.
    unbounded_attempts: int
    attempts: int
    input_tokens: int
    output_tokens: int


class DaySums(Sums):
    """What was used on a day of the declared zone."""

    day: date


class UsageSums(TypedDict):
    """What was used: by this key, or by all for an administrator."""

    session: Sums | None
    day: DaySums
    total: Sums


class GroupList(TypedDict):
    """The capacity groups."""

    groups: list[dict[str, Any]]


class GroupReset(TypedDict):
    group: str
    reset: Literal[True]


def routes(*, readiness: Readiness, usage: UsageReader, groups: GroupsReader) -> list[Endpoint]:
    """The endpoints of this module."""

    async def healthz(exchange: Exchange) -> web.StreamResponse:
        exchange.query(())
        alive: Alive = {"status": "alive"}
        return exchange.answer(alive)

    async def readyz(exchange: Exchange) -> web.StreamResponse:
        exchange.query(())
        ready, parts = readiness.ready()
        ready = ready and not exchange.draining.is_set()
        told: Ready = {
            "status": "ready" if ready else "not_ready",
            "parts": parts,
            "providers": readiness.providers(),
        }
        return exchange.answer(told, status=200 if ready else 503)

    async def read_usage(exchange: Exchange) -> web.StreamResponse:
        query = exchange.query(("session_id", "session", "day"))
        # Either the field's name or the answer's: both are what people type. Of two, one would be ignored.
        if {"session_id", "session"} <= query.keys():
            raise InvalidRequest("is session_id by another name: give one of them", param="session")
        session_id = query.get("session_id", query.get("session"))
        if session_id is not None and not 1 <= len(session_id) <= MAX_SESSION_ID:
            raise InvalidRequest(f"must have 1 to {MAX_SESSION_ID} characters", param="session_id")
        day = _day(query["day"]) if "day" in query else None
        # An administrator sees all; every other key what it used itself.
        caller = exchange.caller
        key_id = None if Scope.ADMIN in caller.scopes else caller.key_id
        try:
            sums = await usage.read(session_id=session_id, day=day, key_id=key_id, session_key=caller.key_id)
            return exchange.answer(plain(sums))
        except StoreUnavailable as error:
            raise _unavailable() from error

    async def read_groups(exchange: Exchange) -> web.StreamResponse:
        exchange.query(())
        caller = exchange.caller
        try:
            found = await groups.groups()
            if Scope.ADMIN not in caller.scopes:
                found = [_without_others(group, str(caller.key_id)) for group in found]
            told: GroupList = {"groups": plain(found)}
            return exchange.answer(told)
        except StoreUnavailable as error:
            raise _unavailable() from error

    async def reset_group(exchange: Exchange) -> web.StreamResponse:
        exchange.query(())
        asked = await exchange.json(Reset)
        try:
            name = await groups.reset(asked.group)
        except StoreUnavailable as error:
            raise _unavailable() from error
        log.info("gateway.group_reset", group=name, key_id=str(exchange.caller.key_id))
        done: GroupReset = {"group": name, "reset": True}
        return exchange.answer(done)

    live = Operation(summary="Whether the process is alive", gives=(Content(type=Alive),))
    standing = Operation(
        summary="Whether the process may be sent work", gives=(Content(type=Ready), Content(type=Ready, status=503))
    )
    used = Operation(
        summary="What was used and what it cost",
        query=_UsageQuery,
        gives=(Content(type=UsageSums),),
        errors=OF_CONTROL,
    )
    listed = Operation(summary="Who occupies what, and who waits", gives=(Content(type=GroupList),), errors=OF_CONTROL)
    closed = Operation(
        summary="Close the breaker of a capacity group",
        takes=(Content(type=Reset, example={"group": "https://api.openai.com"}),),
        gives=(Content(type=GroupReset),),
        errors=OF_CONTROL | {Code.NOT_FOUND, Code.CONTENT_STORE_UNAVAILABLE},
    )
    return [
        Endpoint(method="GET", path="/healthz", access=Access.PUBLIC, handler=healthz, told=live),
        Endpoint(method="GET", path="/readyz", access=Access.PUBLIC, handler=readyz, told=standing),
        Endpoint(method="GET", path="/v1/usage", access=Scope.USAGE_READ, handler=read_usage, told=used),
        Endpoint(method="GET", path="/v1/groups", access=Scope.USAGE_READ, handler=read_groups, told=listed),
        Endpoint(method="POST", path="/v1/groups/reset", access=Scope.ADMIN, handler=reset_group, told=closed),
    ]


#: Who a slot or a place in the queue is for: its key, and the caller's own name for the work.
_WHOSE: Final = frozenset({"key_id", "debit_id", "ticket_id"})


def _without_others(group: Mapping[str, Any], key_id: str) -> dict[str, Any]:
    """
    The group with its slots and queue, but without whose they are, where they are another key's; and without the names
    of the environment variables that hold credentials.
    """
    return {
        **group,
        "floors": [{**floor, "credential": None} for floor in group.get("floors") or ()],
        **{
            name: [
                one if one.get("key_id") == key_id else {**one, **dict.fromkeys(_WHOSE & one.keys())}
                for one in group.get(name) or ()
            ]
            for name in ("slots", "waiting")
        },
    }


def _day(text: str) -> date:
    try:
        # fromisoformat takes other ISO forms as well.
        return date.fromisoformat(text if _DAY.fullmatch(text) else "")
    except ValueError as error:
        raise InvalidRequest("must be a day as YYYY-MM-DD", param="day") from error


def _unavailable() -> GatewayError:
    return GatewayError("the control store cannot be reached", code=Code.CONTROL_STORE_UNAVAILABLE, retry_after_s=1.0)
