"""A usual stream of Chat Completions: text, one token an event, as OpenAI sends it."""

from __future__ import annotations

import json
from typing import Any


def stream(events: int, *, padded: bool = True) -> bytes:
    """`padded`: with OpenAI's own padding, so that no two events are alike but for their text."""
    chunks: list[dict[str, Any]] = [
        {
            "id": "chatcmpl-BG7OTM3ub2HDuZ1PCj137Me5EGRPt",
            "object": "chat.completion.chunk",
            "created": 1743181369,
            "model": "gpt-4o-mini-2024-07-18",
            "service_tier": "default",
            "system_fingerprint": "fp_f97eff32c5",
            "choices": [{"index": 0, "delta": {"content": f" token{i}"}, "logprobs": None, "finish_reason": None}],
            "usage": None,
            **({"obfuscation": "AELkdaSG1tO5NZTbWq7"[i % 8 :]} if padded else {}),
        }
        for i in range(events - 2)
    ]
    chunks.append({"id": "x", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    lines = [b"data: " + json.dumps(chunk, separators=(",", ":")).encode() for chunk in chunks]
    return b"\n\n".join([*lines, b"data: [DONE]", b""])
