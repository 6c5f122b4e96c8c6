"""
Where the gateway may send word of an end: to hosts that its operator has named, and to nothing else.

A URL is taken literally. What one parser could read in another way than the next (user names, backslashes, escapes in a
host) is refused before any parser sees it, and what a name stands for is looked at when it is resolved, by whoever
connects.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Final

from gateway.errors import InvalidRequest

_MAX_CHARS: Final = 2048
_HOST: Final = r"(?P<host>[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?)(?::(?P<port>[0-9]{1,5}))?"
_URL: Final = re.compile(rf"(?P<scheme>https?)://{_HOST}(?:[/?](?:[!$&-;=?@A-Z_a-z~]|%[0-9A-Fa-f]{{2}})*)?")
_PLACE: Final = re.compile(_HOST)
_PORTS: Final = {"https": 443, "http": 80}
#: Networks through which an address of another kind is reached: what is private there may look public here.
_TRANSLATED: Final = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("2002::/16"))


def place_fault(entry: str) -> str | None:
    """What is wrong with an entry of the list of allowed hosts."""
    found = _PLACE.fullmatch(entry)
    if found is None or not 0 < int(found["port"] or 1) < 65536:
        return "must be a host, or host:port, in ASCII"
    return None


class Destinations:
    """What is allowed."""

    def __init__(self, hosts: Iterable[str], *, allow_http: bool, allow_private: bool) -> None:
        """An entry without a port stands for the scheme's own."""
        self._hosts = frozenset(host.lower() for host in hosts)
        self._allow_http = allow_http
        self._allow_private = allow_private

    def __bool__(self) -> bool:
        return bool(self._hosts)

    def check(self, url: str, param: str = "webhook_url") -> None:
        """Raises InvalidRequest for a URL that nothing may be sent to. The message does not repeat it."""
        if not self._hosts:
            raise InvalidRequest("webhooks are not configured here", param=param)
        found = _URL.fullmatch(url) if len(url) <= _MAX_CHARS else None
        if found is None:
            raise InvalidRequest("must be a plain URL: https://host/path", param=param)
        scheme, host, port = found["scheme"], found["host"].lower(), found["port"]
        if scheme == "http" and not self._allow_http:
            raise InvalidRequest(
                "must begin with https:// (the operator's webhooks.allow_http allows http://, for tests)", param=param
            )
        number = int(port) if port else _PORTS[scheme]
        allowed = f"{host}:{number}" in self._hosts or (number == _PORTS[scheme] and host in self._hosts)
        if not allowed or self.address_fault(host) is not None:
            raise InvalidRequest(
                "its host, with its port where it names one, is not among those that the operator allows "
                "(webhooks.allowed_hosts)",
                param=param,
            )

    def address_fault(self, text: str) -> str | None:
        """Why nothing may be sent to an address; None for one that is right, or is no address but a name."""
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return None
        if self._allow_private:
            return None
        if isinstance(address, ipaddress.IPv6Address):
            if any(address in network for network in _TRANSLATED):
                return "not a public address"
            address = address.ipv4_mapped or address
        return None if address.is_global and not address.is_multicast else "not a public address"
