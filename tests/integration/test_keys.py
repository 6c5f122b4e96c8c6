"""API keys on a real PostgreSQL: who is let in, and how soon a change holds everywhere."""

from __future__ import annotations

import asyncio
import statistics
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit

import pytest

from gateway import database
from gateway.call import Caller, Scope
from gateway.errors import Code, Conflict, GatewayError, InvalidRequest, NotFound, Unauthenticated
from gateway.keys import ENVIRONMENT, EnvironmentKey, Keys, KeysSettings, public_part
from tests.postgres import execute

FAST = KeysSettings(poll_s=0.05, stale_after_s=0.5, timeout_s=0.3)
OPERATORS_OWN = "an-operators-own-key-0001"

WRONG = {
    "none": None,
    "empty": "",
    "short": "x",
    "sql": "' or 1=1; drop table control.api_key; --",
    "unicode": "tb_\N{SNOWMAN}_ключ",
    "surrogate": "tb_\udcff",
    "nul": "tb_\x00abc",
    "ten megabytes": "x" * 10 * 1024**2,
    "right shape": "tb_abcdefghij_" + "0" * 43,
}


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def keys_of(
    url: str, settings: KeysSettings | None = None, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[Keys]:
    async with (
        database.open_pool(url, name="test-keys", size=3) as pool,
        Keys.open(pool, settings, clock=clock) as keys,
    ):
        yield keys


async def refused(keys: Keys, token: str | None) -> bool:
    try:
        await keys.authenticate(token)
    except Unauthenticated:
        return True
    return False


async def seconds_until(condition: Callable[[], Awaitable[bool]], *, within: float = 30.0) -> float:
    """Polls an awaitable condition; how long it took to hold."""
    began = time.monotonic()
    while not await condition():
        assert time.monotonic() - began < within
        await asyncio.sleep(0.01)
    return time.monotonic() - began


async def test_a_new_key_works_at_once_and_its_secret_is_not_in_the_database(database_url):
    async with keys_of(database_url) as keys:
        record, secret = await keys.create("ci", [Scope.CHAT], tags={"team": "core"})
        caller = await keys.authenticate(secret)
        assert caller == Caller(key_id=record.key_id, name="ci", scopes=frozenset({Scope.CHAT}), tags={"team": "core"})
        assert secret.startswith(f"tb_{public_part(record.key_id)}_")
        assert len(secret.rpartition("_")[2]) == 43
        assert [listed.name for listed in await keys.list()] == ["ci"]
        assert (await keys.list())[0].tags == {"team": "core"}
        assert keys.usable(record.key_id)
        async with database.open_connection(database_url, name="test") as connection:
            stored = await connection.fetchval("select string_agg(k::text, ' ') from control.api_key k")
        assert secret not in stored
        assert secret.rpartition("_")[2] not in stored


async def test_every_wrong_token_is_refused_in_the_same_words(database_url):
    async with keys_of(database_url) as keys:
        _, secret = await keys.create("ci", [Scope.CHAT])
        variants = {
            "one character off": secret[:-1] + ("0" if secret[-1] != "0" else "1"),
            "cut": secret[:-1],
            "longer": secret + "x",
            "upper case": secret.upper(),
            "a space behind": secret + " ",
            "public part only": secret.rpartition("_")[0],
        }
        messages = set()
        for token in (WRONG | variants).values():
            with pytest.raises(Unauthenticated) as caught:
                await keys.authenticate(token)
            messages.add(str(caught.value))
        assert len(messages) == 1
        assert await keys.authenticate(secret)


def medians(ask: Callable[[str], object], one: str, other: str, *, samples: int = 10_000) -> tuple[float, float]:
    """Nanoseconds of each, interleaved."""
    spent: dict[str, list[int]] = {one: [], other: []}
    for number in range(samples):
        for token in (one, other) if number % 2 else (other, one):
            began = time.perf_counter_ns()
            ask(token)
            spent[token].append(time.perf_counter_ns() - began)
    return statistics.median(spent[one]), statistics.median(spent[other])


def separable(ask: Callable[[str], object], one: str, other: str) -> bool:
    """Whether the medians differ by a twentieth in each of five rounds, and always the same way round."""
    ratios = [first / second for first, second in (medians(ask, one, other) for _ in range(5))]
    return min(ratios) > 1.05 or max(ratios) < 0.95


async def test_an_unknown_key_takes_as_long_as_one_that_is_wrong_in_its_last_character(database_url):
    async with keys_of(database_url) as keys:
        _, secret = await keys.create("ci", [Scope.CHAT])
        wrong = secret[:-1] + ("0" if secret[-1] != "0" else "1")
        unknown = "tb_aaaaaaaaaa_" + "0" * 43

        def ask(token: str) -> None:
            with suppress(Unauthenticated):
                keys.authenticate(token).send(None)

        def leaks(token: str) -> None:
            # A check that stops at the first difference, to see that such a thing is seen.
            for known, given in zip(secret, token, strict=True):
                if known != given:
                    return

        assert not separable(ask, unknown, wrong)
        assert separable(leaks, unknown, wrong)


async def test_a_flood_of_wrong_keys_does_not_reach_the_database_and_leaves_nothing_behind(database_url):
    async with database.open_pool(database_url, name="test-keys", size=1) as pool, Keys.open(pool) as keys:
        await keys.create("ci", [Scope.CHAT])
        # A query would fail from here on, and not be a wrong key.
        pool.terminate()
        before = len(keys._by_digest)
        for number in range(20_000):
            assert await refused(keys, f"tb_{number:010}_{'x' * 43}")
        assert len(keys._by_digest) == before == 1


async def test_a_token_far_too_long_costs_nothing(database_url):
    async with keys_of(database_url) as keys:
        huge = "x" * 100 * 1024**2
        # To hash it once takes five times as long, and what others do on this machine is not counted.
        began = time.thread_time()
        assert await refused(keys, huge)
        assert time.thread_time() - began < 0.01


async def test_a_revocation_and_a_new_key_hold_in_another_process_within_two_seconds(database_url):
    async with keys_of(database_url) as here, keys_of(database_url) as there:
        record, secret = await here.create("ci", [Scope.CHAT])

        async def known() -> bool:
            return not await refused(there, secret)

        async def unknown() -> bool:
            return await refused(there, secret)

        assert await seconds_until(known) < 2.0
        await here.revoke("ci")
        assert await refused(here, secret)
        assert await seconds_until(unknown) < 2.0
        assert not there.usable(record.key_id)


async def test_a_change_made_by_hand_in_sql_is_noticed_too(database_url):
    async with keys_of(database_url, FAST) as keys:
        _, secret = await keys.create("ci", [Scope.CHAT])
        execute(database_url, "update control.api_key set revoked_at = clock_timestamp()")

        async def unknown() -> bool:
            return await refused(keys, secret)

        await seconds_until(unknown)
        execute(database_url, "truncate control.api_key")
        async with database.open_connection(database_url, name="test") as connection:
            version = await connection.fetchval("select version from control.api_key_version")
        assert version == 4


async def test_a_late_commit_of_an_earlier_change_is_not_missed(database_url):
    async with keys_of(database_url, FAST) as keys, AsyncExitStack() as stack:
        _, slow = await keys.create("slow", [Scope.CHAT])
        connection = await stack.enter_async_context(database.open_connection(database_url, name="test"))
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute("update control.api_key set revoked_at = clock_timestamp() where name = 'slow'")
        # The other change waits for the first: versions are in the order of commits.
        other = asyncio.create_task(keys.create("quick", [Scope.CHAT]))

        async def waits() -> bool:
            async with database.open_connection(database_url, name="test-look") as look:
                return bool(await look.fetchval("select count(*) from pg_locks where not granted"))

        await seconds_until(waits)
        assert not await refused(keys, slow)
        await transaction.commit()
        await other

        async def unknown() -> bool:
            return await refused(keys, slow)

        await seconds_until(unknown)


async def test_an_expired_key_is_refused_by_the_databases_clock(database_url):
    clock = FakeClock()
    settings = KeysSettings(poll_s=3600, stale_after_s=10_000)
    async with keys_of(database_url, settings, clock) as keys:
        _, secret = await keys.create("ci", [Scope.CHAT], expires_at=datetime.now(UTC) + timedelta(seconds=60))
        assert not await refused(keys, secret)
        clock.now += 59
        assert not await refused(keys, secret)
        clock.now += 2
        assert await refused(keys, secret)


async def test_a_step_of_the_servers_clock_that_the_store_has_made_up_for_ends_no_key_and_revives_none(database_url):
    ends = datetime.now(UTC) + timedelta(minutes=30)
    async with database.open_connection(database_url, name="test-look") as look, keys_of(database_url, FAST) as keys:
        _, secret = await keys.create("ci", [Scope.CHAT], expires_at=ends)
        assert not await refused(keys, secret)
        # The clock was put back by an hour: it was later than it says.
        await look.execute("update control.store set ahead = interval '1 hour'")

        async def expired() -> bool:
            return await refused(keys, secret)

        await seconds_until(expired)
        async with keys_of(database_url, FAST) as other:
            assert await refused(other, secret)
        # It was put forward by an hour: it is not as late as it says.
        await look.execute("update control.store set ahead = interval '-1 hour'")
        async with keys_of(database_url, FAST) as other:
            _, early = await other.create("early", [Scope.CHAT], expires_at=ends - timedelta(hours=1))
            assert not await refused(other, early)


async def test_keys_that_could_not_be_checked_for_too_long_are_all_refused(database_url):
    clock = FakeClock()
    settings = KeysSettings(poll_s=3600)
    async with keys_of(database_url, settings, clock) as keys:
        record, secret = await keys.create("ci", [Scope.CHAT])
        clock.now += settings.stale_after_s - 0.1
        assert await keys.authenticate(secret)
        clock.now += 0.2
        # The same for a right and a wrong token: nothing can be learnt from an outage.
        for token in (secret, "tb_abcdefghij_wrong"):
            with pytest.raises(GatewayError) as caught:
                await keys.authenticate(token)
            assert caught.value.code is Code.CONTROL_STORE_UNAVAILABLE
        with pytest.raises(GatewayError):
            keys.usable(record.key_id)


async def test_a_lost_database_closes_the_door_and_a_found_one_opens_it(database_server, database_url):
    name = urlsplit(database_url).path[1:]
    async with keys_of(database_url, FAST) as keys:
        _, secret = await keys.create("ci", [Scope.CHAT])
        execute(
            database_server,
            f"alter database {name} allow_connections false",
            f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}'",
        )

        async def closed() -> bool:
            try:
                await keys.authenticate(secret)
            except GatewayError as error:
                return error.code is Code.CONTROL_STORE_UNAVAILABLE
            return False

        async def opened() -> bool:
            return not await closed()

        await seconds_until(closed)
        execute(database_server, f"alter database {name} allow_connections true")
        await seconds_until(opened)


async def test_a_name_serves_one_active_key_at_a_time(database_url):
    async with keys_of(database_url) as keys:
        await keys.create("ci", [Scope.CHAT])
        with pytest.raises(Conflict):
            await keys.create("ci", [Scope.JOBS])
        record = await keys.revoke("ci")
        assert record.revoked_at is not None
        again, _ = await keys.create("ci", [Scope.JOBS])
        with pytest.raises(NotFound):
            await keys.revoke(record.key_id)
        assert (await keys.revoke(str(again.key_id))).name == "ci"
        with pytest.raises(NotFound):
            await keys.revoke("ci")
        with pytest.raises(NotFound):
            await keys.revoke(uuid.uuid4())


async def test_more_keys_than_a_page_are_all_known(database_url):
    async with keys_of(database_url) as keys:
        execute(
            database_url,
            "insert into control.api_key (key_id, name, digest, scopes)"
            " select gen_random_uuid(), 'k' || n, sha256(('secret' || n)::bytea), array['chat']"
            " from generate_series(1, 450) n",
        )
        _, secret = await keys.create("ci", [Scope.CHAT])
        for number in range(1, 451):
            assert (await keys.authenticate(f"secret{number}")).name == f"k{number}"
        assert not await refused(keys, secret)
        await keys.revoke("k7")
        assert await refused(keys, "secret7")


async def test_no_more_keys_are_made_than_a_process_keeps(database_url):
    async with keys_of(database_url, KeysSettings(most=1)) as keys:
        await keys.create("one", [Scope.CHAT])
        with pytest.raises(Conflict):
            await keys.create("two", [Scope.CHAT])


@pytest.mark.parametrize("name", ["", "a\x00b", " a", ENVIRONMENT, "x" * 129])
async def test_a_name_that_would_mislead_is_refused(database_url, name):
    async with keys_of(database_url) as keys:
        with pytest.raises(InvalidRequest):
            await keys.create(name, [Scope.CHAT])


async def test_processes_that_start_at_once_make_one_first_key(database_url):
    async with AsyncExitStack() as stack:
        several = [await stack.enter_async_context(keys_of(database_url)) for _ in range(4)]
        made = await asyncio.gather(*(keys.bootstrap(None) for keys in several))
        secrets = [bootstrap.first_secret for bootstrap in made if bootstrap.first_secret is not None]
        assert len(secrets) == 1
        index = next(index for index, bootstrap in enumerate(made) if bootstrap.first_secret)
        caller = await several[index].authenticate(secrets[0])
        assert caller.scopes == frozenset(Scope)


async def test_a_first_key_is_made_once_even_if_it_was_revoked(database_url):
    async with keys_of(database_url) as keys:
        first = await keys.bootstrap(None)
        assert first.first_secret is not None
        await keys.revoke("first")
        assert (await keys.bootstrap(None)).first_secret is None


async def test_the_environments_key_keeps_its_identity_when_its_value_changes(database_url):
    async with AsyncExitStack() as stack:
        several = [await stack.enter_async_context(keys_of(database_url)) for _ in range(3)]
        done = await asyncio.gather(*(keys.bootstrap(OPERATORS_OWN) for keys in several))
        assert sorted(bootstrap.environment for bootstrap in done) == [
            EnvironmentKey.ADDED,
            EnvironmentKey.UNCHANGED,
            EnvironmentKey.UNCHANGED,
        ]
        assert all(bootstrap.first_secret is None for bootstrap in done)
        keys = several[0]
        # In the process that lost the race, too.
        for each in several:
            assert not await refused(each, OPERATORS_OWN)
        before = await keys.authenticate(OPERATORS_OWN)
        assert before.name == ENVIRONMENT
        assert before.scopes == frozenset(Scope)
        assert (await keys.bootstrap(OPERATORS_OWN + "-new")).environment is EnvironmentKey.REPLACED
        assert await refused(keys, OPERATORS_OWN)
        assert (await keys.authenticate(OPERATORS_OWN + "-new")).key_id == before.key_id


async def test_a_restart_does_not_bring_back_what_an_operator_revoked(database_url):
    async with keys_of(database_url) as keys:
        await keys.bootstrap(OPERATORS_OWN)
        await keys.revoke(ENVIRONMENT)
        assert (await keys.bootstrap(OPERATORS_OWN)).environment is EnvironmentKey.REFUSED
        assert await refused(keys, OPERATORS_OWN)
        assert (await keys.bootstrap(OPERATORS_OWN + "-new")).environment is EnvironmentKey.ADDED


@pytest.mark.parametrize("value", ["", "short", "with a space in the middle", "n\x00ul-nul-nul-nul-nul", "ключ" * 8])
async def test_a_weak_or_unsendable_environment_key_is_refused(database_url, value):
    async with keys_of(database_url) as keys:
        with pytest.raises(InvalidRequest) as caught:
            await keys.bootstrap(value)
        assert value not in str(caught.value) or not value
        assert await keys.list() == []
