"""What a request may cost at most, before it is sent."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from adapters.chat import ChatRequest, Image, Message, Role, Text
from adapters.protocols import PROTOCOLS
from gateway import config
from gateway.billing import Billing
from gateway.router import Route
from metering.library_prices import Library
from metering.prices import Price, PriceBook, configured_price
from tests.unit.gateway.test_routes import call, chat

#: The list knows this address and its models; nothing is sent there.
OPENAI = """
[providers.openai]
protocol = "chat_completions"
base_url = "https://api.openai.com/v1"
{more}
[models.m]
providers = ["openai"]
"""


def most(tmp_path: Path, asks: ChatRequest, more: str = "") -> Decimal | None:
    file = tmp_path / "tollbridge.toml"
    file.write_text(OPENAI.format(more=more))
    provider = config.load(file, {"OPENAI_API_KEY": "sk-0123456789abcdef"}).providers["openai"]
    assert provider.endpoint is not None
    route = Route(provider=provider, endpoint=provider.endpoint, model="gpt-4o-mini", fallback_index=0, asked="m")
    billing = Billing(PriceBook(models={}, routes={}, published=Library))
    asked = call(asks=asks)
    assert billing.about(asked, route) is not None
    return billing.most(asked, route)


def route_to_openai(tmp_path: Path, more: str = "") -> Route:
    file = tmp_path / "tollbridge.toml"
    file.write_text(OPENAI.format(more=more))
    provider = config.load(file, {"OPENAI_API_KEY": "sk-0123456789abcdef"}).providers["openai"]
    assert provider.endpoint is not None
    return Route(provider=provider, endpoint=provider.endpoint, model="x", fallback_index=0, asked="m")


@pytest.fixture(scope="module")
def window() -> int:
    found = Library().context_window("https://api.openai.com/v1", "gpt-4o-mini")
    assert found is not None
    return found


def output_price() -> Decimal:
    price = Library().price("https://api.openai.com/v1", "gpt-4o-mini", datetime.now(UTC))
    assert isinstance(price, Price)
    assert price.output is not None
    return price.output / 1_000_000


@pytest.mark.parametrize(
    ("asked", "more", "tokens"),
    [(100, "", 100), (None, "max_output_tokens = 4096", 4096), (None, "", None)],
    ids=["its own limit", "the provider's", "none but the size of the model"],
)
def test_an_answer_of_any_length_is_bounded_by_the_model(
    tmp_path: Path, window: int, asked: int | None, more: str, tokens: int | None
) -> None:
    bound = most(tmp_path, chat(max_output_tokens=asked), more)
    assert bound is not None
    of_output = (tokens or window) * output_price()
    # The question is short; what a provider adds to it is allowed for.
    assert of_output < bound < of_output + Decimal("0.001")


def test_a_picture_is_bounded_by_the_model(tmp_path: Path, window: int) -> None:
    without = most(tmp_path, chat(max_output_tokens=1))
    shown = chat(Text(text="hi"), Image(url="https://example.com/a.png"), max_output_tokens=1)
    bound = most(tmp_path, shown)
    assert without is not None
    assert bound is not None
    assert bound - without >= window * output_price() / 8


PRICED = """
[providers.own]
protocol = "chat_completions"
base_url = "http://127.0.0.1:9/v1"
"""
PICTURE = ChatRequest(
    messages=(Message(role=Role.USER, content=(Image(url="https://a.test/b.png"),)),), max_output_tokens=5
)


@pytest.mark.parametrize(
    ("asks", "priced", "why"),
    [
        (ChatRequest(messages=(), max_output_tokens=5), False, "no price is known"),
        (ChatRequest(messages=()), True, "no limit of the answer is known, give max_output_tokens"),
        (PICTURE, True, "it has pictures or files, and the size of the model's context is not known"),
        (
            PROTOCOLS["chat_completions"].parse_request(b'{"model":"m","messages":[{"role":"user","content":"x"}]}'),
            True,
            "no limit of the answer is known, give max_completion_tokens",
        ),
        (
            PROTOCOLS["responses"].parse_request(b'{"model":"m","input":"x"}'),
            True,
            "no limit of the answer is known, give max_output_tokens",
        ),
    ],
    ids=["no price", "no limit", "a picture", "chat completions", "responses"],
)
def test_why_a_request_has_no_bound_is_told_in_its_own_words(tmp_path: Path, asks: ChatRequest, priced: bool, why: str):
    file = tmp_path / "tollbridge.toml"
    file.write_text(PRICED)
    provider = config.load(file, {}).providers["own"]
    assert provider.endpoint is not None
    route = Route(provider=provider, endpoint=provider.endpoint, model="unheard-of", fallback_index=0, asked="m")
    price = Price(version="config:1", input=Decimal(1), output=Decimal(2))
    billing = Billing(PriceBook(models={"m": price} if priced else {}, routes={}, published=Library))
    asked = call(asks=asks)
    assert billing.most(asked, route) is None
    assert billing.unbounded(asked, route) == why


@pytest.mark.parametrize(
    ("asked", "more", "times"),
    [
        (None, "", "1"),
        ("default", "", "1"),
        # What is full is served at the standard tier.
        ("cheap", "", "1"),
        ("dear", "", "3"),
        ("Dear", "", "3"),
        ("auto", "", "3"),
        ("unheard_of", "", None),
        (None, 'force = { service_tier = "dear" }', "3"),
        ("unheard_of", 'force = { service_tier = "default" }', "1"),
        ("dear", 'omit = ["service_tier"]', "1"),
    ],
)
def test_the_bound_covers_every_tier_that_may_serve_what_is_asked(tmp_path, asked, more, times):
    table = {"input": "1", "output": "2", "service_tiers": {"cheap": {"factor": "0.5"}, "dear": {"factor": "3"}}}
    billing = Billing(PriceBook(models={"m": configured_price(table)}, routes={}, published=Library))
    standard = billing.most(call(asks=chat(max_output_tokens=10)), route_to_openai(tmp_path))
    assert standard is not None
    wanted, route = call(asks=chat(max_output_tokens=10, service_tier=asked)), route_to_openai(tmp_path, more)
    if times is None:
        assert billing.most(wanted, route) is None
        assert billing.unbounded(wanted, route) == "no price is known of the service tier unheard_of"
    else:
        assert billing.most(wanted, route) == standard * Decimal(times)


def test_a_native_request_for_anthropics_fast_mode_asks_for_a_tier(tmp_path):
    body = b'{"model":"m","max_tokens":5,"speed":"fast","messages":[{"role":"user","content":"x"}]}'
    asked = call(asks=PROTOCOLS["anthropic_messages"].parse_request(body))
    billing = Billing(PriceBook(models={}, routes={}, published=Library))
    assert billing.asked_tier(asked, route_to_openai(tmp_path)) == "fast"
