"""
What a client's scenarios stand on. Only the standard library: this runs in the environment of the client alone.

A scenario is a function that drives the client as its users do and asserts what it saw. All of a module run one after
the other against one gateway; the exit status tells whether all held.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import inspect
import json
import os
import sys
import textwrap
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.clients import loopback

URL = os.environ.get("CLIENTS_GATEWAY", "")
KEY = os.environ.get("CLIENTS_KEY", "")
PROVIDER = os.environ.get("CLIENTS_PROVIDER", "")
#: The exit status where no scenario has any of the words.
NONE_CHOSEN = 5
CLIENT = os.environ.get("CLIENTS_NAME", "")

_SCENARIOS: list[Callable[[], Any]] = []


def scenario(function: Callable[[], Any]) -> Callable[[], Any]:
    _SCENARIOS.append(function)
    return function


def main(*packages: str, alone: bool = False) -> None:
    """
    Runs all, or those whose name has one of the words of the command line in it. `packages`: whose versions are shown.
    A client that is `alone` with the gateway and the provider finds them as new for each scenario.
    """
    loopback.stay()
    words = sys.argv[1:]
    chosen = [one for one in _SCENARIOS if not words or any(word in one.__name__ for word in words)]
    version = ", ".join(map(importlib.metadata.version, packages))
    failed = 0
    with asyncio.Runner() as runner:
        for function in [*chosen, no_other_machine_was_reached] if chosen else []:
            began = time.monotonic()
            error = ""
            try:
                if alone:
                    reset()
                result = function()
                if inspect.iscoroutine(result):
                    runner.run(result)
            except Exception as raised:  # noqa: BLE001 - whatever it is, the others run too
                failed += 1
                error = told(raised)
            row(version, function.__name__, "FAILED" if error else f"ok {time.monotonic() - began:5.2f} s")
            print(error, end="", flush=True)
    sys.exit(NONE_CHOSEN if not chosen else failed != 0)


def told(error: Exception) -> str:
    """The error, and of its way through the client only our part and the last step."""
    steps = traceback.extract_tb(error.__traceback__)
    ours = [step for step in steps[:-1] if Path(step.filename).parent == Path(__file__).parent]
    lines = [*traceback.format_list([*ours, steps[-1]]), *traceback.format_exception_only(error)]
    return textwrap.indent("".join(lines), "    ")


def row(version: str, name: str, result: str) -> None:
    print(f"{CLIENT:<14} {version:<15} {result:<12} {name}", flush=True)


def no_other_machine_was_reached() -> None:
    assert not loopback.strangers, loopback.strangers


class Caught:
    """What `raising` caught."""

    error: Any


@contextlib.contextmanager
def raising(kind: type[Exception], *, exactly: bool = True) -> Iterator[Caught]:
    """Fails unless the block raises this, or where it may be one of its kind, what `except` would take for it."""
    caught = Caught()
    try:
        yield caught
    except kind as error:
        caught.error = error
    else:
        raise AssertionError(f"no {kind.__name__}")
    assert type(caught.error) is kind or not exactly, caught.error


def provider(what: str, faults: dict[str, Any] | None = None, *, model: str | None = None) -> Any:
    """Asks the simulated provider's control, or with `faults` tells it how to misbehave."""
    query = "" if model is None else f"?model={model}"
    request = urllib.request.Request(
        f"{PROVIDER}/_control/{what}{query}",
        data=None if faults is None else json.dumps(faults).encode(),
        method="GET" if faults is None else "POST",
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def until(reached: Callable[[], bool], *, within: float = 60.0) -> None:
    """Returns once it is so. The deadline is for what never comes: nothing may hang on how fast a machine is."""
    deadline = time.monotonic() + within
    while not reached():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def occupied() -> int:
    """Slots of all groups of the gateway that are held."""
    return sum(len(group["slots"]) for group in gateway("/v1/groups")["groups"])


def at_rest() -> bool:
    """Nothing that was asked for runs on: no batch, no job, no request, at the gateway or at the provider."""
    batches = gateway("/v1/batches?limit=100")["data"]
    return (
        not any(batch["status"] in {"validating", "in_progress", "finalizing", "cancelling"} for batch in batches)
        and not any(gateway(f"/v1/jobs?status={status}&limit=1")["data"] for status in ("queued", "running"))
        and occupied() == 0
        and provider("ledger")["active"] == 0
    )


def reset() -> None:
    """
    The provider is well again, and the gateway has no grudge against anybody. What was asked for before has ended
    first: it would count in the ledger, hold slots, and meet the faults that are meant for what comes after it.
    """
    until(at_rest, within=90)
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
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)
