"""
The models that may be asked for, as the clients of OpenAI and of Anthropic list them.

A name stands here only where some provider is ready to serve it and the key may have it: a client that picks from the
list should not pick an error. What is not known of a model (its size, its price, what it can do) is null, and never
guessed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Final, Literal, Protocol

import msgspec
from aiohttp import web
from typing_extensions import TypedDict

from gateway.errors import Code, InvalidRequest, ModelNotFound
from gateway.policy import Policy
from gateway.rest.apis import CHAT_COMPLETIONS, MESSAGES, spoken
from gateway.rest.endpoint import Access, Endpoint, Exchange, plain
from gateway.rest.operation import Content, Operation

#: What Anthropic's clients may ask for at once.
MOST_AT_ONCE: Final = 1000
_USUAL_AT_ONCE: Final = 20
#: Segments of a model's name: `openrouter/meta-llama/llama-3`, `cloudflare/@cf/meta/llama-3`.
MOST_SEGMENTS: Final = 6
#: Neither API leaves the time out, and none is known.
_LONG_AGO: Final = "1970-01-01T00:00:00Z"


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """USD per million tokens, as decimal strings. None: as the whole it is part of."""

    input: str
    output: str
    cache_read: str | None = None
    version: str


class ModelPlace(msgspec.Struct, frozen=True, kw_only=True):
    """One place where a model may be served, in the order in which they are tried."""

    #: The provider's id, and its name for the model.
    id: str
    model: str
    protocol: str
    #: It is enabled and its credentials are present.
    ready: bool
    #: The most input tokens it takes; None where that is not known.
    context_window: int | None = None
    max_output_tokens: int | None = None
    #: None where nobody has stated one.
    prices: Prices | None = None
    #: By capability: what it is known not to do is false, what nobody knows is null.
    capabilities: Mapping[str, bool | None] = {}


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    #: As a caller names it: short, or `provider/model`.
    name: str
    providers: tuple[ModelPlace, ...]

    @property
    def first(self) -> ModelPlace | None:
        """The one that is asked first; None where none is ready."""
        return next((place for place in self.providers if place.ready), None)


class _Place(TypedDict):
    """What neither API has a field for: of the place that is asked first, and all places in order."""

    context_window: int | None
    max_output_tokens: int | None
    prices: Prices | None
    ready: Literal[True]
    providers: tuple[ModelPlace, ...]


class OpenAiModel(_Place):
    """A model, as OpenAI has it."""

    capabilities: Mapping[str, bool | None]
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class AnthropicModel(_Place):
    """A model, as Anthropic has it. It has an object of its own for capabilities, in other words."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int | None
    max_tokens: int | None
    can: Mapping[str, bool | None]


class OpenAiModels(TypedDict):
    """All models."""

    object: Literal["list"]
    data: list[OpenAiModel]


class AnthropicModels(TypedDict):
    """A page of models."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


class _Page(msgspec.Struct, frozen=True, kw_only=True):
    """For a request with `anthropic-version` alone."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=MOST_AT_ONCE)] = _USUAL_AT_ONCE
    after_id: str | None = None
    before_id: str | None = None


class _Mark(msgspec.Struct, frozen=True, kw_only=True):
    version: str | None = msgspec.field(default=None, name="anthropic-version")


class Catalogue(Protocol):
    """The models that may be asked for."""

    def models(self) -> Sequence[ModelEntry]:
        """All of them, ready or not, by name. No I/O."""
        ...


class Allowed(Protocol):
    """`gateway.router.Router.allowed` is it."""

    def __call__(self, model: str, policy: Policy, /) -> Collection[tuple[str, str]]:
        """Where a key of this policy may have a model of the catalogue: providers' ids and their names for it."""
        ...


def routes(*, catalogue: Catalogue, allowed: Allowed) -> list[Endpoint]:
    """The endpoints of this module."""
    apis = (MESSAGES, CHAT_COMPLETIONS)

    async def models(exchange: Exchange) -> web.StreamResponse:
        of_anthropic = spoken(apis, exchange.request.headers) is MESSAGES
        query = exchange.query(("limit", "after_id", "before_id") if of_anthropic else ())
        found = list(_served(catalogue.models(), allowed, exchange.caller.policy))
        return exchange.answer(_page(found, query) if of_anthropic else _openai_list(found))

    async def model(exchange: Exchange) -> web.StreamResponse:
        exchange.query(())
        name = "/".join(exchange.path_args.values())
        named = [entry for entry in catalogue.models() if entry.name == name]
        found = next(_served(named, allowed, exchange.caller.policy), None)
        if found is None:
            raise ModelNotFound(f"no model is called {name[:200]!r}: GET /v1/models lists what there is", param="model")
        of_anthropic = spoken(apis, exchange.request.headers) is MESSAGES
        return exchange.answer(_anthropic(found) if of_anthropic else _openai(found))

    listed = Operation(
        summary="List models",
        description="OpenAI's shape; with `anthropic-version` Anthropic's, in pages.",
        query=_Page,
        headers=_Mark,
        gives=(Content(type=OpenAiModels | AnthropicModels),),
    )
    looked_at = Operation(
        summary="A model, by its name, whose slashes need no escaping",
        headers=_Mark,
        gives=(Content(type=OpenAiModel | AnthropicModel),),
        errors=frozenset({Code.MODEL_NOT_FOUND}),
    )
    patterns = ("".join(f"/{{name{part}}}" for part in range(count)) for count in range(1, MOST_SEGMENTS + 1))
    return [
        Endpoint(method="GET", path="/v1/models", access=Access.ANY_KEY, handler=models, apis=apis, told=listed),
        *(
            Endpoint(
                method="GET",
                path=f"/v1/models{pattern}",
                access=Access.ANY_KEY,
                handler=model,
                apis=apis,
                told=looked_at,
            )
            for pattern in patterns
        ),
    ]


def _served(entries: Sequence[ModelEntry], allowed: Allowed, policy: Policy) -> Iterator[ModelEntry]:
    """Those that somebody is ready to serve to this key, each with the places where it may have it."""
    for entry in entries:
        places = allowed(entry.name, policy)
        mine = ModelEntry(name=entry.name, providers=tuple(p for p in entry.providers if (p.id, p.model) in places))
        if mine.first is not None:
            yield mine


def _place_of(entry: ModelEntry) -> tuple[_Place, Mapping[str, bool | None]]:
    """With what it can do."""
    first = entry.first
    assert first is not None
    place: _Place = {
        "context_window": first.context_window,
        "max_output_tokens": first.max_output_tokens,
        "prices": first.prices,
        "ready": True,
        "providers": plain(entry.providers),
    }
    return place, first.capabilities


def _openai_list(entries: Sequence[ModelEntry]) -> OpenAiModels:
    return {"object": "list", "data": [_openai(entry) for entry in entries]}


def _openai(entry: ModelEntry) -> OpenAiModel:
    # The first four are what OpenAI's clients insist on.
    place, capabilities = _place_of(entry)
    owner = "" if entry.first is None else entry.first.id
    return {
        "id": entry.name,
        "object": "model",
        "created": 0,
        "owned_by": owner,
        "capabilities": capabilities,
        **place,
    }


def _anthropic(entry: ModelEntry) -> AnthropicModel:
    place, capabilities = _place_of(entry)
    return {
        "type": "model",
        "id": entry.name,
        "display_name": entry.name,
        "created_at": _LONG_AGO,
        "max_input_tokens": place["context_window"],
        "max_tokens": place["max_output_tokens"],
        "can": capabilities,
        **place,
    }


def _page(entries: Sequence[ModelEntry], query: Mapping[str, str]) -> AnthropicModels:
    """A page, in Anthropic's words. Raises InvalidRequest."""
    limit = query.get("limit", str(_USUAL_AT_ONCE))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:6]) <= MOST_AT_ONCE):
        raise InvalidRequest(f"must be a whole number from 1 to {MOST_AT_ONCE}", param="limit")
    if "after_id" in query and "before_id" in query:
        raise InvalidRequest("not together with after_id", param="before_id")
    most, start, end = int(limit), 0, len(entries)
    if "after_id" in query:
        start = _place(entries, query, "after_id") + 1
    elif "before_id" in query:
        end = _place(entries, query, "before_id")
        start = max(0, end - most)
    page = entries[start:end][:most]
    more = start > 0 if "before_id" in query else start + len(page) < end
    return {
        "data": [_anthropic(entry) for entry in page],
        "has_more": more,
        "first_id": page[0].name if page else None,
        "last_id": page[-1].name if page else None,
    }


def _place(entries: Sequence[ModelEntry], query: Mapping[str, str], name: str) -> int:
    at = next((at for at, entry in enumerate(entries) if entry.name == query[name]), None)
    if at is None:
        raise InvalidRequest("is no id of a model", param=name)
    return at
