"""
Plants a bug in a copy of the checkout and runs the tests that must notice it.

The copy has what git would keep, and is what the tests import: the same interpreter with the copy first on its path.
Without this a test that cannot fail looks like any other.
"""

from __future__ import annotations

import contextlib
import enum
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from gateway.embedded import EmbeddedPostgres
from tests.mutants import watch
from tests.postgres import TEST_SETTINGS

ROOT: Final = Path(__file__).parents[2]
#: Runs at once.
AT_ONCE: Final = 2
#: Seconds for one test, and for the whole run of a mutant.
TEST_S: Final = 20
RUN_S: Final = 120
DATABASE: Final = "TOLLBRIDGE_TEST_DATABASE_URL"


class Stale(Exception):
    """The list does not fit the code any more, or the tests fail without any mutant."""


class Mutant(msgspec.Struct, frozen=True, kw_only=True):
    """A planted bug."""

    name: str
    #: The number of what it breaks.
    invariant: int
    file: str
    #: Occurs exactly once in the file.
    old: str
    new: str
    #: What must fail, as pytest takes it.
    tests: tuple[str, ...]

    @property
    def fast(self) -> bool:
        """It takes no database to notice."""
        return all(test.startswith("tests/unit/") for test in self.tests)

    def planted(self, text: str) -> str:
        """The text with the bug. Raises `Stale`."""
        found = text.count(self.old)
        if found != 1:
            raise Stale(f"{self.name}: its old text occurs {found} times in {self.file}")
        if self.old == self.new:
            raise Stale(f"{self.name}: it changes nothing")
        return text.replace(self.old, self.new)


class End(enum.StrEnum):
    KILLED = "killed"
    SURVIVED = "SURVIVED"
    #: It does not load, or its tests cannot be run: that is no test noticing a bug.
    BROKEN = "BROKEN"
    STUCK = "STUCK"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    mutant: Mutant
    end: End
    #: The test that failed first.
    killed_by: str = ""
    seconds: float
    #: What the run said, where it was not killed.
    said: str = ""


def check(mutants: Sequence[Mutant], root: Path = ROOT) -> None:
    """Raises `Stale` where an old text is not there exactly once, or a name is used twice."""
    names = [mutant.name for mutant in mutants]
    for name in names:
        if names.count(name) > 1:
            raise Stale(f"two mutants are called {name!r}")
    for mutant in mutants:
        mutant.planted((root / mutant.file).read_text(encoding="utf-8"))


def copied(place: Path) -> None:
    """Copies the files of the checkout as they are now: those that git tracks, and new ones that it does not ignore."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).exists():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)


class _Run(msgspec.Struct, frozen=True, kw_only=True):
    code: int | None
    #: When in its life a test failed ("setup", "call", "teardown"), and its name.
    failures: Sequence[tuple[str, str]]
    said: str


def _run(copy: Path, tests: Sequence[str], url: str | None, *, first_only: bool, within_s: float) -> _Run:
    failures = copy / "failures.txt"
    failures.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "pytest", "-q", "--tb=short", "--durations=0", "--durations-min=60",
        "-p", "no:cacheprovider", "-p", watch.__name__, f"--timeout={TEST_S}", *(["-x"] if first_only else []), *tests,
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(copy), watch.COPY: str(copy), watch.FAILURES: str(failures)}
    if url is not None:
        environment[DATABASE] = url
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=copy, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        code: int | None = None
        try:
            code = process.wait(timeout=within_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # What a test left running, too: the session is this run's own.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        said = output.read().decode(errors="replace")
    lines = failures.read_text(encoding="utf-8").splitlines() if failures.exists() else []
    found = [(when, name) for when, _, name in (line.partition("\t") for line in lines)]
    return _Run(code=code, failures=found, said=said)


@contextlib.contextmanager
def planted(mutant: Mutant, copy: Path) -> Iterator[None]:
    """The copy has the bug meanwhile."""
    file = copy / mutant.file
    was = file.read_text(encoding="utf-8")
    try:
        _write(file, mutant.planted(was))
        yield
    finally:
        _write(file, was)


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
    # Compiled files are told apart by second and size only.
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()


def hunt(mutant: Mutant, copy: Path, url: str | None) -> Result:
    began = time.monotonic()
    with planted(mutant, copy):
        run = _run(copy, mutant.tests, url, first_only=True, within_s=RUN_S)
    seconds = time.monotonic() - began
    killers = [name for when, name in run.failures if when == "call"]
    if run.code is None:
        end = End.STUCK
    elif run.code == 1 and killers:
        return Result(mutant=mutant, end=End.KILLED, killed_by=killers[0], seconds=seconds)
    elif run.code == 0:
        end = End.SURVIVED
    else:
        end = End.BROKEN
    return Result(mutant=mutant, end=end, seconds=seconds, said=run.said)


@contextlib.contextmanager
def server(mutants: Sequence[Mutant]) -> Iterator[str | None]:
    """One database server for all runs, where one is needed."""
    given = os.environ.get(DATABASE)
    if given or all(mutant.fast for mutant in mutants):
        yield given
        return
    with (
        # What is left of it, the next test run sweeps up.
        tempfile.TemporaryDirectory(prefix="tollbridge-tests-", ignore_cleanup_errors=True) as directory,
        EmbeddedPostgres.start(Path(directory), settings=TEST_SETTINGS) as started,
    ):
        yield started.url


def hunt_all(mutants: Sequence[Mutant], told: Callable[[Result], None]) -> list[Result]:
    """
    Every mutant, some at a time. First the same tests without any: they must pass.

    Raises `Stale`.
    """
    check(mutants)
    with (
        tempfile.TemporaryDirectory(prefix="tollbridge-mutants-", ignore_cleanup_errors=True) as place,
        server(mutants) as url,
    ):
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(AT_ONCE):
            copy = Path(place).resolve() / str(number)
            copy.mkdir()
            copied(copy)
            copies.put(copy)

        def healthy(tests: Sequence[str]) -> None:
            copy = copies.get()
            run = _run(copy, tests, url, first_only=False, within_s=RUN_S + 5 * len(tests))
            copies.put(copy)
            if run.code != 0:
                raise Stale(f"without any mutant the tests do not pass:\n{run.said}")

        def one(mutant: Mutant) -> Result:
            copy = copies.get()
            try:
                result = hunt(mutant, copy, url)
            finally:
                copies.put(copy)
            told(result)
            return result

        tests = sorted({test for mutant in mutants for test in mutant.tests})
        with ThreadPoolExecutor(AT_ONCE) as pool:
            parts = [part for part in (tests[number::AT_ONCE] for number in range(AT_ONCE)) if part]
            for _ in pool.map(healthy, parts):
                pass
            return list(pool.map(one, mutants))
