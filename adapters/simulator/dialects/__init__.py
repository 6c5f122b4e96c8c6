"""The protocols the simulated provider speaks, and at which paths: as their real providers lay them out."""

from __future__ import annotations

import re

from adapters.simulator.dialect import Dialect
from adapters.simulator.dialects.chat_completions import ChatCompletions

CHAT_COMPLETIONS: Dialect = ChatCompletions()

_CALLS: tuple[tuple[re.Pattern[str], Dialect], ...] = ((re.compile(r"/v1/chat/completions"), CHAT_COMPLETIONS),)
_MODELS: tuple[tuple[re.Pattern[str], Dialect], ...] = ((re.compile(r"/v1/models"), CHAT_COMPLETIONS),)


def of_call(path: str) -> Dialect | None:
    """Who is called by a POST to this path, without its query."""
    return next((dialect for pattern, dialect in _CALLS if pattern.fullmatch(path)), None)


def of_models(path: str) -> Dialect | None:
    """Whose list of models a GET of this path asks for."""
    return next((dialect for pattern, dialect in _MODELS if pattern.fullmatch(path)), None)
