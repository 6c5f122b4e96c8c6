"""Ids as callers write them."""

from __future__ import annotations

import re
import uuid
from typing import Final

_WRITTEN: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE | re.ASCII)


def as_uuid(text: str) -> uuid.UUID:
    """
    In the form of RFC 9562, section 4, which is what `format: uuid` promises. Raises ValueError for all else, also for
    what `uuid.UUID` would take: braces, `urn:uuid:`, dashes elsewhere or none.
    """
    if not _WRITTEN.fullmatch(text):
        raise ValueError("no UUID")
    return uuid.UUID(text)
