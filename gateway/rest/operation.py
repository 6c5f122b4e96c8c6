"""
What is told of an endpoint in the document of the API: the types that it reads and makes, and what may go wrong.

It stands beside the handler, in the types that the handler has its bodies read into and its answers checked against, so
that no second list of them has to be kept. `gateway.rest.openapi` makes the document of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from gateway.errors import Code

#: What ends a job and never a request, and what no endpoint says of itself.
_NEVER_HERE: Final = frozenset({Code.POISON, Code.EXPIRED, Code.METHOD_NOT_ALLOWED})
#: What a call of the line may end in.
OF_A_CALL: Final = frozenset(Code) - _NEVER_HERE - {Code.RANGE_TOO_WIDE}
#: The store of jobs, files and batches is away.
OF_CONTENT: Final = frozenset({Code.CONTENT_STORE_UNAVAILABLE})
#: The store of keys, counters and groups is away.
OF_CONTROL: Final = frozenset({Code.CONTROL_STORE_UNAVAILABLE})


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """A body, as it comes or as it is answered."""

    #: What msgspec would make of it, or what it is made of.
    type: Any
    media_type: str = "application/json"
    #: One JSON document of the type a line.
    lines: bool = False
    #: Of an answer.
    status: int = 200
    #: What a type leaves open and is there all the same.
    required: tuple[str, ...] = ()
    example: Any = None


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """What can be asked next about what an answer tells."""

    method: str
    path: str
    #: By the name of a parameter there, where in the answer its value stands: a JSON pointer.
    parameters: Mapping[str, str]


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint, as it is told. What every endpoint has is not repeated here."""

    summary: str = ""
    description: str = ""
    #: A struct: the query parameters by name. None: there are none.
    query: type | None = None
    #: The same of headers. They may have any name, so their names are given by `msgspec.field(name=...)`.
    headers: type | None = None
    takes: tuple[Content, ...] = ()
    gives: tuple[Content, ...] = (Content(type=Any),)
    #: Beside those that follow from the key, the path and the body.
    errors: frozenset[Code] = frozenset()
    #: By status, what a refusal may look like beside the usual.
    refused: Mapping[int, type] = {}
    #: It reads the caller fields from headers, and tells who served it in those of its answer.
    calls: bool = False
    #: Its answer tells who served it, and it takes no caller fields.
    attributed: bool = False
    #: It may make a job, and takes in headers what only a job has.
    makes_job: bool = False
    #: An answer may be repeated under an `Idempotency-Key`.
    repeatable: bool = False
    links: Mapping[str, Link] = {}


UNTOLD: Final = Operation()
