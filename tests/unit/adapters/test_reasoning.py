"""Effort in words and in tokens."""

from __future__ import annotations

import pytest

from adapters.reasoning import WORDS, budget_of, effort_of, is_lessened, nearest, within


@pytest.mark.parametrize(
    ("effort", "budget"), [("none", 0), ("minimal", 1024), ("low", 1024), ("medium", 8192), ("high", 24576)]
)
def test_every_word_has_a_budget(effort, budget):
    assert budget_of(effort) == budget


def test_a_word_that_is_not_known_is_no_budget_and_one_above_high_is_told_to_be_less():
    assert budget_of("silly") is None
    assert [word for word in WORDS if is_lessened(word)] == ["xhigh", "max"]
    assert budget_of("xhigh") == budget_of("max") == budget_of("high")


def test_a_budget_that_was_made_leaves_half_of_the_limit_for_the_answer():
    assert within(24576, None, least=512) == 24576
    assert within(24576, 2000, least=512) == 1000
    assert within(1024, 8000, least=512) == 1024
    assert within(24576, 10, least=512) == 512


@pytest.mark.parametrize(
    ("effort", "known", "word"),
    [
        ("low", ("low", "high"), "low"),
        ("minimal", ("low", "high"), "low"),
        ("medium", ("low", "high"), "high"),
        ("max", ("low", "high"), "high"),
        ("silly", ("low", "high"), "silly"),
    ],
)
def test_a_word_becomes_the_next_one_that_is_known(effort, known, word):
    assert nearest(effort, known) == word


@pytest.mark.parametrize(
    ("budget", "effort"),
    [(0, "none"), (1, "low"), (1024, "low"), (1025, "medium"), (8192, "medium"), (8193, "high"), (10**6, "high")],
)
def test_a_budget_is_the_least_effort_that_holds_it(budget, effort):
    assert effort_of(budget) == effort


@pytest.mark.parametrize("effort", ["none", "low", "medium", "high"])
def test_there_and_back_is_the_same_word(effort):
    budget = budget_of(effort)
    assert budget is not None
    assert effort_of(budget) == effort
