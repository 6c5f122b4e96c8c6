"""
Identities that are made here: of tickets, processes, requests, jobs and keys.

A request makes several, hashes them and writes them out. The driver's type of UUID, which rows come back with anyway,
is a `uuid.UUID` whose making and writing cost a tenth.
"""

from __future__ import annotations

import os
import time
import uuid
from typing import Final

from asyncpg.pgproto.pgproto import UUID


class _Random:
    """Random bits from the kernel, fetched for many at once: asking it is most of what an id costs."""

    _BITS: Final = 74
    _AT_ONCE: Final = 256

    def __init__(self) -> None:
        self._left: list[int] = []
        # A child would give out its parent's.
        os.register_at_fork(after_in_child=self._left.clear)

    def bits(self) -> int:
        try:
            return self._left.pop()
        except IndexError:
            fetched = os.urandom(10 * self._AT_ONCE)
            self._left += [
                int.from_bytes(fetched[at : at + 10], "big") >> (80 - self._BITS) for at in range(0, len(fetched), 10)
            ]
            return self._left.pop()


_random: Final = _Random()


def new_id() -> uuid.UUID:
    """A UUID of version 7 (RFC 9562): 48 bits of milliseconds, the rest random, so that new rows lie together."""
    stamp = time.time_ns() // 1_000_000
    random = _random.bits()
    number = stamp << 80 | 0x7 << 76 | random >> 62 << 64 | 0b10 << 62 | random & 0x3FFF_FFFF_FFFF_FFFF
    return UUID(number.to_bytes(16, "big"))
