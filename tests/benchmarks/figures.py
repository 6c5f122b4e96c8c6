"""
From what was measured to what is told: medians, ratios, and whether the targets are reached.

A figure is the median of the rounds, and a ratio or a difference the median of the rounds' own, for the two sides of a
round had the same neighbours. Nothing in here measures.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from tests.benchmarks.load import Measured
from tests.benchmarks.provider import PIECES
from tests.benchmarks.world import GROUPS, YARDSTICKS


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of those that a scenario is run against."""

    place: str
    kind: str

    @property
    def group(self) -> str:
        """Whose CPU it is."""
        return GROUPS.get(self.place, self.place)


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    concurrency: int
    #: The first is the gateway's; the others are what it is held against.
    sides: Sequence[Side]
    #: Sent at this share of what the gateway gave in `PLAIN` at 64 in the same round, whatever the answers do.
    share: float | None = None


def _sides(kind: str, *places: str) -> list[Side]:
    return [Side(place=place, kind=kind) for place in places]


PLAIN, STREAMED, PACED = "/v1 plain", "/v1 stream", "/v1 plain, half of saturation"
COMPLETE, STREAM = "gRPC Complete", "gRPC Stream"
SUBMIT, RUN, POLL = "submit jobs", "run jobs", "poll a job"
SCENARIOS = (
    *(
        Scenario(name=PLAIN, concurrency=n, sides=_sides("http", "gateway", "proxy", "direct"))
        for n in (1, 16, 64)
    ),
    Scenario(name=PACED, concurrency=64, sides=_sides("http_paced", "gateway", "proxy"), share=0.5),
    *(
        Scenario(name=STREAMED, concurrency=n, sides=_sides("http_stream", "gateway", "proxy", "direct"))
        for n in (1, 16)
    ),
    *(
        Scenario(name=COMPLETE, concurrency=n, sides=_sides("complete", "gateway gRPC", "bare gRPC"))
        for n in (1, 16, 64)
    ),
    *(
        Scenario(name=STREAM, concurrency=n, sides=_sides("stream", "gateway gRPC", "bare gRPC"))
        for n in (1, 16, 64)
    ),
    Scenario(name=POLL, concurrency=16, sides=_sides("poll", "gateway")),
)  # fmt: skip


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The medians of one side of a scenario."""

    scenario: str
    concurrency: int
    place: str
    #: Requests, jobs or lines a second, and of a stream deltas.
    per_s: float
    deltas_per_s: float | None = None
    #: Of a stream: to its first content. None for jobs.
    p50_ms: float | None = None
    p99_ms: float | None = None
    #: Of the place's own processes, per 1,000 requests.
    cpu_s_per_1000: float
    postgres_s_per_1000: float | None = None
    #: Cores that the load was busy with, and processes that are none of ours.
    load_cores: float
    foreign_cores: float
    #: The gateway's over this one's: of CPU, of rate.
    cpu_ratio: float | None = None
    rate_ratio: float | None = None
    #: The gateway's p50 less this one's.
    added_p50_ms: float | None = None


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """A slot and its settlement alone, by one client, without a gateway: medians of one round."""

    admit_ms: float
    pair_ms: float


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One number that was computed in each round."""

    name: str
    #: The median of the rounds, the least and the largest.
    measured: float
    low: float
    high: float
    unit: str = ""


class Target(Figure, frozen=True, kw_only=True):
    """One that is meant to be at most so much, or at least."""

    at_most: float | None = None
    at_least: float | None = None

    def allows(self, value: float) -> bool:
        return (self.at_most is None or value <= self.at_most) and (self.at_least is None or value >= self.at_least)

    @property
    def reached(self) -> bool:
        return self.allows(self.measured)

    @property
    def alike(self) -> bool:
        """Whether every round says the same."""
        return self.allows(self.low) == self.allows(self.high) == self.reached


class Results:
    """The rounds of everything, in order; each scenario and side has as many."""

    def __init__(self) -> None:
        self._measured: dict[tuple[str, int, str], list[Measured]] = defaultdict(list)
        self.admissions: list[Admission] = []
        #: Megabytes of the gateway's process, after all else.
        self.resident_mb = 0.0

    def add(self, scenario: str, concurrency: int, place: str, measured: Measured) -> None:
        self._measured[scenario, concurrency, place].append(measured)

    def of(self, scenario: str, concurrency: int, place: str) -> Sequence[Measured]:
        return self._measured[scenario, concurrency, place]

    # -------------------------------------------------------------- rows

    def rows(self) -> Iterator[Row]:
        for scenario in SCENARIOS:
            ours = scenario.sides[0]
            for side in scenario.sides:
                yield self._row(scenario, side, None if side is ours else ours)
        for name in (SUBMIT, RUN):
            yield self._row(
                Scenario(name=name, concurrency=1, sides=()), Side(place="gateway", kind="jobs"), against=None
            )

    def _row(self, scenario: Scenario, side: Side, against: Side | None) -> Row:
        rounds = self.of(scenario.name, scenario.concurrency, side.place)
        rate = _median(map(per_s, rounds))
        row = Row(
            scenario=scenario.name,
            concurrency=scenario.concurrency,
            place=side.place,
            per_s=rate,
            deltas_per_s=rate * PIECES if "stream" in side.kind else None,
            p50_ms=_median(m.p50_ms for m in rounds) or None,
            p99_ms=_median(m.p99_ms for m in rounds) or None,
            cpu_s_per_1000=_median(cost(m, side.group) for m in rounds),
            postgres_s_per_1000=_median(cost(m, "postgres") for m in rounds) if side.group == "gateway" else None,
            load_cores=_median(m.cpu_s["load"] / m.wall_s for m in rounds),
            foreign_cores=_median(map(foreign, rounds)),
        )
        if against is None:
            return row
        pairs = list(zip(self.of(scenario.name, scenario.concurrency, against.place), rounds, strict=True))
        row = msgspec.structs.replace(row, added_p50_ms=_median(a.p50_ms - b.p50_ms for a, b in pairs))
        if side.place not in YARDSTICKS:
            # What a provider costs is not what a gateway could.
            return row
        return msgspec.structs.replace(
            row,
            cpu_ratio=_median(cost(a, against.group) / cost(b, side.group) for a, b in pairs),
            rate_ratio=None if scenario.share else _median(per_s(a) / per_s(b) for a, b in pairs),
        )

    # -------------------------------------------------------------- targets

    def targets(self) -> Iterator[Target]:
        """Those of the speed issue that one gateway beside its yardsticks can show."""

        def target(
            name: str,
            values: Iterable[float],
            unit: str = "",
            *,
            at_most: float | None = None,
            at_least: float | None = None,
        ) -> Target:
            median, low, high = _spread(values)
            return Target(name=name, measured=median, low=low, high=high, unit=unit, at_most=at_most, at_least=at_least)

        plain = self.of(PLAIN, 16, "gateway")
        streamed = self.of(STREAMED, 1, "gateway")
        yield target(
            "plain /v1 at 16: CPU over the proxy",
            _ratios(plain, self.of(PLAIN, 16, "proxy"), _cost_of("gateway"), _cost_of("proxy")),
            at_most=1.5,
        )
        yield target("plain /v1 at 16: PostgreSQL's CPU, s per 1,000", map(_cost_of("postgres"), plain), at_most=0.3)
        yield target(
            "plain /v1 at 1: p50 added over direct",
            _differences(self.of(PLAIN, 1, "gateway"), self.of(PLAIN, 1, "direct")),
            "ms",
            at_most=2.5,
        )
        yield target(
            "plain /v1 at half of saturation: p99 over p50",
            (m.p99_ms / m.p50_ms for m in self.of(PACED, 64, "gateway")),
            at_most=4,
        )
        yield target(
            "streamed /v1 at 16: events a second over the proxy's",
            _ratios(self.of(STREAMED, 16, "gateway"), self.of(STREAMED, 16, "proxy"), per_s, per_s),
            at_least=0.5,
        )
        yield target(
            "streamed /v1 at 1: first chunk over direct and a slot",
            (
                added - admission.admit_ms
                for added, admission in zip(
                    _differences(streamed, self.of(STREAMED, 1, "direct")), self.admissions, strict=True
                )
            ),
            "ms",
            at_most=1.5,
        )
        for name in (COMPLETE, STREAM):
            yield target(
                f"{name} at 16: CPU over bare gRPC",
                _ratios(
                    self.of(name, 16, "gateway gRPC"),
                    self.of(name, 16, "bare gRPC"),
                    _cost_of("gateway"),
                    _cost_of("bare gRPC"),
                ),
                at_most=1.3,
            )
        yield target(
            f"{STREAM} at 64: deltas a second",
            (per_s(m) * PIECES for m in self.of(STREAM, 64, "gateway gRPC")),
            at_least=25_000,
        )
        yield target("jobs: lines submitted a second", map(per_s, self.of(SUBMIT, 1, "gateway")), at_least=20_000)
        yield target(
            "jobs: run a second over plain /v1 at 64",
            _ratios(self.of(RUN, 1, "gateway"), self.of(PLAIN, 64, "gateway"), per_s, per_s),
            at_least=0.7,
        )
        yield target(
            "a poll: CPU over a plain /v1 call",
            _ratios(self.of(POLL, 16, "gateway"), plain, _cost_of("gateway"), _cost_of("gateway")),
            at_most=1,
        )
        yield target("memory of the gateway, idle after all this", [self.resident_mb], "MB", at_most=120)

    def others(self) -> Iterator[Figure]:
        """What the targets are read beside."""

        def figure(name: str, values: Iterable[float], unit: str = "") -> Figure:
            median, low, high = _spread(values)
            return Figure(name=name, measured=median, low=low, high=high, unit=unit)

        yield figure(
            "streamed /v1 at 1: first chunk over direct",
            _differences(self.of(STREAMED, 1, "gateway"), self.of(STREAMED, 1, "direct")),
            "ms",
        )
        yield figure("a slot alone, without a gateway", (a.admit_ms for a in self.admissions), "ms")
        yield figure("a slot and its settlement alone", (a.pair_ms for a in self.admissions), "ms")
        yield figure(
            "streamed /v1 at 16: CPU over the proxy",
            _ratios(
                self.of(STREAMED, 16, "gateway"),
                self.of(STREAMED, 16, "proxy"),
                _cost_of("gateway"),
                _cost_of("proxy"),
            ),
        )
        yield figure(
            "a job run: CPU over a plain /v1 call",
            _ratios(
                self.of(RUN, 1, "gateway"), self.of(PLAIN, 16, "gateway"), _cost_of("gateway"), _cost_of("gateway")
            ),
        )
        yield figure(
            "the proxy at that same rate: p99 over p50", (m.p99_ms / m.p50_ms for m in self.of(PACED, 64, "proxy"))
        )


def per_s(measured: Measured) -> float:
    return measured.count / measured.wall_s


def cost(measured: Measured, group: str) -> float:
    """CPU seconds per 1,000. No less than a clock of 10 ms can tell."""
    return max(measured.cpu_s[group], 1e-4) / measured.count * 1000


def _cost_of(group: str) -> Callable[[Measured], float]:
    return lambda measured: cost(measured, group)


def foreign(measured: Measured) -> float:
    ours = sum(spent for name, spent in measured.cpu_s.items() if name != "machine")
    return max(measured.cpu_s["machine"] - ours, 0.0) / measured.wall_s


def _ratios(
    over: Sequence[Measured],
    under: Sequence[Measured],
    figure: Callable[[Measured], float],
    other: Callable[[Measured], float],
) -> list[float]:
    return [figure(a) / other(b) for a, b in zip(over, under, strict=True)]


def _differences(ours: Sequence[Measured], theirs: Sequence[Measured]) -> list[float]:
    return [a.p50_ms - b.p50_ms for a, b in zip(ours, theirs, strict=True)]


def _spread(values: Iterable[float]) -> tuple[float, float, float]:
    known = sorted(values)
    return statistics.median(known), known[0], known[-1]


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)
