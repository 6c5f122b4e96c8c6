"""
What a client's scenarios stand on. Only the standard library: this runs in the environment of the client alone.

A scenario is a function that drives the vendor's own client and asserts what it saw. All of a module run one after the
other against one gateway; the exit status tells whether all held.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

URL = os.environ.get("CLIENTS_GATEWAY", "")
KEY = os.environ.get("CLIENTS_KEY", "")
PROVIDER = os.environ.get("CLIENTS_PROVIDER", "")

_SCENARIOS: list[Callable[[], Any]] = []


def scenario(function: Callable[[], Any]) -> Callable[[], Any]:
    _SCENARIOS.append(function)
    return function


def main() -> None:
    """Runs all, or those whose name has one of the words of the command line in it."""
    words = sys.argv[1:]
    chosen = [one for one in _SCENARIOS if not words or any(word in one.__name__ for word in words)]
    failed = 0
    for function in chosen:
        name = function.__name__
        began = time.monotonic()
        reset()
        try:
            result = function()
            if inspect.iscoroutine(result):
                asyncio.run(result)
        except Exception:  # noqa: BLE001 - whatever it is, the others run too
            failed += 1
            print(f"FAILED {name}", flush=True)
            traceback.print_exc(file=sys.stdout)
        else:
            print(f"ok     {name}  {time.monotonic() - began:.2f} s", flush=True)
    if failed or not chosen:
        sys.exit(f"{failed} of {len(chosen)} failed" if chosen else f"no scenario has {' or '.join(words)} in its name")


class Caught:
    """What `raising` caught."""

    error: Any


@contextlib.contextmanager
def raising(kind: type[Exception]) -> Iterator[Caught]:
    """Fails unless the block raises exactly this."""
    caught = Caught()
    try:
        yield caught
    except kind as error:
        caught.error = error
    else:
        raise AssertionError(f"no {kind.__name__}")
    assert type(caught.error) is kind, caught.error


def provider(what: str, faults: dict[str, Any] | None = None, *, model: str | None = None) -> Any:
    """Asks the simulated provider's control, or with `faults` tells it how to misbehave."""
    query = "" if model is None else f"?model={model}"
    request = urllib.request.Request(
        f"{PROVIDER}/_control/{what}{query}",
        data=None if faults is None else json.dumps(faults).encode(),
        method="GET" if faults is None else "POST",
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def until(reached: Callable[[], bool], *, within: float = 10.0) -> None:
    """Returns once it is so."""
    deadline = time.monotonic() + within
    while not reached():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def occupied() -> int:
    """Slots of all groups of the gateway that are held."""
    return sum(len(group["slots"]) for group in gateway("/v1/groups")["groups"])


def reset() -> None:
    """The provider is well again, and the gateway has no grudge against anybody."""
    provider("reset", {})
    for group in gateway("/v1/groups")["groups"]:
        gateway("/v1/groups/reset", {"group": group["group"]})


def gateway(path: str, body: dict[str, Any] | None = None) -> Any:
    """Asks one of the gateway's own endpoints."""
    request = urllib.request.Request(
        URL + path,
        data=None if body is None else json.dumps(body).encode(),
        headers={"authorization": f"Bearer {KEY}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)
