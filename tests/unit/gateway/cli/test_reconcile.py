"""`tollbridge usage reconcile` over a gateway's answers as they are documented."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gateway.cli import main, remote
from tests.fakes.ports import refusing_port

DAY = 1_788_307_200  # 2026-09-02T00:00:00Z

GROUP: dict[str, Any] = {
    "day": "2026-09-02", "provider": "openai", "upstream_model": "gpt-4o", "charged_usd": "1.25", "attempts": 3,
    "unknown_attempts": 0, "unknown_upper_bound_usd": "0", "unbounded_attempts": 0, "input_tokens": 100,
    "output_tokens": 40, "reserved_attempts": 0, "reserved_usd": "0", "unbounded_reserved": 0,
}  # fmt: skip
UNKNOWN = {"unknown_attempts": 1, "unknown_upper_bound_usd": "0.50"}
ATTEMPT = {"ticket_id": "0199-a", "granted_at": "2026-09-02T10:00:00Z", "upper_bound_usd": "0.50", "state": "unknown"}


class Gateway:
    """What it answers, and what it was asked."""

    def __init__(self) -> None:
        self.groups = [GROUP]
        self.zone = "UTC"
        self.complete = True
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def get(self, path: str, **query: Any) -> Any:
        self.asked.append((path, query))
        match path:
            case "/v1/keys":
                return {"keys": []}
            case "/v1/groups":
                endpoints = [
                    {"endpoint": "https://api.openai.com:443", "provider": "openai"},
                    {"endpoint": "https://elsewhere:443", "provider": "other"},
                ]
                return {"groups": [{"endpoints": [one]} for one in endpoints]}
            case "/v1/usage":
                other = {**GROUP, "provider": "other", "charged_usd": "77"}
                groups = [*self.groups, other]
                at = int(query.get("cursor", 0))
                after = str(at + 1) if at + 1 < len(groups) else None
                said = {"zone": self.zone, "complete": self.complete, "next_cursor": after}
                return {**said, "groups": groups[at : at + 1]}
            case _:
                found = {"cursor": {"data": [ATTEMPT], "next_cursor": None}}
                return found.get(query.get("cursor", ""), {"data": [], "next_cursor": "cursor"})


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Gateway:
    found = Gateway()
    monkeypatch.setattr(remote.Remote, "get", lambda _self, path, **query: found.get(path, **query))
    return found


def costs(*rows: tuple[str, str | None], name: str = "costs.json", path: Path, **fields: Any) -> str:
    results = [
        {"amount": {"value": usd, "currency": "usd"}, "line_item": item, "project_id": "proj_1", **fields}
        for usd, item in rows
    ]
    page = {"data": [{"start_time": DAY, "end_time": DAY + 86_400, "results": results}], "has_more": False}
    (path / name).write_text(json.dumps(page))
    return str(path / name)


def usage(model: str, given: int, told: int, *, path: Path) -> str:
    result = {"input_tokens": given, "output_tokens": told, "num_model_requests": 3, "model": model}
    page = {"data": [{"start_time": DAY, "end_time": DAY + 86_400, "results": [result]}], "has_more": False}
    (path / "usage.json").write_text(json.dumps(page))
    return str(path / "usage.json")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["usage", "reconcile", *arguments], env={"TOLLBRIDGE_URL": "http://gateway:1"})


def test_books_that_agree_are_one_sentence_and_exit_0(gateway: Gateway, tmp_path: Path) -> None:
    money = costs(("1", "gpt-4o-2024-08-06, input"), ("0.25", "gpt-4o-2024-08-06, output"), path=tmp_path)
    done = run(money, usage("gpt-4o-2024-08-06", 100, 40, path=tmp_path))
    assert done.exit_code == 0, done.output
    assert "agree for 2026-09-02: $1.25 here, $1.25 there; 100 and 40 tokens in and out here, 100 and 40" in done.stdout
    assert "gpt-4o" not in done.stdout
    assert "gpt-4o" in run(money, "--all").stdout
    assert ("/v1/usage", {
        "group_by": "day,provider,upstream_model", "from": "2026-09-02", "to": "2026-09-02",
    }) in gateway.asked  # fmt: skip
    # Whoever is not an administrator would be told his own part alone.
    assert gateway.asked[0][0] == "/v1/keys"


def test_what_differs_is_shown_and_exits_1(gateway: Gateway, tmp_path: Path) -> None:
    file = costs(("1.50", "gpt-4o, input"), ("-3", "credit grant"), path=tmp_path)
    done = run(file)
    assert done.exit_code == 1, done.output
    for word in (
        "gpt-4o",
        "$1.25",
        "$1.50",
        "$0.25",
        "16.67",
        "do not agree",
        "1 of 1 rows differ",
        "credit grant",
        "-$3.00",
    ):
        assert word in done.stdout, word
    told = json.loads(run(file, "--json").stdout)
    assert told["agrees"] is False
    [row] = told["rows"]
    assert (row["day"], row["model"], row["difference_usd"], row["input_tokens"]) == (
        "2026-09-02",
        "gpt-4o",
        "0.25",
        None,
    )
    [apart] = told["not_of_this_gateway"]
    assert (apart["label"], apart["amount"], apart["reason"]) == ("credit grant", "-3", "of another product")
    [row] = csv.DictReader(run(file, "--csv").stdout.splitlines())
    assert (row["charged_usd"], row["theirs_usd"], row["theirs_input_tokens"]) == ("1.25", "1.5", "")
    assert run(file, "--tolerance", "usd=0.25").exit_code == 0
    assert run(file, "--tolerance", "percent=17").exit_code == 0


def test_an_attempt_of_unknown_cost_that_fits_is_told_with_what_resolves_it(gateway: Gateway, tmp_path: Path) -> None:
    gateway.groups = [{**GROUP, **UNKNOWN}]
    file = costs(("1.60", "gpt-4o, input"), path=tmp_path)
    done = run(file)
    assert done.exit_code == 1
    assert "attempts of unknown cost fit into it: 1, at most 0.50 USD" in done.stdout
    assert "tollbridge usage resolve 0199-a --charged 0.35" in done.stdout
    [attempt] = json.loads(run(file, "--json").stdout)["rows"][0]["unknown"]
    assert (attempt["ticket_id"], attempt["upper_bound_usd"]) == ("0199-a", "0.5")
    _, asked = gateway.asked[-1]
    assert asked == {
        "provider": "openai", "upstream_model": "gpt-4o", "state": "unknown", "limit": "21", "from": "2026-09-02",
        "to": "2026-09-02", "cursor": "cursor",
    }  # fmt: skip
    # Beyond its bound nothing is asked: the attempts are not the difference.
    gateway.asked.clear()
    assert run(costs(("9", "gpt-4o, input"), path=tmp_path)).exit_code == 1
    assert "/v1/invocations" not in [path for path, _ in gateway.asked]


def test_in_another_zone_the_sums_of_the_range_are_compared_and_it_is_said(gateway: Gateway, tmp_path: Path) -> None:
    gateway.zone = "Europe/Berlin"
    file = costs(("1.25", "gpt-4o, input"), path=tmp_path)
    done = run(file)
    assert done.exit_code == 0
    assert "counts days in Europe/Berlin" in done.stdout
    assert json.loads(run(file, "--json", "--all").stdout)["rows"][0]["day"] is None
    refused = run(file, "--by", "day")
    assert refused.exit_code == 2
    assert "--by range" in refused.stderr


def test_a_ledger_that_does_not_have_the_whole_range_never_agrees(gateway: Gateway, tmp_path: Path) -> None:
    gateway.complete = False
    done = run(costs(("1.25", "gpt-4o, input"), path=tmp_path))
    assert done.exit_code == 1
    assert "the ledger's side is not whole" in done.stdout


def test_what_is_at_work_is_told(gateway: Gateway, tmp_path: Path) -> None:
    gateway.groups = [{**GROUP, "reserved_attempts": 2}]
    assert "2 attempts of the range are still at work" in run(costs(("1.25", "gpt-4o, input"), path=tmp_path)).stdout


def test_a_part_of_the_export_can_be_chosen_and_the_rest_is_told(gateway: Gateway, tmp_path: Path) -> None:
    mine = costs(("1.25", "gpt-4o, input"), path=tmp_path)
    others = costs(("8", "gpt-4o, input"), name="b.json", path=tmp_path, project_id="proj_2")
    done = run(mine, others, "--only", "project_id=proj_1")
    assert done.exit_code == 0, done.output
    assert "not of project_id=proj_1" in done.stdout
    assert "$8.00" in done.stdout
    refused = run(mine, "--only", "user_id=u")
    assert refused.exit_code == 2
    assert "is not grouped by user_id" in refused.stderr
    outside = run(mine, "--from", "2026-09-03", "--to", "2026-09-03")
    assert "outside of 2026-09-03 to 2026-09-03" in outside.stdout


def test_providers_and_names_of_models_can_be_said(gateway: Gateway, tmp_path: Path) -> None:
    file = costs(("77", "our-deployment, input"), path=tmp_path)
    assert run(file, "--provider", "other").exit_code == 1
    assert run(file, "--provider", "other", "--same", "our-deployment=gpt-4o").exit_code == 0
    nobody = run(file, "--provider", "nobody")
    assert (nobody.exit_code, "there is no provider nobody" in nobody.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tolerance", "usd=x"), "'x' is no number"),
        (("--tolerance", "cents=1"), "cents: is none of usd, percent, tokens"),
        (("--tolerance", "tokens=0.5"), "must be a whole number"),
        (("--from", "today"), "must be a day as YYYY-MM-DD"),
        (("--from", "2026-09-03"), "the range begins on 2026-09-03 and ends on 2026-09-02"),
        (("--only", "x"), "must have the form NAME=VALUE"),
        (("--csv", "--json"), "give one of them"),
    ],
)
def test_wrong_use_is_told_and_exits_2(arguments: tuple[str, ...], said: str, gateway: Gateway, tmp_path: Path) -> None:
    refused = run(costs(("1", "gpt-4o, input"), path=tmp_path), *arguments)
    assert refused.exit_code == 2
    assert said in " ".join(refused.stderr.split())
    assert refused.stdout == ""


def test_a_file_that_is_no_export_exits_2_without_asking_the_gateway(gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "notes.csv").write_text("a,b\n1,2\n")
    refused = run(str(tmp_path / "notes.csv"))
    assert refused.exit_code == 2
    assert "line 1: is of no known form; looked for" in refused.stderr
    mixed = run(costs(("1", "gpt-4o, input"), ("1", None), path=tmp_path))
    assert mixed.exit_code == 2
    assert "may count twice" in mixed.stderr
    assert [path for path, _ in gateway.asked] == ["/v1/keys", "/v1/groups", "/v1/usage", "/v1/usage"]


def test_a_gateway_that_is_not_there_is_no_difference(tmp_path: Path) -> None:
    with refusing_port() as port:
        refused = run(costs(("1", "gpt-4o, input"), path=tmp_path), "--url", f"http://127.0.0.1:{port}")
    assert refused.exit_code == 2
    assert "no gateway answers" in refused.stderr


def test_options_before_the_subcommand_are_not_ignored(tmp_path: Path) -> None:
    file = costs(("1", "gpt-4o, input"), path=tmp_path)
    refused = CliRunner().invoke(main, ["usage", "--day", "2026-09-02", "reconcile", file])
    assert refused.exit_code == 2
    assert "options stand after reconcile: day" in refused.stderr
