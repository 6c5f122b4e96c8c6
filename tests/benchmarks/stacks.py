"""
What a profiler saw, added up: by package, by module, by function, and as a tree.

Samples are call stacks. A part's own samples are those taken in it; its cumulative ones are also those in what it
called, and who calls itself is counted once. Time in C (JSON, sockets, locks) belongs to the Python function that
called it. Nothing in here runs a profiler.
"""

from __future__ import annotations

import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

_STANDARD = Path(sysconfig.get_path("stdlib"))
#: Of ours, whose parts are told apart.
_OURS = ("gateway", "adapters", "admission", "metering", "protos", "tests")
#: Where a loop waits, which is no work.
_WAITING = frozenset({("selectors", "select")})
#: Stacks begin alike up to the event loop; this share of them must, for a beginning to be left out.
ALIKE = 0.98


class Frame(msgspec.Struct, frozen=True):
    module: str
    function: str

    @property
    def name(self) -> str:
        return f"{self.module}: {self.function}"


class Part(msgspec.Struct, frozen=True):
    """Of all samples, as shares of 1."""

    name: str
    own: float
    cumulative: float


class Branch(msgspec.Struct, frozen=True):
    """One line of the tree: what was sampled in it and below."""

    depth: int
    name: str
    cumulative: float


def module(file: str, root: Path) -> str:
    """`gateway.rest.chat`, `aiohttp.web_protocol`, `asyncio.events`; a file that is in none of these, by its name."""
    path = Path(file)
    if "site-packages" in path.parts:
        parts = path.parts[len(path.parts) - path.parts[::-1].index("site-packages") :]
    else:
        within = next((base for base in (root, _STANDARD) if path.is_relative_to(base)), path.parent)
        parts = path.relative_to(within).parts
    *packages, last = parts
    name = last.removesuffix(".py").partition(".")[0]
    return ".".join(packages if name == "__init__" and packages else [*packages, name])


def package(name: str) -> str:
    """Of a module: the first part, and of ours two."""
    first, *rest = name.split(".")
    return ".".join([first, *rest[:1]]) if first in _OURS else first


class Stacks:
    """Samples from the outermost call to the innermost, with their weights."""

    def __init__(self, samples: Sequence[tuple[tuple[Frame, ...], float]]) -> None:
        self._samples = [
            (stack, weight)
            for stack, weight in samples
            if stack and (stack[-1].module, stack[-1].function.rpartition(".")[2]) not in _WAITING
        ]
        self._total = sum(weight for _, weight in self._samples)

    def __len__(self) -> int:
        return len(self._samples)

    @classmethod
    def of_speedscope(cls, content: bytes, *, thread: str, root: Path) -> Stacks:
        """Of a file that py-spy wrote, what its thread of this name did. Raises ValueError if there is none."""
        said = msgspec.json.decode(content, type=_File)
        frames = [Frame(module(frame.file, root), frame.name) for frame in said.shared.frames]
        chosen = [profile for profile in said.profiles if thread in profile.name]
        if not chosen:
            raise ValueError(f"no samples of {thread}")
        return cls(
            [
                (tuple(frames[index] for index in sample), weight)
                for profile in chosen
                for sample, weight in zip(profile.samples, profile.weights, strict=True)
            ]
        )

    def parts(self, name: Callable[[Frame], str]) -> list[Part]:
        """By what a frame is called, those with the most of their own first."""
        own: dict[str, float] = defaultdict(float)
        cumulative: dict[str, float] = defaultdict(float)
        for stack, weight in self._samples:
            own[name(stack[-1])] += weight
            for called in {name(frame) for frame in stack}:
                cumulative[called] += weight
        parts = [Part(called, own[called] / self._total, cumulative[called] / self._total) for called in cumulative]
        return sorted(parts, key=lambda part: (-part.own, -part.cumulative))

    def tree(self, name: Callable[[Frame], str], *, least: float) -> Iterator[Branch]:
        """
        Who called whom, frames of the same name after each other being one, the dearest first, without branches below
        `least`. What nearly all stacks begin with is left out.
        """
        paths: dict[tuple[str, ...], float] = defaultdict(float)
        for stack, weight in self._samples:
            path: list[str] = []
            for called in map(name, stack):
                if not path or path[-1] != called:
                    path.append(called)
            paths[tuple(path)] += weight
        while (first := _first_of_most(paths, self._total * ALIKE)) is not None:
            shorter: dict[tuple[str, ...], float] = defaultdict(float)
            for path_, weight in paths.items():
                shorter[path_[1:] if path_[0] == first and len(path_) > 1 else path_] += weight
            paths = shorter
        return self._branches(paths, 0, self._total * least)

    def _branches(self, paths: Mapping[tuple[str, ...], float], depth: int, least: float) -> Iterator[Branch]:
        below: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
        for path, weight in paths.items():
            if path:
                below[path[0]][path[1:]] = weight
        for called, weight in sorted(((called, sum(rest.values())) for called, rest in below.items()), key=_dearest):
            if weight < least:
                return
            yield Branch(depth, called, weight / self._total)
            yield from self._branches(below[called], depth + 1, least)


def _dearest(weighed: tuple[str, float]) -> tuple[float, str]:
    return -weighed[1], weighed[0]


def _first_of_most(paths: Mapping[tuple[str, ...], float], enough: float) -> str | None:
    """What so much begins with, that goes on."""
    weights: dict[str, float] = defaultdict(float)
    for path, weight in paths.items():
        if len(path) > 1:
            weights[path[0]] += weight
    return next((first for first, weight in weights.items() if weight >= enough), None)


class _Frame(msgspec.Struct):
    name: str
    file: str = ""


class _Shared(msgspec.Struct):
    frames: list[_Frame]


class _Thread(msgspec.Struct):
    name: str
    samples: list[list[int]]
    weights: list[float]


class _File(msgspec.Struct):
    """What is read of the format; its schema is speedscope's file-format-schema.json."""

    shared: _Shared
    profiles: list[_Thread]
