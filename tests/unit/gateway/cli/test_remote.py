from __future__ import annotations

import json
from decimal import Decimal

import click
import pytest
from click.testing import CliRunner, Result

from gateway.cli import remote
from gateway.cli.failure import Failed
from tests.fakes.ports import refusing_port


def test_the_url_given_wins_over_the_data_directory(tmp_path):
    (tmp_path / "ready.json").write_text(json.dumps({"rest": "http://127.0.0.1:1234", "grpc": "", "pid": 1}))
    environ = {"TOLLBRIDGE_DATA_DIR": str(tmp_path)}
    assert remote.find_url("http://gateway:80/", environ) == "http://gateway:80"
    assert remote.find_url(None, environ) == "http://127.0.0.1:1234"


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"rest":'], ids=["absent", "empty", "list", "torn"])
def test_without_a_usable_ready_file_it_is_the_default_address(tmp_path, content):
    if content is not None:
        (tmp_path / "ready.json").write_bytes(content)
    assert remote.find_url(None, {"TOLLBRIDGE_DATA_DIR": str(tmp_path)}) == remote.DEFAULT_URL


def test_a_data_directory_that_is_named_says_which_gateway_and_nothing_else_is_asked_instead(tmp_path):
    @click.command()
    @remote.options
    def command(url: str | None, key: str | None, *, as_json: bool) -> None:
        click.echo(f"{url} {key} {as_json}")

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(
            command, arguments, env={"TOLLBRIDGE_URL": "http://other:1", "TOLLBRIDGE_API_KEY": None}
        )

    assert run().output == "http://other:1 None False\n"
    absent = run("--data-dir", str(tmp_path))
    assert absent.exit_code == 1
    assert f"no gateway runs on {tmp_path}" in absent.output
    (tmp_path / "ready.json").write_text(json.dumps({"rest": "http://127.0.0.1:1234", "grpc": "", "pid": 1}))
    assert run("--data-dir", str(tmp_path)).output == "http://127.0.0.1:1234 None False\n"
    assert run("--data-dir", str(tmp_path), "--url", "http://one:1").exit_code == 2


def test_numbers_of_an_answer_stay_exact():
    assert remote.decode(b'{"usd": 0.1, "n": 3}') == {"usd": Decimal("0.1"), "n": 3}


def test_a_refusal_keeps_the_gateway_s_code_and_says_what_to_do():
    body = b'{"error": {"code": "unauthenticated", "message": "a valid API key is needed", "param": null}}'
    failed = remote.refusal(401, body)
    assert failed.code == "unauthenticated"
    assert failed.hint is not None
    assert "TOLLBRIDGE_API_KEY" in failed.hint
    assert failed.exit_code == 1


@pytest.mark.parametrize("body", [b"<html>", b"{}", b'{"error": "no"}'], ids=["html", "empty", "text"])
def test_an_answer_that_no_gateway_gives_is_said_to_be_one(body):
    assert "is this a gateway" in str(remote.refusal(502, body))


def test_an_address_where_nobody_listens_is_one_line_with_what_to_do():
    with (
        refusing_port() as port,
        remote.reach(f"http://127.0.0.1:{port}", None) as gateway,
        pytest.raises(Failed) as failed,
    ):
        gateway.get("/v1/groups")
    assert "tollbridge serve" in (failed.value.hint or "")


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "ftp://gateway", ""], ids=["bare", "ftp", "empty"])
def test_something_that_is_no_url_is_said_to_be_none(url):
    with pytest.raises(Failed, match="is no URL"):
        remote.Remote(url, None).get("/v1/groups")
