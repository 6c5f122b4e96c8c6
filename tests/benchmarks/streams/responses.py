"""A usual stream of Responses: text, one token an event, as OpenAI sends it."""

from __future__ import annotations

import json
from typing import Any

_ITEM = "msg_00592e63e61b66660169fab1bada8481a28ef92eb62c168ead"
_RESPONSE: dict[str, Any] = {
    "id": "resp_00592e63e61b66660169fab1b9f8e481a2b321356198d7ac1b",
    "object": "response",
    "created_at": 1743181369,
    "model": "gpt-4o-mini-2024-07-18",
}


def stream(events: int) -> bytes:
    added = {"id": _ITEM, "type": "message", "status": "in_progress", "content": [], "role": "assistant"}
    usage = {"input_tokens": 11, "output_tokens": events - 3, "total_tokens": events + 8}
    told: list[dict[str, Any]] = [
        {"type": "response.created", "response": {**_RESPONSE, "status": "in_progress", "output": []}},
        {"type": "response.output_item.added", "output_index": 0, "item": added},
        *(
            {
                "type": "response.output_text.delta",
                "content_index": 0,
                "delta": f" token{i}",
                "item_id": _ITEM,
                "logprobs": [],
                "obfuscation": "mZhSFjZXJr0X",
                "output_index": 0,
            }
            for i in range(events - 3)
        ),
        {"type": "response.completed", "response": {**_RESPONSE, "status": "completed", "usage": usage}},
    ]
    return b"".join(
        b"event: %b\ndata: %b\n\n"
        % (event["type"].encode(), json.dumps({**event, "sequence_number": n}, separators=(",", ":")).encode())
        for n, event in enumerate(told)
    )
