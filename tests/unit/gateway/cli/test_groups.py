"""What `tollbridge groups` shows of an answer, whole and of an older gateway."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from gateway.cli import groups, main, remote

SLOT: dict[str, Any] = {
    "ticket_id": "t", "state": "quarantined", "class": "interactive", "model": "gpt-4o", "credential": "OPENAI_API_KEY",
    "attempt": 2, "debit_id": "order-17", "key_id": "01a2", "owner": "o", "host": "node-3", "pid": 41,
    "since": "2026-11-30T14:00:00.25+00:00", "hard_deadline": "2026-11-30T14:02:00+00:00",
    "quarantined_until": "2026-11-30T14:02:30+00:00", "quarantined_s": 40.52,
}  # fmt: skip
GROUP: dict[str, Any] = {
    "group": "https://api.openai.com:443",
    "endpoints": [{"endpoint": "https://api.openai.com:443", "provider": "openai"}],
    "concurrency": 8, "quarantine_headroom": 0,
    "queue_bound": 32, "breaker": "open", "generation": 3, "cooldown_s": 9.2, "ramp": None, "active": 1,
    "quarantined": 2, "queued": 5, "expected_wait_s": 12.04,
    "openings": 7, "opened_for": "probe_lost", "open_since": "2026-11-30T13:58:31.5+00:00",
    "queued_by_class": {"interactive": 3, "batch": 2},
    "quarantine": {"slots": 2, "held_back": 2, "share": 0.25, "frees_in_s": [12.0, 40.52]},
    "floors": [{"credential": "OPENAI_API_KEY", "providers": ["openai"], "model": None, "cause": "rate_limited",
                "remaining_s": 1.96, "until": "2026-11-30T14:00:02+00:00"}],
    "allowances": [],
    "slots": [SLOT],
    "waiting": [
        {"position": 1, "class": "batch", "model": "gpt-4o", "reason": "model_capacity",
         "since": "2026-11-30T14:00:09+00:00", "debit_id": "order-18", "expected_wait_s": 4.0},
    ],
}  # fmt: skip
#: As it was before waiting explained itself.
OLD = {
    name: GROUP[name]
    for name in ("group", "concurrency", "queue_bound", "breaker", "cooldown_s", "active", "quarantined", "queued")
}


@pytest.fixture
def answer(monkeypatch):
    """What the gateway says, and what it was told."""
    told: list[tuple[str, bytes]] = []
    said: dict[str, Any] = {"groups": [GROUP]}

    def post(_self: remote.Remote, path: str, content: bytes = b"") -> Any:
        told.append((path, content))
        return {"group": "https://api.openai.com:443", "reset": True}

    monkeypatch.setattr(remote.Remote, "get", lambda _self, _path: said)
    monkeypatch.setattr(remote.Remote, "post", post)
    return said, told


def shown(*arguments: str) -> str:
    done = CliRunner().invoke(main, ["groups", *arguments], env={"TZ": "UTC"})
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_group_is_one_line_with_what_quarantine_costs_and_who_waits(answer):
    text = shown()
    for part in ("https://api.openai.com:443", "25 %: 12 s, 40.5 s", "3 + 2", "12 s", "open for 9.2 s more"):
        assert part in text
    assert "2 s" in text
    assert "14:00:02" in text
    assert "order-17" not in text


def test_a_breaker_that_has_opened_says_how_often_why_and_since_when(answer):
    text = shown()
    for part in ("7", "a probe that was lost", "13:58:31"):
        assert part in text
    said, _ = answer
    said["groups"] = [{**GROUP, "openings": 0, "opened_for": None, "open_since": None}]
    assert "have opened" not in shown()


def test_slots_say_who_holds_them_and_until_when_and_who_waits_why(answer):
    text = shown("--slots")
    for part in ("order-17", "01a2", "node-3:41", "quarantined", "gpt-4o", "14:00:00", "14:02:30"):
        assert part in text
    for part in ("order-18", "model_capacity", "batch", "14:00:09", "4 s"):
        assert part in text


def test_json_is_the_answer_as_it_came(answer):
    assert msgspec.json.decode(shown("--json")) == {"groups": [GROUP]}


def test_what_is_not_told_is_shown_as_unknown_and_not_as_none(answer):
    said, _ = answer
    said["groups"] = [{**OLD, "slots": [{name: SLOT[name] for name in SLOT if name not in ("class", "key_id")}]}]
    lines = [line for line in shown("--slots").splitlines() if "https://" in line]
    assert [line.split().count("-") for line in lines] == [3, 2]


def test_many_slots_in_quarantine_are_told_by_the_first_and_the_last():
    cost = {"slots": 9, "held_back": 9, "share": 1.0, "frees_in_s": [float(second) for second in range(1, 10)]}
    assert groups.quarantine({"quarantine": cost}) == "100 %: 1 s, 2 s, 3 s, the last 9 s"


def test_none_in_quarantine_costs_nothing():
    cost = {"slots": 0, "held_back": 0, "share": 0.0, "frees_in_s": []}
    assert groups.quarantine({"quarantine": cost}) is None


def test_a_terminal_of_eighty_columns_shows_every_number():
    out = Console(file=io.StringIO(), width=80)
    groups.show(out, [GROUP])
    assert isinstance(out.file, io.StringIO)
    text = "".join(out.file.getvalue().split())
    for part in ("32", "9.2", "25%"):
        assert part in text


def test_reset_names_the_group_that_was_reset(answer):
    _, told = answer
    assert "https://api.openai.com:443 is reset" in shown("reset", "https://api.openai.com")
    assert told == [("/v1/groups/reset", b'{"group":"https://api.openai.com"}')]


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        ("rate_limited", "limits the rate"),
        ("credential_rejected", "rejected OPENAI_API_KEY"),
        ("quota_exhausted", "quota of OPENAI_API_KEY"),
        ("provider_unavailable", "gateway.provider_left_out"),
        ("a later version's", "a later version's"),
    ],
)
def test_what_is_held_back_says_whose_it_is_and_why(answer, cause, said):
    said_by_gateway, _ = answer
    said_by_gateway["groups"] = [{**GROUP, "floors": [{**GROUP["floors"][0], "cause": cause}]}]
    text = shown()
    assert said in text
    assert "openai" in text
    assert "as the provider asked" not in text
