"""Model names to ordered routes, and a reason for each one left out."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import msgspec
import pytest

from adapters.chat import ChatRequest, Message, Role, Text
from adapters.contract import Clocks, Endpoint
from admission.ids import new_id
from gateway.call import Call, Caller, Options
from gateway.errors import Code, ModelNotFound, NoRoute
from gateway.provider import Confirms, OnCancel, Provider
from gateway.router import Model, Route, Router, RoutingSettings, Target


def provider(name: str, **changes: Any) -> Provider:
    endpoint = Endpoint(provider=name, protocol="chat_completions", base_url=f"http://{name}")
    return msgspec.structs.replace(
        Provider(
            id=name,
            name=name,
            enabled=True,
            protocol="chat_completions",
            origin=f"http://{name}:80",
            group=f"http://{name}:80",
            credential=name,
            missing=(),
            models=("own",),
            default_model=None,
            endpoint=endpoint,
            base_url=f"http://{name}",
            execution_limit_s=1,
            isolation_s=1,
            queue_timeout_s=1,
            cancel_confirms_after_s=None,
            resend_uncertain=None,
            max_output_tokens=None,
        ),
        **changes,
    )


class Flat:
    """Every request costs the same everywhere."""

    def __init__(self, usd: Decimal | None) -> None:
        self._usd = usd

    def most(self, _call: Call, _route: Route) -> Decimal | None:
        return self._usd

    def unbounded(self, _call: Call, _route: Route) -> str:
        return "nobody knows"

    def about(self, _call: Call, _route: Route) -> Decimal | None:
        return self._usd

    def unpriced(self, _call: Call, _route: Route) -> str | None:
        return "no price is known" if self._usd is None else None


def router(*providers: Provider, ceiling: Decimal | None = None) -> Router:
    names = [entry.id for entry in providers]
    model = Model(
        name="m", targets=tuple(Target(provider=name, model=f"{name}-model") for name in names), primary=len(names)
    )
    return Router({entry.id: entry for entry in providers}, {"m": model}, Flat(ceiling), RoutingSettings())


def call(model: str = "m", **options: Any) -> Call:
    return Call(
        request_id="r",
        caller=Caller(key_id=new_id(), name="k", scopes=frozenset()),
        model=model,
        chat=ChatRequest(messages=(Message(role=Role.USER, content=(Text(text="hi"),)),)),
        options=Options(**options),
        transport="rest",
    )


def test_routes_come_in_the_configured_order_and_at_most_three():
    plan = router(*(provider(name) for name in "abcd")).plan(call())
    assert [(route.provider.id, route.model, route.fallback_index) for route in plan.routes] == [
        ("a", "a-model", 0),
        ("b", "b-model", 1),
        ("c", "c-model", 2),
    ]
    assert [(out.provider, out.reason) for out in plan.left_out] == [("d", "route_limit")]


def test_a_provider_that_cannot_or_may_not_serve_is_left_out_with_its_reason():
    plan = router(
        provider("off", enabled=False),
        provider("bare", missing=("SOME_KEY",), endpoint=None),
        provider("other"),
        provider("good"),
    ).plan(call(allowed_providers=("good", "off", "bare")))
    assert [route.provider.id for route in plan.routes] == ["good"]
    assert {out.provider: out.reason for out in plan.left_out} == {
        "off": "disabled",
        "bare": "not_ready: SOME_KEY not set",
        "other": "not_allowed: request",
    }


@pytest.mark.parametrize(
    ("ceiling", "limit", "served"),
    [("0.5", "0.5", True), ("0.5", "0.4", False), (None, "100", False), ("0", "0", True)],
    ids=["at the limit", "above it", "unknown price", "free"],
)
def test_a_cost_limit_leaves_out_what_may_cost_more_or_nobody_knows(ceiling, limit, served):
    made = router(provider("a"), ceiling=None if ceiling is None else Decimal(ceiling))
    asked = call(max_cost_usd=Decimal(limit))
    if served:
        assert made.plan(asked).routes
    else:
        with pytest.raises(NoRoute) as none:
            made.plan(asked)
        assert none.value.code is Code.NO_ROUTE


def test_providers_that_are_not_ready_are_an_operators_problem_and_say_so():
    with pytest.raises(NoRoute) as none:
        router(provider("a", missing=("A_KEY",), endpoint=None)).plan(call())
    assert none.value.code is Code.PROVIDER_NOT_READY
    assert "A_KEY" in none.value.message
    assert none.value.left_out == ()


def test_who_asks_for_reasons_has_them_where_nothing_is_left_too():
    with pytest.raises(NoRoute) as none:
        router(provider("a", missing=("A_KEY",), endpoint=None)).plan(call(explain=True))
    [out] = none.value.left_out
    assert (out.provider, out.reason.startswith("not_ready")) == ("a", True)


def test_without_failover_only_the_first_route_that_may_serve_is_left():
    plan = router(provider("a", enabled=False), provider("b"), provider("c")).plan(call(allow_failover=False))
    assert [route.provider.id for route in plan.routes] == ["b"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a/own", ("a", "own")), ("b/m", ("b", "b-model"))],
    ids=["a model the provider lists", "a configured model it serves"],
)
def test_a_pinned_model_goes_to_that_provider_only(name, expected):
    plan = router(provider("a"), provider("b")).plan(call(name))
    assert [(route.provider.id, route.model) for route in plan.routes] == [expected]


@pytest.mark.parametrize("name", ["", "n", "a/", "a/n", "z/own", "/m"])
def test_an_unknown_model_is_not_found(name):
    with pytest.raises(ModelNotFound):
        router(provider("a")).plan(call(name))


def test_a_route_is_another_one_when_its_settings_change_but_not_when_its_key_does():
    def route_id(**changes: Any) -> str:
        endpoint = Endpoint(**{"provider": "a", "protocol": "chat_completions", "base_url": "http://a", **changes})
        return router(provider("a", endpoint=endpoint)).plan(call()).routes[0].route_id

    ids = {
        route_id(),
        route_id(base_url="http://b"),
        route_id(omit=frozenset({"temperature"})),
        route_id(force={"x": msgspec.Raw(b"1")}),
        route_id(max_tokens_field="max_tokens"),
    }
    assert len(ids) == 5
    assert route_id(headers={"authorization": "Bearer other"}) == route_id()


@pytest.mark.parametrize(
    ("asked", "provider_default", "limit_s"),
    [(200, None, 50), (900, None, 120), (100_000, None, 120), (1, None, 30.1), (None, None, 120), (None, 500, 80)],
)
def test_the_hard_deadline_follows_from_the_output_a_request_may_have(asked, provider_default, limit_s):
    made = provider("a", execution_limit_s=120, max_output_tokens=provider_default)
    assert made.limit_s("m", asked) == limit_s


def test_the_first_byte_may_take_as_long_as_its_clock_says():
    endpoint = Endpoint(provider="a", protocol="chat_completions", base_url="http://a", clocks=Clocks(first_byte_s=180))
    assert provider("a", execution_limit_s=600, endpoint=endpoint).limit_s("m", 100) == 190


def test_how_long_a_model_thinks_is_not_bounded_by_its_output():
    made = provider("a", execution_limit_s=120, reasoning_models=("gpt-5*", "o3"))
    assert made.limit_s("gpt-5.4-mini", 1) == made.limit_s("o3", None) == 600
    assert made.limit_s("gpt-4o", 1) == made.limit_s("o3-mini", 1) == 30.1


CASES = [
    # what is known of closing, what is wished, seconds read on of a stream and of a plain call
    (None, Confirms.ALL, None, 15, 15),
    (10, Confirms.ALL, None, 0, 0),
    (10, Confirms.STREAMS, None, 0, 15),
    (10, Confirms.NONE, None, 15, 15),
    (10, Confirms.ALL, OnCancel.DRAIN, 15, 15),
    (None, Confirms.ALL, OnCancel.CLOSE, 0, 0),
]


@pytest.mark.parametrize(("known_s", "of", "wish", "stream_s", "plain_s"), CASES)
def test_what_is_not_known_to_end_on_close_is_read_on(known_s, of, wish, stream_s, plain_s):
    made = provider("a", cancel_confirms_after_s=known_s, cancel_confirms=of, on_cancel=wish)
    assert (made.drains_for_s(streamed=True), made.drains_for_s(streamed=False)) == (stream_s, plain_s)


@pytest.mark.parametrize(
    ("of", "stream_s", "plain_s"), [(Confirms.ALL, 9, 9), (Confirms.STREAMS, 9, None), (Confirms.NONE, None, None)]
)
def test_a_word_about_streams_is_not_taken_for_plain_calls(of, stream_s, plain_s):
    made = provider("a", cancel_confirms_after_s=9, cancel_confirms=of)
    assert (made.confirms_after_s(streamed=True), made.confirms_after_s(streamed=False)) == (stream_s, plain_s)


def test_what_has_no_price_is_refused_where_a_price_is_required() -> None:
    free, strict = provider("a"), msgspec.structs.replace(provider("b"), require_pricing=True)
    [route] = router(free, strict).plan(call()).routes
    assert route.provider.id == "a"
    with pytest.raises(NoRoute, match="pricing_required: no price is known") as refused:
        router(strict).plan(call())
    assert refused.value.code is Code.PRICING_REQUIRED
    assert [each.provider.id for each in router(strict, ceiling=Decimal(1)).plan(call()).routes] == ["b"]
