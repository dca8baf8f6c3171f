"""Scores completions in killable processes: whatever a verifier does, every check ends within its time limit.

    score() --slots--> queue --chunks--> N worker tasks, each with one process --> verdicts

Bound: at most `workers * CHUNK * 2` checks are outstanding; further `score` calls wait for a slot. The queue is
filled by `score`, emptied by the worker tasks, and never longer than the slots. A check that hangs, crashes or
raises is wrong, with that reason, and counted; its process is killed and replaced, the checks behind it are
done by the replacement.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections import Counter
from dataclasses import dataclass
from typing import Any

from megatron_scalerl.rewards.process import WorkerDied, WorkerProcess
from megatron_scalerl.types import Prompt, Rollout, Score

logger = logging.getLogger(__name__)

CHUNK = 8
"""Checks that a process gets at once; their verdicts come back one by one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Check:
    request: bytes
    score: asyncio.Future[Score]


class VerifierPool:
    """Verifier processes behind an asyncio interface; `async with` starts and closes it.

    `verifier` is "math" or "module:function" with the signature
    `(answer_text: str, reference: str, extra: dict) -> bool | float`. A bool becomes the reward `correct` or
    `incorrect`; a float is the reward itself and counts as correct from `correct` on. `timeout_s` limits one
    check. `counters` holds: checks, correct, no_answer, truncated, timeout, crash, error, restarts.
    """

    def __init__(
        self,
        verifier: str,
        *,
        workers: int,
        timeout_s: float,
        correct: float = 1.0,
        incorrect: float = -1.0,
        start_timeout_s: float = 300.0,
    ) -> None:
        self._timeout_s = timeout_s
        self._correct = correct
        self._incorrect = incorrect
        self._processes = [WorkerProcess(verifier, start_timeout_s) for _ in range(workers)]
        self._slots = asyncio.Semaphore(workers * CHUNK * 2)
        self._queue: asyncio.Queue[_Check] = asyncio.Queue()
        self._outstanding: set[asyncio.Future[Score]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._end: Exception | None = RuntimeError("the verifier pool was not started")
        self.counters: Counter[str] = Counter()

    async def __aenter__(self) -> VerifierPool:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start all processes. Raises ValueError, in one line, if the verifier cannot be loaded."""
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

        Raises what ended the pool if a process could not be replaced, RuntimeError after `close`.
        """
        self.counters["checks"] += 1
        if rollout.truncated:
            return self._wrong("truncated")
        if text_after_thinking is None or not text_after_thinking.strip():
            return self._wrong("no_answer")
        request = pickle.dumps((text_after_thinking, prompt.answer, dict(prompt.extra)))
        async with self._slots:
            if self._end is not None:
                raise self._end
            check = _Check(request=request, score=asyncio.get_running_loop().create_future())
            self._outstanding.add(check.score)
            self._queue.put_nowait(check)
            try:
                return await check.score
            finally:
                self._outstanding.discard(check.score)

    async def close(self) -> None:
        """Kill all processes and fail what is outstanding; may be called twice."""
        self._finish(RuntimeError("the verifier pool is closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(process.kill() for process in self._processes))

    async def _work(self, process: WorkerProcess) -> None:
        """One process's life: take a chunk, send it, set its scores; on failure go on with the rest."""
        while True:
            chunk = await self._next_chunk()
            while chunk:
                chunk = await self._check(process, chunk)

    async def _next_chunk(self) -> list[_Check]:
        """At most CHUNK checks, and no more than this process's share of what waits."""
        first = await self._queue.get()
        share = -(-self._queue.qsize() // len(self._processes))
        rest = [self._queue.get_nowait() for _ in range(min(CHUNK - 1, share))]
        return [check for check in [first, *rest] if not check.score.done()]

    async def _check(self, process: WorkerProcess, chunk: list[_Check]) -> list[_Check]:
        """Score a chunk; returns the checks behind one that hung or crashed its process."""
        if not process.alive:  # it died idle, which is no completion's fault
            await self._replace(process)
        try:
            await process.send_checks([check.request for check in chunk], self._timeout_s)
        except TimeoutError:
            return await self._give_up(process, chunk, "timeout")
        except WorkerDied:
            return await self._give_up(process, chunk, "crash")
        for index, check in enumerate(chunk):
            try:
                reply = await process.reply(self._timeout_s)
            except TimeoutError:
                return await self._give_up(process, chunk[index:], "timeout")
            except WorkerDied:
                return await self._give_up(process, chunk[index:], "crash")
            self._settle(check, self._score_of(reply))
        return []

    async def _give_up(self, process: WorkerProcess, chunk: list[_Check], reason: str) -> list[_Check]:
        self._settle(chunk[0], self._wrong(reason))
        await self._replace(process)
        return chunk[1:]

    async def _replace(self, process: WorkerProcess) -> None:
        self.counters["restarts"] += 1
        await process.kill()
        await process.start()

    def _score_of(self, reply: dict[str, Any]) -> Score:
        if "error" in reply:
            if not self.counters["error"]:
                logger.warning("the verifier raised; the completion counts as wrong:\n%s", reply["error"])
            return self._wrong("error")
        value = reply["value"]
        is_correct = value if isinstance(value, bool) else value >= self._correct
        if is_correct:
            self.counters["correct"] += 1
        if isinstance(value, bool):
            return Score(correct=value, reward=self._correct if value else self._incorrect)
        return Score(correct=is_correct, reward=value)

    def _wrong(self, reason: str) -> Score:
        self.counters[reason] += 1
        return Score(correct=False, reward=self._incorrect, reason=reason)

    @staticmethod
    def _settle(check: _Check, score: Score) -> None:
        if not check.score.done():  # its caller may have been cancelled
            check.score.set_result(score)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (problem := task.exception()) is not None:
            assert isinstance(problem, Exception)
            self._finish(problem)

    def _finish(self, end: Exception) -> None:
        """From now on every `score`, waiting or new, raises `end`."""
        self._end = end
        for future in self._outstanding:
            if not future.done():
                future.set_exception(end)
