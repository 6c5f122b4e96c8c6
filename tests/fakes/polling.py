"""Waiting for what nobody tells."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(holds: Callable[[], object], within_s: float = 30.0) -> None:
    """Looks again and again. Raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110  nobody says when
            await asyncio.sleep(0.005)
