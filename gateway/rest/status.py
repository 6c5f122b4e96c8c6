"""How an error looks over HTTP: one body shape for every refusal, whoever refuses."""

from __future__ import annotations

import math

from aiohttp import web

from gateway.errors import Code, GatewayError
from gateway.rest.endpoint import json_response


def error_body(error: GatewayError, request_id: str) -> dict[str, dict[str, str | bool | None]]:
    """`{"error": {"code", "message", "type", "param", "dispatched", "request_id"}}`."""
    return {
        "error": {
            "code": error.code.value,
            "message": error.message,
            "type": error.status.type,
            "param": error.param,
            "dispatched": error.dispatched,
            "request_id": request_id,
        }
    }


def error_headers(error: GatewayError) -> dict[str, str]:
    """`Retry-After` in whole seconds, rounded up, where waiting helps; the challenge with a 401."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(0, math.ceil(error.retry_after_s)))
    if error.code is Code.UNAUTHENTICATED:
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def error_response(error: GatewayError, request_id: str) -> web.Response:
    return json_response(
        error_body(error, request_id), request_id=request_id, status=error.status.http, headers=error_headers(error)
    )
