"""
The APIs of others whose clients may come here by changing nothing but their base URL.

A vendor's client decides by status, headers and the shape of a body which exception it raises and whether it asks
again by itself. So what an error is in each of these APIs stands here, once, and whoever refuses (an endpoint, the
limits of a body, authentication, the server itself) tells it through here.
"""

from __future__ import annotations

import math
import re
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NotRequired, Protocol

import msgspec
from typing_extensions import TypedDict

from adapters.chat import ChatRequest
from adapters.contract import ToldError, WireProtocol
from adapters.protocols import PROTOCOLS, anthropic_messages, chat_completions, responses
from adapters.protocols.anthropic_messages import schema as messages_schema
from adapters.protocols.chat_completions import schema as chat_completions_schema
from adapters.protocols.responses import schema as responses_schema
from gateway.errors import AttemptedError, Code, GatewayError
from gateway.outcome import AttemptReport, LeftOut, Outcome

#: Seconds. The clients sleep as long as they are told, in the caller's own thread: who must wait longer should know.
LONGEST_OWN_RETRY_S: Final = 60.0

#: What may be over when the client asks again. Whatever else has a status that clients repeat would fail the same way,
#: or would be paid twice.
_PASSING: Final = frozenset(
    {
        Code.REQUEST_TIMEOUT,
        Code.QUEUE_FULL,
        Code.QUEUE_TIMEOUT,
        Code.COOLDOWN,
        Code.CONTROL_STORE_UNAVAILABLE,
        Code.CONTENT_STORE_UNAVAILABLE,
        Code.PROVIDER_UNAVAILABLE,
        Code.KEY_LIMIT,
        Code.BUDGET_RESERVED,
        Code.ALL_ROUTES_FAILED,
        Code.IDEMPOTENCY_IN_PROGRESS,
    }
)
#: Words of OpenAI's API for refusals that programs decide on, by falling back to a longer context for one.
_WORDS_OF_PROVIDERS: Final = frozenset(
    {
        "content_filter",
        "content_policy_violation",
        "context_length_exceeded",
        "image_too_large",
        "invalid_image_format",
        "invalid_image_url",
        "string_above_max_length",
        "unsupported_parameter",
        "unsupported_value",
    }
)
#: Statuses by which a provider's refusal is told as its own.
OF_THE_PROVIDER: Final = frozenset({400, 404, 409, 413, 422})


class Envelope(Protocol):
    """What a request says of how it wants to be served, in any of these APIs."""

    @property
    def model(self) -> str | None: ...

    @property
    def stream(self) -> bool: ...

    @property
    def include_usage(self) -> bool: ...


class OpenAiError(TypedDict):
    """What is wrong, in the words of OpenAI's APIs."""

    message: str
    type: str
    #: The field at fault.
    param: str | None
    code: str
    request_id: str


class OpenAiErrorBody(TypedDict):
    """An error of OpenAI's APIs."""

    error: OpenAiError


class AnthropicError(TypedDict):
    """What is wrong, in the words of Anthropic's API."""

    type: str
    message: str
    code: str
    param: NotRequired[str]


class AnthropicErrorBody(TypedDict):
    """An error of Anthropic's API."""

    type: Literal["error"]
    error: AnthropicError
    request_id: str


class Api(msgspec.Struct, frozen=True, kw_only=True):
    """One API: a wire protocol, and what is around it on HTTP."""

    protocol: WireProtocol
    #: What one of its answers is.
    title: str
    #: What is read of its requests, what its answers are read as, and what its errors look like.
    request: type
    answer: type
    error: type
    #: What every answer has.
    always: tuple[str, ...]
    example: Mapping[str, Any]
    envelope: Callable[[ChatRequest], Envelope]
    #: The header in which its clients look for the id of a request.
    request_id: str
    #: A request header that its own clients alone send; empty where there is none.
    mark: str = ""
    #: What must be the last event of a stream, where that is always the same. Some providers leave it out.
    sentinel: bytes = b""
    #: Usage comes in an event of its own, and only where it was asked for: its clients trip over one that they did not
    #: ask for, since it has no choices.
    usage_apart: bool = False


CHAT_COMPLETIONS: Final = Api(
    protocol=PROTOCOLS["chat_completions"],
    title="A chat completion",
    request=chat_completions_schema.RequestIn,
    answer=chat_completions_schema.AnswerOut,
    always=("id", "model", "choices"),
    example={"model": "gpt-4o", "messages": [{"role": "user", "content": "Say hello."}]},
    error=OpenAiErrorBody,
    envelope=chat_completions.envelope,
    request_id="x-request-id",
    sentinel=b"data: [DONE]\n\n",
    usage_apart=True,
)
RESPONSES: Final = Api(
    protocol=PROTOCOLS["responses"],
    title="A response",
    request=responses_schema.RequestIn,
    answer=responses_schema.ResponseOut,
    always=("id", "model", "output"),
    example={"model": "gpt-4o", "input": "Say hello."},
    error=OpenAiErrorBody,
    envelope=responses.envelope,
    request_id="x-request-id",
)
MESSAGES: Final = Api(
    protocol=PROTOCOLS["anthropic_messages"],
    title="A message",
    request=messages_schema.RequestIn,
    answer=messages_schema.MessageOut,
    always=("id", "model", "content"),
    example={"model": "claude-sonnet", "max_tokens": 256, "messages": [{"role": "user", "content": "Say hello."}]},
    error=AnthropicErrorBody,
    envelope=anthropic_messages.envelope,
    request_id="request-id",
    mark="anthropic-version",
)


def spoken(apis: tuple[Api, ...], headers: Mapping[str, str]) -> Api | None:
    """Which of an endpoint's APIs a request is of: the one whose mark it has, else the last."""
    if len(apis) < 2:
        return apis[0] if apis else None
    return next((api for api in apis if api.mark in headers), apis[-1])


# ------------------------------------------------------------------ errors


def told(error: GatewayError, request_id: str) -> ToldError:
    """An error as a protocol is to tell it. Many clients show the message alone, so it names the field as well."""
    param, status = error.param, status_of(error)
    return ToldError(
        status=status,
        code=_code_of(error),
        type=error.status.type if status == error.status.http else None,
        message=error.message if param is None or _names(error.message, param) else f"{param}: {error.message}",
        param=param,
        request_id=request_id,
    )


def _names(message: str, param: str) -> bool:
    """The message names the field, as a word and not within one: `n` is in nearly every message."""
    return re.search(rf"(?<![\w.]){re.escape(param)}(?![\w.])", message) is not None


def _code_of(error: GatewayError) -> str:
    """Ours; but of a refusal the provider's own word, where programs decide on it. Ours is in a header as well."""
    attempts = outcome.attempts if (outcome := outcome_of(error)) is not None else ()
    if error.code is Code.UPSTREAM_REJECTED and attempts and attempts[-1].code in _WORDS_OF_PROVIDERS:
        return attempts[-1].code or error.code.value
    return error.code.value


def status_of(error: GatewayError) -> int:
    """
    The HTTP status for a client of these APIs: the code's own, but where every provider said the same, it is theirs. A
    rate limit that all of them have is one to the caller, too.
    """
    attempts = outcome.attempts if (outcome := outcome_of(error)) is not None else ()
    if error.code is Code.UPSTREAM_REJECTED and attempts and attempts[-1].http_status in OF_THE_PROVIDER:
        return attempts[-1].http_status or error.status.http
    if error.code is Code.ALL_ROUTES_FAILED and attempts and all(_limited(attempt) for attempt in attempts):
        return 429
    return error.status.http


def _limited(attempt: AttemptReport) -> bool:
    return attempt.http_status == 429 and attempt.error_class == "transient"


def outcome_of(error: GatewayError) -> Outcome | None:
    return error.outcome if isinstance(error, AttemptedError) else None


def asks_again(error: GatewayError) -> bool:
    """Whether a client should repeat the request by itself. Never where an attempt may have cost something."""
    if error.code is Code.QUEUE_FULL:
        # The next call that ends makes room, however long the whole queue may take.
        return True
    if error.code is Code.SHUTTING_DOWN:
        ended = outcome_of(error)
        return error.dispatched is False or (ended is not None and ended.cost.state == "zero")
    if error.code not in _PASSING or (error.retry_after_s or 0.0) > LONGEST_OWN_RETRY_S:
        return False
    outcome = outcome_of(error)
    if outcome is None or not outcome.attempts:
        return True
    if error.code is Code.ALL_ROUTES_FAILED and len(outcome.attempts) > 1 and error.retry_after_s is None:
        # It was repeated already, with pauses, wherever that could help: the client's repetitions would multiply ours.
        return False
    passes = any(attempt.error_class in {"transient", "network"} for attempt in outcome.attempts)
    return passes and outcome.cost.state != "unknown"


def error_headers(error: GatewayError) -> dict[str, str]:
    """
    `Retry-After` in whole seconds, rounded up, where waiting helps; the challenge with a 401; `x-should-retry: false`
    for clients that would repeat by themselves and must not; and who was asked.
    """
    headers = {"x-tollbridge-code": error.code.value}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(0, math.ceil(error.retry_after_s)))
    if error.code is Code.UNAUTHENTICATED:
        headers["WWW-Authenticate"] = "Bearer"
    if not asks_again(error):
        headers["x-should-retry"] = "false"
    if error.dispatched is not None:
        headers["x-tollbridge-dispatched"] = "true" if error.dispatched else "false"
    if (outcome := outcome_of(error)) is not None:
        headers.update(attribution(outcome))
    if error.left_out:
        headers["x-tollbridge-left-out"] = _reasons(error.left_out)
    return headers


# ------------------------------------------------------------------ who served it


def attribution(outcome: Outcome) -> list[tuple[str, str]]:
    """The headers that say who served a request, what it cost, and what is not quite as it was asked."""
    told = outcome.attribution()
    if outcome.warnings:
        told.append(("x-tollbridge-warnings", header_text("; ".join(outcome.warnings))))
    if outcome.left_out:
        told.append(("x-tollbridge-left-out", _reasons(outcome.left_out)))
    return told


def _reasons(left_out: Sequence[LeftOut]) -> str:
    return header_text("; ".join(f"{out.provider}/{out.model}: {out.reason}" for out in left_out))


#: Bytes of one header: some clients and proxies take no more than 8 KiB of them all.
_MOST_TEXT: Final = 2048
_PRINTABLE: Final = "".join(chr(number) for number in range(0x20, 0x7F) if chr(number) != "%")


def header_text(text: str) -> str:
    """Text as a header can have it: what is not printable ASCII is percent-encoded; cut where it is long."""
    return urllib.parse.quote(text, safe=_PRINTABLE)[:_MOST_TEXT]
