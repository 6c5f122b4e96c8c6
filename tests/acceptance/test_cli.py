"""The commands that talk to a running gateway, against one that runs, with `tollbridge simulate` behind it."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

from gateway.cli import main
from tests.acceptance.processes import KEY, PATIENCE_S, Process, served
from tests.postgres import execute, url_of

KEY_ID = "01938f0a-7c1e-7d52-9b1a-5a0c7f3f6d10"
CONFIGURATION = """
[providers.simulated]
protocol = "chat_completions"
base_url = "{url}"
models = ["sim-fast"]
[models."sim-fast"]
providers = ["simulated"]
price = {{ input = "1", output = "2" }}
[capture]
enabled = true
# It has said something when its connection is cut.
[models.cut]
providers = [{{ provider = "simulated", model = "sim-fast?die=rst&die_after=4" }}]
price = {{ input = "1", output = "2" }}
"""
#: A provider whose books no other test is in.
BOOKS = """
[providers.books]
protocol = "chat_completions"
base_url = "{url}"
models = ["sim-books"]
[models."sim-books"]
providers = ["books"]
price = {{ input = "1", output = "2" }}
"""


@contextlib.contextmanager
def simulated() -> Iterator[str]:
    process = subprocess.Popen([sys.executable, "-m", "gateway", "simulate"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
        process.stdout.close()


@pytest.fixture(scope="module")
def provider() -> Iterator[str]:
    with simulated() as url:
        yield url


@pytest.fixture(scope="module")
def books() -> Iterator[str]:
    with simulated() as url:
        yield url


@pytest.fixture(scope="module")
def gateway(
    provider: str, books: str, database_server: str, database_template: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Process]:
    name = f"tollbridge_test_{uuid.uuid4().hex}"
    execute(database_server, f"create database {name} template {database_template}")
    environ: dict[str, str | None] = {"TOLLBRIDGE_DATABASE_URL": url_of(database_server, name)}
    data_dir = tmp_path_factory.mktemp("gateway")
    configuration = CONFIGURATION.format(url=provider) + BOOKS.format(url=books)
    with served(data_dir, configuration=configuration, environ=environ) as found:
        yield found.until_ready()
    execute(database_server, f"drop database {name} with (force)")


@pytest.fixture
def tollbridge(gateway: Process) -> Any:
    def run(*arguments: str, key: str = KEY, url: str | None = None) -> Result:
        environ = {
            "TOLLBRIDGE_API_KEY": key,
            "TOLLBRIDGE_URL": url or gateway.rest,
            "TOLLBRIDGE_CONFIG": str(gateway.data_dir / "tollbridge.toml"),
            "TOLLBRIDGE_DATA_DIR": str(gateway.data_dir),
        }
        return CliRunner().invoke(main, arguments, env=environ)

    return run


def chat(custom_id: str, text: str, model: str = "sim-fast") -> bytes:
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}).encode()


def written(path: Path, lines: Sequence[bytes]) -> str:
    path.write_bytes(b"\n".join(lines) + b"\n")
    return str(path)


def test_a_file_is_submitted_watched_and_its_results_and_cost_are_shown(tollbridge, tmp_path):
    file = written(tmp_path / "in.jsonl", [chat("a", "Hello"), b'{"custom_id": "b", "bo', chat("c", "Ünïcödé 🙂")])
    output = tmp_path / "out.jsonl"
    done = tollbridge("jobs", "submit", file, "--session", "s1", "--watch", "-o", str(output))
    assert done.exit_code == 1, done.output
    assert "2 accepted, 1 refused" in done.output
    assert "invalid_json" in done.output
    assert "error: 1 jobs did not succeed" in done.stderr
    results = {line["line"]: line for line in map(json.loads, output.read_text().splitlines())}
    assert {number: line["status"] for number, line in results.items()} == {
        1: "succeeded",
        2: "failed",
        3: "succeeded",
    }
    cost = sum((Decimal(line["cost_usd"] or 0) for line in results.values()), Decimal(0))

    listed = json.loads(tollbridge("jobs", "list", "--session", "s1", "--json").stdout)
    assert [job["custom_id"] for job in listed] == ["a", "c"]
    one = tollbridge("jobs", "get", listed[0]["id"], "--wait", "5")
    assert "succeeded" in one.stdout
    assert "simulated/sim-fast" in one.stdout

    used = json.loads(tollbridge("usage", "--session", "s1", "--json").stdout)
    assert Decimal(used["session"]["charged_usd"]) == cost > 0
    known = tollbridge("usage", "--session", "s1").stdout
    assert f"${cost.normalize():f}" in known
    assert "nothing is known" not in known
    rows = json.loads(tollbridge("invocations", "--session", "s1", "--json").stdout)
    assert sum(Decimal(row["usd"]) for row in rows) == cost
    shown = tollbridge("invocations", "--session", "s1", "--status", "success", "--no-fallback")
    assert all(row["ticket_id"] in shown.stdout for row in rows)
    assert rows[0]["ticket_id"] in tollbridge("invocations", rows[0]["ticket_id"]).stdout
    lines = tollbridge("invocations", "--session", "s1", "--jsonl").stdout.splitlines()
    assert [json.loads(line) for line in lines] == rows
    cells = list(csv.DictReader(io.StringIO(tollbridge("invocations", "--session", "s1", "--csv").stdout, newline="")))
    assert [cell["usd"] for cell in cells] == [row["usd"] for row in rows]
    assert tollbridge("invocations", "--csv", "--json").exit_code == 2
    sums = json.loads(tollbridge("stats", "--by", "session,provider", "--session", "s1", "--json").stdout)
    assert [(group["session"], Decimal(group["charged_usd"])) for group in sums["groups"]] == [("s1", cost)]
    shown = tollbridge("stats", "--by", "session,status", "--limit", "1", "--from", "2020-01-01").stdout
    assert f"${cost.normalize():f}" in shown
    assert "nothing is known of a session [s2]" in tollbridge("usage", "--session", "[s2]").stdout

    by_model = ("usage", "--by", "provider,model", "--session", "s1")
    grouped = json.loads(tollbridge(*by_model, "--json").stdout)
    [group] = grouped["groups"]
    assert (group["model"], Decimal(group["charged_usd"]), group["attempts"]) == ("sim-fast", cost, 2)
    assert grouped["sum"] == {name: group[name] for name in grouped["sum"]}
    shown = tollbridge(*by_model).stdout
    assert shown.splitlines()[0].startswith(f"usage and cost from {grouped['from']} to {grouped['to']}")
    assert [line.split()[0] for line in shown.splitlines()[1:] if line] == ["provider", "simulated", "sum"]
    *lines, last = map(json.loads, tollbridge(*by_model, "--jsonl").stdout.splitlines())
    assert (lines, last["end"], last["sum"]) == ([group], True, grouped["sum"])
    [row] = csv.DictReader(io.StringIO(tollbridge(*by_model, "--csv").stdout, newline=""))
    assert row == {name: str(value) for name, value in group.items()}
    for refused in (("--by", "modell"), ("--tag", "team"), ("--csv", "--json"), ("--day", grouped["to"], "--to", "x")):
        assert tollbridge("usage", *refused).exit_code in {1, 2}, refused
    tagged = json.loads(tollbridge("usage", "--tag", "team=nobody's", "--json").stdout)
    assert (tagged["groups"], tagged["source"], tagged["sum"]["attempts"]) == ([], "counters", 0)


def test_results_go_to_stdout_line_by_line(tollbridge, tmp_path):
    receipt = json.loads(
        tollbridge("jobs", "submit", written(tmp_path / "in.jsonl", [chat("z", "Hi")]), "--json").stdout
    )
    job = receipt["jobs"][0]["id"]
    assert tollbridge("jobs", "get", job, "--wait", "30").exit_code == 0
    [line] = tollbridge("jobs", "results", receipt["submission_id"]).stdout.splitlines()
    assert json.loads(line)["custom_id"] == "z"
    assert f"{job}: succeeded" in tollbridge("jobs", "cancel", job).stdout


def test_the_same_idempotency_key_is_the_same_submission(tollbridge, tmp_path):
    file = written(tmp_path / "in.jsonl", [chat("i", "Once")])
    first, again = (
        json.loads(tollbridge("jobs", "submit", file, "--idempotency-key", "k1", "--json").stdout) for _ in range(2)
    )
    assert first == again


def cut(gateway: Process, debit: str) -> None:
    """An attempt of unknown cost."""
    body = {"model": "cut", "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
    headers = {"authorization": f"Bearer {KEY}", "x-tollbridge-debit-id": debit}
    with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
        httpx.post(f"{gateway.rest}/v1/chat/completions", json=body, headers=headers, timeout=60)


def test_what_is_proven_of_an_attempt_corrects_the_ledger_once(gateway, tollbridge, tmp_path):
    keys = httpx.get(f"{gateway.rest}/v1/keys", headers={"authorization": f"Bearer {KEY}"}, timeout=60).json()["data"]
    [key] = [one["id"] for one in keys if "admin" in one["scopes"]]
    for debit in ("cut-1", "cut-2"):
        cut(gateway, debit)

    def usage() -> dict[str, Any]:
        total: dict[str, Any] = json.loads(tollbridge("usage", "--json").stdout)["total"]
        return total

    before = usage()
    file = tmp_path / "proven.csv"
    rows = f"{key},cut-1,1,charged,0.25,invoice 4711\n{key},cut-2,1,zero,,\n"
    file.write_text(f"key_id,debit_id,attempt,state,usd,evidence\n{rows}")
    told = tollbridge("usage", "resolve", "--file", str(file), "--json")
    assert told.exit_code == 0, told.output
    resolved = json.loads(told.stdout)["attempts"]
    assert [(one["result"], one["state"], one["usd"]) for one in resolved] == [
        ("resolved", "charged", "0.25"),
        ("resolved", "zero", "0"),
    ]
    after = usage()
    assert Decimal(after["charged_usd"]) == Decimal(before["charged_usd"]) + Decimal("0.25")
    assert after["unknown_attempts"] == before["unknown_attempts"] - 2
    assert after["attempts"] == before["attempts"]

    ticket = resolved[0]["ticket_id"]
    again = tollbridge("usage", "resolve", ticket, "--charged", "0.25")
    assert (again.exit_code, "was so already" in again.stdout) == (0, True)
    other = tollbridge("usage", "resolve", ticket, "--charged", "0.26")
    assert (other.exit_code, "which stands" in other.stdout) == (1, True)
    nobody = tollbridge("usage", "resolve", str(uuid.uuid4()), "--zero")
    assert (nobody.exit_code, "no such attempt" in nobody.stdout) == (1, True)
    assert usage() == after


@pytest.mark.parametrize(
    ("attempt", "param"),
    [
        ({"state": "charged", "usd": "1"}, "attempts[0].key_id"),
        ({"state": "charged", "usd": "1", "key_id": KEY_ID, "debit_id": "d"}, "attempts[0].attempt"),
        ({"state": "charged", "usd": "1", "ticket_id": KEY_ID, "debit_id": "d"}, "attempts[0].debit_id"),
        ({"state": "charged", "ticket_id": KEY_ID}, "attempts[0].usd"),
        *(
            ({"state": "charged", "ticket_id": KEY_ID, "usd": usd}, "attempts[0].usd")
            for usd in ("0", "-1", "NaN", "Infinity", "1e9", "0.0000000000001", "one")
        ),
        ({"state": "zero", "ticket_id": KEY_ID, "usd": "1"}, "attempts[0].usd"),
        ({"state": "unknown", "ticket_id": KEY_ID}, "attempts[0].state"),
        ({"state": "zero", "ticket_id": "x"}, "attempts[0].ticket_id"),
        ({"state": "zero", "ticket_id": KEY_ID, "note": "n" * 501}, "attempts[0].note"),
        ({"state": "zero", "ticket_id": KEY_ID, "who": "I"}, "attempts[0].who"),
    ],
)
def test_a_proof_that_says_too_little_or_too_much_is_refused_with_its_path(gateway, attempt, param):
    answer = httpx.post(
        f"{gateway.rest}/v1/usage/resolve",
        json={"attempts": [attempt]},
        headers={"authorization": f"Bearer {KEY}"},
        timeout=60,
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ticket_id,amount\n1,2\n", "line 1: there is no column 'amount'"),
        (f"ticket_id,state\n{KEY_ID},zero,3\n", "line 2 has more columns"),
        (f"key_id,debit_id,attempt,state\n{KEY_ID},d,first,zero\n", "line 2: the attempt is a number"),
        (f'{{"ticket_id": "{KEY_ID}", "state": "zero"}}\n{{"ticket"\n', "line 2 is no JSON object"),
        ('{"cost": 1}', "line 1: there is no field 'cost'"),
        (f"ticket_id,state,note\n{KEY_ID},zero,ok\n{KEY_ID},zero,caf\udce9\n", "line 3 is not UTF-8"),
        (f"ticket_id,state\n{KEY_ID},zero\n{KEY_ID},gone\n", "line 3: state: "),
        ("ticket_id,state\n", "names no attempt"),
    ],
)
def test_a_file_of_proofs_that_is_not_understood_says_the_line(tollbridge, tmp_path, text, said):
    (tmp_path / "proofs").write_text(text, "utf-8", "surrogateescape")
    told = tollbridge("usage", "resolve", "--file", str(tmp_path / "proofs"))
    assert told.exit_code == 1
    assert said in told.stderr


def test_what_was_asked_and_answered_is_there_for_administrators_until_it_is_deleted(gateway):
    admin = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=gateway.rest, headers=admin, timeout=60) as client:
        body = {"model": "sim-fast", "messages": [{"role": "user", "content": "I am ada@mail.example"}]}
        answered = client.post("/v1/chat/completions", json=body)
        path = f"/v1/content/{answered.headers['x-tollbridge-request-id']}"
        found = client.get(path)
        for _ in range(300):
            if found.status_code == 200:
                break
            time.sleep(0.1)
            found = client.get(path)
        kept = found.json()
        assert kept["request"]["body"]["messages"] == [{"role": "user", "content": "I am [email]"}]
        [said], [told] = answered.json()["choices"], kept["answer"]["choices"]
        assert told["text"] == said["message"]["content"].replace("ada@mail.example", "[email]")
        assert (kept["ended"], kept["model"]) == ("complete", "sim-fast")
        made = client.post("/v1/keys", json={"name": "no-admin", "scopes": ["chat", "usage:read"]}).json()["secret"]
        other = {"authorization": f"Bearer {made}"}
        assert [client.request(method, path, headers=other).status_code for method in ("GET", "DELETE")] == [403, 403]
        assert client.delete(path).json()["deleted"] is True
        assert [client.request(method, path).status_code for method in ("GET", "DELETE")] == [404, 404]


def test_groups_shows_the_limit_and_the_occupancy(tollbridge, provider):
    shown = tollbridge("groups", "--slots")
    assert shown.exit_code == 0, shown.output
    assert provider.removesuffix("/v1") in shown.stdout
    assert "closed" in shown.stdout
    listed = json.loads(tollbridge("groups", "--json").stdout)["groups"]
    [group] = [group for group in listed if group["group"] == provider.removesuffix("/v1")]
    assert group["concurrency"] == 3


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("jobs", "get", "00000000-0000-0000-0000-000000000000"), "not_found"),
        (("jobs", "list", "--session", "x" * 100, "--submission", "nonsense"), "invalid_request"),
        (("usage", "--day", "yesterday"), "invalid_request"),
        (("invocations", "--from", "yesterday"), "invalid_request"),
        (("stats", "--by", "color"), "invalid_request"),
    ],
    ids=["unknown job", "no id", "no day", "no time", "no word"],
)
def test_what_the_gateway_refuses_is_one_line_with_its_code(tollbridge, arguments, code):
    refused = tollbridge(*arguments)
    assert refused.exit_code == 1
    assert refused.stderr.startswith(f"error: {code}: ")
    assert refused.stdout == ""


def test_a_wrong_key_is_told_how_to_get_one(tollbridge):
    refused = tollbridge("groups", key="wrong")
    assert refused.exit_code == 1
    assert refused.stderr.startswith("error: unauthenticated")
    assert "keys create" in refused.stderr


def test_a_key_is_made_used_and_revoked(tollbridge, gateway, monkeypatch):
    monkeypatch.setenv("TOLLBRIDGE_DATABASE_URL", gateway.database_url)
    made = tollbridge("keys", "create", "reader", "--scope", "usage:read", "--expires", "1h")
    assert made.exit_code == 0, made.output
    secret = made.stdout.strip()
    assert "not shown again" in made.stderr
    gateway.until_heard(secret)
    assert tollbridge("groups", key=secret).exit_code == 0
    denied = tollbridge("jobs", "list", key=secret)
    assert denied.stderr.startswith("error: permission_denied")
    changed = tollbridge("keys", "change", "reader", "--model", "gpt-*", "--tag", "team=core", "--json")
    assert changed.exit_code == 0, changed.output
    assert json.loads(changed.stdout)["models"] == ["gpt-*"]
    listed = tollbridge("keys", "list").stdout
    assert "reader" in listed
    assert "gpt-*" in listed
    assert "limits" in listed
    limits = ("--limit", "budget_day_usd=0.50", "--limit", "concurrency=3")
    limited = json.loads(tollbridge("keys", "change", "reader", *limits, "--json").stdout)["limits"]
    assert {name: limit for name, limit in limited.items() if limit is not None} == {
        "concurrency": 3,
        "budget_day_usd": "0.50",
    }
    [key] = [key for key in json.loads(tollbridge("keys", "list", "--json").stdout) if key["name"] == "reader"]
    assert key["limits"] == limited
    for wrong in ("budget_day_usd", "budget_day_usd=much", "concurrency=1.5", "requests=3"):
        assert tollbridge("keys", "change", "reader", "--limit", wrong).exit_code == 2, wrong
    assert tollbridge("keys", "change", "reader", "--limit", "concurrency=0").stderr.startswith(
        "error: invalid_request"
    )
    assert tollbridge("keys", "change", "reader", "--no-limits", *limits).exit_code == 2
    lifted = json.loads(tollbridge("keys", "change", "reader", "--no-limits", "--json").stdout)["limits"]
    assert set(lifted.values()) == {None}
    rotated = tollbridge("keys", "rotate", "reader", "--overlap", "1h")
    assert rotated.exit_code == 0, rotated.output
    gateway.until_heard(rotated.stdout.strip())
    assert tollbridge("groups", key=secret).exit_code == 0
    assert tollbridge("keys", "rotate", "reader", "--overlap", "31d").exit_code == 2
    assert tollbridge("keys", "change", "reader").exit_code == 2
    assert tollbridge("keys", "change", "reader", "--any-model", "--model", "x").exit_code == 2
    assert tollbridge("keys", "create", "reader").stderr.startswith("error: conflict")
    assert tollbridge("keys", "revoke", "reader").exit_code == 0
    assert tollbridge("keys", "revoke", "reader").stderr.startswith("error: not_found")


def test_without_a_url_the_ready_file_leads_there(tollbridge, gateway, monkeypatch):
    monkeypatch.chdir(gateway.data_dir)
    found = CliRunner().invoke(
        main, ["groups"], env={"TOLLBRIDGE_URL": None, "TOLLBRIDGE_API_KEY": KEY, "TOLLBRIDGE_DATA_DIR": "."}
    )
    assert found.exit_code == 0, found.output


def test_a_live_check_that_may_spend_makes_one_call_by_the_gateway_and_it_is_in_the_ledger(
    tollbridge: Any, provider: str, tmp_path: Path
) -> None:
    file = tmp_path / "tollbridge.toml"
    file.write_text(CONFIGURATION.format(url=provider).replace("models =", "check_is_open = true\nmodels =", 1))
    before = json.loads(tollbridge("usage", "--json").stdout)["total"]["attempts"]
    free = tollbridge("check", "--config", str(file), "--live", "--json")
    assert [entry["result"] for entry in json.loads(free.stdout)["live"]] == ["answers"]
    assert json.loads(tollbridge("usage", "--json").stdout)["total"]["attempts"] == before
    told = tollbridge("check", "--config", str(file), "--live", "--spend", "--json")
    assert told.exit_code == 0, told.output
    [entry] = json.loads(told.stdout)["live"]
    assert (entry["result"], entry["by"]) == ("works", "call")
    usage = json.loads(tollbridge("usage", "--json").stdout)["total"]
    assert usage["attempts"] == before + 1
    # Where no gateway runs, that is said, and what to do.
    alone = tollbridge("check", "--config", str(file), "--live", "--spend", "--json", url="http://127.0.0.1:9")
    assert alone.exit_code == 1
    assert "no gateway answers" in json.loads(alone.stdout)["live"][0]["said"]


def exported(provider: str, folder: Path, maker: str) -> list[str]:
    """The simulated provider's own books, as this maker exports costs and usage, at the gateway's prices."""
    files = []
    for kind in ("costs", "usage"):
        query = {"format": f"{maker}_{kind}", "input": "1", "output": "2"}
        control = provider.removesuffix("/v1") + "/_control/export"
        page = httpx.get(control, params=query, timeout=PATIENCE_S, trust_env=False)
        (folder / f"{maker}-{kind}").write_bytes(page.raise_for_status().content)
        files.append(str(folder / f"{maker}-{kind}"))
    return files


def test_the_ledger_is_reconciled_with_the_provider_s_own_books(
    tollbridge: Any, gateway: Process, books: str, tmp_path: Path
) -> None:
    today = datetime.now(UTC).date()
    # A call around midnight may be of one day here and of the next one there.
    days = ("--by", "range", "--from", str(today - timedelta(days=1)), "--to", str(today + timedelta(days=1)))
    exact = ("--tolerance", "usd=0", "--tolerance", "percent=0", "--json")

    def until(told_so: Callable[[dict[str, Any]], bool], maker: str = "openai", *, files: int = 2) -> dict[str, Any]:
        """What the comparison tells once it is so: a side may hear of the end of a call before the other."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            given = exported(books, tmp_path, maker)[:files]
            done = tollbridge("usage", "reconcile", *given, "--provider", "books", *days, *exact)
            assert done.exit_code in {0, 1}, done.output
            told: dict[str, Any] = json.loads(done.stdout)
            if told_so(told):
                assert done.exit_code == (0 if told["agrees"] else 1)
                return told
            assert time.monotonic() < deadline, told
            time.sleep(0.1)

    def call(url: str, **fields: Any) -> None:
        body = {"model": "sim-books", "messages": [{"role": "user", "content": "Books"}], "max_tokens": 50, **fields}
        headers = {"authorization": f"Bearer {KEY}"}
        done = httpx.post(f"{url}/chat/completions", json=body, headers=headers, timeout=PATIENCE_S, trust_env=False)
        done.raise_for_status()

    def spoil(**faults: Any) -> None:
        control = books.removesuffix("/v1") + "/_control/faults"
        httpx.post(control, json=faults, timeout=PATIENCE_S, trust_env=False).raise_for_status()

    call(f"{gateway.rest}/v1")
    for maker in ("openai", "anthropic"):
        told = until(lambda told: told["agrees"] and told["sum"]["attempts"] == 1, maker)
        assert Decimal(told["sum"]["charged_usd"]) > 0
        assert told["sum"]["input_tokens"] == told["sum"]["theirs_input_tokens"] > 0

    # The provider has written all of it, and the gateway cannot know: its cost is unknown here, and billed there.
    spoil(terminal="none")
    with contextlib.suppress(httpx.RemoteProtocolError):
        call(f"{gateway.rest}/v1", stream=True)
    spoil()
    told = until(lambda told: bool(told["rows"]) and told["rows"][0]["unknown_fit"], files=1)
    [row] = told["rows"]
    [attempt] = row["unknown"]
    assert attempt["command"] == f"tollbridge usage resolve {attempt['ticket_id']} --charged {row['difference_usd']}"
    resolved = tollbridge(*attempt["command"].split()[1:], "--evidence", "the provider's export")
    assert resolved.exit_code == 0, resolved.output
    until(lambda told: told["agrees"], files=1)

    # What did not come by the gateway is a difference.
    call(books)
    told = until(lambda told: bool(told["rows"]) and not told["rows"][0]["unknown_fit"], files=1)
    [row] = told["rows"]
    assert row["model"] == "sim-books"
    assert Decimal(row["difference_usd"]) > 0
    assert "do not agree" in told["verdict"]
