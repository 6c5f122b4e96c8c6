"""What operators and load balancers ask: is it alive, what can it serve, who occupies what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Protocol

import msgspec
import structlog
from aiohttp import web
from typing_extensions import TypedDict

from gateway.call import Scope
from gateway.database import StoreUnavailable
from gateway.errors import Code, GatewayError
from gateway.rest.endpoint import Access, Endpoint, Exchange, plain
from gateway.rest.operation import OF_CONTROL, Content, Operation

log: Final = structlog.get_logger("gateway")


class Readiness(Protocol):
    """Whether this process may be sent work."""

    def ready(self) -> tuple[bool, dict[str, str]]:
        """Ready only while the stores answer and the process is not stopping, and how each part is. No I/O."""
        ...

    def providers(self) -> dict[str, str]:
        """By id: "ready" where its credentials are present, else "not_ready", or "disabled". Decides nothing here."""
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


class Alive(TypedDict):
    status: Literal["alive"]


class Ready(TypedDict):
    """Whether this process may be sent work, and how each part is."""

    status: Literal["ready", "not_ready"]
    parts: dict[str, str]
    providers: dict[str, str]


class GroupList(TypedDict):
    """The capacity groups."""

    groups: list[dict[str, Any]]


class GroupReset(TypedDict):
    group: str
    reset: Literal[True]


def routes(*, readiness: Readiness, groups: GroupsReader) -> list[Endpoint]:
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


def _unavailable() -> GatewayError:
    return GatewayError("the control store cannot be reached", code=Code.CONTROL_STORE_UNAVAILABLE, retry_after_s=1.0)
