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

    def within(self, other: Policy) -> bool:
        """Whether all that this allows is surely allowed by the other: where patterns leave that open, it is not."""
        providers = other.providers is None or (self.providers is not None and self.providers <= other.providers)
        models = other.models is None or (
            self.models is not None
            and all(any(_within(pattern, wider) for wider in other.models) for pattern in self.models)
        )
        cost = other.max_cost_usd is None or (self.max_cost_usd is not None and self.max_cost_usd <= other.max_cost_usd)
        return providers and models and cost


def _within(pattern: str, wider: str) -> bool:
    # A `?` or a set in the wider one would match a `*` of the other as if that were one character.
    return pattern == wider or ("[" not in pattern + wider and "?" not in wider and fnmatch.fnmatchcase(pattern, wider))


#: No limits.
ANYTHING = Policy()


def lowest(*limits: Decimal | None) -> Decimal | None:
    """The limit that holds where several parties have one."""
    return min((limit for limit in limits if limit is not None), default=None)
