"""Scores completions in killable processes: whatever a verifier does, every check ends within its limits.

    score() --slots--> queue --chunks--> N worker tasks, each with one process --> scores

Bound: at most `workers * CHUNK * 2` checks are outstanding; further `score` calls wait for a slot. `score` fills the
queue and the worker tasks empty it; it is never longer than the number of slots (a check whose first caller was
cancelled while others wait for it keeps its place without a slot).

Outcomes of a check other than the verifier's return value:

* An answer that exceeds a limit (time, processor time, memory) is wrong, with that reason.
* An answer on which the verifier raises is wrong, with the reason `error`.
* A process that dies during a check (killed by another process, a segmentation fault, an exit) is replaced and the
  check repeated. The second time the answer is wrong, with the reason `crash`: an answer must not avoid its score by
  crashing the verifier. Checks that had not begun are not affected.
* A check that its verifier cannot make (VerifierUnavailable: the code verifier without a sandbox) is lost as well;
  after MAX_UNAVAILABLE in a row the run ends (RuntimeError).
* Where no replacement starts in START_TRIES tries, the current check is lost through no fault of the answer
  (CompletionLost). Other workers continue; after START_ROUNDS such rounds for every worker with no process alive the
  run ends (RuntimeError).

Identical checks (same text, reference and extra columns) run once, so a verifier must depend on its arguments alone.
The scores of CACHE_SIZE checks are cached; a result that may differ next time (a raised error, a crash, the
wall-clock limit) is shared only by the callers that are waiting for it.

Verifiers of tasks have pools of their own (`task_pools`), so that slow ones do not hold up fast ones.

Worst case of n different checks that all exceed the limit of processor time: n * (cpu_s + R) / workers seconds on
dedicated CPUs, with R about 0.5 s for the replacement of a process: 48 prompts x 16 with the default of 2 s take 16
minutes with 2 workers and 4 with 8. No check gets less time because of earlier ones.

The verifier pools of a run: one for each task, so that slow checks of one task do not hold up the other's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import pickle
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_scalerl.recipe.sections import RewardsSection
from megatron_scalerl.recipe.tasks import Task
from megatron_scalerl.rewards.length_penalty import penalized
from megatron_scalerl.rewards.limits import Limits
from megatron_scalerl.rewards.worker_process import WorkerDied, WorkerProcess
from megatron_scalerl.types import CompletionLost, Prompt, Score

logger = logging.getLogger(__name__)

CHUNK = 8
"""Checks sent to a process at once; their results come back one by one."""
CACHE_SIZE = 4096
"""Cached scores, evicted least recently used first."""
MAX_DEFAULT_WORKERS = 8
"""Most verifier processes where the recipe does not set their number."""
MAX_LOSSES = 2
"""Processes that may die during one check."""
MAX_EARLY_LOSSES = 3
"""Processes that may die before they begin one check."""
MAX_UNAVAILABLE = 64
"""Checks in a row for which a verifier raises VerifierUnavailable, after which the pool ends."""
START_TRIES = 4
START_PAUSE_S = 0.5
"""A round of START_TRIES to replace a process, with pauses that double."""
ROUND_PAUSE_S = 20.0
"""Pause between two rounds. A worker without a process takes no checks."""
START_ROUNDS = 3
"""Failed rounds per worker, with no process alive, after which the pool ends: about a minute."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Check:
    """One outstanding check; `score` is awaited by all callers of identical checks."""

    key: bytes
    serial: int
    request: bytes
    score: asyncio.Future[Score]
    callers: int = 0
    losses: int = 0
    early_losses: int = 0


@dataclass(kw_only=True, slots=True)
class _Outage:
    """Failures since a process was last started."""

    rounds: int = 0
    tries: int = 0


class VerifierPool:
    """Verifier processes behind an asyncio interface; `async with` starts and closes it.

    The verifier is "math", "code" or "module:function" with the signature
    `(answer_text: str, reference: str, extra: dict) -> bool | float`. A bool becomes the reward `correct` or
    `incorrect`; a float is the reward itself and counts as correct if it is at least `correct`.

    `counters` counts completions: checks; correct; reasons of wrong ones (no_answer, truncated, timeout, memory,
    crash, error); verifier_lost (CompletionLost); repeated (scored by an identical check). And processes: restarts.
    """

    def __init__(self, rewards: RewardsSection, *, start_timeout_s: float = 300.0) -> None:
        self._rewards = rewards
        limits = limits_of(rewards)
        self._processes = [
            WorkerProcess(
                rewards.verifier,
                limits=limits,
                environment=rewards.environment,
                start_timeout_s=start_timeout_s,
            )
            for _ in range(rewards.workers or default_workers())
        ]
        self._slots = asyncio.Semaphore(len(self._processes) * CHUNK * 2)
        self._queue: asyncio.Queue[_Check] = asyncio.Queue()
        self._outstanding: dict[bytes, _Check] = {}
        self._cache: OrderedDict[bytes, Score] = OrderedDict()
        self._serial = 0
        self._outage = _Outage()
        self._unavailable = 0
        self._error_shown = False
        self._tasks: list[asyncio.Task[None]] = []
        self._end: Exception | None = RuntimeError("the verifier pool was not started")
        self.counters: Counter[str] = Counter()

    async def __aenter__(self) -> VerifierPool:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start all processes.

        Raises, in one line, ValueError if the verifier cannot be loaded or a variable of `rewards.environment` is
        not set, and OSError if the system starts no process.
        """
        assert not self._tasks, "started twice"
        results = await asyncio.gather(*(p.start() for p in self._processes), return_exceptions=True)
        problems = [result for result in results if isinstance(result, BaseException)]
        if problems:
            await asyncio.gather(*(process.kill() for process in self._processes))
            raise problems[0]
        self._end = None
        self._tasks = [asyncio.create_task(self._work(process)) for process in self._processes]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)

    async def score(
        self, text_after_thinking: str | None, prompt: Prompt, *, truncated: bool = False, tokens: int = 0
    ) -> Score:
        """The score of one completion; None or a blank text is no answer, a truncated one is wrong.

        tokens: those that the policy sampled, for rewards.length_penalty.
        Raises CompletionLost (`verifier_lost`) if no process could be started for it, and RuntimeError if that
        persisted or the pool is closed.
        """
        self.counters["checks"] += 1
        if truncated:
            score = self._wrong("truncated")
        elif text_after_thinking is None or not text_after_thinking.strip():
            score = self._wrong("no_answer")
        else:
            try:
                score = await self._score_once(pickle.dumps((text_after_thinking, prompt.answer, dict(prompt.extra))))
            except CompletionLost as lost:
                self.counters[lost.reason] += 1
                raise
        if score.correct or score.reason:
            self.counters["correct" if score.correct else score.reason] += 1
        return penalized(score, tokens, self._rewards.length_penalty)

    async def close(self) -> None:
        """Kill all processes and fail outstanding checks; may be called twice."""
        self._finish(RuntimeError("the verifier pool is closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(process.kill() for process in self._processes))

    async def _score_once(self, request: bytes) -> Score:
        """The score of a request: cached, of an outstanding identical check, or of a new check."""
        if self._end is not None:
            raise self._end
        key = hashlib.sha256(request).digest()
        if not (key in self._cache or key in self._outstanding):
            async with self._slots:
                if self._end is not None:
                    raise self._end
                if not (key in self._cache or key in self._outstanding):
                    return await self._wait_for(self._admit(key, request))
        self.counters["repeated"] += 1
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        return await self._wait_for(self._outstanding[key])

    def _admit(self, key: bytes, request: bytes) -> _Check:
        self._serial += 1
        score = asyncio.get_running_loop().create_future()
        check = _Check(key=key, serial=self._serial, request=request, score=score)
        self._outstanding[key] = check
        self._queue.put_nowait(check)
        return check

    async def _wait_for(self, check: _Check) -> Score:
        check.callers += 1
        try:
            return await asyncio.shield(check.score)
        finally:
            check.callers -= 1
            if not check.callers and not check.score.done():  # all callers were cancelled
                check.score.cancel()
                del self._outstanding[check.key]

    async def _work(self, process: WorkerProcess) -> None:
        """Run checks in one process, chunk by chunk; replace a lost process and continue with the rest."""
        while True:
            while not process.alive and not await self._replace(process):
                await asyncio.sleep(ROUND_PAUSE_S)
            chunk = await self._next_chunk()
            while chunk:
                if process.alive or await self._replace(process):
                    chunk = await self._run_chunk(process, chunk)
                    continue
                self._fail_lost(chunk[0])
                for check in chunk[1:]:
                    self._queue.put_nowait(check)
                break

    async def _next_chunk(self) -> list[_Check]:
        """At most CHUNK checks, and at most this process's share of the queue."""
        first = await self._queue.get()
        share = -(-self._queue.qsize() // len(self._processes))
        rest = [self._queue.get_nowait() for _ in range(min(CHUNK - 1, share))]
        return [check for check in [first, *rest] if not check.score.done()]

    async def _run_chunk(self, process: WorkerProcess, chunk: list[_Check]) -> list[_Check]:
        """Run a chunk; if the process is lost, returns the remaining checks, and the process is dead."""
        timeout_s = self._rewards.timeout_s
        try:
            await process.send_checks([(check.serial, check.request) for check in chunk], timeout_s)
        except (TimeoutError, WorkerDied):
            return await self._lost_before(process, chunk)
        for index, check in enumerate(chunk):
            try:
                await process.began(check.serial, timeout_s)
            except (TimeoutError, WorkerDied):
                return await self._lost_before(process, chunk[index:])
            try:
                reply = await process.result(check.serial, timeout_s)
            except TimeoutError:
                await process.kill()
                self._resolve(check, self._wrong("timeout"), keep=False)
                return chunk[index + 1 :]
            except WorkerDied as death:
                return await self._lost_during(process, chunk[index:], death.limit)
            self._take(check, reply)
            if reply["retire"]:
                await process.kill()
                return chunk[index + 1 :]
        return []

    async def _lost_during(self, process: WorkerProcess, rest: list[_Check], limit: str) -> list[_Check]:
        """The process died during the first check: by the named limit, or empty: for another reason."""
        await process.kill()
        check = rest[0]
        if limit:
            self._resolve(check, self._wrong(limit), keep=True)
            return rest[1:]
        check.losses += 1
        if check.losses < MAX_LOSSES:
            return rest
        self._resolve(check, self._wrong("crash"), keep=False)
        return rest[1:]

    async def _lost_before(self, process: WorkerProcess, rest: list[_Check]) -> list[_Check]:
        """The process died or hung before it began the first check, which did not cause it."""
        await process.kill()
        rest[0].early_losses += 1
        if rest[0].early_losses < MAX_EARLY_LOSSES:
            return rest
        self._fail_lost(rest[0])
        return rest[1:]

    async def _replace(self, process: WorkerProcess) -> bool:
        """One round of tries to restart the process; False if all failed.

        Raises RuntimeError after too many failed rounds with no process of the pool alive.
        """
        await process.kill()
        problem: Exception | None = None
        for attempt in range(START_TRIES):
            if attempt:
                await asyncio.sleep(START_PAUSE_S * 2 ** (attempt - 1))
            try:
                await process.start()
            except (ValueError, OSError) as error:  # transient: this verifier was loaded before
                problem = error
                self._outage.tries += 1
                continue
            self.counters["restarts"] += 1
            self._outage = _Outage()
            return True
        logger.warning("a verifier process could not be replaced, retrying: %s", problem)
        if not any(other.alive for other in self._processes):
            self._outage.rounds += 1
        if self._outage.rounds >= START_ROUNDS * len(self._processes):
            tries = f"{self._outage.tries} tries in a row"
            raise RuntimeError(f"expected a verifier process to start again, found {tries} failing, last: {problem}")
        return False

    def _take(self, check: _Check, reply: dict[str, Any]) -> None:
        """Resolve a check by its reply. Raises RuntimeError after MAX_UNAVAILABLE checks that could not be made."""
        if "unavailable" not in reply:
            self._unavailable = 0
            self._resolve(check, self._score_of(reply), keep="error" not in reply)
            return
        self._unavailable += 1
        self._fail_lost(check, reply["unavailable"])
        if self._unavailable >= MAX_UNAVAILABLE:
            raise RuntimeError(
                f"{self._unavailable} checks in a row could not be made, the last: {reply['unavailable']}"
            )

    def _score_of(self, reply: dict[str, Any]) -> Score:
        for limit in ("memory", "timeout"):
            if limit in reply:
                return self._wrong(limit)
        if "error" in reply:
            if not self._error_shown:
                self._error_shown = True
                logger.warning("the verifier raised; the completion counts as wrong:\n%s", reply["error"])
            return self._wrong("error")
        value = reply["value"]
        if isinstance(value, bool):
            return Score(correct=value, reward=self._rewards.correct if value else self._rewards.incorrect)
        return Score(correct=value >= self._rewards.correct, reward=value)

    def _wrong(self, reason: str) -> Score:
        return Score(correct=False, reward=self._rewards.incorrect, reason=reason)

    def _resolve(self, check: _Check, score: Score, *, keep: bool) -> None:
        """Set the score of a check for all its callers; `keep`: cache it for later callers."""
        if keep:
            self._cache[check.key] = score
            if len(self._cache) > CACHE_SIZE:
                self._cache.popitem(last=False)
        if not check.score.done():  # its callers may have been cancelled
            check.score.set_result(score)
            del self._outstanding[check.key]

    def _fail_lost(self, check: _Check, why: str = "no verifier process could be started for a completion") -> None:
        if not check.score.done():
            check.score.set_exception(CompletionLost(why, reason="verifier_lost"))
            del self._outstanding[check.key]

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (problem := task.exception()) is not None:
            assert isinstance(problem, Exception)
            self._finish(problem)

    def _finish(self, end: Exception) -> None:
        """Make every pending or later `score` raise `end`."""
        self._end = end
        for check in self._outstanding.values():
            if not check.score.done():
                check.score.set_exception(end)
        self._outstanding.clear()


def limits_of(rewards: RewardsSection) -> Limits:
    """The limits of a check."""
    return Limits(cpu_s=rewards.cpu_s, memory_mb=rewards.memory_mb, file_mb=rewards.file_mb)


def default_workers() -> int:
    """Number of verifier processes by default: one per processor, at most MAX_DEFAULT_WORKERS."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_DEFAULT_WORKERS, cpus)


class TaskPools:
    """Scores each completion in the pool of its prompt's task; `async with` starts and closes the pools."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._pools = {task.name: VerifierPool(task.rewards) for task in tasks}
        self._running = contextlib.AsyncExitStack()

    async def __aenter__(self) -> TaskPools:
        """Raises as `VerifierPool.start`; pools that were started are closed then."""
        async with contextlib.AsyncExitStack() as started:
            for pool in self._pools.values():
                await started.enter_async_context(pool)
            self._running = started.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._running.aclose()

    async def score(
        self, text_after_thinking: str | None, prompt: Prompt, *, truncated: bool = False, tokens: int = 0
    ) -> Score:
        """As `VerifierPool.score`."""
        return await self._pools[prompt.task].score(text_after_thinking, prompt, truncated=truncated, tokens=tokens)
