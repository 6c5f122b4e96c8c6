"""The protocols the simulated provider speaks, and at which paths: as their real providers lay them out."""

from __future__ import annotations

import re
from collections.abc import Mapping

from adapters.simulator.dialect import Dialect
from adapters.simulator.dialects.anthropic_messages import AnthropicMessages
from adapters.simulator.dialects.chat_completions import ChatCompletions
from adapters.simulator.dialects.counting import CountTokens
from adapters.simulator.dialects.embeddings import Embeddings, GeminiEmbeddings, WorkersEmbeddings
from adapters.simulator.dialects.gemini import Gemini
from adapters.simulator.dialects.responses import Responses
from adapters.simulator.dialects.workers_ai import WorkersAi

BY_NAME: Mapping[str, Dialect] = {
    "chat_completions": ChatCompletions(),
    "responses": Responses(),
    "anthropic_messages": AnthropicMessages(),
    "gemini": Gemini(),
    "workers_ai": WorkersAi(),
}
CHAT_COMPLETIONS = BY_NAME["chat_completions"]

_CALLS: tuple[tuple[re.Pattern[str], Dialect], ...] = (
    (re.compile(r"/v1/chat/completions"), CHAT_COMPLETIONS),
    (re.compile(r"/v1/embeddings"), Embeddings()),
    (re.compile(r"/v1/responses"), BY_NAME["responses"]),
    (re.compile(r"/v1/messages"), BY_NAME["anthropic_messages"]),
    (re.compile(r"/v1/messages/count_tokens"), CountTokens()),
    (re.compile(r"/v1beta/models/[^/]+:(?:embedContent|batchEmbedContents)"), GeminiEmbeddings()),
    (re.compile(r"/v1beta/models/[^/]+:(?:g|streamG)enerateContent"), BY_NAME["gemini"]),
    (re.compile(r"/client/v4/accounts/[^/]+/ai/run/.+"), WorkersEmbeddings()),
)
_MODELS: tuple[tuple[re.Pattern[str], Dialect], ...] = (
    (re.compile(r"/v1/models"), CHAT_COMPLETIONS),
    (re.compile(r"/v1beta/models"), BY_NAME["gemini"]),
    (re.compile(r"/client/v4/accounts/[^/]+/ai/models/search"), BY_NAME["workers_ai"]),
)


def of_call(path: str) -> Dialect | None:
    """Who is called by a POST to this path, without its query."""
    return next((dialect for pattern, dialect in _CALLS if pattern.fullmatch(path)), None)


def of_models(path: str) -> Dialect | None:
    """Whose list of models a GET of this path asks for."""
    return next((dialect for pattern, dialect in _MODELS if pattern.fullmatch(path)), None)
