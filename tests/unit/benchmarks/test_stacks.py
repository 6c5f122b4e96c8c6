"""What a profile is added up to, from stacks made by hand."""

from __future__ import annotations

import asyncio.events
import json
from pathlib import Path

import aiohttp.web_protocol
import pytest

import gateway.rest
from tests.benchmarks.stacks import Branch, Frame, Part, Stacks, module, package

ROOT = Path(__file__).parents[3]


def stacks(**weights: float) -> Stacks:
    """Each name is a stack of modules, outermost first, by their initials."""
    modules = {"l": "asyncio.events", "s": "aiohttp.server", "p": "gateway.pipeline", "c": "aiohttp.client"}
    return Stacks([(tuple(Frame(modules[i], "run") for i in name), weight) for name, weight in weights.items()])


def by_package(frame: Frame) -> str:
    return package(frame.module)


def test_a_file_is_told_by_its_module_and_package() -> None:
    assert module(aiohttp.web_protocol.__file__, ROOT) == "aiohttp.web_protocol"
    assert module(asyncio.events.__file__, ROOT) == "asyncio.events"
    assert gateway.rest.__file__ is not None
    assert module(gateway.rest.__file__, ROOT) == "gateway.rest"
    assert module("<frozen abc>", ROOT) == "<frozen abc>"
    assert module("/lib/python3/site-packages/aiohttp/_http_parser.cpython-311-x86_64-linux-gnu.so", ROOT) == (
        "aiohttp._http_parser"
    )
    assert [package(name) for name in ("aiohttp.web_protocol", "gateway.rest.chat", "gateway")] == [
        "aiohttp",
        "gateway.rest",
        "gateway",
    ]


def test_what_calls_itself_is_counted_once() -> None:
    # The server and the client are of one package, and one stack goes through both.
    parts = stacks(ls=1, lsp=2, lspc=5).parts(by_package)

    assert parts == [
        Part("aiohttp", own=6 / 8, cumulative=1.0),
        Part("gateway.pipeline", own=2 / 8, cumulative=7 / 8),
        Part("asyncio", own=0.0, cumulative=1.0),
    ]
    assert sum(part.own for part in parts) == 1.0


def test_a_tree_begins_where_the_stacks_part_and_leaves_small_branches_out() -> None:
    tree = list(stacks(lls=10, llsp=60, llp=28, llc=2).tree(by_package, least=0.05))

    assert tree == [
        Branch(0, "aiohttp", 0.72),
        Branch(1, "gateway.pipeline", 0.6),
        Branch(0, "gateway.pipeline", 0.28),
    ]


def test_a_tree_of_one_stack_is_its_innermost_call() -> None:
    assert list(stacks(ls=3).tree(by_package, least=0.0)) == [Branch(0, "aiohttp", 1.0)]


def test_waiting_for_sockets_is_no_work() -> None:
    waiting = Frame("selectors", "EpollSelector.select")
    made = Stacks([((Frame("asyncio.events", "run"), waiting), 90.0), ((Frame("asyncio.events", "run"),), 10.0)])

    assert [(part.name, part.own) for part in made.parts(by_package)] == [("asyncio", 1.0)]


def test_the_samples_of_one_thread_are_read_of_a_file() -> None:
    content = json.dumps(
        {
            "shared": {"frames": [{"name": "Handle._run", "file": asyncio.events.__file__, "line": 80}]},
            "profiles": [
                {"name": 'Thread 7 "MainThread"', "samples": [[0], [0]], "weights": [0.01, 0.02], "unit": "seconds"},
                {"name": 'Thread 8 "asyncio_0"', "samples": [[0]], "weights": [9.0], "unit": "seconds"},
            ],
        }
    ).encode()
    made = Stacks.of_speedscope(content, thread="MainThread", root=ROOT)

    assert len(made) == 2
    assert made.parts(lambda frame: frame.name) == [Part("asyncio.events: Handle._run", 1.0, 1.0)]
    with pytest.raises(ValueError, match="no samples of nobody"):
        Stacks.of_speedscope(content, thread="nobody", root=ROOT)
