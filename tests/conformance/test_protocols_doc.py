"""docs/protocols.md: its tables are what the code does, and each word of `omit` that the code reads is told there."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from adapters.contract import WireProtocol
from adapters.protocols import PROTOCOLS
from tests.fakes.capabilities import answers_table, requests_table

_ROOT = Path(__file__).parents[2]
_DOC = _ROOT / "docs/protocols.md"


@pytest.mark.parametrize(("name", "table"), [("requests", requests_table), ("answers", answers_table)])
def test_the_tables_are_what_the_protocols_do(name: str, table: Callable[[Mapping[str, WireProtocol]], str]) -> None:
    text = _DOC.read_text()
    before, mark, rest = text.partition(f"<!-- {name} -->\n")
    told, _, after = rest.partition("<!-- end -->")
    assert mark
    made = table(PROTOCOLS)
    if os.environ.get("TOLLBRIDGE_UPDATE_DOCS"):
        _DOC.write_text(f"{before}{mark}\n{made}\n\n<!-- end -->{after}")
    else:
        assert told.strip() == made


def _words_of_omit() -> Iterator[str]:
    """
    Of the adapters: what is looked for in an endpoint's `omit` by name, and the words for what stands inside messages
    and tools, by whatever way they reach it.
    """
    for path in (_ROOT / "adapters").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if re.fullmatch(r"(messages|tools)\.[a-z_]+", node.value):
                    yield node.value
            elif (
                isinstance(node, ast.Compare)
                and isinstance(node.left, ast.Constant)
                and isinstance(node.comparators[0], ast.Attribute)
                and node.comparators[0].attr == "omit"
            ):
                yield str(node.left.value)
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "omits"
                and isinstance(node.args[0], ast.Constant)
            ):
                yield str(node.args[0].value)


def test_each_word_of_omit_has_its_meaning_in_the_table_and_there_is_no_other() -> None:
    section = _DOC.read_text().partition("\n## `omit`\n")[2].partition("\n## ")[0]
    words = set(_words_of_omit())
    assert {"messages.cache", "tools.strict", "stream_options"} <= words
    assert set(re.findall(r"^\| `([\w.]+)` \| \S", section, re.MULTILINE)) == words


def test_each_protocol_has_its_proof_and_its_reasoning_told() -> None:
    text = _DOC.read_text()
    for heading in ("When an answer is complete", "Reasoning and its signatures"):
        section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == PROTOCOLS.keys()
