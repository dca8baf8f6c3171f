"""Runs episodes of the user's environment in processes that can be killed, so that each call ends in limited time.

    Episode.step() --> _Process --socket--> environments.worker, with many episodes

Life of a process:

    start      with the pool, or when the next episode needs the process
    cancel     at the time limit of a call the coroutine is cancelled, and the process lives on
    kill       with all child processes: after an exit or a message that is no reply; GRACE_S after the time limit of
               a call; or after MOST_FAILURES calls in a row that failed here and succeeded in another process, since
               an episode may have spoiled this process. In an outage calls fail everywhere, and no process ends

Life of a call:

    place      an episode without a process, at first or because the process has ended meanwhile, goes to the process
               with the fewest episodes, if possible to a process whose last call did not fail
    replay     in a new process the episode is reset, and all earlier responses are replayed. The environment has to
               return the same as before, else the call fails with the reason `changed`
    call       the call is made
    repeat     if a replay or the call fails, the episode leaves the process and begins at `place` again: TRIES tries
               in all, with pauses if the environment was `unavailable` or `hung`
    alone      if a process ended during the call, the call may be the cause, and is tried alone from then on: in one
               of the extra processes, which make one call at a time. After the answer the episode leaves the extra
               process, so that the next call there cannot harm the episode

A class with `run` has one call, which may take as long as the agent asks the policy (`Session`). A run has no earlier
responses to replay: a repeated run begins anew, and the session repeats the earlier answers. A run is tried alone
only after the process has ended twice, since a run takes minutes.

After the last failed try the episode is lost, since a failure may come from an outage as well as from a policy that
breaks a tool. A class with `repeated_failure = "wrong"` is the exception: the last try is made alone in a fresh
process, and if the try fails by the class (`types.ENDS`) with the same reason as the try before, the episode counts
as wrong, unless at least half of the latest episodes of different rows have failed. If more than half of the latest
episodes are lost, the pool ends, and every call raises RuntimeError (`environments.episode_record`).

An environment is not trusted. Without a sandbox, an environment has the rights of the user, and can disturb all
episodes of the process, answer for all, and fill the log. By the protocol an environment reaches no further process:
the controller takes replies of at most REPLY_BYTES, one at a time from each process, to calls of this process alone,
and keeps a digest of each turn, for replays.
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
"""Time limit for a process to report that a coroutine was cancelled (s)."""
START_TIMEOUT_S = 300.0
MOST_FAILURES = 5
"""Number of calls in a row that failed in a process and succeeded elsewhere after which the process is replaced."""
REPLY_BYTES = TURN_BYTES + 2**16
"""Largest size of a process's reply to a call (bytes)."""
PAUSED = ("unavailable", "hung")
"""Reasons of failures that may pass with time, after which the next try begins only after a pause."""
SHOWN_CHARS = 500
"""Largest number of characters of the row in a warning, and of the policy's responses."""


class EnvironmentFailed(RuntimeError):
    """An episode cannot go on. `end` says who ended the episode, and whether the episode gets a reward.

    Only with `repeated_failure = "wrong"` in the class, an episode may get the reward of a wrong answer.
    """

    def __init__(self, problem: str, *, reason: str):
        """reason: key in `types.ENDS` of an end without a reward; `_record_failure` may later grant a reward."""
        super().__init__(problem)
        self.end: EpisodeEnd = ENDS[reason]


@record
class Turn:
    """The environment's result for one response of the policy."""

    messages: tuple[Message, ...]
    """Messages for the policy, each with role (user or tool; from reset also system), content (str), and further keys
    with scalar values."""
    reward: bool | float | None
    """The reward of this turn, from -MOST_REWARD to MOST_REWARD; None without a verdict."""
    done: bool
    metrics: dict[str, float] = field(default_factory=dict)


class Session(Protocol):
    """Interface of an object that answers an agent's requests during `run`. Implemented in `rollouts.agents`."""

    def begin(self) -> Agent:
        """Start a try; returns the argument of `run`. Requests that the agent repeats get the same answers again."""

    def end(self) -> None:
        """End a try: refuse later requests, which code of the try may still send."""

    async def silent(self) -> None:
        """Return once the agent has sent no request for environment.timeout_s seconds."""

    def responses(self) -> Sequence[str]:
        """The policy's answers in the last try; empty if the agent did not repeat all requests of earlier tries."""


Argument = Response | Session | None
"""A call's argument: a Response for step, a Session for run, None for reset."""


class _Process(Worker):
    """A process that runs many episodes; `ready` starts a new process in place of a process that has ended."""

    def __init__(self, name: str, program: Program, counters: Counter[str]):
        super().__init__(name, program)
        self.episodes: set[Episode] = set()
        self._counters = counters
        self._works = False
        """Whether `ready` has started the process, and the pool has noticed no end of the process since."""
        self._started = False
        self.failures = 0
        """Number of failed calls in a row, outages not counted."""
        self._problem = ""
        """Last line of the latest failure's traceback."""
        self.local_failures = 0
        """Number of calls that failed here and then succeeded in another process."""
        self._success_elsewhere_s = 0.0
        """Time at which a call that failed here last succeeded in another process (time of the event loop, s)."""

    async def ready(self) -> None:
        """Start the process unless the process runs. Raises EnvironmentFailed if the process does not start."""
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
        """The reply to a request. If the caller is cancelled, this class still watches the call's time limit.

        Raises EnvironmentFailed if no valid reply comes, and TypeError or RecursionError for values that are no JSON.
        """
        self._number += 1
        # No await before the request is sent: the process could end meanwhile.
        outcome = self.send(self._number, encoded(request))
        frame = await asyncio.shield(asyncio.create_task(self._within_limits(outcome, request.episode, session)))
        if isinstance(frame, EnvironmentFailed):
            raise frame
        try:
            reply = msgspec.json.decode(frame[1], type=Reply)
        except (ValueError, RecursionError):
            await self.end()
            raise EnvironmentFailed(f"{self.name}: the process sent an invalid reply", reason="died") from None
        if not reply.failure:
            self.failures = 0
            self.local_failures = 0
        # A failure by an outage of a service does not count against the process.
        elif reply.failure != "unavailable":
            self.failures += 1
            self._problem = printable(reply.error.strip().rpartition("\n")[2])
        return reply

    def leave(self, episode: int) -> None:
        """Tell the process to close an episode; does nothing if the process has ended."""
        if self._works:
            self.send(0, encoded(Request(episode=episode)))

    async def empty(self) -> None:
        """End the process if a call is still in progress or the latest call failed: the next call gets a process
        without traces of earlier calls."""
        if self._replies or self.failures:
            await self.end()

    async def succeeded_elsewhere(self, begin_s: float) -> None:
        """Note that a call which failed here has succeeded in another process; ends this process after MOST_FAILURES.

        begin_s: start of the failed call (time of the event loop, s). Calls that failed in the same period count
        once, since perhaps an outage made all of the calls fail.
        """
        if not self.failures or begin_s < self._success_elsewhere_s:
            return
        self._success_elsewhere_s = asyncio.get_running_loop().time()
        self.local_failures += 1
        if self.local_failures == MOST_FAILURES:
            await self.end(cause=f"replaced after {MOST_FAILURES} failures in a row, the last: {self._problem}")

    async def end(self, hung: object = None, *, computing: bool = False, cause: str = "") -> None:
        """Kill the process. All calls fail, and all episodes leave the process.

        hung: future of the call that exceeded the time limit, if any. computing: whether this call computed instead
        of waiting. cause: the reason if the pool replaces the process.
        """
        replies = self._replies
        self._replies = {}
        self._works = False
        self.failures = 0
        self.local_failures = 0
        for episode in self.episodes:
            episode.process = None
        self.episodes.clear()
        code = await self.kill()
        end = cause or end_of(code)
        if hung is not None:
            end = f"no answer within {self._program.timeout_s:g} s (environment.timeout_s)"
        for reply in replies.values():
            failure = EnvironmentFailed(f"{self.name}: {end}", reason="died")
            if reply is hung:
                failure = EnvironmentFailed(f"{self.name}: {end}", reason="hung")
                if computing:
                    failure.end = replace(failure.end, by="class")
            # The failure is set as a result, since asyncio logs an exception that a cancelled caller never takes.
            reply.set_result(failure)

    async def close(self) -> None:
        """Kill the process, also a process that is being started."""
        async with self.gate:
            await self.end()

    async def _within_limits(self, reply: asyncio.Future[Any], episode: int, session: Session | None) -> Any:
        """Wait for the reply to a call; returns the reply's frame, or an EnvironmentFailed after the time limits."""
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
        """Fail all calls. The event loop calls this when the process ends or sends data that are no replies."""
        if self._works:
            self._end = asyncio.create_task(self.end())
        else:
            super().connection_lost(problem)


class EnvironmentPool:
    """The environment processes of a run, which `async with` starts and ends.

    `tools`, `repeated_failure`, `agent`: declarations of the user's class. `counters`: numbers of episodes (resets
    and runs), steps, replays and restarts of processes, and of failed episodes for each reason.
    """

    def __init__(self, section: EnvironmentSection, *, logs: Path, name: str = "environment"):
        """logs: folder of the logs, NAME-N.log. Raises ValueError if a variable of `section.variables` is not set."""
        self.counters: Counter[str] = Counter()
        self.numbers = itertools.count()
        """Source of episodes' numbers: an episode gets a new number whenever the episode enters a process."""
        self.subject = f"environment.name {section.name!r}"
        self.record = EpisodeRecord(self.subject)
        self.warned_reasons: set[str] = set()
        """Reasons of failures for which a warning was logged that an episode counts as wrong."""
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
        """Extra processes, in which one call at a time is tried alone."""
        self.idle_extras: asyncio.Queue[_Process] = asyncio.Queue()
        """Extra processes that no call uses at present; `__aenter__` fills the queue."""

    async def __aenter__(self) -> EnvironmentPool:
        """Start all processes. Raises ValueError, in one line, if the class cannot be used or no process starts."""
        self.end_error: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Future that gets the error which ends the pool."""
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
            self.idle_extras.put_nowait(process)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Kill all processes and fail outstanding calls; may be called twice."""
        self.end(RuntimeError("the environment pool is closed"))
        await asyncio.gather(*(process.close() for process in (*self._processes, *self.extra)))

    def end(self, problem: RuntimeError | None) -> None:
        """End the pool: every pending and later call raises `problem`. Does nothing if `problem` is None."""
        if problem is not None and not self.end_error.done():
            self.end_error.set_exception(problem)
            # asyncio logs an exception of a future that nobody retrieves, so the exception is retrieved here.
            self.end_error.exception()

    @property
    def pids(self) -> list[int]:
        """Process ids of the environments that are running."""
        return [process.pid for process in (*self._processes, *self.extra) if process.pid is not None]

    def emptiest(self, failed_tries: Mapping[_Process, Any]) -> _Process:
        """The process with the fewest episodes, if possible not in `failed_tries` and without recent failures."""
        return min(
            self._processes, key=lambda process: (process in failed_tries, process.failures, len(process.episodes))
        )

    def episode(self, row: dict[str, Any]) -> Episode:
        """A new episode of a row. The caller uses `async with`, and makes one call at a time."""
        return Episode(self, row)


class Episode:
    """An episode, which is closed at the end of `async with`.

    Calls raise EnvironmentFailed if every try fails, and RuntimeError once the pool has ended.
    """

    def __init__(self, pool: EnvironmentPool, row: dict[str, Any]):
        self.process: _Process | None = None
        """The episode's process; None before the first call, and after the end of the process."""
        self._pool = pool
        self._row = row
        self._key = hashlib.sha256(encoded(row)).digest()
        self._fate = pool.record.begin_episode(self._key)
        self._number = 0
        """Number by which the present process knows the episode."""
        self._failed = False
        self._process_died = False
        """Whether the episode's process ended during the last try."""
        self.metrics: dict[str, float] = {}
        """Name of a metric that the environment returned -> the latest value."""
        self._past_calls: list[tuple[Argument, bytes]] = []
        """(argument, digest of the result) of each successful call so far, beginning with reset, for replays."""

    async def __aenter__(self) -> Episode:
        return self

    async def __aexit__(self, kind: object, problem: BaseException | None, traceback: object) -> None:
        self._leave()
        if self._failed:
            return
        if isinstance(problem, EnvironmentFailed):
            self._record_failure(problem)
        elif problem is None:
            self._pool.record.record_end(self._fate)

    async def reset(self) -> tuple[Message, ...]:
        """Begin the episode and return the environment's first messages; called once."""
        self._pool.counters["episodes"] += 1
        return (await self._call(None)).messages

    async def step(self, response: Response) -> Turn:
        """The environment's result for a response of the policy."""
        self._pool.counters["steps"] += 1
        return await self._call(response)

    async def run(self, session: Session) -> bool | float | None:
        """Run the agent and return the reward that the agent returns; called once."""
        self._pool.counters["episodes"] += 1
        return (await self._call(session)).reward

    async def _call(self, argument: Argument) -> Turn:
        end_error = self._pool.end_error
        if end_error.done():
            end_error.result()
        async with race(asyncio.shield(end_error), self._tries(argument)) as tasks:
            turn: Turn = next(task.result() for task in tasks if task.done())
        self.metrics |= turn.metrics
        return turn

    async def _tries(self, argument: Argument) -> Turn:
        """Try a call up to outages.TRIES times; returns the turn. Raises EnvironmentFailed if every try fails."""
        pool = self._pool
        lives = 2 if pool.agent else 1
        failed_tries: dict[_Process, float] = {}
        """Process -> start of the latest failed try there (time of the event loop, s); -1 after an outage."""
        previous_reason = ""
        for pause_s in (*outages.PAUSES_S[: outages.TRIES - 1], None):
            process = self.process or pool.emptiest(failed_tries)
            # If the failure may pass with time, the last try needs no extra process.
            repeats = pause_s is None and previous_reason not in ("", *PAUSED)
            in_extra = not lives or (repeats and (pool.repeated_failure == "wrong" or process in failed_tries))
            begin_s = asyncio.get_running_loop().time()
            try:
                if in_extra:
                    turn = await self._try_alone(argument)
                else:
                    turn = await self._try(argument, process)
            except EnvironmentFailed as failure:
                pool.record.record_try(self._fate, failed=True)
                if self._process_died and lives:
                    lives -= 1
                if pause_s is None or failure.end.reason == "changed":
                    repeated = in_extra and failure.end.by == "class" and failure.end.reason == previous_reason
                    self._failed = True
                    pool.counters[failure.end.reason] += 1
                    self._record_failure(failure, argument, repeated=repeated)
                    raise
                previous_reason = failure.end.reason
                if not in_extra:
                    # After an outage a success elsewhere says nothing about this process, since a service has failed.
                    failed_tries[process] = -1.0 if previous_reason == "unavailable" else begin_s
                if previous_reason in PAUSED:
                    await asyncio.sleep(pause_s)
            else:
                pool.record.record_try(self._fate, failed=False)
                for failed_process, failed_s in failed_tries.items():
                    if failed_process is not self.process:
                        await failed_process.succeeded_elsewhere(failed_s)
                return turn
        raise AssertionError

    async def _try_alone(self, argument: Argument) -> Turn:
        extra = await self._pool.idle_extras.get()
        try:
            await extra.empty()
            return await self._try(argument, extra)
        finally:
            self._leave()
            self._pool.idle_extras.put_nowait(extra)

    async def _try(self, argument: Argument, process: _Process) -> Turn:
        """Try a call in the episode's process, else in `process`. A failure removes the episode from the process."""
        try:
            if self.process is None:
                self.process = process
                process.episodes.add(self)
                self._number = next(self._pool.numbers)
                await process.ready()
                if self._past_calls:
                    self._pool.counters["replays"] += 1
                for earlier, digest in self._past_calls:
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
        self._past_calls.append((argument, digest))
        return turn

    async def _make(self, argument: Argument) -> tuple[Turn, bytes]:
        """(turn, digest of the turn) of one call in the episode's process."""
        head = self._pool.subject
        first = argument is None
        if self.process is None:
            raise EnvironmentFailed(f"{head}: the episode's process has ended", reason="died")
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

    def _record_failure(
        self, failure: EnvironmentFailed, argument: Argument = None, *, repeated: bool = False
    ) -> None:
        """Record that an episode failed. argument: the argument of the failed call.

        repeated: the last try failed by the class, for the same reason as the try before.
        """
        pool = self._pool
        arguments = [*(earlier for earlier, _ in self._past_calls), argument]
        responses: Sequence[Any] = [response for response in arguments if isinstance(response, Response)]
        if not isinstance(argument, Response | None):
            responses = argument.responses()
        row = encoded(self._row).decode()[:SHOWN_CHARS]
        fate = self._fate
        fate.actions = printable(
            f"of the row {row}, after the responses {encoded(responses).decode()[-SHOWN_CHARS:]}"
        )
        wrong = repeated and pool.repeated_failure == "wrong" and pool.record.others_succeed(self._key)
        if wrong and responses:
            failure.end = replace(failure.end, paid=True)
            if failure.end.reason not in pool.warned_reasons:
                pool.warned_reasons.add(failure.end.reason)
                text = "%s: an episode %s, failed in every try, and counts as wrong:\n%s"
                logger.warning(text, pool.subject, fate.actions, failure)
        if not failure.end.paid:
            fate.problem = str(failure)
        pool.end(pool.record.record_end(fate))

    def _leave(self) -> None:
        """Close the episode in the process, if the episode has a process."""
        if self.process is not None:
            self.process.episodes.discard(self)
            self.process.leave(self._number)
            self.process = None


async def try_out(section: EnvironmentSection, prompt: Prompt) -> None:
    """Play the first turn of two episodes before a run, with the reference and with an empty text as response.

    Raises ValueError if the class returns an invalid turn. An agent, which needs a policy, is not tried.
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
                            raise ValueError(f"{pool.subject}: the class returned no valid turn: {line}") from None


def _turn(data: bytes, *, first: bool) -> Turn:
    """Decode the turn that a call returned. Raises ValueError or RecursionError for an invalid turn."""
    turn = msgspec.json.decode(data, type=Turn)
    roles = ("system", "user", "tool") if first else ("user", "tool")
    for message in turn.messages:
        if message.get("role") not in roles or not isinstance(message.get("content"), str):
            raise ValueError(f"a message needs a role ({', '.join(roles)}), and a string as content")
        if not all(isinstance(value, str | int | float | None) for value in message.values()):
            raise ValueError("the values of a message have to be strings, numbers, true, false or null")
    if not abs(turn.reward or 0.0) <= MOST_REWARD:
        raise ValueError(f"the reward is {turn.reward}; the absolute value may be at most {MOST_REWARD:g}")
    if not turn.messages and not turn.done:
        raise ValueError("no message was returned, although the episode is not done")
    return turn
