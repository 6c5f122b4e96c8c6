"""A form means the same at any split, and what is none is refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import InvalidRequest
from gateway.rest.multipart import FormParser, Part, boundary_of

BOUNDARY = b"x-y"


def form(*parts: tuple[str, bytes]) -> bytes:
    return b"".join(b"--x-y\r\n%b\r\n\r\n%b\r\n" % (head.encode(), body) for head, body in parts) + b"--x-y--\r\n"


def named(name: str, more: str = "") -> str:
    return f'Content-Disposition: form-data; name="{name}"{more}'


def parsed(pieces: Iterable[bytes]) -> tuple[list[tuple[Part, bytes]], bool]:
    parser = FormParser(BOUNDARY)
    found: list[tuple[Part, bytes]] = []
    for piece in pieces:
        for item in parser.feed(piece):
            if isinstance(item, Part):
                found.append((item, b""))
            else:
                found[-1] = (found[-1][0], found[-1][1] + item)
    return found, parser.ended


@given(
    bodies=st.lists(st.lists(st.sampled_from([b"a", b"\r\n", b"--x-y", b"--", b"\r", b"--x-", b"\0"])), max_size=4),
    cuts=st.lists(st.integers(0, 400), max_size=8),
)
def test_any_split_gives_the_same_parts(bodies: list[list[bytes]], cuts: list[int]) -> None:
    contents = [b"".join(body) for body in bodies]
    contents = [content for content in contents if b"\r\n--x-y" not in b"\r\n" + content]
    whole = form(*((named(f"f{n}"), content) for n, content in enumerate(contents)))
    places = sorted({min(cut, len(whole)) for cut in cuts} | {0, len(whole)})
    pieces = [whole[a:b] for a, b in itertools.pairwise(places)]
    wanted = [(Part(name=f"f{n}", filename=None), content) for n, content in enumerate(contents)]
    assert parsed(pieces) == (wanted, True)
    assert parsed(whole[n : n + 1] for n in range(len(whole))) == (wanted, True)


def test_names_are_read_as_clients_write_them() -> None:
    found, _ = parsed([form((named("file", '; filename="a\\"b%22c.jsonl"') + "\r\nContent-Type: text/plain", b"x"))])
    assert found == [(Part(name="file", filename='a"b"c.jsonl'), b"x")]


def test_what_stands_before_and_behind_the_form_is_left_out() -> None:
    found, ended = parsed([b"preamble\r\n" + form((named("a"), b"1")) + b"epilogue"])
    assert (found, ended) == ([(Part(name="a", filename=None), b"1")], True)


def test_a_form_that_breaks_off_has_not_ended() -> None:
    assert parsed([form((named("a"), b"1"))[:-8]])[1] is False


@pytest.mark.parametrize(
    "body",
    [
        form(("Content-Type: text/plain", b"x")),
        form(('Content-Disposition: attachment; name="a"', b"x")),
        form(("Content-Disposition: form-data", b"x")),
        b"--x-yz\r\n" + form((named("a"), b"1")),
        form((named("a" * 9000), b"x"))[:8900],
        form(*((named(f"f{n}"), b"") for n in range(33))),
    ],
    ids=["no name", "no form-data", "nothing", "another boundary", "endless header", "too many parts"],
)
def test_what_is_no_form_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parsed([body])


@pytest.mark.parametrize(
    ("header", "boundary"),
    [
        ("multipart/form-data; boundary=x-y", b"x-y"),
        ('multipart/form-data; charset=utf-8; Boundary="x y"', b"x y"),
    ],
)
def test_the_boundary_is_in_the_header(header: str, boundary: bytes) -> None:
    assert boundary_of(header) == boundary


@pytest.mark.parametrize("header", ["multipart/form-data", "multipart/form-data; boundary=", 'a; boundary="'])
def test_a_header_without_a_boundary_is_refused(header: str) -> None:
    with pytest.raises(InvalidRequest):
        boundary_of(header)
