"""`tollbridge usage`: tokens and cost; corrections, and the provider's own books beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console

from gateway.cli import reconcile, remote, resolve, tables


@click.group("usage", invoke_without_command=True)
@click.option("--session", metavar="NAME", help="What this session has used.")
@click.option("--day", metavar="YYYY-MM-DD", help="Another day than today, in the gateway's zone.")
@remote.options
@click.pass_context
def command(
    context: click.Context, session: str | None, day: str | None, url: str | None, key: str | None, as_json: bool
) -> None:
    """
    Show tokens and cost. A key with the scope `admin` sees everyone's, any other its own.

    "charged" is the exact sum of what is settled. An attempt whose end nobody saw is not in it: it is counted beside
    it, with the most it can have cost.

    \b
    Examples:
      tollbridge usage
      tollbridge usage --session nightly --json
      tollbridge usage reconcile costs.json
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
    if context.invoked_subcommand is not None:
        given = [name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if given:
            raise click.UsageError(f"options stand after {context.invoked_subcommand}: {', '.join(given)}")
        return
    with remote.reach(url, key) as gateway:
        answer = gateway.get("/v1/usage", session_id=session, day=day)
    if as_json:
        tables.json(answer)
    else:
        show(tables.console(), answer, session=session)


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
        unknown = counter["unknown_attempts"]
        bound = counter["unknown_upper_bound_usd"]
        rows.append(
            (
                label,
                tables.usd(counter["charged_usd"]),
                counter["attempts"],
                counter["input_tokens"],
                counter["output_tokens"],
                f"{unknown:,}, at most {tables.usd(bound)}" if unknown else "-",
            )
        )
    tables.table(
        out,
        "usage and cost",
        ("", "charged", "attempts", "input tokens", "output tokens", "unknown attempts"),
        rows,
        numbers=("charged", "attempts", "input tokens", "output tokens", "unknown attempts"),
    )
