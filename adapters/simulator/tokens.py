"""
The simulated provider's tokens, by a rule simple enough that a test can count them again.

- A token is one run of letters, digits and underscores, or one single other character, together with the white space
  before it. White space at the very end is a token of its own. Every character belongs to exactly one token.
- A prompt costs 3, plus for each message 3, the tokens of its role, of its text, of its `name`, and of the name and
  arguments of each of its tool calls; plus 85 for each part that is not text; plus for each tool 3, the tokens of its
  name and of its description, and one for each property of its parameters.
- An answer costs one for each token of its text, reasoning or refusal, and for each tool call one for its name and the
  tokens of its arguments; summed over all choices.
"""

from __future__ import annotations

import re

from adapters.simulator.requests import Request

_TOKEN = re.compile(r"\s*(?:\w+|[^\w\s])|\s+")

_PER_PROMPT = 3
_PER_MESSAGE = 3
_PER_TOOL = 3
#: What a small image costs where vendors count one in tokens.
_PER_OTHER_PART = 85


def split(text: str) -> list[str]:
    """The tokens of a text. Joined, they are the text."""
    return _TOKEN.findall(text)


def count(text: str) -> int:
    return len(_TOKEN.findall(text))


def prompt(request: Request) -> int:
    """What the request's input costs."""
    total = _PER_PROMPT
    for message in request.messages:
        total += _PER_MESSAGE + count(message.role) + count(message.text) + _PER_OTHER_PART * message.other_parts
        if message.name:
            total += count(message.name)
        for call in message.tool_calls or ():
            total += count(call.function.name) + count(call.function.arguments)
    for tool in request.tools or ():
        function = tool.function
        total += _PER_TOOL + count(function.name) + count(function.description or "")
        properties = (function.parameters or {}).get("properties")
        total += len(properties) if isinstance(properties, dict) else 0
    return total
