"""`tollbridge groups`: who occupies capacity, who waits and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.console import Console

from gateway.cli import remote, tables


@click.command("groups")
@click.option("--slots", is_flag=True, help="Every occupied slot, too: whose it is and until when at most.")
@remote.options
def command(slots: bool, url: str | None, key: str | None, as_json: bool) -> None:
    """
    Show the capacity groups: how many slots are occupied, how many requests wait, and whether the breaker is open.

    A slot is "quarantined" while nobody knows whether the provider still works on a call that broke or was cancelled.
    It counts, and it comes free by itself.

    \b
    Examples:
      tollbridge groups
      tollbridge groups --slots
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
    with remote.reach(url, key) as gateway:
        answer = gateway.get("/v1/groups")
    if as_json:
        tables.json(answer)
        return
    out = tables.console()
    show(out, answer["groups"])
    if slots:
        _show_slots(out, answer["groups"])


def show(out: Console, groups: Sequence[Mapping[str, Any]]) -> None:
    tables.table(
        out,
        "capacity groups",
        ("group", "active", "quarantined", "limit", "queued", "queue limit", "breaker"),
        [
            (
                group["group"],
                group["active"],
                group["quarantined"],
                group["concurrency"],
                group["queued"],
                group["queue_bound"],
                breaker(group),
            )
            for group in groups
        ],
        numbers=("active", "quarantined", "limit", "queued", "queue limit"),
    )


def breaker(group: Mapping[str, Any]) -> str:
    if group["breaker"] == "open" and group["cooldown_s"]:
        return f"open for {group['cooldown_s']} s more"
    return str(group["breaker"])


def _show_slots(out: Console, groups: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (
            group["group"],
            slot["state"],
            slot["model"],
            slot["debit_id"],
            slot["attempt"],
            f"{slot['host']}:{slot['pid']}" if slot["host"] else None,
            slot["since"],
            slot["quarantined_until"] or slot["hard_deadline"],
        )
        for group in groups
        for slot in group["slots"]
    ]
    columns = ("group", "state", "model", "debit", "attempt", "process", "since", "until at most")
    tables.table(out, "occupied slots", columns, rows, numbers=("attempt",))
