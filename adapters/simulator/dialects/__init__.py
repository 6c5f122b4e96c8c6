"""The protocols the simulated provider speaks, and at which paths: as their real providers lay them out."""

from __future__ import annotations

import re

from adapters.simulator.dialect import Dialect
from adapters.simulator.dialects.anthropic_messages import AnthropicMessages
from adapters.simulator.dialects.chat_completions import ChatCompletions
from adapters.simulator.dialects.gemini import Gemini
from adapters.simulator.dialects.responses import Responses
from adapters.simulator.dialects.workers_ai import WorkersAi

CHAT_COMPLETIONS: Dialect = ChatCompletions()
_GEMINI: Dialect = Gemini()
_WORKERS_AI: Dialect = WorkersAi()

_CALLS: tuple[tuple[re.Pattern[str], Dialect], ...] = (
    (re.compile(r"/v1/chat/completions"), CHAT_COMPLETIONS),
    (re.compile(r"/v1/responses"), Responses()),
    (re.compile(r"/v1/messages"), AnthropicMessages()),
    (re.compile(r"/v1beta/models/[^/]+:(?:g|streamG)enerateContent"), _GEMINI),
    (re.compile(r"/client/v4/accounts/[^/]+/ai/run/.+"), _WORKERS_AI),
)
_MODELS: tuple[tuple[re.Pattern[str], Dialect], ...] = (
    (re.compile(r"/v1/models"), CHAT_COMPLETIONS),
    (re.compile(r"/v1beta/models"), _GEMINI),
    (re.compile(r"/client/v4/accounts/[^/]+/ai/models/search"), _WORKERS_AI),
)


def of_call(path: str) -> Dialect | None:
    """Who is called by a POST to this path, without its query."""
    return next((dialect for pattern, dialect in _CALLS if pattern.fullmatch(path)), None)


def of_models(path: str) -> Dialect | None:
    """Whose list of models a GET of this path asks for."""
    return next((dialect for pattern, dialect in _MODELS if pattern.fullmatch(path)), None)
