"""
An event loop whose time is made up: it jumps to the next timer instead of waiting for it.

Every callback belongs to the process that is in its context, so that a process can be stopped and continued, as by
SIGSTOP and SIGCONT, or killed, as by SIGKILL: what it would have run is kept for later, or never runs.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVarTuple, cast

from typing_extensions import override

Ts = TypeVarTuple("Ts")

#: Which process a callback belongs to; 0 is the world outside them.
PROCESS: contextvars.ContextVar[int] = contextvars.ContextVar("PROCESS", default=0)


class VirtualLoop(asyncio.AbstractEventLoop):
    """Only what coroutines need of a loop: callbacks, timers, futures and tasks. No sockets, no threads."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._order = itertools.count()
        #: What stopped processes would have run.
        self._stopped: dict[int, list[asyncio.Handle]] = {}
        self._killed: set[int] = set()
        #: A killed process cleans up nothing, so its coroutines must not be closed before the world has ended.
        self._tasks: dict[int, set[asyncio.Task[Any]]] = {}
        self._over = False
        self.errors: list[str] = []
        #: Ends the run at once, whoever would have caught it.
        self.failure: BaseException | None = None

    # ---------------------------------------------------------------- processes

    def stop_process(self, process: int) -> None:
        self._stopped.setdefault(process, [])

    def continue_process(self, process: int) -> None:
        self._ready.extend(self._stopped.pop(process, ()))

    def kill_process(self, process: int) -> None:
        self._killed.add(process)
        self._stopped.pop(process, None)

    def lives(self, process: int) -> bool:
        return process not in self._killed

    # ---------------------------------------------------------------- running

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        asyncio._set_running_loop(self)
        try:
            task = self.create_task(main)
            while not task.done():
                self._step()
                if self.failure is not None:
                    raise self.failure
            task.result()
        finally:
            self._end()
            asyncio._set_running_loop(None)

    def _step(self) -> None:
        if self._ready:
            handle = self._ready.popleft()
        else:
            if not self._timers:
                raise RuntimeError("everybody waits for somebody else")
            when, _, handle = heapq.heappop(self._timers)
            if not handle.cancelled():
                self._now = max(self._now, when)
        if handle.cancelled():
            return
        process = handle._context.get(PROCESS, 0)  # type: ignore[attr-defined]
        if process in self._killed:
            return
        if process in self._stopped:
            self._stopped[process].append(handle)
            return
        handle._run()

    def _end(self) -> None:
        """Closes what never ended. What that sets off is thrown away."""
        self._over = True
        for tasks in self._tasks.values():
            for task in tasks:
                if not task.done():
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    coroutine = task.get_coro()
                    assert coroutine is not None
                    try:
                        coroutine.close()
                    except RuntimeError:
                        continue  # it awaited something while it was closed

    @override
    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._over:
            self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")

    # ---------------------------------------------------------------- what coroutines ask for

    @override
    def time(self) -> float:
        return self._now

    @override
    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if not self._over:
            self._ready.append(handle)
        return handle

    @override
    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        if not self._over:
            heapq.heappush(self._timers, (when, next(self._order), handle))
        return handle

    @override
    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    @override
    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    @override
    def create_task(
        self, coro: Any, *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        if self._over:
            coro.close()
            never: Any = self.create_future()
            never.cancel()
            return cast("asyncio.Task[Any]", never)
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        process = PROCESS.get() if context is None else context.get(PROCESS, 0)
        tasks = self._tasks.setdefault(process, set())
        if len(tasks) > 64:
            tasks.difference_update([done for done in tasks if done.done()])
        tasks.add(task)
        return task

    @override
    def get_debug(self) -> bool:
        return False

    @override
    def is_running(self) -> bool:
        return True

    @override
    def is_closed(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is skipped when its time comes."""
