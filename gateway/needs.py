"""
What a request needs of whoever answers it, and how it reads without that.

Without this a picture is sent to a model that reads none: a round trip, a slot and an error in a provider's words,
where the next route would have done. What is not known of a route is not guessed here or anywhere: it is tried.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from adapters.chat import Audio, ChatRequest, Document, Image, Part


class Capability(enum.StrEnum):
    TOOLS = "tools"
    IMAGES = "images"
    #: Files to be read, such as PDF.
    DOCUMENTS = "documents"
    AUDIO = "audio"
    JSON_SCHEMA = "json_schema"
    #: JSON of no given shape.
    JSON_OBJECT = "json_object"
    #: To think, and as hard as the request says.
    REASONING = "reasoning"
    LOGPROBS = "logprobs"
    #: Several answers to one request.
    N = "n"


#: The part of a message that shows a need.
_PARTS: Final[Mapping[Capability, type[Part]]] = {
    Capability.IMAGES: Image,
    Capability.DOCUMENTS: Document,
    Capability.AUDIO: Audio,
}
#: The field that shows one of the others.
FIELD: Final[Mapping[Capability, str]] = {
    Capability.TOOLS: "tools",
    Capability.JSON_SCHEMA: "response_format",
    Capability.JSON_OBJECT: "response_format",
    Capability.REASONING: "reasoning_effort",
    Capability.LOGPROBS: "logprobs",
    Capability.N: "n",
}

#: What a request may lose and still be the same question: a parameter, not content.
_DROPPED_WITH: Final[Mapping[Capability, tuple[str, ...]]] = {
    Capability.REASONING: ("reasoning_effort", "reasoning_budget_tokens"),
    Capability.LOGPROBS: ("logprobs", "top_logprobs"),
}
DROPPABLE: Final = frozenset(_DROPPED_WITH)

#: Parameters that say how to answer and not what: each may be dropped where a provider has no word for it. What bounds
#: the cost, what the answer must look like and what is asked are not among them.
PARAMETERS: Final = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "reasoning_effort",
        "reasoning_budget_tokens",
        "verbosity",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "store",
        "metadata",
        "end_user",
        "parallel_tool_calls",
    }
)

#: All that may be dropped where a provider's protocol cannot say it, in the words of `omit`: parameters, marks on what
#: is said that are not what is said, and fields of one format that are about its provider's caches, its abuse
#: detection, its bills, or what more it could tell.
DROPPED_WORDS: Final = PARAMETERS | {
    "messages.cache",
    "messages.citations",
    "messages.detail",
    "messages.is_error",
    "messages.reasoning",
    "cache_control",
    "include",
    "labels",
    "prompt_cache_options",
    "user",
    "stream_options",
}

#: What the protocols call a parameter, where that is not our name.
_NATIVE_WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "reasoning_effort": ("reasoning", "thinking"),
    "reasoning_budget_tokens": ("reasoning", "thinking"),
    "end_user": ("user", "safety_identifier"),
}


def needs_of(chat: ChatRequest) -> frozenset[Capability]:
    """What the request needs, from its canonical form."""
    return frozenset(_needs(chat))


def field_of(chat: ChatRequest, capability: Capability) -> str:
    """The path of the first field that shows a need."""
    kind = _PARTS.get(capability)
    if kind is None:
        return FIELD[capability]
    return next(
        f"messages[{i}].content[{j}]"
        for i, message in enumerate(chat.messages)
        for j, part in enumerate(message.content)
        if isinstance(part, kind)
    )


def _needs(chat: ChatRequest) -> Iterator[Capability]:
    if chat.tools:
        yield Capability.TOOLS
    for message in chat.messages:
        for part in message.content:
            match part:
                case Image():
                    yield Capability.IMAGES
                case Document():
                    yield Capability.DOCUMENTS
                case Audio():
                    yield Capability.AUDIO
                case _:
                    pass
    if chat.response_format is not None:
        if chat.response_format.kind == "json_schema":
            yield Capability.JSON_SCHEMA
        elif chat.response_format.kind == "json_object":
            yield Capability.JSON_OBJECT
    if chat.reasoning_effort not in (None, "none") or (chat.reasoning_budget_tokens or 0) > 0:
        yield Capability.REASONING
    if chat.logprobs or chat.top_logprobs:
        yield Capability.LOGPROBS
    if (chat.n or 1) > 1:
        yield Capability.N


def lacking(chat: ChatRequest, cannot: frozenset[Capability]) -> tuple[ChatRequest, tuple[str, ...]]:
    """The request without the parameters that ask for what `cannot` be, and their names."""
    if not cannot & DROPPABLE:
        return chat, ()
    names = [
        name
        for capability in sorted(needs_of(chat) & cannot & DROPPABLE)
        for name in _DROPPED_WITH[capability]
        if getattr(chat, name) is not None
    ]
    return without(chat, names), tuple(names)


def without(chat: ChatRequest, names: list[str]) -> ChatRequest:
    """The request without these of its parameters, in its native form too."""
    if not names:
        return chat
    changes: dict[str, Any] = dict.fromkeys((name for name in names if name in PARAMETERS), None)
    if chat.native is not None:
        gone = {word for name in names for word in (name, *_NATIVE_WORDS.get(name, ()))}
        changes["native"] = msgspec.structs.replace(
            chat.native,
            fields={name: value for name, value in chat.native.fields.items() if name not in gone},
            unmapped=tuple(path for path in chat.native.unmapped if path not in gone),
        )
    return msgspec.structs.replace(chat, **changes)
