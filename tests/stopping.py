"""
How a command of the tests ends when it is told to: at SIGTERM as at Ctrl-C, with what it has started, and in one line.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import NoReturn

#: What a shell makes of a program that SIGINT ended.
_STOPPED = 128 + signal.SIGINT


def command(main: Callable[[], int | None]) -> NoReturn:
    """Runs it as this process's program, which ends with what it gives."""
    # asyncio makes a cancellation of SIGINT, so that all that was entered is left. A shell has what it starts in
    # the background ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        sys.exit(_STOPPED)
