"""
The steps of docs/protocols.md, followed word for word in a copy of the tree: from the template to an answer.

What the page shows is what is run here, so a step that no longer works fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from adapters.protocols import PROTOCOLS
from adapters.skeleton import Skeleton
from tests.fakes.raw_provider import Exchange, raw_provider

_ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)

#: What the page leaves to the reader of `ask`.
_AROUND = """
import asyncio, json, os, sys
from pathlib import Path
import msgspec
import adapters.protocols.acme
from adapters.chat import ChatRequest, Message, Role, Text
from adapters.client import Upstream
from adapters.contract import UpstreamCall
from gateway import config
{ask}
endpoint = config.load(Path(sys.argv[1]), dict(os.environ)).providers["acme"].endpoint
streamed, whole = asyncio.run(ask(endpoint))
told = [type(event).__name__ for event in streamed], "".join(getattr(event, "text", "") for event in streamed)
print(json.dumps([adapters.protocols.acme.__file__, *told, whole.choices[0].text, whole.usage.output_total]))
"""


def _blocks() -> list[tuple[str, str]]:
    section = (_ROOT / "docs/protocols.md").read_text().partition("\n## Another protocol\n")[2]
    return [
        (kind, "\n".join(line.removeprefix(indent) for line in text.splitlines()) + "\n")
        for indent, kind, text in _BLOCK.findall(section)
    ]


def _patched(text: str, diff: str) -> str:
    """What is added stands behind a line that the file must have, or in the place of one."""
    lines, at = text.splitlines(), 0
    for line in diff.splitlines():
        mark, content = line[0], line[1:]
        if mark == "+":
            lines.insert(at, content)
            at += 1
        elif mark == "-":
            at = lines.index(content)
            del lines[at]
        else:
            at = lines.index(content) + 1
    return "\n".join(lines) + "\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("adapters", "admission", "gateway", "metering", "protos", "tests/fakes", "tests/conformance"):
        shutil.copytree(_ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(_ROOT / "pyproject.toml", tmp_path)
    for file in (_ROOT / "tests").glob("*.py"):
        shutil.copy(file, tmp_path / "tests")
    return tmp_path


async def _run(tree: Path, *command: str, **env: str) -> bytes:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=tree,
        env={**os.environ, "PATH": path, "PYTHONDONTWRITEBYTECODE": "1", **env},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    told, _ = await process.communicate()
    assert process.returncode == 0, told.decode()
    return told


async def test_the_steps_of_the_page_lead_from_the_template_to_an_answer(tree: Path) -> None:
    copy, diff, toml, ask, write_cases = _blocks()
    assert [kind for kind, _ in (copy, diff, toml, ask, write_cases)] == ["sh", "diff", "toml", "python", "sh"]
    await _run(tree, "sh", "-ec", copy[1])
    registry = tree / "adapters/protocols/__init__.py"
    registry.write_text(_patched(registry.read_text(), diff[1]))
    (tree / "tollbridge.toml").write_text(toml[1])
    (tree / "ask.py").write_text(_AROUND.format(ask=ask[1]))

    async def answer(exchange: Exchange) -> None:
        asked = json.loads(exchange.body)
        assert (asked["model"], asked["say"]) == ("acme-1", [{"who": "user", "text": "Hi"}])
        if not asked.get("stream"):
            await exchange.answer(b'{"id":"a1","model":"acme-1","text":"Hello","end":"done","used":{"in":1,"out":2}}')
            return
        await exchange.begin()
        for event in ({"text": "Hel"}, {"text": "lo"}, {"used": {"in": 1, "out": 2}}, {"id": "a1", "end": "done"}):
            await exchange.chunk(b"data: %b\n\n" % json.dumps(event).encode())
        await exchange.end()

    async with raw_provider(answer) as provider:
        told = await _run(
            tree,
            sys.executable,
            "ask.py",
            "tollbridge.toml",
            ACME_BASE_URL=f"http://127.0.0.1:{provider.port}/api",
            ACME_API_KEY="the-key",
        )
    path, kinds, streamed, whole, output = json.loads(told)
    assert path == str(tree / "adapters/protocols/acme.py")
    assert kinds == ["TextDelta", "TextDelta", "UsageReport", "Finished"]
    assert (streamed, whole, output) == ("Hello", "Hello", 2)
    heads = [request.head.decode() for request in provider.requests]
    assert all(head.startswith("POST /api/talk ") and "Bearer the-key" in head for head in heads)

    cases = tree / "tests/wire/acme"
    cases.mkdir(parents=True)
    for case in (_ROOT / "tests/wire/skeleton").glob("*.sse"):
        shutil.copy(case, cases / case.name)
        (cases / f"{case.stem}.json").write_text('{"endpoint": {}}\n')
    await _run(tree, "sh", "-ec", write_cases[1])
    written: dict[str, Any] = {path.name: json.loads(path.read_text()) for path in cases.glob("*.json")}
    expected = {path.name: json.loads(path.read_text()) for path in (_ROOT / "tests/wire/skeleton").glob("*.json")}
    assert written == expected


def test_the_template_is_not_shipped_as_a_protocol() -> None:
    assert Skeleton.name not in PROTOCOLS
