"""What a key may give to another, and what it may not."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from gateway.call import Scope
from gateway.errors import PermissionDenied
from gateway.keys.rights import Rights, check_giving
from gateway.policy import ANYTHING, Policy

SOON = datetime.now(UTC) + timedelta(days=1)
LATER = SOON + timedelta(days=1)
ADMIN = frozenset({Scope.ADMIN})
BOTH = frozenset({Scope.ADMIN, Scope.CHAT})


@pytest.mark.parametrize(
    ("narrow", "wide", "within"),
    [
        pytest.param(("gpt-4o",), ("gpt-4o",), True, id="the same"),
        pytest.param(("gpt-4o",), ("gpt-*",), True, id="a name under a pattern"),
        pytest.param(("gpt-4*",), ("gpt-*",), True, id="a pattern under a pattern"),
        pytest.param(("gpt-*",), ("gpt-4*",), False, id="the other way round"),
        pytest.param(("gpt-4o", "claude"), ("gpt-*",), False, id="one of two is outside"),
        pytest.param(("a*",), ("a?",), False, id="a star is not one character"),
        pytest.param(("[a]x",), ("*]x",), False, id="a set is not its own text"),
        pytest.param(("[a]x",), ("[a]x",), True, id="the same set"),
        pytest.param(None, ("gpt-*",), False, id="any is more than some"),
        pytest.param(("gpt-*",), None, True, id="some is less than any"),
    ],
)
def test_a_list_of_models_is_within_another_only_where_that_is_sure(
    narrow: tuple[str, ...] | None, wide: tuple[str, ...] | None, within: bool
) -> None:
    assert Policy(models=narrow).within(Policy(models=wide)) is within


def test_providers_are_within_a_list_that_has_them_all() -> None:
    some, more = Policy(providers=frozenset({"a"})), Policy(providers=frozenset({"a", "b"}))
    assert some.within(more)
    assert not more.within(some)
    assert not ANYTHING.within(more)
    assert more.within(ANYTHING)


OWN = Rights(scopes=BOTH, models=("gpt-*",), providers=("openai",), expires_at=SOON)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        pytest.param({"scopes": BOTH | {Scope.JOBS}}, "scopes", id="a scope"),
        pytest.param({"models": ("gpt-4o", "claude")}, "models", id="a model"),
        pytest.param({"models": None}, "models", id="every model"),
        pytest.param({"providers": ("openai", "other")}, "providers", id="a provider"),
        pytest.param({"providers": None}, "providers", id="every provider"),
        pytest.param({"expires_at": LATER}, "expires_at", id="time"),
        pytest.param({"expires_at": None}, "expires_at", id="for ever"),
    ],
)
def test_a_key_gives_nothing_that_it_does_not_have(given: dict[str, object], field: str) -> None:
    own = {name: getattr(OWN, name) for name in Rights.__struct_fields__}
    check_giving(OWN, OWN)
    with pytest.raises(PermissionDenied) as refused:
        check_giving(Rights(**{**own, **given}), OWN)
    assert refused.value.param == field
    # Itself included: what it had before was no more.
    with pytest.raises(PermissionDenied):
        check_giving(Rights(**{**own, **given}), OWN, OWN)


def test_a_right_may_be_narrowed_by_a_key_that_does_not_have_it() -> None:
    wide = Rights(scopes=frozenset(Scope), models=("claude-*", "gpt-*"))
    giver = Rights(scopes=ADMIN, models=("gpt-*",), expires_at=SOON)
    narrower = Rights(scopes=frozenset({Scope.CHAT}), models=("claude-*",))
    check_giving(narrower, giver, wide)
    with pytest.raises(PermissionDenied):
        check_giving(narrower, giver)


def test_a_key_without_limits_gives_anything_that_its_scopes_are() -> None:
    check_giving(Rights(scopes=frozenset(Scope), expires_at=None), Rights(scopes=frozenset(Scope)))
