"""What the recorded traffic in Chat Completions means, from OpenAI's API and from everyone who speaks it."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from adapters.errors import ErrorClass
from tests.fakes.recorded import Case, Meaning, Recorded, events_end

#: Other formats that lie in the same folders.
_OTHER = ("native_", "messages_")
#: No sentinel is sent there; an operator marks such a provider.
_NO_SENTINEL = "compat_other/perplexity_stream"
#: Two recordings run together under one index 0: two calls with an id each, where the facts join their arguments.
_TWO_IN_ONE = "compat_cerebras/stream_tool_schema"

_F, _O, _T = ErrorClass.FATAL, ErrorClass.OURS, ErrorClass.TRANSIENT
_ERRORS: dict[str, Meaning] = {
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
_ERRORS_IN_200: dict[str, ErrorClass] = {
    "compat_groq/stream_error_tool_use_failed": _T,
    "compat_openrouter/stream_error_chunk": _F,
    "compat_openrouter/stream_error_empty_choices": _T,
    "compat_openrouter/stream_error_finish_reason_error": _T,
    "compat_openrouter/stream_masked_network_error": _T,
    "compat_openrouter/error_in_200_unary": _T,
    "compat_openrouter/masked_network_error_unary": _T,
    "compat_vllm/stream_error_then_done": _T,
}


def _check(name: str, told: dict[str, Any], facts: dict[str, Any]) -> None:
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


def _mine(name: str, _case: Case) -> bool:
    return not name.split("/")[1].startswith(_OTHER)


def _complete(name: str, facts: dict[str, Any]) -> bool:
    return name == _NO_SENTINEL or bool(facts.get("complete", "stream_error" not in facts))


def _cuts(name: str, body: bytes) -> list[int]:
    return events_end(body)[:-1] if name == _NO_SENTINEL else events_end(body, b"data: [DONE]")


RECORDED = Recorded(
    protocol="chat_completions",
    folders=("compat_*", "openai_chat"),
    mine=_mine,
    errors=_ERRORS,
    errors_in_200=_ERRORS_IN_200,
    endpoints={_NO_SENTINEL: {"no_sentinel": True}},
    check=_check,
    complete=_complete,
    cuts=_cuts,
    at_least=(40, 30, 40),
)
