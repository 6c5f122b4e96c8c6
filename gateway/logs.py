"""
What the gateway writes about itself: events on stderr, machine lines on stdout.

An event is named `gateway.<what_happened>` and carries its ids and numbers as fields; it is one JSON line where a
machine reads it and a coloured one where a person does. Foreign errors may quote what they choke on (a row, a header, a
body), so the text of an exception is never written: its type, its stable codes and the place are. Without that rule a
prompt would reach the log through the first driver that is helpful.

stdout is for whoever started the process: lines such as `gateway.ready`, one JSON object each, and nothing else.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import MutableMapping
from datetime import UTC, datetime
from decimal import Decimal
from types import TracebackType
from typing import Any, BinaryIO, TextIO, TypeAlias

import msgspec
import structlog
from typing_extensions import override

from gateway.errors import GatewayError

Level: TypeAlias = str
LEVELS: dict[Level, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

#: Frames kept of each exception: the innermost ones say where, the outermost ones how it got there.
FRAMES = 12
#: A library's message is kept to this many characters of its first line: what follows is often a repr of its state.
LIBRARY_MESSAGE = 300

Event: TypeAlias = MutableMapping[str, Any]


def configure(*, level: Level = "info", console: bool | None = None, stream: TextIO | None = None) -> None:
    """
    Route every event of this process to `stream` (stderr), once, before the first one. `console` chooses coloured
    lines over JSON; None asks whether the stream is a terminal. Events below `level` cost next to nothing.
    """
    stream = sys.stderr if stream is None else stream
    if console is None:
        console = stream.isatty()
    renderer: list[Any]
    factory: Any
    if console:
        renderer = [
            structlog.processors.TimeStamper(fmt="%H:%M:%S.%f", utc=False, key="timestamp"),
            _describe_exception_as_text,
            structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback),
        ]
        factory = structlog.PrintLoggerFactory(stream)
    else:
        renderer = [
            _describe_exception,
            _render_json,
        ]
        factory = structlog.BytesLoggerFactory(_binary(stream))
    structlog.configure(
        processors=[structlog.processors.add_log_level, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=factory,
        cache_logger_on_first_use=True,
    )
    root = logging.getLogger()
    root.handlers[:] = [_Library()]
    root.setLevel(max(LEVELS[level], logging.WARNING))


def announce(event: str, **fields: str | int | bool | None) -> None:
    """Write one machine line to stdout, at once: `{"event": ..., ...}`."""
    line = msgspec.json.encode({"event": event, **fields}).decode()
    print(line, flush=True)  # noqa: T201  the one place that writes to stdout


def describe(error: BaseException) -> list[dict[str, Any]]:
    """
    The error and its causes, outermost first: type, code where it is a stable one, innermost frames. Without the
    messages, which may quote content.
    """
    chain: list[dict[str, Any]] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        kind = type(current)
        told: dict[str, Any] = {"type": f"{kind.__module__}.{kind.__qualname__}"}
        if isinstance(current, GatewayError):
            told["code"] = str(current.code)
        elif isinstance(current, OSError) and current.errno is not None:
            told["errno"] = current.errno
        # The SQLSTATE of a PostgreSQL error, whichever driver it came through.
        if isinstance(state := getattr(current, "sqlstate", None), str):
            told["sqlstate"] = state
        told["frames"] = _frames(current.__traceback__)
        if isinstance(current, BaseExceptionGroup):
            told["group"] = [describe(inner) for inner in current.exceptions]
        chain.append(told)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return chain


def _frames(trace: TracebackType | None) -> list[str]:
    walked = traceback.extract_tb(trace)[-FRAMES:]
    return [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in walked]


def _exception_of(event: Event) -> BaseException | None:
    given = event.pop("exc_info", None)
    if isinstance(given, BaseException):
        return given
    if isinstance(given, tuple):
        found = given[1]
        return found if isinstance(found, BaseException) else None
    return sys.exc_info()[1] if given else None


def _describe_exception(_logger: object, _method: str, event: Event) -> Event:
    if "exc_info" in event and (error := _exception_of(event)) is not None:
        event["exception"] = describe(error)
    return event


def _describe_exception_as_text(_logger: object, _method: str, event: Event) -> Event:
    if "exc_info" in event and (error := _exception_of(event)) is not None:
        event["exception"] = "\n".join(_lines(describe(error)))
    return event


def _lines(chain: list[dict[str, Any]], indent: str = "") -> list[str]:
    lines = []
    for told in chain:
        codes = " ".join(f"{name}={told[name]}" for name in ("code", "errno", "sqlstate") if name in told)
        lines.append(f"{indent}{told['type']} {codes}".rstrip())
        lines.extend(f"{indent}  {frame}" for frame in told["frames"])
        for inner in told.get("group", ()):
            lines.extend(_lines(inner, indent + "  | "))
    return lines


def _unforeseen(value: object) -> str:
    # Only the name of the type: a repr could hold anything.
    return f"<{type(value).__qualname__}>"


_encode = msgspec.json.Encoder(enc_hook=_unforeseen).encode


def _render_json(_logger: object, _method: str, event: Event) -> bytes:
    now = datetime.now(UTC).isoformat(timespec="microseconds")
    line = {"timestamp": f"{now[:-6]}Z", "level": event.pop("level"), "event": event.pop("event")}
    for name, value in event.items():
        # Money is read by people and by tools that know no exponents.
        line[name] = format(value, "f") if type(value) is Decimal else value
    return _encode(line)


def _binary(stream: TextIO) -> BinaryIO:
    stream.flush()
    return stream.buffer


class _Library(logging.Handler):
    """Brings what libraries log through `logging` (aiohttp, asyncpg, grpc, asyncio) to the same place and form."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        log: Any = structlog.get_logger()
        log.log(
            record.levelno,
            "gateway.library_message",
            logger=record.name,
            message=record.getMessage().partition("\n")[0][:LIBRARY_MESSAGE],
            exc_info=record.exc_info,
        )
