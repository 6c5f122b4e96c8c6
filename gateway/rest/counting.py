"""
How many tokens a message would have, for the clients of Anthropic.

The count is the provider's: it takes a slot and may fail over like a call, and it costs nothing, so its attempt is
settled as zero. A route whose protocol has no count is passed over; a guess of ours would be taken for the provider's.
"""

from __future__ import annotations

from functools import partial

from aiohttp import web
from typing_extensions import TypedDict

from adapters.protocols.anthropic_messages import AnthropicMessages
from gateway.answer import CountingLine
from gateway.call import Call, Scope
from gateway.rest.answers import Whole
from gateway.rest.apis import MESSAGES, attribution
from gateway.rest.chat import BetaQuery, Betas, named_model, parsed, wanted_betas
from gateway.rest.endpoint import Endpoint, Exchange, answer_headers
from gateway.rest.fields import options_from_headers
from gateway.rest.operation import OF_A_CALL, Content, Operation


class Count(TypedDict):
    """How many tokens it would have."""

    input_tokens: int


def routes(*, line: CountingLine) -> list[Endpoint]:
    """The endpoint of this module."""
    api, protocol = MESSAGES, AnthropicMessages()

    async def count(exchange: Exchange) -> web.StreamResponse:
        exchange.query(("beta",))
        options = options_from_headers(exchange.request.headers)
        chat = await exchange.parsed(partial(parsed, protocol.parse_request))
        counted = await line.count(
            Call(
                request_id=exchange.request_id,
                caller=exchange.caller,
                model=named_model(api.envelope(chat).model, role=options.role),
                chat=chat,
                options=options,
                transport="rest",
                betas=wanted_betas(exchange),
                counts=True,
            )
        )
        headers = answer_headers(exchange.request_id, api)
        headers.update(attribution(counted.outcome))
        return Whole(protocol.render_count_response(counted.response.tokens), headers)

    told = Operation(
        summary="How many tokens a message would have",
        query=BetaQuery,
        headers=Betas,
        takes=(Content(type=api.request, example=api.example),),
        gives=(Content(type=Count),),
        errors=OF_A_CALL,
        calls=True,
    )
    return [
        Endpoint(
            method="POST", path="/v1/messages/count_tokens", access=Scope.CHAT, handler=count, apis=(api,), told=told
        ),
    ]
