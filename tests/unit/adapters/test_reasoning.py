"""Effort in words and in tokens."""

from __future__ import annotations

import pytest

from adapters.reasoning import budget_of, effort_of


@pytest.mark.parametrize(
    ("effort", "budget"), [("none", 0), ("minimal", 1024), ("low", 1024), ("medium", 8192), ("high", 24576)]
)
def test_every_word_has_a_budget(effort, budget):
    assert budget_of(effort) == budget


def test_a_word_that_is_not_known_asks_for_much():
    assert budget_of("xhigh") == budget_of("high")


@pytest.mark.parametrize(
    ("budget", "effort"),
    [(0, "none"), (1, "low"), (1024, "low"), (1025, "medium"), (8192, "medium"), (8193, "high"), (10**6, "high")],
)
def test_a_budget_is_the_least_effort_that_holds_it(budget, effort):
    assert effort_of(budget) == effort


@pytest.mark.parametrize("effort", ["none", "low", "medium", "high"])
def test_there_and_back_is_the_same_word(effort):
    assert effort_of(budget_of(effort)) == effort
