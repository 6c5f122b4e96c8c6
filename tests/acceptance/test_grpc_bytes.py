"""
Bytes that no client of ours would send, over gRPC to a running gateway: messages with odd values in every field, and
messages that were broken on the way. None of them may end in a fault of the gateway's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from protos.tollbridge.v1 import gateway_pb2 as pb
from tests.fakes.gateway_process import METADATA, gateway_process
from tests.fakes.simulated import SimulatedProvider

MESSAGES = 250
TOML = """
    [providers.simulated]
    protocol = "chat_completions"
    base_url = "{url}"
    [models.m]
    providers = ["simulated"]
    price = {{ input = "1", output = "1" }}
"""
TEXTS = ["", "a", "m", "\0", "a\0b", "\u202e", "\ue000", "x" * 70_000, "1e400", "0.1", "-1", "{", "{}", "simulated"]
INTEGERS = [0, 1, -1, 2, 7, 2**31 - 1, -(2**31)]
LONG = [*INTEGERS, 2**63 - 1, -(2**63)]
DOUBLES = [0.0, -0.0, 0.5, 1.0, -1.0, 1e308, math.nan, math.inf, -math.inf]
#: What says that we have failed.
OURS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}


def value_of(field: FieldDescriptor, rng: random.Random, depth: int) -> Any:
    match field.type:
        case FieldDescriptor.TYPE_STRING:
            return rng.choice(TEXTS)
        case FieldDescriptor.TYPE_BYTES:
            return rng.randbytes(rng.randint(0, 40))
        case FieldDescriptor.TYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.TYPE_DOUBLE | FieldDescriptor.TYPE_FLOAT:
            return rng.choice(DOUBLES)
        case FieldDescriptor.TYPE_INT64:
            return rng.choice(LONG)
        case FieldDescriptor.TYPE_MESSAGE:
            assert field.message_type is not None
            return filled(message_factory.GetMessageClass(field.message_type)(), rng, depth + 1)
        case _:
            return rng.choice(INTEGERS)


def filled(message: Any, rng: random.Random, depth: int = 0) -> Any:
    """With odd values in some of its fields."""
    for field in message.DESCRIPTOR.fields:
        if depth > 4 or rng.random() > (0.08 if depth == 0 else 0.4):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            for _ in range(rng.randint(0, 3)):
                name, made = value_of(key, rng, depth), value_of(value, rng, depth)
                entry = getattr(message, field.name)
                if isinstance(made, Message):
                    entry[name].CopyFrom(made)
                else:
                    entry[name] = made
        elif field.is_repeated:
            getattr(message, field.name).extend(value_of(field, rng, depth) for _ in range(rng.randint(0, 3)))
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(value_of(field, rng, depth))
        else:
            setattr(message, field.name, value_of(field, rng, depth))
    return message


def broken(content: bytes, rng: random.Random) -> bytes:
    made = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(made) + 1)
        match rng.randrange(4):
            case 0:
                made[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del made[at : at + rng.randint(1, 9)]
            case 2:
                made[at:at] = rng.randbytes(rng.randint(1, 9))
            case _:
                made += made[at : at + 50]
    return bytes(made)


def sent(rng: random.Random) -> bytes:
    question = pb.CompletionRequest(model="m", messages=[pb.Message(role="user", text="hello")])
    content: bytes = filled(question, rng).SerializeToString()
    return broken(content, rng) if rng.random() < 0.4 else content


@pytest.mark.timeout(400)
async def test_no_bytes_over_grpc_end_in_a_fault_of_the_gateways_own(
    database_url: str, simulator: SimulatedProvider, tmp_path: Path
):
    toml = TOML.format(url=simulator.url)
    told: Counter[grpc.StatusCode] = Counter()
    async with (
        gateway_process(tmp_path, toml, TOLLBRIDGE_DATABASE_URL=database_url) as gateway,
        grpc.aio.insecure_channel(gateway.grpc_target) as channel,
    ):
        turns = asyncio.Semaphore(8)

        async def ask(seed: int) -> None:
            content = sent(random.Random(seed))
            method = ("Complete", "Stream")[seed % 2]
            path = f"/tollbridge.v1.Gateway/{method}"
            raw: Any = channel.unary_unary(path) if method == "Complete" else channel.unary_stream(path)
            async with turns:
                call = raw(content, metadata=METADATA, timeout=60)
                if method == "Stream":
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        async for _ in call:
                            pass
                code = await call.code()
            told[code] += 1
            assert code not in OURS, (seed, method, await call.details(), content[:200])

        await asyncio.gather(*map(ask, range(MESSAGES)))
        assert gateway.lines("gateway.request_fault") == []
    # Both happened: some were served, and some refused.
    assert told[grpc.StatusCode.OK] > 5, told
    assert told[grpc.StatusCode.INVALID_ARGUMENT] > 20, told
