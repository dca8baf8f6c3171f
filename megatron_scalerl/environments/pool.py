"""Episodes of the user's environment in processes that can be killed: each call ends within its limits.

    Episode.step() --> _Process --socket--> environments.worker, with many episodes

Life of a process: it is started with the pool, or when the next episode needs it. One that exits, or sends something
else than the replies to its calls, is killed with its children, as is one that has not answered GRACE_S after
the time limit of a call, and one in which MOST_FAILURES calls in a row failed that succeeded in another process: an
episode has spoiled it. An outage, which fails everywhere, ends none. A coroutine is cancelled at the limit, and its
process lives on.

Life of a call: an episode without a process, at first or because its process ended while it waited, goes to the one
with the fewest episodes, of those whose last call did not fail. It is reset there, and its earlier responses are
replayed: what the environment returns has to equal what it returned before, else the episode has `changed`. Then
the call is made. If one of these calls fails, the episode leaves its process, and all of this is tried again, TRIES
times in all, with pauses where the environment was `unavailable` or `hung`. A call that was outstanding when a
process ended is tried alone from then on: in one of as many extra processes, one call at a time. The episode leaves
the extra process with its answer, and loses nothing by the next suspect.

A class with `run` has one call, which may take as long as its agent asks the policy (`Session`). It has no earlier
responses to replay: it begins anew, and its session answers what it asked before. It is tried alone after two ends of
its process, as a run takes minutes.

After its last try an episode fails, and is lost: no share of failures tells an outage from a policy that breaks its
tool. The exception is a class that says `repeated_failure = "wrong"`. There the last try is made alone in a fresh
process, and a failure of the class (`types.ENDS`) that repeats the one before is paid as wrong, while fewer than half
of the latest episodes of other rows have failed. Where more than half of the latest episodes are lost, the pool ends,
and every call raises RuntimeError (`environments.episode_record`).

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
import logging
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from megatron_scalerl.environments.episode_record import EpisodeRecord
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
from megatron_scalerl.rewards.pool import WAITING_SHARE, child_environment, default_workers
from megatron_scalerl.rewards.worker import MOST_REWARD
from megatron_scalerl.types import ENDS, EpisodeEnd, Prompt

logger = logging.getLogger(__name__)

GRACE_S = 5.0
"""Time for a process to report that a coroutine was cancelled (s)."""
START_TIMEOUT_S = 300.0
MOST_FAILURES = 5
"""Calls of a process in a row that failed there and succeeded elsewhere, after which it is replaced."""
REPLY_BYTES = TURN_BYTES + 2**16
"""Most bytes of a reply."""
PAUSED = ("unavailable", "hung")
"""Failures that may pass with time."""
SHOWN_CHARS = 500
"""Characters of a row, and of what the policy did, in a warning."""


class EnvironmentFailed(RuntimeError):
    """An episode cannot go on; `end` says who ended it, and whether it is paid.

    The policy's own failure is `paid`, as wrong, by a class that says so.
    """

    def __init__(self, problem: str, *, reason: str):
        """reason: of an end in `ENDS` that is not paid."""
        super().__init__(problem)
        self.end: EpisodeEnd = ENDS[reason]


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

    def responses(self) -> Sequence[str]:
        """The answers that the last try got, none if it did not ask all that earlier ones had asked."""


Argument = Response | Session | None
"""Of a call: of step; of run; None: of reset, or of run, the row."""


class _Process(Worker):
    """A process with its episodes; `ready` replaces one that has ended."""

    def __init__(self, name: str, program: Program, counters: Counter[str]):
        super().__init__(name, program)
        self.episodes: set[Episode] = set()
        self._counters = counters
        self._works = False
        """False before `ready` has started it, and once its end was noticed."""
        self._started = False
        self.failures = 0
        """Calls in a row that failed."""
        self._problem = ""
        """Last line of the last of them."""
        self.spoiled = 0
        """Those of them that then succeeded in another process, each after the one before had."""
        self._spoiled_s = 0.0
        """When the last one of those succeeded there (time of the loop)."""

    async def ready(self) -> None:
        """Start the process unless it runs. Raises EnvironmentFailed."""
        async with self.gate:
            if self._works:
                return
            try:
                await self.start()
            except (ValueError, OSError, ProcessDied) as problem:
                line = str(problem).partition(LOG_END)[0]
                raise EnvironmentFailed(line, reason="unavailable") from None
            self._works = True
            if self._started:
                self._counters["restarts"] += 1
            self._started = True

    async def call(self, request: Request, session: Session | None = None) -> Reply:
        """The reply to a request. Raises EnvironmentFailed; TypeError or RecursionError for what is no JSON.

        The call of a cancelled caller goes on, so that it cannot hang unnoticed.
        """
        self._number += 1
        # before this task can be suspended: the process may end then
        outcome = self.send(self._number, encoded(request))
        frame = await asyncio.shield(asyncio.create_task(self._within_limits(outcome, request.episode, session)))
        if isinstance(frame, EnvironmentFailed):
            raise frame
        try:
            reply = msgspec.json.decode(frame[1], type=Reply)
        except (ValueError, RecursionError):
            await self.end()
            raise EnvironmentFailed(f"{self.name}: bytes in its socket that are no reply", reason="died") from None
        if not reply.failure:
            self.failures = 0
            self.spoiled = 0
        elif reply.failure != "unavailable":  # an outage of what it asks does not spoil a process
            self.failures += 1
            self._problem = printable(reply.error.strip().rpartition("\n")[2])
        return reply

    def leave(self, episode: int) -> None:
        """Close an episode unless the process has ended."""
        if self._works:
            self.send(0, encoded(Request(episode=episode)))

    async def empty(self) -> None:
        """Replace it if it has a call of a caller that was cancelled, or a failure that may have spoiled it."""
        if self._replies or self.failures:
            await self.end()

    async def succeeded_elsewhere(self, begun_s: float) -> None:
        """Note that a call which failed here has succeeded in another process; replace this one after several.

        begun_s: of the call that failed. Calls that failed together count once: an outage may have ended.
        """
        if not self.failures or begun_s < self._spoiled_s:
            return
        self._spoiled_s = asyncio.get_running_loop().time()
        self.spoiled += 1
        if self.spoiled == MOST_FAILURES:
            await self.end(why=f"replaced after {MOST_FAILURES} failures in a row, the last: {self._problem}")

    async def end(self, hung: object = None, *, computing: bool = False, why: str = "") -> None:
        """Kill the process; its calls fail, its episodes leave it.

        hung: the future of a call that exceeded its limit, `computing` or not. why: the cause, if it is the pool's.
        """
        replies = self._replies
        self._replies = {}
        self._works = False
        self.failures = 0
        self.spoiled = 0
        for episode in self.episodes:
            episode.process = None
        self.episodes.clear()
        code = await self.kill()
        end = why or end_of(code)
        if hung is not None:
            end = f"no answer within {self._program.timeout_s:g} s"
        for reply in replies.values():
            failure = EnvironmentFailed(f"{self.name}: {end}", reason="died")
            if reply is hung:
                failure = EnvironmentFailed(f"{self.name}: {end}", reason="hung")
                if computing:
                    failure.end = replace(failure.end, by="class")
            reply.set_result(failure)  # an exception would be reported where the caller was cancelled

    async def close(self) -> None:
        """Kill the process, after a start that goes on."""
        async with self.gate:
            await self.end()

    async def _within_limits(self, reply: asyncio.Future[Any], episode: int, session: Session | None) -> Any:
        """The frame that is the reply to a call, or an EnvironmentFailed."""
        limit_s = self._program.timeout_s
        if session is not None:
            limit_s = 0.0
            async with race(asyncio.shield(reply), session.silent()):
                self.leave(episode)
        with contextlib.suppress(TimeoutError):
            async with time_limit(limit_s):
                return await asyncio.shield(reply)
        used_s = self._processor_s()
        try:
            async with time_limit(GRACE_S):
                return await asyncio.shield(reply)
        except TimeoutError:
            used_s = self._processor_s() - used_s
            if reply in self._replies.values():
                computing = len(self.episodes) == 1 and used_s >= WAITING_SHARE * GRACE_S
                await self.end(hung=reply, computing=computing)
        return await reply

    def connection_lost(self, problem: Exception | None) -> None:
        """End a process that has ended, or sent something else than replies."""
        if self._works:
            self._end = asyncio.create_task(self.end())
        else:
            super().connection_lost(problem)


class EnvironmentPool:
    """Environment processes; `async with` starts and closes them.

    `tools`, `repeated_failure`, `agent`: of the user's class. `counters`: episodes (resets and
    runs), steps, replays, restarts of processes, and failed episodes by reason.
    """

    def __init__(self, section: EnvironmentSection, *, logs: Path, name: str = "environment"):
        """logs: folder of the logs, NAME-N.log. Raises ValueError if one of `variables` is not set."""
        self.counters: Counter[str] = Counter()
        self.numbers = itertools.count()
        """Of episodes in their processes."""
        self.subject = f"environment.name {section.name!r}"
        self.record = EpisodeRecord(self.subject)
        self.shown: set[str] = set()
        """Reasons of failures of which one was warned of that is paid."""
        assert section.name is not None
        setup: Setup = (section.name, section.memory_mb, section.timeout_s)
        program = Program(
            name=name,
            module="megatron_scalerl.environments.worker",
            setup=msgspec.json.encode(setup),
            environment=child_environment("environment.variables", section.variables),
            subject=self.subject,
            timeout_s=section.timeout_s,
            start_timeout_s=START_TIMEOUT_S,
            most_reply=REPLY_BYTES,
            logs=logs,
        )
        count = section.workers or default_workers()
        self._processes = [_Process(f"{name}-{n}", program, self.counters) for n in range(count)]
        self.extra = [_Process(f"{name}-{count + n}", program, self.counters) for n in range(count)]
        """For calls that are made alone."""
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
        for process in self.extra:
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

    def emptiest(self, tried: Mapping[_Process, Any]) -> _Process:
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
        self._fate = pool.record.begun(self._key)
        self._number = 0
        """In its process."""
        self._failed = False
        self._process_died = False
        """Whether its process ended during the last try."""
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
        if isinstance(problem, EnvironmentFailed):
            self._ended(problem)
        elif problem is None:
            self._pool.record.ended(self._fate)

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
        """The turn of the first try that succeeds. Raises EnvironmentFailed after the last; the pool may end then."""
        pool = self._pool
        lives = 2 if pool.agent else 1
        tried: dict[_Process, float] = {}
        """Where a try has failed, and when it began."""
        before = ""
        for pause_s in (*outages.PAUSES_S[: outages.TRIES - 1], None):
            process = self.process or pool.emptiest(tried)
            # what may pass with time is not worth a process of its own
            repeats = pause_s is None and before not in ("", *PAUSED)
            alone = not lives or (repeats and (pool.repeated_failure == "wrong" or process in tried))
            begun_s = asyncio.get_running_loop().time()
            try:
                if alone:
                    turn = await self._try_alone(argument)
                else:
                    turn = await self._try(argument, process)
            except EnvironmentFailed as failure:
                pool.record.tried(self._fate, failed=True)
                if self._process_died and lives:
                    lives -= 1
                if pause_s is None or failure.end.reason == "changed":
                    repeated = alone and failure.end.by == "class" and failure.end.reason == before
                    self._failed = True
                    pool.counters[failure.end.reason] += 1
                    self._ended(failure, argument, repeated=repeated)
                    raise
                before = failure.end.reason
                if not alone:
                    # of an outage no success elsewhere counts: what the process asked has failed, not the process
                    tried[process] = -1.0 if before == "unavailable" else begun_s
                if before in PAUSED:
                    await asyncio.sleep(pause_s)
            else:
                pool.record.tried(self._fate, failed=False)
                for other, failed_s in tried.items():
                    if other is not self.process:
                        await other.succeeded_elsewhere(failed_s)
                return turn
        raise AssertionError

    async def _try_alone(self, argument: Argument) -> Turn:
        extra = await self._pool.alone.get()
        try:
            await extra.empty()
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
                        )
            turn, digest = await self._make(argument)
        except BaseException:
            self._process_died = self.process is None
            self._leave()
            raise
        self._past.append((argument, digest))
        return turn

    async def _make(self, argument: Argument) -> tuple[Turn, bytes]:
        """(turn, digest of it) of one call in its process."""
        head = self._pool.subject
        first = argument is None
        if self.process is None:
            raise EnvironmentFailed(f"{head}: its process has ended", reason="died")
        try:
            request = Request(episode=self._number, row=self._row)
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

    def _ended(self, failure: EnvironmentFailed, argument: Argument = None, *, repeated: bool = False) -> None:
        """Record a failure, in a call with this argument. repeated: whether it is the same as in the try before."""
        pool = self._pool
        arguments = [*(earlier for earlier, _ in self._past), argument]
        said: Sequence[Any] = [response for response in arguments if isinstance(response, Response)]
        if not isinstance(argument, Response | None):
            said = argument.responses()
        row = encoded(self._row).decode()[:SHOWN_CHARS]
        fate = self._fate
        fate.actions = printable(f"of the row {row}, after the responses {encoded(said).decode()[-SHOWN_CHARS:]}")
        wrong = repeated and pool.repeated_failure == "wrong" and pool.record.others_succeed(self._key)
        if wrong and said:
            failure.end = replace(failure.end, paid=True)
            if failure.end.reason not in pool.shown:
                pool.shown.add(failure.end.reason)
                text = "%s: an episode %s, is paid as wrong, as it failed again and again:\n%s"
                logger.warning(text, pool.subject, fate.actions, failure)
        if not failure.end.paid:
            fate.problem = str(failure)
        pool.end(pool.record.ended(fate))

    def _leave(self) -> None:
        """Close the episode in its process."""
        if self.process is not None:
            self.process.episodes.discard(self)
            self.process.leave(self._number)
            self.process = None


async def try_out(section: EnvironmentSection, prompt: Prompt) -> None:
    """Play the begin of an episode, with the reference and an empty text. Raises ValueError for what is no turn.

    An agent is not tried, as it needs a policy.
    """
    if str(section.name).startswith("verifiers:"):
        return
    section = section.model_copy(update={"workers": 1})
    with tempfile.TemporaryDirectory() as logs:
        async with EnvironmentPool(section, logs=Path(logs)) as pool:
            [process] = pool._processes
            for text in () if pool.agent else (prompt.answer, ""):
                async with pool.episode(prompt.row) as episode:
                    try:
                        await episode._try(None, process)
                        await episode._try(Response(text=text), process)
                    except EnvironmentFailed as failure:
                        if failure.end.reason == "invalid":
                            line = str(failure).strip().splitlines()[-1].removeprefix(f"{pool.subject}: ")
                            raise ValueError(f"{pool.subject}: what it returns is no turn: {line}") from None


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
