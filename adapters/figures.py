"""Figures as providers tell them, held to what they can be: a count of tokens, a cost in USD, a tier of service."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

import msgspec

from adapters.body import ABSENT

#: No single call costs more, and no price is finer: beyond this the figure is nonsense.
_MOST_USD = Decimal(1_000_000)
_COST_CHARACTERS = 40
_TIER = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")


def count(value: int | None) -> int | None:
    """None for what is no count of tokens."""
    return value if value is not None and 0 <= value < 2**31 else None


def cost_usd(raw: msgspec.Raw) -> str | None:
    """
    A cost that came as a JSON number or string, as a plain decimal number, digit for digit as the provider wrote it;
    None for what is no amount.
    """
    text = b"" if raw is ABSENT else bytes(raw).strip()
    if not 0 < len(text) <= _COST_CHARACTERS:
        return None
    try:
        amount = Decimal(text.strip(b'"').decode("ascii"))
    except (InvalidOperation, UnicodeDecodeError):
        return None
    if not amount.is_finite() or not 0 <= amount <= _MOST_USD or (amount and amount.adjusted() < -_COST_CHARACTERS):
        return None
    return format(amount, "f")


def later_cost(known: str | None, later: str | None) -> str | None:
    """The last one wins, and a zero never overwrites an amount."""
    if later is None or (known is not None and not later.strip("0.")):
        return known
    return later


def service_tier(told: object) -> str | None:
    """
    The tier that an answer names, in small letters; None where it names none. What is no name is told as "other": it is
    surely not the standard one.
    """
    if not isinstance(told, str) or not told:
        return None
    word = told.lower()
    return word if _TIER.fullmatch(word) else "other"
