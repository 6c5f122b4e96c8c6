from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from click.testing import CliRunner

from gateway.cli import COMMANDS, main

#: What a server needs and a help text does not.
HEAVY = {"aiohttp", "asyncpg", "grpc", "httpx", "rich", "pydantic", "genai_prices", "structlog", "yaml"}


def imported_by(*arguments: str) -> set[str]:
    script = (
        "import sys\n"
        "from gateway.cli import main\n"
        "try:\n"
        f"    main({list(arguments)!r})\n"
        "finally:\n"
        "    print('modules:', *sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("modules:")[2].split())


@pytest.mark.parametrize("arguments", [("--help",), ("--version",)], ids=["help", "version"])
def test_help_does_not_wait_for_a_server_s_imports(arguments):
    assert imported_by(*arguments) & HEAVY == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_with_an_example(name):
    told = CliRunner().invoke(main, [name, "--help"])
    assert told.exit_code == 0, told.output
    assert f"tollbridge {name}" in told.output.partition("Options:")[0].partition("\n")[2]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_found_in_any_thread_and_signals_stay_as_they_were(name):
    before = signal.getsignal(signal.SIGINT)
    with ThreadPoolExecutor(1) as threads:
        told = threads.submit(CliRunner().invoke, main, [name, "--help"]).result()
    assert told.exit_code == 0, told.exception
    assert CliRunner().invoke(main, [name, "--help"]).exit_code == 0
    assert signal.getsignal(signal.SIGINT) is before


def test_the_list_of_commands_is_the_commands_there_are():
    told = CliRunner().invoke(main, ["--help"]).output
    for name, (_, line) in COMMANDS.items():
        assert name in told
        assert line.split()[0] in told


def test_a_command_that_does_not_exist_is_wrong_usage_and_is_told_what_does():
    told = CliRunner().invoke(main, ["frob"])
    assert told.exit_code == 2
    assert "serve" in told.stderr


@pytest.mark.parametrize(("limit", "named"), [("budget_day_usd=x", "budget_day_usd"), ("concurrency=x", "concurrency")])
def test_a_limit_that_is_none_is_named(limit: str, named: str) -> None:
    refused = CliRunner().invoke(main, ["keys", "create", "a", "--limit", limit])
    assert refused.exit_code == 2
    assert f"{named}: " in refused.stderr
