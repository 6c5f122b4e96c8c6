"""What the admission benchmark runs, and what its rounds come to."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

import msgspec

from tests.benchmarks.admission.world import HOT, LIMIT_8, MANY, QUEUED, Counted, Round

#: By name: the groups that requests go to.
KINDS = {"hot": (HOT,), "limit8": (LIMIT_8,), "many": MANY, "queued": (QUEUED,)}
WORDS = {"hot": "one group", "limit8": "one group, limit 8", "many": "64 groups", "queued": "one group, {} waiting"}
WAITING = 100_000


class Case(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    processes: int
    #: In each process.
    clients: int

    @property
    def groups(self) -> Sequence[str]:
        return KINDS[self.kind]

    @property
    def words(self) -> str:
        return WORDS[self.kind].format(f"{WAITING:,}")

    @property
    def at(self) -> str:
        return f"{self.processes} x {self.clients}"

    @property
    def bare(self) -> Bare:
        return Bare(rows=len(self.groups), processes=self.processes, clients=self.clients)


class Bare(msgspec.Struct, frozen=True, kw_only=True):
    """What a case is held against: every client updates one of so many rows, on a connection of its own."""

    rows: int
    processes: int
    clients: int


ALONE = Case(kind="hot", processes=1, clients=1)
TARGET = Case(kind="hot", processes=4, clients=16)
ALONE_QUEUED = Case(kind="queued", processes=1, clients=1)
TARGET_QUEUED = Case(kind="queued", processes=4, clients=16)
CASES = [
    ALONE,
    *(Case(kind="hot", processes=n, clients=16) for n in (1, 4, 8)),
    Case(kind="limit8", processes=4, clients=16),
    *(Case(kind="many", processes=n, clients=16) for n in (1, 4, 8)),
    ALONE_QUEUED,
    TARGET_QUEUED,
]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is run."""

    rounds: int
    #: Of one case in one round.
    seconds: float
    warmup_s: float
    #: Pairs whose commits and round trips are counted.
    counted: int
    bloat: int


FULL = Plan(rounds=5, seconds=0.8, warmup_s=0.2, counted=500, bloat=1_000_000)
QUICK = Plan(rounds=1, seconds=0.5, warmup_s=0.2, counted=100, bloat=50_000)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The medians of a case. Ratios are of the rounds, to the bare UPDATE of the same round."""

    case: str
    kind: str
    processes: int
    clients: int
    #: Not measured, and why; then there are no figures.
    failed: str | None = None
    pairs_per_s: float | None = None
    bare_per_s: float | None = None
    rate_ratio: float | None = None
    admit_p50_ms: float | None = None
    admit_p99_ms: float | None = None
    settle_p50_ms: float | None = None
    settle_p99_ms: float | None = None
    pair_p50_ms: float | None = None
    pair_p99_ms: float | None = None
    bare_p50_ms: float | None = None
    bare_p99_ms: float | None = None
    p50_ratio: float | None = None
    #: Per pair: transactions that wrote, and bytes of WAL.
    transactions: float | None = None
    wal_bytes: float | None = None
    #: CPU seconds per 1,000 pairs or updates.
    postgres_s: float | None = None
    clients_s: float | None = None
    bare_postgres_s: float | None = None
    bare_clients_s: float | None = None
    #: Cores busy with other programs.
    foreign_cores: float | None = None
    #: Pairs a second of each round.
    rounds: Sequence[float] = ()


def row(case: Case, ours: Sequence[Round], bares: Sequence[Round]) -> Row:
    """Raises ValueError where a round has none that ended within the measured seconds."""
    if any(one.count == 0 for one in (*ours, *bares)):
        raise ValueError(f"{case.words}, {case.at}: nothing ended within a round")

    def over(figure: Callable[[Round], float]) -> float:
        return _median(figure(a) / figure(b) for a, b in zip(ours, bares, strict=True))

    return Row(
        case=case.words,
        kind=case.kind,
        processes=case.processes,
        clients=case.clients,
        pairs_per_s=_median(r.per_s for r in ours),
        bare_per_s=_median(r.per_s for r in bares),
        rate_ratio=over(lambda r: r.per_s),
        admit_p50_ms=_median(_at(r.admit_us, 50) for r in ours),
        admit_p99_ms=_median(_at(r.admit_us, 99) for r in ours),
        settle_p50_ms=_median(_at(r.settle_us, 50) for r in ours),
        settle_p99_ms=_median(_at(r.settle_us, 99) for r in ours),
        pair_p50_ms=_median(_at(r.pair_us, 50) for r in ours),
        pair_p99_ms=_median(_at(r.pair_us, 99) for r in ours),
        bare_p50_ms=_median(_at(r.pair_us, 50) for r in bares),
        bare_p99_ms=_median(_at(r.pair_us, 99) for r in bares),
        p50_ratio=over(lambda r: _at(r.pair_us, 50)),
        transactions=_median(r.transactions / r.count for r in ours),
        wal_bytes=_median(r.wal_bytes / r.count for r in ours),
        postgres_s=_median(r.postgres_s / r.count * 1000 for r in ours),
        clients_s=_median(r.clients_s / r.count * 1000 for r in ours),
        bare_postgres_s=_median(r.postgres_s / r.count * 1000 for r in bares),
        bare_clients_s=_median(r.clients_s / r.count * 1000 for r in bares),
        foreign_cores=_median(r.foreign_s / r.seconds for r in ours),
        rounds=[r.per_s for r in ours],
    )


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    words: str
    #: None: not measured.
    figure: float | None
    bound: float
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        if self.figure is None:
            return None
        return self.figure >= self.bound if self.at_least else self.figure <= self.bound


def goals(rows: Sequence[Row], counted: Counted | None) -> list[Goal]:
    """What admission is to reach, and what was measured."""
    found = {(r.kind, r.processes, r.clients): r for r in rows if r.failed is None}

    def figure(case: Case, name: str) -> float | None:
        measured = found.get((case.kind, case.processes, case.clients))
        return None if measured is None else getattr(measured, name)

    hot, queued = figure(TARGET, "pairs_per_s"), figure(TARGET_QUEUED, "pairs_per_s")
    bare, bare_queued = figure(TARGET, "rate_ratio"), figure(TARGET_QUEUED, "rate_ratio")
    commits = None if counted is None else round(counted.commits, 2)
    round_trips = None if counted is None else round(counted.round_trips, 2)
    return [
        Goal(words=f"pairs a second on one hot group, {TARGET.at}", figure=hot, bound=6000, at_least=True),
        Goal(
            words=f"the same with {WAITING:,} waiting, as a share of it",
            figure=None if hot is None or queued is None else queued / hot,
            bound=0.75,
            at_least=True,
        ),
        Goal(
            words="that share again, each side as a ratio to its bare UPDATE",
            figure=None if bare is None or bare_queued is None else bare_queued / bare,
            bound=0.75,
            at_least=True,
        ),
        Goal(words="commits of an uncontended pair", figure=commits, bound=2.0),
        Goal(words="round trips of an uncontended pair", figure=round_trips, bound=2.0),
        Goal(words="uncontended p50 of a pair over a bare UPDATE's", figure=figure(ALONE, "p50_ratio"), bound=3.0),
    ]


def _at(values: Sequence[int], percent: int) -> float:
    """A percentile of microseconds, in milliseconds."""
    ordered = sorted(values)
    return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)] / 1000


def _median(values: Iterator[float]) -> float:
    return statistics.median(values)
