from __future__ import annotations

import json

import pytest

from adapters.simulator import requests, tokens


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("Hello world", ["Hello", " world"]),
        ("Don't.", ["Don", "'", "t", "."]),
        ("a\n\n b  ", ["a", "\n\n b", "  "]),
        ("naïve 東京 🗼", ["naïve", " 東京", " 🗼"]),
        ("x\u2028y\u0085z", ["x", "\u2028y", "\u0085z"]),
        ('{"a_1":2}', ["{", '"', "a_1", '"', ":", "2", "}"]),
    ],
)
def test_a_token_is_a_word_or_one_sign_with_the_space_before_it(text: str, expected: list[str]) -> None:
    assert tokens.split(text) == expected
    assert tokens.count(text) == len(expected)


@pytest.mark.parametrize("text", ["👩\u200d👩\u200d👧 e\u0301 \t\r\n", "\ud83d broken", "a" * 10_000, " \x00 \x1c."])
def test_the_tokens_of_a_text_are_the_text(text: str) -> None:
    assert "".join(tokens.split(text)) == text


def test_a_cut_at_a_token_is_counted_as_so_many_tokens() -> None:
    pieces = tokens.split("One, two - three.\n\n4. five 🗼 six's")
    assert [tokens.count("".join(pieces[:cut])) for cut in range(len(pieces))] == list(range(len(pieces)))


def test_a_prompt_costs_what_the_rule_says() -> None:
    body = {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "name": "ann", "content": [{"type": "text", "text": "Look:"}, {"type": "image_url"}]},
            {
                "role": "assistant",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "a cat"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "look",
                    "description": "looks at",
                    "parameters": {"properties": {"a": {}, "b": {}}},
                },
            }
        ],
    }
    request, _ = requests.parse(json.dumps(body).encode())
    system, user, assistant, tool = 3 + 1 + 3, 3 + 1 + 2 + 85 + 1, 3 + 1 + 0 + 1 + 2, 3 + 1 + 2
    tools = 3 + 1 + 2 + 2
    assert tokens.prompt(request) == 3 + system + user + assistant + tool + tools
