"""
Recorded traffic of real providers, through the parser and through a real socket.

The corpus belongs to others and lies beside the project, not in it: found at `../shared/wire`, or where
TOLLBRIDGE_WIRE_CORPUS says. Where it is absent these tests are skipped; `tests/wire` holds cases of our own for the
same kinds.
"""

from __future__ import annotations

import asyncio
import json
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from adapters.chat import ChatRequest, Event, Message, Role, Text
from adapters.client import Upstream
from adapters.contract import Endpoint, UpstreamCall
from adapters.errors import Broken, ErrorClass, ProviderError, Rejected
from adapters.protocols.chat_completions import ChatCompletions
from tests.fakes.answers import gathered, gathered_response, parsed
from tests.fakes.raw_provider import Exchange, raw_provider

_CORPUS = Path(os.environ.get("TOLLBRIDGE_WIRE_CORPUS") or Path(__file__).parents[3] / "shared" / "wire")
#: Other formats that lie in the same folders.
_OTHER = ("native_", "messages_")
#: No sentinel is sent there; an operator marks such a provider.
_NO_SENTINEL = {"compat_other/perplexity_stream"}
#: Two recordings run together under one index 0: two calls with an id each, where the facts join their arguments.
_TWO_IN_ONE = "compat_cerebras/stream_tool_schema"

PROTOCOL = ChatCompletions()


def _load() -> dict[str, dict[str, Any]]:
    cases = {}
    for folder in [*sorted(_CORPUS.glob("compat_*")), _CORPUS / "openai_chat"]:
        for path in sorted(folder.glob("*.json")):
            if not path.name.startswith(_OTHER):
                cases[f"{folder.name}/{path.stem}"] = json.loads(path.read_text())
    return cases


CASES = _load() if _CORPUS.is_dir() else {}
STREAMS = {n: c for n, c in CASES.items() if c["response"]["status"] == 200 and "text" in c["response"]}
PLAIN = {n: c for n, c in CASES.items() if c["response"]["status"] == 200 and "body" in c["response"]}
ERRORS = {n: c for n, c in CASES.items() if c["response"]["status"] != 200}

pytestmark = pytest.mark.skipif(not CASES, reason=f"no recorded traffic at {_CORPUS.name}: set TOLLBRIDGE_WIRE_CORPUS")

_F, _O, _T = ErrorClass.FATAL, ErrorClass.OURS, ErrorClass.TRANSIENT
#: By hand, from the providers' documents: class, seconds to wait, rate limit, fault of the credential.
EXPECTED: dict[str, tuple[ErrorClass, float | None, bool, bool]] = {
    "compat_azure_openai/err401": (_O, None, False, True),
    "compat_azure_openai/err404_deployment": (_O, None, False, False),
    "compat_azure_openai/err408_text": (_T, None, False, False),
    "compat_azure_openai/err413_text": (_F, None, False, False),
    "compat_azure_openai/err429_retry_after_1_ms_0": (_T, 1.0, True, False),
    "compat_azure_openai/err500": (_T, None, False, False),
    "compat_cerebras/err429_retry_after_ms": (_T, 0.66, True, False),
    "compat_deepseek/err400_context_length": (_F, None, False, False),
    "compat_deepseek/err401": (_O, None, False, True),
    "compat_deepseek/err402_insufficient_balance": (_O, None, False, True),
    "compat_deepseek/err422_text": (_F, None, False, False),
    "compat_groq/err400_tool_use_failed": (_T, None, False, False),
    "compat_groq/err404_model": (_O, None, False, False),
    "compat_groq/err429_tpm_retry_after": (_T, 3.0, True, False),
    "compat_nvidia_nim/err400_degraded_function": (_T, None, False, False),
    "compat_nvidia_nim/err403_authorization": (_O, None, False, True),
    "compat_nvidia_nim/err404_function_not_found": (_O, None, False, False),
    "compat_nvidia_nim/err429_no_detail": (_T, None, True, False),
    "compat_ollama/err400_context_v1": (_F, None, False, False),
    "compat_ollama/err401_cloud_v1": (_O, None, False, True),
    "compat_opencode_zen/err401_credits": (_O, None, False, True),
    "compat_opencode_zen/err429_free_usage": (_T, None, True, False),
    "compat_openrouter/err400_context_length": (_F, None, False, False),
    "compat_openrouter/err401": (_O, None, False, True),
    "compat_openrouter/err403_provider": (_O, None, False, False),
    "compat_openrouter/err429_upstream": (_T, None, True, False),
    "compat_openrouter/err429_upstream_shared_pool": (_T, None, True, False),
    "compat_other/mistral_err401": (_O, None, False, True),
    "compat_other/mistral_err422_fastapi_detail": (_F, None, False, False),
    "compat_other/mistral_err500": (_T, None, False, False),
    "compat_other/together_err500_hf": (_T, 1.0, False, False),
    "compat_other/xai_err400_auth": (_O, None, False, True),
    "compat_other/xai_err503_capacity": (_T, None, False, False),
    "compat_other/zai_err429_1305": (_T, None, False, False),
    "openai_chat/err400_bad_request": (_F, None, False, False),
    "openai_chat/err400_context_length": (_F, None, False, False),
    "openai_chat/err400_max_tokens_unsupported": (_F, None, False, False),
    "openai_chat/err401_bad_key": (_O, None, False, True),
    "openai_chat/err404_model": (_O, None, False, False),
    "openai_chat/err429_insufficient_quota": (_O, None, False, True),
    "openai_chat/err429_request_too_large_tpm": (_O, None, False, False),
    "openai_chat/err429_rpm_retry_after": (_T, 20.0, True, False),
    "openai_chat/err503_envoy_text_plain": (_T, None, False, False),
}
#: Errors in answers that HTTP calls good.
EXPECTED_IN_200: dict[str, ErrorClass] = {
    "compat_groq/stream_error_tool_use_failed": _T,
    "compat_openrouter/stream_error_chunk": _F,
    "compat_openrouter/stream_error_empty_choices": _T,
    "compat_openrouter/stream_error_finish_reason_error": _T,
    "compat_openrouter/stream_masked_network_error": _T,
    "compat_openrouter/error_in_200_unary": _T,
    "compat_openrouter/masked_network_error_unary": _T,
    "compat_vllm/stream_error_then_done": _T,
}


def _endpoint(name: str, base_url: str = "http://127.0.0.1") -> Endpoint:
    return Endpoint(provider=name, protocol="chat_completions", base_url=base_url, no_sentinel=name in _NO_SENTINEL)


def _body(case: dict[str, Any]) -> bytes:
    response = case["response"]
    return (response["text"] if "text" in response else json.dumps(response["body"])).encode()


def _check(name: str, told: dict[str, Any], facts: dict[str, Any]) -> None:
    """`told` against the facts that an independent parser computed."""
    stops = facts.get("native_stop", {})
    stops = stops if isinstance(stops, dict) else {str(i): stop for i, stop in enumerate(stops)}
    texts = facts.get("text", {})
    texts = texts if isinstance(texts, dict) else {str(i): text for i, text in enumerate(texts)}
    calls = facts.get("tool_calls", [])
    for index, known in told["choices"].items():
        assert known["text"] == (texts.get(index) or "")
        assert known["end"][1] == stops[index]
        if name != _TWO_IN_ONE:
            assert known["tool_calls"] == [
                {key: call[key] for key in ("id", "name", "arguments")}
                for call in calls
                if str(call.get("choice", 0)) == index
            ]
    assert told["choices"].keys() == stops.keys()
    assert "".join(known["refusal"] for known in told["choices"].values()) == facts.get(
        "refusal", "".join(known["refusal"] for known in told["choices"].values())
    )
    if "reasoning_chars" in facts:
        assert sum(len(known["reasoning"]) for known in told["choices"].values()) == facts["reasoning_chars"]
    _check_usage(told, facts.get("usage") or {})


def _check_usage(told: dict[str, Any], usage: dict[str, Any]) -> None:
    assert told["usage"].get("input_total") == usage.get("prompt_tokens")
    assert told["usage"].get("output_total") == usage.get("completion_tokens")
    details = usage.get("prompt_tokens_details") or {}
    assert (told["usage"].get("cache_read") or 0) == (details.get("cached_tokens") or 0)
    assert (told["usage"].get("cache_write_5m") or 0) == (details.get("cache_write_tokens") or 0)
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    assert (told["usage"].get("reasoning") or 0) == thought
    if isinstance(usage.get("cost"), int | float):
        assert Decimal(told["cost"]) == Decimal(repr(usage["cost"]))


def _check_stream(name: str, events: list[Event], error: ProviderError | None) -> None:
    facts = STREAMS[name]["facts"]
    if facts.get("complete", "stream_error" not in facts):
        assert error is None
        _check(name, gathered(events), facts)
    elif name in _NO_SENTINEL:
        assert error is None
        assert gathered(events)["finished"]
        _check(name, gathered(events), facts)
    else:
        assert not gathered(events)["finished"]
        if name in EXPECTED_IN_200:
            assert isinstance(error, Rejected)
            assert error.error_class is EXPECTED_IN_200[name]
        else:
            assert isinstance(error, Broken)
            assert error.code == "no_terminal"


@pytest.mark.parametrize("name", STREAMS)
def test_a_recorded_stream_gives_what_an_independent_parser_found_and_ends_only_on_proof(name):
    parser = PROTOCOL.new_parser(_endpoint(name), {})
    _check_stream(name, *parsed(parser, [_body(STREAMS[name])]))


@pytest.mark.parametrize("name", STREAMS)
def test_a_recorded_stream_split_at_every_byte_gives_the_same(name):
    body = _body(STREAMS[name])
    whole, whole_error = parsed(PROTOCOL.new_parser(_endpoint(name), {}), [body])
    bytewise, error = parsed(PROTOCOL.new_parser(_endpoint(name), {}), [body[i : i + 1] for i in range(len(body))])
    assert bytewise == whole
    assert type(error) is type(whole_error)
    assert str(error) == str(whole_error)


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("end", [b"\r\n", b"\r"], ids=["CRLF", "CR"])
def test_line_ends_comments_and_a_byte_order_mark_change_nothing(name, end):
    body = _body(STREAMS[name])
    whole, _ = parsed(PROTOCOL.new_parser(_endpoint(name), {}), [body])
    dressed = b"\xef\xbb\xbf" + body.replace(b"\r\n", b"\n").replace(b"\n", b"\n: hello\n").replace(b"\n", end)
    undressed, _ = parsed(PROTOCOL.new_parser(_endpoint(name), {}), [dressed[:7], dressed[7:]])
    # A comment line after a blank one changes nothing; inside an event neither.
    assert gathered(undressed) == gathered(whole)


@pytest.mark.parametrize("name", STREAMS)
def test_a_recorded_stream_cut_anywhere_before_its_terminal_never_counts_as_complete(name):
    body = _body(STREAMS[name]).replace(b"\r\n", b"\n")
    terminal = body.find(b"data: [DONE]")
    bounds = [i for i in range(len(body)) if body.startswith(b"\n\n", i) and (terminal < 0 or i < terminal)]
    for bound in bounds[:-1] if name in _NO_SENTINEL else bounds:
        events, error = parsed(
            PROTOCOL.new_parser(Endpoint(provider="x", protocol="y", base_url=""), {}), [body[:bound]]
        )
        assert error is not None
        assert not gathered(events)["finished"]


@pytest.mark.parametrize("name", PLAIN)
def test_a_recorded_answer_gives_what_an_independent_parser_found(name):
    case = PLAIN[name]
    if name in EXPECTED_IN_200:
        with pytest.raises(Rejected) as caught:
            PROTOCOL.parse_response(200, case["response"]["headers"], _body(case))
        assert caught.value.error_class is EXPECTED_IN_200[name]
        return
    body = b"\n\n\n" + _body(case)
    response = PROTOCOL.parse_response(200, case["response"]["headers"], body)
    _check(name, gathered_response(response), case["facts"])
    assert json.loads(PROTOCOL.render_response(response)) == case["response"]["body"]


@pytest.mark.parametrize("name", ERRORS)
def test_a_recorded_error_has_the_meaning_its_provider_documents(name):
    response = ERRORS[name]["response"]
    error = PROTOCOL.parse_error(response["status"], response["headers"], _body(ERRORS[name]))
    assert isinstance(error, Rejected)
    assert (error.error_class, error.retry_after_s, error.rate_limited, error.credential_fault) == EXPECTED[name]
    assert error.status == response["status"]


async def test_every_recorded_case_gives_the_same_over_a_real_socket():
    async def replay(exchange: Exchange) -> None:
        name = exchange.head.split(b"/replay/")[1].split(b"/chat/completions")[0].decode()
        response = CASES[name]["response"]
        headers = {k: v for k, v in response["headers"].items() if k != "date"}
        if name in STREAMS:
            await exchange.begin(headers)
            body = _body(CASES[name])
            for start in range(0, len(body), 700):
                await exchange.chunk(body[start : start + 700])
            await exchange.end()
        else:
            await exchange.answer(_body(CASES[name]), status=response["status"], headers=headers)

    async def one(name: str) -> None:
        call = UpstreamCall(
            endpoint=_endpoint(name, f"http://127.0.0.1:{provider.port}/replay/{name}"),
            model="m",
            request=ChatRequest(messages=(Message(role=Role.USER, content=(Text(text="hi"),)),)),
            deadline=asyncio.get_running_loop().time() + 30,
        )
        if name in STREAMS:
            events: list[Event] = []
            error: ProviderError | None = None
            try:
                async with upstream.stream(call) as batches:
                    async for batch in batches:
                        events += batch
            except ProviderError as failed:
                error = failed
            _check_stream(name, events, error)
        elif name in PLAIN and name not in EXPECTED_IN_200:
            _check(name, gathered_response(await upstream.complete(call)), CASES[name]["facts"])
        else:
            with pytest.raises(Rejected) as caught:
                await upstream.complete(call)
            expected = EXPECTED[name][0] if name in EXPECTED else EXPECTED_IN_200[name]
            assert caught.value.error_class is expected

    async with raw_provider(replay) as provider, Upstream() as upstream:
        for name in CASES:
            await one(name)
    assert len(provider.requests) == len(CASES)


def test_the_whole_corpus_was_run():
    assert (len(STREAMS), len(PLAIN), len(ERRORS)) >= (40, 30, 40)
    assert EXPECTED.keys() == ERRORS.keys()
    assert EXPECTED_IN_200.keys() <= CASES.keys()
