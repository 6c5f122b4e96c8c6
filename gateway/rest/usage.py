"""
What was used and what it cost: in a session, on a day and in total, or by group over a range of days.

What is confirmed, what nobody knows, and what attempts at work can still cost stand apart, and none of them is in
another. Where the answer does not have all that was used in the range it says so: a sum that is too low and looks whole
is worse than none.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import uuid
from collections.abc import AsyncIterator, Mapping
from datetime import date
from typing import Annotated, Any, Final, Literal, Protocol

import msgspec
from aiohttp import web
from typing_extensions import TypedDict

from gateway.call import Scope
from gateway.database import StoreUnavailable
from gateway.errors import Code, GatewayError, InvalidRequest
from gateway.rest import exports
from gateway.rest.endpoint import Endpoint, Exchange, plain
from gateway.rest.fields import MAX_TAG_NAME, MAX_TEXT
from gateway.rest.ids import as_uuid
from gateway.rest.operation import OF_CONTROL, Content, Operation
from metering import grouping
from metering.grouping import Grouped, Question, TooWide

#: Groups of a page: where nothing is said, and at most.
DEFAULT_LIMIT: Final = 1000
MAX_LIMIT: Final = 10_000
#: Words of one `group_by`.
MAX_DIMENSIONS: Final = 8
_DAY: Final = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)
_SUMS: Final = (
    "charged_usd",
    "unknown_attempts",
    "unknown_upper_bound_usd",
    "unbounded_attempts",
    "reserved_attempts",
    "reserved_usd",
    "unbounded_reserved",
    "attempts",
    "input_tokens",
    "output_tokens",
)


class UsageReader(Protocol):
    """The cost counters and the log. `metering.ledger` has them."""

    @property
    def zone(self) -> str:
        """The declared zone, whose days are meant."""
        ...

    async def read(
        self, *, session_id: str | None, day: date | None, key_id: uuid.UUID | None, session_key: uuid.UUID
    ) -> Mapping[str, object]:
        """
        `session` (None where none is asked for), `day` (None means today in the declared zone) and `total`, each with
        the fields of `Sums`.

        Of one key, or of all where `key_id` is None. A session belongs to a key, `session_key`; one that this key never
        used reads as zero, like one that is not there. Raises StoreUnavailable.
        """
        ...

    async def grouped(self, question: Question) -> Grouped:
        """A page of groups, and the sum of all. Raises ValueError (the days), TooWide, StoreUnavailable."""
        ...


_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TEXT)]
_TagText = Annotated[str, msgspec.Meta(min_length=2, max_length=MAX_TAG_NAME + 1 + MAX_TEXT)]


class _UsageQuery(msgspec.Struct, frozen=True, kw_only=True):
    #: By either name.
    session_id: _Text | None = None
    session: _Text | None = None
    #: None: today in the declared zone. Of groups: both the first and the last day.
    day: date | None = None
    #: Words of `metering.grouping.DIMENSIONS`, or `tag:NAME`, with commas between them.
    group_by: str | None = None
    from_: date | None = msgspec.field(name="from", default=None)
    to: date | None = None
    key: uuid.UUID | None = None
    provider: _Text | None = None
    model: _Text | None = None
    upstream_model: _Text | None = None
    run: _Text | None = None
    step: _Text | None = None
    skill: _Text | None = None
    tool: _Text | None = None
    role: _Text | None = None
    #: `NAME:VALUE`.
    tag: _TagText | None = None
    format: Literal["json", "csv", "jsonl"] | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_LIMIT)] = DEFAULT_LIMIT
    #: The `next_cursor` of the page before.
    cursor: str | None = None


_PARAMETERS: Final = tuple(field.encode_name for field in msgspec.structs.fields(_UsageQuery))
#: Beside a session or a day alone, what is asked is as it always was.
_PLAIN: Final = frozenset({"session_id", "session", "day", "format"})


class Sums(TypedDict):
    """What was used."""

    #: A decimal string.
    charged_usd: str
    #: Attempts of which nobody knows what they cost, and the most that they can have.
    unknown_attempts: int
    unknown_upper_bound_usd: str
    #: Those of which there is no such bound.
    unbounded_attempts: int
    #: Attempts at work, and the most that they can cost. They are in none of the others.
    reserved_attempts: int
    reserved_usd: str
    #: Those of which there is no such bound.
    unbounded_reserved: int
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


#: The fields of `Sums`, and by the words of `group_by` what the group is of, null where the attempts have none.
Group = dict[str, str | int | None]


UsageGroups = TypedDict(
    "UsageGroups",
    {
        "from": date,
        "to": date,
        "zone": str,
        "group_by": list[str],
        "source": Literal["counters", "log"],
        "complete": bool,
        "kept_from": date | None,
        "groups": list[Group],
        "sum": Sums,
        "next_cursor": str | None,
    },
)
UsageGroups.__doc__ = "What was used by group: by this key, or by all for an administrator."


def routes(*, usage: UsageReader) -> list[Endpoint]:
    """The endpoints of this module."""

    async def read_usage(exchange: Exchange) -> web.StreamResponse:
        query = exchange.query(_PARAMETERS)
        # Either the field's name or the answer's: both are what people type. Of two, one would be ignored.
        if {"session_id", "session"} <= query.keys():
            raise InvalidRequest("is session_id by another name: give one of them", param="session")
        form = exports.asked(exchange, query.get("format"))
        try:
            if query.keys() <= _PLAIN:
                return await plainly(exchange, query, form)
            question = _question(exchange, query)
            if form is exports.Format.JSON:
                return exchange.answer(_told(question, await _asked(usage, question), usage.zone))
            for name in ("limit", "cursor"):
                if name in query:
                    raise InvalidRequest("is for JSON: CSV and JSONL have all groups", param=name)
            return await _exported(exchange, form, usage, question)
        except StoreUnavailable as error:
            raise _unavailable() from error

    async def plainly(exchange: Exchange, query: Mapping[str, str], form: exports.Format) -> web.StreamResponse:
        session_id = _text(query, "session_id" if "session_id" in query else "session", param="session_id")
        day = _day(query, "day")
        # An administrator sees all; every other key what it used itself.
        caller = exchange.caller
        key_id = None if Scope.ADMIN in caller.scopes else caller.key_id
        sums = plain(await usage.read(session_id=session_id, day=day, key_id=key_id, session_key=caller.key_id))
        if form is exports.Format.JSON:
            return exchange.answer(sums)

        async def pages() -> AsyncIterator[list[dict[str, Any]]]:
            yield [
                {"of": name, "name": session_id if name == "session" else sums[name].get("day"), **sums[name]}
                for name in ("session", "day", "total")
                if sums[name] is not None
            ]

        return await exports.send(exchange, form, ("of", "name", *_SUMS), pages(), {"zone": usage.zone})

    told = Operation(
        summary="What was used and what it cost",
        query=_UsageQuery,
        gives=(
            Content(type=UsageSums | UsageGroups),
            Content(type=str, media_type=exports.CSV),
            Content(type=dict[str, Any], media_type=exports.JSONL, lines=True),
        ),
        errors=OF_CONTROL | {Code.RANGE_TOO_WIDE},
    )
    return [Endpoint(method="GET", path="/v1/usage", access=Scope.USAGE_READ, handler=read_usage, told=told)]


async def _asked(usage: UsageReader, question: Question) -> Grouped:
    try:
        return await usage.grouped(question)
    except ValueError as error:
        raise InvalidRequest("is after `to` (where that is not given: after today)", param="from") from error
    except TooWide as error:
        raise InvalidRequest(
            "there is too much in the range to be added up in time: narrow `from` and `to`, name a session, run or "
            "key, or group by less, or by what the counters have",
            code=Code.RANGE_TOO_WIDE,
            param="from",
        ) from error


def _told(question: Question, found: Grouped, zone: str) -> dict[str, Any]:
    return {
        **_frame(question, found, zone),
        "groups": [_row(question, group) for group in found.groups],
        "sum": found.sum,
        "next_cursor": _cursor(question, found.groups[-1][0]) if found.more else None,
    }


def _frame(question: Question, found: Grouped, zone: str) -> dict[str, Any]:
    return {
        "from": found.first,
        "to": found.last,
        "zone": zone,
        "group_by": list(question.group_by),
        "source": found.source,
        "complete": found.kept_from is None,
        "kept_from": found.kept_from,
    }


def _row(question: Question, group: tuple[tuple[str | None, ...], Mapping[str, Any]]) -> dict[str, Any]:
    names, sums = group
    return {**dict(zip(question.group_by, names, strict=True)), **sums}


async def _exported(
    exchange: Exchange, form: exports.Format, usage: UsageReader, question: Question
) -> web.StreamResponse:
    question = msgspec.structs.replace(question, limit=MAX_LIMIT)
    first = await _asked(usage, question)

    async def pages() -> AsyncIterator[list[dict[str, Any]]]:
        found = first
        while True:
            yield [_row(question, group) for group in found.groups]
            if not found.more:
                return
            # The days stay those of the first page, also past midnight.
            found = await _asked(
                usage,
                msgspec.structs.replace(question, first=first.first, last=first.last, after=found.groups[-1][0]),
            )

    return await exports.send(
        exchange,
        form,
        (*question.group_by, *_SUMS),
        pages(),
        {**_frame(question, first, usage.zone), "sum": first.sum},
    )


def _question(exchange: Exchange, query: Mapping[str, str]) -> Question:
    if "day" in query and (beside := {"from", "to"} & query.keys()):
        raise InvalidRequest("is of `day` already: give one of them", param=min(beside))
    first, last = (_day(query, "day" if "day" in query else name) for name in ("from", "to"))
    session = _text(query, "session_id" if "session_id" in query else "session", param="session_id")
    values = {name: value for name in grouping.FILTERS if (value := _text(query, name)) is not None}
    if session is not None:
        values["session"] = session
    group_by = _group_by(query)
    caller = exchange.caller
    question = Question(
        group_by=group_by,
        first=first,
        last=last,
        own=None if Scope.ADMIN in caller.scopes else caller.key_id,
        key=_key(query),
        values=values,
        tag=_tag(query),
        limit=_limit(query),
    )
    return msgspec.structs.replace(question, after=_after(query, question))


def _group_by(query: Mapping[str, str]) -> tuple[str, ...]:
    if "group_by" not in query:
        return ()
    words = tuple(query["group_by"].split(","))
    if len(words) > MAX_DIMENSIONS:
        raise InvalidRequest(f"has more than {MAX_DIMENSIONS} words", param="group_by")
    for word in words:
        name = word.removeprefix(grouping.TAG_NAMED)
        if word not in grouping.DIMENSIONS and (name == word or not 1 <= len(name) <= MAX_TAG_NAME):
            known = ", ".join(grouping.DIMENSIONS)
            raise InvalidRequest(
                f"must be words of these with commas between them: {known}, tag:NAME", param="group_by"
            )
    if len(set(words)) != len(words):
        raise InvalidRequest("has a word twice", param="group_by")
    return words


def _text(query: Mapping[str, str], name: str, *, param: str | None = None) -> str | None:
    value = query.get(name)
    if value is not None and not 1 <= len(value) <= MAX_TEXT:
        raise InvalidRequest(f"must have 1 to {MAX_TEXT} characters", param=param or name)
    return value


def _key(query: Mapping[str, str]) -> uuid.UUID | None:
    if "key" not in query:
        return None
    try:
        return as_uuid(query["key"])
    except ValueError as error:
        raise InvalidRequest("must be the id of a key", param="key") from error


def _tag(query: Mapping[str, str]) -> tuple[str, str] | None:
    if "tag" not in query:
        return None
    name, colon, value = query["tag"].partition(":")
    if not colon or not 1 <= len(name) <= MAX_TAG_NAME or len(value) > MAX_TEXT:
        raise InvalidRequest("must be NAME:VALUE", param="tag")
    return name, value


def _limit(query: Mapping[str, str]) -> int:
    limit = query.get("limit", str(DEFAULT_LIMIT))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:6]) <= MAX_LIMIT):
        raise InvalidRequest(f"must be a whole number from 1 to {MAX_LIMIT}", param="limit")
    return int(limit)


def _day(query: Mapping[str, str], name: str) -> date | None:
    if name not in query:
        return None
    text = query[name]
    try:
        # fromisoformat takes other ISO forms as well.
        return date.fromisoformat(text if _DAY.fullmatch(text) else "")
    except ValueError as error:
        raise InvalidRequest("must be a day as YYYY-MM-DD", param=name) from error


class _Cursor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a page ended, and of which question: with another it would point elsewhere."""

    question: str
    after: tuple[str | None, ...]


def _cursor(question: Question, after: tuple[str | None, ...]) -> str:
    cursor = msgspec.json.encode(_Cursor(_digest(question), after))
    return base64.urlsafe_b64encode(cursor).rstrip(b"=").decode()


def _digest(question: Question) -> str:
    """Of what is asked, whatever the page."""
    values = dict(sorted(question.values.items()))
    whole = msgspec.structs.replace(question, after=None, limit=DEFAULT_LIMIT, values=values)
    return hashlib.sha256(msgspec.json.encode(whole)).hexdigest()[:16]


def _after(query: Mapping[str, str], question: Question) -> tuple[str | None, ...] | None:
    if "cursor" not in query:
        return None
    text = query["cursor"]
    try:
        decoded = base64.b64decode(text + "=" * (-len(text) % 4), altchars="-_", validate=True)
        cursor = msgspec.json.decode(decoded, type=_Cursor)
    except (binascii.Error, ValueError, msgspec.DecodeError) as error:
        raise InvalidRequest("must be the `next_cursor` of the page before", param="cursor") from error
    if cursor.question != _digest(question) or len(cursor.after) != len(question.group_by):
        raise InvalidRequest("is of another question: only `limit` may change from page to page", param="cursor")
    if any("\x00" in word for word in cursor.after if word is not None):
        raise InvalidRequest("must be the `next_cursor` of the page before", param="cursor")
    return cursor.after


def _unavailable() -> GatewayError:
    return GatewayError("the control store cannot be reached", code=Code.CONTROL_STORE_UNAVAILABLE, retry_after_s=1.0)
