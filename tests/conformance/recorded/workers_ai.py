"""What the recorded traffic in Workers AI's native API means, and one stream in its other shape."""

from __future__ import annotations

import json
from typing import Any

from adapters.errors import ErrorClass
from tests.fakes.recorded import Meaning, Recorded, events_end

_O, _T = ErrorClass.OURS, ErrorClass.TRANSIENT
_ERRORS: dict[str, Meaning] = {
    "cloudflare_workers_ai/err400_no_such_model_5007": (_O, None, False, False),
    "cloudflare_workers_ai/err401_auth_10000": (_O, None, False, True),
    "cloudflare_workers_ai/err429_capacity_3040": (_T, None, False, False),
    "cloudflare_workers_ai/err429_daily_neurons_3036": (_O, None, False, True),
}


def _check(_name: str, told: dict[str, Any], facts: dict[str, Any]) -> None:
    (choice,) = told["choices"].values()
    text = facts.get("text") or ""
    # In JSON mode the answer is the value itself.
    assert (choice["text"] if isinstance(text, str) else json.loads(choice["text"])) == text
    calls = facts.get("tool_calls", [])
    assert [call["name"] for call in choice["tool_calls"]] == [call["name"] for call in calls]
    for known, call in zip(choice["tool_calls"], calls, strict=True):
        arguments = call["arguments"]
        assert json.loads(known["arguments"]) == (json.loads(arguments) if isinstance(arguments, str) else arguments)
        assert known["id"]
        assert known["id"] == call.get("id", known["id"])
    assert choice["end"] == (["tool_calls", ""] if calls else ["stop", ""])
    usage = facts.get("usage") or {}
    assert told["usage"].get("input_total") == usage.get("prompt_tokens")
    assert told["usage"].get("output_total") == usage.get("completion_tokens")


RECORDED = Recorded(
    protocol="workers_ai",
    folders=("cloudflare_workers_ai",),
    errors=_ERRORS,
    errors_in_200={},
    check=_check,
    cuts=lambda _name, body: events_end(body, b"data: [DONE]"),
    at_least=(3, 3, 4),
)
