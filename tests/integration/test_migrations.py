"""The schema ends up the same however many processes, and versions, bring it there."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from pathlib import Path

import asyncpg
import pytest
import structlog.testing

from gateway import database
from gateway.database import MigrationRefused, Source, StoreUnavailable, UrlRefused


class Package:
    """A directory of SQL files that a test fills."""

    def __init__(self, root: Path, component: str) -> None:
        self.directory = root / component
        self.source = Source(component=component, directory=self.directory)

    def write(self, name: str, sql: str) -> None:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(sql)


@pytest.fixture
def first(tmp_path: Path) -> Package:
    package = Package(tmp_path, "first")
    package.write("migrations/0001_thing.sql", "create table thing (n integer); insert into thing values (1);")
    package.write("migrations/0002_more.sql", "alter table thing add column more text;")
    package.write("migrations/README.md", "not SQL")
    package.write(
        "functions/10_count.sql",
        "create or replace function count_v1() returns bigint language sql as $$ select count(more) from thing $$;",
    )
    return package


@pytest.fixture
def second(tmp_path: Path) -> Package:
    package = Package(tmp_path, "second")
    package.write("migrations/0001_depends.sql", "create table depends as select more from thing;")
    return package


async def values(url: str, statement: str) -> list[object]:
    async with database.open_connection(url, name="test") as connection:
        return [row[0] for row in await connection.fetch(statement)]


ORDER = "select component || '/' || name from control.migration order by applied_at"


async def test_files_are_applied_in_order_migrations_before_functions(
    empty_database_url: str, first: Package, second: Package
) -> None:
    assert await database.migrate(empty_database_url, [first.source, second.source]) == 4
    assert await values(empty_database_url, ORDER) == [
        "first/0001_thing.sql",
        "first/0002_more.sql",
        "second/0001_depends.sql",
        "first/functions/10_count.sql",
    ]
    assert await database.migrate(empty_database_url, [first.source, second.source]) == 0
    assert await values(empty_database_url, "select n from thing") == [1]


async def test_a_package_without_sql_is_no_fault(empty_database_url: str, tmp_path: Path) -> None:
    assert await database.migrate(empty_database_url, [Package(tmp_path, "absent").source]) == 0


async def test_runners_at_once_apply_each_file_once(empty_database_url: str, first: Package, second: Package) -> None:
    sources = [first.source, second.source]
    counts = await asyncio.gather(*(database.migrate(empty_database_url, sources) for _ in range(8)))
    assert sum(counts) == 4
    assert await values(empty_database_url, "select n from thing") == [1]


async def test_a_changed_migration_is_refused(empty_database_url: str, first: Package) -> None:
    await database.migrate(empty_database_url, [first.source])
    first.write("migrations/0001_thing.sql", "create table thing (n bigint);")
    with pytest.raises(MigrationRefused, match=r"first/0001_thing\.sql was changed after it was applied"):
        await database.migrate(empty_database_url, [first.source])


async def test_a_failed_file_leaves_nothing_and_is_named(empty_database_url: str, first: Package) -> None:
    first.write("migrations/0003_broken.sql", "create table half (n integer);\nselect nonsense from thing;")
    with pytest.raises(Exception, match="nonsense") as caught:
        await database.migrate(empty_database_url, [first.source])
    assert caught.value.__notes__ == ["in first/0003_broken.sql, line 2"]
    assert await values(empty_database_url, "select to_regclass('half')") == [None]
    assert await values(empty_database_url, "select max(number) from control.migration") == [2]


async def test_a_function_is_applied_again_when_its_text_changes(empty_database_url: str, first: Package) -> None:
    await database.migrate(empty_database_url, [first.source])
    first.write(
        "functions/10_count.sql",
        "create or replace function count_v1() returns bigint language sql as $$ select count(*) from thing $$;",
    )
    assert await database.migrate(empty_database_url, [first.source]) == 1
    assert await values(empty_database_url, "select count_v1()") == [1]


async def test_an_older_version_accepts_a_newer_database_and_leaves_its_functions_alone(
    empty_database_url: str, first: Package
) -> None:
    first.write("migrations/0003_newer.sql", "create table newer (n integer);")
    newer = "create or replace function count_v1() returns bigint language sql as $$ select 42::bigint $$;"
    older = (first.directory / "functions/10_count.sql").read_text()
    first.write("functions/10_count.sql", newer)
    await database.migrate(empty_database_url, [first.source])
    (first.directory / "migrations/0003_newer.sql").unlink()
    first.write("functions/10_count.sql", older)
    with structlog.testing.capture_logs() as logs:
        assert await database.migrate(empty_database_url, [first.source]) == 0
    assert [(entry["event"], entry["unknown"]) for entry in logs] == [
        ("database.newer_than_code", ["first/0003_newer.sql"])
    ]
    assert await values(empty_database_url, "select count_v1()") == [42]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        pytest.param(["1_thing.sql"], "not named NNNN_name", id="name"),
        pytest.param(["0001_a.sql", "0001_b.sql"], "have the same number", id="twice"),
    ],
)
async def test_names_that_do_not_give_one_order_are_refused(
    empty_database_url: str, tmp_path: Path, names: Sequence[str], message: str
) -> None:
    package = Package(tmp_path, "odd")
    for name in names:
        package.write(f"migrations/{name}", "select 1")
    with pytest.raises(MigrationRefused, match=message):
        await database.migrate(empty_database_url, [package.source])


async def test_a_file_that_comes_before_an_applied_one_is_refused(empty_database_url: str, tmp_path: Path) -> None:
    package = Package(tmp_path, "late")
    package.write("migrations/0002_second.sql", "select 1")
    await database.migrate(empty_database_url, [package.source])
    package.write("migrations/0001_first.sql", "select 1")
    with pytest.raises(MigrationRefused, match=r"0001_first\.sql comes before late/0002_second\.sql"):
        await database.migrate(empty_database_url, [package.source])


async def test_an_applied_file_that_is_missing_in_the_middle_is_refused(
    empty_database_url: str, first: Package
) -> None:
    await database.migrate(empty_database_url, [first.source])
    (first.directory / "migrations/0001_thing.sql").unlink()
    with pytest.raises(MigrationRefused, match="not in this version"):
        await database.migrate(empty_database_url, [first.source])


async def test_a_role_without_rights_can_start_on_a_schema_that_is_up_to_date(
    empty_database_url: str, first: Package
) -> None:
    await database.migrate(empty_database_url, [first.source])
    role = f"limited_{uuid.uuid4().hex}"
    async with database.open_connection(empty_database_url, name="test") as connection:
        await connection.execute(f"create role {role} login password 'x'; grant usage on schema control to {role}")
        await connection.execute(f"grant select on control.migration to {role}")
        try:
            await connection.execute(f"set role {role}")
            assert await database._applied(connection) is not None
        finally:
            await connection.execute(f"reset role; drop owned by {role}; drop role {role}")


async def test_the_migrations_of_this_version_are_applied_by_the_template(database_url: str) -> None:
    assert await database.migrate(database_url) == 0


async def test_a_server_that_is_not_there_is_unavailable_within_the_time_given(tmp_path: Path) -> None:
    async with asyncio.timeout(30):
        with pytest.raises(StoreUnavailable):
            await database.connect(f"postgresql://u:canary@/x?host={tmp_path}", name="test", wait_s=0.2)


async def test_a_database_that_does_not_exist_is_reported_at_once(database_server: str) -> None:
    url = database_server.replace("/postgres?", "/no_such_database?")
    with pytest.raises(StoreUnavailable, match="InvalidCatalogName"):
        await database.connect(url, name="test", wait_s=60)


async def test_a_connection_waits_for_a_server_that_comes_up(tmp_path: Path) -> None:
    socket = tmp_path / ".s.PGSQL.5432"
    connecting = asyncio.create_task(database.connect(f"postgresql://u@/x?host={tmp_path}", name="test", wait_s=30))
    starting = b"E" + (4 + len(body := b"SFATAL\0VFATAL\0C57P03\0Mstarting up\0\0")).to_bytes(4, "big") + body
    asked = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(starting)
        writer.close()
        asked.set()

    async with await asyncio.start_unix_server(answer, socket):
        for _ in range(2):
            asked.clear()
            await asked.wait()
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting


async def test_an_unreadable_url_is_refused_without_repeating_it() -> None:
    with pytest.raises(UrlRefused) as caught:
        await database.connect("postgresql://u:can/ary@host/x", name="test")
    assert "ary" not in str(caught.value)
    assert caught.value.__suppress_context__


async def test_a_pool_reports_a_cut_connection_and_heals(database_url: str) -> None:
    async with database.open_pool(database_url, name="test", size=2) as pool:
        with pytest.raises(StoreUnavailable), database.store_errors():
            await pool.execute("select pg_terminate_backend(pg_backend_pid())")
        assert await pool.fetchval("select 1") == 1


async def test_a_faulty_statement_stays_itself(database_url: str) -> None:
    async with database.open_pool(database_url, name="test", size=1) as pool:
        with pytest.raises(asyncpg.UndefinedTableError), database.store_errors():
            await pool.execute("select * from no_such_table")
