"""`tollbridge sessions`: what a session has used, and what it may cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import click
import msgspec
from rich.console import Console

from gateway.cli import remote, tables


@click.group("sessions")
def command() -> None:
    """
    Show what a session has used, and set what it may cost.

    A session is what the requests with one `session_id` of one API key are together.

    \b
    Examples:
      tollbridge sessions show nightly
      tollbridge sessions budget nightly 5.00
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines


_of_key = click.option("--of-key", metavar="ID", help="Whose session, for administrators: the id of its API key.")


@command.command("show")
@click.argument("session")
@_of_key
@remote.options
def show(session: str, of_key: str | None, url: str | None, key: str | None, as_json: bool) -> None:
    """
    Show what SESSION has used, what its attempts at work can still cost, and what is left of its budget.

    \b
    Example:
      tollbridge sessions show nightly
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
    with remote.reach(url, key) as gateway:
        answer = gateway.get(_path(session), key_id=of_key)
    _tell(answer, as_json=as_json)


@command.command("budget")
@click.argument("session")
@click.argument("usd", required=False)
@click.option("--none", "lifted", is_flag=True, help="Take back what was said before.")
@_of_key
@remote.options
def budget(
    session: str,
    usd: str | None,
    lifted: bool,
    of_key: str | None,
    url: str | None,
    key: str | None,
    as_json: bool,
) -> None:
    """
    Let SESSION cost at most USD, all its requests together.

    A key can only lower what its `budget_session_usd` allows. An administrator sets it for any key with `--of-key`,
    above that, too.

    \b
    Examples:
      tollbridge sessions budget nightly 5.00
      tollbridge sessions budget nightly --none
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
    if lifted is (usd is not None):
        raise click.UsageError("say what the session may cost: USD or --none")
    body = msgspec.json.encode({"budget_usd": usd})
    with remote.reach(url, key) as gateway:
        answer = gateway.put(_path(session), body, key_id=of_key)
    _tell(answer, as_json=as_json)


def _path(session: str) -> str:
    return f"/v1/sessions/{quote(session, safe='')}"


def _tell(answer: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        tables.json(answer)
    else:
        _table(tables.console(), answer)


def _table(out: Console, answer: Mapping[str, Any]) -> None:
    unknown, at_work = answer["unknown_attempts"], answer["reserved_attempts"]
    bound, reserved = tables.usd(answer["unknown_upper_bound_usd"]), tables.usd(answer["reserved_usd"])
    budget = answer["budget_usd"]
    rows = (
        ("key", answer["key_id"]),
        ("budget", "-" if budget is None else tables.usd(budget)),
        ("left of it", "-" if budget is None else tables.usd(answer["left_usd"])),
        ("charged", tables.usd(answer["charged_usd"])),
        ("unknown attempts", f"{unknown:,}, at most {bound}" if unknown else "-"),
        ("attempts at work", f"{at_work:,}, at most {reserved}" if at_work else "-"),
        ("attempts", answer["attempts"]),
        ("input tokens", answer["input_tokens"]),
        ("output tokens", answer["output_tokens"]),
        ("first attempt", answer["first_attempt_at"] or "-"),
        ("last attempt", answer["last_attempt_at"] or "-"),
    )
    tables.table(out, f"session {answer['id']}", ("", "this session"), rows)
