"""`tollbridge groups`: who occupies capacity, who waits and why, and what holds a group back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import click
import msgspec
from rich.console import Console

from gateway.cli import remote, tables

#: Why nothing is sent, and who has to do something about it.
_CAUSES = {
    "rate_limited": "the provider limits the rate",
    "credential_rejected": "the provider rejected {credential}: replace it, restart, reset the group",
    "quota_exhausted": "the quota of {credential} is exhausted: raise it, reset the group",
    "provider_unavailable": "the provider rejected {credential}, or its quota is exhausted: look for "
    "gateway.provider_left_out in the logs",
}
#: Why a breaker has opened.
_OPENED_FOR = {
    "transient": "failures",
    "slow": "late answers",
    "probe_undecided": "a probe that ended without a verdict",
    "probe_lost": "a probe that was lost",
}
#: Of the slots in quarantine, how many are told one by one when they come free.
_TOLD = 4


@click.group("groups", invoke_without_command=True)
@click.option("--slots", is_flag=True, help="Every occupied slot and who waits, too: whose it is and until when.")
@remote.options
@click.pass_context
def command(context: click.Context, slots: bool, url: str | None, key: str | None, as_json: bool) -> None:
    """
    Show the capacity groups: how many slots are occupied, how many requests wait, and whether the breaker is open.

    A slot is "quarantined" while nobody knows whether the provider still works on a call that broke or was cancelled.
    It counts, and it comes free by itself: "quarantine costs" says which share of the limit that is, and in how many
    seconds each slot comes free. "queued" is interactive + batch.

    \b
    Examples:
      tollbridge groups
      tollbridge groups --slots
      tollbridge groups reset https://api.openai.com
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
    if context.invoked_subcommand is not None:
        return
    with remote.reach(url, key) as gateway:
        answer = gateway.get("/v1/groups")
    if as_json:
        tables.json(answer)
        return
    out = tables.console()
    show(out, answer["groups"])
    _show_floors(out, answer["groups"])
    _show_breakers(out, answer["groups"])
    if slots:
        _show_slots(out, answer["groups"])
        _show_waiting(out, answer["groups"])


@command.command("reset")
@click.argument("group")
@remote.options
def reset(group: str, url: str | None, key: str | None, as_json: bool) -> None:
    """
    Close the breaker of GROUP and forget why its providers were left alone. Needs the scope `admin`.

    GROUP is its name, or an endpoint that no other group has. Jobs that were told to come back later, and wait for
    it, are due at once.

    For when you know better than the cooldown: the outage is over, the quota was raised, the credential is good
    again. Slots in quarantine stay: the provider may still work on them.

    \b
    Example:
      tollbridge groups reset https://api.openai.com
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
    with remote.reach(url, key) as gateway:
        answer = gateway.post("/v1/groups/reset", msgspec.json.encode({"group": group}))
    if as_json:
        tables.json(answer)
        return
    click.echo(f"{answer['group']} is reset: its breaker is closed.")


def show(out: Console, groups: Sequence[Mapping[str, Any]]) -> None:
    tables.table(
        out,
        "capacity groups",
        (
            "group",
            "providers",
            "limit",
            "active",
            "quarantined",
            "quarantine costs",
            "queued",
            "queue limit",
            "wait",
            "breaker",
        ),
        [
            (
                group["group"],
                ", ".join(place["provider"] for place in group.get("endpoints", ()) if place["provider"]) or None,
                group["concurrency"],
                group["active"],
                group["quarantined"],
                quarantine(group),
                queued(group),
                group["queue_bound"],
                seconds(group.get("expected_wait_s")),
                breaker(group),
            )
            for group in groups
        ],
        numbers=("limit", "active", "quarantined", "queued", "queue limit", "wait"),
    )


def breaker(group: Mapping[str, Any]) -> str:
    if group["breaker"] == "open" and group["cooldown_s"]:
        return f"open for {group['cooldown_s']} s more"
    return str(group["breaker"])


def quarantine(group: Mapping[str, Any]) -> str | None:
    """Which share of the limit is held back, and when it comes free: "25 %: 12 s, 40 s"."""
    cost = group.get("quarantine")
    if not cost or not cost["slots"]:
        return None
    share = "0 %" if not cost["share"] else f"{float(cost['share']):.0%}".replace("%", " %")
    frees = list(cost["frees_in_s"])
    told = [seconds(left) for left in (frees if len(frees) <= _TOLD else frees[: _TOLD - 1])]
    if len(frees) > _TOLD:
        told.append(f"the last {seconds(frees[-1])}")
    return f"{share}: {', '.join(map(str, told))}" if told else share


def queued(group: Mapping[str, Any]) -> str:
    by_class = group.get("queued_by_class")
    if not by_class or not by_class["batch"]:
        return tables.shown(group["queued"])
    return f"{by_class['interactive']:,} + {by_class['batch']:,}"


def seconds(value: Any) -> str | None:
    return None if value is None else f"{round(float(value), 1):g} s"


def _show_floors(out: Console, groups: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (
            group["group"],
            ", ".join(floor["providers"]) or None,
            floor["model"] or "all",
            _CAUSES.get(floor["cause"], "{cause}").format(
                **{**floor, "credential": floor.get("credential") or "the gateway's credential"}
            ),
            seconds(floor["remaining_s"]),
            moment(floor["until"]),
        )
        for group in groups
        for floor in group.get("floors", ())
    ]
    if rows:
        columns = ("group", "provider", "model", "why", "for", "until")
        tables.table(out, "nothing is sent there", columns, rows, numbers=("for",))


def _show_breakers(out: Console, groups: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (
            group["group"],
            group["openings"],
            _OPENED_FOR.get(group["opened_for"], group["opened_for"]),
            moment(group["open_since"]),
        )
        for group in groups
        if group.get("openings")
    ]
    if rows:
        columns = ("group", "times", "the last time for", "open since")
        tables.table(out, "breakers that have opened", columns, rows, numbers=("times",))


def _show_slots(out: Console, groups: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (
            group["group"],
            slot["state"],
            slot.get("class"),
            slot["model"],
            slot.get("key_id"),
            slot["debit_id"],
            slot["attempt"],
            f"{slot['host']}:{slot['pid']}" if slot["host"] else None,
            moment(slot["since"]),
            moment(slot["quarantined_until"] or slot["hard_deadline"]),
        )
        for group in groups
        for slot in group["slots"]
    ]
    columns = ("group", "state", "class", "model", "key", "debit", "attempt", "process", "since", "until at most")
    tables.table(out, "occupied slots", columns, rows, numbers=("attempt",))


def _show_waiting(out: Console, groups: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (
            group["group"],
            waiting["position"],
            waiting["class"],
            waiting["model"],
            waiting["reason"],
            moment(waiting["since"]),
            seconds(waiting.get("expected_wait_s")),
            waiting["debit_id"],
        )
        for group in groups
        for waiting in group.get("waiting", ())
    ]
    if rows:
        columns = ("group", "place", "class", "model", "why", "since", "wait", "debit")
        tables.table(out, "who waits, the first of each group", columns, rows, numbers=("place", "wait"))


def moment(text: str | None) -> str | None:
    """A time of today's table: to the second, in the time zone of who reads it."""
    return None if text is None else datetime.fromisoformat(text).astimezone().strftime("%H:%M:%S")
