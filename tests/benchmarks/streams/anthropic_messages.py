"""A usual stream of the Messages API: text, one token an event, padded with blanks as Anthropic sends it."""

from __future__ import annotations

import json
from typing import Any


def stream(events: int) -> bytes:
    message: dict[str, Any] = {
        "model": "claude-haiku-4-5-20251001",
        "id": "msg_01T8kTq7cYyYJeQ5DxcVUc6D",
        "type": "message",
        "role": "assistant",
        "content": [],
        "stop_reason": None,
        "usage": {"input_tokens": 10, "cache_read_input_tokens": 0, "output_tokens": 2},
    }
    told: list[dict[str, Any]] = [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    ]
    told += [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": f" token{i}"}}
        for i in range(events - 5)
    ]
    told += [
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": events}},
        {"type": "message_stop"},
    ]
    lines = [
        f"event: {event['type']}\ndata: {json.dumps(event, separators=(',', ':'))[:-1]}{' ' * (i % 12)}}}\n\n"
        for i, event in enumerate(told)
    ]
    return "".join(lines).encode()
