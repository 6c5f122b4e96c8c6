"""
What of a captured text is not kept: addresses, cards, keys, and whatever the operator's own patterns find. Pure.

A pattern sees one string of the JSON at a time, never the JSON itself, so what is left is still JSON. That it finds
everything is not claimed: what must not be kept at all is not captured.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec

#: Characters of a string without a blank above which it is data and no text: a picture, a file.
DATA: Final = 2000
#: A card has from 13 to 19 digits, and they sum up as ISO/IEC 7812-1 says.
_CARD: Final = re.compile(r"(?<!\d)(?<!\d\.)\d(?:[ -]?\d){12,18}(?!\.?\d)", re.ASCII)
_MAIL: Final = re.compile(r"[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}\b", re.ASCII)
_SECRET: Final = re.compile(
    r"""
    -----BEGIN\ [A-Z ]{0,40}PRIVATE\ KEY-----.{0,8000}?(?:-----END\ [A-Z ]{0,40}PRIVATE\ KEY-----|\Z)
    | \beyJ[\w-]{10,4000}\.[\w-]{10,4000}\.[\w-]{10,2000}
    | \b(?:sk|pk|rk|gsk|xai|hf|tb|ghp|gho|ghs|ghu|ghr|github_pat|glpat|xox[a-z]|nvapi|pplx)[-_][\w-]{16,500}
    | \b(?:AKIA|ASIA)[A-Z0-9]{16}\b
    | \bAIza[\w-]{30,60}
    | (?i:\bbearer\ +)[\w.~+/-]{16,4000}=*
    """,
    re.VERBOSE | re.DOTALL | re.ASCII,
)

_Replace: TypeAlias = "str | Callable[[re.Match[str]], str]"


def _unless_no_card(found: re.Match[str]) -> str:
    digits = [int(digit) for digit in found.group() if digit.isdigit()]
    doubled = [digit if place % 2 == 0 else digit * 2 - 9 * (digit > 4) for place, digit in enumerate(digits[::-1])]
    return "[card]" if sum(doubled) % 10 == 0 else found.group()


#: By the name under which a configuration asks for it.
KNOWN: Final[Mapping[str, tuple[re.Pattern[str], _Replace]]] = {
    "secret": (_SECRET, "[secret]"),
    "email": (_MAIL, "[email]"),
    "card": (_CARD, _unless_no_card),
}


class Redaction:
    """Takes out what is not to be kept."""

    def __init__(self, names: Sequence[str] = tuple(KNOWN), patterns: Sequence[str] = ()) -> None:
        """`names` are of `KNOWN`. Raises `re.error` for a pattern that is none."""
        self._rules = [
            *(KNOWN[name] for name in KNOWN if name in names),
            *((re.compile(pattern), "[redacted]") for pattern in patterns),
        ]

    def json(self, document: bytes) -> str:
        """The JSON document without it. Raises `msgspec.DecodeError`."""
        return msgspec.json.encode(self._value(msgspec.json.decode(document))).decode()

    def text(self, text: str) -> str:
        if len(text) > DATA and not any(character.isspace() for character in text[:DATA]):
            return f"[{len(text)} characters of data]"
        for pattern, replacement in self._rules:
            text = pattern.sub(replacement, text)
        return text

    def _value(self, value: Any) -> Any:
        match value:
            case str():
                return self.text(value)
            case list():
                return [self._value(item) for item in value]
            case dict():
                return {name: self._value(item) for name, item in value.items()}
            case _:
                return value
