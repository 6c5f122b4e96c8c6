"""
Runs jobs through the line: claims what is due, records each step before the next, takes up what dead processes left.

Read it beside `model`, which decides, and `store`, whose statements act only for the claim that holds a job. The three
steps of an end are: the answer is stored, the line settles the attempt, the job ends. A process may die between any two
of them; whoever recovers sees from the row which was the last.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import uuid
from collections import Counter
from collections.abc import Collection, Sequence
from types import TracebackType
from typing import Protocol, Self

import asyncpg
import msgspec
import structlog

from adapters.errors import MalformedRequest, ProviderError
from admission.combiner import Lane
from admission.contract import Rejected
from admission.ids import new_id
from admission.lease import Waiting
from gateway.answer import EmbeddingLine, Line
from gateway.call import Call, Caller, Completion, Embedded, Options, Scope
from gateway.database import StoreUnavailable
from gateway.errors import AttemptedError, Code, GatewayError, Internal, InvalidRequest, PermissionDenied
from gateway.jobs import model
from gateway.jobs.formats import PROTOCOL_OF, Asked, Formats, Response
from gateway.jobs.lane import lane
from gateway.jobs.model import CANCELLED, EXPIRED, SUCCEEDED, Claimed, Complete, Decision, End, GiveBack, Held, Status
from gateway.jobs.rounds import rounds
from gateway.jobs.settings import JobsSettings
from gateway.jobs.store import Answer, Ending, Intent, JobStore, Step
from gateway.jobs.watch import Watch
from gateway.naming import named
from gateway.outcome import AttemptReport, Outcome, RouteReport
from gateway.stopping import Stopping

log = structlog.get_logger(__name__)

#: Writes of one statement.
_MOST_WRITES = 128
#: How long at most a model is left alone that is refused again and again, where one hold is not longer.
_LONGEST_HOLD_S = 2.0
_MOST_DOUBLINGS = 10
#: Rows of one round of recovery or deletion.
_MOST_ROWS = 200
#: A claim costs about the same however many jobs it takes. So where many are running it waits until this part of the
#: places is free, or for so many seconds.
_WORTH_A_CLAIM = 4
_GATHER_S = 0.01


class Callers(Protocol):
    """Who a key is. `gateway.keys` is it."""

    def caller(self, key_id: uuid.UUID) -> Caller | None:
        """None: it was revoked, or never was. No I/O."""
        ...


class Recovery(Protocol):
    """What the control store knows of processes and attempts."""

    async def dead(self, owners: Sequence[uuid.UUID]) -> Collection[uuid.UUID]:
        """Which of these process incarnations will never write again."""
        ...

    async def settle_stored(
        self, *, key_id: uuid.UUID, options: Options, attempt: int, response: Response
    ) -> Outcome | None:
        """
        Settle an attempt whose process died after its answer was stored. It may have been settled already.

        `options.debit_id` is set. None where nothing is known of the attempt.
        """
        ...

    async def outcome_of(self, *, key_id: uuid.UUID, debit_id: str) -> Outcome | None:
        """What became of the attempts of a debit, as far as is known."""
        ...


class JobLine(Line, EmbeddingLine, Protocol):
    """Both kinds of calls. `gateway.pipeline.Pipeline` is it."""


class _Cause(enum.Enum):
    """Why a run is cancelled."""

    CALLER = "caller"
    DRAIN = "drain"
    #: The claim is no longer this process's, or an intent could not be written: it must not send.
    NOT_ALLOWED = "not_allowed"


class _Run:
    """One claimed job being run, and the line's observer of it."""

    def __init__(self, runner: Runner, job: Claimed) -> None:
        self.job = job
        self.asked: Asked | None = None
        self.attempt: int | None = None
        self.answer: Answer | None = None
        self.stored = False
        self.waiting: Waiting | None = None
        self.route: RouteReport | None = None
        self.cause: _Cause | None = None
        self.task: asyncio.Task[None] | None = None
        #: The line has it.
        self.in_line = False
        self._runner = runner

    def cancel(self, cause: _Cause) -> None:
        # An answer that is there has won: its settlement is not to be disturbed, and neither is the write of an end.
        if self.in_line and self.cause is None and self.answer is None and self.task is not None:
            self.cause = cause
            if cause is _Cause.DRAIN:
                self._runner.stopping.note(self.task)
            self.task.cancel()

    def queued(self, waiting: Waiting) -> None:
        self.waiting = waiting

    def started(self, route: RouteReport, attempt: int) -> None:  # noqa: ARG002  the line says more than is kept
        self.waiting = None
        self.route = route

    def failed(self, report: AttemptReport) -> None: ...

    async def dispatching(self, attempt: int) -> None:
        try:
            after = await self._runner.written(Intent(job_id=self.job.job_id, claims=self.job.claims, attempt=attempt))
        except StoreUnavailable:
            after = None
        if after is Status.RUNNING:
            self.attempt = attempt
            self._runner.goes_on(self.job.model, self.job.key_id)
            return
        self.cause = self.cause or _Cause.NOT_ALLOWED
        raise asyncio.CancelledError

    async def completed(self, response: Response, attempt: int) -> None:
        assert self.asked is not None
        told = named(
            response,
            protocol=PROTOCOL_OF[self.job.url],
            answer_id=self.job.job_id.hex,
            model=None if self.route is None else self.route.model,
        )
        text = self._runner.formats[self.job.url].render(told, self.asked).decode("utf-8", "replace")
        self.answer = Answer(
            job_id=self.job.job_id, claims=self.job.claims, attempt=attempt, body=text.replace("\0", ""), status=200
        )
        # Where the store stays away the answer goes along with the job's end.
        with contextlib.suppress(StoreUnavailable):
            self.stored = await self._runner.written(self.answer) is not None


class Runner:
    """
    The jobs of one process. Entered, it runs them; left, it gives back what it holds.

    `owner` is the incarnation of this process, the one whose heartbeat admission keeps.
    """

    def __init__(
        self,
        *,
        store: JobStore,
        line: JobLine,
        formats: Formats,
        callers: Callers,
        recovery: Recovery,
        watch: Watch,
        owner: uuid.UUID,
        settings: JobsSettings,
        stopping: Stopping | None = None,
    ) -> None:
        self.formats = formats
        self.stopping = stopping or Stopping()
        self._store = store
        self._line = line
        self._callers = callers
        self._recovery = recovery
        self._watch = watch
        self._owner = owner
        self._settings = settings
        #: All writes of all runs. Those that end a claim are tried as long as the process lives: while it does, nobody
        #: else may do them.
        self._steps: Lane[Step, Status | None] = lane(
            lambda steps: store.steps(owner, steps), most=_MOST_WRITES, patience_s=float("inf")
        )
        #: By job and claim: a process that was thought dead may come to hold a job a second time.
        self._running: dict[tuple[uuid.UUID, int], _Run] = {}
        #: Models and keys that this process leaves alone, until when, and how often in a row it has come to that.
        self._held: dict[str | uuid.UUID, float] = {}
        self._refused: Counter[str | uuid.UUID] = Counter()
        #: How many jobs to claim at once: one where the last were refused, and then twice as many each time.
        self._step = settings.concurrency
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._loops: list[asyncio.Task[None]] = []

    # -------------------------------------------------------------- life

    async def __aenter__(self) -> Self:
        for name, step in (("claim", self._claim), ("cancel", self._hear_cancels), ("upkeep", self._keep_up)):
            self._loops.append(asyncio.create_task(rounds(name, step), name=f"jobs-{name}"))
        self._loops.append(asyncio.create_task(rounds("purge", self._purge), name="jobs-purge"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.drain(0.0)

    async def drain(self, within_s: float) -> None:
        """
        Take no more jobs, let those in flight end, and after `within_s` seconds take them back.

        What was not sent goes back to the queue. Returns when this process holds no job. Calling it again is allowed.
        """
        self._draining = True
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        if self._running and within_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), within_s)
        for run in list(self._running.values()):
            run.cancel(_Cause.DRAIN)
        try:
            async with asyncio.timeout(self._settings.write_patience_s):
                await self._idle.wait()
                # A claim that was cut off may have been made.
                await self._take_up_own()
        except (TimeoutError, StoreUnavailable):
            # Whoever finds this process dead takes them up.
            log.warning("jobs.left_behind", jobs=len(self._running))
            for run in list(self._running.values()):
                if run.task is not None:
                    run.task.cancel()
        await self._store.let_go()

    def wake(self) -> None:
        """There may be work."""
        self._wake.set()

    async def release(self, group: str) -> int:
        """
        The jobs that were told to come back later, and wait for this capacity group, are due now; how many.

        This process looks at once, the others at their next look. Raises `gateway.database.StoreUnavailable`.
        """
        count = 0
        while (released := await self._store.release(group, _MOST_ROWS)) > 0:
            count += released
        # Which models that group serves is not known here; what still has no place there is refused again.
        self._held.clear()
        self._refused.clear()
        self.wake()
        return count

    def cancel(self, job_id: uuid.UUID) -> None:
        """Take back a job that may be running here. Its row already says so."""
        for run in list(self._running.values()):
            if run.job.job_id == job_id:
                run.cancel(_Cause.CALLER)

    async def written(self, step: Intent | Answer) -> Status | None:
        """The state of the job after it. Raises StoreUnavailable where that is not known in time."""
        try:
            async with asyncio.timeout(self._settings.write_patience_s):
                return await self._steps.submit(step)
        except TimeoutError as error:
            raise StoreUnavailable("the store of jobs stayed away") from error

    @property
    def running(self) -> int:
        return len(self._running)

    # -------------------------------------------------------------- claiming

    async def _claim(self) -> float:
        """One stretch of claiming. It leaves only by an error: the claim that failed may have been made."""
        await self._take_up_own()
        pause = self._settings.poll_shortest_s
        while True:
            await self._gather_room()
            free = self._settings.concurrency - len(self._running)
            self._wake.clear()
            now = asyncio.get_running_loop().time()
            self._held = {held: until for held, until in self._held.items() if until > now}
            claimed = await self._store.claim(
                self._owner,
                min(free, self._step),
                [held for held in self._held if isinstance(held, str)],
                [held for held in self._held if isinstance(held, uuid.UUID)],
            )
            for job in claimed:
                self._start(job)
            if claimed:
                self._step = min(2 * self._step, self._settings.concurrency)
                pause = self._settings.poll_shortest_s
                # Ended jobs make room in this turn of the loop, and one claim then takes for all of them.
                await asyncio.sleep(0)
                continue
            sooner = min(self._held.values(), default=now + pause) - now
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), max(min(pause, sooner), 0.01))
            pause = min(pause * 2, self._settings.poll_longest_s)

    async def _gather_room(self) -> None:
        """Until there is a place, and as many as are worth a claim if they come soon."""
        while len(self._running) >= self._settings.concurrency:
            self._room.clear()
            await self._room.wait()
        if not self._roomy:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GATHER_S):
                    while not self._roomy:
                        self._room.clear()
                        await self._room.wait()

    @property
    def _roomy(self) -> bool:
        return _WORTH_A_CLAIM * (self._settings.concurrency - len(self._running)) >= self._settings.concurrency

    def _hold(self, whose: str | uuid.UUID, hold_s: float) -> None:
        """
        Leaves a model or a key alone that was refused a place: longer each time in a row, until one of its jobs goes
        on.
        """
        until = asyncio.get_running_loop().time() + min(
            hold_s * 2 ** min(self._refused[whose], _MOST_DOUBLINGS), max(hold_s, _LONGEST_HOLD_S)
        )
        if self._held.get(whose, 0.0) < asyncio.get_running_loop().time():
            self._refused[whose] += 1
        self._held[whose] = max(until, self._held.get(whose, until))
        self._step = 1

    def goes_on(self, *whose: str | uuid.UUID) -> None:
        """A job of this model or key has got its slot, or has ended: there is a place again."""
        for one in whose:
            if self._refused.pop(one, 0):
                self._held.pop(one, None)
                self._wake.set()

    def _start(self, job: Claimed) -> None:
        if (job.job_id, job.claims) in self._running:
            # The server lost the first claim with its latest writes, and has now made the same one again.
            return
        run = _Run(self, job)
        self._running[job.job_id, job.claims] = run
        self._idle.clear()
        run.task = asyncio.create_task(self._run(run), name=f"job-{job.job_id}")

    async def _take_up_own(self) -> None:
        """Jobs that a claim without acknowledgement left in this process's name."""
        await self._take_up_all(self._owner, except_for={job_id for job_id, _ in self._running}, in_order=True)

    # -------------------------------------------------------------- one job

    async def _run(self, run: _Run) -> None:
        try:
            try:
                decision, outcome = await self._decide(run)
            finally:
                run.in_line = False
            await self._conclude(run, decision, outcome)
        finally:
            del self._running[run.job.job_id, run.job.claims]
            self._room.set()
            if not self._running:
                self._idle.set()

    async def _decide(self, run: _Run) -> tuple[Decision, Outcome | None]:
        """How the run went."""
        job = run.job
        if job.remaining_s <= 0:
            return EXPIRED, None
        try:
            run.asked, call = self._call(job)
            run.in_line = True
            completion: Completion | Embedded
            if call.embedding is None:
                completion = await self._line.complete(call, run)
            else:
                completion = await self._line.embed(call, run)
        except GatewayError as error:
            outcome = error.outcome if isinstance(error, AttemptedError) else None
            if run.answer is not None:
                return SUCCEEDED, outcome
            if error.code is Code.DUPLICATE_DEBIT:
                # Which attempts there were, so that the next one is a new one.
                outcome = await self._known_of(job)
            return model.after_error(error, job, sent=run.attempt is not None, settings=self._settings), outcome
        except asyncio.CancelledError:
            if run.cause is None:
                raise
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            run.in_line = False
            known = None if run.attempt is None else await self._known_of(job)
            return self._taken_back(run, known), known
        except Exception as error:
            # The line promises nothing else. One job that breaks the promise must not take the others along.
            log.exception("jobs.run_fault", job_id=str(job.job_id), kind=type(error).__name__)
            if run.answer is not None:
                return SUCCEEDED, None
            fault = Internal("the gateway failed while it ran the job")
            return model.after_error(fault, job, sent=run.attempt is not None, settings=self._settings), None
        if run.answer is None:
            # A line that does not tell of its answer in between tells at the end.
            await run.completed(completion.response, max([a.number for a in completion.outcome.attempts], default=1))
        return SUCCEEDED, completion.outcome

    def _call(self, job: Claimed) -> tuple[Asked, Call]:
        caller = self._callers.caller(job.key_id)
        # What a direct call may ask for may be asked for in the background.
        scope = Scope.CHAT if job.background else Scope.JOBS
        if caller is None or scope not in caller.scopes:
            raise PermissionDenied(f"the API key of the job was revoked, or has not the scope {scope.value} any more")
        try:
            asked = self.formats[job.url].read(job.body.encode())
        except MalformedRequest as error:
            raise InvalidRequest(error.reason, param=f"body.{error.path}" if error.path else "body") from error
        call = Call(
            request_id=new_id().hex,
            caller=caller,
            model=job.model,
            chat=asked.chat,
            embedding=asked.embedding,
            options=job.options,
            deadline=asyncio.get_running_loop().time() + job.remaining_s,
            transport="job",
            attempts_before=job.attempts,
        )
        return asked, call

    def _taken_back(self, run: _Run, known: Outcome | None) -> Decision:
        if run.answer is not None:
            return SUCCEEDED
        if run.cause is _Cause.CALLER:
            return CANCELLED
        # Should the claim be lost, nothing of this is written.
        return model.after_stop(run.job, known, sent=run.attempt is not None)

    async def _known_of(self, job: Claimed) -> Outcome | None:
        assert job.options.debit_id is not None
        try:
            return await self._recovery.outcome_of(key_id=job.key_id, debit_id=job.options.debit_id)
        except (GatewayError, StoreUnavailable):
            return None

    async def _conclude(self, run: _Run, decision: Decision, outcome: Outcome | None) -> None:
        job = run.job
        if isinstance(decision, GiveBack) and outcome is not None and not outcome.attempts:
            # It was refused before anything was sent: how that ended is not how the job did.
            outcome = None
        whole = model.joined(job.outcome, outcome)
        made = [attempt.number for attempt in whole.attempts] if whole else []
        ending = Ending(
            job_id=job.job_id,
            claims=job.claims,
            decision=decision,
            outcome=whole,
            attempts=max([*made, run.attempt or 0, job.attempts]),
            answer=None if run.stored else run.answer,
        )
        if isinstance(decision, GiveBack) and decision.hold_s > 0:
            self._hold(job.key_id if decision.of_key else job.model, decision.hold_s)
        try:
            status = await self._steps.submit(ending)
        except Rejected:
            # The row cannot take what it was to be told. An end without it is better than none.
            fault = model.failed(Internal("the gateway could not store how the job ended"))
            ending = Ending(
                job_id=job.job_id, claims=job.claims, decision=fault, outcome=None, attempts=ending.attempts
            )
            status = await self._steps.submit(ending)
        if status is None:
            log.warning("jobs.end_refused", job_id=str(job.job_id), claims=job.claims)
        elif status in model.TERMINAL:
            self.goes_on(job.key_id)
            self._watch.ended([job.job_id])
            log.info(
                "jobs.ended",
                job_id=str(job.job_id),
                status=status.value,
                code=_code(ending.decision),
                attempts=ending.attempts,
            )

    # -------------------------------------------------------------- the other loops

    async def _hear_cancels(self) -> float:
        if self._running:
            for job_id in await self._store.cancel_requests(self._owner):
                self.cancel(job_id)
        return self._settings.cancel_poll_s

    async def _keep_up(self) -> float:
        await self._store.keep_time()
        while expired := await self._store.expire(_MOST_ROWS):
            self._watch.ended(expired)
            log.info("jobs.expired", count=len(expired))
        owners = await self._store.owners(self._owner)
        if owners:
            for owner in await self._recovery.dead(owners):
                await self.recover(owner)
        return self._settings.upkeep_s

    async def _purge(self) -> float:
        deleted = await self._store.purge(_MOST_ROWS)
        return 0.05 if deleted >= _MOST_ROWS else self._settings.purge_s

    # -------------------------------------------------------------- recovery

    async def recover(self, owner: uuid.UUID) -> int:
        """
        Take up the running jobs of a process that is dead, and known to be; how many there were.

        Safe to call in several processes at once, and again: each job moves on by a guarded transition.
        """
        count = await self._take_up_all(owner, except_for=(), in_order=False)
        if count:
            log.warning("jobs.recovered", owner=str(owner), jobs=count)
            self.wake()
        return count

    async def _take_up_all(self, owner: uuid.UUID, *, except_for: Collection[uuid.UUID], in_order: bool) -> int:
        seen = set(except_for)
        count = 0
        while held := await self._store.held(owner, except_for=seen, most=_MOST_ROWS):
            for job in held:
                seen.add(job.job_id)
                try:
                    await self._take_up(owner, job, in_order=in_order)
                except (GatewayError, Rejected, asyncpg.PostgresError, asyncpg.InterfaceError):
                    # The next round tries it again; its neighbours need not wait for that.
                    log.exception("jobs.recovery_fault", job_id=str(job.job_id))
            count += len(held)
        return count

    async def _take_up(self, owner: uuid.UUID, job: Held, *, in_order: bool) -> None:
        decision = model.after_crash(job, self._settings)
        assert job.options.debit_id is not None
        outcome: Outcome | None = None
        if isinstance(decision, Complete):
            outcome = await self._settle(job)
            decision = SUCCEEDED
        else:
            # Without an intent, too: a slot may have been granted, and then its attempt's number is used up.
            outcome = await self._recovery.outcome_of(key_id=job.key_id, debit_id=job.options.debit_id)
        if in_order and isinstance(decision, model.GiveBack):
            decision = msgspec.structs.replace(decision, in_order=True)
        ending = Ending(
            job_id=job.job_id,
            claims=job.claims,
            decision=decision,
            outcome=model.joined(job.outcome, outcome),
            attempts=max([attempt.number for attempt in outcome.attempts] if outcome else [0], default=0),
        )
        (status,) = await self._store.steps(owner, [ending])
        if status in model.TERMINAL:
            self._watch.ended([job.job_id])
            log.info("jobs.ended", job_id=str(job.job_id), status=status, code=_code(decision), recovered=True)

    async def _settle(self, job: Held) -> Outcome | None:
        assert job.result is not None
        try:
            response = self.formats[job.url].read_back(job.result.encode())
        except ProviderError:
            # It was written by `render`, but perhaps by another version. The attempt then stays unknown.
            log.exception("jobs.answer_unreadable", job_id=str(job.job_id))
            return None
        return await self._recovery.settle_stored(
            key_id=job.key_id, options=job.options, attempt=job.result_attempt or job.attempts, response=response
        )


def _code(decision: Decision) -> str | None:
    """A job that was to go back ends only because its caller had taken it back."""
    return decision.code if isinstance(decision, End) else Code.CANCELLED.value
