"""Verifier processes in virtual time, in place of a pool of them: a judge that fails during an outage."""

import asyncio
import pickle
import signal

from megatron_scalerl.processes.worker_pool import WorkerDied
from megatron_scalerl.rewards.limits import Limits
from megatron_scalerl.rewards.worker import Outcome, is_judge, run_check, run_judge


class StandInWorkers:
    """Answers the requests of a `VerifierPool`; an answer in words that begins with "judge" is asked about.

    The verifier rejects other answers itself. The judge is called `calls` times, for a second each, and says yes. It
    fails in an outage, and for an answer that "breaks" it.
    """

    def __init__(self, kind, calls, outage):
        """kind: raised, unavailable or died. outage: its begin and end (s)."""
        self._kind = kind
        self._calls = calls
        self._begin, self._end = outage
        self.requests = 0
        self.ended = None

    def end(self, problem):
        self.ended = problem

    async def ask(self, head, body, *, alone=False, begun=lambda: None):
        if self.ended is not None:
            raise self.ended
        self.requests += 1
        begun()
        await asyncio.sleep(0.01)
        text = pickle.loads(body)[0]
        if not text.startswith(("judge", "\\boxed{judge")):
            return Outcome(value=False), b""
        for _ in range(self._calls):
            broken = "breaks" in text or self._begin <= asyncio.get_running_loop().time() < self._end
            if broken:
                return self._failed(), b""
            await asyncio.sleep(1.0 / self._calls)
        return Outcome(value=True, waited=True), b""

    def _failed(self):
        if self._kind == "died":
            raise WorkerDied("its exit", read=True, unanswered_requests=True, code=-signal.SIGKILL)
        if self._kind == "unavailable":
            return Outcome(unavailable="HTTP 503")
        return Outcome(error="Traceback:\nKeyError: 'choices'")


class WorkersInThisProcess:
    """Runs a verifier as its worker does, in the process and the time of the test."""

    def __init__(self, verifier):
        self._verifier = verifier
        self.ended = None

    async def start(self):
        pass

    async def close(self):
        pass

    def end(self, problem):
        self.ended = self.ended or problem

    async def ask(self, head, body, *, alone=False, begun=lambda: None):
        begun()
        await asyncio.sleep(0)
        if is_judge(self._verifier):
            return await run_judge(self._verifier, body, 60.0), b""
        return run_check(self._verifier, body, Limits(cpu_s=60.0, memory_mb=None, file_mb=0)), b""
