"""
A usual stream of Gemini: text, one token an event, with the usage in each.

The Gemini API ends its lines with CR LF, which the bare split beside it does not know; here it is LF for both.
"""

from __future__ import annotations

import json
from typing import Any


def stream(events: int) -> bytes:
    chunks: list[dict[str, Any]] = [
        {
            "candidates": [{"content": {"parts": [{"text": f" token{i}"}], "role": "model"}, "index": 0}],
            "usageMetadata": {
                "promptTokenCount": 13,
                "candidatesTokenCount": i,
                "totalTokenCount": 92 + i,
                "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 13}],
                "thoughtsTokenCount": 79,
            },
            "modelVersion": "gemini-2.5-flash",
            "responseId": "U7-Fao_EK_-VvdIP1-aJ8Qo",
        }
        for i in range(events)
    ]
    chunks[-1]["candidates"][0]["finishReason"] = "STOP"
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)
