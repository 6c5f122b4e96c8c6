"""
A model's name in a URL, for the protocols that have it there.

A name comes from a caller; what is not escaped in it could reach another address of the provider, with our key.
"""

from __future__ import annotations

import re

from adapters.errors import RequestNotExpressible

#: Letters, digits and what RFC 3986 calls unreserved; `@` is harmless in a path, and begins many names.
_ESCAPED = re.compile(rb"[^A-Za-z0-9._~@-]")


def path_step(name: str) -> str:
    """One step of a path. Raises `RequestNotExpressible` for a name that is none, or that leads elsewhere."""
    if any(part in {"", ".", ".."} for part in name.split("/")):
        raise RequestNotExpressible("model", "is not the name of a model")
    return _ESCAPED.sub(lambda found: b"%%%02X" % found[0][0], name.encode(errors="surrogatepass")).decode("ascii")
