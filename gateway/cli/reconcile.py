"""`tollbridge usage reconcile`: the gateway's ledger beside a provider's exported usage or cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from rich.console import Console

from gateway.cli import remote, tables
from gateway.cli.failure import Failed
from gateway.rest.exports import csv_line
from metering.cost import decimal_string
from metering.exports.lines import Export, Line, Refused
from metering.exports.reading import read
from metering.reconciliation import Apart, Reconciliation, Row, Tolerance, Used, compare, renamed

#: Names of the time zone in which providers count days.
_UTC: Final = frozenset({"UTC", "Etc/UTC", "UCT", "Etc/UCT", "GMT", "Etc/GMT", "Zulu", "Etc/Zulu", "Universal"})
#: Attempts of unknown cost that are told of one row; the rest is counted.
_SHOWN: Final = 20


class _Trouble(Failed):
    """Nothing was compared. Exit status 1 says that something differs."""

    exit_code = 2


class _Range(msgspec.Struct, frozen=True):
    """Days, both included."""

    first: date
    last: date


class _Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One of ours whose cost is not known."""

    ticket_id: str
    granted_at: str
    upper_bound_usd: Decimal | None = None


class _Found(msgspec.Struct, frozen=True, kw_only=True):
    """All that is told."""

    days: _Range
    by: str
    zone: str
    providers: list[str]
    exports: list[Export]
    tolerance: Tolerance
    result: Reconciliation
    #: By place in `result.rows`, attempts that can be its difference, and how many more there are.
    unknown: dict[int, tuple[list[_Attempt], bool]]
    notes: list[str]
    #: The gateway's side is whole.
    complete: bool

    @property
    def agrees(self) -> bool:
        return self.result.agrees and self.complete and self.whole

    @property
    def whole(self) -> bool:
        """Of each form the last page is there, which says that there are no more."""
        forms = {export.form for export in self.exports}
        return all(any(export.whole for export in self.exports if export.form is form) for form in forms)


def _day(_ctx: click.Context, _option: click.Parameter, given: str | None) -> date | None:
    try:
        return date.fromisoformat(given) if given else None
    except ValueError:
        raise click.BadParameter("must be a day as YYYY-MM-DD") from None


def _pairs(_ctx: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{one}: must have the form NAME=VALUE")
        found[name] = value
    return found


def _tolerance(ctx: click.Context, option: click.Parameter, given: tuple[str, ...]) -> Tolerance:
    asked: dict[str, Any] = {}
    for name, text in _pairs(ctx, option, given).items():
        if name not in Tolerance.__struct_fields__:
            raise click.BadParameter(f"{name}: is none of {', '.join(Tolerance.__struct_fields__)}")
        try:
            value = Decimal(text)
        except InvalidOperation:
            raise click.BadParameter(f"{name}: {text!r} is no number") from None
        whole = name == "tokens"
        if not value.is_finite() or value < 0 or (whole and value != value.to_integral_value()):
            raise click.BadParameter(f"{name}: must be {'a whole number' if whole else 'a number'} from 0")
        asked[name] = int(value) if whole else value
    return Tolerance(**asked)


@click.command("reconcile")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--provider", "providers", multiple=True, metavar="NAME", help="The file is of this provider of ours.")
@click.option("--from", "first", callback=_day, metavar="YYYY-MM-DD", help="First day. Default: the export's.")
@click.option("--to", "last", callback=_day, metavar="YYYY-MM-DD", help="Last day. Default: the export's.")
@click.option("--by", type=click.Choice(["day", "range"]), help="Compare day by day, or the sums of the range.")
@click.option(
    "--only", multiple=True, callback=_pairs, metavar="FIELD=VALUE", help="Of the export, e.g. project_id=proj_1."
)
@click.option(
    "--same", multiple=True, callback=_pairs, metavar="THEIRS=OURS", help="A model with another name in the export."
)
@click.option(
    "--tolerance", multiple=True, callback=_tolerance, metavar="NAME=NUMBER", help="usd=0.01, percent=0.5, tokens=0."
)
@click.option("--all", "everything", is_flag=True, help="Show what agrees, too.")
@click.option("--csv", "as_csv", is_flag=True, help="Print the rows as CSV.")
@remote.options
@click.pass_context
def command(
    ctx: click.Context,
    *,
    files: tuple[Path, ...],
    providers: tuple[str, ...],
    first: date | None,
    last: date | None,
    by: str | None,
    only: dict[str, str],
    same: dict[str, str],
    tolerance: Tolerance,
    everything: bool,
    as_csv: bool,
    url: str | None,
    key: str | None,
    as_json: bool,
) -> None:
    """
    Compare the ledger with a provider's exported usage or cost, and print what differs.

    FILE is a page of OpenAI's costs or usage API or of Anthropic's cost or usage report (JSON, one page, a list, or a
    page a line), or the CSV of their dashboards. Give one of costs and one of usage together to compare money and
    tokens. The key needs the scopes `usage:read` and `admin`: the provider's books are of everybody.

    Amounts that are apart by at most 0.01 USD or 0.5 % of the provider's are equal; tokens must be equal. Exit status:
    0 all agrees, 1 something differs, 2 nothing could be compared.

    \b
    Examples:
      tollbridge usage reconcile costs.json
      tollbridge usage reconcile costs.csv usage.csv --only project_id=proj_1
      tollbridge usage reconcile november.csv --provider anthropic --tolerance usd=0 --tolerance percent=0 --json
    """  # noqa: D301  a real backspace: click keeps the paragraph's lines
    if as_csv and as_json:
        raise click.UsageError("--csv and --json: give one of them")
    try:
        exports = read([(str(path), path.read_bytes()) for path in files])
        exports, days = _narrowed(exports, only=only, first=first, last=last)
        with remote.reach(url, key) as gateway:
            found = _reconcile(gateway, exports, days, by=by, providers=providers, same=same, tolerance=tolerance)
    except (Refused, OSError) as refused:
        raise _Trouble(str(refused)) from refused
    except Failed as failed:
        raise _Trouble(failed.message, code=failed.code, hint=failed.hint) from failed
    if as_json:
        tables.json(_plain(found, everything=everything))
    elif as_csv:
        click.echo(_table(found, everything=everything), nl=False)
        click.echo(_verdict(found), err=True)
    else:
        _show(tables.console(), found, everything=everything)
    ctx.exit(0 if found.agrees else 1)


def _narrowed(
    exports: Sequence[Export], *, only: Mapping[str, str], first: date | None, last: date | None
) -> tuple[list[Export], _Range]:
    """The exports with what is not asked for told apart, and the range. Raises `Failed`."""
    starts = [export.first for export in exports if export.first is not None]
    ends = [export.last for export in exports if export.last is not None]
    if (first is None or last is None) and not starts:
        raise Failed("the export has no day", hint="Say which it should have: --from and --to.")
    first = first or min(starts).date()
    last = last or (max(ends) - timedelta(microseconds=1)).date()
    if first > last:
        raise Failed(f"the range begins on {first} and ends on {last}")
    found = []
    for export in exports:
        for name in only:
            if export.lines and not any(name in line.dimensions for line in export.lines):
                raise Failed(
                    f"{export.file}: is not grouped by {name}, so that --only cannot choose",
                    hint="Its lines have: "
                    + (", ".join(sorted({n for o in export.lines for n in o.dimensions})) or "none"),
                )
        lines = [_chosen(line, only, first, last) for line in export.lines]
        found.append(msgspec.structs.replace(export, lines=lines))
    return found, _Range(first, last)


def _chosen(line: Line, only: Mapping[str, str], first: date, last: date) -> Line:
    apart = line.apart
    for name, value in only.items():
        if line.dimensions.get(name, "") != value:
            apart = f"not of {name}={value}"
    if not first <= line.day <= last:
        apart = f"outside of {first} to {last}"
    return msgspec.structs.replace(line, apart=apart) if apart != line.apart else line


def _reconcile(
    gateway: remote.Remote,
    exports: Sequence[Export],
    days: _Range,
    *,
    by: str | None,
    providers: Sequence[str],
    same: Mapping[str, str],
    tolerance: Tolerance,
) -> _Found:
    """Ask the gateway and compare. Raises `Failed`, `Refused`."""
    # Any other key would be told what it used itself, and nothing in the answer says so.
    gateway.get("/v1/keys", limit=1)
    host = exports[0].form.host
    chosen = sorted(providers) or _providers_at(gateway, host)
    ours, at_work, zone, complete = _used(gateway, days, set(chosen))
    _known(gateway, providers, ours)
    notes = [note for export in exports for note in export.notes]
    if zone not in _UTC:
        if by == "day":
            raise Failed(
                f"the gateway counts days in {zone}, providers in UTC: they cannot be compared one by one",
                hint="Compare the sums with --by range.",
            )
        by = "range"
        notes.append(
            f"the gateway counts days in {zone}, the provider in UTC: the sums of the range are compared, and what was"
            " used near its ends may be in one of them alone"
        )
    by = by or "day"
    notes += _edges(exports, days)
    if at_work:
        notes.append(f"{at_work} attempts of the range are still at work")
    if not complete:
        notes.append("the gateway says that it does not have all that was used in the range")
    lines = renamed([line for export in exports for line in export.lines], same)
    try:
        result = compare(
            ours,
            lines,
            by_day=by == "day",
            money=any(export.form.money for export in exports),
            tokens=any(not export.form.money for export in exports),
            tolerance=tolerance,
        )
    except ValueError as error:
        raise Refused(exports[0].file, str(error)) from error
    if not result.rows:
        raise Failed(
            f"there is nothing to compare from {days.first} to {days.last}: neither side has a line",
            hint="Look at --from, --to and --only.",
        )
    return _Found(
        days=days,
        by=by,
        zone=zone,
        providers=chosen,
        exports=list(exports),
        tolerance=tolerance,
        result=result,
        unknown={
            place: _unknown(gateway, row, days, chosen) for place, row in enumerate(result.rows) if row.unknown_fit
        },
        notes=notes,
        complete=complete,
    )


def _known(gateway: remote.Remote, providers: Sequence[str], ours: Sequence[Used]) -> None:
    """Raises `Failed` for a provider that is not configured and was not used in the range."""
    used = {one.provider for one in ours}
    groups = gateway.get("/v1/groups")["groups"] if providers else ()
    configured = {endpoint["provider"] for group in groups for endpoint in group.get("endpoints") or ()}
    if strange := sorted(set(providers) - used - configured):
        there = ", ".join(sorted(configured | used)) or "none"
        raise Failed(f"there is no provider {strange[0]}, and was none in the range", hint=f"There are: {there}.")


def _providers_at(gateway: remote.Remote, host: str) -> list[str]:
    """The gateway's providers at this host. Raises `Failed` where there is none."""
    found = set()
    for group in gateway.get("/v1/groups")["groups"]:
        for endpoint in group.get("endpoints") or ():
            if endpoint["endpoint"].partition("://")[2].rpartition(":")[0] == host:
                found.add(endpoint["provider"])
    if not found:
        raise Failed(f"this gateway has no provider at {host}", hint="Say which one the file is of: --provider NAME.")
    return sorted(found)


def _used(gateway: remote.Remote, days: _Range, providers: set[str]) -> tuple[list[Used], int, str, bool]:
    """
    What the ledger has of these providers, how many attempts are at work, its zone, and whether it is whole.

    Raises `Failed`.
    """
    query = {"group_by": "day,provider,upstream_model", "from": str(days.first), "to": str(days.last)}
    found: list[Used] = []
    at_work, complete = 0, True
    while True:
        answer = gateway.get("/v1/usage", **query)
        try:
            groups = [group for group in answer["groups"] if group["provider"] in providers]
            found += msgspec.convert(groups, list[Used], strict=False)
            at_work += sum(group["reserved_attempts"] for group in groups)
            complete = complete and answer["complete"]
            zone, cursor = answer["zone"], answer["next_cursor"]
        except (KeyError, TypeError, msgspec.ValidationError) as error:
            raise Failed(f"the gateway's answer is not understood: {error}", hint="Is it another version?") from error
        if cursor is None:
            return found, at_work, zone, complete
        query["cursor"] = cursor


def _edges(exports: Sequence[Export], days: _Range) -> list[str]:
    """Days that are in an export only in part."""
    notes = []
    for export in exports:
        for moment, word in ((export.first, "begins"), (export.last, "ends")):
            if moment is not None and moment.timetz().replace(tzinfo=None) != datetime.min.time():
                notes.append(f"{export.file} {word} at {moment:%Y-%m-%d %H:%M} UTC: of that day it has a part alone")
    if days.last >= datetime.now(UTC).date():
        notes.append(f"{days.last} is not over")
    return notes


def _unknown(gateway: remote.Remote, row: Row, days: _Range, providers: Sequence[str]) -> tuple[list[_Attempt], bool]:
    """Attempts of the row whose cost is not known, and whether there are more. Raises `Failed`."""
    found: list[_Attempt] = []
    first, last = (row.day, row.day) if row.day else (days.first, days.last)
    for provider in providers:
        for model in row.names:
            query = {"provider": provider, "upstream_model": model, "state": "unknown", "limit": str(_SHOWN + 1)}
            query |= {"from": str(first), "to": str(last)}
            # A page may have few rows and not be the last: it is answered when its time is over.
            while len(found) <= _SHOWN:
                answer = gateway.get("/v1/invocations", **query)
                found += msgspec.convert(answer["data"], list[_Attempt], strict=False)
                if answer["next_cursor"] is None:
                    break
                query["cursor"] = answer["next_cursor"]
    return found[:_SHOWN], len(found) > _SHOWN


# ------------------------------------------------------------------------------------------------------ telling


def _verdict(found: _Found) -> str:
    result = found.result
    days = f"{found.days.first} to {found.days.last}" if found.days.first != found.days.last else str(found.days.first)
    sums = result.sums
    parts = []
    if sums.charged_usd is not None and sums.theirs_usd is not None:
        parts.append(f"{tables.usd(sums.charged_usd)} here, {tables.usd(sums.theirs_usd)} there")
    if sums.input_tokens is not None:
        ours, theirs = (sums.input_tokens, sums.output_tokens), (sums.theirs_input_tokens, sums.theirs_output_tokens)
        here, there = (f"{tables.shown(one)} and {tables.shown(other)}" for one, other in (ours, theirs))
        parts.append(f"{here} tokens in and out here, {there} there")
    told = "; ".join(parts)
    if found.agrees:
        return f"The ledger and the export agree for {days}: {told}."
    reasons = []
    if result.differing:
        fitting = sum(row.unknown_fit for row in result.differing)
        reasons.append(
            f"{len(result.differing)} of {len(result.rows)} rows differ"
            + (f", {fitting} of them by no more than attempts of unknown cost can be" if fitting else "")
        )
    elif result.sums.differs:
        reasons.append("each row is within the tolerance, and their sum is not")
    if not found.whole:
        reasons.append("the export says itself that there is more of it")
    if result.foreign_currencies:
        reasons.append(f"amounts in {', '.join(result.foreign_currencies)} could not be compared")
    if not found.complete:
        reasons.append("the ledger's side is not whole")
    return f"The ledger and the export do not agree for {days}: {'; '.join(reasons)}. {told}."


def _command(attempt: _Attempt, row: Row, *, alone: bool) -> str:
    """What to call once it is known what the attempt cost."""
    usd = decimal_string(row.difference_usd) if alone and row.difference_usd is not None else "USD"
    return f"tollbridge usage resolve {attempt.ticket_id} --charged {usd}"


def _told(found: _Found, *, everything: bool) -> list[tuple[int, Row]]:
    return [(place, row) for place, row in enumerate(found.result.rows) if everything or row.differs]


def _show(out: Console, found: _Found, *, everything: bool) -> None:
    whose = ", ".join(found.providers)
    of = " and ".join(sorted({export.form.title for export in found.exports}))
    money = any(export.form.money for export in found.exports)
    tokens = any(not export.form.money for export in found.exports)
    columns = ["day", "model"]
    columns += ["charged", "unknown", "theirs", "difference", "%"] if money else ["unknown"]
    columns += ["input", "theirs in", "output", "theirs out"] if tokens else []
    shown = _told(found, everything=everything)
    rows = [_cells(found, row, money=money, tokens=tokens) for _, row in shown]
    sums = _cells(found, found.result.sums, money=money, tokens=tokens)
    tables.table(
        out, f"{whose} and {of}", columns, [*rows, ["sum", "", *sums[2:]]], numbers=set(columns) - {"day", "model"}
    )
    for place, row in shown:
        _explain(out, found, place, row)
    if found.result.apart:
        tables.table(
            out,
            "not compared: not of this gateway's calls of models",
            ("what", "why", "lines", "amount", "input", "output"),
            [_apart_cells(apart) for apart in found.result.apart],
            numbers=("lines", "amount", "input", "output"),
        )
    for note in found.notes:
        out.print(f"note: {note}", markup=False)
    out.print(_verdict(found), markup=False)


def _explain(out: Console, found: _Found, place: int, row: Row) -> None:
    about = f"{row.day or 'the range'} {row.model or 'all models'}"
    for explanation in row.explanations:
        out.print(tables.shown(f"{about}: {explanation}"), markup=False)
    attempts, more = found.unknown.get(place, ([], False))
    for attempt in attempts:
        bound = "no bound" if attempt.upper_bound_usd is None else f"at most {tables.usd(attempt.upper_bound_usd)}"
        out.print(
            tables.shown(f"  {attempt.granted_at}, {bound}: {_command(attempt, row, alone=_alone(row))}"), markup=False
        )
    if more:
        out.print("  and more: `tollbridge invocations --state unknown`", markup=False)


def _alone(row: Row) -> bool:
    return row.unknown_attempts == 1


def _cells(found: _Found, row: Row, *, money: bool, tokens: bool) -> list[object]:
    bound = "no bound" if row.unbounded_attempts else f"at most {tables.usd(row.unknown_upper_bound_usd)}"
    unknown = f"{row.unknown_attempts:,}, {bound}" if row.unknown_attempts else None
    whole = f"{found.days.first}..{found.days.last}"
    cells: list[object] = [row.day or whole, row.model or "all models"]
    if money:
        percent = None if row.difference_percent is None else f"{row.difference_percent:.2f}"
        cells += [_usd(row.charged_usd), unknown, _usd(row.theirs_usd), _usd(row.difference_usd), percent]
    else:
        cells.append(unknown)
    if tokens:
        cells += [row.input_tokens, row.theirs_input_tokens, row.output_tokens, row.theirs_output_tokens]
    return cells


def _usd(amount: Decimal | None) -> str | None:
    """Money, or None where this row does not compare it."""
    if amount is None:
        return None
    return f"-{tables.usd(-amount)}" if amount < 0 else tables.usd(amount)


def _apart_cells(apart: Apart) -> tuple[object, ...]:
    amount = None
    if apart.amount is not None:
        amount = _usd(apart.amount) if apart.currency == "USD" else f"{apart.amount:f} {apart.currency}"
    return (apart.label, apart.reason, apart.lines, amount, apart.input_tokens, apart.output_tokens)


def _plain_row(row: Row) -> dict[str, Any]:
    return {
        name: decimal_string(value) if isinstance(value := getattr(row, name), Decimal) else value
        for name in Row.__struct_fields__
        if name != "names"
    }


def _plain(found: _Found, *, everything: bool) -> dict[str, Any]:
    rows = []
    for place, row in _told(found, everything=everything):
        attempts, more = found.unknown.get(place, ([], False))
        unknown = [
            {
                "ticket_id": one.ticket_id,
                "granted_at": one.granted_at,
                "upper_bound_usd": None if one.upper_bound_usd is None else decimal_string(one.upper_bound_usd),
                "command": _command(one, row, alone=_alone(row)),
            }
            for one in attempts
        ]
        rows.append({**_plain_row(row), "unknown": unknown, "more_unknown": more})
    return {
        "agrees": found.agrees,
        "verdict": _verdict(found),
        "from": found.days.first,
        "to": found.days.last,
        "by": found.by,
        "zone": found.zone,
        "providers": found.providers,
        "exports": [{"file": export.file, "form": export.form.name.lower()} for export in found.exports],
        "tolerance": {
            "usd": decimal_string(found.tolerance.usd),
            "percent": decimal_string(found.tolerance.percent),
            "tokens": found.tolerance.tokens,
        },
        "compared": len(found.result.rows),
        "rows": rows,
        "sum": _plain_row(found.result.sums),
        "not_of_this_gateway": [
            {
                **msgspec.structs.asdict(apart),
                "amount": None if apart.amount is None else decimal_string(apart.amount),
            }
            for apart in found.result.apart
        ],
        "notes": found.notes,
    }


def _table(found: _Found, *, everything: bool) -> bytes:
    """The rows as CSV; what is not compared has no place in it and is in the verdict and in --json."""
    names = [name for name in Row.__struct_fields__ if name not in {"names", "explanations"}]
    lines = [csv_line([*names, "explanation"])]
    for _, row in _told(found, everything=everything):
        plain = _plain_row(row)
        lines.append(csv_line([*(plain[name] for name in names), "; ".join(row.explanations)]))
    return b"".join(lines)
