"""
Embeddings, for the clients of OpenAI: the same line as for a chat, with another question in it.

What the vectors cost is charged like everything else. A route whose protocol has no embeddings is passed over, and
where no other is left the caller is told so.
"""

from __future__ import annotations

from functools import partial

from aiohttp import web

from adapters.protocols.chat_completions import ChatCompletions, embedding_envelope
from adapters.protocols.chat_completions.embeddings import EmbeddingAnswerOut, EmbeddingRequestIn
from gateway.answer import EmbeddingLine
from gateway.call import Call, Scope, size_of_embedding
from gateway.naming import named
from gateway.rest.answers import Whole
from gateway.rest.apis import CHAT_COMPLETIONS, attribution
from gateway.rest.chat import named_model, parsed
from gateway.rest.endpoint import Endpoint, Exchange, answer_headers
from gateway.rest.fields import options_from_headers
from gateway.rest.operation import OF_A_CALL, Content, Operation
from gateway.rest.paths import DEPLOYMENT


def routes(*, line: EmbeddingLine) -> list[Endpoint]:
    """The endpoint of this module."""
    api, protocol = CHAT_COMPLETIONS, ChatCompletions()

    async def embed(exchange: Exchange) -> web.StreamResponse:
        exchange.query(())
        options = options_from_headers(exchange.request.headers)
        request = await exchange.parsed(partial(parsed, protocol.parse_embedding_request))
        asked = embedding_envelope(request)
        embedded = await line.embed(
            Call(
                request_id=exchange.request_id,
                caller=exchange.caller,
                model=named_model(asked.model, role=options.role, deployment=exchange.path_args.get(DEPLOYMENT)),
                chat=size_of_embedding(request),
                options=options,
                transport="rest",
                embedding=request,
            )
        )
        route = embedded.outcome.route
        model = None if route is None else route.model
        response = named(embedded.response, protocol=protocol.name, answer_id=exchange.request_id, model=model)
        headers = answer_headers(exchange.request_id, api)
        headers.update(attribution(embedded.outcome))
        return Whole(protocol.render_embedding_response(response, base64=asked.base64), headers)

    told = Operation(
        summary="Embeddings of texts or tokens",
        takes=(Content(type=EmbeddingRequestIn, example={"model": "text-embedding-3-small", "input": "Say hello."}),),
        gives=(Content(type=EmbeddingAnswerOut, required=("data", "model")),),
        errors=OF_A_CALL,
        calls=True,
        repeatable=True,
    )
    return [Endpoint(method="POST", path="/v1/embeddings", access=Scope.CHAT, handler=embed, apis=(api,), told=told)]
