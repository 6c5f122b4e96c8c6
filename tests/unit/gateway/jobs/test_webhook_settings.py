"""What the configuration says of webhooks: hosts, and the secret by the name of its variable."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from gateway import config
from gateway.jobs.settings import WebhookSettings

GOOD = """
[providers.p]
protocol = "chat_completions"
base_url = "https://p.example.com/v1"
[models.m]
providers = ["p"]
[webhooks]
allowed_hosts = ["hooks.example.com", "localhost:9000"]
secret_env = "HOOKS"
"""
SECRET = "whsec_" + base64.b64encode(b"x" * 32).decode()


def load(tmp_path: Path, text: str, **environ: str) -> WebhookSettings:
    file = tmp_path / "tollbridge.toml"
    file.write_text(text)
    return config.load(file, environ).webhooks


def test_the_secret_is_read_from_the_variable_that_is_named(tmp_path: Path) -> None:
    settings = load(tmp_path, GOOD, HOOKS=SECRET)
    assert settings.allowed_hosts == ("hooks.example.com", "localhost:9000")
    assert settings.secret == b"x" * 32
    assert (settings.allow_http, settings.allow_private, settings.give_up_s) == (False, False, 259_200.0)


def test_without_a_table_nobody_is_told(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD.partition("[webhooks]")[0]) == WebhookSettings()


@pytest.mark.parametrize(
    ("text", "environ", "path"),
    [
        (GOOD, {}, "webhooks.secret_env"),
        (GOOD, {"HOOKS": "secret-in-the-clear"}, "webhooks.secret_env"),
        (GOOD, {"HOOKS": "whsec_c2hvcnQ="}, "webhooks.secret_env"),
        (GOOD, {"HOOKS": "whsec_ü"}, "webhooks.secret_env"),
        (GOOD.replace('secret_env = "HOOKS"', ""), {}, "webhooks.secret_env"),
        (GOOD.replace("hooks.example.com", "https://x/"), {"HOOKS": SECRET}, "webhooks.allowed_hosts.0"),
        (GOOD + "give_up_s = 0", {"HOOKS": SECRET}, "webhooks.give_up_s"),
        (GOOD + "secret = 'x'", {"HOOKS": SECRET}, "webhooks.secret"),
    ],
    ids=["not set", "in the clear", "too short", "not ASCII", "not named", "not a host", "zero", "unknown"],
)
def test_what_is_wrong_is_told_and_the_secret_is_not(
    tmp_path: Path, text: str, environ: dict[str, str], path: str
) -> None:
    with pytest.raises(config.ConfigFaults) as refused:
        load(tmp_path, text, **environ)
    assert [fault.path for fault in refused.value.faults] == [path]
    assert "clear" not in str(refused.value)
