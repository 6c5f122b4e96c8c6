"""
The endpoints for clients of OpenAI and Anthropic: one handler, and the API it speaks is a parameter.

It is the same line as for every other transport. What is special here is only whose words are used: where the caller
and the provider speak the same protocol, the bodies of both pass as they are, unknown fields included, and a stream is
handed on in the provider's own bytes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from functools import cached_property, partial
from typing import Final, TypeAlias, TypeVar

import msgspec
from aiohttp import web
from typing_extensions import override

from adapters.chat import ChatRequest, Finished, UsageReport
from adapters.contract import AnswerHead, StreamRenderer, relayed
from adapters.errors import MalformedRequest
from adapters.protocols.responses import kept
from adapters.telling import breaks
from admission.lease import Waiting
from gateway.answer import Ended, Item, Line, Silent
from gateway.call import Call, Scope
from gateway.errors import Code, GatewayError, Internal, InvalidRequest, StreamBroken
from gateway.naming import ID_PREFIXES, named
from gateway.outcome import AttemptReport, Outcome, RouteReport, serving
from gateway.rest.answers import Whole
from gateway.rest.apis import CHAT_COMPLETIONS, MESSAGES, RESPONSES, Api, Envelope, attribution, told
from gateway.rest.endpoint import Endpoint, Exchange, answer_headers
from gateway.rest.fields import HEADER_PREFIX, options_from_headers
from gateway.rest.operation import OF_A_CALL, Content, Operation
from gateway.rest.paths import DEPLOYMENT
from gateway.rest.streams import EventStream, StreamSettings
from metering.cost import decimal_string

_T = TypeVar("_T")

PATHS: Final = {
    "/v1/chat/completions": CHAT_COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
}

BETAS: Final = "anthropic-beta"
_BETA = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_MOST_BETAS: Final = 32


#: Takes a request of Responses whose answer is to be made in the background.
InBackground: TypeAlias = Callable[[Exchange, ChatRequest], Awaitable[web.StreamResponse]]


def routes(*, line: Line, settings: StreamSettings, in_background: InBackground) -> list[Endpoint]:
    """The endpoints of this module."""
    chat = Chat(line, settings, in_background)
    return [
        Endpoint(
            method="POST",
            path=path,
            access=Scope.CHAT,
            handler=partial(chat.answer, api),
            apis=(api,),
            told=_told(api),
        )
        for path, api in PATHS.items()
    ]


class Betas(msgspec.Struct, frozen=True, kw_only=True):
    #: Words for a provider that speaks Anthropic's protocol, with commas between them.
    betas: str | None = msgspec.field(default=None, name=BETAS)


class BetaQuery(msgspec.Struct, frozen=True, kw_only=True):
    #: Anthropic's client says so of what it calls beta. It is not looked at.
    beta: str | None = None


def _told(api: Api) -> Operation:
    return Operation(
        summary=api.title,
        description="With `stream` as server-sent events. Fields that are not named here pass to the provider.",
        query=BetaQuery,
        headers=Betas if api is MESSAGES else None,
        takes=(Content(type=api.request, example=api.example),),
        makes_job=api is RESPONSES,
        gives=(
            Content(type=api.answer, required=api.always),
            Content(type=str, media_type="text/event-stream"),
        ),
        errors=OF_A_CALL,
        calls=True,
        repeatable=True,
    )


class Chat:
    """The handler."""

    def __init__(self, line: Line, settings: StreamSettings, in_background: InBackground) -> None:
        self._line = line
        self._settings = settings
        self._in_background = in_background

    async def answer(self, api: Api, exchange: Exchange) -> web.StreamResponse:
        # Anthropic's client says so of what it calls beta; the header says which.
        exchange.query(("beta",))
        chat = await exchange.parsed(partial(parsed, api.protocol.parse_request))
        if api is RESPONSES and kept.goes_on_from_kept(chat):
            raise InvalidRequest(
                "no provider knows this response, which is kept here: send its input and its output as `input`",
                code=Code.UNSUPPORTED_FIELD,
                param="previous_response_id",
            )
        if api is RESPONSES and kept.in_background(chat):
            return await self._in_background(exchange, chat)
        options = options_from_headers(exchange.request.headers)
        asked = api.envelope(chat)
        call = Call(
            request_id=exchange.request_id,
            caller=exchange.caller,
            model=named_model(asked.model, role=options.role, deployment=exchange.path_args.get(DEPLOYMENT)),
            chat=chat,
            options=options,
            transport="rest",
            relay=asked.stream,
            betas=wanted_betas(exchange) if api is MESSAGES else (),
        )
        if asked.stream:
            return await self._streamed(api, exchange, call, asked)
        completion = await self._line.complete(call)
        if completion.response.native_protocol != api.protocol.name and breaks(
            api.protocol.untold, completion.response
        ):
            raise StreamBroken(
                "the model wrote arguments of a call that are no JSON object, and this format cannot tell them",
                outcome=completion.outcome,
            )
        route = completion.outcome.route
        response = named(
            completion.response,
            protocol=api.protocol.name,
            answer_id=exchange.request_id,
            model=None if route is None else route.model,
        )
        headers = answer_headers(exchange.request_id, api)
        headers.update(attribution(completion.outcome))
        return Whole(api.protocol.render_response(response), headers)

    async def _streamed(self, api: Api, exchange: Exchange, call: Call, asked: Envelope) -> web.StreamResponse:
        progress = _Progress()
        stream = EventStream(exchange, api, self._settings, progress.waits_for)
        voice = _Voice(api, call, progress, include_usage=asked.include_usage)
        try:
            async with self._line.stream(call, progress) as items:
                await stream.begin(progress.headers())
                async for item in items:
                    if isinstance(item, Ended):
                        stream.end_with(voice.ended(item))
                        return stream.response
                    if (data := voice.said(item)) and stream.put(data):
                        await stream.drain()
            raise Internal("the answer stopped without saying how it ended")
        except GatewayError as error:
            if not stream.committed:
                raise
            await stream.begin(())
            await stream.write(voice.failed(error))
            await stream.break_off()
            return stream.response
        finally:
            await stream.close()


class _Progress(Silent):
    """What is known of a request before its first content."""

    def __init__(self) -> None:
        self.route: RouteReport | None = None
        self._failed: list[AttemptReport] = []
        self._place: int | None = None

    @override
    def queued(self, waiting: Waiting) -> None:
        self._place = waiting.position

    @override
    def started(self, route: RouteReport, attempt: int) -> None:
        self.route = route
        self._place = None

    @override
    def failed(self, report: AttemptReport) -> None:
        self._failed.append(report)

    def waits_for(self) -> str:
        return "waiting" if self._place is None else f"queued, position {self._place}"

    def headers(self) -> list[tuple[str, str]]:
        if self.route is None:
            return []
        return serving(self.route, len(self._failed) + 1, self._failed[-1] if self._failed else None)


class _Voice:
    """One stream in the caller's words: the provider's own bytes where it speaks them, else made from the deltas."""

    def __init__(self, api: Api, call: Call, progress: _Progress, *, include_usage: bool) -> None:
        self._api = api
        self._asked = call.model
        self._request_id = call.request_id
        self._progress = progress
        self._include_usage = include_usage
        self._relays = False
        self._hides_usage = api.usage_apart and not include_usage

    def said(self, item: Item) -> bytes:
        assert not isinstance(item, Ended)
        deltas, raw = relayed(item)
        if raw is None:
            return self._renderer.feed(deltas)
        self._relays = True
        return without_usage(raw) if self._hides_usage else raw

    def ended(self, ended: Ended) -> bytes:
        """What became known too late for the headers comes in a comment, before the terminal."""
        comment = b": tollbridge " + msgspec.json.encode(_late(ended.outcome)) + b"\n\n"
        if not self._relays:
            outcome = ended.outcome
            cost = None if outcome.cost.usd is None else decimal_string(outcome.cost.usd)
            usage = UsageReport(usage=outcome.usage, reported_cost_usd=cost)
            return comment + self._renderer.feed((usage, Finished(ends=ended.ends)))
        last = ended.native or b""
        if self._hides_usage:
            last = without_usage(last)
        sentinel = self._api.sentinel
        return comment + (last if sentinel.strip() in last else last + sentinel)

    def failed(self, error: GatewayError) -> bytes:
        said = self._renderer.fail(told(error, self._request_id))
        # A stream that the provider began has its beginning already.
        return said[max(said.find(b"event: error\n"), 0) :] if self._relays else said

    @cached_property
    def _renderer(self) -> StreamRenderer:
        route = self._progress.route
        return self._api.protocol.new_renderer(
            AnswerHead(
                id=ID_PREFIXES[self._api.protocol.name] + self._request_id,
                model=self._asked if route is None else route.model,
                created=int(time.time()),
                include_usage=self._include_usage,
            )
        )


_NOTHING = re.compile(rb"\[\s*\]")
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_SOME_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_EVENT = re.compile(rb".*?(?:\r?\n){2}|.+", re.DOTALL)


def without_usage(raw: bytes) -> bytes:
    """Whole events of Chat Completions without the one that has the usage and no choices."""
    # Most reads have no empty list at all, which is the quickest of these to find out.
    if not (_NOTHING.search(raw) and _SOME_USAGE.search(raw) and _NO_CHOICES.search(raw)):
        return raw
    if b"\r" in raw:
        events = _EVENT.findall(raw)
    else:
        *whole, rest = raw.split(b"\n\n")
        events = [*(event + b"\n\n" for event in whole), rest]
    return b"".join(event for event in events if not (_NO_CHOICES.search(event) and _SOME_USAGE.search(event)))


def _late(outcome: Outcome) -> dict[str, object]:
    """The headers of a plain answer, as far as they were not known at the start of a stream."""
    return {
        "request_id": outcome.request_id,
        **{name.removeprefix(HEADER_PREFIX).replace("-", "_"): value for name, value in attribution(outcome)},
        "cost_state": outcome.cost.state,
    }


def parsed(parse: Callable[[bytes], _T], body: bytes) -> _T:
    """A body read by its protocol. Raises InvalidRequest with the path of the field."""
    try:
        return parse(body)
    except MalformedRequest as error:
        code = Code.INVALID_REQUEST if error.path else Code.INVALID_JSON
        raise InvalidRequest(error.reason, code=code, param=error.path or None) from error


def named_model(model: str | None, *, role: str | None, deployment: str | None = None) -> str:
    """
    The model a request names; empty where it asks for a role instead. A deployment in the path is the model, whatever
    the body says: so Azure has it, whose clients write other things there. Raises InvalidRequest.
    """
    model = deployment or model
    if not model and role is None:
        raise InvalidRequest("is required", param="model")
    return model or ""


def wanted_betas(exchange: Exchange) -> tuple[str, ...]:
    """
    The betas that the caller asks for. Of all that it may send, this header alone reaches a provider, so each of them
    is a plain word. Raises InvalidRequest.
    """
    given = exchange.request.headers.getall(BETAS, ())
    betas = [beta.strip(" \t") for value in given for beta in value.split(",")] if given else []
    if len(betas) > _MOST_BETAS or not all(_BETA.fullmatch(beta) for beta in betas):
        raise InvalidRequest(f"must be up to {_MOST_BETAS} names of letters, digits, `.`, `_` and `-`", param=BETAS)
    return tuple(dict.fromkeys(betas))
