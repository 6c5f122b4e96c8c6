"""
The recorded traffic of real providers: where it lies, and what a protocol has to say of its share of it.

The corpus belongs to others and lies beside the project, not in it: found at `../shared/wire`, or where
TOLLBRIDGE_WIRE_CORPUS says. A protocol takes part by a table of its own, `tests/conformance/recorded/<protocol>.py`,
with a `RECORDED` in it; `tests/conformance/test_wire_corpus.py` runs every one.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from adapters.contract import Endpoint
from adapters.errors import ErrorClass
from adapters.protocols import PROTOCOLS

CORPUS = Path(os.environ.get("TOLLBRIDGE_WIRE_CORPUS") or Path(__file__).parents[3] / "shared" / "wire")
_TABLES = Path(__file__).parents[1] / "conformance" / "recorded"

Case = dict[str, Any]
#: Class, seconds to wait, whether it is a rate limit, whether the credential is at fault.
Meaning = tuple[ErrorClass, float | None, bool, bool]


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """One protocol's share of the corpus. A case is named "folder/file" without its ending."""

    protocol: str
    #: Folders, by pattern, and which of their cases are in this protocol.
    folders: tuple[str, ...]
    mine: Callable[[str, Case], bool] = lambda _name, _case: True
    #: By hand, from the providers' documents: what every answer with another status than 200 means.
    errors: Mapping[str, Meaning]
    #: Errors in answers that HTTP calls good.
    errors_in_200: Mapping[str, ErrorClass]
    #: Streams that are not complete and hold no error: the code of their `Broken`.
    broken: Mapping[str, str] = {}
    #: Whole answers that are not complete though HTTP calls them good: the code of their `Broken`.
    broken_plain: Mapping[str, str] = {}
    #: What an operator sets for the provider of a case, and what every case needs.
    endpoints: Mapping[str, Mapping[str, Any]] = {}
    #: Compares what `tests.fakes.answers.gathered` made of a complete answer with the facts an independent parser
    #: computed: `check(name, told, facts)`.
    check: Callable[[str, dict[str, Any], dict[str, Any]], None]
    #: Whether the facts call this stream complete, or our own reading of the documents does.
    complete: Callable[[str, dict[str, Any]], bool] = lambda _name, facts: bool(facts.get("complete"))
    #: Where a complete stream may be cut so that what is left is not complete: offsets into its body, with LF only.
    cuts: Callable[[str, bytes], list[int]]
    #: How many streams, whole answers and errors there are at least.
    at_least: tuple[int, int, int]

    @property
    def cases(self) -> dict[str, Case]:
        found = {}
        for pattern in self.folders:
            for path in sorted(CORPUS.glob(f"{pattern}/*.json")):
                case = json.loads(path.read_text())
                if self.mine(name := f"{path.parent.name}/{path.stem}", case):
                    found[name] = case
        return found

    def endpoint(self, name: str, base_url: str = "http://127.0.0.1") -> Endpoint:
        return Endpoint(provider="p", protocol=self.protocol, base_url=base_url, **self.endpoints.get(name, {}))


def events_end(body: bytes, before: bytes | None = None) -> list[int]:
    """Where an event of the stream ends, up to and without the first that holds `before`."""
    stop = body.find(before) if before is not None else -1
    return [i for i in range(len(body)) if body.startswith(b"\n\n", i) and (stop < 0 or i < stop)]


def body_of(case: Case) -> bytes:
    response = case["response"]
    return (response["text"] if "text" in response else json.dumps(response["body"])).encode()


def tables() -> dict[str, Recorded]:
    """Of every registered protocol that has one."""
    found: dict[str, Recorded] = {}
    for name in PROTOCOLS:
        if (path := _TABLES / f"{name}.py").exists():
            spec = importlib.util.spec_from_file_location(f"tests.conformance.recorded.{name}", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            found[name] = module.RECORDED
    return found
