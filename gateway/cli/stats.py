"""`tollbridge stats`: cost, rates and latencies of a range, by what you like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
from rich.console import Console

from gateway.cli import invocations, remote, tables


@click.command("stats")
@click.option(
    "--by",
    "group_by",
    metavar="WORDS",
    help="Up to three, with commas: key, provider, model, upstream_model, run, step, session, skill, tool, role,"
    " transport, status, error_code, hour, day, tag:NAME.",
)
@click.option("--order", type=click.Choice(["cost", "count"]), default="cost", help="Which groups come first.")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Groups.")
@invocations.filters
@remote.options
def command(
    group_by: str | None,
    order: str,
    limit: int,
    url: str | None,
    key: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """
    Show cost, rates and latencies of the last 24 hours, or of a range. A key with the scope `admin` sees everyone's.

    Latencies are of the successes, in ms: half, 90 % and 99 % of them took no longer. "unknown" are attempts of which
    nobody knows what they cost; they are not in the cost.

    \b
    Examples:
      tollbridge stats --by provider,model
      tollbridge stats --by tag:team --from 2026-11-01 --to 2026-11-30
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
    with remote.reach(url, key) as gateway:
        answer = gateway.get("/v1/stats", **invocations.query(given), group_by=group_by, order=order, limit=limit)
    if as_json:
        tables.json(answer)
    else:
        show(tables.console(), answer)


def show(out: Console, answer: Mapping[str, Any]) -> None:
    words = answer["group_by"]
    numbers = (
        "attempts",
        "requests",
        "cost",
        "unknown",
        "input",
        "output",
        "errors",
        "cancelled",
        "fallbacks",
        "retries",
        "first byte ms",
        "total ms",
        "queued ms",
    )
    tables.table(
        out,
        f"statistics from {answer['from'] or 'the beginning'} to {answer['to'] or 'now'}",
        (*(words or ("",)), *numbers),
        [
            *((*(group[word] for word in words), *_cells(group)) for group in answer["groups"]),
            ("all", *("" for _ in words[1:]), *_cells(answer["all"])),
        ],
        numbers=numbers,
    )
    left = answer["groups_in_all"] - len(answer["groups"])
    if left > 0:
        out.print(f"{left:,} more groups: --limit shows more", markup=False)


def _cells(sums: Mapping[str, Any]) -> tuple[object, ...]:
    return (
        sums["attempts"],
        sums["requests"],
        tables.usd(sums["charged_usd"]),
        sums["unknown_attempts"] or None,
        sums["input_tokens"],
        sums["output_tokens"],
        *(_share(sums[f"{name}_rate"]) for name in ("error", "cancel", "fallback", "retry")),
        *(_times(sums[name]) for name in ("first_byte_ms", "total_ms", "queued_ms")),
    )


def _share(rate: Any) -> str | None:
    return None if rate is None else f"{float(rate):.1%}".replace("%", " %")


def _times(percentiles: Mapping[str, Any]) -> str | None:
    """Half, 90 % and 99 %."""
    if percentiles["p50"] is None:
        return None
    return " / ".join(f"{percentiles[name]:,}" for name in ("p50", "p90", "p99"))
