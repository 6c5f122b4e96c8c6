"""
API keys over REST, for keys of scope `admin`: make, list, change, rotate, revoke.

A key is meant by its id here. What one key may give another, and that a secret is told once, is `gateway.keys`.
"""

from __future__ import annotations

import uuid
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Final, Literal

import msgspec
from aiohttp import web
from typing_extensions import TypedDict

from gateway.call import Scope
from gateway.errors import Code, InvalidRequest, NotFound
from gateway.keys import Change, KeyRecord, Keys, Limits, Spending, Used
from gateway.rest.endpoint import Endpoint, Exchange
from gateway.rest.fields import IDEMPOTENCY_KEY
from gateway.rest.ids import as_uuid
from gateway.rest.operation import OF_CONTROL, Content, Link, Operation
from metering.cost import decimal_string

#: Keys of one page of the list.
MOST_AT_ONCE: Final = 1000
_USUAL_AT_ONCE: Final = 100


class NewKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/keys`."""

    name: str
    scopes: frozenset[Scope]
    description: str = ""
    models: tuple[str, ...] | None = None
    providers: tuple[str, ...] | None = None
    tags: dict[str, str] = {}
    limits: Limits = Limits()
    expires_at: datetime | None = None


class Rotation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/keys/{key_id}/rotate`."""

    #: Seconds for which the secret before this one is good, too.
    overlap_s: float


class _Page(msgspec.Struct, frozen=True, kw_only=True):
    limit: Annotated[int, msgspec.Meta(ge=1, le=MOST_AT_ONCE)] = _USUAL_AT_ONCE
    #: The id of the last key of the page before.
    after: uuid.UUID | None = None


class Key(TypedDict):
    """A key, without its secret."""

    id: uuid.UUID
    object: Literal["key"]
    name: str
    description: str
    scopes: list[Scope]
    models: tuple[str, ...] | None
    providers: tuple[str, ...] | None
    tags: dict[str, str]
    limits: dict[str, int | str | None]
    created_at: datetime
    changed_at: datetime | None
    expires_at: datetime | None
    revoked_at: datetime | None
    previous_secret_until: datetime | None


class Money(TypedDict):
    """The money of a key in a period, in USD. A budget is against the sum of the three."""

    spent_usd: str
    unknown_upper_bound_usd: str
    reserved_usd: str


class MoneyOfDay(Money):
    day: date


class MoneyOfMonth(Money):
    month: str


class Usage(TypedDict):
    """What a key has used, of its limits or without any."""

    concurrency: int
    #: What is left of its requests and tokens of this minute; null: it has no such limit.
    requests_left: int | None
    tokens_left: int | None
    day: MoneyOfDay
    month: MoneyOfMonth
    total: Money


class KeyInUse(Key):
    """A key, and what it has used."""

    used: Usage


class KeyWithSecret(Key):
    """A key with its secret, which is told this once."""

    secret: str


class KeyPage(TypedDict):
    """A page of keys."""

    object: Literal["list"]
    data: list[Key]
    has_more: bool


def routes(*, keys: Keys) -> list[Endpoint]:
    """The endpoints of this module."""

    async def create(exchange: Exchange) -> web.StreamResponse:
        exchange.query(())
        _not_replayed(exchange)
        asked = await exchange.json(NewKey)
        record, secret = await keys.create(
            asked.name,
            asked.scopes,
            asked.expires_at,
            asked.tags,
            description=asked.description,
            models=asked.models,
            providers=asked.providers,
            limits=asked.limits,
            by=exchange.caller,
        )
        return _answer(exchange, _told_once(record, secret), status=201)

    async def list_(exchange: Exchange) -> web.StreamResponse:
        query = exchange.query(("limit", "after"))
        limit = query.get("limit", str(_USUAL_AT_ONCE))
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:6]) <= MOST_AT_ONCE):
            raise InvalidRequest(f"must be a whole number from 1 to {MOST_AT_ONCE}", param="limit")
        after = None
        if "after" in query:
            try:
                after = as_uuid(query["after"])
            except ValueError as error:
                raise InvalidRequest("is no id of a key", param="after") from error
        found = await keys.list(after, int(limit) + 1)
        page = found[: int(limit)]
        told: KeyPage = {
            "object": "list",
            "data": [shown(record) for record in page],
            "has_more": len(found) > len(page),
        }
        return _answer(exchange, told)

    async def get(exchange: Exchange) -> web.StreamResponse:
        exchange.query(())
        key_id = _id(exchange)
        record = await keys.get(key_id)
        found: KeyInUse = {**shown(record), "used": _used(await keys.used(key_id))}
        return _answer(exchange, found)

    async def change(exchange: Exchange) -> web.StreamResponse:
        exchange.query(())
        key_id = _id(exchange)
        return _answer(exchange, shown(await keys.change(key_id, await exchange.json(Change), by=exchange.caller)))

    async def rotate(exchange: Exchange) -> web.StreamResponse:
        exchange.query(())
        _not_replayed(exchange)
        key_id = _id(exchange)
        asked = await exchange.json(Rotation)
        record, secret = await keys.rotate(key_id, asked.overlap_s, by=exchange.caller)
        return _answer(exchange, _told_once(record, secret))

    async def revoke(exchange: Exchange) -> web.StreamResponse:
        exchange.query(())
        return _answer(exchange, shown(await keys.revoke(_id(exchange), by=exchange.caller)))

    one = "/v1/keys/{key_id}"
    refused = OF_CONTROL | {Code.UNSUPPORTED_FIELD, Code.CONFLICT}
    known = {"key_id": "/id"}
    created = Operation(
        summary="Make a key",
        description="Its secret is told once: with `Idempotency-Key` it is refused.",
        takes=(Content(type=NewKey, example={"name": "evening-batch", "scopes": ["chat", "jobs"]}),),
        gives=(Content(type=KeyWithSecret, status=201),),
        errors=refused,
        links={
            "get": Link(method="GET", path=one, parameters=known),
            "change": Link(method="PATCH", path=one, parameters=known),
            "rotate": Link(method="POST", path=f"{one}/rotate", parameters=known),
            "revoke": Link(method="DELETE", path=one, parameters=known),
        },
    )
    listed = Operation(summary="List keys", query=_Page, gives=(Content(type=KeyPage),), errors=OF_CONTROL)
    looked_at = Operation(summary="A key, and what it has used", gives=(Content(type=KeyInUse),), errors=OF_CONTROL)
    changed = Operation(
        summary="Change a key",
        takes=(Content(type=Change, example={"description": "of the evening"}),),
        gives=(Content(type=Key),),
        errors=refused,
    )
    rotated = Operation(
        summary="Give a key a new secret",
        takes=(Content(type=Rotation, example={"overlap_s": 3600}),),
        gives=(Content(type=KeyWithSecret),),
        errors=refused,
    )
    revoked = Operation(summary="Revoke a key", gives=(Content(type=Key),), errors=refused)
    return [
        Endpoint(method="POST", path="/v1/keys", access=Scope.ADMIN, handler=create, told=created),
        Endpoint(method="GET", path="/v1/keys", access=Scope.ADMIN, handler=list_, told=listed),
        Endpoint(method="GET", path=one, access=Scope.ADMIN, handler=get, told=looked_at),
        Endpoint(method="PATCH", path=one, access=Scope.ADMIN, handler=change, told=changed),
        Endpoint(method="DELETE", path=one, access=Scope.ADMIN, handler=revoke, told=revoked),
        Endpoint(method="POST", path=f"{one}/rotate", access=Scope.ADMIN, handler=rotate, told=rotated),
    ]


def _told_once(record: KeyRecord, secret: str) -> KeyWithSecret:
    return {**shown(record), "secret": secret}


def shown(record: KeyRecord) -> Key:
    """What is told of a key: all but its secrets."""
    return {
        "id": record.key_id,
        "object": "key",
        "name": record.name,
        "description": record.description,
        "scopes": sorted(record.scopes),
        "models": record.models,
        "providers": record.providers,
        "tags": record.tags,
        "limits": {
            name: format(value, "f") if isinstance(value, Decimal) else value
            for name, value in msgspec.structs.asdict(record.limits).items()
        },
        "created_at": record.created_at,
        "changed_at": record.changed_at,
        "expires_at": record.expires_at,
        "revoked_at": record.revoked_at,
        "previous_secret_until": record.previous_secret_until,
    }


def _used(used: Used) -> Usage:
    return {
        "concurrency": used.concurrency,
        "requests_left": used.requests_left,
        "tokens_left": used.tokens_left,
        "day": {"day": used.day, **_money(used.of_day)},
        "month": {"month": f"{used.day:%Y-%m}", **_money(used.of_month)},
        "total": _money(used.of_all),
    }


def _money(spending: Spending) -> Money:
    return {
        "spent_usd": decimal_string(spending.spent_usd),
        "unknown_upper_bound_usd": decimal_string(spending.unknown_upper_bound_usd),
        "reserved_usd": decimal_string(spending.reserved_usd),
    }


def _answer(exchange: Exchange, payload: object, *, status: int = 200) -> web.StreamResponse:
    # A secret is in some of them, and no cache on the way should have it.
    return exchange.answer(payload, status=status, headers={"Cache-Control": "no-store"})


def _id(exchange: Exchange) -> uuid.UUID:
    try:
        return as_uuid(exchange.path_args["key_id"])
    except ValueError:
        raise NotFound("no key has this id") from None


def _not_replayed(exchange: Exchange) -> None:
    if IDEMPOTENCY_KEY in exchange.request.headers:
        raise InvalidRequest(
            "a secret is told once, so its answer cannot be repeated: repeat the request without this header, and "
            "revoke what was made in vain",
            code=Code.UNSUPPORTED_FIELD,
            param=IDEMPOTENCY_KEY,
        )
