"""
Where a request goes, and the bytes that it begins with.

They are the same for nearly every request to a provider, and checking and joining them costs more than sending them: so
they are made once and kept by whoever sends.
"""

from __future__ import annotations

import re
from typing import NamedTuple, NoReturn
from urllib.parse import quote, urlsplit

from adapters.errors import NotSent

#: What RFC 3986 lets stand in a path, and `%`, since a path that comes here is escaped already where it must be.
_IN_A_PATH = "/%:@!$&'()*+,;=~-._"
_HOST = re.compile(r"[A-Za-z0-9._~-]+|[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._~-]+)?", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", re.ASCII)
_NOT_IN_A_VALUE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
#: How long a body is, and how it is cut, is said by who sends it.
_FRAMING = frozenset({"content-length", "transfer-encoding"})
_PORTS = {"http": 80, "https": 443}


class Origin(NamedTuple):
    """What a connection is to."""

    tls: bool
    #: A name in ASCII or an address, without brackets.
    host: str
    port: int


class Head(NamedTuple):
    """A request without its body's length and the end of its head."""

    origin: Origin
    start: bytes


def head(method: str, base_url: str, path: str, fields: tuple[tuple[str, str], ...]) -> Head:
    """
    For the base URL with the path behind it. Of several fields of one name, in any case, the last one counts.

    Raises `NotSent` with the code "invalid_url" or "invalid_header".
    """
    origin, host, target = _parts(base_url.rstrip("/") + path)
    kept = {"host": ("host", host)} | {name.lower(): (name, value) for name, value in fields}
    lines = [f"{method} {target} HTTP/1.1"]
    for lowered, (name, value) in kept.items():
        if lowered in _FRAMING or _NAME.fullmatch(name) is None or _NOT_IN_A_VALUE.search(value) is not None:
            raise NotSent(f"the header field {lowered!r} cannot be sent", code="invalid_header")
        lines.append(f"{name}: {value}")
    return Head(origin, "\r\n".join([*lines, ""]).encode(errors="surrogateescape"))


def _parts(url: str) -> tuple[Origin, str, str]:
    """The origin, what `host` says of it, and the request's target."""
    try:
        parts = urlsplit(url)
        port = parts.port
        host = (parts.hostname or "").encode("idna" if not url.isascii() else "ascii").decode("ascii")
    except ValueError as error:
        _invalid(error)
    # A user in the URL would be a credential where none is looked for.
    if parts.scheme not in _PORTS or _HOST.fullmatch(host) is None or "@" in parts.netloc:
        _invalid()
    default = _PORTS[parts.scheme]
    origin = Origin(parts.scheme == "https", host, port or default)
    named = f"[{host}]" if ":" in host else host
    if origin.port != default:
        named = f"{named}:{origin.port}"
    target = quote(parts.path or "/", safe=_IN_A_PATH)
    if parts.query:
        target += "?" + quote(parts.query, safe=_IN_A_PATH + "?")
    return origin, named, target


def _invalid(error: ValueError | None = None) -> NoReturn:
    raise NotSent("the provider's URL is not an http:// or https:// URL", code="invalid_url") from error
