"""Model names to ordered routes, and a reason for each one left out."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import msgspec
import pytest

from adapters.chat import ChatRequest, Message, Role, Text
from adapters.contract import Endpoint
from admission.lease import new_id
from gateway.call import Call, Caller, Options
from gateway.errors import Code, ModelNotFound, NoRoute
from gateway.router import Model, Provider, Router, RoutingSettings, Target


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


def router(*providers: Provider, ceiling: Decimal | None = None) -> Router:
    names = [entry.id for entry in providers]
    model = Model(
        name="m", targets=tuple(Target(provider=name, model=f"{name}-model") for name in names), primary=len(names)
    )
    return Router({entry.id: entry for entry in providers}, {"m": model}, lambda *_: ceiling, RoutingSettings())


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
        "other": "not_allowed",
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
