"""
From the lines of a submission to jobs, without I/O.

A line is judged alone: what is wrong with it is said beside its neighbours' success, with its number, and it is kept
as a failed job so that the results have a line for every line that was sent. Whatever could fail later for reasons
that can be seen now is refused here: a job that waits a day to learn that a field was misspelt is a day lost.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec

from adapters.body import refuse_flood
from adapters.errors import MalformedRequest
from admission.ids import new_id
from admission.lease import Class
from gateway.call import Options
from gateway.errors import Code, GatewayError, InvalidRequest, ModelNotFound, not_json
from gateway.jobs.formats import RESPONSES, Formats
from gateway.jobs.settings import JobsSettings
from gateway.policy import Policy

_V = TypeVar("_V")

MAX_CUSTOM_ID_CHARS = 512

#: Lines, and bytes of long ones, judged in one go; then other requests have their turn.
_TURN_LINES = 64
_TURN_BYTES = 64 * 1024
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_string = msgspec.json.Decoder(str)
_number = msgspec.json.Decoder(float)
_whole = msgspec.json.Decoder(int)
_switch = msgspec.json.Decoder(bool)
_undecodable = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


class ParseOptions(Protocol):
    def __call__(self, fields: Mapping[str, Any], /, *, klass: Class) -> Options:
        """The caller fields of a JSON object; `klass` where it names none. Raises InvalidRequest with the path."""
        ...


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Why a line was refused."""

    code: str
    message: str
    #: The path of the field that is at fault.
    param: str | None = None


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What only a job has, of its caller's choice."""

    #: Seconds.
    deadline_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    max_attempts: Annotated[int, msgspec.Meta(ge=1)] | None = None
    webhook_url: str | None = None


class JobFields(Wishes, frozen=True, kw_only=True):
    """What a job has beside the caller fields. Each is looked at by itself, so that a fault is told with its place."""

    # Those of an OpenAI batch line.
    url: str
    body: dict[str, Any]
    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CUSTOM_ID_CHARS)] | None = None
    method: Literal["POST"] | None = None


_OF_THE_JOB = frozenset(JobFields.__struct_fields__)
_WISHES = frozenset(Wishes.__struct_fields__)

#: Sets of caller fields that are remembered of one submission. Where each line has its own there is nothing to gain.
_MOST_REMEMBERED = 256


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was made of another API than the one for jobs, and becomes one: read and understood already."""

    url: str
    #: Empty where a role is asked for instead.
    model: str
    #: JSON text.
    body: str
    #: What the response repeats of its request: JSON text.
    response_head: str
    options: Options
    wishes: Wishes = Wishes()


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a submission, ready for the store. With a fault it is kept as a failed job."""

    job_id: uuid.UUID
    key_id: uuid.UUID
    submission_id: uuid.UUID
    number: int
    custom_id: str | None = None
    url: str | None = None
    model: str | None = None
    session_id: str | None = None
    klass: int = Class.BATCH.value
    body: str | None = None
    #: The file whose line with this number is the request, where the job has no body of its own.
    file_id: uuid.UUID | None = None
    options: str = "{}"
    #: Who is told of its end.
    webhook_url: str | None = None
    #: Where it is looked up as a response: what that repeats of its request, JSON text.
    response_head: str | None = None
    attempts_allowed: int = 1
    deadline_s: float = 0.0
    fault: Fault | None = None


class Remembered:
    """
    What the lines of one submission have in common, found out at the first of them. Only what was accepted is here: a
    fault is found anew, and told of each line that has it.
    """

    def __init__(self, policy: Policy) -> None:
        #: What the key may use.
        self.policy = policy
        #: Models and roles that it may ask for.
        self.models: set[tuple[str, str | None]] = set()
        #: By the names and the texts of caller fields: what they mean, and that as it is stored.
        self.options: dict[tuple[tuple[str, bytes], ...], tuple[Options, str]] = {}


class Judge:
    """What makes a line acceptable. One for the life of the process."""

    def __init__(
        self,
        *,
        caller_fields: Collection[str],
        parse_options: ParseOptions,
        formats: Formats,
        resolve: Callable[[str, str | None, Policy], object],
        policy_of: Callable[[uuid.UUID], Policy],
        unambiguous: Callable[[bytes], object],
        may_be_told: Callable[[str], object],
        settings: JobsSettings,
        batch: bool = False,
    ) -> None:
        """
        `batch`: the lines are those of a batch. `resolve`, of a model, a role and what a key may use, raises
        ModelNotFound for a model that is not configured or not there for the key and InvalidRequest for such a role;
        `policy_of` says what a key may use, and raises GatewayError where that cannot be told now; `unambiguous`
        InvalidRequest for JSON with two members of one name; `may_be_told` InvalidRequest for a URL that no word of an
        end may be sent to.
        """
        self._caller_fields = frozenset(caller_fields)
        self._parse_options = parse_options
        self._formats = formats
        self._resolve = resolve
        self.policy_of = policy_of
        self._unambiguous = unambiguous
        self._may_be_told = may_be_told
        self.settings = settings
        self._batch = batch
        self._without_wishes = self._granted(Wishes())

    def for_batch(self, endpoint: str, within_s: float) -> Judge:
        """
        For lines of a batch: all for one endpoint, each with a name, and over when the batch is. `within_s` is what is
        left of its window.
        """
        longest = max(within_s, 0.001)
        settings = msgspec.structs.replace(self.settings, deadline_s=longest, longest_deadline_s=longest)
        return Judge(
            caller_fields=self._caller_fields,
            parse_options=self._parse_options,
            formats={endpoint: self._formats[endpoint]},
            resolve=self._resolve,
            policy_of=self.policy_of,
            unambiguous=self._unambiguous,
            may_be_told=self._may_be_told,
            settings=settings,
            batch=True,
        )

    def judge(self, raw: bytes, line: Line, remembered: Remembered) -> Line:
        """`line` filled from its text. Raises GatewayError; `custom_id_of` may still tell which line it was."""
        members = self._members(raw)
        try:
            return self._judged(raw, members, line, remembered)
        except GatewayError:
            # What no two readers need agree on is told before what this one does not like.
            self._unambiguous(raw)
            raise

    def _judged(self, raw: bytes, members: Mapping[str, msgspec.Raw], line: Line, remembered: Remembered) -> Line:
        given = members.keys() - _OF_THE_JOB
        unknown = given - self._caller_fields
        if unknown:
            raise InvalidRequest("unknown field", code=Code.UNSUPPORTED_FIELD, param=_shown(min(unknown)))
        # What stands in the body is looked at by its format, and what stands in caller fields with their meaning.
        if not _stands_once(members, raw):
            self._unambiguous(raw)
        custom_id = _text(members, "custom_id")
        if custom_id is not None and not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS:
            raise InvalidRequest(f"must have 1 to {MAX_CUSTOM_ID_CHARS} characters", param="custom_id")
        if custom_id is None and self._batch:
            raise InvalidRequest("is required", param="custom_id")
        if _text(members, "method") not in {None, "POST"}:
            raise InvalidRequest("must be POST", param="method")
        url = _text(members, "url")
        if url is None:
            raise InvalidRequest("is required", param="url")
        if url not in self._formats:
            raise InvalidRequest(f"must be one of: {', '.join(self._formats)}", param="url")
        if "body" not in members:
            raise InvalidRequest("is required", param="body")
        body = bytes(members["body"])
        options, stored = self._options(members, given, raw, remembered)
        if self._batch and options.klass is not Class.BATCH:
            raise InvalidRequest("a batch does not go before others", param="class")
        model = self._model(url, body, options.role, remembered)
        granted = self._without_wishes if _WISHES.isdisjoint(members) else self._granted(self._wishes(members))
        return msgspec.structs.replace(
            line,
            custom_id=custom_id,
            url=url,
            model=model,
            session_id=options.session_id,
            klass=options.klass.value,
            body=body.decode(),
            options=stored if options.debit_id else _with_debit(stored, line.job_id),
            **granted,
        )

    def accept(self, asked: Asked, line: Line) -> Line:
        """`line` filled from a request of another API. Raises GatewayError."""
        if len(asked.body) > self.settings.max_line_bytes:
            most = self.settings.max_line_bytes
            raise GatewayError(f"a request that is kept may have {most} bytes", code=Code.PAYLOAD_TOO_LARGE)
        self._known_model(asked.model, asked.options.role, self.policy_of(line.key_id), "model")
        options = asked.options
        stored = _written(options)
        return msgspec.structs.replace(
            line,
            url=asked.url,
            model=asked.model,
            session_id=options.session_id,
            klass=options.klass.value,
            body=asked.body,
            response_head=asked.response_head,
            options=stored if options.debit_id else _with_debit(stored, line.job_id),
            **self._granted(asked.wishes),
        )

    def _members(self, raw: bytes) -> dict[str, msgspec.Raw]:
        try:
            refuse_flood(raw)
            return _members.decode(raw)
        except MalformedRequest as error:
            raise InvalidRequest(error.reason, code=Code.TOO_LARGE) from error
        except msgspec.ValidationError as error:
            raise InvalidRequest("must be a JSON object") from error
        except _undecodable as error:
            raise not_json("the line", error) from error

    def _model(self, url: str, body: bytes, role: str | None, remembered: Remembered) -> str:
        """Empty where a role is asked for instead."""
        try:
            chat = self._formats[url].read(body).chat
        except MalformedRequest as error:
            raise InvalidRequest(error.reason, param=f"body.{error.path}" if error.path else "body") from error
        members = chat.native.fields if chat.native is not None else _members.decode(body)
        model = _text(members, "model", "body.") or ""
        if not model and role is None:
            raise InvalidRequest("is required", param="body.model")
        if _value(members, "stream", _switch, "true or false", "body."):
            raise InvalidRequest("a job's answer is not streamed", code=Code.UNSUPPORTED_FIELD, param="body.stream")
        if url == RESPONSES and _value(members, "background", _switch, "true or false", "body."):
            raise InvalidRequest(
                "a job is in the background already", code=Code.UNSUPPORTED_FIELD, param="body.background"
            )
        if (model, role) not in remembered.models:
            self._known_model(model, role, remembered.policy, "body.model")
            remembered.models.add((model, role))
        return model

    def _known_model(self, model: str, role: str | None, policy: Policy, param: str) -> None:
        try:
            self._resolve(model, role, policy)
        except ModelNotFound as error:
            raise ModelNotFound(error.message, param=param) from error

    def _options(
        self, members: Mapping[str, msgspec.Raw], given: Collection[str], raw: bytes, remembered: Remembered
    ) -> tuple[Options, str]:
        """What the caller fields mean, and that as it is stored, without a debit where the line names none."""
        texts = tuple((name, bytes(value)) for name, value in members.items() if name in given) if given else ()
        found = remembered.options.get(texts)
        if found is None:
            if given:
                self._unambiguous(raw)
            options = self._parse_options({name: members[name] for name, _ in texts}, klass=Class.BATCH)
            found = options, _written(options)
            if len(remembered.options) < _MOST_REMEMBERED:
                remembered.options[texts] = found
        return found

    def _wishes(self, members: Mapping[str, msgspec.Raw]) -> Wishes:
        deadline_s: float | None = _value(members, "deadline_s", _number, "a number of seconds")
        if deadline_s is not None and self._batch:
            deadline_s = min(deadline_s, self.settings.longest_deadline_s)
        url = _text(members, "webhook_url")
        if url is not None and self._batch:
            raise InvalidRequest("name it when the batch is created", param="webhook_url")
        return Wishes(
            deadline_s=deadline_s,
            max_attempts=_value(members, "max_attempts", _whole, "a whole number"),
            webhook_url=url,
        )

    def _granted(self, wishes: Wishes) -> dict[str, Any]:
        """The fields of a line. Raises InvalidRequest for what may not be wished for."""
        settings, deadline_s, attempts = self.settings, wishes.deadline_s, wishes.max_attempts
        if wishes.webhook_url is not None:
            self._may_be_told(wishes.webhook_url)
        if attempts is not None and not 1 <= attempts <= settings.most_attempts:
            raise InvalidRequest(f"must be from 1 to {settings.most_attempts}", param="max_attempts")
        if deadline_s is not None and not 0 < deadline_s <= settings.longest_deadline_s:
            raise InvalidRequest(f"must be above 0 and at most {settings.longest_deadline_s:g}", param="deadline_s")
        return {
            "webhook_url": wishes.webhook_url,
            "attempts_allowed": settings.max_attempts if attempts is None else attempts,
            "deadline_s": settings.deadline_s if deadline_s is None else deadline_s,
        }


_DEFAULTS = msgspec.structs.asdict(Options())


def _written(options: Options) -> str:
    """As it is stored: what is not as it is by default. `klass` is never left out, so that there is a member."""
    said = {
        name: value
        for name, value in msgspec.structs.asdict(options).items()
        if name == "klass" or value != _DEFAULTS[name]
    }
    return msgspec.json.encode(said).decode()


def _with_debit(stored: str, job_id: uuid.UUID) -> str:
    """Options without a debit, as they are stored, with that of the job itself."""
    return f'{{"debit_id":"{job_id}",{stored[1:]}'


def _stands_once(members: Mapping[str, msgspec.Raw], raw: bytes) -> bool:
    """
    Whether the text holds just these members, each once: it does where it is what they make when they are written one
    after the other, the way most programs write JSON. False is no answer.
    """
    for colon, comma in ((b'":', b',"'), (b'": ', b', "')):
        written = comma.join([b"%b%b%b" % (name.encode(), colon, value) for name, value in members.items()])
        if len(written) + 3 == len(raw):
            return raw == b'{"%b}' % written
    return False


def new_submission_id() -> uuid.UUID:
    # The highest of the low 62 bits is cleared: counting up from here never carries into the rest.
    return uuid.UUID(int=new_id().int & ~(1 << 61))


class Submission:
    """The lines of one submission, numbered from 1. Its jobs' ids follow its own, in line order."""

    def __init__(self, judge: Judge, key_id: uuid.UUID, submission_id: uuid.UUID | None = None) -> None:
        self._judge = judge
        self._key_id = key_id
        # Once for all lines: that it cannot be told is no fault of one.
        self._remembered = Remembered(judge.policy_of(key_id))
        self.submission_id = new_submission_id() if submission_id is None else submission_id
        self._custom_ids: set[str] = set()

    def begin(self) -> None:
        """From the first line again. What comes of each is the same as before."""
        self._custom_ids.clear()

    async def add_all(self, lines: Sequence[tuple[int, bytes | None]]) -> list[Line]:
        """These lines as jobs. Others get a turn in between."""
        jobs: list[Line] = []
        done = 0
        for number, raw in lines:
            done += _TURN_BYTES // _TURN_LINES + len(raw or b"")
            if done > _TURN_BYTES:
                done = 0
                await asyncio.sleep(0)
            jobs.append(self.add(number, raw))
        return jobs

    def add(self, number: int, raw: bytes | None) -> Line:
        """The line as a job. `raw` is None for a line that was too long to be kept."""
        line = Line(
            job_id=uuid.UUID(int=self.submission_id.int + number),
            key_id=self._key_id,
            submission_id=self.submission_id,
            number=number,
        )
        try:
            if raw is None:
                most = self._judge.settings.max_line_bytes
                raise InvalidRequest(f"a line may have {most} bytes", code=Code.PAYLOAD_TOO_LARGE)
            judged = self._judge.judge(raw, line, self._remembered)
            if judged.custom_id is not None and judged.custom_id in self._custom_ids:
                raise InvalidRequest("is used by an earlier line of this submission", param="custom_id")
        except GatewayError as error:
            fault = Fault(code=error.code.value, message=storable(error.message), param=_stored(error.param))
            custom_id = None if raw is None else _custom_id_of(raw)
            return msgspec.structs.replace(line, custom_id=custom_id, fault=fault)
        if judged.custom_id is not None:
            self._custom_ids.add(judged.custom_id)
        return judged


class LineSplitter:
    """Bytes to numbered lines, at any split, holding no more than one line. Blank lines count and are left out."""

    def __init__(self, *, max_line_bytes: int) -> None:
        self._most = max_line_bytes
        self._pieces: list[bytes] = []
        self._held = 0
        self._number = 0

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes | None]]:
        """The lines completed by these bytes; None in place of one that is too long."""
        *whole, rest = data.split(b"\n")
        for piece in whole:
            self._hold(piece)
            yield from self._take()
        self._hold(rest)

    def close(self) -> Iterator[tuple[int, bytes | None]]:
        """The last line, where it did not end with a line feed."""
        yield from self._take()

    def _hold(self, piece: bytes) -> None:
        self._held += len(piece)
        if self._held > self._most:
            self._pieces.clear()
        elif piece:
            self._pieces.append(piece)

    def _take(self) -> Iterator[tuple[int, bytes | None]]:
        self._number += 1
        too_long = self._held > self._most
        line = b"".join(self._pieces)
        self._pieces.clear()
        self._held = 0
        if self._number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if too_long:
            yield self._number, None
        elif line.strip():
            yield self._number, line


class FileSplitter:
    """
    A file to its lines, at any split, each as it stands there: with its line feed, and after the empty ones before it.
    Joined, they are the file.
    """

    def __init__(self, *, max_line_bytes: int) -> None:
        self._most = max_line_bytes
        self._pieces: list[bytes] = []
        self._held = 0
        self._blank = True
        self._number = 0

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """The lines completed by these bytes. Raises `payload_too_large` for one that is too long."""
        for piece in _lines_of(data):
            self._held += len(piece)
            if self._held > self._most:
                raise GatewayError(
                    f"line {self._number + 1} is too long: a line may have {self._most} bytes",
                    code=Code.PAYLOAD_TOO_LARGE,
                    param="file",
                )
            self._pieces.append(piece)
            self._blank = self._blank and not piece.strip()
            if piece.endswith(b"\n"):
                self._number += 1
                if not self._blank:
                    yield self._number, self._take()

    def close(self) -> Iterator[tuple[int, bytes]]:
        """What is left: a last line without a line feed, or empty ones."""
        if self._pieces:
            yield self._number + 1, self._take()

    def _take(self) -> bytes:
        text = b"".join(self._pieces)
        self._pieces.clear()
        self._held = 0
        self._blank = True
        return text


def _lines_of(data: bytes) -> Iterator[bytes]:
    """`bytes.splitlines` cuts at carriage returns, too."""
    *whole, rest = data.split(b"\n")
    for line in whole:
        yield line + b"\n"
    if rest:
        yield rest


def request_in(text: bytes) -> bytes:
    """What a line of a file says."""
    return text.strip().removeprefix(BYTE_ORDER_MARK)


def body_of(text: bytes) -> str:
    """The request in a line that was accepted."""
    return bytes(_members.decode(request_in(text))["body"]).decode()


def storable(text: str) -> str:
    """PostgreSQL's text has no NUL and no lone surrogates."""
    return text.replace("\0", "").encode("utf-8", "replace").decode()


def _stored(text: str | None) -> str | None:
    return None if text is None else storable(text)


def _custom_id_of(raw: bytes) -> str | None:
    """Which line it was, where that much can be read."""
    try:
        custom_id = _text(_members.decode(raw), "custom_id")
    except (*_undecodable, GatewayError):
        return None
    return custom_id if custom_id and len(custom_id) <= MAX_CUSTOM_ID_CHARS else None


def _text(members: Mapping[str, msgspec.Raw], name: str, at: str = "") -> str | None:
    value: str | None = _value(members, name, _string, "a string", at)
    if value is not None and "\0" in value:
        raise InvalidRequest("must not contain NUL", param=at + name)
    return value


def _value(
    members: Mapping[str, msgspec.Raw], name: str, decoder: msgspec.json.Decoder[_V], kind: str, at: str = ""
) -> _V | None:
    """None where it is absent or null."""
    if name not in members or bytes(members[name]) == b"null":
        return None
    try:
        return decoder.decode(members[name])
    except _undecodable as error:
        raise InvalidRequest(f"must be {kind}", param=at + name) from error


def _shown(name: str) -> str:
    return name[:64] if name.isprintable() else "?"
