"""`environment: verifiers:NAME`: the environments of the library verifiers 0.4, which bring their own loop.

The library lives in a virtual environment of its own, `FOLDER` beside that of this package (`tools/install.sh
environments`). Each environment process starts its environment server there (`verifiers_server.py`), a child that
dies with it, and sends it the runs of its episodes over ZeroMQ:

    run  --[number, "run", request]-->  server  --HTTP, with the episode's key-->  the route for tokens or messages
         <--[number, "delta", part of a trace]--  ...  <--[number, "reply", end]--

Of the traces, rewards and errors count; what is trained is the record that the route keeps. The server has one HTTP
client for all episodes, as it keeps a client for each configuration that it has seen: so the key of an episode
travels with the sampling settings, as `cache_salt`. What fails in the library is the world's failure.

    python -m megatron_scalerl.environments.verifiers NAME > prompts.jsonl    writes the rows of a taskset
"""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import zmq.asyncio

from megatron_scalerl.environments import verifiers_server
from megatron_scalerl.environments.response import Agent
from megatron_scalerl.processes.child_process import race
from megatron_scalerl.processes.parent_death import tied_command
from megatron_scalerl.rewards.pool import PACKAGE_ROOT

FOLDER = ".venv-environments"
Table = dict[str, Any]


class LibraryFailed(RuntimeError):
    """A run has no reward. `status_code`: of HTTP, where the library reports one."""

    def __init__(self, error: Table):
        super().__init__(f"{error['type']}: {error['message']}")
        self.status_code = error.get("status_code")


class Server:
    """An environment server; `ended` is done once it answers no more."""

    def __init__(self, process: asyncio.subprocess.Process, address: str):
        self._process = process
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.connect(address)
        self._runs: dict[bytes, tuple[asyncio.Future[Table], Table]] = {}
        """Reply and traces of each request."""
        self.ended = asyncio.create_task(self._live())

    @classmethod
    async def start(cls, name: str) -> Server:
        """Start a server. Raises ConnectionError if it dies meanwhile."""
        with tempfile.TemporaryDirectory() as folder:  # of this user alone; the connected socket needs no name
            address = f"ipc://{folder}/server"
            server = cls(
                await asyncio.create_subprocess_exec(*tied_command(command("serve", name, address))), address
            )
            await server.run("health", {})
        return server

    async def run(self, method: str, request: Table) -> Table:
        """The reply to a request, with its traces. Raises ConnectionError if the server dies.

        The server goes on with the run of a cancelled caller until its next request, whose key is not known any more.
        """
        number = secrets.token_hex().encode()
        reply: asyncio.Future[Table] = asyncio.get_running_loop().create_future()
        self._runs[number] = (reply, {})
        try:
            await self._socket.send_multipart([number, method.encode(), msgspec.msgpack.encode(request)])
            await asyncio.wait((reply, self.ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._runs[number]
        if not reply.done():
            raise ConnectionError("the environment server has died; its output is in this process's log")
        return reply.result()

    async def _live(self) -> None:
        async with race(self._process.wait(), self._read()):
            self._socket.close(linger=0)
            if self._process.returncode is None:  # it sent something else
                self._process.kill()

    async def _read(self) -> None:
        while True:
            number, kind, data = await self._socket.recv_multipart()
            if number not in self._runs:  # its caller was cancelled
                continue
            part = msgspec.msgpack.decode(data)
            reply, traces = self._runs[number]
            if kind == b"delta":
                trace = traces.setdefault(part["trace"], {"errors": []})
                trace |= part.get("set", {})
                trace["errors"] += part.get("errors", ())
            else:
                part["traces"] = [traces[finished["id"]] for finished in part.get("traces", ())]
                reply.set_result(part)


def reward(reply: Table) -> float:
    """The reward of a run. Raises LibraryFailed."""
    traces = reply["traces"]
    head = reply["head"] or {"ok": False, "errors": [{"type": "the environment server", "message": reply["error"]}]}
    if not head["ok"]:
        raise LibraryFailed([error for part in (*traces, head) for error in part["errors"]][-1])
    rewards = [reward for trace in traces for reward in trace["rewards"].values()]
    # a second agent, such as a user, would be trained with the reward of the first
    if len(traces) != 1 or not rewards or None in rewards:
        problem = f"{len(traces)} agents with rewards {rewards}; an episode needs one, with a score for each reward"
        raise LibraryFailed({"type": "the taskset", "message": problem})
    return sum(reward["score"] * reward["weight"] for reward in rewards)


class Verifiers:
    """The agent of an environment. All episodes of a process share its server, which is replaced if it dies."""

    repeated_failure = "lost"
    name: str
    client: Table
    lock: asyncio.Lock
    """Held while the server starts."""
    server: Server | None = None

    async def run(self, row: Table, agent: Agent) -> float:
        """Play the row's task. Raises LibraryFailed, and ConnectionError if the server dies."""
        kind = type(self)
        async with kind.lock:
            if kind.server is None or kind.server.ended.done():
                kind.server = await Server.start(self.name)
        request = {
            "task_data": row["task_data"],
            "client": {**self.client, "base_url": agent.base_url},
            "model": agent.model,
            "sampling": {"cache_salt": agent.api_key},
        }
        return reward(await kind.server.run("run", request))


def agent_class(name: str) -> type[Verifiers]:
    """The agent class of an environment. Raises ValueError, in one line, if it cannot be used there.

    Raises ModuleNotFoundError without the library.
    """
    done = subprocess.run(command("check", name), stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ValueError(done.stderr.splitlines()[-1])
    client = verifiers_server.tables(name).get("client", {"type": "eval"})
    return type("Verifiers", (Verifiers,), {"name": name, "client": client, "lock": asyncio.Lock()})


def command(*arguments: str) -> list[str]:
    """A command line for the library's half. Raises ModuleNotFoundError without the library."""
    programs = Path(sys.prefix).parent / FOLDER / "bin"
    if not programs.exists():
        raise ModuleNotFoundError(f"verifiers is not installed in {programs.parent}: tools/install.sh environments")
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path != PACKAGE_ROOT]
    variables = [f"PYTHONPATH={os.pathsep.join(paths)}", f"PATH={programs}{os.pathsep}{os.environ['PATH']}"]
    # -P: the folder of the program has a module with the library's name
    return ["env", *variables, f"{programs}/python", "-P", verifiers_server.__file__, *arguments]


if __name__ == "__main__":
    os.execvp("env", command("rows", *sys.argv[1:]))
