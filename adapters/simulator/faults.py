"""
How the simulated provider misbehaves, and the three ways to ask for it.

The gateway forwards no headers of its callers, so faults are asked for where it does forward:

1. for the whole server, or one model of it, at run time: `POST /_control/faults`, a JSON object of the keys below;
2. in the model's name: `sim-fast?latency=0.2&status=429&rate=0.3&retry_after=2`;
3. in a top-level request field: `"simulate": {"latency": 0.2, "die": "rst"}`.

A later one overrides an earlier one, key by key, and each of them a preset of the model. An unknown key, a bad value or
a key given twice is a 400.

A fault that breaks something (`Faults.BREAKING`) strikes every dispatch, or only those that the selectors choose
(`rate`, `fail_first`, `up_after`; several must all agree). Selectors alone mean status 500. The others always apply.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import unquote

import msgspec

from adapters.simulator.content import Shape
from adapters.simulator.requests import BadRequest

Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]

#: Models that need no fault settings to be interesting.
PRESETS: dict[str, dict[str, Any]] = {
    "sim-fast": {},
    "sim-small": {},
    "sim-large": {},
    "sim-steady": {"latency": 0.15, "pace": 0.02},
    "sim-slow": {"latency": 0.8, "jitter": 0.4, "pace": 0.06},
    "sim-reasoning": {"reasoning": 24},
    "sim-cached": {"cached": 1024},
    "sim-flaky": {"rate": 0.2, "status": 503},
    "sim-limited": {"status": 429, "retry_after": 1.0},
    "sim-down": {"status": 503, "body": "text"},
}


class Faults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Everything that can be asked for. Absent means: as a good provider does."""

    # ------------------------------------------------------------ which dispatches are struck
    #: The share of dispatches, spread evenly by count; with `rate_seed`, by a hash of seed and count.
    rate: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    rate_seed: int | None = None
    #: Only the first so many dispatches of one `key`.
    fail_first: Count | None = None
    #: What `fail_first` counts by. Default: the request's correlation, or else its model.
    key: str | None = None
    #: Only until so many seconds after the start, the last reset or the last change of the server's faults.
    up_after: Seconds | None = None

    # ------------------------------------------------------------ time, in seconds
    #: No response headers before the faults of the server or of a model are set again, or all is reset.
    hold: bool = False
    #: Before the response headers.
    latency: Seconds = 0.0
    #: Up to so much more, by a hash of the dispatch's number.
    jitter: Seconds = 0.0
    #: Between the headers and the first piece.
    think: Seconds = 0.0
    #: Between two pieces of a stream.
    pace: Seconds = 0.0
    #: While waiting, a comment line as often as this.
    keepalive: Annotated[float, msgspec.Meta(gt=0)] | None = None

    # ------------------------------------------------------------ occupancy
    #: More than so many dispatches at once on this server: 429.
    capacity: Count | None = None
    #: The same, of this model.
    model_capacity: Count | None = None
    #: After the client has gone, the work goes on for so many seconds and still occupies.
    work_continues: Seconds = 0.0

    # ------------------------------------------------------------ rate limits
    #: What every answer and error says is left: `x-ratelimit-remaining-requests` and `-tokens`. It is only said, not
    #: counted down, and refuses nothing. Unset, a 429 alone says that no request is left.
    remaining_requests: Count | None = None
    remaining_tokens: Count | None = None

    # ------------------------------------------------------------ content
    #: Exactly so many pieces of text.
    chunks: Annotated[int, msgspec.Meta(ge=1, le=200_000)] | None = None
    #: A text of so many bytes.
    huge: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)] | None = None
    #: Text with combining marks, emoji, U+2028 and the like.
    unicode: bool = False
    #: Tokens of reasoning before the answer (`reasoning_content`).
    reasoning: Count = 0
    #: Tokens of the prompt that count as read from a cache.
    cached: Count = 0
    #: Tokens of the prompt that count as those of images and of sound, and of the answer as those of sound.
    image: Count = 0
    audio: Count = 0
    audio_out: Count = 0
    #: Searches that a tool of the provider's own made.
    searches: Count = 0
    #: The tier that the answer says it was served at, where that is not the standard one.
    service_tier: str | None = None
    refusal: bool = False
    #: This word as the finish reason.
    finish: str | None = None

    # ------------------------------------------------------------ form
    #: Each byte of the response in a write of its own.
    bytewise: bool = False
    #: So many events of a stream in one write.
    burst: Annotated[int, msgspec.Meta(ge=1)] = 1
    newline: Literal["lf", "crlf", "cr"] = "lf"
    #: A comment line before each event.
    comments: bool = False
    #: Where usage is told. `none`: nowhere. `early`: in the first chunk only. `late`: after `[DONE]`. `twice`.
    #: `on_finish`: in the finish chunk. `each`: cumulative in each chunk. `zeros_after`: then once more as zeros.
    #: Set, it is told whether it was asked for or not; unset, as `stream_options` says.
    usage: Literal["none", "early", "late", "twice", "on_finish", "each", "zeros_after"] | None = None
    #: All arguments of a tool call in one piece.
    whole_arguments: bool = False

    # ------------------------------------------------------------ what breaks
    status: Annotated[int, msgspec.Meta(ge=400, le=599)] | None = None
    #: The form of the error body.
    body: Literal["openai", "text", "html", "empty", "string", "bare", "detail"] = "openai"
    #: The machine code in the error body; `request_too_large` and `insufficient_quota` have messages of their own.
    code: str | None = None
    retry_after: Annotated[float, msgspec.Meta(ge=0)] | None = None
    #: How `retry_after` is told: header `retry-after` in seconds or as a date, `retry-after-ms`, or ms with a
    #: `retry-after: 0` beside it.
    retry_after_as: Literal["seconds", "date", "ms", "ms_and_zero"] = "seconds"
    hang: Literal["before_headers", "before_first_byte", "mid"] | None = None
    #: Pieces before a hang in the middle.
    hang_after: Count = 3
    #: Go on after so many seconds. Absent: hang until the client leaves.
    hang_for: Seconds | None = None
    #: How the connection ends early.
    die: Literal["rst", "fin", "rst_before_headers", "fin_before_headers"] | None = None
    #: Pieces before the connection ends. Given alone, it ends by reset.
    die_after: Count | None = None
    #: How a stream ends. `none`: neither finish reason nor `[DONE]`. `no_done`. `no_finish`: `[DONE]` alone. `two`:
    #: two finish chunks. `masked`: a "stop" whose native reason is a network error, without usage. `error_word`.
    terminal: Literal["none", "no_done", "no_finish", "two", "masked", "error_word"] | None = None
    #: `bad`: one event is not JSON. `truncated`: one is cut off. `not_object`. `html`: a page instead. `empty`.
    json: Literal["bad", "truncated", "not_object", "html", "empty"] | None = None
    #: An error under status 200: a chunk with `error`, or the same as an SSE `event: error`. 1 means `chunk`.
    error_in_stream: Literal["chunk", "event", "1"] | bool | None = None
    error_after: Count = 3
    #: `[DONE]` after the error.
    error_done: bool = False
    #: A line that never ends: so many bytes, after two pieces.
    endless_line: Annotated[int, msgspec.Meta(ge=1, le=1 << 32)] | None = None
    #: A gzip body that unpacks to so many bytes.
    compressed_bomb: Annotated[int, msgspec.Meta(ge=1, le=1 << 32)] | None = None

    BREAKING: ClassVar[tuple[str, ...]] = (
        "status",
        "hang",
        "die",
        "die_after",
        "terminal",
        "json",
        "error_in_stream",
        "endless_line",
        "compressed_bomb",
    )

    @property
    def selects(self) -> bool:
        return self.rate is not None or self.fail_first is not None or self.up_after is not None

    @property
    def breaks(self) -> bool:
        return any(getattr(self, name) is not None for name in self.BREAKING)

    @property
    def shape(self) -> Shape:
        return Shape(
            chunks=self.chunks,
            huge=self.huge,
            unicode=self.unicode,
            reasoning=self.reasoning,
            cached=self.cached,
            image=self.image,
            audio=self.audio,
            audio_out=self.audio_out,
            searches=self.searches,
            service_tier=self.service_tier,
            refusal=self.refusal,
        )

    def struck(self) -> Faults:
        """As it is for a dispatch that the selectors choose."""
        changed: dict[str, Any] = {}
        if self.selects and not self.breaks:
            changed["status"] = 500
        if self.die_after is not None and self.die is None:
            changed["die"] = "rst"
        if self.error_in_stream is not None and self.error_in_stream not in {"chunk", "event"}:
            changed["error_in_stream"] = "chunk" if self.error_in_stream in {True, "1"} else None
        return msgspec.structs.replace(self, **changed) if changed else self

    def spared(self) -> Faults:
        """As it is for the others."""
        return msgspec.structs.replace(self, **dict.fromkeys(self.BREAKING)) if self.breaks else self


NONE = Faults()


@functools.lru_cache(maxsize=4096)
def split_model(model: str) -> tuple[str, Mapping[str, Any]]:
    """A model name's own name, and the faults asked for behind it. Raises `BadRequest`."""
    name, asks, query = model.partition("?")
    if not asks:
        return name, {}
    given: dict[str, str] = {}
    for pair in query.split("&"):
        key, equals, value = pair.partition("=")
        if not key or not equals or not value:
            raise BadRequest("The model's fault settings must be key=value pairs joined by '&'.", param="model")
        if key in given:
            raise BadRequest("The model's fault settings name a key twice.", param="model")
        given[key] = unquote(value)
    checked = _convert(given, strict=False, param="model")
    return name, {key: getattr(checked, key) for key in given}


def read(settings: Mapping[str, Any], *, param: str) -> dict[str, Any]:
    """Checked fault settings from JSON. Raises `BadRequest`."""
    checked = _convert(settings, strict=True, param=param)
    return {key: getattr(checked, key) for key in settings}


def merge(*layers: Mapping[str, Any]) -> Faults:
    """One set of faults from checked layers; the later wins."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged.update(layer)
    return Faults(**merged) if merged else NONE


def _convert(settings: Mapping[str, Any], *, strict: bool, param: str) -> Faults:
    try:
        return msgspec.convert(settings, Faults, strict=strict)
    except msgspec.ValidationError as error:
        raise BadRequest(f"Invalid fault settings: {error}.", param=param, code="invalid_fault") from error


class Selector:
    """Chooses the dispatches that are struck. Counts, so it is one per server and is reset with it."""

    def __init__(self, now: float) -> None:
        self._counts: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._since = now

    def strikes(self, faults: Faults, *, model: str, correlation: str | None, now: float) -> bool:
        """Whether this dispatch is struck. Asked exactly once for each. `now` in seconds, monotonic."""
        if not faults.selects:
            return True
        chosen = True
        if faults.up_after is not None:
            chosen = now - self._since < faults.up_after
        if faults.fail_first is not None:
            chosen &= self._next("first", faults.key or correlation or model) < faults.fail_first
        if faults.rate is not None:
            turn = self._next("rate", model)
            if faults.rate_seed is None:
                chosen &= math.floor((turn + 1) * faults.rate) > math.floor(turn * faults.rate)
            else:
                chosen &= uniform(f"{faults.rate_seed}:{turn}") < faults.rate
        return chosen

    def _next(self, kind: str, key: str) -> int:
        turn = self._counts[kind, key]
        self._counts[kind, key] = turn + 1
        return turn


def uniform(seed: str) -> float:
    """A number in [0, 1) that depends on the seed alone."""
    return int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=6).digest(), "big") / (1 << 48)
