"""
Where a question of usage by groups is answered from, and the statement that answers it.

The counters answer what they were raised for: routes, or runs with their steps, or one tag, each by day and key. What
has no run, or not this tag, is what is left of all. Every other question needs the log of invocations, whose cost grows
with what was used. A question that silently went to the wrong one would be wrong or slow, so the choice is made here,
in one place, and told.
"""

from __future__ import annotations

import importlib.resources
import uuid
from collections.abc import Mapping
from datetime import date
from typing import Any, Final

import msgspec

#: What usage can be grouped by, and the expression of each. `tag` and `tag:NAME` come beside them.
_DIMENSIONS: Final[Mapping[str, str]] = {
    "day": "u.day::text",
    "month": "to_char(u.day, 'YYYY-MM')",
    "key": "u.key_id::text",
    "provider": "u.provider",
    "model": "u.model",
    "upstream_model": "u.upstream_model",
    "run": "u.run",
    "step": "u.step",
    "session": "u.session",
    "skill": "u.skill",
    "tool": "u.tool",
    "role": "u.role",
    "transport": "u.transport",
    "status": "u.status",
}
#: What it can be narrowed to by its value, beside the key and a tag.
FILTERS: Final = ("provider", "model", "upstream_model", "session", "run", "step", "skill", "tool", "role")
#: Every word of `group_by`, apart from `tag:NAME`.
DIMENSIONS: Final = (*_DIMENSIONS, "tag")
_OF_ALL: Final = frozenset({"day", "month", "key"})
_ROUTE: Final = _OF_ALL | {"provider", "model", "upstream_model"}
_RUN: Final = _OF_ALL | {"run"}
_STEP: Final = _RUN | {"step"}
TAG: Final = "tag"
TAG_NAMED: Final = "tag:"


def _sql(name: str) -> str:
    return importlib.resources.files("metering").joinpath("sql", name).read_text().strip()


_GROUPS: Final = _sql("usage_groups.sql")
_COUNTERS: Final = _sql("usage_counters.sql")
_AT_WORK: Final = _sql("usage_at_work.sql")
_LOG: Final = _sql("usage_log.sql")

_NOTHING: Final = "null::text, null::text, null::text, null::text, null::text"
#: How often a counter counts, and for what: provider, model, upstream model, run, step, tags, whether its groups have
#: it, whether the sum has it.
_ROUTES: Final = (
    "values (nullif(c.names[1], ''), nullif(c.names[2], ''), nullif(c.names[3], ''), null::text, null::text,"
    " null::jsonb, true, true, 1)"
)
_REST: Final = f"select {_NOTHING}, null::jsonb, true, true, 1 where c.kind = 'route_day'"
_RUNS: Final = (
    "select null::text, null::text, null::text, c.names[1], null::text, null::jsonb, true, true, 1"
    " where c.kind = 'run_day'"
)
_NOT_RUNS: Final = f"select {_NOTHING}, null::jsonb, true, true, -1 where c.kind = 'run_day'"
_STEPS: Final = (
    "select null::text, null::text, null::text, nullif(c.names[1], ''), c.names[2], null::jsonb, true, true, 1"
    " where c.kind = 'step_day'"
)
#: They are in their run's sum, or in that of all where they have no run.
_NOT_STEPS: Final = (
    "select null::text, null::text, null::text, nullif(c.names[1], ''), null::text, null::jsonb, true, true, -1"
    " where c.kind = 'step_day'"
)


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of usage."""

    #: Words of `DIMENSIONS`, or `tag:NAME`; each once.
    group_by: tuple[str, ...] = ()
    #: Days of the declared zone, both of them in it. None: this month's first, and today.
    first: date | None = None
    last: date | None = None
    #: What this key used, whatever else is asked; None: what all did.
    own: uuid.UUID | None = None
    key: uuid.UUID | None = None
    #: By a name of `FILTERS`.
    values: Mapping[str, str] = {}
    #: Name and value.
    tag: tuple[str, str] | None = None
    #: The group that the page before ended with.
    after: tuple[str | None, ...] | None = None
    #: Groups of one page.
    limit: int = 1000


class Grouped(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: a page of groups, and the sum of all."""

    first: date
    last: date
    #: "counters" or "log".
    source: str
    #: None: all that was used from the first day on is in it. Else the first day of which that is so.
    kept_from: date | None
    #: What each group is of, in the order of `group_by`, and its sums.
    groups: tuple[tuple[tuple[str | None, ...], Mapping[str, Any]], ...]
    #: Each attempt once, also where a group is a tag and an attempt has several.
    sum: Mapping[str, Any]
    #: There are groups after these.
    more: bool


class TooWide(Exception):
    """The log has too much of what is asked for to be added up in the time allowed."""


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    #: The counters of runs, steps and tags do not reach back as far as the others.
    of_late: bool
    sql: str
    arguments: tuple[Any, ...]


def statement(question: Question, *, first: date, last: date) -> Statement:
    """The one statement that answers a question for these days. Its groups are one more than the page, if there are."""
    arguments: list[Any] = []

    def given(value: object, kind: str) -> str:
        arguments.append(value)
        return f"${len(arguments)}::{kind}"

    kinds, parts = _counters(question, given)
    days = {"first": given(first, "date"), "last": given(last, "date")}
    keys = [given(key, "uuid") for key in (question.own, question.key) if key is not None]
    filters = [f"u.{name} = {given(value, 'text')}" for name, value in question.values.items()]
    source = _LOG.format(**days)
    if kinds:
        words = set(question.group_by)
        named = kinds != ["route_day"] or filters or words - _OF_ALL
        source = _COUNTERS.format(
            parts=parts,
            kinds=given(kinds, "text[]"),
            day="k.day" if words & {"day", "month"} else "null::date",
            key_id="k.key_id" if "key" in words or keys else "null::uuid",
            names="k.names" if named else "null::text[]",
            keys=" and ".join(f"k.key_id = {key}" for key in keys) or "true",
            **days,
        )
    filters += [f"u.key_id = {key}" for key in keys]
    if question.tag is not None:
        name, value = question.tag
        filters.append(f"u.tags ->> {given(name, 'text')} = {given(value, 'text')}")
    dimensions = [
        _DIMENSIONS[word]
        if word in _DIMENSIONS
        else "tag.key || ':' || tag.value"
        if word == TAG
        else f"u.tags ->> {given(word.removeprefix(TAG_NAMED), 'text')}"
        for word in question.group_by
    ]
    # An attempt of several tags is in several groups, and once in the sum.
    by_tags = TAG in question.group_by
    sql = _GROUPS.format(
        hold="materialized" if by_tags else "not materialized",
        source=source,
        at_work=_AT_WORK.format(**days),
        filters=" and ".join(filters) or "true",
        dimensions=f'array[{", ".join(dimensions)}]::text[] collate "C"',
        each="cross join lateral jsonb_each_text(u.tags) as tag" if by_tags else "",
        grouped="u.grouped" if by_tags else "true",
        summed="used" if by_tags else "grouped",
        counted="u.counted" if by_tags else "true",
        after=given(question.after, "text[]"),
        limit=given(question.limit + 1, "int"),
    )
    return Statement(
        source="counters" if kinds else "log",
        of_late=bool(kinds) and kinds != ["route_day"],
        sql=sql,
        arguments=tuple(arguments),
    )


def _counters(question: Question, given: Any) -> tuple[list[str], str]:
    """The kinds of counters that answer it exactly, and how each counts; no kinds: none do."""
    asked = {*question.group_by, *question.values}
    tags = {word for word in asked if word == TAG or word.startswith(TAG_NAMED)}
    if not tags and question.tag is None:
        if asked <= _ROUTE:
            return ["route_day"], _ROUTES
        # What is narrowed to a run or a step needs nothing of the rest.
        if asked <= _RUN:
            if "run" in question.values:
                return ["run_day"], _RUNS
            return ["run_day", "route_day"], f"{_RUNS} union all {_NOT_RUNS} union all {_REST}"
        if asked <= _STEP:
            if "step" in question.values:
                return ["step_day"], _STEPS
            parts = f"{_STEPS} union all {_NOT_STEPS} union all {_RUNS}"
            if "run" in question.values:
                return ["step_day", "run_day"], parts
            return ["step_day", "run_day", "route_day"], f"{parts} union all {_NOT_RUNS} union all {_REST}"
        return [], ""
    if not asked - tags <= _OF_ALL:
        return [], ""
    if tags == {TAG} and question.tag is None:
        return ["tag_day", "route_day"], (
            f"select {_NOTHING}, jsonb_build_object(c.names[1], c.names[2]), true, false, 1 where c.kind = 'tag_day'"
            f" union all select {_NOTHING}, null::jsonb, false, true, 1 where c.kind = 'route_day'"
        )
    named = {word.removeprefix(TAG_NAMED) for word in tags - {TAG}} | ({question.tag[0]} if question.tag else set())
    if TAG in tags or len(named) != 1:
        return [], ""
    (name,) = named
    parts = (
        f"select {_NOTHING}, jsonb_build_object(c.names[1], c.names[2]), true, true, 1"
        f" where c.kind = 'tag_day' and c.names[1] = {given(name, 'text')}"
    )
    if question.tag is not None:
        return ["tag_day"], parts
    return ["tag_day", "route_day"], (
        f"{parts} union all select {_NOTHING}, null::jsonb, true, true, -1"
        f" where c.kind = 'tag_day' and c.names[1] = {given(name, 'text')} union all {_REST}"
    )
