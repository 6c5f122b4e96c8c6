"""`tollbridge jobs`: submit work as JSONL, follow it, fetch its results."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gateway.cli import remote, tables
from gateway.cli.failure import Failed

STATUSES = ("queued", "running", "succeeded", "failed", "cancelled", "expired")
ENDED = frozenset({"succeeded", "failed", "cancelled", "expired"})
#: Jobs of one page of the list.
PAGE = 1000
#: Seconds between two looks at a submission that is being watched; at least so many times what a look takes.
LOOK_S, LOOK_SHARE = 0.25, 5.0


@click.group("jobs")
def command() -> None:
    """
    Submit work now, collect it later.

    A submission is a file in the OpenAI batch input format: one JSON object a line with `custom_id`, `method`, `url`
    and `body`; beside them `session_id`, `class`, `deadline_s` and `max_attempts`, if wanted. Each line becomes a job
    that is stored before it is acknowledged and ends exactly once. A line that cannot be taken does not hold up its
    neighbours: it is reported with its number.

    \b
    Example:
      tollbridge jobs submit requests.jsonl --watch
      tollbridge jobs results SUBMISSION -o results.jsonl
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines


@command.command("submit")
@click.argument("file", type=click.File("rb"))
@click.option("--watch", is_flag=True, help="Wait for the end of every job and show progress.")
@click.option("--session", metavar="NAME", help="Count the cost to this session, on lines that name none themselves.")
@click.option("--idempotency-key", metavar="KEY", help="Makes it safe to repeat: the same key, the same submission.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="With --watch: results go here.")
@remote.options
def submit(
    file: BinaryIO,
    watch: bool,
    session: str | None,
    idempotency_key: str | None,
    output: Path | None,
    url: str | None,
    key: str | None,
    as_json: bool,
) -> None:
    """
    Submit the jobs in FILE ("-" reads standard input).

    With --watch the exit status is 0 only if every job succeeded.

    \b
    Examples:
      tollbridge jobs submit requests.jsonl
      tollbridge jobs submit requests.jsonl --session nightly --watch -o results.jsonl
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
    if output is not None and not watch:
        raise click.UsageError("--output needs --watch: there are no results before the jobs have ended")
    content = file.read()
    if session is not None:
        content = with_session(content, session)
    headers = {"idempotency-key": idempotency_key} if idempotency_key else {}
    with remote.reach(url, key) as gateway:
        receipt = gateway.post("/v1/jobs", content, media_type="application/x-ndjson", headers=headers)
        submission = receipt["submission_id"]
        out = tables.console()
        if as_json and not watch:
            tables.json(receipt)
            return
        if not as_json:
            out.print(f"submission {submission}: {receipt['accepted']:,} accepted, {receipt['rejected']:,} refused")
            show_refused(out, receipt["errors"])
        if not watch:
            out.print(f"Next: tollbridge jobs results {submission}", style="dim")
            return
        total = receipt["accepted"] + receipt["rejected"]
        counted = watch_submission(gateway, submission, total, out=Console(stderr=True, quiet=as_json))
        if output is not None:
            write_results(gateway, output, submission_id=submission)
        if as_json:
            tables.json({**receipt, "statuses": counted})
        else:
            show_statuses(out, counted)
            where = str(output) if output else f"tollbridge jobs results {submission}"
            out.print(f"results: {where}", style="dim")
    if counted.keys() - {"succeeded"}:
        raise Failed(f"{sum(counted.values()) - counted.get('succeeded', 0):,} jobs did not succeed")


@command.command("get")
@click.argument("job_id")
@click.option("--wait", type=click.FloatRange(0), default=0, metavar="SECONDS", help="Wait that long for its end.")
@remote.options
def get(job_id: str, wait: float, url: str | None, key: str | None, as_json: bool) -> None:
    """
    Show one job: its status, who served it, what it cost, or why it waits.

    \b
    Example:
      tollbridge jobs get 0198c0de-... --wait 30
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
    until = time.monotonic() + wait
    with remote.reach(url, key) as gateway:
        while True:
            # The gateway has a longest wait of its own.
            wait_s = max(0.0, min(until - time.monotonic(), 25.0))
            job = gateway.get(f"/v1/jobs/{job_id}", wait=f"{wait_s:.1f}" if wait_s else None)
            if job["status"] in ENDED or time.monotonic() >= until:
                break
    if as_json:
        tables.json(job)
    else:
        show_job(tables.console(), job)


@command.command("list")
@click.option("--status", type=click.Choice(STATUSES), help="Only these.")
@click.option("--session", metavar="NAME", help="Only of this session.")
@click.option("--submission", metavar="ID", help="Only of this submission.")
@click.option("--custom-id", metavar="ID", help="Only with this custom_id.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=50, show_default=True, help="At most so many.")
@remote.options
def list_(
    status: str | None,
    session: str | None,
    submission: str | None,
    custom_id: str | None,
    limit: int,
    url: str | None,
    key: str | None,
    as_json: bool,
) -> None:
    """
    List jobs, oldest first.

    \b
    Example:
      tollbridge jobs list --status failed
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
    filters = {"status": status, "session_id": session, "submission_id": submission, "custom_id": custom_id}
    with remote.reach(url, key) as gateway:
        found: list[dict[str, Any]] = []
        more = False
        for job in all_jobs(gateway, filters):
            if len(found) == limit:
                more = True
                break
            found.append(job)
    if as_json:
        tables.json(found)
        return
    out = tables.console()
    tables.table(
        out,
        "jobs",
        ("id", "custom_id", "status", "model", "attempts", "cost", "why"),
        [
            (
                job["id"],
                job["custom_id"],
                styled(job["status"]),
                job["model"],
                job["attempts"],
                tables.usd(job["cost_usd"]) if job["status"] in ENDED and job["attempts"] else None,
                why(job),
            )
            for job in found
        ],
        numbers=("attempts", "cost"),
    )
    if more:
        out.print(f"There are more than {limit:,}: --limit shows more, --status and --submission fewer.", style="dim")


@command.command("cancel")
@click.argument("job_ids", nargs=-1, required=True, metavar="JOB_ID...")
@remote.options
def cancel(job_ids: Sequence[str], url: str | None, key: str | None, as_json: bool) -> None:
    """
    Take jobs back.

    A job that waits ends at once. One that runs ends when its provider's call has been given up; what that call cost
    is settled all the same. A job that has ended stays as it is.

    \b
    Example:
      tollbridge jobs cancel 0198c0de-... 0198c0df-...
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
    with remote.reach(url, key) as gateway:
        jobs = [gateway.post(f"/v1/jobs/{job_id}/cancel") for job_id in job_ids]
    if as_json:
        tables.json(jobs)
        return
    for job in jobs:
        note = " (asked for)" if job["status"] not in ENDED and job["cancel_requested"] else ""
        click.echo(f"{job['id']}: {job['status']}{note}")


@command.command("results")
@click.argument("submission", required=False)
@click.option("--status", type=click.Choice(sorted(ENDED)), help="Only these.")
@click.option("--session", metavar="NAME", help="Only of this session.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write here; default: stdout.")
@remote.options
def results(
    submission: str | None,
    status: str | None,
    session: str | None,
    output: Path | None,
    url: str | None,
    key: str | None,
    as_json: bool,
) -> None:
    """
    Fetch the results of jobs that have ended, as JSONL in the OpenAI batch output format.

    Lines are joined to requests by `custom_id`, or by `line` where a request could not be read. Without SUBMISSION:
    every result of this key.

    \b
    Example:
      tollbridge jobs results SUBMISSION -o results.jsonl
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
    filters = {"submission_id": submission, "status": status, "session_id": session}
    with remote.reach(url, key) as gateway:
        if output is not None:
            written = write_results(gateway, output, **filters)
            if as_json:
                tables.json({"results": written, "file": str(output)})
            else:
                click.echo(f"{written:,} results in {output}")
            return
        for line in gateway.lines("/v1/jobs/results", **filters):
            sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()


# ------------------------------------------------------------------ what they share, with the demo too


def all_jobs(gateway: remote.Remote, filters: Mapping[str, str | None]) -> Iterator[dict[str, Any]]:
    cursor: str | None = None
    while True:
        page = gateway.get("/v1/jobs", limit=PAGE, cursor=cursor, **filters)
        yield from page["data"]
        if not page["has_more"]:
            return
        cursor = page["next_cursor"]


def with_session(content: bytes, session: str) -> bytes:
    """Adds `session_id` to each line that names none. A line that cannot be read is sent as it is."""
    lines = content.split(b"\n")
    for place, line in enumerate(lines):
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            members = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
            if "session_id" not in members:
                members["session_id"] = msgspec.Raw(msgspec.json.encode(session))
                lines[place] = msgspec.json.encode(members)
    return b"\n".join(lines)


def show_refused(out: Console, errors: Sequence[Mapping[str, Any]]) -> None:
    if errors:
        tables.table(
            out,
            "lines that were refused",
            ("line", "custom_id", "code", "what is wrong", "where"),
            [(e["line"], e["custom_id"], e["code"], e["message"], e["param"]) for e in errors],
            numbers=("line",),
        )


def show_statuses(out: Console, counted: Mapping[str, int]) -> None:
    rows = [(styled(status), counted[status]) for status in STATUSES if counted.get(status)]
    tables.table(out, "jobs by outcome", ("status", "jobs"), rows, numbers=("jobs",))


def show_job(out: Console, job: Mapping[str, Any]) -> None:
    route, usage, error = job["route"] or {}, job["usage"] or {}, job["error"]
    fields = [
        ("job", job["id"]),
        ("custom_id", job["custom_id"]),
        ("status", styled(job["status"])),
        ("why", why(job)),
        ("model", job["model"]),
        ("served by", f"{route['provider']}/{route['model']}" if route else None),
        ("attempts", job["attempts"]),
        ("input tokens", usage.get("input_total")),
        ("output tokens", usage.get("output_total")),
        ("cost", tables.usd(job["cost_usd"]) if job["attempts"] else None),
        ("submitted", job["created_at"]),
        ("ended", job["ended_at"]),
    ]
    tables.table(out, "", ("", ""), fields)
    if error is None and job["status"] == "succeeded":
        out.print("Its answer: --json, or `tollbridge jobs results`.", style="dim")


def why(job: Mapping[str, Any]) -> str | None:
    """Why it failed, or why it waits."""
    if job["error"] is not None:
        error = job["error"]
        where = f" ({error['param']})" if error["param"] else ""
        return f"{error['code']}: {error['message']}{where}"
    if job["waiting"] is None:
        return None
    waiting = job["waiting"]
    parts = [f"waits for {waiting['reason']}"]
    if waiting["group"]:
        parts.append(f"of {waiting['group']}")
    if waiting["position"]:
        parts.append(f"at position {waiting['position']}")
    if waiting["until"]:
        parts.append(f"until {waiting['until']}")
    return " ".join(parts)


def styled(status: str) -> Any:
    style = {"succeeded": "green", "failed": "red", "running": "cyan"}.get(status, "yellow")
    return tables.text(status, style)


@contextlib.contextmanager
def progress(total: int, *, out: Console) -> Iterator[Any]:
    """A bar on a terminal, a line a change elsewhere: yields what takes (ended, note)."""
    if not out.is_terminal:
        told = [-1]

        def tell(ended: int, note: str = "") -> None:
            if ended != told[0]:
                told[0] = ended
                out.print(f"{ended:>6} of {total} ended  {note}".rstrip(), style="dim")

        yield tell
        return
    columns = (
        TextColumn("jobs"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=out, transient=False) as bar:
        task = bar.add_task("", total=total, note="")
        yield lambda ended, note="": bar.update(task, completed=ended, note=note)


def watch_submission(
    gateway: remote.Remote, submission: str, total: int, *, out: Console, note: Callable[[], str] = str
) -> dict[str, int]:
    """Until every job of the submission has ended, with progress on `out`; how many ended how."""
    with progress(total, out=out) as tell:
        while True:
            began = time.monotonic()
            counted = Counter(job["status"] for job in all_jobs(gateway, {"submission_id": submission}))
            ended = sum(counted[status] for status in ENDED)
            tell(ended, note() or f"{counted['running']} running")
            if ended >= total:
                return dict(counted)
            # Looking at a large submission takes its time; it must not be most of what the gateway does.
            time.sleep(max(LOOK_S, LOOK_SHARE * (time.monotonic() - began)))


def write_results(gateway: remote.Remote, path: Path, **filters: str | None) -> int:
    """The results into a file, which is there whole or not at all; how many there are."""
    count = 0
    whole = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with whole.open("wb") as file:
            for line in gateway.lines("/v1/jobs/results", **filters):
                file.write(line + b"\n")
                count += 1
        whole.replace(path)
    except OSError as error:
        raise Failed(f"{path} cannot be written: {error.strerror}") from error
    finally:
        whole.unlink(missing_ok=True)
    return count
