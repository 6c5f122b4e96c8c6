"""
The Python client of Tollbridge: chats over gRPC, jobs over REST, one kind of error for both.

    async with GatewayClient(grpc="127.0.0.1:50051", rest="http://127.0.0.1:8080", api_key=key) as client:
        answer = await client.complete(CompletionRequest(model="gpt-4o", messages=[Message(role="user", text="Hello")]))
        async with client.stream(request) as chunks:
            async for chunk in chunks: ...
        receipt = await client.jobs.submit([{"custom_id": "1", "url": "/v1/chat/completions", "body": {...}}])

The messages are those of `protos/tollbridge/v1/gateway.proto`.
"""

from gateway.client.client import GatewayClient
from gateway.client.errors import CallFailed, Unreachable
from gateway.client.jobs import Jobs
from protos.tollbridge.v1.gateway_pb2 import (
    CompletionChunk,
    CompletionRequest,
    CompletionResponse,
    Message,
    Outcome,
    Part,
    Parts,
    ResponseFormat,
    Tool,
    ToolCall,
    ToolChoice,
)

__all__ = [
    "CallFailed",
    "CompletionChunk",
    "CompletionRequest",
    "CompletionResponse",
    "GatewayClient",
    "Jobs",
    "Message",
    "Outcome",
    "Part",
    "Parts",
    "ResponseFormat",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "Unreachable",
]
