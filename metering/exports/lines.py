"""
The words of an export: its lines, its form, and the refusal of what is not understood.

Everything is in USD, tokens and days of UTC, whatever the provider's own units are.
"""

from __future__ import annotations

import enum
from datetime import date, datetime
from decimal import Decimal

import msgspec


class Refused(Exception):
    """A file, or a place in it, that is not understood. `str()` names the file, the place and what is wrong."""

    def __init__(self, file: str, message: str, *, place: str | None = None) -> None:
        super().__init__(": ".join(part for part in (file, place, message) if part))


class Form(enum.Enum):
    """What an export can be: how it is called, whose it is, and whether it tells of money."""

    #: `GET /v1/organization/costs`
    OPENAI_COSTS = ("a page of OpenAI's costs API", "api.openai.com", True)
    #: `GET /v1/organization/usage/completions` and its siblings
    OPENAI_USAGE = ("a page of OpenAI's usage API", "api.openai.com", False)
    #: Export of the usage dashboard, the view of costs.
    OPENAI_COSTS_CSV = ("the CSV of costs of OpenAI's dashboard", "api.openai.com", True)
    #: Export of the usage dashboard, the view of activity.
    OPENAI_USAGE_CSV = ("the CSV of usage of OpenAI's dashboard", "api.openai.com", False)
    #: `GET /v1/organizations/cost_report`
    ANTHROPIC_COSTS = ("a page of Anthropic's cost report", "api.anthropic.com", True)
    #: `GET /v1/organizations/usage_report/messages`
    ANTHROPIC_USAGE = ("a page of Anthropic's usage report of messages", "api.anthropic.com", False)
    #: Export of the console's page of costs.
    ANTHROPIC_COSTS_CSV = ("the CSV of costs of Anthropic's console", "api.anthropic.com", True)
    #: Export of the console's page of usage.
    ANTHROPIC_USAGE_CSV = ("the CSV of usage of Anthropic's console", "api.anthropic.com", False)

    def __init__(self, title: str, host: str, money: bool) -> None:
        self.title = title
        #: Host of the API whose use it tells of.
        self.host = host
        #: It tells amounts and no tokens; otherwise tokens and no amounts.
        self.money = money


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One row or result."""

    #: Of the bucket, in UTC; it lies in one day.
    start: datetime
    #: What the provider calls it.
    label: str
    #: None: it is of all models together, or of none.
    model: str | None = None
    #: Why it is not compared: it is of another product. Such lines are told apart.
    apart: str | None = None
    #: In its `currency`. None where the form tells none.
    amount: Decimal | None = None
    currency: str = "USD"
    #: All input, cached parts included. None where the form tells none.
    input_tokens: int | None = None
    output_tokens: int | None = None
    requests: int | None = None
    #: What it is grouped by, by the provider's own names: project, workspace, key, tier and the like.
    dimensions: dict[str, str]

    @property
    def day(self) -> date:
        return self.start.date()

    @property
    def whole(self) -> bool:
        """It is the sum of all models."""
        return self.model is None and self.apart is None


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """What a file holds."""

    file: str
    form: Form
    lines: list[Line]
    #: What it covers, days without a line included; None where it has neither line nor bucket.
    first: datetime | None = None
    #: Not included.
    last: datetime | None = None
    #: It does not say itself that there is more.
    whole: bool = True
    #: What a reader of the comparison must know.
    notes: list[str] = []
