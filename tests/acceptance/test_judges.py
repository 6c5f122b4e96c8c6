"""
Upstreams that nobody here wrote, behind a real gateway.

`llmock` injects faults into the APIs of the large providers and gives a verdict on its client: whether it waited as
long as it was asked to, retried what cannot succeed, took half an answer for a whole one, or sat through a stall. No
finding is allowed, warnings included. `llm-mock-api` speaks three protocols as other hands read their documents.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import grpc
import pytest
from llmock.scenarios import Delay, Fail, Match, Reply, StreamFault, ToolCall
from llmock.testing import BASE_PATHS, LLMockServer
from llmock.verdict import judge

from protos.tollbridge.v1 import gateway_pb2 as pb
from tests.fakes.gateway_process import METADATA, GatewayProcess, completion, gateway_process

#: Protocol and where it is spoken: at the judge, and below the base URL.
JUDGED = {
    "openai": ("chat_completions", "openai", ""),
    "openai_responses": ("responses", "openai", ""),
    "groq": ("chat_completions", "groq", ""),
    "mistral": ("chat_completions", "mistral", ""),
    "together": ("chat_completions", "together", ""),
    "xai": ("chat_completions", "xai", ""),
    "anthropic": ("anthropic_messages", "anthropic", "/v1"),
    "gemini": ("gemini", "gemini", "/v1beta"),
}


KINDS: tuple[Literal["disconnect", "truncate", "malformed", "stall"], ...] = (
    "disconnect",
    "truncate",
    "malformed",
    "stall",
)
LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
LONGER = " ".join([LONG] * 80)


def _config(bases: dict[str, tuple[str, str]]) -> str:
    tables = ["[routing]\nbackoff_s = [0.4, 0.8, 1.6]\n"]
    for name, (protocol, url) in bases.items():
        tables.append(
            f'[providers.{name}_judged]\nprotocol = "{protocol}"\nbase_url = "{url}"\nmodels = ["m", "longer"]\n'
            f'headers = {{ x-api-key = "k" }}\nfirst_byte_s = 3\ngap_s = 2\ngroup = "{name}"\n'
            f"cancel_confirms_after_s = 0\n"
            f"[groups.{name}]\nconcurrency = 4\nfailure_threshold = 1000\n"
        )
    return "\n".join(tables)


@pytest.fixture(scope="module")
def judged() -> Iterator[LLMockServer]:
    with LLMockServer() as server:
        yield server


@pytest.fixture
async def gateway(tmp_path: Path, judged: LLMockServer) -> AsyncIterator[GatewayProcess]:
    root = judged.base_url("openai").removesuffix(BASE_PATHS["openai"])
    bases = {name: (protocol, root + BASE_PATHS[at] + below) for name, (protocol, at, below) in JUDGED.items()}
    async with gateway_process(tmp_path, _config(bases)) as gateway:
        yield gateway


async def _streamed(gateway: GatewayProcess, request: pb.CompletionRequest) -> tuple[str, str]:
    """The text, and the code of what went wrong, empty where nothing did."""
    text: list[str] = []
    async with gateway.stub() as stub:
        try:
            async for chunk in stub.Stream(request, metadata=METADATA):
                match chunk.WhichOneof("chunk"):
                    case "delta":
                        text += [piece.text for piece in chunk.delta.pieces]
                    case "failed":
                        return "".join(text), chunk.failed.code
                    case "finished":
                        return "".join(text), ""
        except grpc.aio.AioRpcError as error:
            return "".join(text), str(error.code())
    raise AssertionError("a stream that ended without a last message")


async def _until_it_answers(gateway: GatewayProcess, request: pb.CompletionRequest) -> tuple[str, list[str]]:
    """As a caller does who is told the truth: again, when it was told that an answer broke off."""
    failures: list[str] = []
    for pause_s in (0.4, 0.8, 1.6):
        text, failed = await _streamed(gateway, request)
        if not failed:
            return text, failures
        failures.append(failed)
        await asyncio.sleep(pause_s)
    raise AssertionError(f"no answer after {failures}")


async def test_the_judge_finds_nothing(judged: LLMockServer, gateway: GatewayProcess) -> None:
    async with asyncio.TaskGroup() as group:
        for name in JUDGED:
            group.create_task(_put_through(judged, gateway, name), name=name)
    verdict = judge(judged.state.journal.records(wait=2.0))
    assert len(verdict.calls) > 15 * len(JUDGED)
    verdict.assert_ok(strict=True)


async def _put_through(judged: LLMockServer, gateway: GatewayProcess, name: str) -> None:
    """Everything that one provider can do to us."""
    model = f"{name}_judged/m"
    _, at, below = JUDGED[name]
    match = Match(path=f"{BASE_PATHS[at]}{below}/{'responses' if name == 'openai_responses' else '[cm]*'}")
    scenarios = judged.state.scenarios

    async with gateway.stub() as stub:

        async def plain(text: str) -> pb.CompletionResponse:
            answer: pb.CompletionResponse = await stub.Complete(completion(model, text), metadata=METADATA, timeout=60)
            return answer

        assert (await plain("first")).choices[0].text
        for fault in (
            Fail(429, retry_after=0.7, match=match),
            Fail(500, times=2, match=match),
            Fail(503, match=match),
            Fail(529 if name == "anthropic" else 502, match=match),
            Delay(0.3, match=match),
        ):
            scenarios.add(fault)
            assert (await plain(f"{name} after {fault}")).choices[0].text
        for number, status in enumerate((400, 422)):
            scenarios.add(Fail(status, match=match))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await plain(f"{name} refused {number}")
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        scenarios.add(
            Reply(text=LONGER, times=None, match=Match(path=match.path, model="longer", tools=False)),
            Reply(text=LONG, times=None, match=Match(path=match.path, tools=False)),
        )
        assert await _streamed(gateway, completion(model, f"{name} streamed")) == (LONG, "")
        for kind in KINDS:
            for after in (0, 8):
                scenarios.add(StreamFault(kind, after_chunks=after, stall_seconds=7.0, match=match))
                # The judge takes a stream that it could write to its end for one that was read to its end.
                longer = kind == "malformed"
                request = completion(f"{name}_judged/longer" if longer else model, f"{name} {kind} after {after}")
                text, failures = await _until_it_answers(gateway, request)
                assert text == (LONGER if longer else LONG)
                if after:
                    assert failures, f"what broke off after content must be told: {name} {kind}"
        scenarios.add(Reply(tool_calls=(ToolCall("get_weather", {"city": "Paris"}),), match=match))
        called = await stub.Complete(
            completion(model, f"{name} weather?", tools=[pb.Tool(name="get_weather")]), metadata=METADATA, timeout=30
        )
        call = called.choices[0].tool_calls[0]
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
        assert called.choices[0].finish_reason == pb.FINISH_REASON_TOOL_CALLS
        assert called.outcome.usage.input_tokens > 0
        # The last, since the credential is then set aside.
        scenarios.add(Fail(401, match=match))
        with pytest.raises(grpc.aio.AioRpcError):
            await plain(f"{name} unauthorized")


RULES = [
    {"when": "hello", "reply": "Hi, from somebody else: naïve, 東京."},
    {"when": "weather", "reply": {"tools": [{"name": "get_weather", "args": {"city": "Paris"}}]}},
]


@asynccontextmanager
async def _other_hands(tmp_path: Path) -> AsyncIterator[str]:
    """In a process of its own, where its warnings are not ours."""
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps(RULES))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-u", "-W", "ignore", "-m", "llm_mock_api.cli", "start", "--host", "127.0.0.1"),
        *("--port", "0", "--rules", str(rules), "--chunk-size", "7", "--log-level", "info"),
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    try:
        said = b""
        async with asyncio.timeout(60):
            while (at := re.search(rb"Listening on (http://[0-9.:]+)\s", said)) is None:
                more = await process.stdout.readline()
                assert more, f"it did not start: {said.decode()}"
                said += more
        url = at[1].decode()
        yield url
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_another_hands_three_protocols_are_understood(tmp_path: Path) -> None:
    async with _other_hands(tmp_path) as url:
        bases = {
            "chat": ("chat_completions", f"{url}/v1"),
            "responses": ("responses", f"{url}/v1"),
            "anthropic": ("anthropic_messages", f"{url}/v1"),
        }
        async with gateway_process(tmp_path, _config(bases)) as gateway, gateway.stub() as stub:
            for name in bases:
                request = completion(f"{name}_judged/m", "hello")
                answer = await stub.Complete(request, metadata=METADATA, timeout=60)
                assert answer.choices[0].text == "Hi, from somebody else: naïve, 東京."
                assert answer.outcome.ended == "complete"
                assert await _streamed(gateway, request) == (answer.choices[0].text, "")
                weather = completion(f"{name}_judged/m", "weather", tools=[pb.Tool(name="get_weather")])
                called = (await stub.Complete(weather, metadata=METADATA, timeout=60)).choices[0].tool_calls[0]
                assert (called.name, json.loads(called.arguments)) == ("get_weather", {"city": "Paris"})
