"""What an operator knows of attempts whose cost is unknown: `POST /v1/usage/resolve`, for keys of scope `admin`."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated, Final, Literal, Protocol

import msgspec
import structlog
from aiohttp import web
from typing_extensions import TypedDict

from gateway.call import Scope
from gateway.database import StoreUnavailable
from gateway.errors import Code, GatewayError, InvalidRequest
from gateway.rest.endpoint import Endpoint, Exchange, plain
from gateway.rest.operation import OF_CONTROL, Content, Operation
from metering.cost import LIMIT_USD, SCALE
from metering.resolving import Resolution, Resolved, Result

log: Final = structlog.get_logger("gateway")

#: Attempts of one call: all of them are looked at before any is corrected.
MOST_AT_ONCE: Final = 10_000

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=500)]


class Resolver(Protocol):
    """The ledger. `metering.resolving` is it."""

    async def resolve(self, resolutions: Sequence[Resolution], *, by: uuid.UUID) -> list[Resolved]:
        """What became of each, in order. Raises StoreUnavailable."""
        ...


class ProvenAttempt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An attempt, by `ticket_id` or by `key_id`, `debit_id` and `attempt`; and what it cost."""

    ticket_id: uuid.UUID | None = None
    key_id: uuid.UUID | None = None
    debit_id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None = None
    attempt: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    state: Literal["charged", "zero"]
    #: A decimal string. Of an attempt that was charged.
    usd: Decimal | None = None
    #: Why, for whoever reads the ledger.
    note: _Text | None = None
    #: What proves it: the number of an invoice, an id of the provider's.
    evidence: _Text | None = None


class Proofs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/usage/resolve`."""

    attempts: Annotated[list[ProvenAttempt], msgspec.Meta(min_length=1, max_length=MOST_AT_ONCE)]


class ResolvedAttempt(TypedDict):
    """
    What became of it: `resolved`; `unchanged`, it was known to have cost just that; `settled`, it is known to have cost
    something else, which stands; `open`, it is at work or its end is not written yet; `not_found`.
    """

    result: Result
    ticket_id: uuid.UUID | None
    #: What the ledger has after this.
    state: Literal["charged", "zero", "unknown", "open"] | None
    #: A decimal string.
    usd: str | None


class ResolvedAttempts(TypedDict):
    """One of each that was asked for, in order."""

    attempts: list[ResolvedAttempt]


def routes(*, resolver: Resolver) -> list[Endpoint]:
    """The endpoints of this module."""

    async def resolve(exchange: Exchange) -> web.StreamResponse:
        exchange.query(())
        asked = await exchange.json(Proofs)
        resolutions = [_resolution(proof, f"attempts[{n}]") for n, proof in enumerate(asked.attempts)]
        _each_once(asked.attempts)
        by = exchange.caller.key_id
        try:
            resolved = await resolver.resolve(resolutions, by=by)
        except StoreUnavailable as error:
            raise GatewayError(
                "the control store cannot be reached; the same call may be made again",
                code=Code.CONTROL_STORE_UNAVAILABLE,
                retry_after_s=1.0,
            ) from error
        log.info("gateway.usage_resolved", key_id=str(by), **Counter(one.result.value for one in resolved))
        return exchange.answer({"attempts": plain([msgspec.structs.asdict(one) for one in resolved])})

    told = Operation(
        summary="Tell what attempts of unknown cost have cost",
        description="Each becomes a correction on the day of its attempt. The same again changes nothing.",
        takes=(
            Content(
                type=Proofs,
                example={
                    "attempts": [
                        {
                            "ticket_id": "01938f0a-7c1e-7d52-9b1a-5a0c7f3f6d10",
                            "state": "charged",
                            "usd": "0.0123",
                            "evidence": "invoice 4711",
                        }
                    ]
                },
            ),
        ),
        gives=(Content(type=ResolvedAttempts),),
        errors=OF_CONTROL,
    )
    return [Endpoint(method="POST", path="/v1/usage/resolve", access=Scope.ADMIN, handler=resolve, told=told)]


def _resolution(proof: ProvenAttempt, path: str) -> Resolution:
    by_debit = {"key_id": proof.key_id, "debit_id": proof.debit_id, "attempt": proof.attempt}
    if proof.ticket_id is not None:
        if given := [name for name, value in by_debit.items() if value is not None]:
            raise InvalidRequest("the attempt is named by its ticket_id already", param=f"{path}.{given[0]}")
    elif missing := [name for name, value in by_debit.items() if value is None]:
        raise InvalidRequest(
            "name the attempt by ticket_id, or by key_id, debit_id and attempt", param=f"{path}.{missing[0]}"
        )
    if proof.state == "zero":
        if proof.usd:
            raise InvalidRequest("what has cost something is not zero: its state is charged", param=f"{path}.usd")
        usd = Decimal(0)
    else:
        usd = _amount(proof.usd, f"{path}.usd")
    return Resolution(
        ticket_id=proof.ticket_id,
        key_id=proof.key_id,
        debit_id=proof.debit_id,
        attempt=proof.attempt,
        usd=usd,
        note=proof.note,
        evidence=proof.evidence,
    )


def _amount(usd: Decimal | None, path: str) -> Decimal:
    if usd is None:
        raise InvalidRequest("is missing: what was charged", param=path)
    exponent = usd.as_tuple().exponent
    if not isinstance(exponent, int) or exponent < -SCALE or not 0 < usd < LIMIT_USD:
        raise InvalidRequest(
            f"must be above 0 and less than {LIMIT_USD:,} USD, with at most {SCALE} decimals; what has cost nothing "
            "has the state zero",
            param=path,
        )
    return usd


def _each_once(proofs: Sequence[ProvenAttempt]) -> None:
    seen: set[tuple[object, ...]] = set()
    for n, proof in enumerate(proofs):
        attempt = (proof.ticket_id, proof.key_id, proof.debit_id, proof.attempt)
        if attempt in seen:
            raise InvalidRequest("this attempt is named twice", param=f"attempts[{n}]")
        seen.add(attempt)
