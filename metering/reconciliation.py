"""
The ledger beside a provider's own books.

Two accounts of the same calls are laid over each other by day and model, and what differs is told with what could
explain it. Nothing is rounded before it is compared, and what cannot be compared is told, so that "they agree" means
it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, timedelta
from decimal import ROUND_HALF_EVEN, Context, Decimal
from typing import Final

import msgspec

from metering.exports.lines import Line

#: Wide enough that no sum of amounts is rounded.
_EXACT: Final = Context(prec=200)
_PERCENT: Final = Context(prec=12, rounding=ROUND_HALF_EVEN)
_ZERO: Final = Decimal(0)


class Used(msgspec.Struct, frozen=True, kw_only=True):
    """What the ledger has of a day, a provider and a model as the provider names it: a group of `GET /v1/usage`."""

    day: date
    provider: str
    upstream_model: str
    charged_usd: Decimal
    attempts: int
    unknown_attempts: int
    unknown_upper_bound_usd: Decimal
    unbounded_attempts: int
    input_tokens: int
    output_tokens: int


class Tolerance(msgspec.Struct, frozen=True, kw_only=True):
    """
    What is taken as equal: amounts that are apart by at most `usd` or by at most `percent` of the provider's, and
    counts of tokens that are apart by at most `tokens`.
    """

    usd: Decimal = Decimal("0.01")
    percent: Decimal = Decimal("0.5")
    tokens: int = 0

    def of(self, theirs: Decimal) -> Decimal:
        """The most, in USD, by which ours may be apart from this."""
        return max(self.usd, _EXACT.multiply(abs(theirs), self.percent.scaleb(-2, _EXACT)))


class Row(msgspec.Struct, kw_only=True):
    """One day and model on both sides. What a side does not tell is None."""

    #: None: the whole range.
    day: date | None
    #: As people should read it; None: all models together.
    model: str | None
    #: Names of it in the ledger.
    names: list[str]
    charged_usd: Decimal | None = None
    theirs_usd: Decimal | None = None
    #: Theirs less ours.
    difference_usd: Decimal | None = None
    #: Of theirs. None where that is zero.
    difference_percent: Decimal | None = None
    input_tokens: int | None = None
    theirs_input_tokens: int | None = None
    output_tokens: int | None = None
    theirs_output_tokens: int | None = None
    attempts: int = 0
    theirs_requests: int | None = None
    unknown_attempts: int = 0
    unknown_upper_bound_usd: Decimal = _ZERO
    unbounded_attempts: int = 0
    #: By more than the tolerance.
    differs: bool = False
    #: Attempts of ours that nobody saw end can be the difference.
    unknown_fit: bool = False
    explanations: list[str] = msgspec.field(default_factory=list)


class Apart(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of the provider that are not compared, by what they are."""

    label: str
    reason: str
    lines: int
    amount: Decimal | None
    currency: str
    input_tokens: int | None
    output_tokens: int | None


class Reconciliation(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    rows: list[Row]
    #: The whole range, all models together.
    sums: Row
    apart: list[Apart]
    #: Currencies of amounts that should have been compared, and could not.
    foreign_currencies: list[str]

    @property
    def differing(self) -> list[Row]:
        return [row for row in self.rows if row.differs]

    @property
    def agrees(self) -> bool:
        # Many rows may each be within the tolerance, and together beyond it.
        return not self.differing and not self.sums.differs and not self.foreign_currencies


#: A date or a snapshot's number at the end of a model's name, by which an alias and what it stands for differ.
_STAMP: Final = re.compile(r"-(?:\d{4}-\d{2}-\d{2}|20\d{6}|(?:0\d|1[0-2])[0-3]\d|latest)$")


def family(name: str) -> tuple[object, bool]:
    """
    What a model's name says without its date, for comparison alone, and whether it had one.

    Anthropic's console writes names for people ("Claude Haiku 4.5"), whose words stand in another order than in some
    ids (`claude-3-5-haiku-20241022`): of its models the words and the numbers count.
    """
    plain = name.strip().lower().replace(" ", "-")
    base = _STAMP.sub("", plain)
    dated = base != plain and not plain.endswith("-latest")
    if not base.startswith("claude"):
        return base, dated
    parts = base.replace(".", "-").split("-")
    numbers = [int(part) for part in parts if part.isdecimal()]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return (frozenset(part for part in parts if not part.isdecimal()), tuple(numbers)), dated


def matched(names: Iterable[str]) -> dict[str, str]:
    """
    By name, the model it is compared as.

    An alias is billed under the snapshot that served it: where a name without a date is among those of a family, all of
    the family are compared together. Where all are dated, each is itself.
    """
    families: dict[object, list[tuple[str, bool]]] = defaultdict(list)
    for name in sorted(set(names)):
        base, dated = family(name)
        families[base].append((name, dated))
    found: dict[str, str] = {}
    for members in families.values():
        aliases = [name for name, dated in members if not dated]
        # The shortest id is what people know it by; a name for people has spaces.
        known_as = min(aliases, key=lambda name: (" " in name, len(name), name), default="")
        found |= {name: known_as or name for name, _ in members}
    return found


def compare(
    ours: Sequence[Used],
    theirs: Sequence[Line],
    *,
    by_day: bool,
    money: bool,
    tokens: bool,
    tolerance: Tolerance = Tolerance(),  # noqa: B008  frozen
) -> Reconciliation:
    """
    Lay `theirs` over `ours`, which are of the same range and provider.

    `money` and `tokens` say which of them the export tells. Where it tells one for all models together, all of ours are
    taken together for it. Raises `ValueError` where it tells the same by model and for all together: then it counts
    twice.
    """
    foreign = [line for line in theirs if line.apart is None and line.currency != "USD"]
    lines = [line for line in theirs if line.apart is None and line.currency == "USD"]
    of_money = [line for line in lines if line.amount is not None]
    of_tokens = [line for line in lines if line.amount is None]
    for kind in (of_money, of_tokens):
        if any(line.whole for line in kind) and not all(line.whole for line in kind):
            raise ValueError("tells some lines by model and some for all models together, which may count twice")
    known_as = matched(
        [used.upstream_model for used in ours] + [line.model for line in lines if line.model is not None]
    )
    rows: dict[tuple[date | None, str | None], Row] = {}

    def row(day: date, name: str | None) -> Row:
        model = None if name is None else known_as[name]
        key = (day if by_day else None, model)
        if key not in rows:
            rows[key] = Row(day=key[0], model=model, names=[])
        return rows[key]

    money_whole = bool(of_money) and of_money[0].whole
    tokens_whole = bool(of_tokens) and of_tokens[0].whole
    for used in ours:
        if money:
            _add_money(row(used.day, None if money_whole else used.upstream_model), used)
        if tokens:
            _add_tokens(row(used.day, None if tokens_whole else used.upstream_model), used)
        # Attempts are told once a row, also where both are compared in it.
        for whole in ({money_whole} if money else set()) | ({tokens_whole} if tokens else set()):
            _add_attempts(row(used.day, None if whole else used.upstream_model), used)
    for line in of_money:
        found = row(line.day, line.model)
        found.theirs_usd = _EXACT.add(found.theirs_usd or _ZERO, line.amount or _ZERO)
    for line in of_tokens:
        found = row(line.day, line.model)
        found.theirs_input_tokens = (found.theirs_input_tokens or 0) + (line.input_tokens or 0)
        found.theirs_output_tokens = (found.theirs_output_tokens or 0) + (line.output_tokens or 0)
        if line.requests is not None:
            found.theirs_requests = (found.theirs_requests or 0) + line.requests
    for (_, model), found in rows.items():
        _complete(
            found, money=money and (model is None) is money_whole, tokens=tokens and (model is None) is tokens_whole
        )
        _judge(found, tolerance)
    ordered = sorted(rows.values(), key=lambda one: (one.day or date.min, one.model or ""))
    _explain_midnight(ordered, tolerance)
    return Reconciliation(
        rows=ordered,
        sums=_sums(ordered, ours, money=money, tokens=tokens, tolerance=tolerance),
        apart=list(
            _apart(
                [line for line in theirs if line.apart is not None]
                + [
                    msgspec.structs.replace(line, apart=f"in {line.currency}, and the ledger is in USD")
                    for line in foreign
                ]
            )
        ),
        foreign_currencies=sorted({line.currency for line in foreign}),
    )


def _add_money(row: Row, used: Used) -> None:
    row.charged_usd = _EXACT.add(row.charged_usd or _ZERO, used.charged_usd)


def _add_tokens(row: Row, used: Used) -> None:
    row.input_tokens = (row.input_tokens or 0) + used.input_tokens
    row.output_tokens = (row.output_tokens or 0) + used.output_tokens


def _add_attempts(row: Row, used: Used) -> None:
    row.attempts += used.attempts
    row.unknown_attempts += used.unknown_attempts
    row.unknown_upper_bound_usd = _EXACT.add(row.unknown_upper_bound_usd, used.unknown_upper_bound_usd)
    row.unbounded_attempts += used.unbounded_attempts
    if used.upstream_model not in row.names:
        row.names.append(used.upstream_model)


def _complete(row: Row, *, money: bool, tokens: bool) -> None:
    """What a side says nothing of is zero where the comparison is made at all."""
    if money:
        row.charged_usd = row.charged_usd or _ZERO
        row.theirs_usd = row.theirs_usd or _ZERO
    if tokens:
        row.input_tokens, row.output_tokens = row.input_tokens or 0, row.output_tokens or 0
        row.theirs_input_tokens = row.theirs_input_tokens or 0
        row.theirs_output_tokens = row.theirs_output_tokens or 0


def _judge(row: Row, tolerance: Tolerance) -> None:
    """Whether a row differs, and what can explain it."""
    unknown = row.unknown_attempts
    if row.charged_usd is not None and row.theirs_usd is not None:
        row.difference_usd = _EXACT.subtract(row.theirs_usd, row.charged_usd)
        if row.theirs_usd:
            row.difference_percent = _PERCENT.divide(row.difference_usd * 100, row.theirs_usd)
        allowed = tolerance.of(row.theirs_usd)
        if abs(row.difference_usd) > allowed:
            row.differs = True
            most = _EXACT.add(row.unknown_upper_bound_usd, allowed)
            row.unknown_fit = bool(unknown and row.difference_usd > 0) and (
                row.unbounded_attempts > 0 or row.difference_usd <= most
            )
    for mine, other in ((row.input_tokens, row.theirs_input_tokens), (row.output_tokens, row.theirs_output_tokens)):
        if mine is not None and other is not None and abs(other - mine) > tolerance.tokens:
            row.differs = True
            # Of an attempt whose end nobody saw nobody told the tokens, either.
            row.unknown_fit = row.unknown_fit or bool(unknown and other > mine and row.difference_usd is None)
    if not row.differs:
        return
    if row.unknown_fit:
        bound = "no bound is known" if row.unbounded_attempts else f"at most {row.unknown_upper_bound_usd:f} USD"
        row.explanations.append(f"attempts of unknown cost fit into it: {unknown}, {bound}")
    elif unknown and (row.difference_usd or 0) > 0:
        row.explanations.append(
            f"attempts of unknown cost can be only a part of it: {unknown}, at most {row.unknown_upper_bound_usd:f} USD"
        )
    if not row.attempts:
        row.explanations.append("the ledger has no attempt: other programs with this account, or another --provider?")
    elif not any((row.theirs_usd, row.theirs_input_tokens, row.theirs_output_tokens)):
        row.explanations.append("the export has nothing: another account, or not in its books yet?")
    elif row.theirs_requests is not None and row.theirs_requests > row.attempts:
        more = row.theirs_requests - row.attempts
        row.explanations.append(f"requests that the provider counts beyond the attempts of the ledger: {more}")


def _explain_midnight(rows: Sequence[Row], tolerance: Tolerance) -> None:
    """A call that runs over midnight is of the day of its grant here, and may be of the next one there."""
    by_model: dict[str | None, dict[date, Row]] = defaultdict(dict)
    for row in rows:
        if row.day is not None and row.differs:
            by_model[row.model][row.day] = row
    for days in by_model.values():
        for day, row in days.items():
            after = days.get(day + timedelta(days=1))
            if after is not None and _cancel(row, after, tolerance):
                for one, other in ((row, after), (after, row)):
                    one.explanations.append(f"{other.day} differs by as much the other way: calls around midnight UTC?")


def _cancel(row: Row, after: Row, tolerance: Tolerance) -> bool:
    if row.difference_usd is not None and after.difference_usd is not None:
        left = abs(_EXACT.add(row.difference_usd, after.difference_usd))
        allowed = tolerance.of(_EXACT.add(row.theirs_usd or _ZERO, after.theirs_usd or _ZERO))
        if left > allowed:
            return False
    return all(
        mine is None
        or other is None
        or mine_after is None
        or other_after is None
        or abs(other - mine + other_after - mine_after) <= tolerance.tokens
        for mine, other, mine_after, other_after in (
            (row.input_tokens, row.theirs_input_tokens, after.input_tokens, after.theirs_input_tokens),
            (row.output_tokens, row.theirs_output_tokens, after.output_tokens, after.theirs_output_tokens),
        )
    )


def _sums(rows: Sequence[Row], ours: Sequence[Used], *, money: bool, tokens: bool, tolerance: Tolerance) -> Row:
    sums = Row(day=None, model=None, names=[])
    for used in ours:
        _add_attempts(sums, used)
    for name in ("charged_usd", "theirs_usd"):
        told = [value for row in rows if (value := getattr(row, name)) is not None]
        if money:
            total = _ZERO
            for value in told:
                total = _EXACT.add(total, value)
            setattr(sums, name, total)
    for name in ("input_tokens", "theirs_input_tokens", "output_tokens", "theirs_output_tokens"):
        if tokens:
            setattr(sums, name, sum(value for row in rows if (value := getattr(row, name)) is not None))
    requests = [row.theirs_requests for row in rows if row.theirs_requests is not None]
    sums.theirs_requests = sum(requests) if requests else None
    _judge(sums, tolerance)
    return sums


def _apart(lines: Iterable[Line]) -> Iterator[Apart]:
    found: dict[tuple[str, str, str], list[Line]] = defaultdict(list)
    for line in lines:
        found[line.apart or "", line.label, line.currency].append(line)
    for (reason, label, currency), of_it in sorted(found.items()):
        amount: Decimal | None = None
        for line in of_it:
            if line.amount is not None:
                amount = _EXACT.add(amount or _ZERO, line.amount)
        yield Apart(
            label=label,
            reason=reason,
            lines=len(of_it),
            amount=amount,
            currency=currency,
            input_tokens=_total(line.input_tokens for line in of_it),
            output_tokens=_total(line.output_tokens for line in of_it),
        )


def _total(counts: Iterable[int | None]) -> int | None:
    told = [count for count in counts if count is not None]
    return sum(told) if told else None


def renamed(lines: Sequence[Line], names: Mapping[str, str]) -> list[Line]:
    """The lines with the models that the ledger knows by another name."""
    return [msgspec.structs.replace(line, model=names.get(line.model or "", line.model)) for line in lines]
