"""What is read of rate-limit headers, and what is not."""

from __future__ import annotations

import pytest

from adapters.limits import Remaining, remaining

#: As they were recorded or are documented, by whom.
SAID = {
    "openai": (
        {
            "x-ratelimit-limit-requests": "10000",
            "x-ratelimit-limit-tokens": "2000000",
            "x-ratelimit-remaining-requests": "9999",
            "x-ratelimit-remaining-tokens": "1999983",
            "x-ratelimit-remaining-input-images": "49999",
            "x-ratelimit-reset-requests": "6ms",
            "x-ratelimit-reset-tokens": "0s",
        },
        (9999, 1_999_983),
    ),
    "openai, of a project": (
        {"x-ratelimit-remaining-tokens": "149984", "x-ratelimit-remaining-project-tokens": "57000"},
        (None, 57_000),
    ),
    "azure": (
        {
            "x-ratelimit-remaining-requests": "49",
            "x-ratelimit-reset-requests": "1",
            "x-ratelimit-remaining-tokens": "49994",
            "x-ratelimit-reset-tokens": "0",
        },
        (49, 49_994),
    ),
    "azure, beside an error: nothing left, and full at once": (
        {
            "x-ratelimit-remaining-requests": "48",
            "x-ratelimit-reset-requests": "1",
            "x-ratelimit-remaining-tokens": "0",
            "x-ratelimit-reset-tokens": "0",
        },
        (48, None),
    ),
    "azure, where it does not know": (
        {"x-ratelimit-remaining-tokens": "-1", "x-ratelimit-reset-tokens": "0"},
        None,
    ),
    "groq, requests of the day": (
        {
            "x-ratelimit-remaining-requests": "14370",
            "x-ratelimit-remaining-tokens": "17997",
            "x-ratelimit-reset-requests": "2m59.56s",
            "x-ratelimit-reset-tokens": "7.66s",
        },
        (14_370, 17_997),
    ),
    "cerebras": (
        {
            "x-ratelimit-remaining-requests-day": "1439878",
            "x-ratelimit-remaining-tokens-minute": "997483",
            "x-ratelimit-reset-requests-day": "10805.643310785294",
        },
        (1_439_878, 997_483),
    ),
    "mistral": (
        {
            "x-ratelimitbysize-remaining-minute": "1874134",
            "x-ratelimitbysize-remaining-month": "9954681575",
            "ratelimitbysize-remaining": "1874134",
        },
        (None, 1_874_134),
    ),
    "mistral, by other names": (
        {"x-ratelimit-remaining-req-minute": "59", "x-ratelimit-remaining-tokens-minute": "47196"},
        (59, 47_196),
    ),
    "anthropic, refused": (
        {
            "anthropic-ratelimit-requests-remaining": "0",
            "anthropic-ratelimit-requests-reset": "2024-06-04T18:39:57Z",
            "anthropic-ratelimit-tokens-remaining": "8000",
            "anthropic-ratelimit-input-tokens-remaining": "1000",
            "anthropic-ratelimit-output-tokens-remaining": "500",
        },
        (0, 8000),
    ),
    "of a second": ({"x-ratelimit-remaining": "9", "x-ratelimit-limit": "10", "x-ratelimit-reset": "1"}, None),
    "nobody": ({}, None),
}


@pytest.mark.parametrize(("headers", "expected"), SAID.values(), ids=SAID)
def test_what_is_left_is_read_as_each_provider_says_it(headers, expected):
    found = remaining(headers, 7.0)
    if expected is None:
        assert found is None
    else:
        assert found == Remaining(requests=expected[0], tokens=expected[1], told_at=7.0)


@pytest.mark.parametrize(
    "nonsense", ["", " ", "-1", "+5", "1.5", "1e3", "many", "0x10", "1,000", "١٢", "5, 5", "9" * 13, "NaN", "5\n"]
)
def test_nonsense_is_not_read_and_does_not_hide_the_rest(nonsense):
    headers = {"x-ratelimit-remaining-requests": nonsense, "x-ratelimit-remaining-tokens": "12"}
    assert remaining(headers, 0.0) == Remaining(tokens=12)


@pytest.mark.parametrize(("reset", "read"), [("1s", True), ("0s", False), ("0", False), ("0.0", False), (None, True)])
def test_nothing_left_counts_unless_it_is_full_again_at_once(reset, read):
    headers = {"x-ratelimit-remaining-requests": "0"}
    if reset is not None:
        headers["x-ratelimit-reset-requests"] = reset
    assert remaining(headers, 0.0) == (Remaining(requests=0) if read else None)
