"""What is left by the rate-limit headers of recorded answers, whatever the protocol. Skipped where there are none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from adapters.limits import remaining

_CORPUS = Path(os.environ.get("TOLLBRIDGE_WIRE_CORPUS") or Path(__file__).parents[3] / "shared" / "wire")
_FOLDERS = ("openai_chat", "openai_responses", "anthropic_messages", "compat_azure_openai", "compat_cerebras")


def _load() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for folder in _FOLDERS:
        for path in sorted((_CORPUS / folder).glob("*.json")):
            response: Any = json.loads(path.read_text()).get("response")
            headers = response.get("headers") if isinstance(response, dict) else None
            if isinstance(headers, dict):
                found[f"{folder}/{path.stem}"] = {name.lower(): str(value) for name, value in headers.items()}
    return found


RECORDED = _load() if _CORPUS.is_dir() else {}

pytestmark = pytest.mark.skipif(not RECORDED, reason="no recorded traffic: set TOLLBRIDGE_WIRE_CORPUS")


def test_every_recorded_answer_that_says_what_is_left_is_understood():
    saying = {n: h for n, h in RECORDED.items() if any("ratelimit" in k and "remaining" in k for k in h)}
    assert len(saying) >= 40
    for name, headers in saying.items():
        left = remaining(headers, 0.0)
        assert left is not None, name
        for said, limit in ((left.requests, "requests"), (left.tokens, "tokens")):
            limits = [
                int(value)
                for header, value in headers.items()
                if header.startswith(("x-ratelimit-limit-" + limit, f"anthropic-ratelimit-{limit}-limit"))
            ]
            assert said is None or not limits or 0 <= said <= max(limits), name


@pytest.mark.parametrize(
    ("name", "requests", "tokens"),
    [
        ("anthropic_messages/err429_retry_after", 0, 8000),
        ("compat_azure_openai/err500", 48, None),
        ("compat_azure_openai/plain", 99, 99_998),
        ("compat_cerebras/tool_call_ratelimit_headers", 1_439_878, 997_483),
        ("openai_responses/azure_plain", 49, 49_994),
    ],
)
def test_what_these_recordings_say(name, requests, tokens):
    left = remaining(RECORDED[name], 0.0)
    assert left is not None
    assert (left.requests, left.tokens) == (requests, tokens)
