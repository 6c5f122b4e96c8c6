"""
How a call to a provider fails.

    ProviderError
    |- NotSent     no byte of the request was written: refused, DNS, TLS, pool
    |- Rejected    a complete error response, or an error event in a stream: the provider is done with it
    `- Broken      it was sent and its end was not proven: a clock ran out, the connection broke, no terminal
    RequestNotExpressible   (not a provider's failure) this protocol cannot say what was asked

What the caller, the router and the breaker do follows from `error_class` and from which of the three it was; the
message is ours, or the provider's made safe: no secret, prompt or answer.
"""

from __future__ import annotations

import enum

from adapters.limits import Remaining


class ErrorClass(enum.StrEnum):
    #: The caller's fault: no retry, no switch.
    FATAL = "fatal"
    #: The operator's fault (credentials, quota, deployment): no retry, the next route is tried.
    OURS = "ours"
    #: The provider may do better in a while, or another one now.
    TRANSIENT = "transient"
    #: Refused, reset, DNS, TLS, clocks.
    NETWORK = "network"


class ProviderError(Exception):
    """A call to a provider failed."""

    error_class: ErrorClass

    def __init__(
        self,
        message: str,
        *,
        code: str,
        status: int | None = None,
        provider_request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        #: The provider's machine code, or ours ("connect_refused", "first_byte_timeout", "no_terminal", ...).
        self.code = code
        self.status = status
        self.provider_request_id = provider_request_id
        #: What the provider says is left of its rate limits, where a response came. The client fills it in.
        self.remaining: Remaining | None = None


class NotSent(ProviderError):
    """No byte of the request was written."""

    error_class = ErrorClass.NETWORK


class Rejected(ProviderError):
    """The provider answered with a complete error."""

    def __init__(
        self,
        message: str,
        *,
        code: str,
        error_class: ErrorClass,
        status: int | None = None,
        retry_after_s: float | None = None,
        rate_limited: bool = False,
        credential_fault: bool = False,
        after_content: bool = False,
        provider_request_id: str | None = None,
        said: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message, code=code, status=status, provider_request_id=provider_request_id)
        self.error_class = error_class
        #: Seconds the provider asks to wait, counted from the receipt of its answer.
        self.retry_after_s = retry_after_s
        #: A rate limit that ends by waiting: not "request too large", not an exhausted quota.
        self.rate_limited = rate_limited
        #: The credential or its account is refused or exhausted: the provider is out until a recheck.
        self.credential_fault = credential_fault
        #: It came with an answer, or part of one: what that cost is not known.
        self.after_content = after_content
        #: Of a request that is at fault itself, the provider's own words, without what looks like a secret. They may
        #: quote the request: for whoever sent it, by way of `adapters.classify.told`, and for no log and no ledger.
        self.said = said
        #: The field at fault in the provider's own format, where its error has a field for that.
        self.param = param


class Broken(ProviderError):
    """It was sent, and its end was not proven."""

    error_class = ErrorClass.NETWORK
    #: Of a plain call: an answer or part of one had come, so the provider has worked on it. A page that is none, and
    #: has ended, is no part of one. The client fills it in.
    answered = False


class RequestNotExpressible(Exception):
    """What the protocol cannot say. `path` names it as the caller wrote it: "input[2].content[0]"."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class MalformedRequest(Exception):
    """A caller's body is not a request of this protocol. `path` names the field."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path = path
        self.reason = reason
