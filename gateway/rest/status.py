"""How an error looks over HTTP: one body shape for every refusal, or that of the API which was asked."""

from __future__ import annotations

from aiohttp import web

from gateway.errors import GatewayError
from gateway.rest.apis import Api, error_headers, told
from gateway.rest.endpoint import answer_headers, json_response


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


def error_response(error: GatewayError, request_id: str, api: Api | None = None) -> web.Response:
    """`api` is the one in whose words it is told; None: in ours."""
    if api is None:
        return json_response(
            error_body(error, request_id), request_id=request_id, status=error.status.http, headers=error_headers(error)
        )
    said = told(error, request_id)
    return web.Response(
        body=api.protocol.render_error(said),
        status=said.status,
        headers={**answer_headers(request_id, api), **error_headers(error)},
    )
