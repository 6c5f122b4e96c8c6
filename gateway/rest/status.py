"""How an error looks over HTTP: one body shape for every refusal, or that of the API which was asked."""

from __future__ import annotations

from aiohttp import web
from typing_extensions import TypedDict

from gateway.errors import Code, GatewayError
from gateway.rest.apis import Api, error_headers, told
from gateway.rest.endpoint import answer_headers, json_response


class Error(TypedDict):
    """What is wrong."""

    code: Code
    message: str
    type: str
    #: The path of the field at fault.
    param: str | None
    #: Whether a provider got any of the request; null where that is not known.
    dispatched: bool | None
    request_id: str


class ErrorBody(TypedDict):
    """A refusal, in our words."""

    error: Error


def error_body(error: GatewayError, request_id: str) -> ErrorBody:
    return {
        "error": {
            "code": error.code,
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
