from __future__ import annotations

import itertools
import json
import uuid
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from adapters.protocols import PROTOCOLS
from admission.ids import new_id
from admission.lease import Class
from gateway.call import Options, Resend
from gateway.errors import Code, GatewayError, InvalidRequest, ModelNotFound
from gateway.jobs.destinations import Destinations
from gateway.jobs.formats import formats
from gateway.jobs.settings import JobsSettings
from gateway.jobs.spool import Spool
from gateway.jobs.submission import (
    BYTE_ORDER_MARK,
    FileSplitter,
    Judge,
    Line,
    LineSplitter,
    Submission,
    body_of,
)
from gateway.policy import ANYTHING, Policy
from gateway.rest.body import unique_members
from gateway.rest.fields import BY_NAME, options_from_json

KEY = new_id()


def resolve(model: str, role: str | None, policy: Policy) -> None:
    if role not in {None, "planner"}:
        raise InvalidRequest("no such role", param="role")
    if model == "missing" or not policy.allows("p", "m", model):
        raise ModelNotFound(f"no model is called {model!r}", param="model")


def judge() -> Judge:
    return Judge(
        caller_fields=BY_NAME,
        parse_options=options_from_json,
        formats=formats(PROTOCOLS),
        resolve=resolve,
        policy_of=lambda key_id: ANYTHING if key_id == KEY else Policy(models=("ok",)),
        unambiguous=unique_members,
        may_be_told=Destinations(["hooks.example.com"], allow_http=False, allow_private=False).check,
        settings=JobsSettings(max_line_bytes=4096),
    )


def line(**changes: Any) -> dict[str, Any]:
    body = {"model": "ok", "messages": [{"role": "user", "content": "hi"}]}
    return {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body} | changes


def body(**changes: Any) -> dict[str, Any]:
    return line(body={"model": "ok", "messages": [{"role": "user", "content": "hi"}]} | changes)


def add(document: object, number: int = 1) -> Line:
    raw = document if isinstance(document, bytes) else json.dumps(document).encode()
    return Submission(judge(), KEY).add(number, raw)


def test_an_openai_batch_line_becomes_a_job() -> None:
    job = add(line())
    assert job.fault is None
    assert (job.custom_id, job.url, job.model, job.key_id, job.number) == ("a", "/v1/chat/completions", "ok", KEY, 1)
    assert json.loads(job.body or "") == line()["body"]
    assert job.attempts_allowed == 3
    assert job.deadline_s == 86_400


def test_a_job_is_of_class_batch_and_its_debit_is_its_id_unless_it_says_otherwise() -> None:
    job = add(line())
    options = msgspec.json.decode(job.options, type=Options)
    assert job.klass == Class.BATCH
    assert options.klass is Class.BATCH
    assert options.debit_id == str(job.job_id)
    job = add(line(**{"class": "interactive", "debit_id": "mine", "session_id": "s", "max_cost_usd": 0.1}))
    options = msgspec.json.decode(job.options, type=Options)
    assert job.klass == Class.INTERACTIVE
    assert (options.debit_id, options.session_id, job.session_id) == ("mine", "s", "s")
    assert str(options.max_cost_usd) == "0.1"


def test_a_role_stands_for_a_model() -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}]}
    job = add(line(body=asked, role="planner"))
    assert job.fault is None
    assert (job.model, msgspec.json.decode(job.options, type=Options).role) == ("", "planner")
    # With both, the model has to be one.
    unknown = add(body(model="missing") | {"role": "planner"})
    assert unknown.fault is not None
    assert unknown.fault.code == "model_not_found"
    poet = add(line(body=asked, role="poet"))
    assert poet.fault is not None
    assert (poet.fault.code, poet.fault.param) == ("invalid_request", "role")


def test_caller_fields_survive_the_store() -> None:
    job = add(
        line(tags={"a": "ü"}, resend_uncertain="before_first_byte", allowed_providers=["p"], run_id="r", owner_fence=4)
    )
    options = msgspec.json.decode(job.options, type=Options)
    assert options.tags == {"a": "ü"}
    assert options.resend_uncertain is Resend.BEFORE_FIRST_BYTE
    assert options.allowed_providers == ("p",)
    assert options.owner_fence == 4


@pytest.mark.parametrize(
    ("document", "code", "param"),
    [
        (b"{", "invalid_json", None),
        (b"nonsense", "invalid_json", None),
        (b"\xff\xfe", "invalid_json", None),
        (b'{"custom_id": "a\xff"}', "invalid_json", None),
        (b'{"body": ' + b"[" * 100_000, "invalid_json", None),
        (b'{"body": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json", None),
        (b"[1]", "invalid_request", None),
        (b'{"url": "a", "url": "b"}', "invalid_json", "url"),
        (line(api_base="http://evil"), "unsupported_field", "api_base"),
        (line(method="GET"), "invalid_request", "method"),
        (line(url="/v1/images/generations"), "invalid_request", "url"),
        (line(url="/v1/messages", body={"model": "ok", "messages": 5}), "invalid_request", "body.messages"),
        (line(url=None), "invalid_request", "url"),
        (line(custom_id=7), "invalid_request", "custom_id"),
        (line(custom_id=""), "invalid_request", "custom_id"),
        (line(custom_id="x" * 513), "invalid_request", "custom_id"),
        (line(custom_id="a\0b"), "invalid_request", "custom_id"),
        (line(body=[]), "invalid_request", "body"),
        (body(model=None), "invalid_request", "body.model"),
        (body(model=""), "invalid_request", "body.model"),
        (body(model=1), "invalid_request", "body.model"),
        (body(model="missing"), "model_not_found", "body.model"),
        (body(stream=True), "unsupported_field", "body.stream"),
        (line(deadline_s=0), "invalid_request", "deadline_s"),
        (line(deadline_s="1"), "invalid_request", "deadline_s"),
        (line(deadline_s=1e12), "invalid_request", "deadline_s"),
        (line(max_attempts=0), "invalid_request", "max_attempts"),
        (line(max_attempts=1.5), "invalid_request", "max_attempts"),
        (line(**{"class": "urgent"}), "invalid_request", "class"),
        (line(session_id="a\0"), "invalid_request", "session_id"),
    ],
)
def test_a_bad_line_says_what_is_wrong_with_it(document: object, code: str, param: str | None) -> None:
    job = add(document)
    assert job.fault is not None
    assert (job.fault.code, job.fault.param) == (code, param)
    assert job.fault.message


_GOOD = ['"a"', '"b"', "null", '"POST"', '"/v1/chat/completions"', "3"]
_BODY = [
    '{"model":"ok","messages":[{"role":"user","content":"hi"}]}',
    '{"model":"ok","model":"ok","messages":[]}',
    '{"model":"ok","messages":[{"role":"user","content":"hi","content":"ho"}]}',
    '{"model":"ok","messages":"hi"}',
]
_MEMBER = st.one_of(
    st.tuples(st.sampled_from(["custom_id", "method", "url", "session_id", "deadline_s"]), st.sampled_from(_GOOD)),
    st.tuples(st.just("body"), st.sampled_from(_BODY)),
    st.tuples(st.just("tags"), st.sampled_from(['{"x":"1"}', '{"x":"1","x":"2"}', '"t"'])),
    st.tuples(st.sampled_from(["nobody_knows", "\\u0075rl"]), st.sampled_from(_GOOD)),
)
_RIGHT = [("url", '"/v1/chat/completions"'), ("body", _BODY[0])]


@given(members=st.lists(_MEMBER, max_size=4), right=st.booleans(), spaced=st.booleans())
@example(members=[("custom_id", '"a"'), ("custom_id", '"a"')], right=True, spaced=True)
@example(members=[("tags", '{"x":"1","x":"2"}')], right=True, spaced=False)
def test_a_line_is_judged_the_same_however_it_is_written(
    members: list[tuple[str, str]],
    right: bool,
    spaced: bool,
) -> None:
    members = [*members, *(_RIGHT if right else [])]
    colon, comma = (": ", ", ") if spaced else (":", ",")
    text = "{" + comma.join(f'"{name}"{colon}{value}' for name, value in members) + "}"
    # With a space where no program writes one, nothing is taken for granted.
    plain, odd = (add(raw.encode()) for raw in (text, text.replace("{", "{ ", 1)))
    assert (plain.fault, plain.custom_id, plain.url, plain.model) == (odd.fault, odd.custom_id, odd.url, odd.model)
    assert plain.body == odd.body
    names = [name for name, _ in members]
    if len(set(names)) < len(names):
        assert plain.fault is not None
        assert plain.fault.code == "invalid_json"


def test_caller_fields_that_repeat_mean_the_same_on_each_line() -> None:
    submission = Submission(judge(), KEY)
    texts = [line(custom_id=f"{n}", tags={"team": f"t{n % 3}"}, session_id="s" if n % 2 else None) for n in range(600)]
    for number, text in enumerate(texts, 1):
        job = submission.add(number, json.dumps(text).encode())
        options = msgspec.json.decode(job.options, type=Options)
        assert job.fault is None
        assert (options.tags, options.session_id) == (text["tags"], text["session_id"])
        assert (options.debit_id, options.klass) == (str(job.job_id), Class.BATCH)
    wrong = submission.add(601, json.dumps(line(custom_id="w", tags={"team": 5})).encode())
    assert wrong.fault is not None
    assert wrong.fault.param == "tags"


def test_what_is_wrong_with_the_chat_is_told_with_its_path() -> None:
    job = add(body(messages="hi"))
    assert job.fault is not None
    assert (job.fault.param or "").startswith("body.messages")


def test_a_bad_line_keeps_its_custom_id_where_that_can_be_read() -> None:
    assert add(line(method="GET")).custom_id == "a"
    assert add(b'{"custom_id": "a", ').custom_id is None


def test_a_line_that_is_too_long_is_refused_alone() -> None:
    job = Submission(judge(), KEY).add(3, None)
    assert job.fault is not None
    assert job.fault.code == "payload_too_large"


def test_the_second_line_with_a_custom_id_is_refused() -> None:
    submission = Submission(judge(), KEY)
    raw = json.dumps(line()).encode()
    assert submission.add(1, raw).fault is None
    second = submission.add(2, raw)
    assert second.fault is not None
    assert (second.fault.param, second.custom_id) == ("custom_id", "a")


def test_the_custom_id_of_a_refused_line_is_free_for_another() -> None:
    submission = Submission(judge(), KEY)
    submission.add(1, json.dumps(line(method="GET")).encode())
    assert submission.add(2, json.dumps(line()).encode()).fault is None


def test_the_ids_of_a_submissions_jobs_follow_its_own_in_line_order() -> None:
    for _ in range(200):
        submission = Submission(judge(), KEY)
        last = submission.add(50_000, None)
        assert last.job_id.int - submission.submission_id.int == 50_000
        assert last.job_id.version == 7
        assert last.job_id.variant == uuid.RFC_4122


@given(
    st.lists(st.binary(max_size=12).filter(lambda data: b"\n" not in data), max_size=8),
    st.lists(st.integers(0, 80), max_size=8),
)
@example([b"\xef\xbb\xbf\xef\xbb\xbf"], [2, 4])
def test_lines_are_the_same_at_any_split(lines: list[bytes], cuts: list[int]) -> None:
    whole = b"\n".join(lines)

    def split(pieces: list[bytes]) -> list[tuple[int, bytes | None]]:
        splitter = LineSplitter(max_line_bytes=8)
        found = [entry for piece in pieces for entry in splitter.feed(piece)]
        return found + list(splitter.close())

    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    pieces = [whole[a:b] for a, b in itertools.pairwise(edges)]
    expected = []
    for number, data in enumerate(whole.split(b"\n"), 1):
        line = data.removeprefix(b"\xef\xbb\xbf") if number == 1 else data
        if len(data) > 8 or line.strip():
            expected.append((number, None if len(data) > 8 else line))
    assert split(pieces) == split([whole]) == expected


def test_a_byte_order_mark_is_no_part_of_the_first_line() -> None:
    splitter = LineSplitter(max_line_bytes=100)
    assert [*splitter.feed(b"\xef\xbb"), *splitter.feed(b"\xbf{}\r\n\n"), *splitter.close()] == [(1, b"{}\r")]


@pytest.mark.parametrize("memory_bytes", [0, 100, 1_000_000])
@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 35])
async def test_a_spool_gives_back_every_line_in_order_as_often_as_it_is_asked(count: int, memory_bytes: int) -> None:
    spool = Spool(batch_lines=10, batch_bytes=1_000_000, memory_bytes=memory_bytes)
    lines = [(number, None if number % 7 == 0 else b"line %d" % number) for number in range(1, count + 1)]
    for number, text in lines:
        await spool.add(number, text)
    assert (spool.whole is not None) == (count <= 10)
    for _ in range(2):
        assert [entry async for batch in spool.batches() for entry in batch] == lines
    spool.close()


# ------------------------------------------------------------------ files


@given(
    pieces=st.lists(st.sampled_from([b"{}", b"\n", b"\r\n", b" ", b"\xff", b"a"])),
    cuts=st.lists(st.integers(0, 60), max_size=6),
)
def test_the_lines_of_a_file_are_the_file_at_any_split(pieces: list[bytes], cuts: list[int]) -> None:
    whole = b"".join(pieces)
    places = sorted({min(cut, len(whole)) for cut in cuts} | {0, len(whole)})
    splitter = FileSplitter(max_line_bytes=1000)
    lines = [line for a, b in itertools.pairwise(places) for line in splitter.feed(whole[a:b])]
    lines += splitter.close()
    assert b"".join(text for _, text in lines) == whole
    numbered = [(number, text.strip()) for number, text in enumerate(whole.split(b"\n"), 1) if text.strip()]
    assert [(number, text.strip()) for number, text in lines if text.strip()] == numbered
    # What is empty has at most one row of its own, at the end.
    assert len(lines) <= len(numbered) + 1


def test_the_body_of_a_line_is_found_again() -> None:
    document = line(body={"model": "ok", "messages": [{"role": "user", "content": "ä"}]})
    text = b"\n  \n" + json.dumps(document, ensure_ascii=False).encode() + b"\r\n"
    assert json.loads(body_of(text)) == document["body"]
    assert json.loads(body_of(BYTE_ORDER_MARK + text.strip())) == document["body"]


def test_a_batchs_lines_are_over_when_it_is() -> None:
    batch = judge().for_batch("/v1/chat/completions", 60.0)
    for fields, wanted in (({}, 60.0), ({"deadline_s": 5}, 5.0), ({"deadline_s": 500}, 60.0)):
        job = Submission(batch, KEY).add(1, json.dumps(line(**fields)).encode())
        assert (job.fault, job.deadline_s) == (None, wanted)


def test_what_a_key_may_not_have_is_refused_of_it_as_what_there_is_not() -> None:
    hidden = Submission(judge(), new_id()).add(1, json.dumps(body(model="other")).encode())
    absent = Submission(judge(), new_id()).add(1, json.dumps(body(model="missing")).encode())
    assert hidden.fault is not None
    assert absent.fault is not None
    assert (hidden.fault.code, hidden.fault.param) == (absent.fault.code, absent.fault.param)
    assert hidden.fault.message == absent.fault.message.replace("missing", "other")
    assert add(body(model="other")).fault is None


def test_that_nobody_knows_what_a_key_may_use_is_no_fault_of_a_line() -> None:
    def unknown(_: object) -> Policy:
        raise GatewayError("keys cannot be checked", code=Code.CONTROL_STORE_UNAVAILABLE)

    stale = judge()
    stale.policy_of = unknown
    with pytest.raises(GatewayError):
        Submission(stale, KEY)
