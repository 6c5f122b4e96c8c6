"""Word of an end goes to hosts that the operator named, however a URL is spelt."""

from __future__ import annotations

import pytest

from gateway.errors import InvalidRequest
from gateway.jobs.destinations import Destinations, place_fault

PUBLIC = Destinations(["Hooks.example.com", "other.example:8443", "127.0.0.1"], allow_http=False, allow_private=False)
LOCAL = Destinations(["127.0.0.1:9000", "localhost"], allow_http=True, allow_private=True)


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.example.com",
        "https://hooks.example.com/",
        "https://HOOKS.example.com/a/b?token=x%20y&z=1",
        "https://hooks.example.com:443/a",
        "https://other.example:8443/a",
        "https://hooks.example.com?x=@evil.example",
    ],
)
def test_what_is_allowed_may_be_told(url: str) -> None:
    PUBLIC.check(url)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "hooks.example.com",
        "//hooks.example.com/",
        "http://hooks.example.com/",
        "HTTPS://hooks.example.com/",
        "ftp://hooks.example.com/",
        "https://hooks.example.com:8443/",
        "https://hooks.example.com:0/",
        "https://hooks.example.com:99999/",
        "https://hooks.example.com:/",
        "https://hooks.example.com./",
        "https://other.example/",
        "https://evil.example/",
        "https://evil.example/hooks.example.com",
        "https://hooks.example.com.evil.example/",
        "https://evil-hooks.example.com/",
        "https://hooks.example.com@evil.example/",
        "https://evil.example#@hooks.example.com/",
        "https://hooks.example.com#x",
        "https://user:pass@hooks.example.com/",
        "https://evil.example\\@hooks.example.com/",
        "https://hooks.example.com\\.evil.example/",
        "https://hooks%2eexample.com/",
        "https://hooks.example.com%00.evil.example/",
        "https://hooks.example.com/\r\nx: y",
        "https://hooks.example.com/a b",
        "https://hooks.example.com/%zz",
        "https://hooks.example.com/\x00",
        " https://hooks.example.com/",
        "https://hooks.example.com/ ",
        "https://hooks\u3002example.com/",
        "https://127.0.0.1/",
        "https://2130706433/",
        "https://0x7f.1/",
        "https://[::1]/",
        "https://[::ffff:127.0.0.1]/",
        "https://localhost/",
        "https://hooks.example.com/" + "a" * 2048,
    ],
)
def test_whatever_else_it_says_it_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        PUBLIC.check(url)
    assert refused.value.param == "webhook_url"
    assert "evil" not in refused.value.message


def test_an_operator_may_allow_what_is_near() -> None:
    LOCAL.check("http://127.0.0.1:9000/x")
    LOCAL.check("http://localhost/x")
    for url in ("http://127.0.0.1:9001/x", "https://localhost:9000/"):
        with pytest.raises(InvalidRequest):
            LOCAL.check(url)


def test_nothing_may_be_told_where_nothing_is_allowed() -> None:
    with pytest.raises(InvalidRequest, match="not configured"):
        Destinations([], allow_http=True, allow_private=True).check("https://hooks.example.com/")


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1",
        "fd00::1",
        "ff02::1",
        "::ffff:10.0.0.1",
        "64:ff9b::a00:1",
        "2002:a00:1::1",
    ],
)
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    assert PUBLIC.address_fault(address) is not None
    assert LOCAL.address_fault(address) is None


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1", "::ffff:8.8.8.8"])
def test_public_addresses_are_right(address: str) -> None:
    assert PUBLIC.address_fault(address) is None


@pytest.mark.parametrize(
    "entry", ["", "a b", "https://x", "x/", "*.example.com", "x:0", "x:65536", "x:", "\u00e4.example"]
)
def test_an_entry_that_is_no_host_is_told(entry: str) -> None:
    assert place_fault(entry) is not None


@pytest.mark.parametrize("entry", ["hooks.example.com", "x", "10.0.0.5:8080", "localhost:1"])
def test_a_host_is_an_entry(entry: str) -> None:
    assert place_fault(entry) is None
