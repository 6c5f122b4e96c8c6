"""
What the gateway is held against: the least that could stand in its place, in the same language.

    python -m tests.benchmarks.yardsticks proxy LOOP URL   an aiohttp reverse proxy that moves bytes
    python -m tests.benchmarks.yardsticks grpc LOOP URL    a grpc.aio server that asks the upstream with aiohttp

Neither counts, limits, proves, bills or logs anything, nor has it a time limit. LOOP is the event loop, `asyncio` or
`uvloop`: the benchmark holds the gateway against the faster. Each prints one JSON line with its port.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import grpc.aio
import msgspec
from aiohttp import web
from typing_extensions import override

from protos.tollbridge.v1 import gateway_pb2 as pb
from protos.tollbridge.v1 import gateway_pb2_grpc
from tests.benchmarks.loops import run, until_told


@asynccontextmanager
async def upstream() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(),
        auto_decompress=False,
        trust_env=False,
    ) as session:
        yield session


@asynccontextmanager
async def proxy(base_url: str) -> AsyncIterator[int]:
    """On aiohttp's low-level server: no routes, no middlewares."""
    origin = base_url.removesuffix("/v1")
    async with upstream() as session:

        async def relay(request: web.BaseRequest) -> web.StreamResponse:
            body = await request.read()
            async with session.post(
                origin + request.path, data=body, headers={"content-type": "application/json"}
            ) as answer:
                if answer.content_length is not None:
                    whole = await answer.read()
                    return web.Response(status=answer.status, body=whole, content_type=answer.content_type)
                response = web.StreamResponse(status=answer.status, headers={"content-type": answer.content_type})
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response

        server = web.Server(relay, access_log=None)
        listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0, backlog=1024)
        yield listening.sockets[0].getsockname()[1]
        listening.close()
        await server.shutdown(1.0)


class Bare(gateway_pb2_grpc.GatewayServicer):
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    def _ask(self, request: pb.CompletionRequest, **fields: Any) -> Any:
        messages = [{"role": message.role, "content": message.text} for message in request.messages]
        body = msgspec.json.encode({"model": request.model, "messages": messages, **fields})
        return self._session.post(self._url, data=body, headers={"content-type": "application/json"})

    @override
    async def Complete(self, request: pb.CompletionRequest, context: Any) -> pb.CompletionResponse:
        async with self._ask(request) as answer:
            said = msgspec.json.decode(await answer.read())
        response = pb.CompletionResponse()
        for choice in said["choices"]:
            response.choices.add(
                index=choice["index"],
                text=choice["message"]["content"],
                native_finish_reason=choice["finish_reason"],
                finish_reason=pb.FINISH_REASON_STOP,
            )
        response.outcome.usage.input_tokens = said["usage"]["prompt_tokens"]
        response.outcome.usage.output_tokens = said["usage"]["completion_tokens"]
        return response

    @override
    async def Stream(self, request: pb.CompletionRequest, context: Any) -> None:
        rest = b""
        async with self._ask(request, stream=True, stream_options={"include_usage": True}) as answer:
            async for piece in answer.content.iter_any():
                *events, rest = (rest + piece).split(b"\n\n")
                for event in events:
                    if event == b"data: [DONE]":
                        continue
                    for choice in msgspec.json.decode(event[6:])["choices"]:
                        if text := choice["delta"].get("content"):
                            await context.write(pb.CompletionChunk(delta=pb.Delta(pieces=[pb.Piece(text=text)])))
        await context.write(pb.CompletionChunk(finished=pb.Finished()))


@asynccontextmanager
async def bare_grpc(base_url: str) -> AsyncIterator[int]:
    async with upstream() as session:
        server = grpc.aio.server()
        servicer = Bare(session, base_url + "/chat/completions")
        gateway_pb2_grpc.add_GatewayServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        yield port
        await server.stop(0)


async def main(name: str, base_url: str) -> None:
    async with {"proxy": proxy, "grpc": bare_grpc}[name](base_url) as port:
        sys.stdout.write(json.dumps({"port": port}) + "\n")
        sys.stdout.flush()
        await until_told()


if __name__ == "__main__":
    run(main(sys.argv[1], sys.argv[3]), sys.argv[2])
