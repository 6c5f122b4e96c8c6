"""
What a protocol brings to the simulated provider: how it is asked, and how it answers, refuses and fails.

A dialect is written from the provider's documents and shares nothing with the gateway's own module for the same
protocol, which it is here to judge. Faults that a protocol has no way to show are refused, not ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from adapters.simulator.content import Answer
from adapters.simulator.faults import Faults
from adapters.simulator.ledger import Ended
from adapters.simulator.requests import PATH, BadRequest, Request

#: Stands for the dispatch's number in 16 hexadecimal digits, and for the time in 10 decimal ones. JSON text holds
#: neither, so both are filled in while playing.
NUMBER = b"\0"
TIME = b"\1"

#: The `statuses` of a provider that tells every error by its own status.
AS_ASKED: Mapping[int, int] = {}

T = TypeVar("T")


class Frame(msgspec.Struct, frozen=True):
    """What is written at a time."""

    data: bytes
    #: Tokens of output that it carries.
    tokens: int = 0
    #: Only a piece of content waits for the pace.
    piece: bool = False
    #: Proves the end of the answer to a client.
    proof: bool = False


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request, however it was put."""

    request: Request
    #: Names of its top-level fields.
    fields: list[str]
    stream: bool = False
    include_usage: bool = True
    #: Who answers, where that is not told by the path alone.
    dialect: Dialect | None = None


class Writer(Protocol):
    """One answer as the events of a stream."""

    def opening(self) -> list[Frame]: ...

    def pieces(self) -> list[Frame]: ...

    def error(self) -> list[Frame]:
        """What comes in place of the rest under `error_in_stream`."""
        ...

    def closing(self) -> tuple[list[Frame], Ended]: ...


class Dialect(Protocol):
    """One protocol, seen from the provider."""

    @property
    def request_id_header(self) -> str: ...

    @property
    def statuses(self) -> Mapping[int, int]:
        """Statuses of errors that this provider tells by another one."""
        ...

    def check(self, faults: Faults) -> None:
        """Raises `BadRequest` for a fault that this protocol has no way to show."""
        ...

    def parse(self, path: str, query: str, body: bytes) -> Asked:
        """Raises `BadRequest`."""
        ...

    def models(self, names: Sequence[str]) -> bytes: ...

    def whole(self, answer: Answer, faults: Faults) -> tuple[bytes, Ended]:
        """The whole answer as one JSON object."""
        ...

    def writer(self, answer: Answer, faults: Faults, asked: Asked) -> Writer: ...

    def error(self, status: int, message: str, *, param: str | None, code: str | None, faults: Faults) -> bytes:
        """The body of an error; an empty message means the protocol's own for this status and code."""
        ...

    def left_headers(self, faults: Faults, *, limited: bool) -> Iterable[str]: ...


def refuse_unshown(faults: Faults, shown: Mapping[str, Collection[object]]) -> None:
    """`shown`: for the faults that a protocol shows in part, which of their values. Raises `BadRequest`."""
    for name, values in shown.items():
        value = getattr(faults, name)
        if value is not None and value not in values:
            raise BadRequest(f"This protocol cannot show the fault '{name}' so.", param=name, code="invalid_fault")


def decode(body: bytes, kind: type[T]) -> T:
    """Raises `BadRequest` with the path, and nothing of the content."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        at = PATH.search(str(error))
        raise BadRequest(
            f"Invalid value: {PATH.sub('', str(error))}.", param=at["path"] if at else None, code="invalid_value"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest("The body is not valid JSON.", code="invalid_json") from error


def field_names(body: bytes) -> list[str]:
    """Raises `BadRequest`."""
    return sorted(decode(body, dict[str, msgspec.Raw]))


def text_of(value: Any) -> bytes:
    """A value as JSON."""
    return msgspec.json.encode(value)


def event(data: bytes, name: str | None = None) -> bytes:
    return b"data: %b\n\n" % data if name is None else b"event: %b\ndata: %b\n\n" % (name.encode(), data)
