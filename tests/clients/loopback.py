"""
Keeps a client at home: it may reach this machine and no other, and what it tried is remembered.

Frameworks like to tell somebody what they do. `python -m tests.clients.loopback <module> ...` runs a command line so.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
from typing import Any

#: Of a command line that tried to reach another machine.
STRAYED = 97

#: Whom it tried to reach.
strangers: list[str] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event in {"socket.connect", "socket.sendto"}:
        own, address = arguments
        host = "localhost" if own.family == socket.AF_UNIX else address[0]
    elif event == "socket.getaddrinfo":
        host = arguments[0]
    else:
        return
    if host not in {None, "127.0.0.1", "::1", "localhost"}:
        strangers.append(str(host))
        raise PermissionError(f"no other machine may be reached: {host}")


def stay() -> None:
    """From now on, for the whole process."""
    sys.addaudithook(_watch)


def main() -> None:
    stay()
    del sys.argv[0]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    finally:
        if strangers:
            print(f"tried to reach {', '.join(strangers)}", file=sys.stderr, flush=True)
            os._exit(STRAYED)


if __name__ == "__main__":
    main()
