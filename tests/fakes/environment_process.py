"""Environment processes in virtual time: the real pool calls them, and a script says what becomes of each call."""

import asyncio
from types import MappingProxyType

import msgspec

from megatron_scalerl.environments import pool as pools
from megatron_scalerl.environments.response import Agent
from megatron_scalerl.environments.worker import Reply, Request
from megatron_scalerl.processes.worker import REPLY
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
    calls = MappingProxyType({})

    async def start(self):
        await asyncio.sleep(START_S)
        self.greeting = msgspec.json.encode(self.declared)
        self.life += 1
        self.calls = {}
        self.objects = {}

    def send(self, number, head, body=b""):
        """Begin a call, or close an episode."""
        request = msgspec.json.decode(head, type=Request)
        reply = asyncio.get_running_loop().create_future()
        if number:
            self._replies[number] = reply
            self.calls[request.episode] = asyncio.create_task(self._run(number, request))
        else:
            call = self.calls.pop(request.episode, None)
            if call is not None and self.declared[2]:
                call.cancel()
        return reply

    async def _run(self, number, request):
        failure, turn = "", b"null"
        try:
            failure, turn = await self.script(request)
        except asyncio.CancelledError:
            failure = "hung"
        if number in self._replies:
            error = f"Traceback\nFault: {failure}" if failure else ""
            reply = Reply(turn=msgspec.Raw(turn), failure=failure, error=error)
            self._replies.pop(number).set_result((REPLY, msgspec.json.encode(reply), b""))

    async def crash(self):
        """The process exits by itself."""
        self.connection_lost(None)
        await asyncio.Event().wait()

    async def kill(self):
        for call in self.calls.values():
            call.cancel()
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


def stand_in_pool(script, folder, *, agent, repeated_failure, workers=4):
    """A pool of stand-in processes."""
    kind = type(
        "Scripted", (StandInEnvironmentProcess,), {"script": script, "declared": ([], repeated_failure, agent)}
    )
    process, pools._Process = pools._Process, kind
    try:
        return pools.EnvironmentPool(EnvironmentSection(name="m:C", workers=workers, timeout_s=60.0), logs=folder)
    finally:
        pools._Process = process
