from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import adapters
from adapters.protocols import PROTOCOLS
from gateway import config
from gateway.tables import ProviderTable

PROFILES = tomllib.loads((Path(adapters.__file__).parent / "providers.toml").read_text())["providers"]


@pytest.mark.parametrize("provider", PROFILES)
def test_a_shipped_profile_says_only_what_is_understood(provider):
    profile = PROFILES[provider]
    assert profile.keys() <= ProviderTable.model_fields.keys()
    assert profile["protocol"] in PROTOCOLS
    url = urlsplit(re.sub(r"\{\w+\}", "http://h/v1", profile["base_url"]))
    assert url.scheme in {"http", "https"}
    assert not url.path.endswith("/")
    assert all(name.isupper() for name in profile.get("credentials", []) + profile.get("requires", []))
    assert len(set(profile.get("models", []))) == len(profile.get("models", []))


@pytest.mark.parametrize("provider", PROFILES)
def test_every_shipped_profile_says_what_closing_a_connection_does_and_who_says_so(provider):
    profile = PROFILES[provider]
    source = profile["cancel_source"]
    if source == "none":
        assert "cancel_confirms_after_s" not in profile
    else:
        assert urlsplit(source).scheme == "https"
        assert urlsplit(source).netloc
    assert profile.get("cancel_confirms", "all") in {"all", "streams"}
    assert "cancel_confirms" not in profile or "cancel_confirms_after_s" in profile


def test_only_providers_that_a_source_says_stop_on_close_are_taken_to():
    said = {
        n: (p["cancel_confirms_after_s"], p.get("cancel_confirms", "all"))
        for n, p in PROFILES.items()
        if "cancel_confirms_after_s" in p
    }
    assert said == {
        "openai": (15, "streams"),
        "azure": (15, "streams"),
        "anthropic": (15, "streams"),
        "workers_ai": (15, "streams"),
        "together": (15, "streams"),
        "deepseek": (15, "streams"),
        "xai": (15, "streams"),
        "ollama": (60, "all"),
        "vllm": (10, "all"),
    }


#: One model that thinks and one that does not, of each profile that lists both.
@pytest.mark.parametrize(
    ("provider", "thinks", "answers"),
    [
        ("openai", "gpt-5.4-mini", "gpt-4o-mini"),
        ("openai", "gpt-6-sol", "gpt-4.1"),
        ("groq", "openai/gpt-oss-20b", "llama-3.3-70b-versatile"),
        ("openrouter", "z-ai/glm-5.3", "openai/gpt-4o"),
        ("together", "moonshotai/Kimi-K3", "meta-llama/Llama-3.3-70B-Instruct-Turbo"),
        ("mistral", "mistral-medium-latest", "ministral-8b-latest"),
        ("deepseek", "deepseek-v4-flash", "deepseek-chat"),
        ("xai", "grok-4.7", "grok-4-1-fast-non-reasoning"),
        ("nvidia", "openai/gpt-oss-120b", "meta/llama-3.3-70b-instruct"),
        ("vllm", "Qwen/Qwen3-32B", "meta-llama/Llama-3.1-8B-Instruct"),
    ],
)
def test_reasoning_models_get_ten_minutes_and_others_two(provider, thinks, answers):
    environ = {"VLLM_BASE_URL": "http://gpu:8000/v1", f"{provider.upper()}_API_KEY": "k"}
    profile = config.load(None, environ).providers[provider]
    assert profile.limit_s(thinks, 50_000) == profile.limit_s(thinks, None) == 600
    assert profile.limit_s(answers, 50_000) == profile.limit_s(answers, None) == 120


def test_every_pattern_of_a_reasoning_model_is_meant_for_one_that_is_listed_or_well_known():
    well_known = {
        "o1",
        "o3",
        "o4-mini",
        "deepseek-r1:8b",
        "magistral-medium-latest",
        "deepseek-ai/DeepSeek-R1",
        "deepseek-ai/deepseek-r1",
        "qwen/qwen3-235b-a22b",
        "gemini-4-pro",
        "qwen3-next:80b",
        "kimi-k3",
        "glm-5.3",
        "@cf/qwen/qwq-32b",
        "@cf/deepseek-ai/deepseek-r1-distill-qwen-32b",
    }
    for profile in PROFILES.values():
        for pattern in profile.get("reasoning_models", []):
            # Which models these two serve is their operator's choice.
            if profile["name"] not in {"vLLM", "Azure OpenAI"}:
                names = {*profile.get("models", []), *well_known}
                assert any(fnmatch.fnmatchcase(name, pattern) for name in names), pattern
