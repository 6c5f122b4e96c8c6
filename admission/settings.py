"""What admission is told at start. Every time in seconds; a test can shrink each of them."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal

import msgspec


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much a key may use, over all groups and processes. None: no limit."""

    #: Requests at once: all that are in the gateway, waiting or at work.
    concurrency: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    #: USD of a day and a month in the declared zone, and for good.
    budget_day_usd: Decimal | None = None
    budget_month_usd: Decimal | None = None
    budget_total_usd: Decimal | None = None
    #: Of each of its sessions.
    budget_session_usd: Decimal | None = None


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one upstream model inside its group, beside the group's own. None is no limit."""

    concurrency: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class GroupSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one capacity group."""

    #: How many requests a provider may hold at once. Low by default: a gateway that is wrong here is refused, billed
    #: twice or throttled, while one that is too careful only queues, and says so.
    concurrency: int = 3
    queue: int = 32
    #: The breaker opens at this many attributable transient failures within the window.
    failure_threshold: int = 5
    failure_window_s: float = 30.0
    first_cooldown_s: float = 10.0
    longest_cooldown_s: float = 300.0
    #: Slots above the limit that quarantined attempts may keep, so that they do not hold up others. What the provider
    #: really runs may then be as many more than the limit.
    quarantine_headroom: int = 0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    models: Mapping[str, ModelLimits] = {}
    #: What belongs to the group; empty: the endpoint it is named for.
    endpoints: tuple[str, ...] = ()
    #: The limit is the built-in one: nobody has said what the provider really gives.
    concurrency_is_default: bool = False

    @property
    def allowances(self) -> dict[str, ModelLimits]:
        """The limits beside the concurrency by model; "" is the group as a whole."""
        found = dict(self.models)
        if self.requests_per_minute is not None or self.tokens_per_minute is not None:
            found[""] = ModelLimits(
                requests_per_minute=self.requests_per_minute, tokens_per_minute=self.tokens_per_minute
            )
        return found


class AdmissionSettings(msgspec.Struct, frozen=True, kw_only=True):
    groups: Mapping[str, GroupSettings]
    #: Part of what tells one set of limits from another: raised to put earlier limits in force again.
    revision: int = 1
    #: How long a process is believed alive after its last heartbeat.
    lease_s: float = 60.0
    #: Taken off what the database says remains, for the way and the clocks.
    margin_s: float = 5.0
    #: A grant made by another process that is not confirmed within this returns to the queue.
    unconfirmed_grant_s: float = 2.0
    #: Waiters look at least this often, whatever was or was not notified.
    rescan_s: float = 1.0
    #: A statement that takes longer is given up, its connection closed and its outcome unknown.
    statement_s: float = 5.0
    #: How long an admission whose acknowledgement was lost is tried again before it is refused.
    retry_s: float = 3.0
    #: The zone whose days a charge belongs to.
    zone: str = "UTC"
    #: A provider's Retry-After counts up to this.
    longest_retry_after_s: float = 3600.0
    #: How long a credential is left out for that was rejected, or whose quota is exhausted, before it is tried again.
    unavailable_s: float = 300.0
    #: The longest that an attempt can occupy a slot, quarantine included: how long admission stays closed when the
    #: store turns out to be another than before.
    longest_hold_s: float = 630.0
    connections: int = 4
