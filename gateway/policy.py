"""
Who may use what: lists that the configuration, a key and a request may each give, and that must all agree.

A list that another one could widen would be none.
"""

from __future__ import annotations

import fnmatch
from decimal import Decimal

import msgspec


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """One party's limits on routes. None: it has none."""

    #: Ids of providers.
    providers: frozenset[str] | None = None
    #: Patterns of models, by the name that a caller asks for or as `provider/upstream name`.
    models: tuple[str, ...] | None = None
    #: The most a request may cost, in USD. 0: free models only.
    max_cost_usd: Decimal | None = None

    def allows(self, provider: str, upstream: str, asked: str) -> bool:
        if self.providers is not None and provider not in self.providers:
            return False
        if self.models is None:
            return True
        names = (asked, f"{provider}/{upstream}")
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.models for name in names)


#: No limits.
ANYTHING = Policy()


def lowest(*limits: Decimal | None) -> Decimal | None:
    """The limit that holds where several parties have one."""
    return min((limit for limit in limits if limit is not None), default=None)
