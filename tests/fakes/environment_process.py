"""Environment processes in virtual time: the real pool calls them, and a script says what becomes of each call."""

import asyncio

import msgspec

from megatron_scalerl.environments import pool as pools
from megatron_scalerl.environments.response import Agent
from megatron_scalerl.environments.worker import Reply, Request
from megatron_scalerl.recipe.sections import EnvironmentSection

START_S = 0.5


class StandInEnvironmentProcess(pools._Process):
    """A process that takes START_S to start. `script(process, request)`, a coroutine, returns (failure, turn).

    A script may end its process (`crash`), or never return.
    """

    script = None
    declared = ([], "lost", False)
    life = 0
    """Number of its lives so far."""

    async def ready(self):
        async with self._starting:
            if self._writer is None:
                await asyncio.sleep(START_S)
                self.greeting = msgspec.json.encode(self.declared)
                self._counters["restarts"] += self._started
                self._started = True
                self.life += 1
                self._runs = {}
                self._writer = self.transport = self
                self.objects = {}

    def abort(self):
        """End what runs in the process."""
        for run in self._runs.values():
            run.cancel()

    def write(self, line):
        """Begin a call, or close an episode."""
        request = msgspec.json.decode(line, type=Request)
        if request.row is None and request.response is None:
            run = self._runs.pop(request.episode, None)
            if run is not None and self.declared[2]:
                run.cancel()
        else:
            self._runs[request.episode] = asyncio.create_task(self._run(request, self.life))

    async def _run(self, request, life):
        failure, turn = "", b"null"
        try:
            failure, turn = await self.script(request)
        except asyncio.CancelledError:
            failure = "hung"
        if self.life == life and request.number in self.pending:
            error = f"Traceback\nFault: {failure}" if failure else ""
            turn = msgspec.Raw(turn)
            self.pending.pop(request.number).set_result(
                Reply(number=request.number, turn=turn, failure=failure, error=error)
            )

    async def crash(self):
        """The process exits by itself."""
        self._ending = asyncio.create_task(self.end())
        await asyncio.Event().wait()

    async def kill(self):
        self.life += 1
        return 3

    def _processor_s(self):
        return 0.0


class StandInSession:
    """An agent's session, of which nothing is asked."""

    def __init__(self, texts=("x",)):
        self.texts = list(texts)

    def begin(self):
        return Agent(base_url="", api_key="", model="")

    def end(self):
        pass

    async def silent(self):
        await asyncio.Event().wait()

    def responses(self):
        return self.texts


def stand_in_pool(script, folder, *, agent=False, repeated_failure="lost", workers=4):
    """A pool of stand-in processes."""
    kind = type(
        "Scripted", (StandInEnvironmentProcess,), {"script": script, "declared": ([], repeated_failure, agent)}
    )
    process, pools._Process = pools._Process, kind
    try:
        return pools.EnvironmentPool(EnvironmentSection(name="m:C", workers=workers, timeout_s=60.0), logs=folder)
    finally:
        pools._Process = process
