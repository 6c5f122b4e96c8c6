"""A caller's JSON body: what means two things is refused, wherever it stands."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from adapters.body import read_fields
from adapters.errors import MalformedRequest


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (rb'{"model": "a", "model": "b"}', "model"),
        (rb'{"a": {"b": [{"c": 1}, {"c": 1, "d": 2, "c": 3}]}}', "a.b[1].c"),
        (rb'{"a": [[{"b" : 1, "b" : 1}]]}', "a[0][0].b"),
        (rb'{"a\\": 1, "a\\": 2}', "a\\"),
        (rb'{"a": {"b": 1}, "a": {"b": 1}}', "a"),
        (rb'{"a": "\":", "b": {"": 1, "": 1}}', "b."),
        (b'{"a"\n\t:1,"a"\r:1}', "a"),
        (rb'{"a": 1, "a": "\u003a"}', "a"),
        (rb'{"a": {"b": "\u003A", "b\u003a": 1, "b": 2}}', "a.b"),
        (b'{"a": ' + b"1" * 4000 + b', "a": 1}', "a"),
    ],
)
def test_a_member_that_is_there_twice_is_refused_with_its_path(body: bytes, path: str):
    with pytest.raises(MalformedRequest) as caught:
        read_fields(body)
    assert (caught.value.path, caught.value.reason) == (path, "is given twice")


STRINGS = ["a:b", ":x", " : ", "\\", '"', '\\":', '" :', 'a"', "\u00e9", "{", '{"a": 1, "a": 2}', "\\\\"]
NAMES = ["a", "b", 'c"', "d\\", ":", '":', "\\", "", " "]


def document(rng: random.Random, depth: int = 0) -> str:
    """Any JSON, with few names and odd spaces."""
    kind = rng.random()
    if depth and (depth > 3 or kind < 0.3):
        value = json.dumps(rng.choice([*STRINGS, 1, -1.5, None, True]), ensure_ascii=rng.random() < 0.5)
        return value.replace(":", "\\u003a") if rng.random() < 0.1 else value
    inner = [document(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    if depth and kind < 0.5:
        return "[" + ", ".join(inner) + "]"
    spaces = [rng.choice(["", "", " ", "\n", "\t "]) for _ in range(2)]
    return "{" + ",".join(f"{json.dumps(rng.choice(NAMES))}{spaces[0]}:{spaces[1]}{one}" for one in inner) + "}"


def has_one_twice(text: str) -> bool:
    found = False

    def pairs(members: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal found
        found = found or len({name for name, _ in members}) < len(members)
        return dict(members)

    json.loads(text, object_pairs_hook=pairs)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_exactly_the_documents_in_which_a_member_is_there_twice_are_refused_for_it(seed: int):
    rng = random.Random(seed)
    refused = 0
    for _ in range(3000):
        text = document(rng)
        if has_one_twice(text):
            refused += 1
            with pytest.raises(MalformedRequest, match="twice"):
                read_fields(text.encode())
        else:
            read_fields(text.encode())
    assert 300 < refused < 2700
