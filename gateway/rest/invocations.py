"""
The invocation log over HTTP: each attempt with what it used, cost and took, and sums over a range.

An administrator sees all, every other key its own attempts, and never who corrected one, why, and by what proof.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Annotated, Any, Final, Literal, Protocol, get_args

import msgspec
from aiohttp import web
from typing_extensions import TypedDict

from gateway import database
from gateway.call import Caller, Scope
from gateway.errors import Code, GatewayError, InvalidRequest, NotFound
from gateway.rest import exports
from gateway.rest.endpoint import Endpoint, Exchange, plain
from gateway.rest.ids import as_uuid
from gateway.rest.operation import OF_CONTROL, Content, Link, Operation
from metering import log
from metering.log import Order, Page, Place, Search, State, Stats, Status, When

#: Rows of a page, and groups of a sum: where nothing is said, and at most.
DEFAULT_LIMIT, MAX_LIMIT = 100, 1000
#: Seconds that an export waits for a connection. It has begun, and could only break off.
EXPORT_WAIT_S: Final = 60.0

#: Seconds after which a reading may find a connection, where others had all.
_BUSY_S: Final = 5.0
#: Characters of a filter.
_MAX_TEXT: Final = 512
#: The years in which a range may begin and end.
_YEARS: Final = range(1970, 3000)
#: A key that nobody has: whose rows another key asks for.
_NOBODY: Final = uuid.UUID(int=0)
_DAY: Final = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)
_TIME: Final = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}(:\d{2}(\.\d{1,6})?)?(Z|[+-]\d{2}:\d{2})", re.ASCII)
_USD: Final = r"^[0-9]{1,9}(\.[0-9]{1,12})?$"
_STATUSES: Final = get_args(Status)
_STATES: Final = get_args(State)
_WORDS: Final = "|".join([*log.GROUPS, f"{log.TAG}[^,]{{1,64}}"])

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_TEXT)]
_When = Annotated[str, msgspec.Meta(examples=["2026-11-01", "2026-11-01T12:00:00Z"])]
_Limit = Annotated[int, msgspec.Meta(ge=1, le=MAX_LIMIT)]

#: By the name of the filter, the field of the search.
_OF_TEXT: Final[Mapping[str, str]] = {
    "session": "session_id",
    "run": "run_id",
    "step": "step_id",
    "scope": "scope_id",
    "debit": "debit_id",
    "request": "request_id",
    "provider": "provider",
    "model": "requested_model",
    "upstream_model": "upstream_model",
    "ended": "ended",
    "error_code": "error_code",
    "error_class": "error_class",
    "skill": "skill",
    "tool": "tool",
    "role": "role",
    "transport": "transport",
}
#: Of a correction by a person; for administrators.
_OF_OPERATORS: Final = ("resolved_by", "note", "evidence")


class _Filters(msgspec.Struct, frozen=True, kw_only=True):
    key: uuid.UUID | None = None
    session: _Text | None = None
    run: _Text | None = None
    step: _Text | None = None
    scope: _Text | None = None
    debit: _Text | None = None
    request: _Text | None = None
    provider: _Text | None = None
    #: The one that was asked for.
    model: _Text | None = None
    upstream_model: _Text | None = None
    status: (
        Annotated[
            str,
            msgspec.Meta(
                pattern=rf"^({'|'.join(_STATUSES)})(,({'|'.join(_STATUSES)}))*$",
                description="One or several, separated by commas.",
            ),
        ]
        | None
    ) = None
    state: State | None = None
    ended: _Text | None = None
    error_code: _Text | None = None
    error_class: _Text | None = None
    skill: _Text | None = None
    tool: _Text | None = None
    role: _Text | None = None
    transport: _Text | None = None
    tag: tuple[Annotated[str, msgspec.Meta(pattern=r"^[^:]{1,64}:", max_length=_MAX_TEXT)], ...] = ()
    fallback: Literal["true", "false"] | None = None
    min_usd: Annotated[str, msgspec.Meta(pattern=_USD)] | None = None
    min_total_ms: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    since: _When | None = msgspec.field(default=None, name="from")
    to: _When | None = None


class _PageQuery(_Filters, frozen=True, kw_only=True):
    corrections: Literal["current", "all"] = "current"
    format: exports.Format | None = None
    limit: _Limit = DEFAULT_LIMIT
    #: The `next_cursor` of the page before, with the same filters.
    cursor: str | None = None


class _StatsQuery(_Filters, frozen=True, kw_only=True):
    group_by: (
        Annotated[
            str,
            msgspec.Meta(
                pattern=rf"^({_WORDS})(,({_WORDS})){{0,{log.MAX_GROUPS - 1}}}$",
                description=f"Up to {log.MAX_GROUPS}, separated by commas.",
            ),
        ]
        | None
    ) = None
    order: Order = "cost"
    limit: _Limit = DEFAULT_LIMIT


_FILTERS: Final = tuple(field.encode_name for field in msgspec.structs.fields(_Filters))

_Classed = TypedDict("_Classed", {"class": str | None})


class Invocation(_Classed):
    """What was written of an attempt. Amounts are decimal strings in USD; null is what is not known."""

    ticket_id: uuid.UUID
    #: 0 is the settlement; a correction counts on.
    correction: int
    granted_at: datetime
    settled_at: datetime
    day: date
    key_id: uuid.UUID
    debit_id: str
    attempt: int
    request_id: str | None
    transport: str | None
    session_id: str | None
    scope_id: str | None
    run_id: str | None
    step_id: str | None
    skill: str | None
    skill_version: str | None
    tool: str | None
    role: str | None
    tags: dict[str, str] | None
    group_id: str
    requested_model: str | None
    route_id: str | None
    provider: str | None
    upstream_model: str | None
    protocol: str | None
    served_model: str | None
    service_tier: str | None
    provider_request_id: str | None
    is_fallback: bool | None
    fallback_index: int | None
    failed_provider: str | None
    failure_reason: str | None
    left_out: list[dict[str, Any]] | None
    retries: int | None
    status: Status
    ended: str | None
    error_class: str | None
    error_code: str | None
    http_status: int | None
    input_total: int | None
    cache_read: int | None
    cache_write_5m: int | None
    cache_write_1h: int | None
    output_total: int | None
    reasoning: int | None
    state: State
    usd: str | None
    upper_bound_usd: str | None
    list_usd: str | None
    cost_reason: str | None
    price_version: str | None
    flags: list[str] | None
    created_at: datetime | None
    queued_ms: int | None
    cooldown_ms: int | None
    first_byte_ms: int | None
    total_ms: int | None
    #: These three are told to administrators only.
    resolved_by: uuid.UUID | None
    note: str | None
    evidence: str | None


class InvocationPage(TypedDict):
    """A page, the newest grant first. Where `scanned_to` is not null its time was over, and it may have few rows."""

    object: Literal["list"]
    data: list[Invocation]
    has_more: bool
    next_cursor: str | None
    #: Everything that was granted after this moment has been looked at.
    scanned_to: datetime | None


class InvocationHistory(TypedDict):
    """All that was written of one attempt: its settlement, then its corrections."""

    ticket_id: uuid.UUID
    data: list[Invocation]


class Percentiles(TypedDict):
    """Of the successes, in ms; each is a value that there was. Null: there were none."""

    p50: int | None
    p90: int | None
    p99: int | None


class ByStatus(TypedDict):
    success: int
    error: int
    timeout: int
    cancelled: int
    not_dispatched: int
    unknown: int


class StatsSums(TypedDict):
    """Rates are shares of the attempts, null where there were none."""

    attempts: int
    #: Debits, each of its key, of which there were attempts.
    requests: int
    charged_usd: str
    unknown_attempts: int
    unknown_upper_bound_usd: str
    unbounded_attempts: int
    input_tokens: int
    output_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    reasoning_tokens: int
    by_status: ByStatus
    #: `error` and `timeout`.
    error_rate: float | None
    cancel_rate: float | None
    fallback_rate: float | None
    retry_rate: float | None
    #: Of which nobody knows what they cost.
    unknown_rate: float | None
    first_byte_ms: Percentiles
    total_ms: Percentiles
    queued_ms: Percentiles


class _Words(TypedDict, total=False):
    key: uuid.UUID | None
    provider: str | None
    model: str | None
    upstream_model: str | None
    run: str | None
    step: str | None
    session: str | None
    skill: str | None
    tool: str | None
    role: str | None
    transport: str | None
    status: str
    error_code: str | None
    hour: datetime
    day: date


class StatsGroup(_Words, StatsSums):
    """The sums of a group, with the words that it was grouped by; `tag:NAME` is one of them."""


_Told = TypedDict("_Told", {"from": datetime | None, "to": datetime | None})


class StatsAnswer(_Told):
    """Sums of a range: in all, and by group, those with the most first."""

    group_by: list[str]
    all: StatsSums
    groups: list[StatsGroup]
    groups_in_all: int


#: As they stand in a CSV.
COLUMNS: Final = tuple(Invocation.__annotations__ | _Classed.__annotations__)


class Reader(Protocol):
    """The invocation log. `metering.log.InvocationLog` is it. Raises LogError and what `store_errors` knows."""

    async def page(
        self, search: Search, *, after: Place | None, limit: int, corrections: bool, wait_s: float | None = None
    ) -> Page: ...

    async def attempt(self, ticket_id: uuid.UUID, *, key_id: uuid.UUID | None) -> list[dict[str, Any]]: ...

    async def stats(self, search: Search, *, group_by: Sequence[str], order: Order, limit: int) -> Stats: ...


def routes(*, reader: Reader) -> list[Endpoint]:
    """The endpoints of this module."""

    async def page(exchange: Exchange) -> web.StreamResponse:
        query = exchange.queries((*_FILTERS, "corrections", "format", "limit", "cursor"), several=("tag",))
        search = _search(query, exchange.caller)
        corrections = _one_of(query, "corrections", ("current", "all"), "current") == "all"
        wanted = exports.asked(exchange, _text(query, "format"))
        if wanted is not exports.Format.JSON:
            for name in ("limit", "cursor"):
                if name in query:
                    raise InvalidRequest("a CSV or JSONL is the whole range: give `from` and `to`", param=name)
            return await exports.send(exchange, wanted, COLUMNS, _pages(exchange.caller, search, corrections))
        limit = _limit(query)
        with _readable():
            given = _text(query, "cursor")
            after = None if given is None else log.place_of(given, search, corrections=corrections)
            found = await reader.page(search, after=after, limit=limit, corrections=corrections)
        told: InvocationPage = {
            "object": "list",
            "data": [_told(row, exchange.caller) for row in found.rows],
            "has_more": found.next is not None,
            "next_cursor": None if found.next is None else log.cursor(found.next, search, corrections=corrections),
            "scanned_to": found.scanned_to,
        }
        return exchange.answer(told)

    async def _pages(caller: Caller, search: Search, corrections: bool) -> AsyncIterator[Sequence[Mapping[str, Any]]]:
        after: Place | None = None
        while True:
            with _readable():
                found = await reader.page(
                    search, after=after, limit=MAX_LIMIT, corrections=corrections, wait_s=EXPORT_WAIT_S
                )
            yield [_told(row, caller) for row in found.rows]
            if found.next is None:
                return
            after = found.next

    async def history(exchange: Exchange) -> web.StreamResponse:
        exchange.query(())
        caller = exchange.caller
        try:
            ticket_id = as_uuid(exchange.path_args["ticket_id"])
        except ValueError:
            raise _absent() from None
        with _readable():
            rows = await reader.attempt(ticket_id, key_id=None if Scope.ADMIN in caller.scopes else caller.key_id)
        if not rows:
            raise _absent()
        told: InvocationHistory = {"ticket_id": ticket_id, "data": [_told(row, caller) for row in rows]}
        return exchange.answer(told)

    async def stats(exchange: Exchange) -> web.StreamResponse:
        query = exchange.queries((*_FILTERS, "group_by", "order", "limit"), several=("tag",))
        search, limit = _search(query, exchange.caller), _limit(query)
        group_by = _group_by(_text(query, "group_by"))
        order = _one_of(query, "order", get_args(Order), "cost")
        with _readable():
            found = await reader.stats(search, group_by=group_by, order=order, limit=limit)
        return exchange.answer(
            plain(
                {
                    "from": found.since,
                    "to": found.until,
                    "group_by": group_by,
                    "all": found.total,
                    "groups": found.groups,
                    "groups_in_all": found.groups_in_all,
                }
            )
        )

    one = "/v1/invocations/{ticket_id}"
    listed = Operation(
        summary="What was written of each attempt",
        description="As CSV or JSONL the whole range. `from` and `to` are days of the declared zone, both inclusive, or"
        " times, of which `to` is not in the range.",
        query=_PageQuery,
        gives=(
            Content(type=InvocationPage),
            Content(type=str, media_type=exports.CSV),
            Content(type=Invocation | exports.End, media_type=exports.JSONL, lines=True),
        ),
        errors=OF_CONTROL | {Code.RANGE_TOO_WIDE},
        links={"get": Link(method="GET", path=one, parameters={"ticket_id": "/data/0/ticket_id"})},
    )
    looked_at = Operation(
        summary="All that was written of one attempt",
        gives=(Content(type=InvocationHistory),),
        errors=OF_CONTROL | {Code.RANGE_TOO_WIDE},
    )
    summed = Operation(
        summary="Sums, rates and latencies of a range",
        description="Of the last 24 hours, unless `from` says when it begins.",
        query=_StatsQuery,
        gives=(Content(type=StatsAnswer),),
        errors=OF_CONTROL | {Code.RANGE_TOO_WIDE},
    )
    return [
        Endpoint(method="GET", path="/v1/invocations", access=Scope.USAGE_READ, handler=page, told=listed),
        Endpoint(method="GET", path=one, access=Scope.USAGE_READ, handler=history, told=looked_at),
        Endpoint(method="GET", path="/v1/stats", access=Scope.USAGE_READ, handler=stats, told=summed),
    ]


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    try:
        with database.store_errors():
            yield
    except database.StoreUnavailable as error:
        raise GatewayError(
            "the control store cannot be reached", code=Code.CONTROL_STORE_UNAVAILABLE, retry_after_s=1.0
        ) from error
    except log.WrongCursor as error:
        message = "is broken, or of another reading: it goes with the filters of the page that it came with"
        raise InvalidRequest(message, param="cursor") from error
    except log.RangeTooWide as error:
        raise GatewayError(
            "there is too much in this range to be read in time: narrow `from` and `to`, or filter by `session`, `run`,"
            " `key` or `request`",
            code=Code.RANGE_TOO_WIDE,
            param="from",
        ) from error
    except log.TooManyReaders as error:
        raise GatewayError(
            "too many readings of the log at once: come back later", code=Code.QUEUE_FULL, retry_after_s=_BUSY_S
        ) from error


def _absent() -> NotFound:
    return NotFound("no such attempt has been settled")


def _told(row: Mapping[str, Any], caller: Caller) -> Any:
    return {**row, **({} if Scope.ADMIN in caller.scopes else dict.fromkeys(_OF_OPERATORS))}


# ------------------------------------------------------------------ the query


def _search(query: Mapping[str, Sequence[str]], caller: Caller) -> Search:
    asked = _text(query, "key")
    key_id = None if asked is None else _uuid(asked)
    if Scope.ADMIN not in caller.scopes:
        key_id = caller.key_id if key_id in {None, caller.key_id} else _NOBODY
    since, until = (_when(query, name) for name in ("from", "to"))
    if type(since) is type(until) and since is not None and until is not None and since > until:
        raise InvalidRequest("is before `from`", param="to")
    fallback = _one_of(query, "fallback", ("true", "false"), None)
    return Search(
        key_id=key_id,
        **{field: text for name, field in _OF_TEXT.items() if (text := _text(query, name)) is not None},
        statuses=_statuses(_text(query, "status")),
        state=_one_of(query, "state", _STATES, None),
        tags=_tags(query.get("tag", ())),
        is_fallback=None if fallback is None else fallback == "true",
        min_usd=_usd(_text(query, "min_usd")),
        min_total_ms=_number(query, "min_total_ms", 0, 2**31 - 1),
        since=since,
        until=until,
    )


def _text(query: Mapping[str, Sequence[str]], name: str) -> str | None:
    if name not in query:
        return None
    [text] = query[name]
    if not 1 <= len(text) <= _MAX_TEXT:
        raise InvalidRequest(f"must have 1 to {_MAX_TEXT} characters", param=name)
    return text


def _one_of(query: Mapping[str, Sequence[str]], name: str, words: Sequence[str], default: str | None) -> Any:
    text = _text(query, name)
    if text is not None and text not in words:
        raise InvalidRequest(f"must be one of: {', '.join(words)}", param=name)
    return default if text is None else text


def _uuid(text: str) -> uuid.UUID:
    try:
        return as_uuid(text)
    except ValueError as error:
        raise InvalidRequest("must be the id of a key, a UUID", param="key") from error


def _statuses(text: str | None) -> Any:
    if text is None:
        return None
    words = text.split(",")
    if not set(words) <= set(_STATUSES):
        raise InvalidRequest(f"must be of, separated by commas: {', '.join(_STATUSES)}", param="status")
    return tuple(sorted(set(words)))


def _tags(given: Sequence[str]) -> dict[str, str] | None:
    tags: dict[str, str] = {}
    for text in given:
        name, colon, value = text.partition(":")
        if not colon or not 1 <= len(name) <= 64 or len(text) > _MAX_TEXT:
            raise InvalidRequest("must be NAME:VALUE", param="tag")
        if tags.setdefault(name, value) != value:
            raise InvalidRequest("an attempt has one value of each name: two are given of one", param="tag")
    return tags or None


def _usd(text: str | None) -> Decimal | None:
    if text is None:
        return None
    if not re.match(_USD, text):
        raise InvalidRequest("must be an amount in USD, as 0.25", param="min_usd")
    return Decimal(text)


def _number(query: Mapping[str, Sequence[str]], name: str, least: int, most: int) -> int | None:
    text = _text(query, name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and least <= int(text) <= most):
        raise InvalidRequest(f"must be a whole number from {least} to {most}", param=name)
    return int(text)


def _limit(query: Mapping[str, Sequence[str]]) -> int:
    limit = _number(query, "limit", 1, MAX_LIMIT)
    return DEFAULT_LIMIT if limit is None else limit


def _when(query: Mapping[str, Sequence[str]], name: str) -> When | None:
    text = _text(query, name)
    if text is None:
        return None
    try:
        if _DAY.fullmatch(text):
            found: When = date.fromisoformat(text)
        else:
            # fromisoformat takes other forms, and times without a zone.
            found = datetime.fromisoformat(text if _TIME.fullmatch(text) else "").astimezone(UTC)
    except (ValueError, OverflowError) as error:
        what = "must be a day as 2026-11-01, or a time with its zone as 2026-11-01T12:00:00Z"
        raise InvalidRequest(f"{what} (a + is %2B in a URL)", param=name) from error
    if found.year not in _YEARS:
        raise InvalidRequest(f"must be in the years {_YEARS[0]} to {_YEARS[-1]}", param=name)
    return found


def _group_by(text: str | None) -> list[str]:
    if text is None:
        return []
    words = text.split(",")
    for word in words:
        name = word.removeprefix(log.TAG)
        if word not in log.GROUPS and (name == word or not 1 <= len(name) <= 64):
            raise InvalidRequest(
                f"must be of, separated by commas: {', '.join(log.GROUPS)}, {log.TAG}NAME", param="group_by"
            )
    if len(words) > log.MAX_GROUPS or len(set(words)) < len(words):
        raise InvalidRequest(f"must be at most {log.MAX_GROUPS} words, each once", param="group_by")
    return words
