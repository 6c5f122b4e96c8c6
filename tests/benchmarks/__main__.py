"""
What the gateway costs, everything on, beside programs that do nothing: `make bench`, or `make bench ARGS=--quick`.

Every round runs every target, so that a noisy neighbour disturbs both sides of a ratio; a figure is the median of the
rounds, and a ratio the median of the rounds' ratios. CPU seconds per 1,000 requests is the figure to compare. The table
goes to the terminal and, of a full run, the numbers to `results/<date>-<commit>.json`, one file a run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from tests.benchmarks import cpu
from tests.benchmarks.load import Jobs, Measured
from tests.benchmarks.world import BURST, PIECES, World, opened

RESULTS = Path(__file__).parent / "results"
#: Above this share of one core the load's rates are its own.
SATURATED = 0.9


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is run."""

    rounds: int
    #: Of one target in one round.
    seconds: float
    warmup_s: float
    jobs: int


FULL = Plan(rounds=5, seconds=1.0, warmup_s=0.3, jobs=1000)
QUICK = Plan(rounds=2, seconds=0.25, warmup_s=0.1, jobs=200)


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a scenario."""

    place: str
    kind: str

    @property
    def group(self) -> str:
        """Whose CPU it is."""
        return {"gateway gRPC": "gateway", "direct": "provider"}.get(self.place, self.place)


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    concurrency: int
    #: The first is the gateway's; the others are what it is held against.
    targets: Sequence[Target]
    #: Deltas of one request.
    deltas: int = 1


def _targets(rpc: str, http: str, *, direct: bool) -> list[Target]:
    targets = [
        Target(place="gateway gRPC", kind=rpc),
        Target(place="bare gRPC", kind=rpc),
        Target(place="proxy", kind=http),
    ]
    return [*targets, Target(place="direct", kind=http)] if direct else targets


SCENARIOS = [
    *(
        Scenario(name="Complete", concurrency=n, targets=_targets("complete", "http", direct=n == 1))
        for n in (1, 16, 64)
    ),
    *(
        Scenario(name="Stream", concurrency=n, targets=_targets("stream", "http_stream", direct=n == 1), deltas=PIECES)
        for n in (1, 16)
    ),
]
#: Held against plain calls of the gateway and of the proxy.
POLL = Scenario(name="poll a job", concurrency=16, targets=[Target(place="gateway", kind="poll")])
CHAT = [
    *(Scenario(name="/v1 plain", concurrency=n, targets=[Target(place="gateway", kind="http")]) for n in (1, 16, 64)),
    *(
        Scenario(name="/v1 stream", concurrency=n, targets=[Target(place="gateway", kind="http_stream")], deltas=PIECES)
        for n in (1, 16)
    ),
]
SUBMIT, RUN = "submit jobs", "run jobs"
PLACES = ("gateway gRPC", "gateway", "bare gRPC", "proxy", "direct")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The medians of one target in one scenario."""

    scenario: str
    concurrency: int
    target: str
    #: Requests, jobs or lines a second, and of a stream deltas.
    per_s: float
    deltas_per_s: float | None
    #: Of a stream: to its first content. None for jobs.
    p50_ms: float | None
    p99_ms: float | None
    #: Of the target's own processes, per 1,000 requests.
    cpu_s_per_1000: float
    postgres_s_per_1000: float | None
    #: Cores that the load was busy with, and processes that are none of ours.
    load_cores: float
    foreign_cores: float
    #: The gateway's over this one's: of CPU, of rate.
    cpu_ratio: float | None = None
    rate_ratio: float | None = None
    #: The gateway's p50 less this one's.
    added_p50_ms: float | None = None


class Bench:
    """Collects the rounds of everything."""

    def __init__(self, world: World, plan: Plan, console: Console) -> None:
        self._world = world
        self._plan = plan
        self._console = console
        self._measured: dict[tuple[str, int, Target], list[Measured]] = defaultdict(list)
        #: Of one answer, by whether it was streamed.
        self._characters: dict[bool, int] = {}
        self._job_path = ""

    async def run(self) -> None:
        scenarios = [*SCENARIOS, POLL]
        if await self._serves_chat():
            scenarios += CHAT
        for number in range(-1, self._plan.rounds):
            await self._jobs(warming=number < 0)
            for scenario in scenarios:
                # The order turns round, so that no target is always the one after the noisy one.
                targets = scenario.targets if number % 2 else scenario.targets[::-1]
                for target in targets:
                    await self._one(scenario, target, warming=number < 0)
            self._console.print(f"round {number + 1} of {self._plan.rounds}" if number >= 0 else "warm", style="dim")

    async def _serves_chat(self) -> bool:
        try:
            reader, writer = await asyncio.open_connection(*self._world.places["gateway"].split("//")[1].split(":"))
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
            head = await reader.readline()
            writer.close()
        except OSError:
            return False
        return b" 404 " not in head

    async def _one(self, scenario: Scenario, target: Target, *, warming: bool) -> None:
        measured = await self._world.measure(
            target.kind,
            target.place,
            Measured,
            concurrency=scenario.concurrency,
            seconds=self._plan.warmup_s if warming else self._plan.seconds,
            path=self._job_path if target.kind == "poll" else "/v1/chat/completions",
        )
        if warming:
            return
        if target.kind != "poll":
            streamed = "stream" in target.kind
            if self._characters.setdefault(streamed, measured.characters) != measured.characters:
                raise RuntimeError(f"{target.place} gave another answer than the others: {scenario.name}")
        self._measured[scenario.name, scenario.concurrency, target].append(measured)

    async def _jobs(self, *, warming: bool) -> None:
        count = self._plan.jobs // 10 if warming else self._plan.jobs
        done = await self._world.measure("jobs", "gateway", Jobs, jobs=count)
        self._job_path = f"/v1/jobs/{done.job_id}"
        if not warming:
            target = Target(place="gateway", kind="jobs")
            self._measured[SUBMIT, 1, target].append(done.submitted)
            self._measured[RUN, 1, target].append(done.run)

    # -------------------------------------------------------------- what came out

    def rows(self) -> Iterator[Row]:
        order = [(SUBMIT, 1), (RUN, 1), *((s.name, s.concurrency) for s in (*SCENARIOS, *CHAT, POLL))]
        keys = sorted(
            self._measured,
            key=lambda key: (order.index(key[:2]), [*PLACES].index(key[2].place)),
        )
        for name, concurrency, target in keys:
            rounds = self._measured[name, concurrency, target]
            deltas = PIECES if "stream" in target.kind else None
            against = self._against(name, concurrency, target)
            per_s = _median(m.count / m.wall_s for m in rounds)
            yield Row(
                scenario=name,
                concurrency=concurrency,
                target=target.place,
                per_s=per_s,
                deltas_per_s=None if deltas is None else per_s * deltas,
                p50_ms=_median(m.p50_ms for m in rounds) or None,
                p99_ms=_median(m.p99_ms for m in rounds) or None,
                cpu_s_per_1000=_median(_cost(m, target.group) for m in rounds),
                postgres_s_per_1000=_median(_cost(m, "postgres") for m in rounds)
                if target.group == "gateway"
                else None,
                load_cores=_median(m.cpu_s["load"] / m.wall_s for m in rounds),
                foreign_cores=_median(_foreign(m) for m in rounds),
                cpu_ratio=None
                if against is None or target.place == "direct"
                else _median(
                    _cost(ours, against[0].group) / _cost(theirs, target.group)
                    for ours, theirs in zip(against[1], rounds, strict=True)
                ),
                rate_ratio=None
                if against is None
                else _median(
                    (ours.count / ours.wall_s) / (theirs.count / theirs.wall_s)
                    for ours, theirs in zip(against[1], rounds, strict=True)
                ),
                added_p50_ms=None
                if against is None
                else _median(ours.p50_ms - theirs.p50_ms for ours, theirs in zip(against[1], rounds, strict=True)),
            )

    def _against(self, name: str, concurrency: int, target: Target) -> tuple[Target, list[Measured]] | None:
        """The gateway's rounds of the scenario that the target is a yardstick of."""
        if target.group == "gateway":
            return None
        ours = next(s.targets[0] for s in SCENARIOS if (s.name, s.concurrency) == (name, concurrency))
        return ours, self._measured[name, concurrency, ours]

    def claims(self) -> Iterator[tuple[str, float]]:
        """The ratios that cross scenarios."""
        plain = self._measured["Complete", 16, Target(place="gateway gRPC", kind="complete")]
        jobs = self._measured[RUN, 1, Target(place="gateway", kind="jobs")]
        polls = self._measured["poll a job", 16, Target(place="gateway", kind="poll")]
        yield "jobs run a second over plain calls a second, concurrency 16", _ratio(jobs, plain, _rate)
        yield "CPU of a job over a plain call", _ratio(jobs, plain, _gateway_cost)
        yield "CPU of a poll over a plain call", _ratio(polls, plain, _gateway_cost)
        for scenario in CHAT:
            key = (scenario.name, scenario.concurrency, scenario.targets[0])
            if key not in self._measured:
                continue
            streamed = scenario.deltas > 1
            proxy = self._measured[
                "Stream" if streamed else "Complete",
                scenario.concurrency,
                Target(place="proxy", kind="http_stream" if streamed else "http"),
            ]
            at = f"{scenario.name}, concurrency {scenario.concurrency}, over the proxy"
            yield (
                f"CPU of {at}",
                _median(
                    _cost(m, "gateway") / _cost(p, "proxy") for m, p in zip(self._measured[key], proxy, strict=True)
                ),
            )
            yield f"rate of {at}", _ratio(self._measured[key], proxy, _rate)


def _rate(measured: Measured) -> float:
    return measured.count / measured.wall_s


def _cost(measured: Measured, group: str) -> float:
    """CPU seconds per 1,000. No less than the kernel's clock can tell."""
    return max(measured.cpu_s[group], 0.01) / measured.count * 1000


def _gateway_cost(measured: Measured) -> float:
    return _cost(measured, "gateway")


def _foreign(measured: Measured) -> float:
    ours = sum(spent for name, spent in measured.cpu_s.items() if name != "machine")
    return max(measured.cpu_s["machine"] - ours, 0.0) / measured.wall_s


def _ratio(over: Sequence[Measured], under: Sequence[Measured], figure: Callable[[Measured], float]) -> float:
    return _median(figure(a) / figure(b) for a, b in zip(over, under, strict=True))


def _median(values: Iterator[float]) -> float:
    return statistics.median(values)


# ------------------------------------------------------------------ showing it


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE, header_style="bold", pad_edge=False)
    table.add_column("scenario")
    table.add_column("at", justify="right")
    table.add_column("target")
    for name in (
        "per s",
        "deltas/s",
        "p50 ms",
        "p99 ms",
        "CPU s/1000",
        "PG s/1000",
        "CPU x",
        "rate x",
        "+p50 ms",
        "load",
    ):
        table.add_column(name, justify="right")
    seen: tuple[str, int] | None = None
    for row in rows:
        here = (row.scenario, row.concurrency)
        ours = row.target.startswith("gateway")
        if seen is not None and here != seen:
            table.add_section()
        table.add_row(
            row.scenario if here != seen else "",
            str(row.concurrency) if here != seen else "",
            row.target,
            f"{row.per_s:,.0f}",
            _shown(row.deltas_per_s, ",.0f"),
            _shown(row.p50_ms, ".2f"),
            _shown(row.p99_ms, ".2f"),
            f"{row.cpu_s_per_1000:.3f}",
            _shown(row.postgres_s_per_1000, ".3f"),
            _shown(row.cpu_ratio, ".2f"),
            _shown(row.rate_ratio, ".2f"),
            _shown(row.added_p50_ms, "+.2f"),
            f"{row.load_cores:.2f}" + ("!" if row.load_cores > SATURATED else ""),
            style="bold" if ours else None,
        )
        seen = here
    return table


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _git(*words: str) -> str:
    found = subprocess.run(["git", *words], capture_output=True, text=True, check=False, cwd=RESULTS.parent)
    return found.stdout.strip()


async def bench(plan: Plan, console: Console) -> Bench:
    async with opened() as world:
        measured = Bench(world, plan, console)
        await measured.run()
        return measured


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a first look in half a minute; keeps no numbers")
    parser.add_argument("--rounds", type=int, help="instead of the usual ones")
    options = parser.parse_args()
    plan = QUICK if options.quick else FULL
    if options.rounds:
        plan = msgspec.structs.replace(plan, rounds=options.rounds)
    console = Console(width=None if os.isatty(1) else 140)
    began = time.monotonic()
    busy, every = cpu.machine()
    measured = asyncio.run(bench(plan, console))
    busy_after, every_after = cpu.machine()
    rows = list(measured.rows())
    claims = dict(measured.claims())
    console.print(_table(rows))
    console.print(
        f"A stream has {PIECES} deltas, {BURST} in each write of the provider; its latency is to the first one. CPU x, "
        "rate x and +p50 are the gateway's against that line's. `load`: cores the load itself was busy with; with ! it "
        "was the bottleneck and the rates are its own.",
        style="dim",
    )
    for claim, ratio in claims.items():
        console.print(f"{ratio:6.2f}  {claim}")
    foreign = statistics.median(row.foreign_cores for row in rows)
    share = (busy_after - busy) / max(every_after - every, 1e-9)
    console.print(
        f"{time.monotonic() - began:.0f} s, {plan.rounds} rounds; the machine was {share:.0%} busy, "
        f"{foreign:.2f} cores of it with other programs",
        style="dim",
    )
    if not options.quick:
        _keep(plan, rows, claims, console)


def _keep(plan: Plan, rows: Sequence[Row], claims: dict[str, float], console: Console) -> None:
    commit = _git("rev-parse", "--short", "HEAD") or "unknown"
    now = datetime.now(UTC)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{now:%Y-%m-%d}-{commit}.json"
    content = {
        "measured_at": now.isoformat(timespec="seconds"),
        "commit": commit,
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "plan": plan,
        "deltas_per_stream": PIECES,
        "rows": [_rounded(msgspec.to_builtins(row)) for row in rows],
        "ratios": _rounded(claims),
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
    console.print(f"kept as {path.relative_to(RESULTS.parents[2])}")


def _rounded(figures: Mapping[str, object]) -> dict[str, object]:
    return {
        name: float(f"{value:.4g}") if isinstance(value, float) else value
        for name, value in figures.items()
        if value is not None
    }


if __name__ == "__main__":
    main()
