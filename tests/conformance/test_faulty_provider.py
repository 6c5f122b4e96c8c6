"""
What the adapter says of an answer, beside what the simulated provider knows of it: for every protocol, every fault.

The provider's ledger is the judge. An answer that it did not complete must not pass for one, and one that it did must
not be lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest

from adapters.chat import ChatRequest, Message, Role, Text
from adapters.client import Upstream
from adapters.contract import Clocks, Endpoint, UpstreamCall
from adapters.errors import Broken, ProviderError, Rejected
from adapters.protocols import PROTOCOLS
from adapters.simulator import faults as simulated_faults
from adapters.simulator.dialects import BY_NAME
from adapters.simulator.requests import BadRequest
from tests.conformance.test_cross_matrix import BASES
from tests.fakes import simulated as fakes
from tests.fakes.simulated import SimulatedProvider

simulator = fakes.simulator

FAULTS: dict[str, dict[str, Any]] = {
    "none": {},
    "slow": {"pace": 0.001, "chunks": 12},
    "bytewise": {"bytewise": True, "chunks": 5},
    "burst": {"burst": 7},
    "crlf": {"newline": "crlf"},
    "cr": {"newline": "cr"},
    "comments": {"comments": True},
    "unicode": {"unicode": True},
    "reasoning": {"reasoning": 9},
    "refusal": {"refusal": True},
    "odd finish word": {"finish": "something_new"},
    "usage nowhere": {"usage": "none"},
    "usage early": {"usage": "early"},
    "usage late": {"usage": "late"},
    "usage twice": {"usage": "twice"},
    "usage on finish": {"usage": "on_finish"},
    "usage each": {"usage": "each"},
    "usage zeros after": {"usage": "zeros_after"},
    "whole arguments": {"whole_arguments": True},
    "400": {"status": 400},
    "401": {"status": 401},
    "403": {"status": 403},
    "404": {"status": 404},
    "413": {"status": 413},
    "429": {"status": 429, "retry_after": 3},
    "500": {"status": 500},
    "503 text": {"status": 503, "body": "text"},
    "502 html": {"status": 502, "body": "html"},
    "500 empty": {"status": 500, "body": "empty"},
    "error string": {"status": 500, "body": "string"},
    "error bare": {"status": 429, "body": "bare"},
    "error detail": {"status": 422, "body": "detail"},
    "reset before headers": {"die": "rst_before_headers"},
    "closed before headers": {"die": "fin_before_headers"},
    "reset at once": {"die": "rst", "die_after": 0},
    "reset": {"die": "rst", "die_after": 3},
    "closed": {"die": "fin", "die_after": 3},
    "hangs before headers": {"hang": "before_headers"},
    "hangs before the first byte": {"hang": "before_first_byte"},
    "hangs in the middle": {"hang": "mid"},
    "no terminal": {"terminal": "none"},
    "no sentinel": {"terminal": "no_done"},
    "no finish": {"terminal": "no_finish"},
    "two finishes": {"terminal": "two"},
    "masked error": {"terminal": "masked"},
    "error as finish": {"terminal": "error_word"},
    "bad json": {"json": "bad"},
    "truncated json": {"json": "truncated"},
    "no object": {"json": "not_object"},
    "html": {"json": "html"},
    "empty": {"json": "empty"},
    "error chunk": {"error_in_stream": "chunk"},
    "error event": {"error_in_stream": "event"},
    "error at once": {"error_in_stream": "chunk", "error_after": 0},
    "error then done": {"error_in_stream": "chunk", "error_done": True},
    "endless line": {"endless_line": 24 << 20},
    "bomb": {"compressed_bomb": 64 << 20},
}


def _shown() -> Iterator[Any]:
    for protocol in PROTOCOLS:
        for name, fault in FAULTS.items():
            wanted = simulated_faults.merge(simulated_faults.read(fault, param="faults"))
            try:
                BY_NAME[protocol].check(wanted)
            except BadRequest:
                continue
            yield pytest.param(protocol, fault, id=f"{protocol}-{name}")


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream(PROTOCOLS) as upstream:
        yield upstream


def _call(simulator: SimulatedProvider, protocol: str) -> UpstreamCall:
    endpoint = Endpoint(
        provider="simulated",
        protocol=protocol,
        base_url=simulator.url.removesuffix("/v1") + BASES[protocol],
        clocks=Clocks(first_byte_s=0.4, gap_s=0.4),
        max_response_bytes=16 << 20,
    )
    request = ChatRequest(
        messages=(Message(role=Role.USER, content=(Text(text="How do I plan a database migration?"),)),),
        max_output_tokens=2000,
    )
    return UpstreamCall(
        endpoint=endpoint, model="sim-fast", request=request, deadline=asyncio.get_running_loop().time() + 5
    )


async def _streamed(upstream: Upstream, call: UpstreamCall) -> None:
    async with upstream.stream(call) as batches:
        async for _ in batches:
            pass


def _agree(error: ProviderError | None, ended: str) -> None:
    match ended:
        case "complete":
            assert error is None
        case "error" | "error_in_stream":
            assert isinstance(error, Rejected)
        case "unproven" | "malformed":
            # A page in place of an answer may be read as an error of what stands before the provider.
            assert isinstance(error, Broken | Rejected)
        case _:
            assert isinstance(error, Broken), ended


@pytest.mark.parametrize(("protocol", "fault"), list(_shown()))
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_the_adapter_and_the_providers_ledger_agree(
    simulator: SimulatedProvider, upstream: Upstream, protocol: str, fault: dict[str, Any], stream: bool
) -> None:
    await simulator.set_faults(**fault)
    call = _call(simulator, protocol)
    if not stream:
        # A plain call has no clocks but its deadline.
        call = msgspec.structs.replace(call, deadline=asyncio.get_running_loop().time() + 1.5)
    error: ProviderError | None = None
    try:
        if stream:
            await _streamed(upstream, call)
        else:
            await upstream.complete(call)
    except ProviderError as failed:
        error = failed
    await simulator.until()
    (dispatch,) = await simulator.dispatches()
    _agree(error, dispatch["ended"])
