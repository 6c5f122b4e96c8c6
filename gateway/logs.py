"""
What the gateway writes about itself: events on stderr, machine lines on stdout.

An event is named `gateway.<what_happened>` and carries its ids and numbers as fields; it is one JSON line where a
machine reads it and a coloured one where a person does. Foreign errors may quote what they choke on (a row, a header, a
body), so the text of an exception is never written: its type, its stable codes and the place are. Without that rule a
prompt would reach the log through the first driver that is helpful.

stdout is for whoever started the process: lines such as `gateway.ready`, one JSON object each, and nothing else.
"""

from __future__ import annotations

import atexit
import logging
import sys
import traceback
from collections.abc import Callable, Mapping, MutableMapping
from datetime import UTC, datetime
from decimal import Decimal
from types import TracebackType
from typing import Any, Final, TextIO, TypeAlias

import msgspec
import structlog
from typing_extensions import override

from gateway.errors import GatewayError
from gateway.lines import Lines

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


def configure(
    *, level: Level = "info", console: bool | None = None, stream: TextIO | None = None
) -> Callable[[], None]:
    """
    Route every event of this process to `stream` (stderr), once, before the first one. `console` chooses coloured
    lines over JSON; None asks whether the stream is a terminal. Events below `level` cost next to nothing.

    Gives what writes out all that waits to be written. It is called at the end of the interpreter, too.
    """
    stream = sys.stderr if stream is None else stream
    if console is None:
        console = stream.isatty()
    write_out = stream.flush
    if console:
        structlog.configure(
            processors=[
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="%H:%M:%S.%f", utc=False, key="timestamp"),
                _describe_exception_as_text,
                structlog.dev.ConsoleRenderer(
                    colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback
                ),
            ],
            wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
            logger_factory=structlog.PrintLoggerFactory(stream),
            cache_logger_on_first_use=True,
        )
    else:
        lines = Lines(stream, lost=_lost)
        write_out = lines.end
        atexit.register(write_out)
        structlog.configure(
            processors=[_unchanged],
            wrapper_class=_logger_from(level),
            logger_factory=lambda *_: lines,
            cache_logger_on_first_use=True,
        )
    root = logging.getLogger()
    root.handlers[:] = [_Library()]
    root.setLevel(max(LEVELS[level], logging.WARNING))
    return write_out


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


def _line(level: str, event: str, fields: Mapping[str, Any]) -> bytes:
    now = datetime.now(UTC).isoformat(timespec="microseconds")
    line = {"timestamp": f"{now[:-6]}Z", "level": level, "event": event, **fields}
    if "exc_info" in line and (error := _exception_of(line)) is not None:
        line["exception"] = describe(error)
    if Decimal in map(type, line.values()):
        # Money is read by people and by tools that know no exponents.
        line = {name: format(value, "f") if type(value) is Decimal else value for name, value in line.items()}
    return _encode(line) + b"\n"


def _lost(count: int) -> bytes:
    return _line("warning", "gateway.log_lines_lost", {"count": count})


def _unchanged(_logger: object, _method: str, event: Event) -> Event:
    """Stands for the processors, which `_Logger` does without, until a test puts its own in their place."""
    return event


class _Logger(structlog.BoundLoggerBase):
    """
    What `structlog.get_logger()` gives where events are JSON lines. structlog's own goes through a list of processors
    and twice as many calls; with this one, an event costs hardly more than its encoding.
    """

    def debug(self, event: str, **fields: Any) -> None:
        self._say("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._say("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._say("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._say("error", event, fields)

    def exception(self, event: str, **fields: Any) -> None:
        self._say("error", event, {"exc_info": True, **fields})

    def log(self, level: int, event: str, **fields: Any) -> None:
        """`level` is one of `logging`'s."""
        getattr(self, _NAMES.get(level, "error"))(event, **fields)

    def _say(self, level: str, event: str, fields: Mapping[str, Any]) -> None:
        if next(iter(self._processors)) is not _unchanged:
            self._proxy_to_logger(level, event, **fields)
            return
        if self._context:
            fields = {**self._context, **fields}
        line = _line(level, event, fields)
        if level in _AT_ONCE:
            self._logger.write_now(line)
        else:
            self._logger.write(line)


#: What goes wrong may be the last that a process says.
_AT_ONCE: Final = frozenset({"warning", "error"})
_NAMES: Final[Mapping[int, Level]] = {number: name for name, number in LEVELS.items()}


def _logger_from(level: Level) -> type[_Logger]:
    """Events below the level are not even made."""
    silent = {name: _nothing for name, number in LEVELS.items() if number < LEVELS[level]}
    return type("_Logger", (_Logger,), silent)


def _nothing(_logger: _Logger, _event: str, **_fields: Any) -> None: ...


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
