"""Scores completions in killable processes: whatever a verifier does, every check ends within its limits.

    score() --slots--> queue --chunks--> N worker tasks, each with one process --> verdicts

Bound: at most `workers * CHUNK * 2` checks are outstanding; further `score` calls wait for a slot. The queue is
filled by `score`, emptied by the worker tasks, and never longer than the slots (a check whose first caller was
cancelled while others wait for it keeps its place without a slot).

What becomes of a check:

* A limit that the answer itself runs into (time, processor time, memory) makes it wrong, with that reason.
* A verifier that raises makes it wrong, with the reason `error`.
* A process that is lost while it is on a check (killed by somebody else, a segmentation fault, an exit) is replaced
  and the check done once more. The second loss makes it wrong, with the reason `crash`: an answer cannot escape its
  judgement by crashing its judge. The checks behind it, and one that had not begun, are not charged.
* Where no process can be started in its place, in START_TRIES tries, the check in hand is lost through no fault of
  the answer (CompletionLost). Other workers go on; with START_ROUNDS such rounds for every worker, and no process
  alive, the run ends (RuntimeError).

Identical checks (same text, reference and extra columns) are done once, so a verifier must depend on its arguments
alone. Verdicts of KNOWN checks are kept; what may differ next time (a raised error, a crash, the clock's limit)
is shared only by the callers that wait for it.

Worst case of n different checks that all run into the limit of processor time: n * (cpu_s + R) / workers seconds on
CPUs of their own, with R about 0.5 s for the replacement of a process: 48 prompts x 16 with the default of 2 s take
16 minutes with 2 workers and 4 with 8. No check gets less time than another because of what came before it. Powers
and factorials too large to be written out do not come to this: magnitude.py refuses them without evaluating them,
and 768 different ones take 7 s with 2 workers.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import pickle
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

from megatron_scalerl.recipe.sections import RewardsSection
from megatron_scalerl.rewards.limits import Limits
from megatron_scalerl.rewards.process import WorkerDied, WorkerProcess
from megatron_scalerl.types import CompletionLost, Prompt, Rollout, Score

logger = logging.getLogger(__name__)

CHUNK = 8
"""Checks that a process gets at once; their verdicts come back one by one."""
KNOWN = 4096
"""Verdicts that are kept, the least recently used go first."""
MOST_WORKERS = 8
"""Verifier processes by default, on a machine with at least that many CPUs."""
MOST_LOSSES = 2
"""Processes that one check may lose while they are on it."""
MOST_IDLE_LOSSES = 3
"""Processes that may be lost before they began the check that is next."""
START_TRIES = 4
START_PAUSE_S = 0.5
"""A round of START_TRIES to replace a process, with a pause between them that doubles."""
ROUND_PAUSE_S = 20.0
"""Between two rounds. A worker without a process takes no checks."""
START_ROUNDS = 3
"""Rounds that may fail for each worker, while no process lives, before the pool ends: after about a minute."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Check:
    """One check on its way; `score` is awaited by all callers that ask the same."""

    key: bytes
    serial: int
    request: bytes
    score: asyncio.Future[Score]
    callers: int = 0
    losses: int = 0
    idle_losses: int = 0


@dataclass(kw_only=True, slots=True)
class _Outage:
    """What failed since a process was started last."""

    rounds: int = 0
    tries: int = 0


class VerifierPool:
    """Verifier processes behind an asyncio interface; `async with` starts and closes it.

    The verifier is "math" or "module:function" with the signature
    `(answer_text: str, reference: str, extra: dict) -> bool | float`. A bool becomes the reward `correct` or
    `incorrect`; a float is the reward itself and counts as correct from `correct` on.

    `counters` holds, by completion: checks; correct; the reasons of wrong ones (no_answer, truncated, timeout,
    memory, crash, error); verifier_lost (CompletionLost); repeated (answered by an identical check). By process:
    restarts.
    """

    def __init__(self, rewards: RewardsSection, *, start_timeout_s: float = 300.0) -> None:
        self._rewards = rewards
        limits = Limits(cpu_s=rewards.cpu_s, memory_mb=rewards.memory_mb, file_mb=rewards.file_mb)
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
        self._known: OrderedDict[bytes, Score] = OrderedDict()
        self._serial = 0
        self._outage = _Outage()
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

    async def score(self, text_after_thinking: str | None, prompt: Prompt, rollout: Rollout) -> Score:
        """The verdict on one completion; None or a blank text is no answer, a truncated one is wrong.

        Raises CompletionLost (`verifier_lost`) if no process could be had for it, and RuntimeError if that lasted
        or the pool is closed.
        """
        self.counters["checks"] += 1
        if rollout.truncated:
            score = self._wrong("truncated")
        elif text_after_thinking is None or not text_after_thinking.strip():
            score = self._wrong("no_answer")
        else:
            try:
                score = await self._judged(pickle.dumps((text_after_thinking, prompt.answer, dict(prompt.extra))))
            except CompletionLost as lost:
                self.counters[lost.reason] += 1
                raise
        if score.correct or score.reason:
            self.counters["correct" if score.correct else score.reason] += 1
        return score

    async def close(self) -> None:
        """Kill all processes and fail what is outstanding; may be called twice."""
        self._finish(RuntimeError("the verifier pool is closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(process.kill() for process in self._processes))

    async def _judged(self, request: bytes) -> Score:
        """The score of a request: known, about to be known, or found by a check of its own."""
        if self._end is not None:
            raise self._end
        key = hashlib.sha256(request).digest()
        if not (key in self._known or key in self._outstanding):
            async with self._slots:
                if self._end is not None:
                    raise self._end
                if not (key in self._known or key in self._outstanding):
                    return await self._wait_for(self._admit(key, request))
        self.counters["repeated"] += 1
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
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
        """Serve checks with one process, chunk by chunk; where the process is lost, go on with the rest."""
        while True:
            while not process.alive and not await self._replace(process):
                await asyncio.sleep(ROUND_PAUSE_S)
            chunk = await self._next_chunk()
            while chunk:
                if process.alive or await self._replace(process):
                    chunk = await self._judge(process, chunk)
                    continue
                self._lose(chunk[0])
                for check in chunk[1:]:
                    self._queue.put_nowait(check)
                break

    async def _next_chunk(self) -> list[_Check]:
        """At most CHUNK checks, and no more than this process's share of what waits."""
        first = await self._queue.get()
        share = -(-self._queue.qsize() // len(self._processes))
        rest = [self._queue.get_nowait() for _ in range(min(CHUNK - 1, share))]
        return [check for check in [first, *rest] if not check.score.done()]

    async def _judge(self, process: WorkerProcess, chunk: list[_Check]) -> list[_Check]:
        """Have a chunk judged; returns what is left to do where the process was lost, which is dead then."""
        timeout_s = self._rewards.timeout_s
        try:
            await process.send_checks([(check.serial, check.request) for check in chunk], timeout_s)
        except (TimeoutError, WorkerDied):
            return await self._lost_idle(process, chunk)
        for index, check in enumerate(chunk):
            try:
                await process.began(check.serial, timeout_s)
            except (TimeoutError, WorkerDied):
                return await self._lost_idle(process, chunk[index:])
            try:
                reply = await process.verdict(check.serial, timeout_s)
            except TimeoutError:
                await process.kill()
                self._settle(check, self._wrong("timeout"), keep=False)
                return chunk[index + 1 :]
            except WorkerDied as death:
                return await self._lost_on(process, chunk[index:], death.limit)
            self._settle(check, self._score_of(reply), keep="error" not in reply)
            if reply["retire"]:
                await process.kill()
                return chunk[index + 1 :]
        return []

    async def _lost_on(self, process: WorkerProcess, rest: list[_Check], limit: str) -> list[_Check]:
        """The process ended while it was on the first check: by a limit of ours, or by something else."""
        await process.kill()
        check = rest[0]
        if limit:
            self._settle(check, self._wrong(limit), keep=True)
            return rest[1:]
        check.losses += 1
        if check.losses < MOST_LOSSES:
            return rest
        self._settle(check, self._wrong("crash"), keep=False)
        return rest[1:]

    async def _lost_idle(self, process: WorkerProcess, rest: list[_Check]) -> list[_Check]:
        """The process ended, or stood still, before it began the first check, which is not charged with that."""
        await process.kill()
        rest[0].idle_losses += 1
        if rest[0].idle_losses < MOST_IDLE_LOSSES:
            return rest
        self._lose(rest[0])
        return rest[1:]

    async def _replace(self, process: WorkerProcess) -> bool:
        """A round of tries to start the process anew; False if all failed.

        Raises RuntimeError if rounds went on failing while no process of the pool is alive.
        """
        await process.kill()
        problem: Exception | None = None
        for attempt in range(START_TRIES):
            if attempt:
                await asyncio.sleep(START_PAUSE_S * 2 ** (attempt - 1))
            try:
                await process.start()
            except (ValueError, OSError) as error:  # whatever it is now, this verifier has been loaded before
                problem = error
                self._outage.tries += 1
                continue
            self.counters["restarts"] += 1
            self._outage = _Outage()
            return True
        logger.warning("a verifier process could not be replaced, trying again: %s", problem)
        if not any(other.alive for other in self._processes):
            self._outage.rounds += 1
        if self._outage.rounds >= START_ROUNDS * len(self._processes):
            tries = f"{self._outage.tries} tries in a row"
            raise RuntimeError(f"expected a verifier process to start again, found {tries} failing, last: {problem}")
        return False

    def _score_of(self, reply: dict[str, Any]) -> Score:
        if "memory" in reply:
            return self._wrong("memory")
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

    def _settle(self, check: _Check, score: Score, *, keep: bool) -> None:
        """Answer all callers of a check; `keep` for callers to come too."""
        if keep:
            self._known[check.key] = score
            if len(self._known) > KNOWN:
                self._known.popitem(last=False)
        if not check.score.done():  # its callers may have been cancelled
            check.score.set_result(score)
            del self._outstanding[check.key]

    def _lose(self, check: _Check) -> None:
        if not check.score.done():
            message = "no verifier process could be had for a completion"
            check.score.set_exception(CompletionLost(message, reason="verifier_lost"))
            del self._outstanding[check.key]

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (problem := task.exception()) is not None:
            assert isinstance(problem, Exception)
            self._finish(problem)

    def _finish(self, end: Exception) -> None:
        """From now on every `score`, waiting or new, raises `end`."""
        self._end = end
        for check in self._outstanding.values():
            if not check.score.done():
                check.score.set_exception(end)
        self._outstanding.clear()


def default_workers() -> int:
    """Verifier processes where the recipe names no number: one for each processor, MOST_WORKERS at most."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_WORKERS, cpus)
