from __future__ import annotations

import io
import logging
from decimal import Decimal
from typing import Any

import msgspec
import pytest
import structlog

from gateway import logs
from gateway.errors import Conflict


class Stderr(io.TextIOWrapper):
    """A stderr that is not a terminal and that can be read."""

    def __init__(self) -> None:
        self.raw_bytes = io.BytesIO()
        super().__init__(self.raw_bytes, encoding="utf-8")

    def text(self) -> str:
        self.flush()
        return self.raw_bytes.getvalue().decode()

    def events(self) -> list[dict[str, Any]]:
        return [msgspec.json.decode(line) for line in self.text().splitlines()]


@pytest.fixture
def stderr():
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield Stderr()
    structlog.reset_defaults()
    root.handlers[:] = before
    root.setLevel(level)


def test_an_event_is_one_json_line_with_its_time_level_and_name_first(stderr):
    logs.configure(stream=stderr)
    structlog.get_logger().info("gateway.request_ended", tokens=12, cost_usd=Decimal("1E-7"))
    (line,) = stderr.text().splitlines()
    event = msgspec.json.decode(line)
    assert list(event)[:3] == ["timestamp", "level", "event"]
    assert event["event"] == "gateway.request_ended"
    assert event["cost_usd"] == "0.0000001"
    assert event["timestamp"].endswith("Z")


def test_events_below_the_level_are_not_written(stderr):
    logs.configure(stream=stderr, level="warning")
    structlog.get_logger().info("gateway.request_ended")
    assert stderr.text() == ""


@pytest.mark.parametrize("console", [False, True], ids=["json", "console"])
def test_the_text_of_an_exception_never_reaches_the_log(stderr, console):
    logs.configure(stream=stderr, console=console)

    def fail() -> None:
        try:
            int("tell me a secret")
        except ValueError as error:
            raise Conflict("my card is 4111") from error

    try:
        fail()
    except Conflict:
        structlog.get_logger().exception("gateway.job_failed")
    text = stderr.text()
    assert "secret" not in text
    assert "4111" not in text
    assert "gateway.errors.Conflict" in text
    assert "conflict" in text
    assert "builtins.ValueError" in text
    assert "test_logs.py" in text


def test_a_value_nobody_foresaw_is_named_and_not_shown(stderr):
    class Prompt:
        def __repr__(self) -> str:
            return "tell me a secret"

    logs.configure(stream=stderr)
    structlog.get_logger().info("gateway.x", what=Prompt())
    assert "secret" not in stderr.text()


def test_an_error_of_the_system_or_the_database_keeps_its_stable_code():
    class Deadlock(Exception):
        sqlstate = "40P01"

    [told] = logs.describe(Deadlock("DETAIL: the failing row contains (secret)"))
    assert told["sqlstate"] == "40P01"
    assert logs.describe(ConnectionRefusedError(111, "Connect call failed"))[0]["errno"] == 111


def test_libraries_are_heard_from_warning_on_and_only_by_their_first_line(stderr):
    logs.configure(stream=stderr)
    logging.getLogger("aiohttp.access").info("GET /")
    logging.getLogger("asyncio").error("Task exception was never retrieved\nfuture: <Task ... ValueError('secret')>")
    [event] = stderr.events()
    assert event["logger"] == "asyncio"
    assert event["message"] == "Task exception was never retrieved"
    assert event["level"] == "error"


def test_a_machine_line_is_one_json_object_on_stdout(capsys):
    logs.announce("gateway.ready", rest="http://127.0.0.1:8080", grpc="127.0.0.1:50051")
    assert (
        capsys.readouterr().out == '{"event":"gateway.ready","rest":"http://127.0.0.1:8080","grpc":"127.0.0.1:50051"}\n'
    )
