"""
What Schemathesis cannot know: which models there are, that a key which revokes itself ends everything, and what every
refusal of ours has.
"""

from __future__ import annotations

import itertools
import json
import os
from typing import Any

import schemathesis

KEPT = frozenset(os.environ["CLIENTS_KEYS"].split(","))
#: Of a model's name.
MOST_CHARACTERS = 256
NOBODY = "00000000-0000-0000-0000-000000000000"
MODELS = {"post_v1_messages": "claude", "post_v1_messages_count_tokens": "claude", "post_v1_responses": "responses",
          "post_v1_embeddings": "embed"}  # fmt: skip

_numbers = itertools.count()


@schemathesis.serializer("application/x-ndjson")
def lines(context: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


@schemathesis.deserializer("application/jsonl", "application/x-ndjson")
def as_text(context: Any, response: Any) -> str:
    return str(response.content, "utf-8")


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """A model that there is, in place of any: else nothing would get past the 404."""
    if isinstance(body, dict):
        operation = context.operation.definition.raw.get("operationId", "")
        # One that is too long stays, or what is meant to be refused would be taken.
        if isinstance(body.get("model"), str) and 0 < len(body["model"]) <= MOST_CHARACTERS:
            body["model"] = MODELS.get(operation, "chat")
        inner = body.get("body")
        if operation == "post_v1_jobs" and isinstance(inner, dict) and isinstance(body.get("url"), str):
            body["url"] = "/v1/chat/completions"
            inner.setdefault("model", "chat")
            inner.setdefault("messages", [{"role": "user", "content": "hello"}])
    return body


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    if case.path_parameters and case.path_parameters.get("key_id") in KEPT:
        case.path_parameters["key_id"] = NOBODY
    for name in ("idempotency-key", "x-tollbridge-idempotency-key"):
        value = (case.headers or {}).get(name)
        # One in four is left as it is: a name that was used for something else.
        if isinstance(value, str) and 0 < len(value) < 200 and (number := next(_numbers)) % 4:
            case.headers[name] = f"{value}-{number}"


@schemathesis.check
def refusals_are_ours(ctx: Any, response: Any, case: Any) -> None:
    """Every refusal has a stable code, and every answer the id of its request."""
    header = {name.lower(): values[0] for name, values in response.headers.items()}
    assert header.get("x-tollbridge-request-id"), "no request id"
    if response.status_code >= 400 and case.operation.path != "/readyz":
        said = json.loads(response.content)["error"]
        assert header.get("x-tollbridge-code"), "no code"
        assert said["message"], "no message"
        assert said["code"], "no code in the body"
        assert "Traceback" not in response.text
