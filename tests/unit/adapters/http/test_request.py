"""The bytes that a request begins with."""

from __future__ import annotations

import pytest

from adapters.errors import NotSent
from adapters.http.request import Origin, head


def test_a_head_says_where_it_goes_and_of_each_field_the_last_word():
    origin, start = head(
        "POST",
        "https://api.provider.test/v1/",
        "/chat?alt=sse",
        (("user-agent", "ours"), ("accept", "a"), ("User-Agent", "theirs"), ("x-key", "grüß")),
    )
    assert origin == Origin(tls=True, host="api.provider.test", port=443)
    assert start.decode() == (
        "POST /v1/chat?alt=sse HTTP/1.1\r\nhost: api.provider.test\r\n"
        "User-Agent: theirs\r\naccept: a\r\nx-key: grüß\r\n"
    )


@pytest.mark.parametrize(
    ("base_url", "path", "origin", "host", "target"),
    [
        ("http://h", "", (False, "h", 80), "h", "/"),
        ("http://h:8000/v1", "/x", (False, "h", 8000), "h:8000", "/v1/x"),
        ("https://H.test:443", "/x", (True, "h.test", 443), "h.test", "/x"),
        ("https://h:80", "/x", (True, "h", 80), "h:80", "/x"),
        ("http://[::1]:8000", "/x", (False, "::1", 8000), "[::1]:8000", "/x"),
        ("http://my_service-1", "/x", (False, "my_service-1", 80), "my_service-1", "/x"),
        ("http://bücher.test", "/x", (False, "xn--bcher-kva.test", 80), "xn--bcher-kva.test", "/x"),
        ("http://h/a b", "/ü/%2Fm:go@1?q=ä b", (False, "h", 80), "h", "/a%20b/%C3%BC/%2Fm:go@1?q=%C3%A4%20b"),
        ("http://h", "/x#part", (False, "h", 80), "h", "/x"),
        # What would end the line never gets into it.
        ("http://h", "/x\r\nhost: other", (False, "h", 80), "h", "/xhost:%20other"),
        ("http://h", "/x\x0by HTTP/1.1", (False, "h", 80), "h", "/x%0By%20HTTP/1.1"),
    ],
)
def test_a_url_is_an_origin_and_a_target(base_url, path, origin, host, target):
    found, start = head("GET", base_url, path, ())
    assert found == origin
    assert start.decode() == f"GET {target} HTTP/1.1\r\nhost: {host}\r\n"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "no url",
        "http://",
        "http:///x",
        "ftp://h",
        "//h",
        "http://user@h",
        "http://user:secret@h",
        "http://h:port",
        "http://h:99999",
        "http://[::1",
        "http://a b",
        "http://h\x00",
        "http://" + "ü" * 80,
    ],
)
def test_a_url_that_is_none_is_refused_and_not_repeated(url):
    with pytest.raises(NotSent) as caught:
        head("GET", url, "/x", ())
    assert caught.value.code == "invalid_url"
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x", "a\r\nhost: other"),
        ("x", "a\nb"),
        ("x", "a\x00"),
        ("x\r\ny", "a"),
        ("x y", "a"),
        ("x:", "a"),
        ("", "a"),
        ("Content-Length", "5"),
        ("transfer-encoding", "chunked"),
    ],
)
def test_a_field_that_would_say_something_else_is_refused_and_its_value_not_repeated(name, value):
    with pytest.raises(NotSent) as caught:
        head("GET", "http://h", "/x", ((name, value),))
    assert caught.value.code == "invalid_header"
    assert "other" not in str(caught.value)


def test_a_host_may_be_named_otherwise():
    assert head("GET", "http://127.0.0.1:1", "/x", (("Host", "h.test"),)).start.endswith(b"\r\nHost: h.test\r\n")
