"""Scores completions in killable processes: whatever a verifier does, every check ends within the limits.

    score() --> processes.worker_pool --one check at a time--> process --> score

`processes.worker_pool` starts and replaces the processes. A process works on one check at a time, but on many if the
verifier is a coroutine function; all processes work on at most `rewards.concurrency` checks then. Calls of `score`
wait for a process in the order of the calls, and hold nothing but one check.

Outcomes of a check other than the verifier's return value:

* An answer that exceeds a limit (time, processor time, memory) is wrong, with the limit as the reason.
* A check fails where the verifier raises or returns no reward (`error`), where two processes in a row die during the
  check (`crash`), and where the service that the verifier asks fails in all TRIES tries (`unavailable`):
  VerifierUnavailable (the code verifier without a sandbox), a judge that cannot be reached or answers 408, 429 or 5xx
  (`worker.is_unavailable`), a user's verifier that waited until the wall-clock limit, and a coroutine function that
  gave no reward, whatever the function raised (`worker.run_judge`).
* After a failed check the pool asks the verifier about a different text (`_works`), and then about the answer again.
  If the verifier works for the text and fails for the answer, the answer is wrong, with the reason of the failure: an
  answer must not escape a score by breaking the verifier. Else the check is lost (CompletionLost), without a reward.
* The run ends (RuntimeError) after MAX_UNAVAILABLE lost checks in a row; if more than half of the last RECENT checks
  are lost (`outages`); or if the verifier raised for the references of MOST_ROWS rows (`_count`).
* A check whose process died is repeated in a process that runs no second check meanwhile, as are further tries of a
  check that exceeded the wall-clock limit. Checks that had not begun in the dead process go to another process.
* If no process can replace a dead process, the current check is lost (CompletionLost). The living processes continue;
  without a living process the run ends (RuntimeError).

Identical checks (same text, reference and extra columns) run once, so a verifier must depend on its arguments alone.
The scores of CACHE_SIZE checks are cached. A result that may differ next time (after a raised error, a crash, or the
wall-clock limit) is not cached, and goes only to callers that wait already.

Each task has a pool (`TaskPools`), so that slow tasks do not hold up fast tasks.

Worst case of n different checks that all exceed the limit of processor time: n * (cpu_s + R) / workers seconds on
dedicated CPUs, with R about 0.5 s for the replacement of a process: 48 prompts x 16 completions with cpu_s 2 take 16
minutes with 2 workers and 4 minutes with 8. The limit of a check does not include the wait for a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import pickle
import random
import signal
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from megatron_scalerl.processes.child_process import ProcessDied
from megatron_scalerl.processes.worker_pool import Program, WorkerDied, WorkerPool
from megatron_scalerl.recipe.sections import RewardsSection
from megatron_scalerl.recipe.tasks import AUDITS, Task
from megatron_scalerl.rewards import outages
from megatron_scalerl.rewards.forms import forms_of
from megatron_scalerl.rewards.length_penalty import penalized
from megatron_scalerl.rewards.limits import Limits
from megatron_scalerl.rewards.sandbox import PACKAGE_ROOT
from megatron_scalerl.rewards.worker import Outcome, Setup
from megatron_scalerl.types import CompletionLost, Prompt, Score

logger = logging.getLogger(__name__)

CACHE_SIZE = 4096
"""Number of cached scores. The least recently used score is evicted first."""
MAX_DEFAULT_WORKERS = 8
"""Largest number of verifier processes if the recipe sets no number."""
MOST_ROWS = 16
"""Number of distinct rows, among the latest checks, for whose reference the verifier raised, that ends the pool."""
WAITING_SHARE = 0.1
"""Share of the wall-clock limit. A late check with less processor time than this share has waited for a service."""
INHERITED = (
    "PATH",
    "HOME",
    "LANG",
    "LANGUAGE",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "PYTHONHOME",
)
"""Environment variables that a verifier inherits, besides LC_* and `rewards.variables`."""
_Kind = tuple[bool, bool]
"""Kind of a check: (whether the verifier waited, as for a judge; whether the reward was above `incorrect`)."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Check:
    """A check in progress; callers of an identical check also await `score`."""

    score: asyncio.Task[Score]
    callers: int = 0


class VerifierPool:
    """Verifier processes behind an asyncio interface; `async with` starts and closes the pool.

    The verifier is "math", "code" or "module:function" with the signature
    `(answer_text: str, reference: str, extra: dict) -> bool | float`. A bool becomes the reward `correct` or
    `incorrect`; a float is the reward and counts as correct from `correct` on.
    """

    def __init__(self, rewards: RewardsSection, *, start_timeout_s: float = 300.0):
        """Raises ValueError if a variable of `rewards.variables` is not set."""
        self._rewards = rewards
        setup = Setup(verifier=rewards.verifier, limits=limits_of(rewards), timeout_s=rewards.timeout_s)
        program = Program(
            name="verifier",
            module="megatron_scalerl.rewards.worker",
            setup=msgspec.json.encode(setup),
            environment=child_environment("rewards.variables", rewards.variables),
            subject=f"rewards.verifier {rewards.verifier!r}",
            timeout_s=rewards.timeout_s,
            start_timeout_s=start_timeout_s,
            concurrency=rewards.concurrency,
        )
        self._workers = WorkerPool(
            program,
            rewards.workers or default_workers(),
            Outcome,
            settles=lambda death: self._exceeded(death) != "",
        )
        self._first_tries = 0
        """Number of checks whose first try is in progress."""
        self._first_try_ended = asyncio.Event()
        """Event that is set as soon as the first try of any check ends; a new event then replaces this event."""
        self._made_s = 0.0
        """Start of the latest first try that gave a reward (time of the event loop)."""
        self._rewarded: dict[_Kind, bytes] = {}
        """Kind of check -> the latest request of this kind that gave a reward."""
        self._outstanding: dict[bytes, _Check] = {}
        self._cache: OrderedDict[bytes, Score] = OrderedDict()
        self._outages = outages.Outages("checks")
        self._failed_rows: deque[bytes] = deque(maxlen=outages.RECENT)
        """For each recent check, the digest of the row if the verifier raised for the row's reference, else empty."""
        self._failure_shown = False

    async def __aenter__(self) -> VerifierPool:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start all processes.

        Raises, in one line, ValueError if the verifier cannot be loaded, and OSError if the system starts no process.
        """
        try:
            await self._workers.start()
        except ProcessDied as problem:
            raise ValueError(str(problem)) from None

    async def close(self) -> None:
        """Kill all processes and fail outstanding checks; may be called twice."""
        await self._workers.close()

    async def score(
        self, text_after_thinking: str | None, prompt: Prompt, *, truncated: bool = False, tokens: int = 0
    ) -> Score:
        """The score of one completion. A truncated completion, None and a blank text count as wrong.

        tokens: number of tokens that the policy sampled, for rewards.length_penalty.
        Raises CompletionLost (`verifier_lost`) if no process could be started or the check could not be made, and
        RuntimeError if the pool is closed or has ended after many lost checks.
        """
        if truncated:
            score = self._wrong("truncated")
        elif text_after_thinking is None or not text_after_thinking.strip():
            score = self._wrong("no_answer")
        else:
            score = await self._score_once(text_after_thinking, *_row(prompt))
        return penalized(score, tokens, self._rewards.length_penalty)

    def paid(self, value: bool | float, prompt: Prompt, *, tokens: int) -> Score:
        """The score of an episode that the environment has judged.

        value: a bool or a number, as a verifier returns. tokens: number of tokens that the policy sampled.
        """
        return penalized(self._score_of(Outcome(value=value)), tokens, self._rewards.length_penalty)

    async def problem_of(self, prompt: Prompt) -> str:
        """The reason why no answer to a prompt may be rewarded, such as unusable tests; empty for a usable prompt.

        Always empty with a user's verifier. Raises as `score`.
        """
        if self._asks_others:
            return ""
        row = (self._rewards.verifier, prompt.text, prompt.answer, dict(prompt.extra))
        return (await self._score_once(None, *row)).reason

    async def outcome(self, text: str, prompt: Prompt) -> Outcome:
        """The outcome of a new check, without the cache. Raises CompletionLost if no process takes the text."""
        return await self._try(pickle.dumps((text, *_row(prompt))))

    async def _score_once(self, text: str | None, *row: Any) -> Score:
        """The score of a text for a row, from the cache, from an identical check in progress, or from a new check."""
        request = pickle.dumps((text, *row))
        key = hashlib.sha256(request).digest()
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        if key not in self._outstanding:
            forms = []
            if text is not None and self._asks_others:
                forms = [pickle.dumps((form, *row)) for form in forms_of(*row)]
            self._outstanding[key] = _Check(score=asyncio.create_task(self._check(key, request, forms)))
        check = self._outstanding[key]
        check.callers += 1
        # The shield keeps the check going for the remaining callers when one caller is cancelled.
        try:
            return await asyncio.shield(check.score)
        finally:
            check.callers -= 1
            if not check.callers:  # this was the last caller: the check is done, or all callers were cancelled
                check.score.cancel()
                del self._outstanding[key]

    async def _check(self, key: bytes, request: bytes, forms: Sequence[bytes]) -> Score:
        """Run a check and cache the score, unless the score may differ next time. Raises CompletionLost if lost.

        forms: requests to check the row's reference itself, in several forms.
        """
        outcome = await self._first_try(request)
        ended_s = asyncio.get_running_loop().time()
        for pause_s in outages.PAUSES_S[: outages.TRIES - 1]:
            if not outcome.unavailable:
                break
            # The pause is random, so that checks that failed together do not meet again.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
            outcome = await self._try(request, alone=outcome.limit != "")
        if outcome.failed:
            outcome = await self._asked_again(outcome, ended_s, request, forms)
        self._count("")
        score = self._score_of(outcome)
        if outcome.value is not None:
            self._rewarded[self._kind(outcome)] = request
        if not outcome.error and not outcome.unavailable:
            self._cache[key] = score
            if len(self._cache) > CACHE_SIZE:
                self._cache.popitem(last=False)
        return score

    async def _first_try(self, request: bytes) -> Outcome:
        """The outcome of a check's first try (`_try`). If the try gave a reward, records when the try began."""
        begins = [0.0]
        clock = asyncio.get_running_loop().time
        self._first_tries += 1
        try:
            outcome = await self._try(request, begun=lambda: begins.append(clock()))
            if outcome.value is not None:
                self._made_s = max(self._made_s, begins[-1])
        finally:
            self._first_tries -= 1
            self._first_try_ended.set()
            self._first_try_ended = asyncio.Event()
        return outcome

    async def _asked_again(self, failure: Outcome, since_s: float, request: bytes, forms: Sequence[bytes]) -> Outcome:
        """The outcome of one more try of a failed check, if the verifier works for a different text; else raises
        CompletionLost.

        since_s: end of the first try (time of the event loop).
        """
        if not failure.unavailable:
            since_s = 0.0
        if (failure.raised or await self._others_succeed(since_s)) and await self._works(failure, request, forms):
            outcome = await self._try(request, alone=failure.limit != "")
            if failure.unavailable or not outcome.unavailable:
                return outcome
            failure = outcome
        row = b""
        if failure.raised and forms:
            row = hashlib.sha256(forms[0]).digest()
        self._count(failure.reason, row)
        raise CompletionLost(failure.reason.strip().splitlines()[-1], reason="verifier_lost")

    async def _others_succeed(self, since_s: float) -> bool:
        """Whether a check begun after `since_s` gave a reward; waits up to `timeout_s` for checks in progress."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._rewards.timeout_s):
                while self._first_tries and self._made_s <= since_s:
                    await self._first_try_ended.wait()
        return self._made_s > since_s

    async def _works(self, failure: Outcome, failed: bytes, forms: Sequence[bytes]) -> bool:
        """Whether the verifier, asked now, gives a reward for a text that differs from the failed request's text.

        The text is the latest answer that got a reward; if the verifier raised, forms of the row's reference are
        tried first. Many verifiers accept or reject some texts without asking a judge, so the check of such a text
        does not show that the judge works. So an answer whose check waited is preferred, and a form whose check did
        not wait counts only with a reward above the reward of a wrong answer.
        """
        best = max(self._rewarded, default=(False, False))
        if failure.raised:
            for form in forms:
                outcome = await self._try(form)
                if outcome.limit:
                    return False
                if outcome.value is not None and self._kind(outcome) >= max(best, (False, True)):
                    return True
        if best == (False, False) or self._rewarded[best] == failed:
            return False
        return (await self._try(self._rewarded[best])).value is not None

    def _kind(self, outcome: Outcome) -> _Kind:
        return outcome.waited, self._score_of(outcome).reward > self._rewards.incorrect

    async def _try(self, request: bytes, *, alone: bool = False, begun: Callable[[], None] = lambda: None) -> Outcome:
        """The outcome of one try of a check. Raises CompletionLost if no process took the request.

        If the process died, the outcome has a `limit`, and an `error` if a retry may differ. alone, begun: as for
        `WorkerPool.ask`.
        """
        try:
            outcome, _ = await self._workers.ask(b"", request, alone=alone, begun=begun)
        except WorkerDied as death:
            if not death.read:
                reason = f"no verifier process took a completion: {death}"
                if death.late or death.code is not None:
                    # A request that failed only because no process could be started is not counted.
                    self._count(reason)
                raise CompletionLost(reason, reason="verifier_lost") from None
            limit = self._exceeded(death) or "crash"
            error = str(death) if death.late or limit == "crash" else ""
            reason = ""
            if death.late and death.busy < WAITING_SHARE and self._asks_others:
                reason = f"{self._rewards.verifier}: {death}, mostly spent on waiting for a service"
            return Outcome(limit=limit, error=error, unavailable=reason)
        return outcome

    @property
    def _asks_others(self) -> bool:
        """Whether the verifier is a user's function, which may wait for a service such as a judge."""
        return ":" in self._rewards.verifier

    def _exceeded(self, death: WorkerDied) -> str:
        """The limit that ended a process, `timeout` or `memory`; empty if no limit ended the process."""
        if not death.read:
            return ""
        if death.late or death.code == -signal.SIGPROF:
            return "timeout"
        return "memory" if death.code == -signal.SIGABRT and self._rewards.memory_mb is not None else ""

    def _count(self, reason: str, row: bytes = b"") -> None:
        """Count a scored check, or a check that is lost for a `reason`; ends the pool if too many checks are lost.

        row: digest of the check's row if the verifier raised for the row's reference as well, else empty.
        """
        end = self._outages.ended(reason)
        self._failed_rows.append(row)
        if row and len({*self._failed_rows} - {b""}) >= MOST_ROWS:
            end = RuntimeError(
                f"rewards.verifier {self._rewards.verifier!r} failed for {MOST_ROWS} rows among the latest "
                f"{outages.RECENT} checks, even when the answer was the reference; the last failure:\n{reason}"
            )
        if end is not None:
            self._workers.end(end)

    def _score_of(self, outcome: Outcome) -> Score:
        if outcome.failed and not self._failure_shown:
            self._failure_shown = True
            logger.warning("the verifier failed for an answer, which counts as wrong:\n%s", outcome.reason)
        if outcome.unavailable:
            return self._wrong("unavailable")
        if outcome.limit:
            return self._wrong(outcome.limit)
        if outcome.unusable:
            return self._wrong(outcome.unusable)
        value = outcome.value
        if value is None:
            return self._wrong("error")
        if isinstance(value, bool):
            return Score(correct=value, reward=self._rewards.correct if value else self._rewards.incorrect)
        return Score(correct=value >= self._rewards.correct, reward=value)

    def _wrong(self, reason: str) -> Score:
        return Score(correct=False, reward=self._rewards.incorrect, reason=reason)


def _row(prompt: Prompt) -> tuple[str, dict[str, Any]]:
    """(reference, extra) of a prompt, the second and third argument of a verifier."""
    return prompt.answer, {**prompt.extra, "prompt": prompt.text}


def child_environment(setting: str, passed: Sequence[str]) -> dict[str, str]:
    """The environment variables of a process with the user's code: `INHERITED`, LC_*, and the variables in `passed`.

    The process gets no access tokens and keys that the recipe does not name.

    setting: key of the recipe with the list `passed`. Raises ValueError if a variable of `passed` is not set.
    """
    for name in passed:
        if name not in os.environ:
            raise ValueError(f"{setting}: the environment variable {name!r} is not set")
    path = os.pathsep.join(filter(None, (PACKAGE_ROOT, os.environ.get("PYTHONPATH"))))
    inherited = {n: v for n, v in os.environ.items() if n in INHERITED or n.startswith("LC_") or n in passed}
    # PYTHONUNBUFFERED: output that a process wrote before a kill is not lost.
    return {"OMP_NUM_THREADS": "1", **inherited, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def limits_of(rewards: RewardsSection) -> Limits:
    """The resource limits of a check, from the recipe's `rewards`."""
    return Limits(cpu_s=rewards.cpu_s, memory_mb=rewards.memory_mb, file_mb=rewards.file_mb)


def default_workers() -> int:
    """Number of verifier processes by default: one per processor, at most MAX_DEFAULT_WORKERS."""
    return min(MAX_DEFAULT_WORKERS, len(os.sched_getaffinity(0)))


def _audit_pool(task: Task) -> VerifierPool:
    """The pool of a task's second judge, which is called as a verifier is. A built-in judge gets one process."""
    settings: dict[str, object] = {"verifier": task.audit, "length_penalty": None, "truncated": "exclude"}
    if task.audit in AUDITS.values():
        settings["workers"] = 1
    return VerifierPool(task.rewards.model_copy(update=settings))


class TaskPools:
    """Scores each completion in the pool of the prompt's task; `async with` starts and closes the pools.

    The task's second judge also checks each correct answer; the verdict, `Score.confirmed`, changes no reward.
    """

    def __init__(self, tasks: Sequence[Task]):
        self._pools = {task.name: VerifierPool(task.rewards) for task in tasks}
        self._audits = {task.name: _audit_pool(task) for task in tasks if task.audit}
        self._running = contextlib.AsyncExitStack()

    async def __aenter__(self) -> TaskPools:
        """Start all pools. If a pool does not start, closes the started pools and raises as `VerifierPool.start`."""
        async with contextlib.AsyncExitStack() as started:
            for pool in (*self._pools.values(), *self._audits.values()):
                await started.enter_async_context(pool)
            self._running = started.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._running.aclose()

    async def score(
        self, text_after_thinking: str | None, prompt: Prompt, *, truncated: bool = False, tokens: int = 0
    ) -> Score:
        """The score of a completion; raises as `VerifierPool.score`."""
        score = await self._pools[prompt.task].score(text_after_thinking, prompt, truncated=truncated, tokens=tokens)
        if not score.correct or prompt.task not in self._audits:
            return score
        try:
            verdict = await self._audits[prompt.task].score(text_after_thinking, prompt)
        except CompletionLost as lost:
            logger.warning("validation.audit: the second judge gave no verdict on an answer: %s", lost)
            return score
        except RuntimeError as ended:  # the run goes on without the second judge, which changes no reward
            logger.warning("validation.audit: the second judge failed too often, and is not used any more: %s", ended)
            self._audits.pop(prompt.task, None)
            return score
        return replace(score, confirmed=verdict.correct)

    def paid(self, value: bool | float, prompt: Prompt, *, tokens: int) -> Score:
        """The score of an episode that the environment has judged (`VerifierPool.paid`)."""
        return self._pools[prompt.task].paid(value, prompt, tokens=tokens)

    async def problem_of(self, prompt: Prompt) -> str:
        """The reason why no answer to a prompt may be rewarded; empty for a usable prompt. Raises as `score`."""
        return await self._pools[prompt.task].problem_of(prompt)
