"""
One conversation in the words of every protocol, as a caller of that protocol would send it.

`BODIES[kind][protocol]`; a kind that a protocol has no words for is not there. Every body of one kind means the same,
so whatever provider it is sent to must be asked the same.
"""

from __future__ import annotations

import base64
from typing import Any

PICTURE = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(range(48))).decode()
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
SYSTEM = "Be brief and kind."
FIRST = "How do I plan a database migration?"
SAID = "Begin with a copy of the data."
SECOND = "And what about the “rollback”? — naïve questions, 東京 too."
ASKED = "What is the weather in Paris?"
CALLED = '{"city":"Paris"}'
RESULT = "12 degrees and sunny"
TRIP = "Plan a trip to Lisbon for 3 days."
LIMIT = 4000

#: Where the model is part of the path, the body has none.
_M: dict[str, Any] = {"model": "m"}
_TOOL = {"name": "get_weather", "description": "The weather of a city."}


def _gemini(*contents: tuple[str, list[Any]], **fields: Any) -> dict[str, Any]:
    config = {"maxOutputTokens": LIMIT, **fields.pop("generationConfig", {})}
    return {
        "contents": [{"role": role, "parts": parts} for role, parts in contents],
        "generationConfig": config,
        **fields,
    }


_TEXT: dict[str, dict[str, Any]] = {
    "chat_completions": _M
    | {
        "max_completion_tokens": LIMIT,
        "temperature": 0.5,
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": FIRST},
            {"role": "assistant", "content": SAID},
            {"role": "user", "content": SECOND},
        ],
    },
    "responses": _M
    | {
        "max_output_tokens": LIMIT,
        "temperature": 0.5,
        "instructions": SYSTEM,
        "input": [
            {"role": "user", "content": FIRST},
            {"role": "assistant", "content": SAID},
            {"role": "user", "content": [{"type": "input_text", "text": SECOND}]},
        ],
    },
    "anthropic_messages": _M
    | {
        "max_tokens": LIMIT,
        "temperature": 0.5,
        "system": [{"type": "text", "text": SYSTEM}],
        "messages": [
            {"role": "user", "content": FIRST},
            {"role": "assistant", "content": [{"type": "text", "text": SAID}]},
            {"role": "user", "content": SECOND},
        ],
    },
    "gemini": _gemini(
        ("user", [{"text": FIRST}]),
        ("model", [{"text": SAID}]),
        ("user", [{"text": SECOND}]),
        systemInstruction={"parts": [{"text": SYSTEM}]},
        generationConfig={"temperature": 0.5},
    ),
    "workers_ai": {
        "max_tokens": LIMIT,
        "temperature": 0.5,
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": FIRST},
            {"role": "assistant", "content": SAID},
            {"role": "user", "content": SECOND},
        ],
    },
}

_FORCED: dict[str, dict[str, Any]] = {
    "chat_completions": _M
    | {
        "max_completion_tokens": LIMIT,
        "messages": [{"role": "user", "content": ASKED}],
        "tools": [{"type": "function", "function": {**_TOOL, "parameters": WEATHER}}],
        "tool_choice": "required",
    },
    "responses": _M
    | {
        "max_output_tokens": LIMIT,
        "input": ASKED,
        "tools": [{"type": "function", **_TOOL, "parameters": WEATHER}],
        "tool_choice": "required",
    },
    "anthropic_messages": _M
    | {
        "max_tokens": LIMIT,
        "messages": [{"role": "user", "content": ASKED}],
        "tools": [{**_TOOL, "input_schema": WEATHER}],
        "tool_choice": {"type": "any"},
    },
    "gemini": _gemini(
        ("user", [{"text": ASKED}]),
        tools=[{"functionDeclarations": [{**_TOOL, "parametersJsonSchema": WEATHER}]}],
        toolConfig={"functionCallingConfig": {"mode": "ANY"}},
    ),
    "workers_ai": {
        "max_tokens": LIMIT,
        "messages": [{"role": "user", "content": ASKED}],
        "tools": [{"type": "function", "function": {**_TOOL, "parameters": WEATHER}}],
        "tool_choice": "required",
    },
}

_ANSWERED: dict[str, dict[str, Any]] = {
    "chat_completions": _M
    | {
        "max_completion_tokens": LIMIT,
        "messages": [
            {"role": "user", "content": ASKED},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": CALLED}}
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": RESULT},
        ],
        "tools": [{"type": "function", "function": {**_TOOL, "parameters": WEATHER}}],
    },
    "responses": _M
    | {
        "max_output_tokens": LIMIT,
        "input": [
            {"role": "user", "content": ASKED},
            {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": CALLED},
            {"type": "function_call_output", "call_id": "call_1", "output": RESULT},
        ],
        "tools": [{"type": "function", **_TOOL, "parameters": WEATHER}],
    },
    "anthropic_messages": _M
    | {
        "max_tokens": LIMIT,
        "messages": [
            {"role": "user", "content": ASKED},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Paris"}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": RESULT}]},
        ],
        "tools": [{**_TOOL, "input_schema": WEATHER}],
    },
    "gemini": _gemini(
        ("user", [{"text": ASKED}]),
        ("model", [{"functionCall": {"id": "call_1", "name": "get_weather", "args": {"city": "Paris"}}}]),
        (
            "user",
            [{"functionResponse": {"id": "call_1", "name": "get_weather", "response": {"output": RESULT}}}],
        ),
        tools=[{"functionDeclarations": [{**_TOOL, "parametersJsonSchema": WEATHER}]}],
    ),
}

_IMAGE: dict[str, dict[str, Any]] = {
    "chat_completions": _M
    | {
        "max_completion_tokens": LIMIT,
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": FIRST},
                    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}},
                ],
            }
        ],
    },
    "responses": _M
    | {
        "max_output_tokens": LIMIT,
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": FIRST},
                    {"type": "input_image", "image_url": f"data:image/png;base64,{PICTURE}"},
                ],
            }
        ],
    },
    "anthropic_messages": _M
    | {
        "max_tokens": LIMIT,
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": FIRST},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}},
                ],
            }
        ],
    },
    "gemini": _gemini(("user", [{"text": FIRST}, {"inlineData": {"mimeType": "image/png", "data": PICTURE}}])),
}

_STRUCTURED: dict[str, dict[str, Any]] = {
    "chat_completions": _M
    | {
        "max_completion_tokens": LIMIT,
        "messages": [{"role": "user", "content": TRIP}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}},
    },
    "responses": _M
    | {
        "max_output_tokens": LIMIT,
        "input": TRIP,
        "text": {"format": {"type": "json_schema", "name": "trip", "schema": SCHEMA, "strict": True}},
    },
    "anthropic_messages": _M
    | {
        "max_tokens": LIMIT,
        "messages": [{"role": "user", "content": TRIP}],
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
    "gemini": _gemini(
        ("user", [{"text": TRIP}]),
        generationConfig={"responseMimeType": "application/json", "responseJsonSchema": SCHEMA},
    ),
}

_THOUGHT: dict[str, dict[str, Any]] = {
    "chat_completions": _M
    | {
        "max_completion_tokens": LIMIT,
        "messages": [{"role": "user", "content": FIRST}],
        "reasoning_effort": "low",
    },
    "responses": _M | {"max_output_tokens": LIMIT, "input": FIRST, "reasoning": {"effort": "low"}},
    "anthropic_messages": _M
    | {
        "max_tokens": LIMIT,
        "messages": [{"role": "user", "content": FIRST}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    },
    "gemini": _gemini(
        ("user", [{"text": FIRST}]),
        generationConfig={"thinkingConfig": {"thinkingBudget": 1024, "includeThoughts": True}},
    ),
}

BODIES: dict[str, dict[str, dict[str, Any]]] = {
    "text": _TEXT,
    "tool_forced": _FORCED,
    "tool_answered": _ANSWERED,
    "image": _IMAGE,
    "json_schema": _STRUCTURED,
    "reasoning": _THOUGHT,
}
