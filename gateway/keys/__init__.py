"""
API keys: who may use the gateway, and for what.

A process keeps every active key in memory, by the digest of its secret, and asks the database once a second whether
anything about any key has changed. So a request costs no round trip, a key that is unknown costs no query, and a
revocation is in force everywhere within two seconds. A process that could not ask for `stale_after_s` refuses every
key: a revocation it has not heard of must not be worth more than that.

A secret is `tb_<10 characters that say which key>_<43 characters of 32 random bytes>`. It is shown once and stored as
its SHA-256. Nothing is ever looked up by a part of it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import enum
import hashlib
import hmac
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from datetime import datetime

import asyncpg
import msgspec
import structlog

from admission.lease import new_id
from gateway.call import Caller, Scope
from gateway.database import Pool, StoreUnavailable
from gateway.errors import Code, Conflict, GatewayError, InvalidRequest, NotFound, Unauthenticated
from gateway.keys.store import ActiveKey, Full, KeyRecord, KeyStore, NameTaken, NewKey

__all__ = ["ENVIRONMENT", "Bootstrap", "EnvironmentKey", "KeyRecord", "Keys", "KeysSettings", "public_part"]

log = structlog.get_logger(__name__)

#: The name of the key that TOLLBRIDGE_API_KEY sets. Nothing else may have it.
ENVIRONMENT = "environment"
#: The name of the key that a first start makes where nobody has given one.
FIRST = "first"
#: Characters a token may have: ours have 57, and an operator's own may be longer. A longer one is not even hashed.
MAX_TOKEN = 512
#: Characters TOLLBRIDGE_API_KEY must have.
MIN_ENVIRONMENT_KEY = 16
MAX_NAME = 128

_BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
#: 62**43 > 2**256.
_SECRET_LENGTH = 43
_RANDOM_BYTES = 32
_EVERY_SCOPE = frozenset(Scope)


class KeysSettings(msgspec.Struct, frozen=True, kw_only=True):
    #: Seconds between two questions whether keys have changed. A revocation is in force after at most this and one
    #: round trip.
    poll_s: float = 1.0
    #: Seconds one question may take.
    timeout_s: float = 5.0
    #: Seconds after the last answer at which no key is accepted any more.
    stale_after_s: float = 30.0
    #: Active keys that may exist: all are in memory.
    most: int = 10_000


class EnvironmentKey(enum.StrEnum):
    """What became of TOLLBRIDGE_API_KEY at a start."""

    #: It was not set.
    ABSENT = "absent"
    #: It is a key now.
    ADDED = "added"
    #: It was one already.
    UNCHANGED = "unchanged"
    #: The environment's key has it as its new secret. The old one is refused from now on.
    REPLACED = "replaced"
    #: It was revoked, or has expired, and a restart does not bring it back: choose another value.
    REFUSED = "refused"


class Bootstrap(msgspec.Struct, frozen=True, kw_only=True):
    environment: EnvironmentKey
    #: The secret of a key with every scope that was made because there was none: to be shown once. Else None.
    first_secret: str | None = None


def environment_key_fault(value: str | None) -> str | None:
    """What is wrong with a TOLLBRIDGE_API_KEY, without repeating it; None where nothing is."""
    if value is None:
        return None
    visible = value.isascii() and value.isprintable() and " " not in value
    if visible and MIN_ENVIRONMENT_KEY <= len(value) <= MAX_TOKEN:
        return None
    return f"the key must be {MIN_ENVIRONMENT_KEY} to {MAX_TOKEN} visible ASCII characters"


class _Entry(msgspec.Struct, frozen=True):
    digest: bytes
    caller: Caller
    expires_at: float | None


class Keys:
    """
    The keys of one process. Made by `Keys.open`.

    Changes made through it are in force in this process when the call returns, in others within two seconds. They raise
    GatewayError with `control_store_unavailable` where the database cannot be reached: then nothing is known of the
    change, and `list` will tell.
    """

    def __init__(self, pool: Pool, settings: KeysSettings, clock: Callable[[], float]) -> None:
        self._store = KeyStore(pool, most=settings.most)
        self._settings = settings
        self._clock = clock
        self._by_digest: dict[bytes, _Entry] = {}
        self._usable_ids: dict[uuid.UUID, _Entry] = {}
        self._version: int | None = None
        # When the last answered question was asked, and what the database's clock said to it.
        self._asked_at = float("-inf")
        self._database_time = 0.0
        self._one_reader = asyncio.Lock()

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, pool: Pool, settings: KeysSettings | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> AsyncIterator[Keys]:
        """
        Reads the keys and keeps them current while entered. Raises StoreUnavailable where the first reading fails.

        `clock` counts seconds and never goes back.
        """
        keys = cls(pool, settings or KeysSettings(), clock)
        await keys._refresh()
        follower = asyncio.create_task(keys._follow(), name="keys.follow")
        follower.add_done_callback(_follower_ended)
        try:
            yield keys
        finally:
            follower.cancel()
            await asyncio.wait([follower])

    @property
    def silent_s(self) -> float:
        """Seconds since the database last answered whether keys have changed: it is asked every `poll_s`."""
        return self._clock() - self._asked_at

    async def authenticate(self, token: str | None) -> Caller:
        """
        Whose token it is. No I/O.

        Raises Unauthenticated, the same for every wrong token; GatewayError `control_store_unavailable` for any token
        while it is not known which keys are revoked.
        """
        if not token or len(token) > MAX_TOKEN or not token.isascii():
            raise Unauthenticated
        self._check_current()
        digest = hashlib.sha256(token.encode("ascii")).digest()
        entry = self._by_digest.get(digest)
        if entry is None or not hmac.compare_digest(entry.digest, digest) or self._expired(entry):
            raise Unauthenticated
        return entry.caller

    def caller(self, key_id: uuid.UUID) -> Caller | None:
        """Who an active key is; None for any other. No I/O. Stale keys raise as in `authenticate`."""
        self._check_current()
        entry = self._usable_ids.get(key_id)
        return None if entry is None or self._expired(entry) else entry.caller

    def usable(self, key_id: uuid.UUID) -> bool:
        """Whether the key may still be used: a recheck just before dispatch. Stale keys raise as in `authenticate`."""
        return self.caller(key_id) is not None

    async def create(
        self,
        name: str,
        scopes: Iterable[Scope],
        expires_at: datetime | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> tuple[KeyRecord, str]:
        """A new key and its secret, which cannot be had again. Raises InvalidRequest, Conflict for a name in use."""
        if not 1 <= len(name) <= MAX_NAME or not name.isprintable() or name != name.strip():
            raise InvalidRequest(f"a key's name is 1 to {MAX_NAME} printable characters", param="name")
        if name == ENVIRONMENT:
            raise InvalidRequest("this name is kept for the key in TOLLBRIDGE_API_KEY", param="name")
        if expires_at is not None and expires_at.tzinfo is None:
            raise InvalidRequest("a time without a zone", param="expires_at")
        if expires_at is not None and expires_at.timestamp() <= self._database_time:
            raise InvalidRequest("this time has passed", param="expires_at")
        granted = frozenset(scopes)
        if not granted:
            raise InvalidRequest("a key without scopes can do nothing", param="scopes")
        new, secret = _new_key(name, granted, expires_at, dict(tags or {}))
        with _as_gateway_errors():
            record = await self._store.insert(new)
            await self._refresh()
        log.info("gateway.key_created", key_id=str(record.key_id), name=name)
        return record, secret

    async def list(self) -> list[KeyRecord]:
        """Every key there ever was, oldest first."""
        with _as_gateway_errors():
            return await self._store.list()

    async def revoke(self, key: uuid.UUID | str) -> KeyRecord:
        """Ends a key, given by id or name, for good. Raises NotFound where no active key is meant."""
        key_id = _as_id(key)
        with _as_gateway_errors():
            record = await self._store.revoke(key_id, str(key))
            if record is None and key_id is not None and isinstance(key, str):
                # A name may look like an id.
                record = await self._store.revoke(None, key)
            if record is None:
                raise NotFound("no active key has this id or name")
            await self._refresh()
        log.info("gateway.key_revoked", key_id=str(record.key_id), name=record.name)
        return record

    async def bootstrap(self, environment_key: str | None) -> Bootstrap:
        """
        What a start does about keys, the same however many processes start at once.

        With TOLLBRIDGE_API_KEY: that value is the secret of the key named "environment", which has every scope. Another
        value at a later start becomes the same key's new secret, so what belongs to the key stays reachable, and the
        old value is refused from then on; where processes start with different values, the last one counts. A value
        that an operator has revoked stays revoked.
        Without it, and with no key ever made: one key with every scope is made.

        Raises InvalidRequest for a value that is too short, too long, or not visible ASCII.
        """
        if environment_key is not None:
            return Bootstrap(environment=await self._take_over(environment_key))
        with _as_gateway_errors():
            async with self._store.alone() as session:
                if await session.any():
                    return Bootstrap(environment=EnvironmentKey.ABSENT)
                new, secret = _new_key(FIRST, _EVERY_SCOPE, None, {})
                await session.insert(new)
            await self._refresh()
        return Bootstrap(environment=EnvironmentKey.ABSENT, first_secret=secret)

    async def _take_over(self, value: str) -> EnvironmentKey:
        if fault := environment_key_fault(value):
            raise InvalidRequest(fault, param="TOLLBRIDGE_API_KEY")
        digest = hashlib.sha256(value.encode("ascii")).digest()
        with _as_gateway_errors():
            async with self._store.alone() as session:
                found = await session.by_digest(digest)
                if found is not None:
                    done = EnvironmentKey.UNCHANGED if found.usable else EnvironmentKey.REFUSED
                elif await session.replace_digest(ENVIRONMENT, digest):
                    done = EnvironmentKey.REPLACED
                else:
                    new = NewKey(key_id=new_id(), name=ENVIRONMENT, digest=digest, scopes=_EVERY_SCOPE)
                    await session.insert(new)
                    done = EnvironmentKey.ADDED
            # Also where nothing was written: another process may have done it a moment ago.
            await self._refresh()
        return done

    def _check_current(self) -> None:
        if self._clock() - self._asked_at > self._settings.stale_after_s:
            raise GatewayError(
                "keys cannot be checked: the control store is out of reach",
                code=Code.CONTROL_STORE_UNAVAILABLE,
                retry_after_s=self._settings.poll_s,
            )

    def _expired(self, entry: _Entry) -> bool:
        if entry.expires_at is None:
            return False
        # By the database's clock, which all processes share.
        return entry.expires_at <= self._database_time + (self._clock() - self._asked_at)

    async def _refresh(self) -> None:
        """Asks for the version, and reads the keys where it has changed. Raises StoreUnavailable."""
        # One at a time, or an older reading could come to lie over a newer one.
        async with self._one_reader:
            asked_at = self._clock()
            try:
                async with asyncio.timeout(self._settings.timeout_s):
                    found = await self._store.version()
                    active = await self._store.active() if found.version != self._version else None
            except TimeoutError as error:
                raise StoreUnavailable("the database does not answer") from error
            if active is not None:
                entries = [_entry(key) for key in active]
                self._by_digest = {entry.digest: entry for entry in entries}
                self._usable_ids = {entry.caller.key_id: entry for entry in entries}
                self._version = found.version
            self._asked_at = asked_at
            self._database_time = found.database_time

    async def _follow(self) -> None:
        reachable = True
        while True:
            await asyncio.sleep(self._settings.poll_s)
            try:
                await self._refresh()
            except (StoreUnavailable, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                if reachable:
                    log.warning("gateway.keys_unread", error=type(error).__name__)
                reachable = False
                continue
            if not reachable:
                log.info("gateway.keys_read_again")
            reachable = True


def public_part(key_id: uuid.UUID) -> str:
    """What a made key's secret begins with, after `tb_`: tells a person which key a secret belongs to."""
    return base64.b32encode(key_id.bytes[-7:])[:10].decode("ascii").lower()


def _new_key(
    name: str, scopes: frozenset[Scope], expires_at: datetime | None, tags: dict[str, str]
) -> tuple[NewKey, str]:
    key_id = new_id()
    number = int.from_bytes(secrets.token_bytes(_RANDOM_BYTES))
    digits = []
    for _ in range(_SECRET_LENGTH):
        number, digit = divmod(number, len(_BASE62))
        digits.append(_BASE62[digit])
    secret = f"tb_{public_part(key_id)}_{''.join(digits)}"
    digest = hashlib.sha256(secret.encode("ascii")).digest()
    return NewKey(key_id=key_id, name=name, digest=digest, scopes=scopes, tags=tags, expires_at=expires_at), secret


def _entry(key: ActiveKey) -> _Entry:
    return _Entry(key.digest, Caller(key_id=key.key_id, name=key.name, scopes=key.scopes), key.expires_at)


def _as_id(key: uuid.UUID | str) -> uuid.UUID | None:
    if isinstance(key, uuid.UUID):
        return key
    try:
        return uuid.UUID(key)
    except ValueError:
        return None


@contextlib.contextmanager
def _as_gateway_errors() -> Iterator[None]:
    try:
        yield
    except StoreUnavailable as error:
        raise GatewayError(
            "the control store cannot be reached", code=Code.CONTROL_STORE_UNAVAILABLE, retry_after_s=1.0
        ) from error
    except NameTaken as error:
        raise Conflict("an active key has this name: revoke it first, or choose another", param="name") from error
    except Full as error:
        raise Conflict("there are as many active keys as may be") from error


def _follower_ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        # From now on keys grow stale, and are all refused.
        log.error("gateway.keys_follower_died", exc_info=error)
