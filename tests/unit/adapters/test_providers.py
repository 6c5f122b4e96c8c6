from __future__ import annotations

import re
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import adapters
from adapters.contract import Clocks, Endpoint
from adapters.protocols import PROTOCOLS

PROFILES = tomllib.loads((Path(adapters.__file__).parent / "providers.toml").read_text())["providers"]
_EVERYDAY = {"name", "protocol", "base_url", "credentials", "requires", "models", "execution_limit_s"}
_KEYS = _EVERYDAY | {"cancel_confirms_after_s"} | set(Clocks.__struct_fields__) | set(Endpoint.__struct_fields__)


@pytest.mark.parametrize("provider", PROFILES)
def test_a_shipped_profile_says_only_what_is_understood(provider):
    profile = PROFILES[provider]
    assert profile.keys() <= _KEYS
    assert profile["protocol"] in PROTOCOLS
    url = urlsplit(re.sub(r"\{\w+\}", "http://h/v1", profile["base_url"]))
    assert url.scheme in {"http", "https"}
    assert not url.path.endswith("/")
    assert all(name.isupper() for name in profile.get("credentials", []) + profile.get("requires", []))
    assert len(set(profile.get("models", []))) == len(profile.get("models", []))


def test_only_providers_known_to_stop_on_close_say_so():
    assert {name for name, profile in PROFILES.items() if "cancel_confirms_after_s" in profile} == {"ollama", "vllm"}
