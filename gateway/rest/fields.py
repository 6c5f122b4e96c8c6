"""
The caller fields: what every request can carry beside the chat itself, under one name a transport.

Without one table the same field would grow two spellings, and a budget or a session given in the wrong one would be
dropped without a word. Unknown names are refused; so is a value that is not exactly what it should be.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Annotated, Any, Final, Literal
from urllib.parse import unquote

import msgspec
from multidict import CIMultiDictProxy

from admission.lease import Class
from gateway.call import Options, Order, Resend, Unsupported
from gateway.errors import InvalidRequest
from gateway.jobs.submission import Wishes
from gateway.rest.body import decode_exact

#: Characters of an id, a name, or a tag's value.
MAX_TEXT = 256
#: Characters of a tag's name.
MAX_TAG_NAME = 64
MAX_TAGS = 32
MAX_PROVIDERS = 64
MAX_MODELS = 64
#: Seconds.
MAX_SPILL_AFTER_S = 86_400.0
MAX_FENCE = 2**63 - 1
#: Digits of an amount of money before the point, and after it.
MAX_DIGITS = 12

HEADER_PREFIX = "x-tollbridge-"

#: What an HTTP API calls the idempotency key, beside our own name for it.
IDEMPOTENCY_KEY = "idempotency-key"
#: Characters of one that names jobs, a file or a batch. That of a call is a field, and has as many as a text.
MAX_IDEMPOTENCY_KEY_CHARS = 255

_DECIMAL = re.compile(rf"\d{{1,{MAX_DIGITS}}}(\.\d{{1,{MAX_DIGITS}}})?", re.ASCII)
_WHOLE = re.compile(r"\d{1,19}", re.ASCII)


class Refused(Exception):
    """Why a value cannot be taken. The message does not repeat the value."""


class Field(msgspec.Struct, frozen=True):
    """One caller field."""

    #: The attribute of Options.
    option: str
    #: Its name in a job and in the protos.
    name: str
    #: From what a JSON document has, strings and exact numbers. Raises Refused.
    read: Callable[[Any], Any]
    #: From the text of a header to what a JSON document would have. Raises Refused.
    from_text: Callable[[str], Any]
    #: What `read` takes, for the document of the API.
    kind: Any
    #: The same of `from_text`, where that is another.
    text_kind: Any = None

    @property
    def header(self) -> str:
        return HEADER_PREFIX + self.name.replace("_", "-")


def _same(text: str) -> str:
    return text


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Refused("must be a string")
    if not 1 <= len(value) <= MAX_TEXT:
        raise Refused(f"must have 1 to {MAX_TEXT} characters")
    if not value.isprintable():
        raise Refused("must not have control characters")
    return value


def _tags(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise Refused("must be an object of strings")
    if len(value) > MAX_TAGS:
        raise Refused(f"must have at most {MAX_TAGS} entries")
    for name, tag in value.items():
        if not 1 <= len(name) <= MAX_TAG_NAME or not name.isprintable():
            raise Refused(f"a tag's name is 1 to {MAX_TAG_NAME} characters, none of them control characters")
        if not isinstance(tag, str) or len(tag) > MAX_TEXT or not (tag.isprintable()):
            raise Refused(
                f"a tag's value is a string of at most {MAX_TEXT} characters, none of them control characters"
            )
    return value


def _tags_from_text(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in text.split(","):
        name, equals, value = entry.strip().partition("=")
        try:
            name, value = unquote(name, errors="strict"), unquote(value, errors="strict")
        except UnicodeDecodeError:
            raise Refused("is not UTF-8") from None
        if not equals:
            raise Refused("must be `name=value, name=value`, percent-encoded")
        if name in found:
            raise Refused("has a name twice")
        found[name] = value
    return found


def _fence(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_FENCE:
        raise Refused(f"must be a whole number from 0 to {MAX_FENCE}")
    return value


def _whole_from_text(text: str) -> int:
    if not _WHOLE.fullmatch(text):
        raise Refused(f"must be a whole number from 0 to {MAX_FENCE}")
    return int(text)


def _class(value: Any) -> Class:
    found = {"interactive": Class.INTERACTIVE, "batch": Class.BATCH}.get(value) if isinstance(value, str) else None
    if found is None:
        raise Refused("must be `interactive` or `batch`")
    return found


def _usd(value: Any) -> Decimal:
    """Decimal text, or a JSON number that was read exactly. A float has lost what it said."""
    if (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, str) and _DECIMAL.fullmatch(value)
    ):
        value = Decimal(value)
    # The exponent first: written out, 1e999999999 would fill the memory.
    if not isinstance(value, Decimal) or value < 0 or value.adjusted() >= MAX_DIGITS or _places(value) > MAX_DIGITS:
        raise Refused(f'must be a decimal number of USD, such as "0.25", with up to {MAX_DIGITS} digits on either side')
    return value


def _places(value: Decimal) -> int:
    exponent = value.as_tuple().exponent
    return -exponent if isinstance(exponent, int) else MAX_DIGITS + 1


def _names(what: str, most: int) -> Callable[[Any], tuple[str, ...]]:
    def read(value: Any) -> tuple[str, ...]:
        if not isinstance(value, list):
            raise Refused(f"must be a list of {what}")
        if not 1 <= len(value) <= most:
            # An empty list would say "none" to a reader and "any" to us.
            raise Refused(f"must have 1 to {most} entries")
        return tuple(_text(name) for name in value)

    return read


def _names_from_text(text: str) -> list[str]:
    return [entry.strip() for entry in text.split(",")]


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Refused("must be true or false")
    return value


def _flag_from_text(text: str) -> bool | None:
    return {"true": True, "false": False}.get(text.lower())


def _word(kind: type[enum.StrEnum]) -> Callable[[Any], enum.StrEnum]:
    *first, last = (f"`{word.value}`" for word in kind)

    def read(value: Any) -> enum.StrEnum:
        found = {word.value: word for word in kind}.get(value) if isinstance(value, str) else None
        if found is None:
            raise Refused(f"must be {', '.join(first)} or {last}")
        return found

    return read


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | Decimal | float) or not 0 <= value <= MAX_SPILL_AFTER_S:
        raise Refused(f"must be a number of seconds from 0 to {MAX_SPILL_AFTER_S:.0f}")
    return float(value)


def _number_from_text(text: str) -> Decimal:
    if not _DECIMAL.fullmatch(text):
        raise Refused("must be a decimal number")
    return Decimal(text)


def _url(value: Any) -> str:
    """Which ones are allowed, others know."""
    if not isinstance(value, str) or not value.isprintable():
        raise Refused("must be a URL")
    return value


def _amount(value: Any) -> float:
    if not isinstance(value, Decimal):
        raise Refused("must be a number of seconds")
    return float(value)


#: A control character is no part of any of them.
CLEAN: Final = r"^[^\x00-\x1f\x7f-\x9f]*$"
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TEXT, pattern=CLEAN)]
_TagName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TAG_NAME, pattern=CLEAN)]
_Tag = Annotated[str, msgspec.Meta(max_length=MAX_TEXT, pattern=CLEAN)]
_Tags = Annotated[dict[_TagName, _Tag], msgspec.Meta(max_length=MAX_TAGS)]
_TagsText = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[^=,]+=[^=,]*(,[^=,]+=[^=,]*)*$",
        description="`name=value, name=value`, percent-encoded",
        examples=["team=a, env=prod"],
    ),
]
_Fence = Annotated[int, msgspec.Meta(ge=0, le=MAX_FENCE)]
_Usd = Annotated[
    str, msgspec.Meta(pattern=rf"^[0-9]{{1,{MAX_DIGITS}}}(\.[0-9]{{1,{MAX_DIGITS}}})?$", examples=["0.25"])
]
_Amount = Annotated[float, msgspec.Meta(ge=0, lt=10**MAX_DIGITS)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_SPILL_AFTER_S)]
_Class = Literal["interactive", "batch"]
_Providers = Annotated[tuple[_Text, ...], msgspec.Meta(min_length=1, max_length=MAX_PROVIDERS)]
_Models = Annotated[tuple[_Text, ...], msgspec.Meta(min_length=1, max_length=MAX_MODELS)]


def _plain(name: str) -> Field:
    return Field(name, name, _text, _same, _Text)


#: Every caller field (design section 7). The gRPC codec fills the same attributes of Options from the same names.
FIELDS: tuple[Field, ...] = (
    _plain("session_id"),
    _plain("debit_id"),
    _plain("idempotency_key"),
    _plain("scope_id"),
    _plain("run_id"),
    _plain("step_id"),
    _plain("skill"),
    _plain("skill_version"),
    _plain("role"),
    _plain("tool"),
    Field("tags", "tags", _tags, _tags_from_text, _Tags, _TagsText),
    Field("owner_fence", "owner_fence", _fence, _whole_from_text, _Fence),
    Field("klass", "class", _class, _same, _Class),
    Field("max_cost_usd", "max_cost_usd", _usd, _same, _Usd | _Amount, _Usd),
    Field(
        "allowed_providers", "allowed_providers", _names("provider ids", MAX_PROVIDERS), _names_from_text, _Providers
    ),
    Field("allowed_models", "allowed_models", _names("models", MAX_MODELS), _names_from_text, _Models),
    Field("allow_failover", "allow_failover", _flag, _flag_from_text, bool),
    Field("resend_uncertain", "resend_uncertain", _word(Resend), _same, Resend),
    Field("spill_after_s", "spill_after_s", _seconds, _number_from_text, _Seconds),
    Field("order", "order", _word(Order), _same, Order),
    Field("unsupported", "unsupported", _word(Unsupported), _same, Unsupported),
    Field("explain", "explain", _flag, _flag_from_text, bool),
)

#: What only a job has, for requests that become one though they are no line: headers alone. The names are those of the
#: fields of a line, and of Wishes.
OF_JOBS: tuple[Field, ...] = (
    Field("deadline_s", "deadline_s", _amount, _number_from_text, Annotated[float, msgspec.Meta(gt=0)]),
    Field("max_attempts", "max_attempts", _fence, _whole_from_text, Annotated[int, msgspec.Meta(ge=1)]),
    Field("webhook_url", "webhook_url", _url, _same, str),
)

BY_NAME: dict[str, Field] = {field.name: field for field in FIELDS}
_BY_HEADER: dict[str, Field] = {field.header: field for field in FIELDS} | {IDEMPOTENCY_KEY: BY_NAME["idempotency_key"]}
_JOBS_BY_HEADER: dict[str, Field] = {field.header: field for field in OF_JOBS}


def options_from_headers(
    headers: CIMultiDictProxy[str], *, klass: Class = Class.INTERACTIVE, job: bool = False
) -> Options:
    """
    The caller fields of `x-tollbridge-...` headers. `klass` is the class where none is named. `job`: what only a job
    has may be there, too, for `wishes_from_headers`.

    Raises InvalidRequest with the header's name for an unknown one, one given twice, and a value that cannot be taken.
    """
    return Options(**{"klass": klass, **_given(headers, _BY_HEADER, others=_JOBS_BY_HEADER if job else {})})


def refuse_headers(headers: CIMultiDictProxy[str]) -> None:
    """Where many requests are handed in at once, each says for itself what it is. Raises InvalidRequest."""
    for name in headers:
        if name.lower().startswith(HEADER_PREFIX):
            raise InvalidRequest("is for single calls: each of many says it for itself", param=name.lower())


def wishes_from_headers(headers: CIMultiDictProxy[str]) -> Wishes:
    """What only a job has, of `x-tollbridge-...` headers. Raises as `options_from_headers` does."""
    return Wishes(**_given(headers, _JOBS_BY_HEADER, others=_BY_HEADER))


def _given(
    headers: CIMultiDictProxy[str], known: Mapping[str, Field], *, others: Mapping[str, Field]
) -> dict[str, Any]:
    """The values of the known ones. `others` are somebody else's."""
    given: dict[str, Any] = {}
    names = "\n".join(headers).lower()
    if HEADER_PREFIX not in names and IDEMPOTENCY_KEY not in names:
        # Most requests have none, and twenty other headers.
        return given
    for name, text in headers.items():
        lower = name.lower()
        field = known.get(lower)
        if field is None:
            if lower in _JOBS_BY_HEADER and lower not in others:
                raise InvalidRequest("is for jobs, and for responses in the background", param=lower)
            if lower.startswith(HEADER_PREFIX) and lower not in others:
                raise InvalidRequest("unknown header", param=lower)
            continue
        if field.option in given:
            raise InvalidRequest("given twice", param=lower)
        try:
            given[field.option] = field.read(field.from_text(_decoded(text).strip(" \t")))
        except Refused as error:
            raise InvalidRequest(str(error), param=lower) from error
    return given


def _decoded(text: str) -> str:
    """The value of a header, of which bytes that are no UTF-8 were put into surrogates. Raises Refused."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Refused("must be ASCII, or UTF-8") from None
    return text


def options_from_json(fields: Mapping[str, Any], *, at: str = "", klass: Class = Class.INTERACTIVE) -> Options:
    """
    The caller fields of a JSON object, whose values are msgspec.Raw or already decoded; null is as good as absent.

    `at` is the path of the object. Give numbers that are not whole as Raw or Decimal: a float is refused as money.
    Raises InvalidRequest with the path for an unknown name and for a value that cannot be taken.
    """
    given: dict[str, Any] = {}
    for name, value in fields.items():
        path = f"{at}.{name}" if at else name
        field = BY_NAME.get(name)
        if field is None:
            raise InvalidRequest("unknown field", param=path if name.isprintable() and len(name) <= MAX_TEXT else at)
        plain = decode_exact(value) if isinstance(value, msgspec.Raw) else value
        if plain is None:
            continue
        try:
            given[field.option] = field.read(plain)
        except Refused as error:
            raise InvalidRequest(str(error), param=path) from error
    return Options(**{"klass": klass, **given})
