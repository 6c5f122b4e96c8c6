"""The command line `llm`, its models configured as its users do: over Chat Completions and over Responses."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

from llm.cli import cli

from tests.clients.running import KEY, URL, main, scenario

HOME = Path(os.environ.get("CLIENTS_DATA", "."))
MODELS = ("chat", "claude", "responses")
QUESTION = "what is a bridge?"
WEATHER = """
def weather(place: str) -> str:
    'The weather of a place.'
    return f"sunny in {place}"
"""


def configure() -> None:
    models = [
        {
            "model_id": f"{name}{'-responses' if responses else ''}",
            "model_name": name,
            "api_base": f"{URL}/v1",
            "api_key_name": "tollbridge",
            "responses": responses,
            "supports_schema": True,
            "supports_tools": True,
        }
        for name in (*MODELS, "no-such-model", "cut", "unwell")
        for responses in (False, True)
    ]
    os.environ["LLM_USER_PATH"] = str(HOME)
    # JSON is YAML.
    (HOME / "extra-openai-models.yaml").write_text(json.dumps(models))
    (HOME / "keys.json").write_text(json.dumps({"tollbridge": KEY}))


def llm(*arguments: str, status: int = 0) -> str:
    """What the command prints: the answer, or with another status what is wrong. Here and not in a new process each."""
    code: str | int = 0
    printed, complaint = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(complaint):
        try:
            cli.main(arguments, prog_name="llm")
        except SystemExit as end:
            code = end.code or 0
    assert code == status, (arguments, code, complaint.getvalue())
    return complaint.getvalue() if status else printed.getvalue()


@scenario
def the_command_answers() -> None:
    command = [sys.executable, "-m", "tests.clients.loopback", "llm", "-m", "chat", QUESTION]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == llm("-m", "chat", QUESTION)


@scenario
def a_chat_is_answered_whole_and_streamed() -> None:
    for model in MODELS:
        whole = llm("-m", model, "--no-stream", QUESTION)
        assert len(whole) > 50, model
        assert llm("-m", model, QUESTION) == whole, model


@scenario
def responses_are_answered_whole_and_streamed() -> None:
    for model in MODELS:
        whole = llm("-m", f"{model}-responses", "--no-stream", QUESTION)
        assert len(whole) > 50, model
        assert llm("-m", f"{model}-responses", QUESTION) == whole, model


@scenario
def a_conversation_goes_on_and_its_usage_is_kept() -> None:
    for model in ("claude", "claude-responses"):
        llm("-m", model, "-s", "You are an engineer.", QUESTION)
        assert llm("-c", "and a river?")
        first, second = json.loads(llm("logs", "-n", "2", "--json"))
        assert first["conversation_id"] == second["conversation_id"], model
        assert first["output_tokens"] > 0, model
        assert second["output_tokens"] > 0, model


@scenario
def tools_are_called_and_their_results_taken_back() -> None:
    for model in (*MODELS, *(f"{model}-responses" for model in MODELS)):
        for stream in ((), ("--no-stream",)):
            said = llm("-m", model, *stream, "--functions", WEATHER, "what is the weather in Bern?")
            assert "sunny in" in said, (model, stream)


@scenario
def structured_output_is_what_was_asked_for() -> None:
    for model in (*MODELS, *(f"{model}-responses" for model in MODELS)):
        place = json.loads(llm("-m", model, "--schema", "name, inhabitants int", "what is Bern?"))
        assert set(place) == {"name", "inhabitants"}, model
        assert isinstance(place["inhabitants"], int), model


@scenario
def every_error_is_told() -> None:
    for kind in ("", "-responses"):
        for stream in ((), ("--no-stream",)):
            assert "404" in llm("-m", f"no-such-model{kind}", *stream, QUESTION, status=1)
            assert "401" in llm("-m", f"chat{kind}", *stream, "--key", "tb_nobody", QUESTION, status=1)
            assert "503" in llm("-m", f"unwell{kind}", *stream, QUESTION, status=1)
        assert llm("-m", f"cut{kind}", QUESTION, status=1)
    assert "logit_bias" in llm("-m", "claude", "-o", "logit_bias", '{"1712": -100}', QUESTION, status=1)


if __name__ == "__main__":
    configure()
    main("llm")
