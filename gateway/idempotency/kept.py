"""
What is kept of a call, so that it can be answered again without being made again.

Also what tells one request from another: the digest of what is asked for, in whatever words. Pure.
"""

from __future__ import annotations

import hashlib
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias, TypeVar, cast

import msgspec

from adapters.chat import (
    ChatResponse,
    ChoiceEnd,
    Delta,
    Native,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    ToolCallDelta,
)
from adapters.contract import EmbeddingResponse, relayed
from gateway.answer import Ended, Item
from gateway.call import Call, Completion, Embedded
from gateway.errors import AttemptedError, Code, GatewayError
from gateway.outcome import Outcome

#: What a repeated answer says of itself.
ENDED_BEFORE: Final = "idempotency_key: the request under it has ended so before; nothing was sent for it now"
REPLAYED: Final = "idempotency_key: this is the answer that was kept; nothing was sent for it now"

#: Of what a call says beside the chat: what decides which answer it gets, and from whom. The others say for whom it is,
#: or how long to wait, and may differ from one repetition to the next.
_DECIDING: Final = (
    "role",
    "allowed_providers",
    "allowed_models",
    "allow_failover",
    "max_cost_usd",
    "order",
    "unsupported",
)

R = TypeVar("R", ChatResponse, EmbeddingResponse)

_DELTAS: Final[dict[str, type]] = {kind.__name__: kind for kind in typing.get_args(Delta)}


# ------------------------------------------------------------------ what is asked for


def question(call: Call, *, streamed: bool) -> bytes:
    """
    What a call asks for, as JSON: the same for every transport and every API in which it can be said. `digest_of` makes
    it the same whatever the order and the spacing of its members.
    """
    options = {name: getattr(call.options, name) for name in _DECIDING}
    asked: Any = call.chat if call.embedding is None else call.embedding
    native = asked.native
    beyond = {}
    if native is not None:
        # What the canonical form does not carry is told by the member it is in.
        heads = {path.partition(".")[0].partition("[")[0] for path in native.unmapped} if call.embedding is None else ()
        beyond = {name: raw for name, raw in native.fields.items() if call.embedding is not None or name in heads}
    return msgspec.json.encode(
        {
            "model": call.model,
            "asked": {name: value for name, value in msgspec.structs.asdict(asked).items() if name != "paths"}
            | {"native": None},
            "beyond": beyond,
            "options": options,
            "betas": sorted(call.betas),
            "streamed": streamed,
        }
    )


def digest_of(text: bytes) -> bytes:
    """Of a `question`."""
    return hashlib.sha256(msgspec.json.encode(msgspec.json.decode(text), order="sorted")).digest()


# ------------------------------------------------------------------ what is kept


class Whole(msgspec.Struct, frozen=True, kw_only=True, tag="whole"):
    """A plain answer."""

    #: Without the provider's own body, which is beside it: what may be raw JSON or null cannot be read again.
    response: ChatResponse
    native: bytes | None
    outcome: Outcome

    @classmethod
    def of(cls, completion: Completion) -> Whole:
        response, native = _apart(completion.response)
        return cls(response=response, native=native, outcome=completion.outcome)

    @property
    def completion(self) -> Completion:
        return Completion(response=_together(self.response, self.native), outcome=repeated(self.outcome))


class Vectors(msgspec.Struct, frozen=True, kw_only=True, tag="vectors"):
    """Those of an embedding; as `Whole`."""

    response: EmbeddingResponse
    native: bytes | None
    outcome: Outcome

    @classmethod
    def of(cls, embedded: Embedded) -> Vectors:
        response, native = _apart(embedded.response)
        return cls(response=response, native=native, outcome=embedded.outcome)

    @property
    def embedded(self) -> Embedded:
        return Embedded(response=_together(self.response, self.native), outcome=repeated(self.outcome))


class Streamed(msgspec.Struct, frozen=True, kw_only=True, tag="streamed"):
    """A streamed answer: its deltas, joined where one follows the other."""

    deltas: list[tuple[str, msgspec.Raw]]
    ends: tuple[ChoiceEnd, ...]
    outcome: Outcome
    #: The provider's own events before the last, and that; the protocol they are in. None where they were not relayed.
    raw: bytes | None = None
    last: bytes | None = None
    protocol: str | None = None

    def items(self, call: Call) -> Iterator[Item]:
        """The stream again, in the provider's own bytes where the call can have them."""
        deltas: list[Delta] = [msgspec.json.decode(raw, type=_DELTAS[kind]) for kind, raw in self.deltas]
        native = call.chat.native
        relays = self.raw is not None and call.relay and native is not None and native.protocol == self.protocol
        if relays:
            deltas.append(cast("Delta", Native(self.raw or b"")))
        if deltas:
            yield deltas
        yield Ended(ends=self.ends, outcome=repeated(self.outcome), native=self.last if relays else None)


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag="failure"):
    """How a call ended that did not complete, or whose answer is not there."""

    code: Code
    message: str
    param: str | None = None
    outcome: Outcome | None = None

    @property
    def error(self) -> GatewayError:
        """To be raised. It asks nobody to come again: it will always be so."""
        outcome = None if self.outcome is None else repeated(self.outcome, ENDED_BEFORE)
        return AttemptedError(self.message, outcome=outcome, code=self.code, param=self.param)


Kept: TypeAlias = Whole | Vectors | Streamed | Failure

_kept: Final = msgspec.json.Decoder(Kept)


def encoded(kept: Kept) -> bytes:
    return msgspec.json.encode(kept)


def decoded(answer: bytes) -> Kept:
    """Raises msgspec.DecodeError for what another version wrote and this one cannot read."""
    found: Kept = _kept.decode(answer)
    return found


def failed(error: AttemptedError) -> Failure:
    return Failure(code=error.code, message=error.message, param=error.param, outcome=error.outcome)


def too_large(outcome: Outcome, most: int) -> Failure:
    return Failure(
        code=Code.IDEMPOTENCY_ANSWER_LOST,
        message=f"it was answered, but the answer was larger than the {most} bytes that are kept: it is not sent again",
        outcome=outcome,
    )


def no_room(outcome: Outcome, most: int) -> Failure:
    return Failure(
        code=Code.IDEMPOTENCY_ANSWER_LOST,
        message=f"it was answered, but the answers of this API key that are kept take up {most} bytes already, so that "
        "it was not kept: it is not sent again",
        outcome=outcome,
    )


def orphaned(outcome: Outcome) -> Failure:
    """What is known of a request that nobody saw to its end."""
    if outcome.settlement != "settled" or outcome.cost.state == "unknown":
        return Failure(
            code=Code.UNCERTAIN,
            message="it was sent, and who waited for it was gone before its end, which is not known: it is not sent "
            "again under this key",
            outcome=outcome,
        )
    return Failure(
        code=Code.IDEMPOTENCY_ANSWER_LOST,
        message="it was sent and has ended, but who waited for it was gone before that, so there is no answer: it is "
        "not sent again under this key",
        outcome=outcome,
    )


def _apart(response: R) -> tuple[R, bytes | None]:
    native = None if response.native is None else bytes(response.native)
    return msgspec.structs.replace(response, native=None), native


def _together(response: R, native: bytes | None) -> R:
    return msgspec.structs.replace(response, native=None if native is None else msgspec.Raw(native))


def repeated(outcome: Outcome, warning: str = REPLAYED) -> Outcome:
    return msgspec.structs.replace(outcome, warnings=(*outcome.warnings, warning))


class Recording:
    """Keeps a stream while it goes by, up to `most` bytes."""

    def __init__(self, call: Call, most: int) -> None:
        self._native = call.chat.native
        self._most = most
        self._deltas: list[Delta] = []
        self._pieces: list[str] = []
        self._raw: list[bytes] = []
        self._relayed = False
        self._size = 0

    @property
    def full(self) -> bool:
        return self._size > self._most

    def add(self, item: Sequence[Delta]) -> None:
        if self.full:
            return
        deltas, raw = relayed(item)
        if raw is not None:
            self._relayed = True
            self._raw.append(raw)
            self._size += len(raw)
        for delta in cast("Iterable[Delta]", deltas):
            text = _text_of(delta)
            self._size += len(text) if text is not None else len(msgspec.json.encode(delta))
            if text is None or not self._deltas or not _goes_on(self._deltas[-1], delta):
                self._flush()
                self._deltas.append(delta)
                self._size += 64
            elif text:
                self._pieces.append(text)
        if self.full:
            self._deltas.clear()
            self._pieces.clear()
            self._raw.clear()

    def _flush(self) -> None:
        if self._pieces:
            last = self._deltas[-1]
            field = "arguments" if isinstance(last, ToolCallDelta) else "text"
            whole = "".join((getattr(last, field), *self._pieces))
            self._deltas[-1] = msgspec.structs.replace(last, **{field: whole})
            self._pieces.clear()

    def kept(self, ended: Ended) -> Streamed | Failure:
        if self.full:
            return too_large(ended.outcome, self._most)
        self._flush()
        return Streamed(
            deltas=[(type(delta).__name__, msgspec.Raw(msgspec.json.encode(delta))) for delta in self._deltas],
            ends=ended.ends,
            outcome=ended.outcome,
            raw=b"".join(self._raw) if self._relayed else None,
            last=ended.native,
            protocol=self._native.protocol if self._relayed and self._native is not None else None,
        )


def _text_of(delta: Delta) -> str | None:
    match delta:
        case TextDelta(text=text) | RefusalDelta(text=text) | ReasoningDelta(text=text):
            return text
        case ToolCallDelta(arguments=arguments):
            return arguments
        case _:
            return None


def _goes_on(last: Delta, delta: Delta) -> bool:
    """Whether the two say what one could."""
    match last, delta:
        case (TextDelta(), TextDelta()) | (RefusalDelta(), RefusalDelta()):
            return last.choice == delta.choice
        case ToolCallDelta(), ToolCallDelta():
            return (last.choice, last.index) == (delta.choice, delta.index)
        case ReasoningDelta(signature=None), ReasoningDelta(signature=None):
            same = (last.choice, last.block, last.redacted, last.id) == (
                delta.choice,
                delta.block,
                delta.redacted,
                delta.id,
            )
            return same and not last.redacted
        case _:
            return False
