"""
What an error response means: one function over a table that each protocol brings.

The status alone decides nothing: 429 is sent for "wait", for "never" and for "another account", and 400 for a bad key.
So a rule may ask for status, machine codes and the wording together, and the first that fits wins.

Messages. A provider's message may quote the prompt, the answer or a key: validation errors do so by design, and no
pattern can tell a quoted prompt from prose. Redaction alone is therefore not enough, and nothing of a provider's
sentence is passed on unless it is one we know: `SAFE_SENTENCES` lists them, with room only for numbers, identifiers of
bounded length and nothing else. The rest of the message is ours, made of the class, the machine code and the path of
the field at fault, each held to the alphabet of identifiers.

There is one exception, `Rejected.said`. Where the request itself is at fault, only the provider's words tell what to
mend, and who sent the request may read what it quotes. They are kept apart from the message, for the caller alone: no
log, no ledger. What speaks of the operator's account, a refused key, a quota, an overload, is never passed on so.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from adapters.errors import ErrorClass, Rejected

_IDENTIFIER = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_FIELD_PATH = re.compile(r"[A-Za-z_][A-Za-z0-9_.\[\]-]{0,63}")
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:/=+-]{1,128}")

_NAME = r"[`'\"]?[\w./:@-]{1,100}[`'\"]?"

#: Provider sentences that may be repeated, because what varies in them cannot be content.
SAFE_SENTENCES: tuple[re.Pattern[str], ...] = tuple(
    re.compile(pattern)
    for pattern in (
        r"maximum context length is \d+ tokens",
        r"exceeded max context length by \d+ tokens",
        r"Your input exceeds the context window of this model",
        r"Unsupported parameter: '[\w.\[\]]{1,64}' is not supported with this model(?:\. Use '\w{1,64}' instead)?",
        rf"[Tt]he model {_NAME} does not exist(?: or you do not have access to it)?",
        rf"model {_NAME} not found",
        r"on [a-z ]{6,14} per [a-z]{3,6} \([A-Z]{3,4}\): Limit \d+(?:, Used \d+)?, Requested \d+",
        r"You exceeded your current quota, please check your plan and billing details",
        r"Insufficient Balance",
        r"Provider returned error",
        r"The engine is dead",
        r"DEGRADED function cannot be invoked",
        r"upstream connect error or disconnect/reset before headers",
        r"upstream request timeout",
        r"The model is at capacity",
        r"temporarily rate-limited upstream",
        r"prompt is too long: \d+ tokens > \d+ maximum",
        r"max_tokens: \d+ > \d+, which is the maximum allowed number of output tokens",
        r"role 'system' is not supported on this model",
        r"[`\"']?thinking\.type\.\w{1,16}[`\"']? is not supported for this model",
        r"[`\"']?(?:temperature|top_[kp])[`\"']? is deprecated for this model",
        r"[Ii]nternal server error",
        r"Service (?:temporarily )?unavailable",
    )
)

#: Characters of a provider's prose that are looked at, and that a caller is told.
_MOST_READ = 1200
_MOST_TOLD = 300
_HIDDEN = "[...]"
#: Characters of a header's value from which it is taken for a secret; `2023-06-01` is none.
_LEAST_SECRET = 12
#: Last parts of the names of hosts: those of networks of one's own, and the public ones that no field of a request ends
#: with (`id`, `name`, `app` and `in` are some that do). A vendor's documentation is masked as any other: no list of
#: hosts is ever whole, and a sentence is understood without its link.
_OF_HOSTS = (
    "internal|intern|corp|local|localdomain|localhost|lan|intra|intranet|private|priv|home|svc|cluster|consul|"
    "com|net|org|io|ai|dev|cloud|co|edu|gov|mil|info|biz|tech|eu|de|uk|us|cn|jp|fr|ch|nl|kr|ru|br|au|ca|es|it|se|pl"
)
#: How keys begin: OpenAI, Anthropic, OpenRouter, DeepSeek and Stripe (`sk`), Groq, xAI, Hugging Face, GitHub, GitLab,
#: Slack, NVIDIA, Perplexity, Cerebras, Fireworks, Replicate, Together, and our own.
_OF_KEYS = "sk|pk|rk|gsk|xai|hf|tb|sess|gh[opusr]|github_pat|glpat|xox[a-z]|xapp|nvapi|pplx|csk|fw|r8|tgp"
#: How ids of an account begin. They are words of English, too: `org-wide`.
_OF_ACCOUNTS = "org|proj|acct|user|team|wrkspc"
#: What may tell of the operator's account or network: addresses of the web, of mail and of hosts, keys and ids by what
#: they begin with, and masked ones. All bounded, as what is searched is a stranger's.
_TELLING = tuple(
    re.compile(pattern)
    for pattern in (
        r"\b[a-zA-Z][a-zA-Z0-9+.-]{0,20}://[^\s\"'<>]+",
        r"[\w.+-]{1,64}@[\w-]{1,64}\.[\w.-]+",
        rf"(?i)(?<![\w.-])(?:[\w-]{{1,63}}\.){{1,10}}(?:{_OF_HOSTS})(?![\w-])(?::\d{{1,5}})?(?:/[^\s\"'<>]*)?",
        # Any name with a port, that has a dot or a hyphen in it.
        r"(?i)(?<![\w.-])(?:localhost|[a-z][a-z0-9]{0,62}(?:[.-][a-z0-9]{1,63}){1,20}):\d{2,5}\b",
        r"(?i)\blocalhost\b",
        r"\b\d{1,3}(?:\.\d{1,3}){3}\b",
        r"(?i)(?<![\w:])(?:[0-9a-f]{0,4}:){3,7}[0-9a-f]{0,4}(?![\w:])",
        r"(?i)\b(?:bearer|basic)\s+[^\s\"']+",
        r"(?i)\barn:aws[\w-]{0,16}:[^\s\"']+",
        rf"(?i)(?<![A-Za-z0-9])(?:{_OF_KEYS})[-_][\w*.-]{{8,}}",
        rf"(?i)(?<![A-Za-z0-9])(?:{_OF_ACCOUNTS})[-_][A-Za-z0-9]{{16,}}",
        rf"(?i)(?<![A-Za-z0-9])(?:{_OF_KEYS}|{_OF_ACCOUNTS})[-_](?=[\w*.-]{{0,60}}[\d*])[\w*.-]{{4,}}",
        # Amazon's access keys and the ids of what they belong to.
        r"(?<![A-Za-z0-9])(?:AKIA|ASIA|AROA|AIDA|AGPA|ANPA|ANVA|ABIA|ACCA)[A-Z0-9]{8,}",
        # Google's keys and tokens.
        r"\bAIza[\w*-]{4,}",
        r"\bya29\.[\w.-]+",
        # JSON web tokens.
        r"\beyJ[\w-]{8,}(?:\.[\w-]*)*",
        r"(?i)\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b",
        # The number of an account at Amazon, of a project at Google.
        r"(?<![\d.])\d{12}(?![\d.]\d|\d)",
        r"\S{0,64}\*{3,}\S*",
    )
)
_WORD = re.compile(r"[\w+/=-]{10,}", re.ASCII)
_SEPARATORS = re.compile(r"[_+/=-]+")
_TURNS = re.compile(r"(?<=[A-Za-z])(?=[0-9])|(?<=[0-9])(?=[A-Za-z])")
_HUMPS = re.compile(r"(?<=[a-z])(?=[A-Z])")

#: Of an endpoint that every caller of a route is sent to, these say that the route is configured for what is not there:
#: another address, another model. A protocol's table first asks whether it speaks of a thing that the caller named.
NOT_THERE: frozenset[int] = frozenset({404, 405, 410})

#: Our own words, by class.
_WORDS: dict[ErrorClass, str] = {
    ErrorClass.FATAL: "the provider refused the request",
    ErrorClass.OURS: "the provider does not serve us",
    ErrorClass.TRANSIENT: "the provider failed",
    ErrorClass.NETWORK: "the provider was not reached",
}


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What a provider said went wrong, dug out of whatever envelope it came in."""

    #: The HTTP status, or the one the error carries in itself, where that is more telling (an error under 200).
    status: int | None
    #: Machine words, most telling first: code, type, metadata.
    codes: tuple[str, ...] = ()
    #: The provider's prose. Matched, never repeated whole.
    message: str = ""
    #: The field at fault, and whether it was only read out of the prose.
    param: str | None = None
    param_in_prose: bool = False
    headers: Mapping[str, str] = {}
    #: Seconds to wait that the error itself tells, beside its headers.
    retry_after_s: float | None = None
    #: Marks a protocol finds outside codes and prose, for its rules: "aggregator", "moderation", ...
    marks: frozenset[str] = frozenset()


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """Fits when every condition that is given holds."""

    error_class: ErrorClass
    statuses: frozenset[int] | None = None
    #: Any of these among the failure's codes; compared without case.
    codes: frozenset[str] | None = None
    message: re.Pattern[str] | None = None
    marks: frozenset[str] | None = None
    retry_after: bool | None = None
    rate_limited: bool = False
    credential_fault: bool = False

    def fits(self, failure: Failure, codes: frozenset[str], *, retry_after: bool) -> bool:
        return (
            (self.statuses is None or failure.status in self.statuses)
            and (self.codes is None or not self.codes.isdisjoint(codes))
            and (self.marks is None or not self.marks.isdisjoint(failure.marks))
            and (self.retry_after is None or self.retry_after == retry_after)
            and (self.message is None or self.message.search(failure.message) is not None)
        )


def failure_in(
    body: bytes, read: Callable[[dict[str, Any]], Failure], *, status: int, headers: Mapping[str, str]
) -> Failure:
    """
    What the body of an error response says. `read` is asked of an object; of anything else, a proxy's page or text, the
    prose counts, and "not_json" marks what no API has written.
    """
    try:
        content: Any = msgspec.json.decode(body) if body.strip() else None
    except (msgspec.DecodeError, RecursionError):
        content = None
    if isinstance(content, dict):
        return read(content)
    marks = frozenset({"not_json"}) if content is None else frozenset[str]()
    return Failure(status=status, message=prose_of(body), headers=headers, marks=marks)


def prose_of(body: bytes) -> str:
    """The start of what is no JSON, for rules to match; nothing of what is HTML."""
    return "" if b"<" in body[:64] else body[:512].decode(errors="replace")


def classify(table: Sequence[Rule], failure: Failure) -> Rejected:
    """
    The failure as the gateway understands it: the first rule that fits, then the provider's own word on retrying.

    A table should end with rules on the status alone; a failure that none fits is transient.
    """
    codes = frozenset(code.lower() for code in failure.codes)
    wait = _longer(retry_after_s(failure.headers), failure.retry_after_s)
    verdict = next(
        (rule for rule in table if rule.fits(failure, codes, retry_after=wait is not None)),
        Rule(error_class=ErrorClass.TRANSIENT),
    )
    error_class, rate_limited = verdict.error_class, verdict.rate_limited
    match failure.headers.get("x-should-retry"):
        case "false" if error_class is ErrorClass.TRANSIENT:
            # Waiting will not help here; another account or provider may.
            error_class, rate_limited = ErrorClass.OURS, False
        case "true" if error_class is ErrorClass.FATAL and verdict.codes is None and verdict.message is None:
            error_class = ErrorClass.TRANSIENT
        case _:
            pass
    code = _machine_code(failure)
    return Rejected(
        safe_message(error_class, code, failure),
        code=code,
        error_class=error_class,
        status=failure.status,
        retry_after_s=wait,
        rate_limited=rate_limited,
        credential_fault=verdict.credential_fault,
        provider_request_id=request_id(failure.headers),
        said=words_for_the_caller(failure.message) if error_class is ErrorClass.FATAL else None,
        param=None if failure.param_in_prose else _param(failure),
    )


def safe_message(error_class: ErrorClass, code: str, failure: Failure) -> str:
    """A message without secret, prompt or answer: see the module's text for why it is built up and not cut down."""
    about = [code]
    if (param := _param(failure)) is not None:
        about.append(f"param {param}")
    message = f"{_WORDS[error_class]} ({', '.join(about)})"
    said = next((found for pattern in SAFE_SENTENCES if (found := pattern.search(failure.message))), None)
    return f"{message}: {said.group()}" if said else message


def _param(failure: Failure) -> str | None:
    """The field at fault, where that has the look of one."""
    return failure.param if failure.param is not None and _FIELD_PATH.fullmatch(failure.param) else None


def words_for_the_caller(message: str) -> str | None:
    """A provider's prose on one line, without what has the look of an address, a key or an id; None: no words."""
    line = " ".join("".join(c if c.isprintable() else " " for c in message[:_MOST_READ]).split())
    if len(message) > _MOST_READ:
        # The last word may be the beginning of a key.
        line = line.rpartition(" ")[0]
    for pattern in _TELLING:
        line = pattern.sub(_HIDDEN, line)
    return _WORD.sub(_unless_random, line) or None


def _unless_random(found: re.Match[str]) -> str:
    """
    The word, or that it is hidden, where it has the look of a key or an id by its length and its mixture.

    Names of fields and of models are long as well, but made of words and of short numbers: what counts is what stands
    between their hyphens.
    """
    word = found.group()
    pieces = _SEPARATORS.split(word)
    mixed = [piece for piece in pieces if _is_mixed(piece)]
    long = len(word) >= 24 and (any(len(piece) >= 8 for piece in mixed) or len(mixed) >= 4)
    # Base 64, whose slashes cut it up: few words turn so often.
    turns = len(word) >= 32 and 6 * (len(_HUMPS.findall(word)) + len(_TURNS.findall(word))) >= len(word)
    return _HIDDEN if long or turns or any(_is_random(piece) for piece in pieces) else word


def _is_mixed(piece: str) -> bool:
    return not piece.isalpha() and not piece.isdigit() and piece != ""


def _is_random(piece: str) -> bool:
    if _is_mixed(piece):
        return len(piece) >= 20 or (len(piece) >= 10 and len(_TURNS.findall(piece)) >= 4)
    if not piece.isalpha():
        return False
    if piece.islower() or piece.isupper():
        return len(piece) >= 24
    # In a name of words each begins with its one capital, and few have less than four letters.
    return len(piece) >= 20 and len(piece) < 3.6 * (len(_HUMPS.findall(piece)) + 1)


def told(said: str, secrets: Iterable[str]) -> str:
    """Such words without these secrets, whole or one of the words in them, cut to what a caller is told."""
    for secret in secrets:
        for part in (secret, *secret.split()):
            if len(part) >= _LEAST_SECRET:
                said = said.replace(part, _HIDDEN)
    return said if len(said) <= _MOST_TOLD else f"{said[: _MOST_TOLD - 3]}..."


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """
    Seconds to wait, from `retry-after-ms` and `retry-after` (seconds or an HTTP date), the larger where both are
    given: a provider was seen to send 1 s beside 0 ms. None where neither says something above zero. Reset headers are
    left alone: they come in five units and were seen to be nonsense.
    """
    waits = [_number(headers.get("retry-after-ms")) / 1000]
    after = headers.get("retry-after")
    waits.append(_number(after) or _until(after, headers.get("date")))
    longest = max(waits)
    return longest if longest > 0 else None


def _longer(told: float | None, inside: float | None) -> float | None:
    return max((wait for wait in (told, inside) if wait is not None and wait > 0), default=None)


def request_id(headers: Mapping[str, str]) -> str | None:
    """The provider's name for this exchange, to quote in a complaint."""
    for name in ("x-request-id", "request-id", "x-generation-id", "apim-request-id", "nvcf-reqid"):
        value = headers.get(name)
        if value is not None and _REQUEST_ID.fullmatch(value):
            return value
    return None


def _machine_code(failure: Failure) -> str:
    for code in failure.codes:
        # "429" as a code says no more than the status does, and a sentence is not a code.
        if not code.isdigit() and _IDENTIFIER.fullmatch(code):
            return code
    return f"http_{failure.status}" if failure.status is not None else "provider_error"


def _number(text: str | None) -> float:
    try:
        value = float(text or 0)
    except ValueError:
        return 0
    return value if math.isfinite(value) and value > 0 else 0


def _until(text: str | None, now: str | None) -> float:
    """Seconds from the provider's own clock, where it told that, to an HTTP date."""
    if text is None:
        return 0
    try:
        then = parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return 0
    try:
        start = parsedate_to_datetime(now).timestamp() if now else time.time()
    except (ValueError, OverflowError):
        start = time.time()
    return max(then - start, 0)
