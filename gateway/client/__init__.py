"""
The Python client of Tollbridge: chats over gRPC, jobs and batches over REST, one kind of error for both.

    with Client(grpc="127.0.0.1:50051", rest="http://127.0.0.1:8080", api_key=key) as client:
        print(client.complete("Say hello.", model="gpt-4o").text)
        with client.stream("Say hello.", model="gpt-4o") as stream:
            for text in stream.text(): ...
        receipt = client.jobs.submit({"custom_id": str(n), "body": body} for n, body in enumerate(bodies))
        for job in client.jobs.as_completed(receipt): print(job.custom_id, job.answer())

`AsyncClient` has the same methods with `await` and `async for`. docs/client.md shows both.
The messages are those of `protos/tollbridge/v1/gateway.proto`.
"""

from gateway.client.aio import AsyncBatches, AsyncClient, AsyncJobs, AsyncStream
from gateway.client.answer import Answer, text_of
from gateway.client.batches import Batch, BatchResult, File
from gateway.client.errors import (
    Busy,
    CallFailed,
    Cancelled,
    Conflict,
    Internal,
    InvalidRequest,
    NotAllowed,
    NotFound,
    OutOfTime,
    ProviderFailed,
    Unauthenticated,
    Unavailable,
    Uncertain,
    Unreachable,
)
from gateway.client.jobs import Job, Receipt, Result
from gateway.client.messages import Parameters
from gateway.client.sync import Batches, Client, Jobs, Stream
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
    "Answer",
    "AsyncBatches",
    "AsyncClient",
    "AsyncJobs",
    "AsyncStream",
    "Batch",
    "BatchResult",
    "Batches",
    "Busy",
    "CallFailed",
    "Cancelled",
    "Client",
    "CompletionChunk",
    "CompletionRequest",
    "CompletionResponse",
    "Conflict",
    "File",
    "Internal",
    "InvalidRequest",
    "Job",
    "Jobs",
    "Message",
    "NotAllowed",
    "NotFound",
    "OutOfTime",
    "Outcome",
    "Parameters",
    "Part",
    "Parts",
    "ProviderFailed",
    "Receipt",
    "ResponseFormat",
    "Result",
    "Stream",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "Unauthenticated",
    "Unavailable",
    "Uncertain",
    "Unreachable",
    "text_of",
]
