"""Ratios and targets, computed from rounds that are made up."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pytest

from tests.benchmarks.figures import (
    COMPLETE,
    PACED,
    PLAIN,
    RUN,
    SCENARIOS,
    STREAMED,
    SUBMIT,
    Admission,
    Results,
    Target,
)
from tests.benchmarks.load import Measured

ROUNDS = 3


def measured(*, cpu_ms: float = 1.0, per_s: float = 1000.0, p50_ms: float = 1.0, p99_ms: float = 2.0) -> Measured:
    """A second of it, whoever did it."""
    spent = cpu_ms / 1e3 * per_s
    everybody = ("gateway", "proxy", "bare gRPC", "provider", "postgres", "load", "machine")
    return Measured(count=round(per_s), wall_s=1.0, cpu_s=dict.fromkeys(everybody, spent), p50_ms=p50_ms, p99_ms=p99_ms)


def results(special: Mapping[str, list[Measured]] = MappingProxyType({})) -> Results:
    """All the same, but for the sides named `scenario at concurrency on place`."""
    made, left = Results(), dict(special)
    sides = [(s.name, s.concurrency, side.place) for s in SCENARIOS for side in s.sides]
    for name, concurrency, place in [*sides, (SUBMIT, 1, "gateway"), (RUN, 1, "gateway")]:
        for one in left.pop(f"{name} at {concurrency} on {place}", [measured()] * ROUNDS):
            made.add(name, concurrency, place, one)
    assert not left, "there is no such side"
    made.admissions += [Admission(admit_ms=0.5, pair_ms=1.0)] * ROUNDS
    made.resident_mb = 90.0
    return made


def target(made: Results, name: str) -> Target:
    return next(target for target in made.targets() if target.name == name)


def test_a_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    # The neighbours of the second round cost both sides ten times as much. Medians of each side would give 2.
    made = results(
        {
            f"{PLAIN} at 16 on gateway": [measured(cpu_ms=ms) for ms in (3.0, 20.0, 3.0)],
            f"{PLAIN} at 16 on proxy": [measured(cpu_ms=ms) for ms in (1.0, 10.0, 1.5)],
        }
    )
    row = next(row for row in made.rows() if (row.scenario, row.concurrency, row.place) == (PLAIN, 16, "proxy"))
    told = target(made, "plain /v1 at 16: CPU over the proxy")

    assert row.cpu_ratio == pytest.approx(2.0) == told.measured
    assert [told.low, told.high] == pytest.approx([2.0, 3.0])
    assert row.cpu_s_per_1000 == pytest.approx(1.5)
    assert not told.reached
    assert told.alike


def test_whether_a_target_is_reached_is_reckoned_from_what_was_measured() -> None:
    name = f"{COMPLETE} at 16: CPU over bare gRPC"

    def made(cpu_ms: float) -> Target:
        return target(results({f"{COMPLETE} at 16 on gateway gRPC": [measured(cpu_ms=cpu_ms)] * ROUNDS}), name)

    assert made(1.29).reached
    assert not made(1.31).reached
    assert target(results({f"{SUBMIT} at 1 on gateway": [measured(per_s=20_001)] * ROUNDS}), _LINES).reached
    assert not target(results({f"{SUBMIT} at 1 on gateway": [measured(per_s=19_999)] * ROUNDS}), _LINES).reached


_LINES = "jobs: lines submitted a second"


def test_rounds_that_say_different_things_are_told() -> None:
    rates = [measured(per_s=per_s) for per_s in (19_000, 21_000, 22_000)]
    told = target(results({f"{SUBMIT} at 1 on gateway": rates}), _LINES)

    assert told.reached
    assert not told.alike


def test_the_first_chunk_is_told_without_the_slot_that_it_waited_for() -> None:
    made = results(
        {
            f"{STREAMED} at 1 on gateway": [measured(p50_ms=3.0)] * ROUNDS,
            f"{STREAMED} at 1 on direct": [measured(p50_ms=0.25)] * ROUNDS,
        }
    )

    assert target(made, "streamed /v1 at 1: first chunk over direct and a slot").measured == 3.0 - 0.25 - 0.5
    assert {f.name: f.measured for f in made.others()}["streamed /v1 at 1: first chunk over direct"] == 2.75


def test_the_tail_is_that_of_requests_at_a_fixed_rate() -> None:
    paced = [measured(p50_ms=2.0, p99_ms=9.0)] * ROUNDS
    told = target(results({f"{PACED} at 64 on gateway": paced}), "plain /v1 at half of saturation: p99 over p50")

    assert told.measured == 4.5
    assert not told.reached


def test_every_side_has_a_row_and_only_yardsticks_a_ratio() -> None:
    rows = list(results().rows())

    assert len(rows) == sum(len(scenario.sides) for scenario in SCENARIOS) + 2
    assert {row.place for row in rows if row.cpu_ratio is not None} == {"proxy", "bare gRPC"}
    assert {row.place for row in rows if row.postgres_s_per_1000 is not None} == {"gateway", "gateway gRPC"}


def test_rounds_that_do_not_belong_together_are_no_ratio() -> None:
    made = results({f"{PLAIN} at 16 on proxy": [measured()] * (ROUNDS - 1)})

    with pytest.raises(ValueError, match="shorter"):
        list(made.targets())
