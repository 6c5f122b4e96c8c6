"""Where a gateway is and how to reach it: what both faces are made from."""

from __future__ import annotations

import dataclasses
import ssl
from typing import Final

import httpx
from grpc import ChannelCredentials

#: An answer may be longer than the 4 MiB that gRPC takes by default. A connection that is silent for half a minute of a
#: call is probed, as often as it is: a gateway that vanished without closing would otherwise be waited for without end.
OPTIONS: Final = (
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)
#: As many connections as there are requests at once: one that waits for a job's end would hold up those behind it.
LIMITS: Final = httpx.Limits(max_connections=None, max_keepalive_connections=20)
_CONNECT_S: Final = 10.0
#: Seconds for the next piece of what is sent or read in pieces.
_PIECE_S: Final = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """`grpc` is host:port, `rest` a URL. Raises ValueError for what cannot be one, or where both are missing."""

    api_key: str
    #: None: gRPC without TLS.
    credentials: ChannelCredentials | None
    grpc: str | None
    rest: str | None
    #: For https; None: httpx's own.
    ssl_context: ssl.SSLContext | None
    #: Seconds after which nothing is asked again.
    retry_for_s: float

    def __post_init__(self) -> None:
        if self.grpc is None and self.rest is None:
            raise ValueError("a client needs the address of gRPC (grpc=), of REST (rest=), or both")
        if self.rest is not None and not self.rest.startswith(("http://", "https://")):
            raise ValueError(f"rest: a URL like http://127.0.0.1:8080 is needed, not {self.rest!r}")
        if self.grpc is not None and "//" in self.grpc:
            raise ValueError(f"grpc: host:port is needed, not {self.grpc!r}")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.api_key}"),)

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"}

    @property
    def verify(self) -> ssl.SSLContext | bool:
        return True if self.ssl_context is None else self.ssl_context


def timeouts(read_s: float = _PIECE_S) -> httpx.Timeout:
    return httpx.Timeout(_PIECE_S, connect=_CONNECT_S, read=read_s)


def closed(part: str) -> RuntimeError:
    """The client was not entered, was left, or has no such address."""
    return RuntimeError(f"the client has no open connection for {part}: give it the address, and use it within `with`")
