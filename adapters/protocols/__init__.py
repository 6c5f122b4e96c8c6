"""The wire protocols, each in a module of its own that knows no other. `PROTOCOLS` finds one by its name."""

from __future__ import annotations

from collections.abc import Mapping

from adapters.contract import WireProtocol
from adapters.protocols.anthropic_messages import AnthropicMessages
from adapters.protocols.chat_completions import ChatCompletions
from adapters.protocols.gemini import Gemini
from adapters.protocols.responses import Responses
from adapters.protocols.workers_ai import WorkersAI

PROTOCOLS: Mapping[str, WireProtocol] = {
    protocol.name: protocol for protocol in (ChatCompletions(), AnthropicMessages(), Responses(), Gemini(), WorkersAI())
}
