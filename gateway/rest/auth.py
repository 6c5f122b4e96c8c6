"""
Who asks: the API key of a request, and whether it may use the endpoint.

Decided from the endpoint and the one key, which comes as `Authorization: Bearer` or, as Anthropic's clients send it, as
`x-api-key`, or, as Azure's do, as `api-key`, and from nothing else: not the URL's spelling, not the Host header, not a
second copy of a header. Where several of these headers are there they must say the same: which of two keys is meant
would depend on who reads them.
"""

from __future__ import annotations

from typing import Final, Protocol

from multidict import CIMultiDictProxy

from gateway.call import Caller, Scope
from gateway.errors import PermissionDenied
from gateway.rest.endpoint import Access, Endpoint

#: Headers whose whole value is the key.
_NAMED: Final = ("x-api-key", "api-key")


class Authenticator(Protocol):
    """`gateway.keys.Keys` is it."""

    async def authenticate(self, token: str | None) -> Caller:
        """Raises Unauthenticated, with the same message whatever is wrong with the token."""
        ...


def bearer(headers: CIMultiDictProxy[str]) -> str | None:
    """The token of the one `Authorization: Bearer` header; None where there is none, or more than one."""
    values = headers.getall("Authorization", ())
    if len(values) != 1:
        return None
    scheme, _, token = values[0].partition(" ")
    return token.strip(" ") if scheme.lower() == "bearer" else None


def api_key(headers: CIMultiDictProxy[str]) -> str | None:
    """The key of a request; None where there is none, or more than one."""
    if "x-api-key" not in headers and "api-key" not in headers:
        return bearer(headers)
    given: list[str | None] = []
    for name in _NAMED:
        values = headers.getall(name, ())
        given += values if len(values) < 2 else [None]
    if "Authorization" in headers:
        given.append(bearer(headers))
    return given[0] if len(set(given)) == 1 else None


async def authorize(endpoint: Endpoint, headers: CIMultiDictProxy[str], keys: Authenticator) -> Caller | None:
    """
    The caller, who may use the endpoint; None where it is public.

    Raises Unauthenticated and PermissionDenied.
    """
    access = endpoint.access
    if access is Access.PUBLIC:
        return None
    caller = await keys.authenticate(api_key(headers))
    if isinstance(access, Scope) and access not in caller.scopes:
        raise PermissionDenied(f"the key does not have the scope `{access.value}`")
    return caller
