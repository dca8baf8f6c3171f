"""Episodes of the user's environment in processes that can be killed: each call ends within its limits.

    Episode.step() --> _Process --socket--> environments.worker, with many episodes

Life of a process: it is started with the pool, or when the next episode needs it. One that exits, or sends something
else than the replies to its calls, is killed with its children, as is one that has not answered GRACE_S after
the time limit of a call, and one in which MOST_FAILURES calls in a row failed. A coroutine is cancelled at the limit,
and its process lives on.

Life of a call: an episode without a process, at first or because its process ended while it waited, goes to the one
with the fewest episodes, of those whose last call did not fail. It is reset there, and its earlier responses are
replayed: what the environment returns has to equal what it returned before, else the episode has `changed`. Then
the call is made. If one of these calls fails, the episode leaves its process, and all of this is tried again, TRIES
times in all, with pauses where the environment was `unavailable` or `hung`. A call that was outstanding when a
process ended is tried alone from then on: in an extra process, one call at a time. The episode leaves the extra
process with its answer, and loses nothing by the next suspect. n calls that hang there take n * (TRIES - 1) *
timeout_s.

A class with `run` has one call, which may take as long as its agent asks the policy (`Session`). It has no earlier
responses to replay: it begins anew, and its session answers what it asked before. It is tried alone after two ends of
its process, as a run takes minutes, and there are as many extra processes as others.

After its last try an episode fails. Its failure is its own (`repeated`) where nearly all other tries succeed
(`rewards.outages`). Others are the tries of other rows, and the successful ones of its row; a try that ended with a
process in which other calls were outstanding does not count. With fewer than ENOUGH others on record, as in the first
minute of a run, no failure is an episode's own, and its caller begins it anew: an outage is paid to nobody. Nor does
the run hang: after MAX_UNAVAILABLE episodes in a row that failed, or if more than half of the last RECENT did, the
pool ends, and every call raises RuntimeError.

An environment is not trusted. It has the rights of its user, as there is no sandbox, and it can disturb the other
episodes of its process, answer for them, and fill its log. The protocol leads to no other process: the controller
takes replies of at most REPLY_BYTES, one at a time from each process, to calls that it made there; of a turn it keeps
a digest, for replays.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from megatron_scalerl.environments.response import Agent, Message, Response
from megatron_scalerl.environments.worker import (
    ERROR_CHARS,
    TURN_BYTES,
    Declared,
    Reply,
    Request,
    Setup,
    encoded,
)
from megatron_scalerl.processes.child_process import LOG_END, ProcessDied, race, time_limit
from megatron_scalerl.processes.logs import printable
from megatron_scalerl.processes.worker_pool import Program, Worker, end_of
from megatron_scalerl.recipe.sections import EnvironmentSection
from megatron_scalerl.record import record
from megatron_scalerl.rewards import outages
from megatron_scalerl.rewards.pool import child_environment, default_workers
from megatron_scalerl.rewards.worker import MOST_REWARD

GRACE_S = 5.0
"""Time for a process to report that a coroutine was cancelled (s)."""
START_TIMEOUT_S = 300.0
ENOUGH = 20
"""Tries of others on record before a failure can be an episode's own."""
MOST_FAILURES = 5
"""Calls of a process in a row that failed, after which it is replaced: an episode may have spoiled it."""
REPLY_BYTES = TURN_BYTES + 2**16
"""Most bytes of a line that a process sends."""
PAUSED = ("unavailable", "hung")
"""Failures that may pass with time."""


class EnvironmentFailed(RuntimeError):
    """An episode cannot go on. `reason` in one word, `repeated`: whether it failed because of its own actions.

    reason: raised; unavailable (what the environment asks); invalid or oversized (what it returned); hung; died (its
    process); changed (a replay gave something else); prompt, template, time, silent (`rollouts.episodes`).
    """

    def __init__(self, problem: str, *, reason: str, ended: bool = False, alone: bool = True):
        super().__init__(problem)
        self.reason = reason
        self.repeated = False
        self.ended = ended
        """Whether its process ended."""
        self.alone = alone
        """Whether nothing but its episode can be the cause."""


Outcome = Reply | EnvironmentFailed


@record
class Turn:
    """What an environment returned for a response."""

    messages: tuple[Message, ...]
    """Each with role (user or tool; from reset system, too) and content (str); other values are scalars."""
    reward: bool | float | None
    """At most MOST_REWARD, absolutely."""
    done: bool
    metrics: dict[str, float] = field(default_factory=dict)


class Session(Protocol):
    """What an agent talks to while its `run` is in progress. `rollouts.agents` has it."""

    def begin(self) -> Agent:
        """The argument of a try: what was asked in earlier ones is answered as it was."""

    def end(self) -> None:
        """The end of a try, after which what is left of it asks nothing."""

    async def silent(self) -> None:
        """Return once the agent has asked nothing for environment.timeout_s."""


Argument = Response | Session | None
"""Of a call: of step; of run; None: of reset, or of run, the row."""


class _Process(Worker):
    """A process with its episodes; `ready` replaces one that has ended."""

    def __init__(self, name: str, program: Program, counters: Counter[str]):
        super().__init__(name, program)
        self.episodes: set[Episode] = set()
        self.pending: dict[int, asyncio.Future[Outcome]] = {}
        """Calls, by their numbers."""
        self._counters = counters
        self._writer: asyncio.StreamWriter | None = None
        self._starting = asyncio.Lock()
        self._started = False
        self.failures = 0
        """Calls in a row that failed."""

    async def ready(self) -> None:
        """Start the process unless it runs. Raises EnvironmentFailed."""
        async with self._starting:
            if self._writer is not None:
                return
            try:
                await self.start()
            except (ValueError, OSError, ProcessDied) as problem:
                line = str(problem).partition(LOG_END)[0]
                raise EnvironmentFailed(line, reason="unavailable", alone=False) from None
            reader, self._writer = await asyncio.open_unix_connection(sock=self.detach(), limit=REPLY_BYTES)
            self._reading = asyncio.create_task(self._read_replies(reader, self._writer))
            if self._started:
                self._counters["restarts"] += 1
            self._started = True

    async def call(self, request: Request, session: Session | None = None) -> Reply:
        """The reply to a request. Raises EnvironmentFailed; TypeError or RecursionError for what is no JSON.

        The call of a cancelled caller goes on, so that it cannot hang unnoticed.
        """
        data = encoded(request)
        # both before this task can be suspended: the process may end then
        reply = self.pending[request.number] = asyncio.get_running_loop().create_future()
        self.send(data)
        outcome = await asyncio.shield(asyncio.create_task(self._outcome(request, reply, session)))
        if isinstance(outcome, EnvironmentFailed):
            raise outcome
        if outcome.failure != "unavailable":  # an outage of what it asks does not spoil a process
            self.failures = self.failures + 1 if outcome.failure else 0
        if self.failures == MOST_FAILURES:
            await self.end()
            self.failures = 0
        return outcome

    def send(self, request: bytes) -> None:
        """Send a request unless the process has ended."""
        if self._writer is not None:
            self._writer.write(request + b"\n")

    async def end(self, hung: int | None = None) -> None:
        """Kill the process; its calls fail, its episodes leave it. hung: number of a call that exceeded its limit."""
        pending = self.pending
        self.pending = {}
        for episode in self.episodes:
            episode.process = None
        self.episodes.clear()
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None
        alone = len(pending) == 1
        end = end_of(await self.kill())
        if hung is not None:
            end = f"no answer within {self._program.timeout_s:g} s"
        for number, reply in pending.items():
            reason = "hung" if number == hung else "died"
            reply.set_result(EnvironmentFailed(f"{self.name}: {end}", reason=reason, ended=True, alone=alone))
        pending.clear()

    async def close(self) -> None:
        """Kill the process, after a start that goes on."""
        async with self._starting:
            await self.end()

    async def _outcome(self, request: Request, reply: asyncio.Future[Outcome], session: Session | None) -> Outcome:
        """What became of a call."""
        limit_s = self._program.timeout_s + GRACE_S
        if session is not None:
            limit_s = GRACE_S
            async with race(asyncio.shield(reply), session.silent()):
                self.send(encoded(Request(number=0, episode=request.episode)))
        try:
            async with time_limit(limit_s):
                return await asyncio.shield(reply)
        except TimeoutError:
            if request.number in self.pending:
                await self.end(hung=request.number)
        return await reply

    async def _read_replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass replies on until the process ends or sends something else."""
        decode = msgspec.json.Decoder(Reply).decode
        pending = self.pending
        with contextlib.suppress(OSError, ValueError, RecursionError, KeyError):
            while True:
                reply = decode(await reader.readline())
                pending.pop(reply.number).set_result(reply)
        if self._writer is writer:
            await self.end()


class EnvironmentPool:
    """Environment processes; `async with` starts and closes them.

    `tools`, `repeated_failure`, `agent`: of the user's class. `counters`: episodes (resets and
    runs), steps, replays, restarts of processes, and failed episodes by reason.
    """

    def __init__(self, section: EnvironmentSection, *, logs: Path):
        """logs: folder of the logs, environment-N.log. Raises ValueError if one of `variables` is not set."""
        self.counters: Counter[str] = Counter()
        self.numbers = itertools.count()
        """Of episodes in their processes, and of calls."""
        self.outages = outages.Outages("episodes", enough=ENOUGH)
        self.subject = f"environment.name {section.name!r}"
        assert section.name is not None
        paths = tuple(os.fsencode(path) for path in sys.path)
        setup: Setup = (section.name, paths, section.memory_mb, section.timeout_s)
        program = Program(
            name="environment",
            module="megatron_scalerl.environments.worker",
            setup=msgspec.json.encode(setup),
            environment=child_environment("environment.variables", section.variables),
            subject=self.subject,
            timeout_s=section.timeout_s,
            start_timeout_s=START_TIMEOUT_S,
            logs=logs,
        )
        count = section.workers or default_workers()
        self._processes = [_Process(f"environment-{n}", program, self.counters) for n in range(count)]
        self.extra = [_Process(f"environment-{count + n}", program, self.counters) for n in range(count)]
        """For calls that may end their process; for steps the first alone."""
        self.alone: asyncio.Queue[_Process] = asyncio.Queue()
        """Those of `extra` that no call uses. Filled at the start."""

    async def __aenter__(self) -> EnvironmentPool:
        """Start all processes. Raises ValueError, in one line, if the class cannot be used or no process starts."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Has the error with which the pool ended."""
        try:
            await asyncio.gather(*(process.ready() for process in self._processes))
        except BaseException as problem:
            await self.close()
            if isinstance(problem, EnvironmentFailed):
                raise ValueError(str(problem)) from None
            raise
        declared = msgspec.json.decode(self._processes[0].greeting, type=Declared)
        self.tools, self.repeated_failure, self.agent = declared
        for process in self.extra[: None if self.agent else 1]:
            self.alone.put_nowait(process)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Kill all processes and fail what is outstanding; may be called twice."""
        self.end(RuntimeError("the environment pool is closed"))
        await asyncio.gather(*(process.close() for process in (*self._processes, *self.extra)))

    def end(self, problem: RuntimeError | None) -> None:
        """Raise a problem, if there is one, in every pending and later call."""
        if problem is not None and not self.ended.done():
            self.ended.set_exception(problem)
            self.ended.exception()  # retrieved, where no call is pending

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that run."""
        return [process.pid for process in (*self._processes, *self.extra) if process.pid is not None]

    def emptiest(self, tried: Sequence[_Process]) -> _Process:
        """The process with the fewest episodes of those that did not fail last, if possible none of `tried`."""
        return min(self._processes, key=lambda process: (process in tried, process.failures, len(process.episodes)))

    def episode(self, row: dict[str, Any]) -> Episode:
        """An episode of a row, for one caller and `async with`."""
        return Episode(self, row)


class Episode:
    """An episode; it is closed in its process at the end of `async with`.

    Its calls raise EnvironmentFailed, and RuntimeError once the pool has ended.
    """

    def __init__(self, pool: EnvironmentPool, row: dict[str, Any]):
        self.process: _Process | None = None
        """Where it lives; None before the first call, and after its process ended."""
        self._pool = pool
        self._row = row
        self._key = hashlib.sha256(encoded(row)).digest()
        self._number = 0
        """In its process."""
        self._failed = False
        self.metrics: dict[str, float] = {}
        """The latest value of each."""
        self._past: list[tuple[Argument, bytes]] = []
        """Calls so far, beginning with reset, and digests of what they returned."""

    async def __aenter__(self) -> Episode:
        return self

    async def __aexit__(self, kind: object, problem: BaseException | None, traceback: object) -> None:
        self._leave()
        if self._failed:
            return
        if problem is None:
            self._pool.outages.ended("")
        if isinstance(problem, EnvironmentFailed) and problem.reason not in ("prompt", "time"):
            self._pool.end(self._pool.outages.ended(str(problem), self._key))

    async def reset(self) -> tuple[Message, ...]:
        """Begin; the first messages. Is called once."""
        self._pool.counters["episodes"] += 1
        return (await self._call(None)).messages

    async def step(self, response: Response) -> Turn:
        """What the environment returns for a response of the policy."""
        self._pool.counters["steps"] += 1
        return await self._call(response)

    async def run(self, session: Session) -> bool | float | None:
        """The reward that the agent returns. Is called once."""
        self._pool.counters["episodes"] += 1
        return (await self._call(session)).reward

    async def _call(self, argument: Argument) -> Turn:
        ended = self._pool.ended
        if ended.done():
            ended.result()
        async with race(asyncio.shield(ended), self._tries(argument)) as tasks:
            turn: Turn = next(task.result() for task in tasks if task.done())
        self.metrics |= turn.metrics
        return turn

    async def _tries(self, argument: Argument) -> Turn:
        """The turn of the first try that succeeds. Raises EnvironmentFailed after the last.

        That failure may be the episode's own, and the pool ends if too many episodes failed.
        """
        pool = self._pool
        lives = 2 if pool.agent else 1
        tried: list[_Process] = []
        for pause_s in (*outages.PAUSES_S[: outages.TRIES - 1], None):
            try:
                if not lives:
                    turn = await self._try_alone(argument)
                else:
                    tried.append(self.process or pool.emptiest(tried))
                    turn = await self._try(argument, tried[-1])
            except EnvironmentFailed as failure:
                if failure.ended and lives:
                    lives -= 1
                if failure.alone:
                    pool.outages.tried(True, self._key)
                if pause_s is None or failure.reason == "changed":
                    self._failed = True
                    pool.counters[failure.reason] += 1
                    failure.repeated = failure.alone and pool.outages.alone(self._key)
                    pool.end(pool.outages.ended(str(failure).strip().splitlines()[-1], self._key))
                    raise
                if failure.reason in PAUSED:
                    await asyncio.sleep(pause_s)
            else:
                pool.outages.tried(False)
                return turn
        raise AssertionError

    async def _try_alone(self, argument: Argument) -> Turn:
        extra = await self._pool.alone.get()
        try:
            if extra.pending:  # of a caller that was cancelled
                await extra.end()
            return await self._try(argument, extra)
        finally:
            self._leave()
            self._pool.alone.put_nowait(extra)

    async def _try(self, argument: Argument, process: _Process) -> Turn:
        """One try, in its process or else in `process`; leaves it if the try fails."""
        try:
            if self.process is None:
                self.process = process
                process.episodes.add(self)
                self._number = next(self._pool.numbers)
                await process.ready()
                if self._past:
                    self._pool.counters["replays"] += 1
                for earlier, digest in self._past:
                    if (await self._make(earlier))[1] != digest:
                        raise EnvironmentFailed(
                            f"{self._pool.subject}: a fresh environment answered the same responses differently",
                            reason="changed",
                            alone=False,
                        )
            turn, digest = await self._make(argument)
        except BaseException:
            self._leave()
            raise
        self._past.append((argument, digest))
        return turn

    async def _make(self, argument: Argument) -> tuple[Turn, bytes]:
        """(turn, digest of it) of one call in its process."""
        head = self._pool.subject
        first = argument is None
        if self.process is None:
            raise EnvironmentFailed(f"{head}: its process has ended", reason="died", ended=True, alone=False)
        try:
            request = Request(number=next(self._pool.numbers), episode=self._number, row=self._row)
            session = None
            if isinstance(argument, Response):
                request = replace(request, row=None, response=argument)
            elif argument is not None:
                session = argument
                request = replace(request, agent=session.begin())
            try:
                reply = await self.process.call(request, session)
            finally:
                if session is not None:
                    session.end()
            if reply.failure:
                raise EnvironmentFailed(f"{head}: {printable(reply.error[-ERROR_CHARS:])}", reason=reply.failure)
            return _turn(bytes(reply.turn), first=first), hashlib.sha256(reply.turn).digest()
        except (TypeError, ValueError, RecursionError) as problem:
            raise EnvironmentFailed(f"{head}: {problem}", reason="invalid") from None

    def _leave(self) -> None:
        """Close the episode in its process."""
        if self.process is not None:
            self.process.episodes.discard(self)
            self.process.send(encoded(Request(number=0, episode=self._number)))
            self.process = None


def _turn(data: bytes, *, first: bool) -> Turn:
    """What a call returned. Raises ValueError, RecursionError if it cannot be used."""
    turn = msgspec.json.decode(data, type=Turn)
    roles = ("system", "user", "tool") if first else ("user", "tool")
    for message in turn.messages:
        if message.get("role") not in roles or not isinstance(message.get("content"), str):
            raise ValueError(f"a message needs a role ({', '.join(roles)}), and a content that is one text")
        if not all(isinstance(value, str | int | float | None) for value in message.values()):
            raise ValueError("the values of a message have to be texts, numbers, true, false or null")
    if not abs(turn.reward or 0.0) <= MOST_REWARD:
        raise ValueError(f"the reward is {turn.reward}; it has to be at most {MOST_REWARD:g}")
    if not turn.messages and not turn.done:
        raise ValueError("it returned no message, and the episode is not done")
    return turn
