"""TOML as a person would write it: what a command makes for people to go on editing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

_BARE: Final = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)


def text(content: str) -> str:
    # JSON's escapes are TOML's, but that TOML wants one for DEL.
    return json.dumps(content, ensure_ascii=False).replace("\x7f", "\\u007f")


def key(name: str) -> str:
    return name if _BARE.fullmatch(name) else text(name)


def value(content: Any) -> str:
    """A value on one line. Raises TypeError for what TOML has no word for."""
    match content:
        case bool():
            return "true" if content else "false"
        case int() | float():
            return repr(content)
        case str():
            return text(content)
        case Decimal():
            return text(f"{content:f}")
        case Mapping():
            inner = ", ".join(f"{key(name)} = {value(child)}" for name, child in content.items())
            return f"{{ {inner} }}" if inner else "{}"
        case Sequence():
            return f"[{', '.join(value(child) for child in content)}]"
        case _:
            raise TypeError(f"TOML has no {type(content).__name__}")


def entry(name: str, content: Any) -> str:
    return f"{key(name)} = {value(content)}"
