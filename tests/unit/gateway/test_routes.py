"""From a configuration file to routes: which settings reach which, what leaves a route out, roles and lists."""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.chat import Audio, ChatRequest, Document, Image, Message, Reasoning, ResponseFormat, Role, Text, Tool
from admission.ids import new_id
from gateway import config
from gateway.billing import Billing
from gateway.call import Call, Caller, Options, Order, Resend, Unsupported
from gateway.errors import Code, GatewayError, InvalidRequest, ModelNotFound, NoRoute
from gateway.needs import Capability
from gateway.policy import Policy
from gateway.router import Plan, Route, Router, described
from metering.prices import KnownPrice, PriceBook

HEAD = """
[providers.a]
protocol = "chat_completions"
base_url = "http://a.example/v1"
models = ["m", "x-small", "x-large"]
{a}
[providers.b]
protocol = "chat_completions"
base_url = "http://b.example/v1"
{b}
"""
TWO = '[models.m]\nproviders = ["a", "b"]\n'


class Unpublished:
    def context_window(self, base_url: str, upstream_model: str) -> int | None:
        return None

    def price(self, *_: object) -> KnownPrice | None:
        return None


def loaded(tmp_path: Path, text: str = TWO, *, a: str = "", b: str = "") -> config.Settings:
    file = tmp_path / "tollbridge.toml"
    file.write_text(HEAD.format(a=a, b=b) + text)
    return config.load(file, {})


def made(tmp_path: Path, text: str = TWO, *, a: str = "", b: str = "") -> Router:
    settings = loaded(tmp_path, text, a=a, b=b)
    prices = PriceBook(
        models=settings.prices_by_model, routes=settings.prices_by_route, published=Unpublished, free=settings.free
    )
    return Router(settings.providers, settings.models, Billing(prices), settings.routing, settings.roles)


def faults(tmp_path: Path, text: str, **parts: str) -> list[tuple[str, str]]:
    with pytest.raises(config.ConfigFaults) as refused:
        made(tmp_path, text, **parts)
    return [(fault.path, fault.reason) for fault in refused.value.faults]


def chat(*parts: Any, **fields: Any) -> ChatRequest:
    return ChatRequest(messages=(Message(role=Role.USER, content=parts or (Text(text="hi"),)),), **fields)


def call(model: str = "m", *, asks: ChatRequest | None = None, policy: Policy | None = None, **options: Any) -> Call:
    return Call(
        request_id="r",
        caller=Caller(key_id=new_id(), name="k", scopes=frozenset(), policy=policy or Policy()),
        model=model,
        chat=asks or chat(),
        options=Options(**options),
        transport="rest",
    )


def served(plan: Plan) -> list[str]:
    return [route.provider.id for route in plan.routes]


def reasons(plan: Plan) -> dict[str, str]:
    return {out.provider: out.reason for out in plan.left_out}


def refusal(router: Router, asked: Call) -> GatewayError:
    with pytest.raises(GatewayError) as refused:
        router.plan(asked)
    return refused.value


# ------------------------------------------------------------------- settings


def test_the_nearest_table_wins_and_each_reaches_all_its_routes(tmp_path: Path) -> None:
    router = made(
        tmp_path,
        """
        [models.m]
        gap_s = 7
        reasoning = "budget"
        providers = ["a", { provider = "b", gap_s = 8, reasoning = "off", max_output_tokens = 9 }]
        [models.x-small]
        providers = ["a"]
        """,
        a='gap_s = 5\nfirst_byte_s = 4\nreasoning = "effort"\nmax_output_tokens = 100\n'
        '[providers.a.per_model."x-*"]\ngap_s = 6\nresend_uncertain = "never"',
    )
    first, second = router.plan(call()).routes
    assert (first.endpoint.clocks.gap_s, first.endpoint.clocks.first_byte_s, first.endpoint.reasoning) == (
        7,
        4,
        "budget",
    )
    assert (second.endpoint.clocks.gap_s, second.endpoint.reasoning) == (8, "off")
    assert (first.provider.max_output_tokens, second.provider.max_output_tokens) == (100, 9)
    # A pattern of the provider reaches configured models and those that are only pinned.
    for name in ("x-small", "a/x-small", "a/x-large"):
        [route] = router.plan(call(name)).routes
        assert (route.endpoint.clocks.gap_s, route.endpoint.reasoning) == (6, "effort")
        assert route.provider.resend_uncertain is Resend.NEVER
    # What a model's table says holds for whoever pins it by its provider, too.
    [pinned] = router.plan(call("a/m")).routes
    assert pinned.route_id == first.route_id


def test_omitted_and_forced_fields_add_up_and_the_nearest_word_on_a_field_holds(tmp_path: Path) -> None:
    router = made(
        tmp_path,
        """
        [models.m]
        omit = ["user", "seed", "!metadata"]
        providers = [{ provider = "a", force = { seed = 1, top_p = 1 }, omit = ["stop"] }]
        """,
        a='omit = ["store", "metadata"]\nforce = { top_p = 0.5, stop = ["x"] }',
    )
    [route] = router.plan(call()).routes
    assert route.endpoint.omit == {"store", "user", "stop"}
    assert {name: bytes(value) for name, value in route.endpoint.force.items()} == {"seed": b"1", "top_p": b"1"}


ROUTE_CHANGES = [
    'omit = ["seed"]',
    "force = { seed = 1 }",
    'reasoning = "off"',
    'max_tokens_field = "max_tokens"',
    'reasoning_field = "reasoning"',
    "no_sentinel = true",
    "reasoning_object = true",
    "cache_control = true",
    "default_max_tokens = 9",
]


@pytest.mark.parametrize("setting", ROUTE_CHANGES)
@pytest.mark.parametrize("level", ["provider", "pattern", "model", "route"])
def test_what_shapes_a_request_is_part_of_the_routes_identity_wherever_it_is_said(
    tmp_path: Path, setting: str, level: str
) -> None:
    text = "[models.m]\n{model}\nproviders = [{{ provider = 'a'{route} }}]"
    plain = made(tmp_path, text.format(model="", route="")).plan(call()).routes[0]
    other = made(
        tmp_path,
        text.format(model=setting if level == "model" else "", route=f", {setting}" if level == "route" else ""),
        a={"provider": setting, "pattern": f"[providers.a.per_model.'m*']\n{setting}"}.get(level, ""),
    ).plan(call())
    assert other.routes[0].route_id != plain.route_id


def test_another_protocol_is_another_route(tmp_path: Path) -> None:
    text = "[models.m]\nproviders = ['a', { provider = 'a', protocol = 'anthropic_messages' }]"
    first, second = made(tmp_path, text).plan(call()).routes
    assert first.route_id != second.route_id
    assert second.report.protocol == second.provider.protocol == "anthropic_messages"


@pytest.mark.parametrize("setting", ["gap_s = 77", "execution_limit_s = 9", 'resend_uncertain = "never"', "weight = 3"])
def test_patience_and_preference_are_not(tmp_path: Path, setting: str) -> None:
    plain = made(tmp_path, "[models.m]\nproviders = ['a']").plan(call()).routes[0]
    other = made(tmp_path, f"[models.m]\nproviders = [{{ provider = 'a', {setting} }}]").plan(call()).routes[0]
    assert other.route_id == plain.route_id


def test_one_provider_may_serve_a_model_by_two_routes_that_differ(tmp_path: Path) -> None:
    router = made(tmp_path, "[models.m]\nproviders = ['a', { provider = 'a', reasoning = 'off' }]")
    first, second = router.plan(call()).routes
    assert first.route_id != second.route_id
    assert ("models.m.providers.1", "is there twice") in faults(tmp_path, "[models.m]\nproviders = ['a', 'a']")


@pytest.mark.parametrize("field", ["model", "messages", "stream", "input", "contents"])
@pytest.mark.parametrize(
    ("text", "a", "path"),
    [
        ("[models.m]\n{key}\nproviders = ['a']", "", "models.m."),
        ("[models.m]\nproviders = [{{ provider = 'a', {key} }}]", "", "models.m.providers.0."),
        (TWO, "[providers.a.per_model.'x*']\n{key}", "providers.a.per_model.x*."),
    ],
    ids=["model", "route", "pattern"],
)
def test_what_is_ours_cannot_be_forced_or_omitted_anywhere(
    tmp_path: Path, field: str, text: str, a: str, path: str
) -> None:
    for key, place in ((f'omit = ["{field}"]', "omit.0"), (f'force = {{ {field} = "x" }}', f"force.{field}")):
        [(told, reason)] = faults(tmp_path, text.format(key=key), a=a.format(key=key))
        assert told == path + place
        assert "the gateway's to decide" in reason


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("[models.m]\nproviders = [{ provider = 'a', reasoning = 'hard' }]", "models.m.providers.0.reasoning"),
        ("[models.m]\nproviders = [{ provider = 'a', protocol = 'smoke' }]", "models.m.providers.0.protocol"),
        ("[models.m]\nproviders = [{ provider = 'a', colour = 'red' }]", "models.m.providers.0.colour"),
        ("[models.m]\nproviders = ['a']\ncannot = ['fly']", "models.m.cannot.0"),
        ("[models.m]\nproviders = ['a']\norder = 'best'", "models.m.order"),
        ("[models.m]\nproviders = ['a']\ncan = ['n']\ncannot = ['n']", "models.m.can"),
        ("[models.m]\nproviders = ['a']\nomit = ['seed']\nforce = { seed = 1 }", "models.m.omit"),
        ("[models.m]\nproviders = ['a']\n[roles.r]\nmodels = ['q']", "roles.r.models.0"),
        (
            "[models.m]\nproviders = [{ provider = 'a', qualified_for = { r = '0123456789abcdef' } }]",
            "models.m.providers.0.qualified_for.r",
        ),
        (
            "[models.m]\nproviders = [{ provider = 'a', qualified_for = { r = 'short' } }]\n[roles.r]",
            "models.m.providers.0.qualified_for.r",
        ),
        (TWO + "[routing]\nallowed_providers = ['z']", "routing.allowed_providers.0"),
        (TWO + "[routing]\nmax_cost_usd = '-1'", "routing.max_cost_usd"),
    ],
)
def test_a_setting_that_cannot_be_is_told_with_its_path(tmp_path: Path, text: str, path: str) -> None:
    assert path in [told for told, _ in faults(tmp_path, text)]


# --------------------------------------------------------------- capabilities

NEEDS: list[tuple[str, ChatRequest, str]] = [
    ("tools", chat(tools=(Tool(name="t"),)), "tools"),
    ("images", chat(Image(url="https://h/x.png")), "messages[0].content[0]"),
    ("documents", chat(Document(file_id="f")), "messages[0].content[0]"),
    ("audio", chat(Audio(data=b"", format="wav")), "messages[0].content[0]"),
    ("json_schema", chat(response_format=ResponseFormat(kind="json_schema")), "response_format"),
    ("json_object", chat(response_format=ResponseFormat(kind="json_object")), "response_format"),
    ("reasoning", chat(reasoning_effort="low"), "reasoning_effort"),
    ("reasoning", chat(reasoning_budget_tokens=1), "reasoning_effort"),
    ("logprobs", chat(logprobs=True), "logprobs"),
    ("n", chat(n=2), "n"),
]


@pytest.mark.parametrize(("capability", "asks", "field"), NEEDS)
def test_a_route_that_cannot_do_what_is_needed_is_left_out_and_where_none_can_the_field_is_named(
    tmp_path: Path, capability: str, asks: ChatRequest, field: str
) -> None:
    plan = made(tmp_path, a=f"cannot = ['{capability}']").plan(call(asks=asks))
    assert served(plan) == ["b"]
    assert reasons(plan) == {"a": f"capability: {capability}"}
    none = made(tmp_path, a=f"cannot = ['{capability}']", b=f"cannot = ['{capability}']")
    told = refusal(none, call(asks=asks))
    assert isinstance(told, InvalidRequest)
    assert (told.code, told.param, told.status.http) == (Code.UNSUPPORTED_FIELD, field, 400)
    assert f"what the request needs: {capability}" in told.message
    # Who does not need it is served.
    assert served(none.plan(call())) == ["a", "b"]


@pytest.mark.parametrize(
    "asks",
    [
        chat(reasoning_effort="none"),
        chat(reasoning_budget_tokens=0),
        chat(n=1),
        chat(logprobs=False),
        chat(response_format=ResponseFormat(kind="text")),
    ],
)
def test_what_asks_for_nothing_needs_nothing(tmp_path: Path, asks: ChatRequest) -> None:
    everything = ", ".join(f"'{capability}'" for capability in Capability)
    assert served(made(tmp_path, a=f"cannot = [{everything}]").plan(call(asks=asks))) == ["a", "b"]


def test_what_is_said_of_a_model_or_a_route_takes_a_providers_word_back(tmp_path: Path) -> None:
    text = "[models.m]\nproviders = ['a', {{ provider = 'a', {} }}]"
    asks = chat(Image(url="https://h/x"))
    [route] = made(tmp_path, text.format("can = ['images']"), a="cannot = ['images', 'n']").plan(call(asks=asks)).routes
    assert route.provider.cannot == {Capability.N}
    assert route.fallback_index == 1


def test_dropping_is_for_parameters_and_not_for_content(tmp_path: Path) -> None:
    router = made(tmp_path, a="cannot = ['reasoning', 'images']")
    thinks = chat(reasoning_effort="low")
    assert served(router.plan(call(asks=thinks, unsupported=Unsupported.DROP))) == ["a", "b"]
    assert served(router.plan(call(asks=thinks))) == ["b"]
    both = chat(Image(url="https://h/x"), reasoning_effort="low")
    assert reasons(router.plan(call(asks=both, unsupported=Unsupported.DROP))) == {"a": "capability: images"}
    # The provider's own wish holds where the request has none.
    drops = made(tmp_path, a="cannot = ['reasoning']\nunsupported = 'drop'")
    assert served(drops.plan(call(asks=thinks))) == ["a", "b"]
    assert served(drops.plan(call(asks=thinks, unsupported=Unsupported.REFUSE))) == ["b"]


# --------------------------------------------------------------------- orders

PRICED = """
[models.m]
order = "{order}"
providers = ["a", "b", {{ provider = "a", model = "x-small" }}]
fallback = [{{ provider = "b", model = "x-large" }}]
"""


def test_the_cheapest_comes_first_and_an_unknown_price_last_but_before_the_fallback(tmp_path: Path) -> None:
    router = made(tmp_path, PRICED.format(order="cost"), a="free = ['x-*']", b="free = ['x-large']")
    plan = router.plan(call())
    assert [(route.provider.id, route.model) for route in plan.routes] == [("a", "x-small"), ("a", "m"), ("b", "m")]
    assert [route.fallback_index for route in plan.routes] == [0, 1, 2]
    assert reasons(plan) == {"b": "route_limit"}
    # A request may wish otherwise.
    plan = router.plan(call(order=Order.PRIORITY))
    assert [route.model for route in plan.routes] == ["m", "m", "x-small"]


def test_the_quickest_of_late_comes_first_and_one_that_nobody_tried_before_all(tmp_path: Path) -> None:
    router = made(tmp_path, "[models.m]\norder = 'latency'\nproviders = ['a', 'b']")
    by_provider = {route.provider.id: route for route in router.plan(call()).routes}
    assert list(by_provider) == ["a", "b"]
    router.seen(by_provider["a"], 0.5, streamed=True)
    assert served(router.plan(call())) == ["b", "a"]
    router.seen(by_provider["b"], 0.9, streamed=True)
    assert served(router.plan(call())) == ["a", "b"]
    for _ in range(5):
        router.seen(by_provider["a"], 3.0, streamed=True)
    assert served(router.plan(call())) == ["b", "a"]
    # Of plain answers nothing is known yet.
    assert served(router.plan(call(), streamed=False)) == ["a", "b"]


def test_a_drawn_order_follows_from_the_request_alone(tmp_path: Path) -> None:
    text = "[models.m]\norder = 'weighted'\nproviders = [{ provider = 'a', weight = 3 }, 'b']"
    router = made(tmp_path, text)
    calls = [msgspec.structs.replace(call(), request_id=f"r{number}") for number in range(400)]
    first = [served(router.plan(asked))[0] for asked in calls]
    assert first == [served(router.plan(asked))[0] for asked in calls]
    assert 260 < first.count("a") < 340  # three of four


# ---------------------------------------------------------------------- roles

ROLE = """
[roles.planner]
[models.other]
providers = ["a"]
[models.m]
providers = ["a", {{ provider = "b", {setting} qualified_for = {{ planner = "{qualified}" }} }}]
"""


def qualified(tmp_path: Path) -> str:
    """The id of the second route of ROLE as it is without a setting."""
    return made(tmp_path, ROLE.format(setting="", qualified="0" * 16)).plan(call("m")).routes[1].route_id


def test_a_role_is_served_by_routes_that_were_found_fit_and_by_no_other(tmp_path: Path) -> None:
    router = made(tmp_path, ROLE.format(setting="", qualified=qualified(tmp_path)))
    plan = router.plan(call("", role="planner"))
    assert served(plan) == ["b"]
    assert plan.routes[0].asked == "m"
    assert reasons(plan) == {"a": "not_qualified: planner"}
    assert served(router.plan(call("m", role="planner"))) == ["b"]


@pytest.mark.parametrize("setting", ["reasoning = 'off',", "force = { seed = 1 },", "model = 'another',"])
def test_a_route_that_changed_has_lost_its_roles(tmp_path: Path, setting: str) -> None:
    recorded = qualified(tmp_path)
    text = ROLE.format(setting=setting, qualified=recorded)
    told = refusal(made(tmp_path, text), call("", role="planner"))
    assert isinstance(told, NoRoute)
    assert (told.code, told.status.http) == (Code.PROVIDER_NOT_READY, 503)
    settings = loaded(tmp_path, text)
    [changed] = [route for route in described(settings.providers, settings.models) if route.provider == "b"]
    assert (changed.roles, changed.lost) == ((), {"planner": recorded})
    assert changed.route_id is not None
    # Who looks after it can read both ids from the error, and writes the new one down once it was tried.
    assert recorded in told.message
    assert changed.route_id in told.message
    again = made(tmp_path, ROLE.format(setting=setting, qualified=changed.route_id))
    assert served(again.plan(call("", role="planner"))) == ["b"]


def test_a_longer_clock_loses_no_role(tmp_path: Path) -> None:
    router = made(tmp_path, ROLE.format(setting="gap_s = 50,", qualified=qualified(tmp_path)))
    assert served(router.plan(call("", role="planner"))) == ["b"]


def test_an_unknown_role_is_the_callers_mistake_and_is_told_what_there_is(tmp_path: Path) -> None:
    told = refusal(made(tmp_path, ROLE.format(setting="", qualified="0" * 16)), call("", role="poet"))
    assert isinstance(told, InvalidRequest)
    assert told.param == "role"
    assert "'poet'" in told.message
    assert "planner" in told.message
    assert "none: ask for a model" in refusal(made(tmp_path), call("", role="poet")).message


def test_a_role_that_no_route_is_qualified_for_is_an_operators_problem(tmp_path: Path) -> None:
    told = refusal(made(tmp_path, TWO + "[roles.planner]\nmodels = ['m']"), call("", role="planner"))
    assert (told.code, told.status.http) == (Code.PROVIDER_NOT_READY, 503)
    assert "tollbridge check" in told.message
    empty = refusal(made(tmp_path, TWO + "[roles.planner]"), call("", role="planner"))
    assert empty.code is Code.PROVIDER_NOT_READY


def test_what_is_known_is_a_model_or_a_role(tmp_path: Path) -> None:
    router = made(tmp_path, ROLE.format(setting="", qualified="0" * 16))
    router.known("m", None, Policy())
    router.known("", "planner", Policy())
    with pytest.raises(ModelNotFound):
        router.known("", None, Policy())
    with pytest.raises(ModelNotFound):
        router.known("z", "planner", Policy())
    with pytest.raises(InvalidRequest):
        router.known("m", "poet", Policy())
    # A model that the key may not have is no model beside a role either.
    nothing = Policy(models=())
    with pytest.raises(ModelNotFound):
        router.known("m", "planner", nothing)
    assert refusal(router, call("m", role="planner", policy=nothing)).code is Code.MODEL_NOT_FOUND


# ------------------------------------------------------------------- policies


def test_the_lists_of_configuration_key_and_request_must_all_agree(tmp_path: Path) -> None:
    text = '[models.m]\nproviders = ["a", "b", "c"]\n[routing]\nallowed_providers = ["a", "b"]\n'
    router = made(tmp_path, text, b='[providers.c]\nprotocol = "chat_completions"\nbase_url = "http://c"')
    plan = router.plan(call())
    assert served(plan) == ["a", "b"]
    assert reasons(plan) == {"c": "not_allowed: configuration"}
    plan = router.plan(call(policy=Policy(providers=frozenset({"b", "c"}))))
    assert served(plan) == ["b"]
    assert reasons(plan) == {"a": "not_allowed: key", "c": "not_allowed: configuration"}
    told = refusal(router, call(policy=Policy(providers=frozenset({"b"})), allowed_providers=("a", "c")))
    assert told.code is Code.NO_ROUTE
    # A key's empty list allows nothing; the request's field cannot say that.
    assert refusal(router, call(policy=Policy(providers=frozenset()))).code is Code.MODEL_NOT_FOUND


@pytest.mark.parametrize(
    ("patterns", "asked", "allowed"),
    [
        (("m",), "m", True),
        (("m",), "a/m", True),
        (("x*",), "m", False),
        (("a/*",), "m", True),
        (("b/*",), "a/m", False),
        ((), "m", False),
    ],
)
def test_a_list_of_models_holds_for_pinned_ones_too(
    tmp_path: Path, patterns: tuple[str, ...], asked: str, allowed: bool
) -> None:
    router = made(tmp_path, "[models.m]\nproviders = ['a']")
    policy = Policy(models=patterns)
    if allowed:
        assert served(router.plan(call(asked, policy=policy))) == ["a"]
    else:
        # As if there were no such model: what a key may not have it does not learn of.
        hidden, absent = (
            refusal(router, call(asked, policy=policy)),
            refusal(router, call("nobody/has-it", policy=policy)),
        )
        assert (hidden.code, hidden.param) == (absent.code, absent.param) == (Code.MODEL_NOT_FOUND, "model")
        assert hidden.message.replace(repr(asked), "") == absent.message.replace("'nobody/has-it'", "")
        # A job is told the same when it is taken.
        with pytest.raises(ModelNotFound) as refused:
            router.known(asked, None, policy)
        assert refused.value.message == hidden.message


def test_what_a_key_may_use_of_a_model_is_what_every_policy_allows(tmp_path: Path) -> None:
    router = made(tmp_path, TWO + "\n[routing]\nallowed_providers = ['a']")
    assert made(tmp_path).allowed("m", Policy()) == {("a", "m"), ("b", "m")}
    assert made(tmp_path).allowed("m", Policy(providers=frozenset({"b"}))) == {("b", "m")}
    assert made(tmp_path).allowed("a/m", Policy(models=("m",))) == {("a", "m")}
    assert made(tmp_path).allowed("m", Policy(models=("other",))) == frozenset()
    assert router.allowed("m", Policy(providers=frozenset({"b"}))) == frozenset()


def test_the_tags_of_a_key_are_on_its_calls_and_no_request_replaces_them() -> None:
    asked = call(tags={"team": "mine", "step": "1"})
    keyed = msgspec.structs.replace(asked, caller=msgspec.structs.replace(asked.caller, tags={"team": "core"}))
    assert keyed.tags == {"team": "core", "step": "1"}
    assert keyed.overruled_tags == ["team"]
    assert asked.overruled_tags == []


def test_a_request_can_narrow_to_models(tmp_path: Path) -> None:
    assert served(made(tmp_path).plan(call(allowed_models=("b/*",)))) == ["b"]


def test_the_lowest_of_the_cost_limits_holds_and_zero_means_free_models_only(tmp_path: Path) -> None:
    text = TWO + "price = { input = '0.1', output = '0.1' }\n"
    router = made(tmp_path, text, a="max_output_tokens = 10", b="max_output_tokens = 10")
    assert served(router.plan(call(max_cost_usd=Decimal(1)))) == ["a", "b"]
    tight = call(max_cost_usd=Decimal(1), policy=Policy(max_cost_usd=Decimal("0.000001")))
    assert refusal(router, tight).code is Code.NO_ROUTE
    free = made(tmp_path, b="free = ['m']").plan(call(max_cost_usd=Decimal(0)))
    assert served(free) == ["b"]
    assert reasons(free) == {"a": "max_cost_usd"}
    limited = made(tmp_path, TWO + "[routing]\nmax_cost_usd = '0'\n", b="free = ['m']")
    assert served(limited.plan(call())) == ["b"]


def test_the_price_of_a_free_model_names_what_made_it_free(tmp_path: Path) -> None:
    file = tmp_path / "tollbridge.toml"
    file.write_text(HEAD.format(a="free = ['*:free']", b="") + TWO)
    settings = config.load(file, {})
    billing = Billing(PriceBook(models={}, routes={}, published=Unpublished, free=settings.free))
    provider = settings.providers["a"]
    assert provider.endpoint is not None
    route = Route(provider=provider, endpoint=provider.endpoint, model="z:free", fallback_index=0, asked="m")
    # A picture has no known size, and costs nothing all the same.
    asked = call(asks=chat(Image(url="https://h/x")))
    free = billing.quote(asked, route)
    assert (free.most, free.price_version) == (Decimal(0), "free:a:*:free")
    assert billing.about(asked, route) == 0
    paid = msgspec.structs.replace(route, model="z")
    unpriced = billing.quote(asked, paid)
    assert (unpriced.most, unpriced.price_version) == (None, None)


def test_reasoning_of_earlier_turns_is_no_need(tmp_path: Path) -> None:
    thought = Message(role=Role.ASSISTANT, content=(Text(text="x"),), reasoning=(Reasoning(text="t"),))
    asks = ChatRequest(messages=(thought,))
    assert served(made(tmp_path, a="cannot = ['reasoning']").plan(call(asks=asks))) == ["a", "b"]


def test_what_is_free_at_the_shipped_address_is_not_at_another(tmp_path: Path) -> None:
    file = tmp_path / "tollbridge.toml"
    tail = '[models."llama3.2"]\nproviders = ["ollama"]\n'
    file.write_text("[providers.ollama]\ngap_s = 9\n" + tail)
    here = config.load(file, {})
    file.write_text('[providers.ollama]\nbase_url = "https://elsewhere.example/v1"\n' + tail)
    assert config.load(file, {}).free == {}
    prices = PriceBook(models={}, routes={}, published=Unpublished, free=here.free)

    def free(model: str) -> bool:
        return prices.price("ollama", here.providers["ollama"].base_url, model, model, datetime.now(UTC)) is not None

    assert free("llama3.2")
    # A later pattern takes back what an earlier one says.
    assert not free("gpt-oss:120b-cloud")
    assert not free("kimi-k2:cloud")


def test_patterns_of_a_shipped_profile_stay_and_those_of_the_file_come_after_them(tmp_path: Path) -> None:
    file = tmp_path / "tollbridge.toml"
    file.write_text(
        """
        [providers.opencode_zen.per_model."claude-*"]
        gap_s = 3
        [providers.opencode_zen.per_model."*"]
        first_byte_s = 4
        [models.m]
        providers = ["opencode_zen"]
        """
    )
    zen = config.load(file, {"OPENCODE_API_KEY": "k"}).providers["opencode_zen"]
    assert [pattern for pattern, _ in zen.per_model] == ["gpt-*", "claude-*", "*"]
    claude = zen.for_model("claude-x").endpoint
    assert claude is not None
    # What the file does not say of a pattern, the profile does.
    assert claude.protocol == "anthropic_messages"
    assert (claude.clocks.gap_s, claude.clocks.first_byte_s) == (3, 4)
    assert "messages.cache" not in claude.omit
    assert zen.for_model("gpt-x").protocol == "responses"


def test_a_role_takes_the_routes_of_all_its_models_in_order(tmp_path: Path) -> None:
    text = """
    [roles.planner]
    models = ["second", "first"]
    [models.first]
    providers = [{{ provider = "a", qualified_for = {{ planner = "{a}" }} }}]
    [models.second]
    providers = [{{ provider = "b", qualified_for = {{ planner = "{b}" }} }}]
    """
    ids = {
        route.provider: route.route_id
        for settings in [loaded(tmp_path, text.format(a="0" * 16, b="0" * 16))]
        for route in described(settings.providers, settings.models)
    }
    plan = made(tmp_path, text.format(**ids)).plan(call("", role="planner"))
    assert [(route.provider.id, route.asked, route.fallback_index) for route in plan.routes] == [
        ("b", "second", 0),
        ("a", "first", 1),
    ]


LEVELS = ("provider", "pattern", "model", "route")
DEFAULTS = {"gap_s": 1.5, "first_byte_s": 5.0, "isolation_s": 30.0}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(LEVELS), st.sampled_from(["gap_s", "first_byte_s", "isolation_s"]), st.integers(1, 99)
        ),
        max_size=12,
    )
)
def test_of_several_tables_the_nearest_that_says_anything_is_heard(said: list[tuple[str, str, int]]) -> None:
    tables: dict[str, dict[str, float]] = {level: {} for level in LEVELS}
    for level, key, value in said:
        tables[level][key] = value
    lines = {level: "\n".join(f"{key} = {value}" for key, value in table.items()) for level, table in tables.items()}
    inline = "".join(f", {key} = {value}" for key, value in tables["route"].items())
    with tempfile.TemporaryDirectory() as directory:
        router = made(
            Path(directory),
            f"[models.m]\n{lines['model']}\nproviders = [{{ provider = 'a'{inline} }}]",
            a=f"{lines['provider']}\n[providers.a.per_model.m]\n{lines['pattern']}",
        )
    [route] = router.plan(call()).routes
    for key, default in DEFAULTS.items():
        nearest = next((tables[level][key] for level in reversed(LEVELS) if key in tables[level]), default)
        clocks = route.endpoint.clocks
        heard = route.provider.isolation_s if key == "isolation_s" else getattr(clocks, key)
        assert heard == nearest, (key, tables)
