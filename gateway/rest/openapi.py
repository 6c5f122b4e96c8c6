"""
The document of the API, OpenAPI 3.1, made of the endpoints that are served: `GET /openapi.json`.

What every endpoint has (who may use it, what an error looks like, the headers of an answer) is told here once; what one
has for itself is its `Operation`. The document is the same for every configuration but for its bounds, and names no
model, provider or key, so that it is served to anybody.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from aiohttp import web
from msgspec import inspect

from gateway.call import Scope
from gateway.errors import STATUS, Code
from gateway.rest.apis import OF_THE_PROVIDER
from gateway.rest.endpoint import REQUEST_ID, Access, Endpoint, Exchange, answer_headers
from gateway.rest.fields import BY_NAME, CLEAN, FIELDS, IDEMPOTENCY_KEY, MAX_IDEMPOTENCY_KEY_CHARS, OF_JOBS
from gateway.rest.operation import Content, Operation
from gateway.rest.schemas import Schemas
from gateway.rest.status import ErrorBody

PATH: Final = "/openapi.json"
_VERSION: Final = "3.1.0"
_DESCRIPTION: Final = (
    "A gateway between programs and model providers. Its own endpoints are for jobs, keys and operators; those of "
    "OpenAI and Anthropic serve the clients of these vendors. Their bodies are passed on: the schemas name the fields "
    "that the gateway reads, and others are allowed. A job's body is what a direct call of its `url` would have. The "
    "codes of errors are stable. HEAD is answered wherever GET is, and OPTIONS everywhere. The "
    "endpoints of OpenAI and Anthropic are there under the base URLs that other gateways and clouds have for them, too."
)
_SECURITY: Final = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key of this gateway."},
    "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "As Anthropic's clients do."},
    "api_key": {"type": "apiKey", "in": "header", "name": "api-key", "description": "As Azure's clients do."},
}
#: What an answer's headers say. Those of a call are absent where there is nothing to say.
_HEADERS: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    REQUEST_ID: ("The id of this request, also in the log.", {"type": "string"}),
    "x-request-id": ("The same, where OpenAI's clients look for it.", {"type": "string"}),
    "request-id": ("The same, where Anthropic's clients look for it.", {"type": "string"}),
    "x-tollbridge-route": ("Who served it: provider and upstream model.", {"type": "string"}),
    "x-tollbridge-attempts": (
        "How many attempts got a slot, those that could not be sent included.",
        {"type": "integer", "minimum": 0},
    ),
    "x-tollbridge-failover-reason": ("Why the attempt before was not the last.", {"type": "string"}),
    "x-tollbridge-cost-usd": ("What all attempts cost together.", {"type": "string", "format": "decimal"}),
    "x-tollbridge-settlement": (
        "Whether its cost is in the counters.",
        {"enum": ["settled", "pending", "unknown"]},
    ),
    "x-tollbridge-session-usd": (
        "What the session was charged so far, this included. This and the next two: where it is settled.",
        {"type": "string", "format": "decimal"},
    ),
    "x-tollbridge-day-usd": ("The same of its day, of all keys.", {"type": "string", "format": "decimal"}),
    "x-tollbridge-total-usd": ("The same of all days.", {"type": "string", "format": "decimal"}),
    "x-tollbridge-warnings": ("What was dropped, of the request or the answer.", {"type": "string"}),
    "x-tollbridge-left-out": ("Routes that were not tried, and why.", {"type": "string"}),
    "x-tollbridge-code": ("The stable code of the error.", {"enum": [code.value for code in Code]}),
    "x-tollbridge-dispatched": ("Whether a provider got any of it; absent: not known.", {"enum": ["true", "false"]}),
    "x-should-retry": ("`false`: a client must not repeat it by itself.", {"enum": ["false"]}),
    "Retry-After": ("Seconds after which trying again may help.", {"type": "integer", "minimum": 0}),
    "WWW-Authenticate": ("With a 401.", {"enum": ["Bearer"]}),
    "Idempotent-Replayed": ("`true`: this is the answer of an earlier request.", {"enum": ["true"]}),
}
_OF_A_CALL: Final = tuple(
    f"x-tollbridge-{name}"
    for name in (
        "route",
        "attempts",
        "failover-reason",
        "cost-usd",
        "settlement",
        "session-usd",
        "day-usd",
        "total-usd",
        "warnings",
        "left-out",
    )
)
_OF_AN_ERROR: Final = ("x-tollbridge-code", "x-tollbridge-dispatched", "x-should-retry", "Retry-After")

_HEADER: Final = {"in": "header", "description": "The caller's own name for what it asks: it is done once."}
#: Statuses of refusals that come before it is known what is asked for (what is no HTTP, a head too long to be read, too
#: many connections), so that they are told in our words everywhere.
_BEFORE_ROUTING: Final = frozenset(
    STATUS[code].http for code in (Code.INVALID_REQUEST, Code.UNAUTHENTICATED, Code.QUEUE_FULL)
)
_SEGMENT: Final = re.compile(r"\{(\w+)\}")


def routes(endpoints: Sequence[Endpoint]) -> list[Endpoint]:
    """These endpoints, and the one that tells of them all."""
    made: list[bytes] = []

    async def serve(exchange: Exchange) -> web.StreamResponse:
        exchange.query(())
        if not made:
            made.append(await asyncio.to_thread(lambda: msgspec.json.encode(document(every))))
        return web.Response(body=made[0], headers=answer_headers(exchange.request_id))

    told = Operation(summary="This document", gives=(Content(type=dict[str, Any]),))
    every = [*endpoints, Endpoint(method="GET", path=PATH, access=Access.PUBLIC, handler=serve, told=told)]
    return every


def document(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """The document of these endpoints."""
    made = _Document()
    for endpoint in endpoints:
        made.add(endpoint)
    return {
        "openapi": _VERSION,
        "info": {
            "title": "Tollbridge",
            "version": importlib.metadata.version("tollbridge"),
            "description": _DESCRIPTION,
        },
        "servers": [{"url": "/"}],
        "paths": made.paths,
        "components": {
            "securitySchemes": _SECURITY,
            "schemas": made.schemas.components,
            "parameters": made.parameters,
            "responses": made.responses,
            "headers": {
                name: {"description": description, "schema": schema} for name, (description, schema) in _HEADERS.items()
            },
        },
    }


def operation_id(method: str, path: str) -> str:
    """`post_v1_jobs_job_id_cancel`: it changes only with the endpoint itself."""
    return "_".join(re.findall(r"\w+", f"{method.lower()} {path}"))


class _Document:
    """What is said of several endpoints stands in it once."""

    def __init__(self) -> None:
        self.paths: dict[str, dict[str, Any]] = {}
        self.schemas = Schemas()
        self.parameters: dict[str, dict[str, Any]] = {}
        self.responses: dict[str, dict[str, Any]] = {}

    def add(self, endpoint: Endpoint) -> None:
        told, access = endpoint.told, endpoint.access
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in _SEGMENT.findall(endpoint.path)
        ]
        parameters += [*self._parameters(told.query, "query"), *self._parameters(told.headers, "header")]
        if told.calls:
            parameters += [
                self._parameter(field.header, field.text_kind or field.kind)
                for field in (*FIELDS, *(OF_JOBS if told.makes_job else ()))
            ]
        if told.repeatable and told.calls:
            key = BY_NAME["idempotency_key"]
            parameters.append({"name": IDEMPOTENCY_KEY, **_HEADER, "schema": self.schemas.of(key.kind)})
        elif told.repeatable:
            kind = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_IDEMPOTENCY_KEY_CHARS, pattern=CLEAN)]
            parameters.append({"name": IDEMPOTENCY_KEY, **_HEADER, "schema": self.schemas.of(kind)})
        roles = [access.value] if isinstance(access, Scope) else []
        self.paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = {
            "operationId": operation_id(endpoint.method, endpoint.path),
            "tags": [endpoint.path.removeprefix("/v1").split("/")[1]],
            **({"summary": told.summary} if told.summary else {}),
            **({"description": told.description} if told.description else {}),
            "security": [] if access is Access.PUBLIC else [{name: roles} for name in _SECURITY],
            **({"parameters": parameters} if parameters else {}),
            **({"requestBody": {"required": True, "content": self._contents(told.takes)}} if told.takes else {}),
            "responses": {**self._answers(endpoint), **self._refusals(endpoint)},
        }

    def _parameter(self, name: str, kind: Any) -> dict[str, Any]:
        """A header that several take."""
        self.parameters[name] = {"name": name, "in": "header", "schema": self.schemas.of(kind)}
        return {"$ref": f"#/components/parameters/{name}"}

    def _parameters(self, kind: type | None, place: str) -> Iterator[dict[str, Any]]:
        """Of the fields of a struct."""
        if kind is None:
            return
        info = inspect.type_info(kind)
        assert isinstance(info, inspect.StructType)
        told = self.schemas.fields_of(kind)
        for field in info.fields:
            yield {
                "name": field.encode_name,
                "in": place,
                **({"required": True} if field.required else {}),
                "schema": _given(told[field.encode_name]),
            }

    def _contents(self, contents: Iterable[Content]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for content in contents:
            schema = self.schemas.of(content.type)
            if content.required:
                schema = {"allOf": [schema], "required": list(content.required)}
            if content.lines:
                schema = {"type": "string", "description": "One JSON document a line.", "contentSchema": schema}
            made[content.media_type] = {
                "schema": schema,
                **({"example": content.example} if content.example is not None else {}),
            }
        return made

    def _answers(self, endpoint: Endpoint) -> dict[str, Any]:
        told = endpoint.told
        headers = [REQUEST_ID]
        if told.calls or told.attributed:
            headers += [*(api.request_id for api in endpoint.apis), *_OF_A_CALL]
        if told.attributed:
            headers.append("x-tollbridge-code")
        if told.makes_job or (told.repeatable and not told.calls):
            headers.append("Idempotent-Replayed")
        links = {
            name: {
                "operationId": operation_id(link.method, link.path),
                "parameters": {to: f"$response.body#{pointer}" for to, pointer in link.parameters.items()},
            }
            for name, link in told.links.items()
        }
        return {
            str(status): {
                "description": "The answer.",
                "headers": _named(headers),
                "content": self._contents([one for one in told.gives if one.status == status]),
                **({"links": links} if links and status < 300 else {}),
            }
            for status in dict.fromkeys(content.status for content in told.gives)
        }

    def _refusals(self, endpoint: Endpoint) -> dict[str, Any]:
        """By status, every code that the endpoint may refuse with."""
        by_status: dict[int, list[str]] = {}
        codes = _codes(endpoint)
        for code in Code:
            if code in codes:
                by_status.setdefault(STATUS[code].http, []).append(code.value)
        if endpoint.told.calls and endpoint.apis:
            for status in OF_THE_PROVIDER:
                said = by_status.setdefault(status, [])
                said += [] if Code.UPSTREAM_REJECTED.value in said else [Code.UPSTREAM_REJECTED.value]
            by_status.setdefault(429, []).append(Code.ALL_ROUTES_FAILED.value)
        kinds = tuple(api.error for api in endpoint.apis) or (ErrorBody,)
        aliases = [api.request_id for api in endpoint.apis]
        called = _OF_A_CALL if endpoint.told.calls else ()
        answered = {one.status for one in endpoint.told.gives}
        return {
            str(status): self._refusal(
                status,
                {
                    "description": "Refused: " + ", ".join(f"`{code}`" for code in said) + ".",
                    "headers": _named(
                        [
                            REQUEST_ID,
                            *aliases,
                            *_OF_AN_ERROR,
                            *called,
                            *(["WWW-Authenticate"] if status == STATUS[Code.UNAUTHENTICATED].http else []),
                        ]
                    ),
                    "content": {
                        "application/json": {
                            "schema": self._either(
                                (
                                    *kinds,
                                    *([ErrorBody] if status in _BEFORE_ROUTING else []),
                                    *([endpoint.told.refused[status]] if status in endpoint.told.refused else []),
                                )
                            )
                        }
                    },
                },
            )
            for status, said in sorted(by_status.items())
            if status not in answered
        }

    def _either(self, kinds: Iterable[type]) -> dict[str, Any]:
        shapes = [self.schemas.of(kind) for kind in dict.fromkeys(kinds)]
        return shapes[0] if len(shapes) == 1 else {"anyOf": shapes}

    def _refusal(self, status: int, response: dict[str, Any]) -> dict[str, Any]:
        number = 1
        while self.responses.setdefault(f"Refused{status}_{number}", response) != response:
            number += 1
        return {"$ref": f"#/components/responses/Refused{status}_{number}"}


def _given(schema: dict[str, Any]) -> dict[str, Any]:
    """Of a parameter, which may be left out, but has no null."""
    choices = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    return choices[0] if len(choices) == 1 else schema


def _codes(endpoint: Endpoint) -> frozenset[Code]:
    """What the endpoint says of itself, and what follows from how it is reached."""
    told = endpoint.told
    codes = {Code.INVALID_REQUEST, Code.INTERNAL, Code.QUEUE_FULL, *told.errors}
    if endpoint.access is not Access.PUBLIC:
        codes |= {Code.UNAUTHENTICATED, Code.PERMISSION_DENIED, Code.CONTROL_STORE_UNAVAILABLE}
    if "{" in endpoint.path:
        codes.add(Code.NOT_FOUND)
    if told.takes:
        codes |= {Code.INVALID_JSON, Code.PAYLOAD_TOO_LARGE, Code.UNSUPPORTED_MEDIA_TYPE, Code.REQUEST_TIMEOUT}
    if told.repeatable:
        codes |= {Code.IDEMPOTENCY_MISMATCH, Code.IDEMPOTENCY_IN_PROGRESS, Code.IDEMPOTENCY_ANSWER_LOST}
    return frozenset(codes)


def _named(headers: Iterable[str]) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in dict.fromkeys(headers)}
