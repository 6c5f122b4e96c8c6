"""A usual stream of Workers AI: text, one token an event, padded, as its native API sends it."""

from __future__ import annotations

import json
from typing import Any


def stream(events: int) -> bytes:
    chunks: list[dict[str, Any]] = [
        {"response": f" token{i}", "p": "abcdefghijklmnopqrstuvwxyz0123456789"[: i % 36]} for i in range(events - 2)
    ]
    chunks.append({"response": "", "usage": {"prompt_tokens": 9, "completion_tokens": events, "total_tokens": 9}})
    lines = [b"data: " + json.dumps(chunk, separators=(",", ":")).encode() for chunk in chunks]
    return b"\n\n".join([*lines, b"data: [DONE]", b""])
