"""Fixtures for all tests, and the rule that a test reaches no other machine."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import sys
import urllib.parse
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import structlog

pytest_plugins = ["tests.postgres", "tests.fakes.simulated", "tests.fakes.faces"]

# Every run tries the same examples and none is timed, so that whether a change passes depends on the change alone. The
# other profile looks for new ones: pytest --hypothesis-profile=explore
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1_000)
hypothesis.settings.load_profile("steady")

_database = urllib.parse.urlsplit(os.environ.get("TOLLBRIDGE_TEST_DATABASE_URL", "")).hostname
_ALLOWED = {entry[4][0] for entry in socket.getaddrinfo(_database, None)} if _database else set()


class OutsideReached(BaseException):
    """A test tried to reach another machine. A BaseException, so that no retry or failover takes it for a failure."""


def _refuse_outside(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in {"socket.connect", "socket.sendto"}:
        return
    address = arguments[1]
    if not isinstance(address, tuple) or address[0] in _ALLOWED:
        return
    with contextlib.suppress(ValueError):
        if address[0] == "localhost" or ipaddress.ip_address(address[0]).is_loopback:
            return
    raise OutsideReached(f"{event} to {address[0]}")


sys.addaudithook(_refuse_outside)


@pytest.fixture(autouse=True)
def loggers_forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A logger that is cached for good would write to the streams of a test that is over."""
    configure = structlog.configure
    monkeypatch.setattr(
        structlog, "configure", lambda **given: configure(**given | {"cache_logger_on_first_use": False})
    )
    yield
    structlog.reset_defaults()
