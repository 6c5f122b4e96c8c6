from __future__ import annotations

from decimal import Decimal
from typing import Any

import msgspec
import pytest

from gateway.errors import Code, InvalidRequest
from gateway.rest.body import decode, decode_exact


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    count: int = 0


class Thing(msgspec.Struct, forbid_unknown_fields=True):
    name: str = ""
    weight: float = 0.0
    inner: list[Inner] = []
    rest: Any = None


def test_a_document_is_read_into_its_type():
    assert decode(b'{"name": "x", "inner": [{"count": 2}]}', Thing) == Thing(name="x", inner=[Inner(count=2)])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"name": "x"} {}',
        b"\xff\xfe{\x00}\x00",
        b'\xef\xbb\xbf{"name": "x"}',
        b'{"name": "\xff"}',
        b'{"rest": "\xff"}',
        b'{"rest": "\xed\xa0\x80"}',
        b'{"name": "\\ud800"}',
        b'{"weight": NaN}',
        b'{"weight": Infinity}',
        b'{"name": "a\x00b"}',
        b'{"rest": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"rest": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
        b'{"name": "x", "name": "y"}',
        b'{"rest": [{"a": 1, "b": {"c": 1, "\\u0063": 2}}]}',
    ],
)
def test_what_is_not_one_clear_json_document_is_invalid_json(body: bytes):
    with pytest.raises(InvalidRequest) as caught:
        decode(body, Thing)
    assert caught.value.code is Code.INVALID_JSON


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (b'{"weight": 1e400}', "weight"),
        (b'{"name": 1}', "name"),
        (b'{"inner": [{}, {"count": "2"}]}', "inner[1].count"),
        (b'{"inner": [{"cuont": 2}]}', "inner[0].cuont"),
        (b'{"nmae": "x"}', "nmae"),
        (b"[]", None),
    ],
)
def test_another_shape_is_an_invalid_request_with_the_path(body: bytes, path: str | None):
    with pytest.raises(InvalidRequest) as caught:
        decode(body, Thing)
    assert caught.value.code is Code.INVALID_REQUEST
    assert caught.value.param == path


def test_the_path_of_the_document_itself_comes_first():
    with pytest.raises(InvalidRequest) as caught:
        decode(b'{"count": "x"}', Inner, at="jobs[7].body")
    assert caught.value.param == "jobs[7].body.count"


def test_a_refusal_does_not_repeat_what_was_sent():
    for body in (b'{"name": "s3cret", "name": "s3cret"}', b'{"inner": "s3cret"}', b'{"s3cret'):
        with pytest.raises(InvalidRequest) as caught:
            decode(body, Thing)
        assert "s3cret" not in caught.value.message


def test_numbers_that_no_type_asks_for_keep_their_exact_value():
    assert decode_exact(msgspec.Raw(b"[0.10, 3]")) == [Decimal("0.10"), 3]
    with pytest.raises(InvalidRequest):
        decode_exact(b"1e99999999999999999999")
