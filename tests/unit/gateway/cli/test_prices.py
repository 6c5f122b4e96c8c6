"""`tollbridge prices`: what it shows, what it lists, and that only a good list takes the place of another."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from typing_extensions import override

from gateway import config, pricing
from gateway.cli import main
from metering import price_list

FILE = """
[providers.openai]
[providers.local]
protocol = "chat_completions"
base_url = "http://127.0.0.1:9/v1"
[models.mine]
providers = [{ provider = "local", model = "up" }]
fallback = [{ provider = "openai", model = "gpt-4o" }]
[models.mine.price]
input = "3"
output = "15"
per_unit = { web_search = "0.01" }
tiers = [{ above = 200000, input = "6", output = "22.5" }]
service_tiers = { flex = { factor = "0.5" } }
[models.public]
providers = [{ provider = "openai", model = "gpt-4o" }]
"""
UNPRICED = '[models.unheard]\nproviders = [{ provider = "local", model = "of" }]\n'
#: One model, at a made-up price.
LIST: list[dict[str, Any]] = [
    {
        "id": "openai",
        "name": "OpenAI",
        "api_pattern": r"https://api\.openai\.com",
        "models": [
            {
                "id": "gpt-4o",
                "match": {"equals": "gpt-4o"},
                "context_window": 1000,
                "prices": [
                    {"prices": {"input_mtok": 1, "output_mtok": 2}},
                    {"constraint": {"start_date": "2026-02-03"}, "prices": {"input_mtok": 0.1, "output_mtok": 7.25}},
                ],
            }
        ],
    }
]


def run(tmp_path: Path, *arguments: str, more: str = "") -> Result:
    file = tmp_path / "tollbridge.toml"
    file.write_text(FILE + more)
    return CliRunner().invoke(
        main, ["prices", *arguments, "--config", str(file), "--data-dir", str(tmp_path / "data")], env={}
    )


def shown(tmp_path: Path, *arguments: str) -> Any:
    result = run(tmp_path, *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_it_shows_each_route_with_its_bands_its_service_tiers_and_its_version(tmp_path: Path) -> None:
    local, public = shown(tmp_path, "show", "mine")["routes"]
    assert (local["source"], local["version"][:7], local["since"]) == ("config", "config:", None)
    assert [(row["service_tier"], row["above"], row["input"], row["output"]) for row in local["prices"]] == [
        ("standard", 0, "3", "15"),
        ("standard", 200_000, "6", "22.5"),
        ("flex", 0, "1.5", "7.5"),
        ("flex", 200_000, "3", "11.25"),
    ]
    assert all(row["per_unit"] == {"web_search": "0.01"} for row in local["prices"])
    # The price of a model holds for all its routes.
    assert (public["fallback"], public["version"]) == (True, local["version"])
    [pinned] = shown(tmp_path, "show", "openai/gpt-4o")["routes"]
    assert pinned["source"] == "genai-prices"
    assert pinned["context_window"] > 1000
    told = run(tmp_path, "show", "mine").stdout
    assert local["version"] in told
    assert "0.01 a web_search" in told
    assert run(tmp_path, "show", "nothing").exit_code == 1
    assert "model_not_found" in run(tmp_path, "show", "nowhere/x").stderr


def test_a_route_without_a_price_is_listed_and_fails_the_check(tmp_path: Path) -> None:
    assert run(tmp_path, "check").exit_code == 0
    failed = run(tmp_path, "check", more=UNPRICED)
    assert failed.exit_code == 1
    assert "unheard" in failed.stdout
    assert "1 of 4 routes have no price" in failed.stderr
    told = json.loads(run(tmp_path, "check", "--json", more=UNPRICED).stdout)
    assert [(entry["model"], entry["refused"]) for entry in told["unpriced"]] == [("unheard", False)]
    refused = run(tmp_path, "check", "--json", more=UNPRICED + "[metering]\nrequire_pricing = true\n")
    assert json.loads(refused.stdout)["unpriced"][0]["refused"]
    file = tmp_path / "tollbridge.toml"
    whole = CliRunner().invoke(main, ["check", "--config", str(file), "--json"], env={})
    assert [entry["model"] for entry in json.loads(whole.stdout)["unpriced"]] == ["unheard"]


@pytest.fixture
def mirror() -> Iterator[str]:
    """Serves the list as `/data.json`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            there = self.path == "/data.json"
            self.send_response(200 if there else 404)
            self.end_headers()
            self.wfile.write(json.dumps(LIST).encode() if there else b"no")

        @override
        def log_message(self, format: str, *args: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_list_is_taken_used_from_then_on_and_given_back(tmp_path: Path, mirror: str) -> None:
    bundled = shown(tmp_path, "show", "public")["routes"][0]
    taken = shown(tmp_path, "update", "--url", f"{mirror}/data.json")
    assert (taken["models"], taken["changed"], taken["lost"]) == (1, ["openai/gpt-4o"], [])
    assert taken["version"].endswith(taken["sha256"][:12])
    [now] = shown(tmp_path, "show", "public")["routes"]
    assert (now["version"], now["since"], now["context_window"]) == (taken["version"], "2026-02-03", 1000)
    # Digit for digit: a binary float would have made something else of 0.1.
    assert [(row["input"], row["output"]) for row in now["prices"]] == [("0.1", "7.25")]

    told = run(tmp_path, "update", "--url", f"{mirror}/nothing")
    assert (told.exit_code, "404" in told.stderr) == (1, True)
    assert shown(tmp_path, "show", "public")["routes"] == [now]

    assert "back to the list of this release" in run(tmp_path, "update", "--reset").stdout
    assert shown(tmp_path, "show", "public")["routes"] == [bundled]
    assert "in use already" in run(tmp_path, "update", "--reset").stdout


def without(model: dict[str, Any], **changed: Any) -> list[dict[str, Any]]:
    return [{**LIST[0], "models": [{**model, **changed}]}]


MODEL = LIST[0]["models"][0]


@pytest.mark.parametrize(
    "published",
    [
        "",
        "<html>",
        "{}",
        "[]",
        "[7]",
        "[" * 100_000,
        json.dumps(LIST)[:-3],
        json.dumps(without(MODEL, prices={"input_mtok": -1})),
        json.dumps(without(MODEL, prices={"input_mtok": "x"})),
        json.dumps(without(MODEL, prices={"input_mtok": 1e300})),
        json.dumps(without(MODEL, prices={"input_mtok": float("nan")})),
        json.dumps(without(MODEL, match={"rhymes_with": "x"})),
    ],
    ids=["empty", "html", "object", "no provider", "number", "deep", "cut", "negative", "word", "huge", "nan", "match"],
)
def test_what_is_no_good_list_leaves_the_one_in_use(tmp_path: Path, published: str) -> None:
    (tmp_path / "good.json").write_text(json.dumps(LIST))
    assert run(tmp_path, "update", "--from", str(tmp_path / "good.json")).exit_code == 0
    before = (tmp_path / "data" / price_list.FILE_NAME).read_bytes()
    (tmp_path / "bad.json").write_text(published)
    failed = run(tmp_path, "update", "--from", str(tmp_path / "bad.json"))
    assert failed.exit_code == 1
    assert "the one in use stays" in failed.stderr
    assert len(failed.stderr) < 600
    assert (tmp_path / "data" / price_list.FILE_NAME).read_bytes() == before
    assert [path.name for path in (tmp_path / "data").iterdir()] == [price_list.FILE_NAME]


def test_routes_that_a_new_list_has_no_price_for_are_told(tmp_path: Path) -> None:
    other = without(MODEL, match={"equals": "another"})
    (tmp_path / "list.json").write_text(json.dumps(other))
    assert shown(tmp_path, "update", "--from", str(tmp_path / "list.json"))["lost"] == ["openai/gpt-4o"]


def test_a_list_that_was_damaged_since_is_used_by_nothing(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(json.dumps(LIST))
    run(tmp_path, "update", "--from", str(tmp_path / "list.json"))
    kept = tmp_path / "data" / price_list.FILE_NAME
    kept.write_bytes(kept.read_bytes().replace(b"7.25", b"0.25"))
    for arguments in (["show", "public"], ["check"]):
        failed = run(tmp_path, *arguments)
        assert failed.exit_code == 1
        assert "its list is not the one that was taken" in failed.stderr
    settings = config.load(tmp_path / "tollbridge.toml", {"TOLLBRIDGE_DATA_DIR": str(tmp_path / "data")})
    with pytest.raises(config.ConfigFaults, match="its list is not the one that was taken"):
        pricing.checked_at_start(settings, datetime.now(UTC))
    assert run(tmp_path, "update", "--reset").exit_code == 0
    assert run(tmp_path, "check").exit_code == 0


def test_a_start_names_what_has_no_price_and_fails_where_it_is_to(tmp_path: Path) -> None:
    file = tmp_path / "tollbridge.toml"
    environ = {"OPENAI_API_KEY": "sk-0123456789abcdef", "TOLLBRIDGE_DATA_DIR": str(tmp_path)}

    def start(more: str) -> tuple[list[str], list[str]]:
        file.write_text(FILE + UNPRICED + more)
        _, unpriced, refused = pricing.checked_at_start(config.load(file, environ), datetime.now(UTC))
        return unpriced, refused

    assert start("") == (["local/of"], [])
    assert start("[metering]\nrequire_pricing = true\n") == (["local/of"], ["local/of"])
    assert start("require_pricing = true\n") == (["local/of"], ["local/of"])
    with pytest.raises(config.ConfigFaults, match=r"models\.unheard: local/of has no price"):
        start("[metering]\nstart_needs_prices = true\n")
