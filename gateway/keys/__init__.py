"""
API keys: who may use the gateway, and for what.

A process keeps every active key in memory, by the digest of its secret, and asks the database once a second whether
anything about any key has changed. So a request costs no round trip, a key that is unknown costs no query, and a
revocation is in force everywhere within two seconds. A process that could not ask for `stale_after_s` refuses every
key: a revocation it has not heard of must not be worth more than that.

What a key may use goes along with the caller that it stands for, so that no transport can forget it.

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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Final

import asyncpg
import msgspec
import structlog

from admission.ids import new_id
from gateway.call import Caller, Scope
from gateway.database import Pool, StoreUnavailable
from gateway.errors import (
    Code,
    Conflict,
    GatewayError,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    Unauthenticated,
)
from gateway.keys.rights import NO_LIMITS, Change, Limits, Profile, Rights, check, check_giving, policy_of
from gateway.keys.store import ActiveKey, Full, KeyRecord, KeyStore, NameTaken, NewKey, Spending, Used
from gateway.policy import ANYTHING, Policy

__all__ = [
    "ENVIRONMENT",
    "LONGEST_OVERLAP_S",
    "NO_LIMITS",
    "Bootstrap",
    "Change",
    "EnvironmentKey",
    "KeyRecord",
    "Keys",
    "KeysSettings",
    "Limits",
    "Profile",
    "Spending",
    "Used",
    "public_part",
]

log = structlog.get_logger(__name__)

#: The name of the key that TOLLBRIDGE_API_KEY sets. Nothing else may have it.
ENVIRONMENT = "environment"
#: The name of the key that a first start makes where nobody has given one.
FIRST = "first"
#: Characters a token may have: ours have 57, and an operator's own may be longer. A longer one is not even hashed.
MAX_TOKEN = 512
#: Characters TOLLBRIDGE_API_KEY must have.
MIN_ENVIRONMENT_KEY = 16
#: Seconds for which two secrets of one key may be good.
LONGEST_OVERLAP_S: Final = 30 * 86_400.0

_BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
#: 62**43 > 2**256.
_SECRET_LENGTH = 43
_RANDOM_BYTES = 32
#: Keys that are read at once.
_PAGE: Final = 200
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
    #: Ids that a key's list of providers may have. None: any.
    providers: frozenset[str] | None = None
    #: Whose days and months budgets are for.
    zone: str = "UTC"


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
    rights: Rights
    #: Of this secret of it, in seconds since the epoch by the database's clock; None: never.
    expires_at: float | None
    #: Whether this version knows all its limits.
    holdable: bool


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
        digest = _digest(token)
        entry = self._by_digest.get(digest)
        if entry is None or not hmac.compare_digest(entry.digest, digest) or self._expired(entry):
            raise Unauthenticated
        if not entry.holdable:
            # A newer version has set them. To let it through would be to have none.
            raise PermissionDenied("the key has limits that this version of the gateway does not know")
        return entry.caller

    def caller(self, key_id: uuid.UUID) -> Caller | None:
        """Who an active key is; None for any other. No I/O. Stale keys raise as in `authenticate`."""
        self._check_current()
        entry = self._usable_ids.get(key_id)
        return None if entry is None or self._expired(entry) else entry.caller

    def policy(self, key_id: uuid.UUID) -> Policy:
        """
        What a key may use; of one that is not active any more, whose jobs are refused when they run, nothing is
        decided. No I/O. Stale keys raise as in `authenticate`.
        """
        caller = self.caller(key_id)
        return ANYTHING if caller is None else caller.policy

    def usable(self, key_id: uuid.UUID) -> bool:
        """Whether the key may still be used: a recheck just before dispatch. Stale keys raise as in `authenticate`."""
        return self.caller(key_id) is not None

    async def create(
        self,
        name: str,
        scopes: Iterable[Scope],
        expires_at: datetime | None = None,
        tags: Mapping[str, str] | None = None,
        *,
        description: str = "",
        models: Iterable[str] | None = None,
        providers: Iterable[str] | None = None,
        limits: Limits = NO_LIMITS,
        by: Caller | None = None,
    ) -> tuple[KeyRecord, str]:
        """
        A new key and its secret, which cannot be had again. `by`: the key that asks; None: an operator.

        Raises InvalidRequest, Conflict for a name in use, PermissionDenied where `by` does not have what it gives.
        """
        profile = Profile(
            name=name,
            description=description,
            scopes=frozenset(scopes),
            models=None if models is None else tuple(models),
            providers=None if providers is None else tuple(providers),
            tags=dict(tags or {}),
            limits=limits,
            expires_at=expires_at,
        )
        self._check(profile)
        self._check_providers(profile)
        if by is not None:
            check_giving(profile, self._rights(by))
        new, secret = _new_key(profile)
        with _as_gateway_errors():
            record = await self._store.insert(new)
            await self._refresh()
        log.info("gateway.key_created", key_id=str(record.key_id), name=name, by=_name(by))
        return record, secret

    async def list(self, after: uuid.UUID | None = None, most: int | None = None) -> list[KeyRecord]:
        """Every key there ever was, oldest first; the first `most` of those after this one."""
        with _as_gateway_errors():
            return await self._store.list(after, most)

    async def get(self, key_id: uuid.UUID) -> KeyRecord:
        """Raises NotFound."""
        with _as_gateway_errors():
            record = await self._store.get(key_id)
        if record is None:
            raise NotFound("no key has this id")
        return record

    async def used(self, key_id: uuid.UUID) -> Used:
        """What a key has used of its limits, or would have."""
        with _as_gateway_errors():
            return await self._store.used(key_id, self._settings.zone)

    async def change(self, key: uuid.UUID | str, change: Change, by: Caller | None = None) -> KeyRecord:
        """
        Changes a key, given by id or name.

        `by` as for `create`: it gives only what it has, or takes away. Raises InvalidRequest, NotFound where no active
        key is meant, Conflict, PermissionDenied.
        """

        def decide(record: KeyRecord) -> Profile:
            given = change.given
            if record.name == ENVIRONMENT and given.get("name", ENVIRONMENT) != ENVIRONMENT:
                raise InvalidRequest("the key in TOLLBRIDGE_API_KEY keeps its name", param="name")
            fields = {name: getattr(record, name) for name in Profile.__struct_fields__}
            profile = Profile(**{**fields, **given})
            # A key that has expired meanwhile may still be described.
            now = self._now if "expires_at" in given else float("-inf")
            self._check(profile, now=now, kept_name=record.name)
            if "providers" in given:
                self._check_providers(profile)
            if by is not None:
                check_giving(profile, self._rights(by), record)
            return profile

        with _as_gateway_errors():
            record = await self._meant(key, lambda key_id, name: self._store.change(key_id, name, decide))
            await self._refresh()
        log.info(
            "gateway.key_changed",
            key_id=str(record.key_id),
            name=record.name,
            fields=sorted(change.given),
            by=_name(by),
        )
        return record

    async def rotate(self, key: uuid.UUID | str, overlap_s: float, by: Caller | None = None) -> tuple[KeyRecord, str]:
        """
        Another secret for a key, given by id or name, beside which the one before is good for `overlap_s` seconds more.
        One from before that is refused from now on: two are good at most.

        Raises InvalidRequest, NotFound where no active key is meant, PermissionDenied where `by` does not have all that
        the key has: it would have its secret.
        """
        if not 0 <= overlap_s <= LONGEST_OVERLAP_S:
            raise InvalidRequest(f"must be from 0 to {LONGEST_OVERLAP_S:.0f} seconds", param="overlap_s")
        made: list[str] = []

        def make(record: KeyRecord) -> bytes:
            if record.name == ENVIRONMENT:
                raise InvalidRequest("this key's secret is what TOLLBRIDGE_API_KEY says: set another one there")
            if by is not None:
                # Its own secret gives a key nothing; that of another, what that may use besides.
                check_giving(record, self._rights(by), record if by.key_id == record.key_id else None)
            made.append(_new_secret(record.key_id))
            return _digest(made[0])

        with _as_gateway_errors():
            record = await self._meant(key, lambda key_id, name: self._store.rotate(key_id, name, overlap_s, make))
            await self._refresh()
        log.info("gateway.key_rotated", key_id=str(record.key_id), name=record.name, overlap_s=overlap_s, by=_name(by))
        return record, made[0]

    async def revoke(self, key: uuid.UUID | str, by: Caller | None = None) -> KeyRecord:
        """Ends a key, given by id or name, for good. Raises NotFound where no active key is meant."""
        with _as_gateway_errors():
            record = await self._meant(key, self._store.revoke)
            await self._refresh()
        log.info("gateway.key_revoked", key_id=str(record.key_id), name=record.name, by=_name(by))
        return record

    async def _meant(
        self,
        key: uuid.UUID | str,
        act: Callable[[uuid.UUID | None, str], Awaitable[KeyRecord | None]],
    ) -> KeyRecord:
        key_id = _as_id(key)
        record = await act(key_id, str(key))
        if record is None and key_id is not None and isinstance(key, str):
            # A name may look like an id.
            record = await act(None, key)
        if record is None:
            raise NotFound("no active key has this id or name")
        return record

    def _check(self, profile: Profile, *, now: float | None = None, kept_name: str | None = None) -> None:
        check(profile, self._now if now is None else now)
        if profile.name == ENVIRONMENT != kept_name:
            raise InvalidRequest("this name is kept for the key in TOLLBRIDGE_API_KEY", param="name")

    def _check_providers(self, profile: Profile) -> None:
        """A provider that nobody has is a typing error, and the key could do nothing with it."""
        known = self._settings.providers
        for place, name in enumerate(profile.providers or ()):
            if known is not None and name not in known:
                raise InvalidRequest("no provider is called so in the configuration", param=f"providers.{place}")

    def _rights(self, caller: Caller) -> Rights:
        """Raises Unauthenticated where the key is not active any more."""
        entry = self._usable_ids.get(caller.key_id)
        if entry is None or self._expired(entry):
            raise Unauthenticated
        return entry.rights

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
                new, secret = _new_key(Profile(name=FIRST, scopes=_EVERY_SCOPE))
                await session.insert(new)
            await self._refresh()
        return Bootstrap(environment=EnvironmentKey.ABSENT, first_secret=secret)

    async def _take_over(self, value: str) -> EnvironmentKey:
        if fault := environment_key_fault(value):
            raise InvalidRequest(fault, param="TOLLBRIDGE_API_KEY")
        digest = _digest(value)
        with _as_gateway_errors():
            async with self._store.alone() as session:
                found = await session.by_digest(digest)
                if found is not None:
                    done = EnvironmentKey.UNCHANGED if found.usable else EnvironmentKey.REFUSED
                elif await session.replace_digest(ENVIRONMENT, digest):
                    done = EnvironmentKey.REPLACED
                else:
                    profile = Profile(name=ENVIRONMENT, scopes=_EVERY_SCOPE)
                    await session.insert(NewKey(key_id=new_id(), digest=digest, profile=profile))
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
        return entry.expires_at <= self._now

    @property
    def _now(self) -> float:
        """Seconds since the epoch, by the database's clock, which all processes share."""
        return self._database_time + (self._clock() - self._asked_at)

    async def _refresh(self) -> None:
        """Asks for the version, and reads the keys where it has changed. Raises StoreUnavailable."""
        # One at a time, or an older reading could come to lie over a newer one.
        async with self._one_reader:
            asked_at = self._clock()
            try:
                async with asyncio.timeout(self._settings.timeout_s):
                    found = await self._store.version()
                    read = await self._read() if found.version != self._version else None
            except TimeoutError as error:
                raise StoreUnavailable("the database does not answer") from error
            if read is not None:
                self._by_digest, self._usable_ids = read
                self._version = found.version
            self._asked_at = asked_at
            self._database_time = found.database_time

    async def _read(self) -> tuple[dict[bytes, _Entry], dict[uuid.UUID, _Entry]]:
        """Every active key, by digest and by id, in pages: nobody's tokens wait while all are read."""
        by_digest: dict[bytes, _Entry] = {}
        by_id: dict[uuid.UUID, _Entry] = {}
        after: uuid.UUID | None = None
        while True:
            page = await self._store.active(after, _PAGE)
            for key in page:
                entry = _entry(key)
                by_id[key.key_id] = entry
                by_digest.update((secret.digest, secret) for secret in _secrets(entry, key))
            if len(page) < _PAGE:
                return by_digest, by_id
            after = page[-1].key_id

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


def _new_key(profile: Profile) -> tuple[NewKey, str]:
    key_id = new_id()
    secret = _new_secret(key_id)
    return NewKey(key_id=key_id, digest=_digest(secret), profile=profile), secret


def _new_secret(key_id: uuid.UUID) -> str:
    number = int.from_bytes(secrets.token_bytes(_RANDOM_BYTES))
    digits = []
    for _ in range(_SECRET_LENGTH):
        number, digit = divmod(number, len(_BASE62))
        digits.append(_BASE62[digit])
    return f"tb_{public_part(key_id)}_{''.join(digits)}"


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("ascii")).digest()


def _entry(key: ActiveKey) -> _Entry:
    limits = key.limits or NO_LIMITS
    expires_at = key.expires_at
    return _Entry(
        digest=key.digest,
        caller=Caller(
            key_id=key.key_id,
            name=key.name,
            scopes=key.scopes,
            policy=policy_of(key.models, key.providers),
            tags=key.tags,
            limited=limits != NO_LIMITS,
            budgeted=limits.of_money,
            budgets_sessions=limits.budget_session_usd is not None,
        ),
        rights=Rights(
            scopes=key.scopes,
            models=key.models,
            providers=key.providers,
            limits=limits,
            expires_at=None if expires_at is None else datetime.fromtimestamp(expires_at, UTC),
        ),
        expires_at=expires_at,
        holdable=key.limits is not None,
    )


def _secrets(entry: _Entry, key: ActiveKey) -> Iterator[_Entry]:
    """The key by each of its secrets."""
    yield entry
    if key.previous is not None:
        digest, until = key.previous
        ends = until if entry.expires_at is None else min(until, entry.expires_at)
        yield msgspec.structs.replace(entry, digest=digest, expires_at=ends)


def _name(caller: Caller | None) -> str | None:
    return None if caller is None else caller.name


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
