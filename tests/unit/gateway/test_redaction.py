"""What is taken out of captured texts, and what is left in them."""

from __future__ import annotations

import json
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.capture.redaction import DATA, KNOWN, Redaction

ALL = Redaction()


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("write to ada.lovelace+x@mail.example.co.uk, please", "write to [email], please"),
        ("my card is 4111 1111 1111 1111.", "my card is [card]."),
        ("or 378282246310005 or 4111-1111-1111-1111", "or [card] or [card]"),
        ("order 4111 1111 1111 1112 has no check digit", "order 4111 1111 1111 1112 has no check digit"),
        ("3.14159265358979323846 is no card", "3.14159265358979323846 is no card"),
        ("OPENAI_API_KEY=sk-proj-abcdefghijklmnop1234", "OPENAI_API_KEY=[secret]"),
        ("AKIAIOSFODNN7EXAMPLE and ghp_0123456789abcdef0123456789abcdef0123", "[secret] and [secret]"),
        ("Authorization: Bearer abcdefghijklmnopqrstuvwxyz", "Authorization: [secret]"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTYifQ.c2lnbmF0dXJlc2lnbmF0dXJl", "[secret]"),
        (
            "a\n-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----\nb",
            "a\n[secret]\nb",
        ),
        ("what is a bridge? 2026-12-01, 1 + 1 = 2", "what is a bridge? 2026-12-01, 1 + 1 = 2"),
        ("A" * DATA + "BCDE", f"[{DATA + 4} characters of data]"),
        ("a " * DATA, "a " * DATA),
    ],
)
def test_what_is_private_is_taken_out_and_the_rest_is_left(text, left):
    assert ALL.text(text) == left


def test_only_what_was_asked_for_is_taken_out_and_ones_own_patterns_are():
    text = "ada@mail.example, sk-abcdefghijklmnop1234, case 4711"
    assert Redaction(["email"]).text(text) == "[email], sk-abcdefghijklmnop1234, case 4711"
    assert Redaction([], [r"case \d+"]).text(text) == "ada@mail.example, sk-abcdefghijklmnop1234, [redacted]"
    with pytest.raises(re.error):
        Redaction([], ["("])


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@given(_JSON)
def test_a_document_without_anything_private_is_what_it_was(document):
    assert json.loads(ALL.json(json.dumps(document).encode())) == document


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize(
    "hostile",
    [
        "a@" * 50_000,
        "a." * 50_000,
        "1 " * 50_000,
        "1" * 1999,
        "sk-" * 30_000,
        "-----BEGIN PRIVATE KEY-----" * 2000,
        "eyJ" + "a" * 1990,
        "eyJaaaaaaaaaaa." * 5000,
        "bearer " * 20_000,
    ],
)
def test_no_text_takes_the_patterns_long(name, hostile):
    began = time.process_time()
    Redaction([name]).text(hostile)
    # A pattern that backtracks would take hours.
    assert time.process_time() - began < 20
