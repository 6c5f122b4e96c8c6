"""
The gRPC server: one port with the gateway, health and reflection on it, opened and closed as a whole.

It is closed in the order that lets a load balancer follow: health says NOT_SERVING first, then nothing new is accepted,
then what runs may end. Any other order answers new calls with a reset connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import msgspec
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from gateway.answer import Line
from gateway.rpc import codec
from gateway.rpc.servicer import Authenticator, GatewayServicer
from gateway.stopping import TELL_S, Stopping
from protos.tollbridge.v1 import gateway_pb2 as pb

log = structlog.get_logger()

SERVICE: str = pb.DESCRIPTOR.services_by_name["Gateway"].full_name
#: The reflection package has only the alpha; its successor is the same messages under another name, and newer tools ask
#: for that one alone.
REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"


class RpcSettings(msgspec.Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    #: 0 takes a free one.
    port: int = 50051
    #: Let other processes listen on the same port; the kernel spreads the connections.
    reuse_port: bool = True
    #: Of one request, also after decompression. Images travel inside requests.
    max_receive_bytes: int = 16 * 1024 * 1024
    #: On one connection.
    max_concurrent_streams: int = 1000
    #: Seconds of silence after which a connection is probed, and how long the answer may take. A client that vanished
    #: without closing keeps its slots until then.
    keepalive_s: float = 30.0
    keepalive_timeout_s: float = 10.0
    #: Clients may probe this often, in seconds; one that does so much more often is disconnected.
    client_keepalive_s: float = 10.0
    #: Seconds that one message of a stream may wait for its client to read.
    idle_consumer_s: float = 60.0
    #: Seconds that calls get to end when the server closes.
    drain_s: float = 30.0
    #: Seconds between NOT_SERVING and the end of accepting, for whoever watches health to look away.
    lame_duck_s: float = 0.0


class RpcServer:
    """A server that is running. `open_server` makes it."""

    def __init__(
        self, server: grpc.aio.Server, servicer: GatewayServicer, health_servicer: health.aio.HealthServicer, port: int
    ) -> None:
        self._server = server
        self._servicer = servicer
        self._health = health_servicer
        self._drained = False
        #: The port it is bound to.
        self.port = port

    async def set_serving(self, serving: bool) -> None:
        """What the health service says from now on. Without effect once it drains."""
        said = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", SERVICE):
            await self._health.set(service, said)

    async def drain(self, grace_s: float, *, lame_duck_s: float = 0.0) -> None:
        """
        Say NOT_SERVING for good, stop accepting `lame_duck_s` later, and return when the calls have ended. Those that
        still run after `grace_s`, or when the drain is cancelled, are ended, and told so. A second drain does nothing.
        """
        if self._drained:
            return
        self._drained = True
        stopped: list[asyncio.Future[None]] = []
        try:
            await self._health.enter_graceful_shutdown()
            await asyncio.sleep(lame_duck_s)
            # gRPC's own end of its grace would cancel calls without a word.
            stopped.append(asyncio.ensure_future(self._server.stop(grace_s + TELL_S)))
            await asyncio.wait(stopped, timeout=grace_s)
        finally:
            if ended := self._servicer.end():
                log.warning("gateway.grpc_drain_deadline", ended=ended)
            await asyncio.gather(self._server.stop(TELL_S), *stopped)


@asynccontextmanager
async def open_server(
    settings: RpcSettings, *, line: Line, authenticator: Authenticator, stopping: Stopping | None = None
) -> AsyncIterator[RpcServer]:
    """
    Serve until left, then drain. Raises `OSError` when the address cannot be bound. `stopping` is that of the line.

    Leaving by an exception or a cancellation, too, drains: what runs is money that is being spent.
    """
    server = grpc.aio.server(options=_options(settings))
    servicer = GatewayServicer(
        line=line,
        authenticator=authenticator,
        idle_consumer_s=settings.idle_consumer_s,
        stopping=stopping or Stopping(),
    )
    server.add_generic_rpc_handlers((_handlers(servicer),))
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    _reflect(server)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    try:
        port = server.add_insecure_port(f"{host}:{settings.port}")
    except RuntimeError as failed:
        raise OSError(f"gRPC cannot listen on {host}:{settings.port}") from failed
    await server.start()
    running = RpcServer(server, servicer, health_servicer, port)
    await running.set_serving(True)
    try:
        yield running
    finally:
        await running.drain(settings.drain_s, lame_duck_s=settings.lame_duck_s)


def _options(settings: RpcSettings) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", int(settings.reuse_port)),
        ("grpc.max_receive_message_length", settings.max_receive_bytes),
        ("grpc.max_concurrent_streams", settings.max_concurrent_streams),
        ("grpc.keepalive_time_ms", round(settings.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(settings.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", round(settings.client_keepalive_s * 1000)),
    ]


def _handlers(servicer: GatewayServicer) -> grpc.GenericRpcHandler:
    """What the generated code registers, but with a parser that answers bytes that are no message."""
    methods = {
        "Complete": grpc.unary_unary_rpc_method_handler(
            servicer.Complete,
            request_deserializer=codec.parse_request,
            response_serializer=pb.CompletionResponse.SerializeToString,
        ),
        "Stream": grpc.unary_stream_rpc_method_handler(
            servicer.Stream,
            request_deserializer=codec.parse_request,
            response_serializer=pb.CompletionChunk.SerializeToString,
        ),
    }
    return grpc.method_handlers_generic_handler(SERVICE, methods)


def _reflect(server: grpc.aio.Server) -> None:
    names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    servicer = reflection.aio.ReflectionServicer(names)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(REFLECTION_V1, {"ServerReflectionInfo": handler}),)
    )
