"""
A pytest plugin for the run over a mutant: it looks that the copy is what is imported, and writes down what failed.

A run that fails proves something only if it was the mutant that ran, and a test that failed in its own body: a fixture
that breaks says that the mutant does not even load.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

#: The variables that the runner sets.
COPY = "TOLLBRIDGE_MUTANT_COPY"
FAILURES = "TOLLBRIDGE_MUTANT_FAILURES"
PACKAGES = ("adapters", "admission", "gateway", "metering", "protos", "tests.postgres")
#: The exit code where something else than the copy was imported.
ELSEWHERE = 9


def pytest_sessionstart() -> None:
    copy = Path(os.environ[COPY]).resolve()
    for package in PACKAGES:
        found = importlib.import_module(package).__file__
        if found is None or not Path(found).resolve().is_relative_to(copy):
            pytest.exit(f"{package} is imported from {found} and not from the copy", returncode=ELSEWHERE)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        with Path(os.environ[FAILURES]).open("a", encoding="utf-8") as failures:
            failures.write(f"{report.when}\t{report.nodeid}\n")
