"""
What a key may do, and what a key that makes and changes others may give them.

A key gives only what it has itself: else one that is limited could make another that is not, and use that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from admission.settings import KeyLimits
from gateway.call import Scope
from gateway.errors import InvalidRequest, PermissionDenied
from gateway.policy import ANYTHING, Policy
from metering.cost import LIMIT_USD

MAX_NAME: Final = 128
MAX_DESCRIPTION: Final = 500
#: Entries of a list of models or providers, and characters of each.
MAX_ENTRIES: Final = 64
MAX_ENTRY: Final = 256
#: As for the tags of a request.
MAX_TAGS: Final = 32
MAX_TAG_NAME: Final = 64
MAX_TAG: Final = 256
#: What any limit may be that is no money.
MOST_AT_ONCE: Final = 1_000_000_000


class Limits(KeyLimits, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How much a key may use, as it is stored and told."""

    @property
    def of_money(self) -> bool:
        """For whatever it asks, in a session or not."""
        return (self.budget_day_usd, self.budget_month_usd, self.budget_total_usd) != (None, None, None)


NO_LIMITS: Final = Limits()


class Rights(msgspec.Struct, frozen=True, kw_only=True):
    """What a key may do."""

    scopes: frozenset[Scope]
    #: Patterns of models, and ids of providers. None: any.
    models: tuple[str, ...] | None = None
    providers: tuple[str, ...] | None = None
    limits: Limits = NO_LIMITS
    #: None: for good.
    expires_at: datetime | None = None

    @property
    def policy(self) -> Policy:
        return policy_of(self.models, self.providers)


class Profile(Rights, frozen=True, kw_only=True):
    """All that is decided when a key is made or changed."""

    name: str
    description: str = ""
    tags: dict[str, str] = {}


class Change(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What becomes of a key's profile; UNSET: it stays as it is."""

    name: str | UnsetType = UNSET
    description: str | UnsetType = UNSET
    scopes: frozenset[Scope] | UnsetType = UNSET
    models: tuple[str, ...] | UnsetType | None = UNSET
    providers: tuple[str, ...] | UnsetType | None = UNSET
    tags: dict[str, str] | UnsetType = UNSET
    limits: Limits | UnsetType = UNSET
    expires_at: datetime | UnsetType | None = UNSET

    @property
    def given(self) -> dict[str, object]:
        """By name, what is to be changed."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not UNSET}


def policy_of(models: Iterable[str] | None, providers: Iterable[str] | None) -> Policy:
    if models is None and providers is None:
        return ANYTHING
    return Policy(
        models=None if models is None else tuple(models), providers=None if providers is None else frozenset(providers)
    )


def check(profile: Profile, now: float) -> None:
    """Raises InvalidRequest with the field. `now`: seconds since the epoch, by the database's clock."""
    name = profile.name
    if not 1 <= len(name) <= MAX_NAME or not name.isprintable() or name != name.strip():
        raise InvalidRequest(f"a key's name is 1 to {MAX_NAME} printable characters", param="name")
    if len(profile.description) > MAX_DESCRIPTION or not _plain(profile.description):
        raise InvalidRequest(f"must be at most {MAX_DESCRIPTION} printable characters", param="description")
    if not profile.scopes:
        raise InvalidRequest("a key without scopes can do nothing", param="scopes")
    _check_list(profile.models, "models")
    _check_list(profile.providers, "providers")
    _check_tags(profile.tags)
    if profile.expires_at is not None and profile.expires_at.tzinfo is None:
        raise InvalidRequest("a time without a zone", param="expires_at")
    if profile.expires_at is not None and profile.expires_at.timestamp() <= now:
        raise InvalidRequest("this time has passed", param="expires_at")
    _check_limits(profile.limits)


def check_giving(after: Rights, giver: Rights, before: Rights | None = None) -> None:
    """
    Raises PermissionDenied where a key with the giver's rights may not give these: it does not have them itself. What
    the key had `before` it may keep: so every right may be narrowed.
    """
    had = (giver,) if before is None else (giver, before)
    given = after.scopes.difference(*(rights.scopes for rights in had))
    if given:
        raise PermissionDenied(
            f"this key cannot give what it does not have: {', '.join(sorted(given))}", param="scopes"
        )
    for name in ("models", "providers"):
        policy, *others = (_half(rights, name) for rights in (after, *had))
        if not any(policy.within(other) for other in others):
            raise PermissionDenied(f"this key cannot give what it does not have: its own {name} are fewer", param=name)
    if not any(_ends_within(after.expires_at, rights.expires_at) for rights in had):
        raise PermissionDenied("this key cannot give what it does not have: it expires itself", param="expires_at")
    for name in Limits.__struct_fields__:
        # What it may use itself is no more where it hands it out: a key for a friend would have the same once again.
        if getattr(giver.limits, name) is None or (before is not None and _narrows(after.limits, before.limits, name)):
            continue
        raise PermissionDenied(
            "this key has a limit here, and what others may use is not in it: it can only lower what they have",
            param=f"limits.{name}",
        )


def _half(rights: Rights, name: str) -> Policy:
    return policy_of(rights.models, None) if name == "models" else policy_of(None, rights.providers)


def _narrows(after: Limits, before: Limits, name: str) -> bool:
    had, has = getattr(before, name), getattr(after, name)
    return had is None or (has is not None and has <= had)


def _ends_within(end: datetime | None, other: datetime | None) -> bool:
    return other is None or (end is not None and end <= other)


def _plain(text: str) -> bool:
    # What is printable has no NUL and no lone surrogates, which PostgreSQL's text has not either.
    return text.isprintable()


def _check_limits(limits: Limits) -> None:
    for name in Limits.__struct_fields__:
        limit = getattr(limits, name)
        if isinstance(limit, int) and not 1 <= limit <= MOST_AT_ONCE:
            raise InvalidRequest(f"must be from 1 to {MOST_AT_ONCE}", param=f"limits.{name}")
        if isinstance(limit, Decimal) and not is_money(limit):
            raise InvalidRequest(
                f"must be from 0 to less than {LIMIT_USD:,} USD, with at most 12 decimals", param=f"limits.{name}"
            )


def is_money(usd: Decimal) -> bool:
    """An amount that a budget may have, in USD."""
    exponent = usd.as_tuple().exponent
    return isinstance(exponent, int) and -12 <= exponent <= 9 and not usd.is_signed() and usd < LIMIT_USD


def _check_list(entries: tuple[str, ...] | None, name: str) -> None:
    if entries is None:
        return
    if not 1 <= len(entries) <= MAX_ENTRIES:
        # An empty list would say "none" to one reader and "any" to another.
        raise InvalidRequest(f"must have 1 to {MAX_ENTRIES} entries; null is any", param=name)
    for entry in entries:
        if not 1 <= len(entry) <= MAX_ENTRY or not _plain(entry) or " " in entry:
            raise InvalidRequest(f"an entry has 1 to {MAX_ENTRY} printable characters and no spaces", param=name)


def _check_tags(tags: Mapping[str, str]) -> None:
    if len(tags) > MAX_TAGS:
        raise InvalidRequest(f"must have at most {MAX_TAGS} entries", param="tags")
    for name, tag in tags.items():
        if not 1 <= len(name) <= MAX_TAG_NAME or not _plain(name) or len(tag) > MAX_TAG or not _plain(tag):
            raise InvalidRequest(
                f"a tag's name has 1 to {MAX_TAG_NAME} characters and its value at most {MAX_TAG}, all printable",
                param="tags",
            )
