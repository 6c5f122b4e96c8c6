"""
Requests of Responses to a provider: a caller's own fields, where it speaks this protocol, or the canonical form.

Decisions, for a request that came in another protocol:

- `store` is sent as false unless the caller asked for more: this protocol keeps every exchange by default, and nothing
  is kept at a provider unasked. A caller of this protocol knows that default and keeps it.
- What a model thought then comes back only as `encrypted_content`, which is asked for by `include` where the endpoint
  is marked as one that takes an effort, or the request itself asks for reasoning or brings some back. It cannot be
  asked for always: a model that does not reason refuses it (https://github.com/pydantic/pydantic-ai/issues/2865).
- What `messages.reasoning` omits is reasoning that cannot be this provider's own: in a caller's own items that of
  another provider, which we once gave a name; in the canonical form, where that is not known, all of it.
- A function is sent with `strict: false` unless the caller said so: left out it means true here, and false elsewhere.
- The first system message, where it is one text, becomes `instructions`; the others stay where they are.
"""

from __future__ import annotations

import mimetypes
from typing import Any, cast

import msgspec

from adapters import signatures
from adapters.body import to_data_url
from adapters.chat import (
    Audio,
    ChatRequest,
    Document,
    Image,
    Message,
    NativeRequest,
    Opaque,
    Part,
    Reasoning,
    ResponseFormat,
    Role,
    Text,
    Tool,
    ToolChoice,
)
from adapters.contract import HttpRequest, UpstreamCall
from adapters.protocols.responses.answers import MADE_THOUGHT, NAME
from adapters.protocols.responses.requests import ENCRYPTED, LOGPROBS, WORDS
from adapters.reasoning import effort_of
from adapters.sending import Sending

_PATH = "/responses"

#: Top-level fields that are ours to write.
_ENVELOPE = frozenset({"model", "stream", "stream_options"})
#: Fields of an item into which a server takes reasoning as plain text.
_TEXTS = frozenset({"content", "summary"})
#: Canonical fields this API has no word for.
_UNKNOWN = ("top_k", "stop", "seed", "n", "presence_penalty", "frequency_penalty", "logit_bias")


def render_request(call: UpstreamCall, *, stream: bool) -> HttpRequest:
    """Raises `RequestNotExpressible` for what this protocol, or this endpoint, has no word for."""
    endpoint, request = call.endpoint, call.request
    native = request.native
    sending = Sending(call, NAME, WORDS)
    if native is not None and native.protocol == NAME:
        if "background" in native.unmapped and "background" not in endpoint.omit:
            raise sending.refusal("background", "an answer is waited for, and none comes of this")
        fields = _native_fields(request, native, sending)
    else:
        fields = _Writer(request, sending).fields()
    fields.pop("stream", None)
    if not stream:
        fields.pop("stream_options", None)
    fields["model"] = call.model
    if stream:
        fields["stream"] = True
    sending.as_profiled(fields)
    return sending.post(_PATH, fields, stream=stream)


def _native_fields(request: ChatRequest, native: NativeRequest, sending: Sending) -> dict[str, Any]:
    """The caller's own, but for what the profile says of this provider."""
    fields: dict[str, Any] = dict(native.fields)
    endpoint = sending.endpoint
    if endpoint.reasoning == "off" and "reasoning" in fields:
        del fields["reasoning"]
        sending.lost("reasoning")
    without_cache = "messages.cache" in endpoint.omit and _has_cache(request)
    without_reasoning = "messages.reasoning" in endpoint.omit and _has_reasoning(request)
    without_foreign = any(_has_foreign(message) for message in request.messages)
    if without_cache or without_reasoning or without_foreign:
        items = msgspec.json.decode(fields["input"])
        if without_cache:
            _strip_cache(items, sending)
        if without_reasoning or without_foreign:
            items = _without_foreign(items, sending, omitted=without_reasoning)
        fields["input"] = items
    return fields


def _has_cache(request: ChatRequest) -> bool:
    return any(
        not isinstance(part, Audio | Opaque) and part.cache is not None
        for message in request.messages
        for part in message.content
    )


def _has_reasoning(request: ChatRequest) -> bool:
    return any(
        message.reasoning or any(call.signature is not None for call in message.tool_calls)
        for message in request.messages
    )


def _has_foreign(message: Message) -> bool:
    """What a provider of another protocol signed, or thought without a signature: no name for it is left then."""
    return any(
        signatures.is_foreign(NAME, thought.signature) or (thought.signature is None and thought.id is None)
        for thought in message.reasoning
    ) or any(call.signature is not None for call in message.tool_calls)


def _without_foreign(items: list[dict[str, Any]], sending: Sending, *, omitted: bool) -> list[dict[str, Any]]:
    """
    The items without what a provider of another protocol thought and signed. What one of this protocol thought, it has
    signed or has a name for; a caller's own text without either goes to a server that may know it, unless it is
    `omitted`.
    """
    texts = not omitted and sending.endpoint.reasoning_field in _TEXTS
    kept = []
    for i, item in enumerate(items):
        if item.get("type") == "function_call" and item.pop("signature", None) is not None:
            sending.drop_own(f"input[{i}].signature")
        if item.get("type") == "reasoning":
            signature, item_id = signatures.heard(NAME, item.get("encrypted_content")), item.get("id")
            foreign = signatures.is_foreign(NAME, signature)
            unknown = item_id.startswith(MADE_THOUGHT) if item_id else omitted and signature is None
            if (foreign or unknown) and not (texts and (item.get("summary") or item.get("content"))):
                sending.drop_own(f"input[{i}]")
                continue
            if foreign:
                del item["encrypted_content"]
                sending.drop_own(f"input[{i}].encrypted_content")
        kept.append(item)
    return kept


def _strip_cache(items: list[dict[str, Any]], sending: Sending) -> None:
    for i, item in enumerate(items):
        for field in ("content", "output"):
            parts = item.get(field)
            for j, part in enumerate(parts if isinstance(parts, list) else ()):
                if isinstance(part, dict) and part.pop("prompt_cache_breakpoint", None) is not None:
                    sending.drop_own(f"input[{i}].{field}[{j}].prompt_cache_breakpoint")


class _Writer:
    """One canonical request in this protocol's words."""

    def __init__(self, request: ChatRequest, sending: Sending) -> None:
        self._request = request
        self._sending = sending
        self._endpoint = sending.endpoint

    def _refuse(self, path: str, reason: str, word: str | None = None) -> None:
        self._sending.refuse(path, reason, word)

    def _asked(self, name: str, value: Any) -> Any:
        """A field by its canonical name: None where the endpoint omits it, and does not force it by that name."""
        if value is None or not self._sending.omits(name) or name in self._endpoint.force:
            return value
        self._sending.drop(name)
        return None

    def fields(self) -> dict[str, Any]:
        request = self._request
        self._sending.refuse_unmapped()
        self._sending.refuse_unknown(_UNKNOWN)
        instructions, first = self._instructions()
        logprobs = self._asked("logprobs", request.logprobs)
        reasoning = self._reasoning()
        store = self._asked("store", request.store)
        fields: dict[str, Any] = {
            "instructions": instructions,
            "input": [
                item
                for i, message in enumerate(request.messages[first:], first)
                for item in self._items(message, f"messages[{i}]")
            ],
            "tools": [self._tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)] or None,
            "tool_choice": _render_tool_choice(self._asked("tool_choice", request.tool_choice)),
            "parallel_tool_calls": self._asked("parallel_tool_calls", request.parallel_tool_calls),
            "text": self._text(),
            "max_output_tokens": self._asked("max_output_tokens", request.max_output_tokens),
            "temperature": self._asked("temperature", request.temperature),
            "top_p": self._asked("top_p", request.top_p),
            "top_logprobs": self._asked("top_logprobs", request.top_logprobs),
            "reasoning": reasoning,
            "service_tier": self._asked("service_tier", request.service_tier),
            "prompt_cache_key": self._asked("prompt_cache_key", request.prompt_cache_key),
            "prompt_cache_retention": self._asked("prompt_cache_retention", request.prompt_cache_retention),
            "metadata": self._asked("metadata", request.metadata),
            "safety_identifier": self._asked("end_user", request.end_user),
            "include": self._include(logprobs=logprobs is True, stored=store is True),
        }
        fields = {name: value for name, value in fields.items() if value is not None}
        if "store" not in self._endpoint.omit:
            fields["store"] = store is True
        self._sending.add_extra(fields, _ENVELOPE)
        return fields

    def _instructions(self) -> tuple[str | None, int]:
        """The leading system message where it is one plain text, and the number of the first message after it."""
        match self._request.messages:
            case (Message(role=Role.SYSTEM, content=(Text(text=text, cache=None),), name=None), _, *_) if text:
                return text, 1
            case _:
                return None, 0

    def _reasoning(self) -> dict[str, str] | None:
        effort = self._asked("reasoning_effort", self._sending.effort)
        budget = self._asked("reasoning_budget_tokens", self._request.reasoning_budget_tokens)
        if self._endpoint.reasoning == "off":
            for name, value in (("reasoning_effort", effort), ("reasoning_budget_tokens", budget)):
                if value is not None:
                    self._sending.drop(name)
            return None
        if effort is None and budget is not None:
            effort = effort_of(budget)
        return None if effort is None else {"effort": effort}

    def _include(self, *, logprobs: bool, stored: bool) -> list[str] | None:
        include = [LOGPROBS] if logprobs else []
        request, mode = self._request, self._endpoint.reasoning
        reasons = (
            mode == "effort"
            or request.reasoning_effort not in {None, "none"}
            or bool(request.reasoning_budget_tokens)
            or (any(m.reasoning for m in request.messages) and "messages.reasoning" not in self._endpoint.omit)
        )
        if reasons and mode != "off" and not stored:
            include.append(ENCRYPTED)
        return include or None

    def _text(self) -> dict[str, Any] | None:
        text: dict[str, Any] = {}
        wanted = self._asked("response_format", self._request.response_format)
        if wanted is not None:
            text["format"] = _render_format(wanted)
        verbosity = self._asked("verbosity", self._request.verbosity)
        if verbosity is not None:
            text["verbosity"] = verbosity
        return text or None

    def _tool(self, tool: Tool, path: str) -> dict[str, Any]:
        if tool.cache is not None:
            self._refuse(f"{path}.cache", "has no cache boundary after a tool", "messages.cache")
        function = {
            "type": "function",
            "name": tool.name,
            "parameters": tool.parameters if tool.parameters is not None else {"type": "object", "properties": {}},
            "strict": tool.strict is True,
        }
        return function if tool.description is None else {**function, "description": tool.description}

    # ------------------------------------------------------------ messages

    def _items(self, message: Message, path: str) -> list[Any]:
        if message.name is not None and message.role is not Role.TOOL:
            self._refuse(f"{path}.name", "has no names of speakers", "messages.name")
        if message.is_error:
            message = self._sending.failure_told(message, path)
        match message.role:
            case Role.ASSISTANT:
                return self._assistant(message, path)
            case Role.TOOL:
                output = self._content(message, path, "input_text")
                return [{"type": "function_call_output", "call_id": message.tool_call_id or "", "output": output}]
            case role:
                return [{"type": "message", "role": str(role), "content": self._content(message, path, "input_text")}]

    def _assistant(self, message: Message, path: str) -> list[Any]:
        items: list[Any] = []
        texts, stored = self._endpoint.reasoning_field in _TEXTS, self._request.store is True
        for i, thought in self._sending.thoughts(message, path, signed=True, unsigned=texts or stored):
            if thought.signature is None and not texts and thought.id is None:
                self._sending.drop(f"{path}.reasoning[{i}]")
            else:
                items.append(self._thought(thought))
        content = self._content(message, path, "output_text")
        if message.refusal is not None:
            parts = [{"type": "output_text", "text": content}] if isinstance(content, str) and content else content
            content = [*(parts or ()), {"type": "refusal", "refusal": message.refusal}]
        if content:
            items.append({"type": "message", "role": "assistant", "content": content})
        for i, call in enumerate(message.tool_calls):
            if call.signature is not None:
                # A proof for its own provider, and no other one misses it.
                self._sending.drop(f"{path}.tool_calls[{i}].signature")
            items.append({"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments})
        return items

    def _thought(self, thought: Reasoning) -> dict[str, Any]:
        """
        A provider takes back what it can prove to be its own: a block with its signature, or one that it has stored.
        Servers that take plain text say so by `reasoning_field`: the name of the item's field it goes into.
        """
        field = self._endpoint.reasoning_field
        item: dict[str, Any] = {"type": "reasoning", "summary": []}
        if thought.id is not None:
            item["id"] = thought.id
        if (signature := signatures.own(NAME, thought.signature)) is not None:
            item["encrypted_content"] = signature
        if field == "content" and not thought.redacted:
            return {**item, "content": [{"type": "reasoning_text", "text": thought.text}]}
        if not thought.redacted:
            item["summary"] = [{"type": "summary_text", "text": thought.text}]
        return item

    def _content(self, message: Message, path: str, text_type: str) -> str | list[Any]:
        match message.content:
            case ():
                return ""
            case (Text(text=text, cache=None),):
                return text
            case parts:
                return [self._part(message, part, f"{path}.content[{i}]", text_type) for i, part in enumerate(parts)]

    def _part(self, message: Message, part: Part, path: str, text_type: str) -> Any:
        if isinstance(part, Opaque):
            if part.protocol != NAME:
                raise self._sending.refusal(path, f"a part that only {part.protocol} knows")
            return part.raw
        if message.role not in {Role.USER, Role.TOOL} and not isinstance(part, Text):
            raise self._sending.refusal(path, f"{NAME} takes only text from {message.role}")
        if isinstance(part, Audio):
            raise self._sending.refusal(path, f"{NAME} takes no sound")
        rendered = _render_part(part, text_type)
        if part.cache is not None:
            if "messages.cache" in self._endpoint.omit or text_type == "output_text":
                self._refuse(f"{path}.cache", "has cache boundaries in input only", "messages.cache")
            else:
                rendered["prompt_cache_breakpoint"] = {
                    "mode": "explicit",
                    "ttl": "30m" if part.cache == "5m" else "12h",
                }
        return rendered


def _render_part(part: Text | Image | Document, text_type: str) -> dict[str, Any]:
    match part:
        case Text():
            return {"type": text_type, "text": part.text}
        case Image():
            url = part.url if part.url is not None else to_data_url(part.media_type or "image/png", part.data or b"")
            return {"type": "input_image", "image_url": url, "detail": part.detail or "auto"}
        case Document():
            return {"type": "input_file", **_render_file(part)}


def _render_file(part: Document) -> dict[str, str]:
    if part.file_id is not None:
        return {"file_id": part.file_id}
    if part.data is None:
        return {"file_url": part.url or ""}
    media_type = part.media_type or "application/pdf"
    # Data without a name is refused there.
    name = part.filename or f"document{mimetypes.guess_extension(media_type) or ''}"
    return {"filename": name, "file_data": to_data_url(media_type, part.data)}


def _render_tool_choice(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.mode == "tool":
        return {"type": "function", "name": cast("str", choice.tool)}
    return choice.mode


def _render_format(wanted: ResponseFormat) -> dict[str, Any]:
    if wanted.kind != "json_schema":
        return {"type": wanted.kind}
    inner = {
        "type": wanted.kind,
        "name": wanted.name or "response",
        "description": wanted.description,
        "schema": wanted.schema if wanted.schema is not None else {},
        "strict": wanted.strict,
    }
    return {name: value for name, value in inner.items() if value is not None}
