"""`tollbridge check`: what it shows of routes and roles, and what it says to do about a provider that fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from adapters.errors import Broken, ErrorClass, NotSent, ProviderError, Rejected
from gateway import config
from gateway.cli import live, main

FILE = """
[providers.a]
protocol = "chat_completions"
base_url = "http://127.0.0.1:9/v1"
credentials = ["A_KEY"]
[roles.planner]
[models.m]
{setting}
providers = [{{ provider = "a", qualified_for = {{ planner = "{qualified}" }} }}]
"""


def check(tmp_path: Path, *arguments: str, setting: str = "", qualified: str = "0" * 16, **environ: str) -> Result:
    file = tmp_path / "tollbridge.toml"
    file.write_text(FILE.format(setting=setting, qualified=qualified))
    return CliRunner().invoke(main, ["check", "--config", str(file), *arguments], env={"A_KEY": None, **environ})


def route(tmp_path: Path, **arguments: str) -> dict[str, object]:
    [found] = json.loads(check(tmp_path, "--json", A_KEY="k", **arguments).stdout)["routes"]
    return dict(found)


def test_it_shows_each_route_and_what_it_is_fit_for(tmp_path: Path) -> None:
    current = str(route(tmp_path)["route_id"])
    fit = route(tmp_path, qualified=current)
    assert (fit["roles"], fit["lost"]) == (["planner"], {})
    told = check(tmp_path, qualified=current, A_KEY="k")
    assert told.exit_code == 0
    assert current in told.stdout
    assert "No route is fit" not in told.stdout
    assert check(tmp_path, "--require-ready", qualified=current, A_KEY="k").exit_code == 0


def test_a_route_that_changed_since_is_told_with_both_its_ids_and_stops_a_deployment(tmp_path: Path) -> None:
    before = str(route(tmp_path)["route_id"])
    changed = check(tmp_path, setting='omit = ["seed"]', qualified=before, A_KEY="k")
    assert changed.exit_code == 0
    now = str(route(tmp_path, setting='omit = ["seed"]', qualified=before)["route_id"])
    assert now != before
    assert now in changed.stdout
    assert f"planner (was {before})" in changed.stdout
    assert "No route is fit for the role 'planner'" in changed.stdout
    stopped = check(tmp_path, "--require-ready", setting='omit = ["seed"]', qualified=before, A_KEY="k")
    assert stopped.exit_code == 1
    assert "m at a has lost planner" in stopped.stderr
    assert "qualified_for" in stopped.stderr


def test_without_its_credential_a_route_has_no_id_and_has_lost_nothing(tmp_path: Path) -> None:
    [found] = json.loads(check(tmp_path, "--json").stdout)["routes"]
    assert (found["route_id"], found["lost"]) == (None, {})


def test_to_spend_is_to_ask(tmp_path: Path) -> None:
    assert check(tmp_path, "--spend").exit_code == 2


def test_live_without_a_ready_provider_has_tried_nothing_and_says_so(tmp_path: Path) -> None:
    told = check(tmp_path, "--live")
    assert told.exit_code == 1
    assert "nothing was tried" in told.stderr


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NotSent("refused", code="connect_refused"), "nothing was reached at http://127.0.0.1:9"),
        (Broken("late", code="first_byte_timeout"), "no answer in time"),
        (Rejected("x", code="c", error_class=ErrorClass.OURS, status=401), "the credential in A_KEY"),
        (Rejected("x", code="c", error_class=ErrorClass.OURS, status=402, credential_fault=True), "A_KEY"),
        (Rejected("x", code="c", error_class=ErrorClass.TRANSIENT, status=429, rate_limited=True), "asks to wait"),
        (Rejected("x", code="c", error_class=ErrorClass.TRANSIENT, status=503), "status page"),
        (Rejected("x", code="c", error_class=ErrorClass.FATAL, status=400), "base_url"),
    ],
)
def test_each_way_to_fail_has_its_advice(tmp_path: Path, error: ProviderError, said: str) -> None:
    file = tmp_path / "tollbridge.toml"
    file.write_text(FILE.format(setting="", qualified="0" * 16))
    provider = config.load(file, {"A_KEY": "secret-value"}).providers["a"]
    told = live.hint(provider, error)
    assert said in told
    assert "secret" not in told
