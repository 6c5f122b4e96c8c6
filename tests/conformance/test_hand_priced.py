"""
What answers cost, worked out by hand: bytes of every protocol on one side, exact dollars on the other.

`by_hand` is the arithmetic as a person writes it: `1000 x 2.50` is a thousand tokens at 2.50 USD for a million,
`3 @ 0.01` is three pieces at a cent. It is added up here with fractions, without a line of the code under test, and
must be what stands in `usd` (or in `bound`), which was typed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from adapters.chat import Event, Finished, UsageReport, as_events
from adapters.contract import Endpoint
from adapters.protocols import PROTOCOLS
from metering.cost import Ceiling, Charge, Reason, State, cost, decimal_string, unknown
from metering.prices import configured_price
from metering.usage import NOTHING
from tests.fakes.answers import parsed

CHAT, RESPONSES, ANTHROPIC = "chat_completions", "responses", "anthropic_messages"
GEMINI, WORKERS = "gemini", "workers_ai"

PRICES: dict[str, dict[str, Any]] = {
    "plain": {"input": "2.50", "output": "10"},
    "free": {"input": "0", "output": "0"},
    "cached": {
        "input": "3",
        "output": "15",
        "cache_read": "0.30",
        "cache_write_5m": "3.75",
        "cache_write_1h": "6",
    },
    "thinking": {"input": "2", "output": "8", "reasoning": "12"},
    "long": {
        "input": "1.25",
        "output": "10",
        "cache_read": "0.125",
        "tiers": [{"above": 200_000, "input": "2.50", "output": "15", "cache_read": "0.25"}],
        "service_tiers": {"batch": {"factor": "0.5"}},
    },
    "steps": {
        "input": "1",
        "output": "2",
        "tiers": [{"above": 100, "input": "3", "output": "4"}, {"above": 200, "input": "5", "output": "6"}],
    },
    "media": {
        "input": "0.30",
        "output": "2.50",
        "cache_read": "0.03",
        "input_image": "0.50",
        "input_audio": "1",
        "cache_read_audio": "0.10",
        "output_image": "30",
        "output_audio": "8",
    },
    "fees": {
        "input": "2.50",
        "output": "10",
        "per_request": "0.005",
        "per_unit": {"web_search": "0.01", "file_search": "0.0025"},
    },
    "tiers": {
        "input": "4",
        "output": "16",
        "cache_read": "1",
        "service_tiers": {
            "flex": {"factor": "0.5"},
            "batch": {"factor": "0.5"},
            "priority": {"input": "8", "output": "32", "cache_read": "2"},
        },
    },
    # Half of the last decimal that is kept, for each token.
    "fine": {"input": "0.0000005", "output": "0"},
}


class Row(NamedTuple):
    name: str
    protocol: str
    price: str | None
    #: The provider's own words for what was used; None: it tells nothing.
    usage: dict[str, Any] | None
    by_hand: str
    usd: str | None
    #: Fields beside the usage, headers, and output items of a response.
    more: Mapping[str, Any] = MappingProxyType({})
    headers: Mapping[str, str] = MappingProxyType({})
    items: tuple[dict[str, Any], ...] = ()
    asked: str | None = None
    reason: Reason | None = None
    bound: str | None = None


def _chat(prompt: int, completion: int, **more: Any) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion, **more}


def _in(**details: int) -> dict[str, Any]:
    return {"prompt_tokens_details": details}


def _out(**details: int) -> dict[str, Any]:
    return {"completion_tokens_details": details}


def _of(into: int, out: int, **more: Any) -> dict[str, Any]:
    """Responses and Anthropic name the two alike."""
    return {"input_tokens": into, "output_tokens": out, **more}


def _gemini(prompt: int, candidates: int, **more: Any) -> dict[str, Any]:
    return {"promptTokenCount": prompt, "candidatesTokenCount": candidates, **more}


def _modes(**counts: int) -> list[dict[str, Any]]:
    return [{"modality": mode, "tokenCount": count} for mode, count in counts.items()]


def _item(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "id": f"i_{kind}", "status": "completed", **more}


_PLAIN = "1000 x 2.50 + 200 x 10"
_READ = "600 x 3 + 400 x 0.30 + 100 x 15"
_WRITTEN = "400 x 3 + 400 x 0.30 + 200 x 3.75 + 100 x 15"
_THOUGHT = "100 x 2 + 200 x 8 + 300 x 12"
_EDGE, _ABOVE = "200000 x 1.25 + 1000 x 10", "200001 x 2.50 + 1000 x 15"
_STANDARD, _FLEX, _PRIORITY = "1000 x 4 + 200 x 16", "1000 x 2 + 200 x 8", "1000 x 8 + 200 x 32"
_FEES = "1000 x 2.50 + 200 x 10 + 1 @ 0.005"
_SEARCH = _item("web_search_call", action={"type": "search", "query": "q"})

#: Each of them as a plain answer and as a stream.
ROWS = [
    Row("tokens", CHAT, "plain", _chat(1000, 200), _PLAIN, "0.0045"),
    Row("tokens", RESPONSES, "plain", _of(1000, 200), _PLAIN, "0.0045"),
    Row("tokens", ANTHROPIC, "plain", _of(1000, 200), _PLAIN, "0.0045"),
    Row("tokens", GEMINI, "plain", _gemini(1000, 200), _PLAIN, "0.0045"),
    Row("tokens", WORKERS, "plain", _chat(1000, 200), _PLAIN, "0.0045"),
    # ------------------------------------------------------------------ caches
    Row("cached", CHAT, "cached", _chat(1000, 100, **_in(cached_tokens=400)), _READ, "0.00342"),
    Row("cached, DeepSeek's word", CHAT, "cached", _chat(1000, 100, prompt_cache_hit_tokens=400), _READ, "0.00342"),
    Row("cached, Moonshot's word", CHAT, "cached", _chat(1000, 100, cached_tokens=400), _READ, "0.00342"),
    Row(
        "cache written",
        CHAT,
        "cached",
        _chat(1000, 100, **_in(cached_tokens=400, cache_write_tokens=200)),
        _WRITTEN,
        "0.00357",
    ),
    Row("cached", RESPONSES, "cached", _of(1000, 100, input_tokens_details={"cached_tokens": 400}), _READ, "0.00342"),
    Row(
        "cache written",
        RESPONSES,
        "cached",
        _of(1000, 100, input_tokens_details={"cached_tokens": 400, "cache_write_tokens": 200}),
        _WRITTEN,
        "0.00357",
    ),
    Row("cached", GEMINI, "cached", _gemini(1000, 100, cachedContentTokenCount=400), _READ, "0.00342"),
    Row("cached", WORKERS, "cached", _chat(1000, 100, **_in(cached_tokens=400)), _READ, "0.00342"),
    Row("cached", ANTHROPIC, "cached", _of(600, 100, cache_read_input_tokens=400), _READ, "0.00342"),
    Row(
        "written for 5 minutes",
        ANTHROPIC,
        "cached",
        _of(500, 100, cache_creation_input_tokens=300, cache_read_input_tokens=200),
        "500 x 3 + 300 x 3.75 + 200 x 0.30 + 100 x 15",
        "0.004185",
    ),
    Row(
        "written for both",
        ANTHROPIC,
        "cached",
        _of(
            500,
            100,
            cache_creation_input_tokens=300,
            cache_read_input_tokens=200,
            cache_creation={"ephemeral_5m_input_tokens": 200, "ephemeral_1h_input_tokens": 100},
        ),
        "500 x 3 + 200 x 3.75 + 100 x 6 + 200 x 0.30 + 100 x 15",
        "0.00441",
    ),
    Row(
        "written for an hour",
        ANTHROPIC,
        "cached",
        _of(
            500,
            100,
            cache_creation_input_tokens=300,
            cache_read_input_tokens=200,
            cache_creation={"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 300},
        ),
        "500 x 3 + 300 x 6 + 200 x 0.30 + 100 x 15",
        "0.00486",
    ),
    # --------------------------------------------------------------- reasoning
    Row("thought", CHAT, "thinking", _chat(100, 500, **_out(reasoning_tokens=300)), _THOUGHT, "0.0054"),
    Row(
        "thought",
        RESPONSES,
        "thinking",
        _of(100, 500, output_tokens_details={"reasoning_tokens": 300}),
        _THOUGHT,
        "0.0054",
    ),
    Row(
        "thought",
        ANTHROPIC,
        "thinking",
        _of(100, 500, output_tokens_details={"thinking_tokens": 300}),
        _THOUGHT,
        "0.0054",
    ),
    Row(
        "thought, beside the answer", GEMINI, "thinking", _gemini(100, 200, thoughtsTokenCount=300), _THOUGHT, "0.0054"
    ),
    Row("thought", WORKERS, "thinking", _chat(100, 500, **_out(reasoning_tokens=300)), _THOUGHT, "0.0054"),
    Row(
        "thoughts without a price",
        CHAT,
        "plain",
        _chat(100, 500, **_out(reasoning_tokens=300)),
        "100 x 2.50 + 500 x 10",
        "0.00525",
    ),
    # -------------------------------------------------- tiers above a context size
    Row("at the edge", CHAT, "long", _chat(200_000, 1000), _EDGE, "0.26"),
    Row("one above", CHAT, "long", _chat(200_001, 1000), _ABOVE, "0.5150025"),
    Row("at the edge", RESPONSES, "long", _of(200_000, 1000), _EDGE, "0.26"),
    Row("one above", RESPONSES, "long", _of(200_001, 1000), _ABOVE, "0.5150025"),
    Row(
        "at the edge, half of it cached",
        ANTHROPIC,
        "long",
        _of(100_000, 1000, cache_read_input_tokens=100_000),
        "100000 x 1.25 + 100000 x 0.125 + 1000 x 10",
        "0.1475",
    ),
    Row(
        "one above, half of it cached",
        ANTHROPIC,
        "long",
        _of(100_001, 1000, cache_read_input_tokens=100_000),
        "100001 x 2.50 + 100000 x 0.25 + 1000 x 15",
        "0.2900025",
    ),
    Row("at the edge with a tool's", GEMINI, "long", _gemini(199_999, 1000, toolUsePromptTokenCount=1), _EDGE, "0.26"),
    Row(
        "one above by a tool's", GEMINI, "long", _gemini(199_999, 1000, toolUsePromptTokenCount=2), _ABOVE, "0.5150025"
    ),
    Row("one above", WORKERS, "long", _chat(200_001, 1000), _ABOVE, "0.5150025"),
    Row("first step", CHAT, "steps", _chat(100, 10), "100 x 1 + 10 x 2", "0.00012"),
    Row("second step begins", CHAT, "steps", _chat(101, 10), "101 x 3 + 10 x 4", "0.000343"),
    Row("second step ends", CHAT, "steps", _chat(200, 10), "200 x 3 + 10 x 4", "0.00064"),
    Row("third step", CHAT, "steps", _chat(201, 10), "201 x 5 + 10 x 6", "0.001065"),
    # --------------------------------------------------------- images, sound, video
    Row(
        "heard",
        CHAT,
        "media",
        _chat(1000, 100, **_in(audio_tokens=400)),
        "600 x 0.30 + 400 x 1 + 100 x 2.50",
        "0.00083",
    ),
    Row(
        "spoken",
        CHAT,
        "media",
        _chat(100, 300, **_out(audio_tokens=200)),
        "100 x 0.30 + 100 x 2.50 + 200 x 8",
        "0.00188",
    ),
    Row(
        "seen",
        CHAT,
        "media",
        _chat(1000, 100, **_in(image_tokens=500)),
        "500 x 0.30 + 500 x 0.50 + 100 x 2.50",
        "0.00065",
    ),
    Row(
        "more heard than sent",
        CHAT,
        "media",
        _chat(1000, 100, **_in(audio_tokens=1500)),
        "1000 x 1 + 100 x 2.50",
        "0.00125",
    ),
    Row(
        "seen",
        RESPONSES,
        "media",
        _of(1000, 100, input_tokens_details={"image_tokens": 500, "text_tokens": 500}),
        "500 x 0.30 + 500 x 0.50 + 100 x 2.50",
        "0.00065",
    ),
    Row(
        "heard and seen",
        GEMINI,
        "media",
        _gemini(1000, 100, promptTokensDetails=_modes(TEXT=500, AUDIO=300, IMAGE=200)),
        "500 x 0.30 + 300 x 1 + 200 x 0.50 + 100 x 2.50",
        "0.0008",
    ),
    Row(
        "heard from the cache",
        GEMINI,
        "media",
        _gemini(
            1000,
            100,
            cachedContentTokenCount=400,
            promptTokensDetails=_modes(TEXT=500, AUDIO=500),
            cacheTokensDetails=_modes(TEXT=100, AUDIO=300),
        ),
        "400 x 0.30 + 200 x 1 + 100 x 0.03 + 300 x 0.10 + 100 x 2.50",
        "0.000603",
    ),
    Row(
        "cached, and not told of what kind",
        GEMINI,
        "media",
        _gemini(1000, 100, cachedContentTokenCount=400, promptTokensDetails=_modes(TEXT=500, AUDIO=500)),
        "100 x 0.30 + 500 x 1 + 400 x 0.03 + 100 x 2.50",
        "0.000792",
    ),
    Row(
        "drawn",
        GEMINI,
        "media",
        _gemini(100, 1400, candidatesTokensDetails=_modes(TEXT=110, IMAGE=1290)),
        "100 x 0.30 + 110 x 2.50 + 1290 x 30",
        "0.039005",
    ),
    Row(
        "video without a price",
        GEMINI,
        "media",
        _gemini(1000, 100, promptTokensDetails=_modes(TEXT=500, VIDEO=500)),
        "1000 x 0.30 + 100 x 2.50",
        "0.00055",
    ),
    # ------------------------------------------------------------- fees and pieces
    Row("a fee", CHAT, "fees", _chat(1000, 200), _FEES, "0.0095"),
    Row("a fee", WORKERS, "fees", _chat(1000, 200), _FEES, "0.0095"),
    Row("searches", CHAT, "fees", _chat(1000, 200, num_search_queries=4), f"{_FEES} + 4 @ 0.01", "0.0495"),
    Row(
        "searches",
        ANTHROPIC,
        "fees",
        _of(1000, 200, server_tool_use={"web_search_requests": 3, "web_fetch_requests": 7}),
        f"{_FEES} + 3 @ 0.01",
        "0.0395",
    ),
    Row(
        "pages are free", ANTHROPIC, "fees", _of(1000, 200, server_tool_use={"web_fetch_requests": 7}), _FEES, "0.0095"
    ),
    Row(
        "searches",
        RESPONSES,
        "fees",
        _of(1000, 200),
        f"{_FEES} + 2 @ 0.01 + 1 @ 0.0025",
        "0.032",
        items=(_SEARCH, _item("file_search_call", queries=["q"]), _SEARCH),
    ),
    Row(
        "looking at what was found is free",
        RESPONSES,
        "fees",
        _of(1000, 200),
        f"{_FEES} + 1 @ 0.01",
        "0.0195",
        items=(_SEARCH, _item("web_search_call", action={"type": "open_page", "url": "https://x.example"})),
    ),
    *(
        Row(name, protocol, "fees", usage, "", None, items=items, reason=Reason.UNPRICED_UNITS)
        for name, protocol, usage, items in (
            ("sources without a price", CHAT, _chat(1000, 200, num_sources_used=5), ()),
            ("code without a price", ANTHROPIC, _of(10, 2, server_tool_use={"code_execution_requests": 1}), ()),
            ("code without a price", RESPONSES, _of(10, 2), (_item("code_interpreter_call", code="1"),)),
        )
    ),
    # --------------------------------------------------------------- service tiers
    Row("default", CHAT, "tiers", _chat(1000, 200), _STANDARD, "0.0072", {"service_tier": "default"}),
    Row("flex", CHAT, "tiers", _chat(1000, 200), _FLEX, "0.0036", {"service_tier": "flex"}, asked="flex"),
    Row("priority", CHAT, "tiers", _chat(1000, 200), _PRIORITY, "0.0144", {"service_tier": "priority"}),
    Row(
        "priority, cached",
        CHAT,
        "tiers",
        _chat(1000, 200, **_in(cached_tokens=400)),
        "600 x 8 + 400 x 2 + 200 x 32",
        "0.012",
        {"service_tier": "priority"},
    ),
    Row(
        "flex was full", CHAT, "tiers", _chat(1000, 200), _STANDARD, "0.0072", {"service_tier": "default"}, asked="flex"
    ),
    Row("Groq's word", CHAT, "tiers", _chat(1000, 200), _STANDARD, "0.0072", {"service_tier": "on_demand"}),
    Row("no tier told", WORKERS, "tiers", _chat(1000, 200), _STANDARD, "0.0072"),
    Row("flex", RESPONSES, "tiers", _of(1000, 200), _FLEX, "0.0036", {"service_tier": "flex"}),
    Row(
        "priority", RESPONSES, "tiers", _of(1000, 200), _PRIORITY, "0.0144", {"service_tier": "priority"}, asked="auto"
    ),
    Row("standard", ANTHROPIC, "tiers", _of(1000, 200, service_tier="standard"), _STANDARD, "0.0072"),
    Row("batch", ANTHROPIC, "tiers", _of(1000, 200, service_tier="batch"), _FLEX, "0.0036"),
    Row("priority", ANTHROPIC, "tiers", _of(1000, 200, service_tier="priority"), _PRIORITY, "0.0144"),
    Row("flex", GEMINI, "tiers", _gemini(1000, 200, serviceTier="flex"), _FLEX, "0.0036"),
    Row("Vertex's word for flex", GEMINI, "tiers", _gemini(1000, 200, trafficType="ON_DEMAND_FLEX"), _FLEX, "0.0036"),
    Row("Vertex's standard", GEMINI, "tiers", _gemini(1000, 200, trafficType="ON_DEMAND"), _STANDARD, "0.0072"),
    Row(
        "told in a header",
        GEMINI,
        "tiers",
        _gemini(1000, 200),
        _PRIORITY,
        "0.0144",
        headers={"x-gemini-service-tier": "priority"},
    ),
    Row(
        "batch above a context size",
        ANTHROPIC,
        "long",
        _of(200_001, 1000, service_tier="batch"),
        "200001 x 1.25 + 1000 x 7.50",
        "0.25750125",
    ),
    *(
        Row(name, protocol, "tiers", usage, "", None, more, reason=Reason.UNPRICED_SERVICE_TIER)
        for name, protocol, usage, more in (
            ("a tier without a price", CHAT, _chat(1000, 200), {"service_tier": "scale"}),
            ("no name of a tier", CHAT, _chat(1000, 200), {"service_tier": "<b>"}),
            ("a tier without a price", RESPONSES, _of(1000, 200), {"service_tier": "ultrafast"}),
            ("fast mode without a price", ANTHROPIC, _of(1000, 200, service_tier="standard", speed="fast"), {}),
            ("a tier without a price", GEMINI, _gemini(1000, 200, trafficType="PROVISIONED_THROUGHPUT"), {}),
        )
    ),
    *(
        Row(
            f"{asked} and nothing told",
            CHAT,
            "tiers",
            _chat(1000, 200),
            by_hand,
            None,
            asked=asked,
            reason=Reason.SERVICE_TIER_NOT_TOLD,
            bound=bound,
        )
        for asked, by_hand, bound in (
            ("flex", _STANDARD, "0.0072"),
            ("priority", _PRIORITY, "0.0144"),
            ("scale", "", None),
        )
    ),
    # ------------------------------------------------------- told by the provider
    Row("reported", CHAT, "plain", _chat(1000, 200, cost=0.0123), "1 @ 0.0123", "0.0123"),
    Row("reported in an object", CHAT, "plain", _chat(1000, 200, cost={"total_cost": 0.006}), "1 @ 0.006", "0.006"),
    Row("reported, no price", CHAT, None, _chat(1000, 200, cost=0.0123), "1 @ 0.0123", "0.0123"),
    Row(
        "reported, searches without a price",
        CHAT,
        "plain",
        _chat(10, 2, cost="0.05", num_sources_used=3),
        "1 @ 0.05",
        "0.05",
    ),
    Row("reported as nothing", CHAT, "plain", _chat(1000, 200, cost=0), "", "0"),
    Row("reported below nothing", CHAT, "plain", _chat(1000, 200, cost=-1), _PLAIN, "0.0045"),
    Row("reported", RESPONSES, "plain", _of(1000, 200, cost=0.0123), "1 @ 0.0123", "0.0123"),
    Row("reported", ANTHROPIC, "plain", _of(1000, 200), "1 @ 0.0123", "0.0123", {"cost": 0.0123}),
    # ------------------------------------------------------------ zero, and rounding
    Row("costs nothing", CHAT, "free", _chat(1000, 200), "", "0"),
    Row("costs nothing, nothing told", CHAT, "free", None, "", "0"),
    *(
        Row(f"{tokens} halves", CHAT, "fine", _chat(tokens, 0), f"{tokens} x 0.0000005", usd)
        for tokens, usd in (
            (1, "0"),
            (3, "0.000000000002"),
            (5, "0.000000000002"),
            (6, "0.000000000003"),
            (7, "0.000000000004"),
        )
    ),
    # ------------------------------------------------------------------ not known
    Row("no price", CHAT, None, _chat(1000, 200), "", None, reason=Reason.NO_PRICE),
    *(
        Row(
            "no usage",
            protocol,
            "plain",
            None,
            "1500 x 2.50 + 500 x 10",
            None,
            reason=Reason.NO_USAGE,
            bound="0.00875",
        )
        for protocol in (CHAT, RESPONSES, ANTHROPIC, GEMINI, WORKERS)
    ),
    Row(
        "no output told",
        GEMINI,
        "plain",
        {"promptTokenCount": 1000},
        "1000 x 2.50 + 500 x 10",
        None,
        reason=Reason.PARTIAL_USAGE,
        bound="0.0075",
    ),
    Row(
        "no input told",
        CHAT,
        "plain",
        {"completion_tokens": 200},
        "1500 x 2.50 + 200 x 10",
        None,
        reason=Reason.PARTIAL_USAGE,
        bound="0.00575",
    ),
    Row(
        "an input of nothing",
        CHAT,
        "plain",
        _chat(0, 200),
        "1500 x 2.50 + 200 x 10",
        None,
        reason=Reason.PARTIAL_USAGE,
        bound="0.00575",
    ),
]

#: What a request may use at most, in all rows.
LIMITS = Ceiling(input_tokens=1500, output_tokens=500)


# --------------------------------------------------------------------- on the wire


def _frames(*events: Any, named: bool = False, done: bool = False) -> bytes:
    lines = [(f"event: {event['type']}\n" if named else "") + f"data: {json.dumps(event)}\n\n" for event in events]
    return "".join([*lines, *(["data: [DONE]\n\n"] if done else [])]).encode()


def _message(items: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
    part = {"type": "output_text", "text": "Hi", "annotations": []}
    return [*items, {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}]


def whole(row: Row) -> bytes:
    usage = {} if row.usage is None else {"usage": row.usage}
    match row.protocol:
        case "chat_completions":
            choice = {"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}
            body = {"id": "c1", "object": "chat.completion", "model": "m", "choices": [choice], **usage, **row.more}
        case "responses":
            body = {"id": "resp_1", "object": "response", "model": "m", "status": "completed", **usage, **row.more}
            body["output"] = _message(row.items)
        case "anthropic_messages":
            body = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn"}
            body |= {"content": [{"type": "text", "text": "Hi"}], **usage, **row.more}
        case "gemini":
            candidate = {"index": 0, "content": {"role": "model", "parts": [{"text": "Hi"}]}, "finishReason": "STOP"}
            body = {"candidates": [candidate], "modelVersion": "m", **row.more}
            body |= {} if row.usage is None else {"usageMetadata": row.usage}
        case _:
            body = {"result": {"response": "Hi", **usage}, "success": True, "errors": [], "messages": []}
    return json.dumps(body).encode()


def streamed(row: Row) -> bytes:
    """The same as events. Where a protocol tells its usage in two places, half stands in each."""
    usage = {} if row.usage is None else {"usage": row.usage}
    match row.protocol:
        case "chat_completions":
            top = {"id": "c1", "object": "chat.completion.chunk", "model": "m", **row.more}
            said = {"index": 0, "delta": {"role": "assistant", "content": "Hi"}, "finish_reason": None}
            end = {"index": 0, "delta": {}, "finish_reason": "stop"}
            tail = [{**top, "choices": [], **usage}] if usage else []
            return _frames({**top, "choices": [said]}, {**top, "choices": [end]}, *tail, done=True)
        case "responses":
            head = {"id": "resp_1", "object": "response", "model": "m"}
            created: dict[str, Any] = {
                **head,
                "status": "in_progress",
                "output": [],
                "usage": None,
                "service_tier": "auto",
            }
            output = _message(row.items)
            done = [
                {"type": "response.output_item.done", "output_index": index, "item": item}
                for index, item in enumerate(output)
            ]
            ended = {**head, "status": "completed", "output": output, **usage, **row.more}
            return _frames(
                {"type": "response.created", "response": created},
                *done,
                {"type": "response.completed", "response": ended},
                named=True,
            )
        case "anthropic_messages":
            told = row.usage or {}
            at_the_end: dict[str, Any] = {
                name: told[name] for name in ("output_tokens", "output_tokens_details") if name in told
            }
            if "server_tool_use" in told:
                at_the_end["server_tool_use"] = told["server_tool_use"]
            begun: dict[str, Any] = {**told, "output_tokens": 1}
            for name in ("output_tokens_details", "server_tool_use"):
                begun.pop(name, None)
            message: dict[str, Any] = {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "model": "m",
                "content": [],
            }
            return _frames(
                {"type": "message_start", "message": message | ({"usage": begun} if told else {})},
                {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
                {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hi"}},
                {"type": "content_block_stop", "index": 0},
                {
                    "type": "message_delta",
                    "delta": {"stop_reason": "end_turn"},
                    **({"usage": at_the_end} if told else {}),
                    **row.more,
                },
                {"type": "message_stop"},
                named=True,
            )
        case "gemini":
            said = {"candidates": [{"index": 0, "content": {"role": "model", "parts": [{"text": "Hi"}]}}]}
            end = {"candidates": [{"index": 0, "content": {"role": "model", "parts": []}, "finishReason": "STOP"}]}
            told = row.usage or {}
            first = {name: told[name] for name in ("promptTokenCount", "promptTokensDetails") if name in told}
            return _frames(
                {**said, "modelVersion": "m", **({"usageMetadata": first} if first else {})},
                {**end, "modelVersion": "m", **({"usageMetadata": told} if told else {}), **row.more},
            )
        case _:
            return _frames({"response": "Hi"}, {"response": "", **usage}, done=True)


# ----------------------------------------------------------------------- the check


def charged(
    events: list[Event], price: str | None, *, asked: str | None = None, proven: bool = True, limits: Ceiling = LIMITS
) -> Charge:
    """As an attempt does: what the events tell, and the price."""
    usage, reported, tier = NOTHING, None, None
    for event in events:
        if isinstance(event, UsageReport):
            usage = usage.merge(event.usage)
            reported = event.reported_cost_usd or reported
        elif isinstance(event, Finished):
            tier = event.service_tier
    known = None if price is None else configured_price(PRICES[price])
    if not proven:
        return unknown(Reason.NO_TERMINAL, known, limits, usage, asked_tier=asked)
    told = None if reported is None else Decimal(reported)
    return cost(usage, known, told, limits=limits, asked_tier=asked, served_tier=tier)


def _terms(by_hand: str) -> Iterator[Fraction]:
    for term in by_hand.split(" + ") if by_hand else ():
        number, sign, rate = re.fullmatch(r"(\d+) ([x@]) (\d+(?:\.\d+)?)", term).groups()  # type: ignore[union-attr]
        yield int(number) * Fraction(rate) / (10**6 if sign == "x" else 1)


def added_up(by_hand: str) -> str:
    """To 12 decimals, half to even: what Python's own rounding of a fraction does."""
    units = round(sum(_terms(by_hand), Fraction(0)) * 10**12)
    return decimal_string(Decimal(units).scaleb(-12))


def named(rows: list[Row]) -> Mapping[str, Row]:
    found = {f"{row.protocol}: {row.name}": row for row in rows}
    assert len(found) == len(rows), "two rows have one name"
    return found


@pytest.mark.parametrize("row", ROWS, ids=named(ROWS).keys())
def test_an_answer_costs_what_was_worked_out_by_hand(row: Row) -> None:
    protocol, endpoint = PROTOCOLS[row.protocol], Endpoint(provider="p", protocol=row.protocol, base_url="")
    plain = list(as_events(protocol.parse_response(200, row.headers, whole(row))))
    in_pieces, error = parsed(protocol.new_parser(endpoint, row.headers), [streamed(row)])
    assert error is None
    for events in (plain, in_pieces):
        charge = charged(events, row.price, asked=row.asked)
        if row.usd is None:
            assert (charge.state, charge.usd, charge.reason) == (State.UNKNOWN, None, row.reason)
            assert (None if charge.upper_bound is None else decimal_string(charge.upper_bound)) == row.bound
            assert row.bound is None or row.bound == added_up(row.by_hand)
        else:
            assert (charge.state, charge.reason) == (State.CHARGED, None)
            assert charge.usd is not None
            assert decimal_string(charge.usd) == row.usd == added_up(row.by_hand)


def test_where_the_providers_figure_wins_our_own_is_kept_beside_it() -> None:
    row = named(ROWS)["chat_completions: reported"]
    charge = charged(list(as_events(PROTOCOLS[CHAT].parse_response(200, {}, whole(row)))), row.price)
    assert (charge.price_version, charge.list_usd) == ("reported", Decimal("0.0045"))


def _chunk(content: str | None = None, **more: Any) -> dict[str, Any]:
    choices = [] if content is None else [{"index": 0, "delta": {"content": content}, "finish_reason": None}]
    return {"id": "c1", "model": "m", "choices": choices, **more}


_END = {"id": "c1", "model": "m", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
_BEGUN = {
    "type": "message_start",
    "message": {"id": "m", "type": "message", "model": "m", "content": [], "usage": _of(1600, 1)},
}
_SEARCHED = {
    "type": "message_delta",
    "delta": {"stop_reason": "end_turn"},
    "usage": {"output_tokens": 5, "server_tool_use": {"web_search_requests": 1}},
}


@pytest.mark.parametrize(
    ("protocol", "body", "by_hand", "usd"),
    [
        pytest.param(
            CHAT,
            _frames(
                _chunk("Hi", usage={"prompt_tokens": 1000}), _END, _chunk(usage={"completion_tokens": 200}), done=True
            ),
            _PLAIN,
            "0.0045",
            id="input at the start, output at the end",
        ),
        pytest.param(
            CHAT,
            _frames(_chunk("Hi", usage=_chat(1000, 200)), _END, _chunk(usage=_chat(0, 0)), done=True),
            _PLAIN,
            "0.0045",
            id="zeros at the end",
        ),
        pytest.param(
            CHAT,
            _frames(_chunk("Hi", usage=_chat(1000, 1)), _END, _chunk(usage=_chat(1000, 200)), done=True),
            _PLAIN,
            "0.0045",
            id="cumulative",
        ),
        pytest.param(
            CHAT,
            _frames(_chunk("Hi"), {**_END, "x_groq": {"id": "r", "usage": _chat(1000, 200)}}, done=True),
            _PLAIN,
            "0.0045",
            id="where Groq tells it",
        ),
        pytest.param(
            GEMINI,
            _frames(
                {
                    "candidates": [{"content": {"parts": [{"text": "Hi"}]}}],
                    "usageMetadata": {"promptTokenCount": 1000, "candidatesTokenCount": 7},
                },
                {
                    "candidates": [{"content": {"parts": []}, "finishReason": "STOP"}],
                    "usageMetadata": {"candidatesTokenCount": 200},
                },
            ),
            _PLAIN,
            "0.0045",
            id="Gemini tells it in part",
        ),
    ],
)
def test_usage_that_comes_in_parts_is_priced_once(protocol: str, body: bytes, by_hand: str, usd: str) -> None:
    events, error = parsed(
        PROTOCOLS[protocol].new_parser(Endpoint(provider="p", protocol=protocol, base_url=""), {}), [body]
    )
    assert error is None
    charge = charged(events, "plain")
    assert charge.usd is not None
    assert decimal_string(charge.usd) == usd == added_up(by_hand)


@pytest.mark.parametrize(
    ("protocol", "body", "price", "asked", "by_hand", "bound"),
    [
        pytest.param(CHAT, _frames(_chunk("Hi")), "plain", None, "1500 x 2.50 + 500 x 10", "0.00875", id="cut"),
        pytest.param(
            CHAT,
            _frames(_chunk("Hi", usage=_chat(1000, 700))),
            "plain",
            None,
            "1500 x 2.50 + 700 x 10",
            "0.01075",
            id="cut, more told than was expected",
        ),
        pytest.param(
            ANTHROPIC,
            _frames(_BEGUN, named=True),
            "plain",
            None,
            "1600 x 2.50 + 500 x 10",
            "0.009",
            id="cut after its start, a longer prompt than was expected",
        ),
        pytest.param(
            ANTHROPIC, _frames(_BEGUN, _SEARCHED, named=True), "fees", None, "", None, id="cut, and it had searched"
        ),
        pytest.param(
            CHAT, _frames(_chunk("Hi")), "tiers", None, "1500 x 4 + 500 x 16", "0.014", id="cut, no tier asked"
        ),
        pytest.param(
            CHAT, _frames(_chunk("Hi")), "tiers", "priority", "1500 x 8 + 500 x 32", "0.028", id="cut, priority asked"
        ),
        pytest.param(
            CHAT, _frames(_chunk("Hi")), "tiers", "auto", "1500 x 8 + 500 x 32", "0.028", id="cut, auto asked"
        ),
        pytest.param(CHAT, _frames(_chunk("Hi")), "tiers", "scale", "", None, id="cut, an unpriced tier asked"),
        pytest.param(CHAT, _frames(_chunk("Hi")), "media", None, "1500 x 1 + 500 x 30", "0.0165", id="cut, with sound"),
        pytest.param(CHAT, _frames(_chunk("Hi")), "steps", None, "1500 x 5 + 500 x 6", "0.0105", id="cut, in steps"),
        pytest.param(CHAT, _frames(_chunk("Hi")), None, None, "", None, id="cut, no price"),
    ],
)
def test_a_broken_stream_is_unknown_with_its_bound(
    protocol: str, body: bytes, price: str | None, asked: str | None, by_hand: str, bound: str | None
) -> None:
    events, error = parsed(
        PROTOCOLS[protocol].new_parser(Endpoint(provider="p", protocol=protocol, base_url=""), {}), [body]
    )
    assert error is not None
    charge = charged(events, price, asked=asked, proven=False)
    assert (charge.state, charge.usd, charge.reason) == (State.UNKNOWN, None, Reason.NO_TERMINAL)
    assert (None if charge.upper_bound is None else decimal_string(charge.upper_bound)) == bound
    assert bound is None or bound == added_up(by_hand)


def test_there_are_enough_rows_of_every_protocol() -> None:
    assert len(ROWS) >= 60
    assert {row.protocol for row in ROWS} == set(PROTOCOLS)
