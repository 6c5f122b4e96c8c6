"""
The other spellings of a path that clients in use have, and what is meant by one that is not served.

A client puts its paths behind the base URL that it was given, with or without `/v1`, as its vendor has it. Here one
table says which spellings are served. It only finds the endpoint: who may use that is the endpoint's own word, so no
spelling gets past it. Nothing else about a path is forgiven: what a proxy in front of the gateway might read otherwise
(`//`, `..`, other cases, encoded slashes) is not served, but is told what it may mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from gateway.rest.apis import CHAT_COMPLETIONS, MESSAGES, Api

#: The first segments of the vendors' APIs behind `/v1`.
ROOTS: Final = frozenset({"chat", "responses", "messages", "embeddings", "models", "files", "batches"})
#: What clients have instead of `/v1`, and who they are. The longest that fits is meant.
PREFIXES: Final[Mapping[str, str]] = {
    "/v1": "a slash at the end",
    "/v1/v1": "Anthropic's clients with a base URL that ends with /v1",
    "/openai/v1": "Azure's v1 API",
    "/openai": "Azure's clients, which send an api-version",
    "/anthropic/v1": "Anthropic's API as clouds and other gateways have it",
    "": "OpenAI's clients with a base URL without /v1",
}
_LONGEST_FIRST: Final = sorted(PREFIXES, key=len, reverse=True)
#: Azure's older paths have the deployment in them: it is the model.
_DEPLOYMENTS: Final = "/openai/deployments/"
_OF_A_DEPLOYMENT: Final = frozenset({"chat/completions", "embeddings"})
#: The name that the deployment has among the arguments of a path.
DEPLOYMENT: Final = "deployment"
#: Endpoints of the vendors that are not here, by the first segment behind `/v1`.
_ELSEWHERE: Final[Mapping[str, str]] = {
    "completions": "the old completions API is not served: ask for /v1/chat/completions",
    "complete": "the old completions API is not served: ask for /v1/messages",
    **dict.fromkeys(
        (
            "assistants",
            "audio",
            "conversations",
            "fine_tuning",
            "images",
            "moderations",
            "organizations",
            "realtime",
            "threads",
            "uploads",
            "vector_stores",
            "videos",
        ),
        "this API is not served here; docs/drop-in.md lists those that are",
    ),
}


class Meant(msgspec.Struct, frozen=True):
    """A path that is served, still percent-encoded, and the deployment that stood in it."""

    path: str
    deployment: str | None = None


def meant(raw_path: str) -> Meant | None:
    """What another spelling stands for. None: it is none of the table's."""
    path = raw_path.removesuffix("/")
    if path.startswith(_DEPLOYMENTS):
        deployment, _, rest = path.removeprefix(_DEPLOYMENTS).partition("/")
        return Meant(f"/v1/{rest}", deployment) if deployment and rest in _OF_A_DEPLOYMENT else None
    for prefix in _LONGEST_FIRST:
        if path.startswith(f"{prefix}/"):
            rest = path[len(prefix) + 1 :]
            return Meant(f"/v1/{rest}") if rest.partition("/")[0] in ROOTS else None
    return None


def plainer(raw_path: str) -> str:
    """A path without what may have come in by mistake: slashes that are there twice, capital letters."""
    return "/" + "/".join(segment for segment in raw_path.lower().split("/") if segment)


def elsewhere(raw_path: str) -> str | None:
    """Why an API of these vendors is not here."""
    segments = [segment for segment in raw_path.split("/") if segment]
    rest = segments[1:] if segments[:1] == ["v1"] else segments
    return _ELSEWHERE.get(rest[0]) if rest else None


def api_of(raw_path: str, headers: Mapping[str, str]) -> Api | None:
    """In whose words a path that is not served is refused. None: in ours."""
    if MESSAGES.mark in headers:
        return MESSAGES
    found = meant(plainer(raw_path))
    if found is None:
        return CHAT_COMPLETIONS if elsewhere(raw_path) else None
    return MESSAGES if found.path.startswith("/v1/messages") else CHAT_COMPLETIONS
