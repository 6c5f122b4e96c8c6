"""
A real PostgreSQL for the tests, with every migration applied once, and a fresh database for each test that asks.

`TOLLBRIDGE_TEST_DATABASE_URL` names a server to use instead of the embedded one; its role must be able to create
databases. Several test runs may use one server at once: each has a template of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import tempfile
import time
import urllib.parse
import uuid
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from gateway import database
from gateway.embedded import EmbeddedPostgres

#: A test does not outlive the machine, so it need not wait for the disk.
TEST_SETTINGS = {"fsync": "off", "max_connections": "200"}

Result = TypeVar("Result")


def run_apart(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run it in a thread of its own: a fixture must not touch the event loop of the test that it serves."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def url_of(server: str, name: str) -> str:
    return urllib.parse.urlsplit(server)._replace(path=f"/{name}").geturl()


def execute(url: str, *statements: str) -> None:
    async def run() -> None:
        async with database.open_connection(url, name="tollbridge-tests", wait_s=5) as connection:
            for statement in statements:
                await connection.execute(statement)

    run_apart(run())


def sweep(minimum_age_s: float = 600) -> None:
    """Stop and remove the servers of test runs that were killed."""
    for directory in Path(tempfile.gettempdir()).glob("tollbridge-tests-*"):
        with contextlib.suppress(OSError):
            # Not made anew: its run may be removing it.
            with (directory / "postgres.users").open("r+b") as users:
                if time.time() - os.fstat(users.fileno()).st_mtime < minimum_age_s:
                    continue
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            EmbeddedPostgres.start(directory).stop()
            shutil.rmtree(directory)


@pytest.fixture(scope="session")
def database_server() -> Iterator[str]:
    """The URL of a server whose role may create databases."""
    given = os.environ.get("TOLLBRIDGE_TEST_DATABASE_URL")
    if given:
        yield given
        return
    sweep()
    with (
        tempfile.TemporaryDirectory(prefix="tollbridge-tests-") as directory,
        EmbeddedPostgres.start(Path(directory), settings=TEST_SETTINGS) as server,
    ):
        yield server.url


@pytest.fixture(scope="session")
def database_template(database_server: str) -> Iterator[str]:
    """The name of a database with all migrations and nothing else in it. Do not connect to it: it is to be copied."""
    name = f"tollbridge_template_{uuid.uuid4().hex}"
    execute(database_server, f"create database {name}")
    try:
        run_apart(database.migrate(url_of(database_server, name)))
        yield name
    finally:
        execute(database_server, f"drop database {name} with (force)")


@pytest.fixture
def database_url(database_server: str, database_template: str) -> Iterator[str]:
    """A migrated database of the test's own."""
    name = f"tollbridge_test_{uuid.uuid4().hex}"
    execute(database_server, f"create database {name} template {database_template}")
    yield url_of(database_server, name)
    execute(database_server, f"drop database {name} with (force)")


@pytest.fixture
def empty_database_url(database_server: str) -> Iterator[str]:
    """A database of the test's own with nothing in it."""
    name = f"tollbridge_test_{uuid.uuid4().hex}"
    execute(database_server, f"create database {name}")
    yield url_of(database_server, name)
    execute(database_server, f"drop database {name} with (force)")
