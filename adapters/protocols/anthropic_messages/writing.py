"""
Requests of the Messages API to a provider.

A native one goes on as it came, but for the model, `stream`, and what the profile says. From the canonical form, these
choices are made:

System and developer messages that lead are the top-level `system`. One in the midst of the conversation stays where it
is, with the role `system`, where this API lets it stand: right after what a user said or a tool gave, and with nothing
or an answer of the model behind it. Elsewhere it is refused. Not every model takes that role, and which do is the
profile's to know: where the endpoint's `omit` names "messages.place", the text goes to the end of `system` instead,
and the place that was lost is told as dropped.
https://platform.claude.com/docs/en/build-with-claude/mid-conversation-system-messages

Reasoning is asked for in this API's present words, `thinking: adaptive` with `output_config.effort`, or, where a budget
of tokens was asked for, with `thinking.budget_tokens`, which the newer models refuse: a profile says which of the two
its models take. A budget is part of the output limit here, so one that the caller gave must be below the limit it gave;
one that we made of an effort is made to leave half of that limit for the answer; and where the limit is ours, the
budget comes on top of it. https://platform.claude.com/docs/en/build-with-claude/extended-thinking
"""

from __future__ import annotations

import base64
from typing import Any, assert_never

import msgspec

from adapters import signatures
from adapters.body import given
from adapters.chat import (
    Audio,
    Document,
    Image,
    Message,
    Opaque,
    Part,
    Role,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
)
from adapters.contract import Endpoint, HttpRequest, UpstreamCall
from adapters.protocols.anthropic_messages.answers import NAME, object_of
from adapters.protocols.anthropic_messages.requests import WORDS
from adapters.reasoning import effort_of
from adapters.sending import Sending

_PATH = "/messages"
_COUNT_PATH = "/messages/count_tokens"
#: The next one, 2026-10-21, only takes away: `temperature`, `top_p` and `top_k`, which older models still know. A
#: profile may have it in its headers, with these three in `omit`. https://platform.claude.com/docs/en/api/versioning
_VERSION = "2023-06-01"

#: Output tokens where neither the caller nor the profile says how many, since this API must be told: as many as every
#: model still offered can give. What a budget of reasoning takes comes on top.
DEFAULT_MAX_TOKENS = 8192
#: https://platform.claude.com/docs/en/build-with-claude/extended-thinking
_LEAST_BUDGET = 1024
#: https://platform.claude.com/docs/en/build-with-claude/effort
_EFFORTS = ("low", "medium", "high", "xhigh", "max")

#: Top-level fields that are ours to write.
_ENVELOPE = frozenset({"model", "stream"})
#: What a request to count tokens may hold. https://platform.claude.com/docs/en/api/messages-count-tokens
_COUNTED = frozenset(
    {"model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "cache_control", "speed"}
)

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def render_request(call: UpstreamCall, *, stream: bool) -> HttpRequest:
    """Raises `RequestNotExpressible` for what this protocol, or this endpoint, has no word for."""
    sending = Sending(call, NAME, WORDS)
    fields = _rendered(call, sending)
    if stream:
        fields["stream"] = True
    sending.as_profiled(fields)
    return _http(_PATH, fields, sending, stream=stream)


def render_count(call: UpstreamCall) -> HttpRequest:
    """
    How many input tokens the request has, asked of the provider, for nothing. Raises `RequestNotExpressible`.
    https://platform.claude.com/docs/en/api/messages-count-tokens
    """
    sending = Sending(call, NAME, WORDS)
    fields = _counted(_rendered(call, sending))
    sending.as_profiled(fields)
    return _http(_COUNT_PATH, _counted(fields), sending, stream=False)


def _counted(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name in _COUNTED}


def _http(path: str, fields: dict[str, Any], sending: Sending, *, stream: bool) -> HttpRequest:
    told = any(name.lower() == "anthropic-version" for name in sending.endpoint.headers)
    return sending.post(path, fields, stream=stream, headers={} if told else {"anthropic-version": _VERSION})


def _rendered(call: UpstreamCall, sending: Sending) -> dict[str, Any]:
    native = call.request.native
    fields: dict[str, Any]
    if native is not None and native.protocol == NAME:
        fields = dict(native.fields)
        fields.pop("stream", None)
        if call.endpoint.reasoning == "off":
            _switch_off(fields, sending)
        omits = sending.omits("messages.reasoning")
        if any(_holds_foreign(m) or (omits and m.reasoning) for m in call.request.messages):
            fields["messages"] = _unsigned(msgspec.json.decode(fields["messages"]), sending)
        if "max_tokens" not in fields or bytes(fields["max_tokens"]) == b"null":
            budget = call.request.reasoning_budget_tokens or 0
            fields["max_tokens"] = _default_max_tokens(call.endpoint) + budget
    else:
        fields = _Rendering(call, sending).fields()
    return {"model": call.model, **{name: value for name, value in fields.items() if name != "model"}}


def _holds_foreign(message: Message) -> bool:
    """Something that no provider of this protocol signed. None signs a call."""
    return any(t.signature is None or signatures.is_foreign(NAME, t.signature) for t in message.reasoning) or any(
        call.signature is not None for call in message.tool_calls
    )


def _unsigned(messages: list[dict[str, Any]], sending: Sending) -> list[dict[str, Any]]:
    """The caller's messages without the thoughts of a provider of another protocol, or without any."""
    omits = sending.omits("messages.reasoning")
    kept = []
    for i, message in enumerate(messages):
        content = message["content"]
        if isinstance(content, list):
            foreign = [
                j for j, block in enumerate(content) if _is_foreign(block) or (omits and block["type"] in _SIGNED_IN)
            ]
            for j in foreign:
                sending.drop_own(f"messages[{i}].content[{j}]")
            message["content"] = [block for j, block in enumerate(content) if j not in foreign]
            if foreign and not message["content"]:
                continue
        kept.append(message)
    return kept


#: The field of the signature, of each kind of block that is a thought.
_SIGNED_IN = {"thinking": "signature", "redacted_thinking": "data"}


def _is_foreign(block: dict[str, Any]) -> bool:
    """A thought that no provider of this protocol signed: it would refuse the whole request for it."""
    field = _SIGNED_IN.get(block["type"])
    if field is None:
        return False
    signature = signatures.heard(NAME, block.get(field))
    return signature is None or signatures.is_foreign(NAME, signature)


def _switch_off(fields: dict[str, Any], sending: Sending) -> None:
    """The profile asks for no reasoning: what a request of this protocol says of it."""
    thinking = given(fields["thinking"]) if "thinking" in fields else None
    if thinking is not None and _fields.decode(thinking).get("type") != msgspec.Raw(b'"disabled"'):
        sending.drop_own("thinking")
    fields["thinking"] = {"type": "disabled"}


def _default_max_tokens(endpoint: Endpoint) -> int:
    return endpoint.default_max_tokens if endpoint.default_max_tokens is not None else DEFAULT_MAX_TOKENS


#: Canonical fields this API has no word for.
_UNSAYABLE = (
    "seed",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "verbosity",
    "prompt_cache_key",
    "prompt_cache_retention",
    "store",
    "metadata",
)
_TIERS = {"auto": "auto", "default": "standard_only", "standard_only": "standard_only"}


class _Rendering:
    """One request from its canonical form. What an endpoint's `omit` names is dropped and noted, all else refused."""

    def __init__(self, call: UpstreamCall, sending: Sending) -> None:
        self._request = call.request
        self._endpoint = call.endpoint
        self._sending = sending

    def fields(self) -> dict[str, Any]:
        request = self._request
        self._sending.refuse_unmapped()
        self._sending.refuse_unknown(_UNSAYABLE)
        temperature = request.temperature
        if temperature is not None and not 0 <= temperature <= 1:
            self._sending.refuse("temperature", "takes 0 to 1")
            temperature = None
        system, messages = self._messages()
        thinking, effort, limit = self._reasoning()
        output = {"effort": effort, "format": self._format()}
        rendered: dict[str, Any] = {
            "max_tokens": limit,
            "system": system,
            "messages": messages,
            "tools": [_render_tool(tool, f"tools[{i}]", self._sending) for i, tool in enumerate(request.tools)] or None,
            "tool_choice": self._tool_choice(),
            "thinking": thinking,
            "output_config": {name: value for name, value in output.items() if value is not None} or None,
            "temperature": temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "stop_sequences": list(request.stop) or None,
            "service_tier": self._service_tier(),
            "metadata": {"user_id": request.end_user} if request.end_user is not None else None,
        }
        fields = {name: value for name, value in rendered.items() if value is not None}
        self._sending.add_extra(fields, _ENVELOPE)
        return fields

    # ---------------------------------------------------------- conversation

    def _messages(self) -> tuple[str | list[Any] | None, list[dict[str, Any]]]:
        """The system prompt, and the turns: what one side says in a row is one turn."""
        system: list[dict[str, Any]] = []
        turns: list[tuple[str, int, list[Any]]] = []
        for i, message in enumerate(self._request.messages):
            path = f"messages[{i}]"
            if message.name is not None and message.role is not Role.TOOL:  # a result's is the call's
                self._sending.refuse(f"{path}.name", "knows no names of speakers", "messages.name")
            blocks = self._blocks(message, path)
            if message.role in {Role.SYSTEM, Role.DEVELOPER}:
                if not turns:
                    system += blocks
                    continue
                role = "system"
            else:
                role = "assistant" if message.role is Role.ASSISTANT else "user"
            if not blocks:
                continue
            if turns and turns[-1][0] == role:
                turns[-1][2].extend(blocks)
            else:
                turns.append((role, i, blocks))
        messages: list[dict[str, Any]] = []
        for number, (role, i, blocks) in enumerate(turns):
            if role == "system" and ("messages.place" in self._endpoint.omit or not _may_stand(turns, number)):
                self._sending.refuse(f"messages[{i}]", "takes no system message in this place", "messages.place")
                system += blocks
            elif messages and messages[-1]["role"] == role:
                messages[-1]["content"].extend(blocks)
            else:
                messages.append({"role": role, "content": blocks})
        if not messages:
            raise self._sending.refusal("messages", f"{NAME} needs a message that is not the system's")
        for turn in messages:
            turn["content"] = _plain(turn["content"])
        return (_plain(system) if system else None), messages

    def _blocks(self, message: Message, path: str) -> list[Any]:
        """A text without a letter is refused by this API, and says nothing."""
        blocks = self._thoughts(message, path)
        content = [self._part(part, f"{path}.content[{j}]") for j, part in enumerate(message.content)]
        if message.role is Role.TOOL:
            return [self._result(message, content, path)]
        if message.role is not Role.USER:
            self._sending.refuse_all_but_text(message, path)
        blocks += [
            block
            for part, block in zip(message.content, content, strict=True)
            if not isinstance(part, Text) or part.text
        ]
        if message.refusal:
            blocks.append({"type": "text", "text": message.refusal})
        return blocks + [self._call(call, f"{path}.tool_calls[{j}]") for j, call in enumerate(message.tool_calls)]

    def _thoughts(self, message: Message, path: str) -> list[Any]:
        told = []
        for _, thought in self._sending.thoughts(message, path, signed=True):
            signature = signatures.own(NAME, thought.signature)
            if thought.redacted:
                told.append({"type": "redacted_thinking", "data": signature})
            else:
                told.append({"type": "thinking", "thinking": thought.text, "signature": signature})
        return told

    def _result(self, message: Message, content: list[Any], path: str) -> dict[str, Any]:
        if message.tool_call_id is None:
            raise self._sending.refusal(f"{path}.tool_call_id", "a result names its call")
        result: dict[str, Any] = {"type": "tool_result", "tool_use_id": message.tool_call_id}
        if len(content) == 1 and isinstance(message.content[0], Text):
            # A boundary after the one text is one after the result; an empty text may have none of its own.
            inner = content[0]
            result["content"] = inner["text"]
            result |= {"cache_control": inner["cache_control"]} if "cache_control" in inner else {}
        elif content:
            result["content"] = content
        if message.is_error:
            if self._sending.omits("messages.is_error"):
                self._sending.drop(f"{path}.is_error")
            else:
                result["is_error"] = True
        return result

    def _call(self, call: ToolCall, path: str) -> dict[str, Any]:
        arguments = object_of(call.arguments)
        if arguments is None:
            raise self._sending.refusal(f"{path}.arguments", f"{NAME} takes arguments that are a JSON object")
        if call.signature is not None:
            # A proof for its own provider, and no other one misses it.
            self._sending.drop(f"{path}.signature")
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}

    def _part(self, part: Part, path: str) -> Any:
        match part:
            case Text():
                block: dict[str, Any] = {"type": "text", "text": part.text}
            case Image():
                block = {"type": "image", "source": self._image_source(part, path)}
            case Document():
                block = {"type": "document", "source": _document_source(part, path, self._sending)}
                if part.filename is not None:
                    block["title"] = part.filename
            case Audio():
                raise self._sending.refusal(path, f"{NAME} takes no audio")
            case Opaque():
                if part.protocol != NAME:
                    raise self._sending.refusal(path, f"a part that only {part.protocol} knows")
                return part.raw
            case _:
                assert_never(part)
        return block | _boundary(part.cache, f"{path}.cache", self._sending)

    def _image_source(self, image: Image, path: str) -> dict[str, str]:
        if image.detail not in {None, "auto"}:
            self._sending.refuse(f"{path}.detail", "has no grades of detail", "messages.detail")
        if image.url is not None:
            return {"type": "url", "url": image.url}
        if image.media_type is None:
            raise self._sending.refusal(f"{path}.media_type", f"{NAME} must be told what kind of image it is")
        return _base64(image.media_type, image.data or b"")

    # ------------------------------------------------------------ parameters

    def _reasoning(self) -> tuple[dict[str, Any] | None, str | None, int]:
        """`thinking`, `output_config.effort`, and the limit of output tokens."""
        request, mode = self._request, self._endpoint.reasoning
        limit, default = request.max_output_tokens, _default_max_tokens(self._endpoint)
        effort, budget = self._sending.effort, request.reasoning_budget_tokens
        if mode == "off":
            if effort not in {None, "none"}:
                self._sending.drop("reasoning_effort")
            if budget:
                self._sending.drop("reasoning_budget_tokens")
            effort, budget = None, 0
        if effort == "none":
            effort, budget = None, budget or 0
        if effort is not None and budget and mode in {"effort", "budget"}:
            # One wish in two forms, of which the provider takes one.
            self._sending.drop("reasoning_budget_tokens" if mode == "effort" else "reasoning_effort")
            effort, budget = (effort, None) if mode == "effort" else (None, budget)
        if mode == "effort" and budget:
            effort, budget = effort_of(budget), None
        path = "reasoning_budget_tokens"
        if mode == "budget" and budget is None and effort is not None:
            path, budget = "reasoning_effort", self._sending.effort_as_budget(effort, limit, least=_LEAST_BUDGET)
            effort = None
        if effort is not None:
            effort = self._sending.effort_among(effort, _EFFORTS)
        if not budget:
            thinking = {"type": "disabled"} if budget == 0 else None if effort is None else {"type": "adaptive"}
            return thinking, effort, default if limit is None else limit
        if limit is None:
            limit = default + budget
        if not _LEAST_BUDGET <= budget < limit:
            self._sending.refuse(path, f"takes a budget of at least {_LEAST_BUDGET}, below max_tokens")
            return None, effort, limit
        return {"type": "enabled", "budget_tokens": budget}, effort, limit

    def _format(self) -> dict[str, Any] | None:
        """The name of a schema is a label of another protocol, and is left out."""
        wanted = self._request.response_format
        if wanted is None or wanted.kind == "text":
            return None
        if wanted.kind != "json_schema" or wanted.schema is None:
            self._sending.refuse("response_format", "takes a JSON schema, and no JSON without one")
            return None
        if self._sending.omits("response_format"):
            self._sending.drop("response_format")
            return None
        return {"type": "json_schema", "schema": self._sending.described_schema(wanted)}

    def _tool_choice(self) -> dict[str, Any] | None:
        choice, parallel = self._request.tool_choice, self._request.parallel_tool_calls
        if choice is None and (parallel is None or not self._request.tools):
            return None
        told: dict[str, Any]
        match choice:
            case ToolChoice(mode="none"):
                return {"type": "none"}
            case ToolChoice(mode="required"):
                told = {"type": "any"}
            case ToolChoice(mode="tool"):
                told = {"type": "tool", "name": choice.tool}
            case _:
                told = {"type": "auto"}
        return told if parallel is None else {**told, "disable_parallel_tool_use": not parallel}

    def _service_tier(self) -> str | None:
        """This API takes no tier as an order: it has the usual one, or the better one if there is room."""
        asked = self._request.service_tier
        if asked is None:
            return None
        if asked not in _TIERS:
            self._sending.refuse("service_tier", "takes auto and default")
        return _TIERS.get(asked)


def _may_stand(turns: list[tuple[str, int, list[Any]]], number: int) -> bool:
    """A system message: after a user's turn, and last or before an answer. A tool's result is of a user's turn."""
    last = number + 1 == len(turns)
    return turns[number - 1][0] == "user" and (last or turns[number + 1][0] == "assistant")


def _plain(blocks: list[Any]) -> str | list[Any]:
    match blocks:
        case [{"type": "text", "text": str() as text, **others}] if not others:
            return text
        case _:
            return blocks


def _boundary(cache: str | None, path: str, sending: Sending) -> dict[str, Any]:
    if cache is None:
        return {}
    if sending.omits("messages.cache"):
        sending.drop(path)
        return {}
    return {"cache_control": {"type": "ephemeral"} if cache == "5m" else {"type": "ephemeral", "ttl": cache}}


def _base64(media_type: str, data: bytes) -> dict[str, str]:
    return {"type": "base64", "media_type": media_type, "data": base64.b64encode(data).decode()}


def _document_source(part: Document, path: str, sending: Sending) -> dict[str, str]:
    if part.file_id is not None:
        return {"type": "file", "file_id": part.file_id}
    if part.url is not None:
        return {"type": "url", "url": part.url}
    data, media_type = part.data or b"", part.media_type
    if media_type is None and data.startswith(b"%PDF-"):
        media_type = "application/pdf"
    if media_type == "application/pdf":
        return _base64(media_type, data)
    if media_type is not None and media_type.startswith("text/"):
        try:
            return {"type": "text", "media_type": "text/plain", "data": data.decode()}
        except UnicodeDecodeError as error:
            raise sending.refusal(f"{path}.data", f"{NAME} takes text in UTF-8") from error
    raise sending.refusal(f"{path}.media_type", f"{NAME} takes a document as PDF or text")


def _render_tool(tool: Tool, path: str, sending: Sending) -> dict[str, Any]:
    parameters = tool.parameters
    empty = parameters is None or bytes(parameters).replace(b" ", b"") == b"{}"
    rendered = {
        "name": tool.name,
        "description": tool.description,
        # A tool without arguments has a schema all the same.
        "input_schema": {"type": "object", "properties": {}} if empty else parameters,
        "strict": tool.strict,
    }
    known = {name: value for name, value in rendered.items() if value is not None}
    return known | _boundary(tool.cache, f"{path}.cache", sending)
