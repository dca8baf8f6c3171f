"""Runs environments of the library verifiers 0.4 (`environment: verifiers:NAME`). The library's agents ask for turns.

The library lives in a separate virtual environment, `FOLDER` beside this package's (`tools/install.sh environments`).
Each environment process starts an environment server there (`verifiers_server.py`) and sends the server the runs of
all episodes over ZeroMQ. Server and harness programs end with the environment process.

    run  --[number, "run", request]-->  server  --HTTP, with the episode's key-->  the route for tokens or messages
         <--[number, "delta", part of a trace]--  ...  <--[number, "reply", end]--
         --[number, "cancel", the run's number]-->  if the run's caller was cancelled

Of the library's traces only rewards and errors are used: the policy is trained on the requests that `rollouts.agents`
records. The server keeps an HTTP client for each configuration of a request. So that all episodes share one client,
the key of an episode is sent with the sampling settings, as `cache_salt`. An episode in which the library fails is
lost.

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
from megatron_scalerl.environments.response import ROUTE_HEADER, Agent
from megatron_scalerl.processes.child_process import ProcessDied, race
from megatron_scalerl.processes.subreaper import END, subreaper_command
from megatron_scalerl.rewards.sandbox import PACKAGE_ROOT

FOLDER = ".venv-environments"
START_S = 240.0
"""Time limit for the first answer of an environment server after the start (s)."""
Table = dict[str, Any]


class LibraryFailed(RuntimeError):
    """The library ended a run without a reward.

    `status_code`: the HTTP status that the library reports for the failure; None without a status.
    """

    def __init__(self, error: Table):
        super().__init__(f"{error['type']}: {error['message']}")
        self.status_code = error.get("status_code")


class Server:
    """A process that serves an environment of the library. Requests may be sent before the process is ready.

    `life_task`: task that runs as long as the process, and then raises an exception with the reason of the end.
    """

    def __init__(self, name: str):
        self._name = name
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 0
        # 0: the socket's queue has no limit, so that sending does not wait until the server has started.
        self._socket.sndhwm = 0
        self._runs: dict[str, tuple[asyncio.Future[Table], Table]] = {}
        """Number of a request -> (future of the reply, traces received so far)."""
        self.life_task = asyncio.create_task(self._live())

    async def ask(self, method: str, request: Table) -> Table:
        """The server's reply to a request, with the traces of a run. Raises ConnectionError if the server ends."""
        number = secrets.token_hex()
        reply: asyncio.Future[Table] = asyncio.get_running_loop().create_future()
        self._runs[number] = (reply, {})
        try:
            # `sending` is done once the socket has been connected.
            sending = self._send(number, method, request)
            await asyncio.wait((sending, self.life_task), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait((reply, self.life_task), return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._runs[number]
            # Without a reply and with a living server, the caller was cancelled during the run.
            if not (reply.done() or self.life_task.done()):
                await self._send("", "cancel", {"request_id": number})
        if not reply.done():
            problem = self.life_task.exception()
            raise ConnectionError(
                f"environment.name 'verifiers:{self._name}': the environment server has ended "
                f"({type(problem).__name__}: {problem}); the log of the environment process has the server's output"
            )
        return reply.result()

    def _send(self, number: str, method: str, request: Table) -> Any:
        return self._socket.send_multipart([number.encode(), method.encode(), msgspec.msgpack.encode(request)])

    async def _live(self) -> None:
        with self._socket:
            # Only this user can enter the folder. In /tmp, since a socket's path has at most 107 characters.
            folder = tempfile.mkdtemp(dir="/tmp")
            address = f"ipc://{folder}/server"
            server = command("serve", self._name, address)
            self._socket.connect(address)
            process = await asyncio.create_subprocess_exec(*subreaper_command(folder, server), start_new_session=True)
            try:
                async with race(self._read(), process.wait()) as (reading, _):
                    if reading.done():
                        reading.result()
                    raise ProcessDied("the server's process exited")
            finally:
                if process.returncode is None:
                    process.send_signal(END)

    async def _read(self) -> None:
        await self._send("", "health", {})
        if not await self._socket.poll(START_S * 1000):
            raise TimeoutError(f"no answer within {START_S:g} s of the start")
        while True:
            number, kind, data = await self._socket.recv_multipart()
            # A message for a run whose caller was cancelled is dropped.
            if number.decode() not in self._runs:
                continue
            part = msgspec.msgpack.decode(data)
            reply, traces = self._runs[number.decode()]
            if kind == b"delta":
                trace = traces.setdefault(part["trace"], {"errors": []})
                trace |= part.get("set", {})
                trace["errors"] += part.get("errors", ())
            else:
                part["traces"] = [traces[finished["id"]] for finished in part.get("traces", ())]
                reply.set_result(part)


def verdict(reply: Table) -> tuple[float, Table]:
    """(reward of a run; metrics, with the parts of the reward). Raises LibraryFailed if there is no reward."""
    traces = reply["traces"]
    unknown = {"type": "the environment server", "message": reply["error"]}
    head = reply.get("head") or {"ok": False, "errors": []}
    if not head["ok"]:
        raise LibraryFailed([unknown, *(error for part in (*traces, head) for error in part["errors"])][-1])
    rewards_by_name = {name: reward for trace in traces for name, reward in (trace.get("rewards") or {}).items()}
    rewards = list(rewards_by_name.values())
    # With a second agent, such as a simulated user, both agents' turns would get the reward of the first agent.
    if len(traces) != 1 or not rewards or None in rewards:
        problem = f"an episode needs one agent with scored rewards; found {len(traces)} agents, rewards {rewards}"
        raise LibraryFailed({"type": "the taskset", "message": problem})
    metrics = {name: value for name, value in (traces[0].get("metrics") or {}).items() if value is not None}
    scores = {name: reward["score"] for name, reward in rewards_by_name.items()}
    return sum(reward["score"] * reward["weight"] for reward in rewards), metrics | scores


class Verifiers:
    """Runs the library's agent for a row. All episodes of a process share a server, which is replaced if dead."""

    name: str
    client: Table
    server: Server | None = None

    async def run(self, row: Table, agent: Agent) -> tuple[float, Table]:
        """(reward, metrics) of a run of the row. Raises LibraryFailed, or ConnectionError if the server ends."""
        headers = {**self.client.get("headers", {}), ROUTE_HEADER: agent.route_key}
        request = {
            "task_data": row["task_data"],
            "client": {**self.client, "base_url": agent.base_url, "headers": headers},
            "model": agent.model,
            "sampling": {"cache_salt": agent.api_key},
        }
        return verdict(await self.ask("run", request))

    @classmethod
    async def ask(cls, method: str, request: Table) -> Table:
        """The server's reply to a request. Starts a server if no server runs."""
        if cls.server is None or cls.server.life_task.done():
            cls.server = Server(cls.name)
        return await cls.server.ask(method, request)

    @classmethod
    async def start_server(cls) -> None:
        """Start the server, and return once the server answers. Raises ConnectionError if the server ends."""
        await cls.ask("health", {})


def agent_class(name: str) -> type[Verifiers]:
    """The subclass of Verifiers for an environment of the library.

    Raises ValueError, in one line, if the library refuses the environment, and ModuleNotFoundError without the
    library.
    """
    done = subprocess.run(command("check", name), stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ValueError([f"exit code {done.returncode}", *done.stderr.splitlines()][-1])
    client = verifiers_server.tables(name).get("client", {"type": "eval"})
    return type("Verifiers", (Verifiers,), {"name": name, "client": client})


def command(*arguments: str) -> list[str]:
    """The command line that runs `verifiers_server.py` with these arguments in the library's virtual environment.

    Raises ModuleNotFoundError without the library.
    """
    programs = Path(sys.prefix).parent / FOLDER / "bin"
    if not programs.exists():
        raise ModuleNotFoundError(f"no library verifiers in {programs.parent}; run tools/install.sh environments")
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path != PACKAGE_ROOT]
    variables = [f"PYTHONPATH={os.pathsep.join(paths)}", f"PATH={programs}{os.pathsep}{os.environ['PATH']}"]
    # -P keeps the program's folder off the path, since the folder has a module with the library's name.
    return ["env", *variables, f"{programs}/python", "-P", verifiers_server.__file__, *arguments]


if __name__ == "__main__":
    os.execvp("env", command("rows", *sys.argv[1:]))
