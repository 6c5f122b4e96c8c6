"""The same as most others send it who speak Chat Completions: events that differ in their text alone."""

from __future__ import annotations

from functools import partial

from tests.benchmarks.streams import chat_completions

PROTOCOL = "chat_completions"

stream = partial(chat_completions.stream, padded=False)
