"""
The published document against a running gateway: what it says of each operation is what the operation does.

One gateway is asked everything. Each answer, refusals included, is held against the document: its status, its media
type, its body and its headers must be in it, and a body of ours may have nothing that is not.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import jsonschema

from tests.fakes.gateway_process import batch_line, gateway_process
from tests.fakes.simulated import simulated_process

DEADLINE_S = 60
#: Bodies that pass through are described as far as they are read.
OTHERS = ("ChatCompletions", "Responses", "AnthropicMessages")
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
JSON = "application/json"
VERSION = {"anthropic-version": "2023-06-01"}

CONFIGURATION = """
[capture]
enabled = true
[jobs]
batch_poll_s = 0.2

[providers.chat]
protocol = "chat_completions"
base_url = "{url}"
first_byte_s = 60
models = ["sim-embed", "a/b", "a/b/c", "a/b/c/d", "a/b/c/d/e"]

[providers.messages]
protocol = "anthropic_messages"
base_url = "{url}"
models = ["sim-fast"]

[providers.responses]
protocol = "responses"
base_url = "{url}"

[models.chat]
providers = [{{ provider = "chat", model = "sim-fast" }}]
price = {{ input = "0.15", output = "0.60" }}

[models.slow]
providers = [{{ provider = "chat", model = "sim-fast?latency=30" }}]
price = {{ input = "0.15", output = "0.60" }}

[models.claude]
providers = [{{ provider = "messages", model = "sim-fast" }}]
price = {{ input = "3", output = "15" }}

[models.responses]
providers = [{{ provider = "responses", model = "sim-fast" }}]
price = {{ input = "0.15", output = "0.60" }}

[models.embed]
providers = [{{ provider = "chat", model = "sim-embed" }}]
price = {{ input = "0.02", output = "0" }}

# Those of the examples.
[models."gpt-4o"]
providers = [{{ provider = "chat", model = "sim-fast" }}]
price = {{ input = "0.15", output = "0.60" }}

[models."claude-sonnet"]
providers = [{{ provider = "messages", model = "sim-fast" }}]
price = {{ input = "3", output = "15" }}

[models."text-embedding-3-small"]
providers = [{{ provider = "chat", model = "sim-embed" }}]
price = {{ input = "0.02", output = "0" }}

[groups."{group}"]
concurrency = 8
failure_threshold = 100
"""


class Held:
    """A client whose every answer is held against the document."""

    def __init__(self, client: httpx.AsyncClient, document: dict[str, Any]) -> None:
        self.client = client
        self.document = document
        components = copy.deepcopy(document["components"])
        for name, schema in components["schemas"].items():
            if "properties" in schema and not name.startswith(OTHERS):
                schema["additionalProperties"] = False
        self.components = components
        #: By operation, the statuses and media types that were seen.
        self.seen: dict[tuple[str, str], set[tuple[int, str]]] = {}
        self.headers: set[str] = set()

    @property
    def operations(self) -> list[tuple[str, str, dict[str, Any]]]:
        return [
            (method.upper(), path, operation)
            for path, methods in self.document["paths"].items()
            for method, operation in methods.items()
        ]

    def found(self, one: dict[str, Any]) -> dict[str, Any]:
        """What a reference means."""
        if "$ref" not in one:
            return one
        _, kind, name = one["$ref"].removeprefix("#/").split("/")
        found: dict[str, Any] = self.document["components"][kind][name]
        return found

    def parameters(self, operation: dict[str, Any], place: str) -> dict[str, dict[str, Any]]:
        found = [self.found(one) for one in operation.get("parameters", [])]
        return {one["name"]: one for one in found if one["in"] == place}

    async def __call__(self, method: str, path: str, at: dict[str, str] | None = None, **given: Any) -> httpx.Response:
        answer = await self.client.request(method, path.format(**(at or {})), **given)
        operation = self.document["paths"][path][method.lower()]
        self.check(operation, answer, f"{method} {path} {answer.status_code} {answer.text[:500]}")
        media_type = answer.headers["content-type"].partition(";")[0]
        self.seen.setdefault((method, path), set()).add((answer.status_code, media_type))
        self.headers |= set(answer.headers)
        return answer

    def check(self, operation: dict[str, Any], answer: httpx.Response, where: str) -> None:
        told = operation["responses"].get(str(answer.status_code))
        assert told is not None, f"a status that is not told: {where}"
        told = self.found(told)
        media_type = answer.headers["content-type"].partition(";")[0]
        assert media_type in told["content"], where
        schema = told["content"][media_type]["schema"]
        if media_type == JSON:
            self.valid(schema, answer.json(), where)
        elif "contentSchema" in schema:
            for line in answer.text.splitlines():
                self.valid(schema["contentSchema"], json.loads(line), where)
        names = {name.lower() for name in told["headers"]}
        ours = {name for name in answer.headers if name.startswith("x-tollbridge-") or name == "retry-after"}
        assert ours <= names, (where, ours - names)
        for name in names & set(answer.headers):
            kind = next(
                one["schema"] for known, one in self.document["components"]["headers"].items() if known.lower() == name
            )
            value = answer.headers[name]
            self.valid(kind, int(value) if kind.get("type") == "integer" else value, f"{name} of {where}")

    def valid(self, schema: dict[str, Any], value: Any, where: str) -> None:
        validator = jsonschema.Draft202012Validator(
            {**schema, "components": self.components}, format_checker=jsonschema.FormatChecker()
        )
        faults = [f"{fault.json_path}: {fault.message[:300]}" for fault in validator.iter_errors(value)]
        assert not faults, (faults, where)


async def test_the_document_is_true_of_a_running_gateway(database_url: str, tmp_path: Path):
    async with simulated_process() as provider:
        url = urlsplit(provider.url)
        toml = CONFIGURATION.format(url=provider.url, group=f"{url.scheme}://{url.hostname}:{url.port}")
        started = gateway_process(tmp_path, toml, TOLLBRIDGE_DATABASE_URL=database_url)
        async with started as gateway, gateway.rest() as client:
            published = await client.get("/openapi.json", headers={"authorization": ""})
            assert published.status_code == 200, published.text
            document = published.json()
            assert (await client.get("/openapi.json")).content == published.content
            held = Held(client, document)
            await the_chats(held)
            await the_responses(held)
            await the_models(held)
            await the_jobs(held)
            await the_batches(held)
            await the_message_batches(held)
            await the_keys(held)
            await the_rest(held)
            await refusals(held)
            await poison(held)
            unseen = [
                (method, path)
                for method, path, _ in held.operations
                if not any(status < 300 for status, _ in held.seen.get((method, path), ()))
            ]
            assert unseen == []
            # A header that is told and never there would be told for nothing. These need a provider that fails.
            told = {name.lower() for name in document["components"]["headers"]}
            assert told - held.headers == {"retry-after", "x-tollbridge-failover-reason", "x-tollbridge-left-out"}


# ------------------------------------------------------------------ what is answered


async def the_chats(held: Held) -> None:
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("/v1/chat/completions", "chat", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/responses", "responses", {"input": "hello"}),
        ("/v1/messages", "claude", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 50}),
    ]
    for path, own, body in asked:
        # In its provider's own words, and made from another's.
        for model in (own, "chat", "claude"):
            for stream in (False, True):
                answer = await held("POST", path, json={"model": model, "stream": stream, **body})
                assert answer.status_code == 200, answer.text
    warned = {"model": "claude", "messages": [{"role": "user", "content": "hello"}], "seed": 1}
    headers = {"x-tollbridge-unsupported": "drop", "x-tollbridge-session-id": "held"}
    answer = await held("POST", asked[0][0], json=warned, headers=headers)
    assert "x-tollbridge-warnings" in answer.headers
    for _ in range(2):
        answer = await held(
            "POST", asked[0][0], json={"model": "chat", **asked[0][2]}, headers={"Idempotency-Key": "1"}
        )
    assert "x-tollbridge-warnings" in answer.headers
    assert (await held("POST", "/v1/messages/count_tokens", json={"model": "claude", **asked[2][2]})).status_code == 200
    for encoding in ("float", "base64"):
        body = {"model": "embed", "input": ["hello"], "encoding_format": encoding}
        assert (await held("POST", "/v1/embeddings", json=body)).status_code == 200


async def the_responses(held: Held) -> None:
    asked = {"model": "responses", "input": "hello", "background": True}
    made = await held("POST", "/v1/responses", json=asked, headers={"x-tollbridge-deadline-s": "60"})
    one, path = {"response_id": made.json()["id"]}, "/v1/responses/{response_id}"
    until = time.monotonic() + DEADLINE_S
    while (found := await held("GET", path, one)).json()["status"] != "completed":
        assert time.monotonic() < until, found.text
    assert (await held("GET", f"{path}/input_items", one)).json()["data"]
    assert (await held("POST", f"{path}/cancel", one)).status_code == 200
    assert (await held("DELETE", path, one)).status_code == 200


async def the_models(held: Held) -> None:
    unmarked: dict[str, str] = {}
    for headers in (unmarked, VERSION):
        assert (await held("GET", "/v1/models", headers=headers)).status_code == 200
        for name in ("chat", "chat/sim-embed", "chat/a/b", "chat/a/b/c", "chat/a/b/c/d", "chat/a/b/c/d/e"):
            segments = {f"name{at}": part for at, part in enumerate(name.split("/"))}
            path = "/v1/models" + "".join(f"/{{{part}}}" for part in segments)
            assert (await held("GET", path, segments, headers=headers)).status_code == 200, name
    assert (
        await held("GET", "/v1/models", headers=VERSION, params={"limit": "2", "after_id": "chat"})
    ).status_code == 200


async def the_jobs(held: Held) -> None:
    lines = [batch_line("chat", 1, session_id="held"), batch_line("chat", 2), batch_line("nothing", 3)]
    submitted = await held("POST", "/v1/jobs", json={"jobs": lines}, headers={"Idempotency-Key": "2"})
    assert (submitted.status_code, submitted.json()["rejected"]) == (202, 1)
    again = await held("POST", "/v1/jobs", json={"jobs": lines}, headers={"Idempotency-Key": "2"})
    assert (again.json(), again.headers["idempotent-replayed"]) == (submitted.json(), "true")
    ndjson = "\n".join(map(json.dumps, lines))
    headers = {"content-type": "application/x-ndjson"}
    assert (await held("POST", "/v1/jobs", content=ndjson, headers=headers)).status_code == 202
    assert "errors" in (await held("POST", "/v1/jobs", json={"jobs": lines[2:]})).json()
    first, second = ({"job_id": entry["id"]} for entry in submitted.json()["jobs"])
    for job in (first, second):
        done = await held("GET", "/v1/jobs/{job_id}", job, params={"wait": "30"})
        assert done.json()["status"] == "succeeded", done.text
    late = await held("POST", "/v1/jobs", json=batch_line("slow", 4))
    waiting = {"job_id": late.json()["jobs"][0]["id"]}
    assert (await held("GET", "/v1/jobs/{job_id}", waiting)).status_code == 200
    assert (await held("GET", "/v1/jobs", params={"limit": "3", "status": "succeeded"})).json()["data"]
    assert (await held("GET", "/v1/jobs/results")).text
    assert (await held("DELETE", "/v1/jobs/{job_id}", waiting)).status_code == 409
    assert (await held("POST", "/v1/jobs/{job_id}/cancel", waiting)).status_code == 200
    assert (await held("DELETE", "/v1/jobs/{job_id}", first)).status_code == 200
    submission = {"submission_id": submitted.json()["submission_id"]}
    assert (await held("DELETE", "/v1/jobs", params=submission)).status_code == 200


async def the_batches(held: Held) -> None:
    content = "\n".join(json.dumps(batch_line("chat", number)) for number in range(3)).encode()
    form: dict[str, Any] = {
        "files": {"file": ("lines.jsonl", content, "application/jsonl")},
        "data": {"purpose": "batch"},
    }
    uploads = [await held("POST", "/v1/files", **form) for _ in range(2)]
    one, other = ({"file_id": upload.json()["id"]} for upload in uploads)
    asked = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    created = await held("POST", "/v1/batches", json={"input_file_id": one["file_id"], **asked, "metadata": {"a": "b"}})
    assert created.status_code == 200, created.text
    batch = {"batch_id": created.json()["id"]}
    until = time.monotonic() + DEADLINE_S
    while (found := await held("GET", "/v1/batches/{batch_id}", batch)).json()["status"] != "completed":
        assert time.monotonic() < until, found.text
    assert (await held("GET", "/v1/files/{file_id}/content", {"file_id": found.json()["output_file_id"]})).text
    slow = json.dumps(batch_line("slow", 1)).encode()
    form["files"] = {"file": ("lines.jsonl", slow, "application/jsonl")}
    upload = await held("POST", "/v1/files", **form)
    created = await held("POST", "/v1/batches", json={"input_file_id": upload.json()["id"], **asked})
    batch = {"batch_id": created.json()["id"]}
    assert (await held("POST", "/v1/batches/{batch_id}/cancel", batch)).status_code == 200
    assert (await held("GET", "/v1/batches", params={"limit": "1"})).json()["has_more"]
    assert (await held("GET", "/v1/files", params={"limit": "1"})).json()["has_more"]
    assert (await held("GET", "/v1/files/{file_id}", one)).status_code == 200
    assert (await held("GET", "/v1/files/{file_id}/content", one)).content == content
    assert (await held("DELETE", "/v1/files/{file_id}", other)).status_code == 200


async def the_message_batches(held: Held) -> None:
    params = {"max_tokens": 50, "messages": [{"role": "user", "content": "hello"}]}
    asked = [
        {"custom_id": f"a-{n}", "params": {"model": model, **params}} for n, model in enumerate(("claude", "chat"))
    ]
    created = await held("POST", "/v1/messages/batches", json={"requests": asked})
    assert created.status_code == 200, created.text
    path, batch = "/v1/messages/batches/{batch_id}", {"batch_id": created.json()["id"]}
    until = time.monotonic() + DEADLINE_S
    while (found := await held("GET", path, batch)).json()["processing_status"] != "ended":
        assert time.monotonic() < until, found.text
    assert (await held("GET", f"{path}/results", batch)).text.count("\n") == 2
    assert (await held("POST", f"{path}/cancel", batch)).json() == found.json()
    assert (await held("GET", "/v1/messages/batches", params={"limit": "1"})).status_code == 200
    assert (await held("DELETE", path, batch)).status_code == 200


async def the_keys(held: Held) -> None:
    asked = {"name": "held", "scopes": ["chat"], "tags": {"team": "a"}, "expires_at": "2100-01-01T00:00:00Z"}
    made = await held("POST", "/v1/keys", json=asked)
    assert made.status_code == 201, made.text
    key, path = {"key_id": made.json()["id"]}, "/v1/keys/{key_id}"
    assert (await held("GET", path, key)).status_code == 200
    assert (await held("PATCH", path, key, json={"description": "held"})).status_code == 200
    assert (await held("POST", f"{path}/rotate", key, json={"overlap_s": 1})).status_code == 200
    assert (await held("GET", "/v1/keys", params={"limit": "1"})).status_code == 200
    few = {"authorization": f"Bearer {made.json()['secret']}"}
    assert (await held("GET", "/v1/keys", headers=few)).status_code in {401, 403}
    assert (await held("DELETE", path, key)).status_code == 200


async def the_rest(held: Held) -> None:
    for path in ("/healthz", "/readyz", "/openapi.json", "/v1/groups"):
        assert (await held("GET", path)).status_code == 200
    assert (await held("GET", "/v1/usage", params={"session_id": "held", "day": "2026-01-01"})).json()["session"]
    session = ("/v1/sessions/{session_id}", {"session_id": "held"})
    assert (await held("PUT", *session, json={"budget_usd": "5.00"})).status_code == 200
    assert (await held("GET", *session)).json()["budgets"]["own_usd"] is not None
    path = "/v1/invocations"
    newest = (await held("GET", path, params={"limit": "3", "corrections": "all"})).json()
    assert newest["has_more"]
    assert (await held("GET", path, params={"limit": "3", "corrections": "all", "cursor": newest["next_cursor"]})).text
    for wanted, last in (("csv", "\r\n"), ("jsonl", "}\n")):
        assert (await held("GET", path, params={"format": wanted, "status": "success"})).text.endswith(last)
    one = {"ticket_id": newest["data"][0]["ticket_id"]}
    assert (await held("GET", f"{path}/{{ticket_id}}", one)).json()["data"]
    assert (await held("GET", "/v1/stats", params={"group_by": "provider,day,status"})).json()["groups"]
    asked = {"model": "chat", "messages": [{"role": "user", "content": "held"}]}
    answer = await held("POST", "/v1/chat/completions", json=asked)
    request = {"request_id": answer.headers["x-tollbridge-request-id"]}
    async with asyncio.timeout(60):
        while (await held("GET", "/v1/content/{request_id}", request)).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert (await held("DELETE", "/v1/content/{request_id}", request)).status_code == 200
    by_group = {"group_by": "day,provider,tag:team", "from": "2026-01-01"}
    assert (await held("GET", "/v1/usage", params=by_group)).json()["sum"]
    for form in ("csv", "jsonl"):
        assert (await held("GET", "/v1/usage", params={**by_group, "format": form})).status_code == 200
    assert (await held("GET", "/v1/usage", params={"group_by": "nothing"})).status_code == 400
    group = (await held("GET", "/v1/groups")).json()["groups"][0]["group"]
    assert (await held("POST", "/v1/groups/reset", json={"group": group})).status_code == 200


# ------------------------------------------------------------------ what is refused


async def refusals(held: Held) -> None:
    """Of every operation that there is, those which follow from how it is described."""
    made = await held("POST", "/v1/keys", json={"name": "changed", "scopes": ["chat"]})
    there = {"key_id": made.json()["id"]}
    for method, path, operation in held.operations:
        at = dict.fromkeys(held.parameters(operation, "path"), "x") | there
        if operation["security"]:
            assert (await held(method, path, at, headers={"authorization": "Bearer tb_x"})).status_code == 401
        mark = VERSION if path == "/v1/models" else {}
        unknown = await held(method, path, at, params={"zz": "1"}, headers=mark)
        said = unknown.json()["error"]
        known = set(said["message"].partition("known here: ")[2].split(", ")) - {"none"}
        assert (unknown.status_code, said["param"]) == (400, "zz"), path
        assert known == set(held.parameters(operation, "query")), path
        fields = {name for name in held.parameters(operation, "header") if name.startswith("x-tollbridge-")}
        if fields:
            example = operation["requestBody"]["content"][JSON]["example"]
            refused = await held(method, path, at, json=example, headers={"x-tollbridge-zz": "1"})
            assert refused.json()["error"]["param"] == "x-tollbridge-zz", path
            for name in fields:
                refused = await held(method, path, at, json=example, headers={name: b"\xc2\x85"})
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, name), path
        if JSON in operation.get("requestBody", {"content": {}})["content"]:
            await of_the_body(held, method, path, at, operation)
    for path, methods in held.document["paths"].items():
        for method in set(METHODS) - {method.upper() for method in methods}:
            refused = await held.client.request(method, path.replace("{", "").replace("}", ""))
            # A longer literal path may take it in.
            assert refused.status_code == 405 or path.endswith("}"), (method, path)


async def of_the_body(held: Held, method: str, path: str, at: dict[str, str], operation: dict[str, Any]) -> None:
    """Every field of a request is read: what cannot be its value is refused, by its name."""
    assert (await held(method, path, at, content=b"{}")).status_code == 415
    broken = await held(method, path, at, content=b"{", headers={"content-type": JSON})
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json"), path
    content = operation["requestBody"]["content"][JSON]
    schema = content["schema"].get("anyOf", [content["schema"]])[0]
    kind, example = held.found(schema), content["example"]
    held.valid(content["schema"], example, f"the example of {path}")
    # Of a thing that is not there they are good all the same.
    assert (await held(method, path, at, json=example)).status_code in {200, 201, 202, 404}, path
    if kind.get("additionalProperties") is False:
        refused = await held(method, path, at, json={**example, "zz": 1})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "zz"), path
    for name, told in kind["properties"].items():
        if not told:
            continue
        # Neither is a number where a list may stand, nor a list where a number may.
        wrong: Any = [[]] if {"integer", "number"} & set(re.findall(r"\w+", json.dumps(told))) else 7
        refused = await held(method, path, at, json={**example, name: wrong})
        said = refused.json()["error"]
        assert refused.status_code == 400, (path, name, said)
        assert said["param"].startswith(name), (path, name, said)
    for name in kind.get("required", ()):
        refused = await held(method, path, at, json={key: value for key, value in example.items() if key != name})
        assert refused.status_code == 400, (path, name)


# ------------------------------------------------------------------ what should never have been sent

#: No JSON that means one thing: refused everywhere, by its code.
NEVER = {
    "a number that is none": b"NaN",
    "a number without end": b"1e400",
    "half of a pair": rb'"\ud800"',
    "no UTF-8": b'"\xff"',
    "too deep": b"[" * 5000 + b"]" * 5000,
    "two of one name": b'{"a": 1, "a": 2}',
}
#: PostgreSQL has no such text: refused everywhere, by the field.
NUL = (rb'"\u0000"', rb'"a\u0000b"', rb'{"a\u0000": "a"}')
#: Taken by some and refused by others.
ODD = (
    b"1" * 400,
    b"-1",
    b"1e308",
    rb'"\u202e"',
    b'"' + b"x" * 70_000 + b'"',
    b"[[[[]]]]",
    b"{}",
)
IN_URLS = ("%00", "%ff", "%ed%a0%80", "x" * 4000, "%", "%zz", "a%2fb", "%F0%9F%92%A9", "'", "\\")


async def poison(held: Held) -> None:
    """In each field, parameter and segment that is described: it is refused, or taken, and breaks nothing."""
    for method, path, operation in held.operations:
        if JSON in operation.get("requestBody", {"content": {}})["content"]:
            await poison_in_the_body(held, method, path, operation)
        at = held.parameters(operation, "path")
        for bad in IN_URLS:
            for name in at:
                # It may be another path then, or none.
                answer = await held.client.request(method, path.format(**dict.fromkeys(at, "x") | {name: bad}))
                assert 400 <= answer.status_code < 500, (method, path, bad, answer.text)
                assert answer.json()["error"]["code"] == answer.headers["x-tollbridge-code"], (method, path, bad)
            for name in held.parameters(operation, "query"):
                if method != "DELETE":
                    url = f"{path.format(**dict.fromkeys(at, 'x'))}?{name}={bad}"
                    answer = await held.client.request(method, url)
                    assert answer.status_code < 500, (url, answer.text)
                    held.check(operation, answer, url)


async def poison_in_the_body(held: Held, method: str, path: str, operation: dict[str, Any]) -> None:
    never, nul, odd = itertools.cycle(NEVER.values()), itertools.cycle(NUL), itertools.cycle(ODD)
    content = operation["requestBody"]["content"][JSON]
    schema = content["schema"].get("anyOf", [content["schema"]])[0]
    at = dict.fromkeys(held.parameters(operation, "path"), "x")
    if "key_id" in at:
        at = {"key_id": (await held("GET", "/v1/keys")).json()["data"][-1]["id"]}
    for name in held.found(schema)["properties"]:
        rest = json.dumps({key: value for key, value in content["example"].items() if key != name})[1:-1].encode()
        # Each field gets one of each kind; over all fields all of them come.
        for bad in (next(never), next(nul), next(odd)):
            body = b'{"%s": %s%s}' % (name.encode(), bad, b", " + rest if rest else b"")
            answer = await held(method, path, at, content=body, headers={"content-type": JSON})
            assert answer.status_code < 500, (path, name, bad[:50], answer.text)
            if bad in NEVER.values() or bad in NUL:
                assert answer.status_code == 400, (path, name, bad[:50], answer.text)
                said = answer.json()["error"]
                assert said["code"], (path, name, bad[:50], answer.text)
                assert bad not in NUL or said["param"].startswith(name), (path, name, answer.text)
