"""`tollbridge usage`: tokens and cost; corrections, and the provider's own books beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource
from rich.console import Console

from gateway.cli import reconcile, remote, resolve, tables
from gateway.cli.failure import Failed

_F = TypeVar("_F", bound=Callable[..., Any])


def _tag(_ctx: click.Context, _option: click.Parameter, given: str | None) -> str | None:
    if given is None:
        return None
    name, equals, value = given.partition("=")
    if not equals or not name:
        raise click.BadParameter("must be NAME=VALUE, such as team=search")
    return f"{name}:{value}"


#: Of these, one at least makes it a question of groups.
_OF_GROUPS: Final[tuple[Callable[[_F], _F], ...]] = (
    click.option("--by", "group_by", metavar="WORD,...", help="Group by day, model, tag:team, ... (see below)."),
    click.option("--from", "first", metavar="YYYY-MM-DD", help="The first day. Default: the first of the month."),
    click.option("--to", "last", metavar="YYYY-MM-DD", help="The last day. Default: today."),
    click.option("--key-id", "of_key", metavar="ID", help="Only what this API key used."),
    click.option("--provider", metavar="ID", help="Only attempts at this provider."),
    click.option("--model", metavar="NAME", help="Only attempts for this model, as it was asked for."),
    click.option("--upstream-model", metavar="NAME", help="Only attempts for this model, as the provider calls it."),
    click.option("--run", metavar="ID", help="Only this run."),
    click.option("--step", metavar="ID", help="Only this step."),
    click.option("--skill", metavar="NAME", help="Only this skill."),
    click.option("--tool", metavar="NAME", help="Only this tool."),
    click.option("--role", metavar="NAME", help="Only this role."),
    click.option("--tag", metavar="NAME=VALUE", callback=_tag, help="Only what has this tag."),
)


def _of_groups(command: _F) -> _F:
    for option in reversed(_OF_GROUPS):
        command = option(command)
    return command


@click.group("usage", invoke_without_command=True)
@click.option("--session", metavar="NAME", help="What this session has used.")
@click.option("--day", metavar="YYYY-MM-DD", help="Another day than today, in the gateway's zone.")
@_of_groups
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, all groups.")
@click.option("--jsonl", "as_jsonl", is_flag=True, help="Print one JSON object a group, and a last line that says so.")
@remote.options
@click.pass_context
def command(
    context: click.Context,
    /,
    session: str | None,
    day: str | None,
    first: str | None,
    last: str | None,
    of_key: str | None,
    url: str | None,
    key: str | None,
    as_csv: bool,
    as_jsonl: bool,
    as_json: bool,
    **others: str | None,
) -> None:
    """
    Show tokens and cost. A key with the scope `admin` sees everyone's, any other its own.

    "charged" is the exact sum of what is settled. An attempt whose end nobody saw is not in it: it is counted beside
    it as "unknown", with the most it can have cost. "reserved" is what attempts at work can still cost.

    With --by, a range or a filter: by group. Words of --by: day, month, key, provider, model, upstream_model, run,
    step, tag, tag:NAME, session, skill, tool, role, transport, status.

    \b
    Examples:
      tollbridge usage
      tollbridge usage --session nightly --json
      tollbridge usage --by provider,model --from 2026-11-01 --to 2026-11-30
      tollbridge usage --by day,tag:team --run nightly-7 --csv
      tollbridge usage reconcile costs.json
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
    if context.invoked_subcommand is not None:
        given = [name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if given:
            raise click.UsageError(f"options stand after {context.invoked_subcommand}: {', '.join(given)}")
        return
    if as_csv + as_jsonl + as_json > 1:
        raise click.UsageError("--csv, --jsonl and --json: give one of them")
    query = {"session": session, "day": day, "from": first, "to": last, "key": of_key, **others}
    with remote.reach(url, key) as gateway:
        if as_csv or as_jsonl:
            _export(gateway, {**query, "format": "csv" if as_csv else "jsonl"})
            return
        answer = _whole(gateway, query)
    if as_json:
        tables.json(answer)
    elif "groups" in answer:
        show_groups(tables.console(), answer)
    else:
        show(tables.console(), answer, session=session)


def _export(gateway: remote.Remote, query: Mapping[str, str | None]) -> None:
    """As it arrives. Raises `Failed` where it breaks off."""
    if query["format"] == "csv":
        for piece in gateway.pieces("/v1/usage", **query):
            click.echo(piece, nl=False)
        return
    line = b"{}"
    for line in gateway.lines("/v1/usage", **query):
        click.echo(line)
    if not remote.decode(line).get("end"):
        raise Failed("the answer broke off", hint="Try again.")


def _whole(gateway: remote.Remote, query: Mapping[str, str | None]) -> dict[str, Any]:
    """The answer with the groups of all its pages. Its sum is that of the first."""
    answer: dict[str, Any] = gateway.get("/v1/usage", **query)
    cursor = answer.pop("next_cursor", None)
    while cursor is not None:
        days = {name: str(answer[name]) for name in ("from", "to")}
        page = gateway.get("/v1/usage", **{**query, "day": None, **days, "cursor": cursor})
        answer["groups"] += page["groups"]
        cursor = page["next_cursor"]
    return answer


command.add_command(resolve.command)
command.add_command(reconcile.command)


def show(out: Console, answer: Mapping[str, Any], *, session: str | None = None) -> None:
    if session is not None and not answer["session"]["attempts"]:
        out.print(f"nothing is known of a session {session} of this key", markup=False)
    rows = []
    for name in ("session", "day", "total"):
        counter = answer.get(name)
        if counter is None:
            continue
        label = {"session": f"session {session}", "day": f"day {counter.get('day', '')}".strip()}.get(name, name)
        rows.append((label, *_cells(counter)))
    tables.table(out, "usage and cost", ("", *_COLUMNS), rows, numbers=_COLUMNS)


def show_groups(out: Console, answer: Mapping[str, Any]) -> None:
    words = answer["group_by"]
    rows: list[tuple[object, ...]] = [
        (*(group[word] for word in words), *_cells(group)) for group in answer["groups"] if words
    ]
    labels = ["sum", *[""] * (len(words) - 1)] if words else ["sum"]
    rows.append((*labels, *_cells(answer["sum"])))
    title = f"usage and cost from {answer['from']} to {answer['to']} ({answer['zone']})"
    tables.table(out, title, (*(words or [""]), *_COLUMNS), rows, numbers=_COLUMNS)
    if not answer["complete"]:
        why = "the log was cut" if answer["source"] == "log" else "runs, steps and tags were not counted before"
        out.print(f"Not all that was used is in it: {why}. It is whole from {answer['kept_from']} on.", markup=False)


_COLUMNS: Final = ("charged", "unknown", "reserved", "attempts", "input tokens", "output tokens")


def _cells(sums: Mapping[str, Any]) -> tuple[object, ...]:
    return (
        tables.usd(sums["charged_usd"]),
        _at_most(sums["unknown_attempts"], sums["unknown_upper_bound_usd"], sums["unbounded_attempts"]),
        _at_most(sums["reserved_attempts"], sums["reserved_usd"], sums["unbounded_reserved"]),
        sums["attempts"],
        sums["input_tokens"],
        sums["output_tokens"],
    )


def _at_most(attempts: int, usd: str, unbounded: int) -> str:
    """What attempts can have cost, and how many of them have no bound: "3, at most $0.02, 1 without bound"."""
    if not attempts:
        return "-"
    if unbounded >= attempts:
        return f"{attempts:,}, without bound"
    bound = f", {unbounded:,} without bound" if unbounded else ""
    return f"{attempts:,}, at most {tables.usd(usd)}{bound}"
