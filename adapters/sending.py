"""
A request's last steps on its way to a provider, the same for every protocol: what it cannot be told, what the caller
added, what the profile says of the provider, and the HTTP around it.

What counts as dropped is decided here. It is what the caller asked for and the provider was not sent: since it cannot
be said there, since the profile omits it, or since the profile forces another value in its place. What the caller did
not ask for, and what was forced to the value that it had, is not dropped.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from adapters import signatures
from adapters.chat import ChatRequest, Message, Opaque, Reasoning, ResponseFormat, Text
from adapters.contract import EmbeddingCall, Endpoint, HttpRequest, UpstreamCall
from adapters.errors import RequestNotExpressible
from adapters.paths import Words, existing
from adapters.reasoning import LEFT_TO_PROVIDER, WORDS, budget_of, is_lessened, nearest, within

_encode = msgspec.json.Encoder().encode
_object_in = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text_in = msgspec.json.Decoder(str)
_TOOL = re.compile(r"tools\[([0-9]+)\](?:\.(\w+))?")
_KIND = re.compile(r"[\w.-]{1,64}", re.ASCII)

#: How a request is served is the gateway's to say.
_OURS = frozenset({"model", "stream"})
#: Values with which a canonical field asks for nothing, beside being absent.
_ASKS_NOTHING: Mapping[str, Collection[Any]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    # No provider keeps what it is not asked to keep, or is told that it must not.
    "store": (False,),
    "service_tier": ("auto",),
    "parallel_tool_calls": (True,),
}
#: What a field inside a message or a tool is called in `omit`, by the last step of the caller's own path.
_OMIT_WORDS: Mapping[str, str] = {
    "cache_control": "messages.cache",
    "citations": "messages.citations",
    "prompt_cache_breakpoint": "messages.cache",
    "reasoning_details": "messages.reasoning",
}


def asked_for(request: ChatRequest, name: str) -> bool:
    """Whether a canonical field of the request asks for anything."""
    value = getattr(request, name, None)
    return not (value is None or value in ((), {}) or value in _ASKS_NOTHING.get(name, ()))


class Sending:
    """
    One request on its way to an endpoint that speaks `protocol`.

    `words` are those of the protocol, canonical names to its own, as in `adapters.paths`. All paths are canonical.
    """

    __slots__ = ("_dropped", "_request", "_words", "endpoint", "protocol")

    def __init__(self, call: UpstreamCall | EmbeddingCall, protocol: str, words: Words) -> None:
        self.endpoint: Endpoint = call.endpoint
        self.protocol = protocol
        self._request = call.request
        self._words = words
        self._dropped: dict[str, None] = {}

    @property
    def dropped(self) -> tuple[str, ...]:
        """As the caller wrote them."""
        return tuple(self._dropped)

    # ------------------------------------------------- what cannot be said

    def omits(self, word: str) -> bool:
        """The profile says that this is never sent."""
        return word in self.endpoint.omit

    def drop(self, path: str) -> None:
        self._dropped[self._request.written(path)] = None

    def drop_own(self, path: str) -> None:
        """A path that is the caller's own already."""
        self._dropped[path] = None

    def refusal(self, path: str, reason: str) -> RequestNotExpressible:
        """What the caller asked means something else without it, so it is never dropped."""
        return RequestNotExpressible(self._request.written(path), reason)

    def refuse_all_but_text(self, message: Message, path: str) -> None:
        """Raises `RequestNotExpressible` where the message holds anything else, but for what is a protocol's own."""
        for j, part in enumerate(message.content):
            if not isinstance(part, Text | Opaque):
                raise self.refusal(f"{path}.content[{j}]", f"{self.protocol} takes only text from {message.role}")

    def refuse(self, path: str, reason: str, word: str | None = None) -> None:
        """
        Raises `RequestNotExpressible`, or drops it where the endpoint may: where the path, or the `word` that stands
        for it, is in its `omit` or its `drops`.
        """
        if not self._may_drop(path if word is None else word):
            raise self.refusal(path, f"{self.protocol} {reason}")
        self.drop(path)

    def _may_drop(self, word: str) -> bool:
        return word in self.endpoint.omit or word in self.endpoint.drops

    def refuse_unmapped(self) -> None:
        """What the canonical form of the request does not carry: only its own protocol knows it."""
        native = self._request.native
        for path in native.wishes if native is not None else ():
            self.drop_own(path)
        for path in native.unmapped if native is not None else ():
            word = _OMIT_WORDS.get(path.rpartition(".")[2]) if "[" in path else None
            if self._may_drop(path) or (word is not None and self._may_drop(word)):
                self.drop_own(path)
                continue
            assert native is not None
            kind = _kind_of_tool(native.fields, path)
            if kind is not None:
                reason = f"a tool of the type {kind} is {native.protocol}'s own"
                raise RequestNotExpressible(path, f"{reason}, and {self.endpoint.provider} speaks {self.protocol}")
            raise RequestNotExpressible(path, native.reasons.get(path, f"{self.protocol} has no such field"))

    def refuse_unknown(self, names: Collection[str]) -> None:
        """Canonical fields that this protocol has no word for, where they ask for anything."""
        assert isinstance(self._request, ChatRequest), "an embedding has other fields"
        for name in names:
            if asked_for(self._request, name):
                self.refuse(name, "has no such field")

    def failure_told(self, message: Message, path: str) -> Message:
        """As the function, for a result that is an error; the mark is dropped where the profile omits it."""
        if self.omits("messages.is_error"):
            self.drop(f"{path}.is_error")
            return message
        return failure_told(message)

    def thoughts(
        self, message: Message, path: str, *, signed: bool = False, unsigned: bool = False
    ) -> list[tuple[int, Reasoning]]:
        """
        What the model thought, by its number, as far as this provider takes it back: `signed` what a provider of its
        protocol signed, `unsigned` the text of any. The rest is dropped: nobody but its own provider misses it.
        """
        kept = []
        for j, thought in enumerate(message.reasoning):
            own = thought.signature is not None and not signatures.is_foreign(self.protocol, thought.signature)
            if self.omits("messages.reasoning") or not ((signed and own) or (unsigned and thought.text)):
                self.drop(f"{path}.reasoning[{j}]")
            elif thought.signature is None or (signed and own):
                kept.append((j, thought))
            else:
                self.drop(f"{path}.reasoning[{j}].signature")
                kept.append((j, Reasoning(text=thought.text)))
        return kept

    # -------------------------------------------------------------- effort

    @property
    def output_limit(self) -> int | None:
        """In tokens, as the caller gave it."""
        assert isinstance(self._request, ChatRequest), "an embedding has none"
        return self._request.max_output_tokens

    @property
    def effort(self) -> str | None:
        """The word of effort that the caller asked for; None where it leaves it to the provider."""
        assert isinstance(self._request, ChatRequest), "an embedding has none"
        asked = self._request.reasoning_effort
        return None if asked in LEFT_TO_PROVIDER else asked

    def effort_as_budget(self, effort: str, limit: int | None, *, least: int) -> int | None:
        """
        A word of effort in tokens, within the output limit. Raises `RequestNotExpressible` for a word of which nobody
        knows how much it is, or drops it where the endpoint may.
        """
        budget = budget_of(effort)
        if budget is None:
            words = ", ".join(WORDS)
            self.refuse("reasoning_effort", f"is told it in tokens here, and it is none of {words}, auto and default")
            return None
        if is_lessened(effort):
            self.drop("reasoning_effort")
        return within(budget, limit, least=least)

    def effort_among(self, effort: str, known: Sequence[str]) -> str:
        """The nearest of the protocol's own words; told as dropped where that is another one."""
        word = nearest(effort, known)
        if word != effort:
            self.drop("reasoning_effort")
        return word

    def described_schema(self, wanted: ResponseFormat) -> msgspec.Raw | None:
        """As the function."""
        try:
            return described_schema(wanted)
        except RequestNotExpressible as error:
            raise self.refusal(error.path, error.reason) from error

    # --------------------------------------------------- what the profile says

    def as_profiled(self, fields: dict[str, Any]) -> None:
        """What the profile omits is taken out of these fields of the protocol, and what it forces is put in."""
        endpoint = self.endpoint
        for name in sorted((endpoint.omit | endpoint.force.keys()) & fields.keys()):
            value, forced = fields.pop(name), endpoint.force.get(name)
            if forced is None or not same(value, forced):
                self.lost(name)
        fields.update(endpoint.force)

    def lost(self, name: str) -> None:
        """A field of the protocol (a dot reaches within it) is not sent as it was: dropped, where it was asked for."""
        native = self._request.native
        if name in _OURS:
            return
        if native is not None and native.protocol == self.protocol:
            written, whole = existing(name, native.fields)
            if whole:
                self.drop_own(written)
                return
        for canonical in self._canonical(name):
            if self._asks(canonical):
                self.drop(canonical)
        if name in getattr(self._request, "extra", ()):
            self.drop(f"extra.{name}")

    def _canonical(self, name: str) -> list[str]:
        """The canonical fields that this one, or what is within it, stands for."""
        found = []
        for field in msgspec.structs.fields(type(self._request)):
            words = self._words.get(field.name, (field.name,))
            if any(word == name or word.startswith(f"{name}.") for word in words):
                found.append(field.name)
        return found

    def _asks(self, canonical: str) -> bool:
        if isinstance(self._request, ChatRequest):
            return asked_for(self._request, canonical)
        return getattr(self._request, canonical) is not None

    # ------------------------------------------------------------------ the end

    def add_extra(self, fields: dict[str, Any], ours: Collection[str]) -> None:
        """
        The `extra` fields of the request, beside those it has. Raises `RequestNotExpressible` for one that is there
        already or is `ours` to write.
        """
        assert isinstance(self._request, ChatRequest), "an embedding has none"
        for name, value in self._request.extra.items():
            if name in fields or name in ours:
                raise self.refusal(f"extra.{name}", "the request has this field already")
            fields[name] = value

    def post(
        self, path: str, fields: dict[str, Any], *, stream: bool, headers: Mapping[str, str] | None = None
    ) -> HttpRequest:
        """JSON to the path, with these headers beside the usual ones."""
        return HttpRequest(
            path=path,
            headers={
                "content-type": "application/json",
                "accept": "text/event-stream" if stream else "application/json",
                **(headers or {}),
            },
            body=_encode(fields),
            dropped=self.dropped,
        )


def described_schema(wanted: ResponseFormat) -> msgspec.Raw | None:
    """
    The schema, for a protocol that has no other place for what is said of it: that is then the schema's own
    description, before the one that it has. Raises `RequestNotExpressible` for a schema that can have none.
    """
    if wanted.schema is None or not wanted.description:
        return wanted.schema
    try:
        fields = _object_in.decode(wanted.schema)
        own = _text_in.decode(fields["description"]) if "description" in fields else ""
    except msgspec.ValidationError as error:
        raise RequestNotExpressible(
            "response_format.schema", "a schema with a description must be an object"
        ) from error
    if own == wanted.description:
        return wanted.schema
    told = "\n\n".join(filter(None, (wanted.description, own)))
    return msgspec.Raw(_encode({**fields, "description": told}))


def failure_told(message: Message) -> Message:
    """A tool's result that is an error, for a protocol that has no mark for it: its text says so."""
    for at, part in enumerate(message.content):
        if isinstance(part, Text):
            if part.text.casefold().startswith("error"):
                return message
            told = msgspec.structs.replace(part, text=f"Error: {part.text}")
            return msgspec.structs.replace(message, content=(*message.content[:at], told, *message.content[at + 1 :]))
    return msgspec.structs.replace(message, content=(*message.content, Text(text="Error")))


def same(value: Any, forced: msgspec.Raw) -> bool:
    """What is sent is what it is forced to be."""
    return bool(msgspec.json.decode(_encode(value)) == msgspec.json.decode(forced))


def _kind_of_tool(fields: Mapping[str, msgspec.Raw], path: str) -> str | None:
    """The type of a tool that only its own protocol has, where the path is of one."""
    found = _TOOL.fullmatch(path)
    if found is None or "tools" not in fields:
        return None
    tools = msgspec.json.decode(fields["tools"])
    number = int(found[1])
    tool = tools[number] if isinstance(tools, list) and number < len(tools) else tools
    if not isinstance(tool, dict):
        return None
    # In one format a tool has neither type nor name: its only field is what it is.
    kind = tool.get("type") if found[2] is None else None if {"type", "name"} & tool.keys() else found[2]
    return kind if isinstance(kind, str) and _KIND.fullmatch(kind) else None
