"""Decodes the responses of engines in processes, so that the controller's event loop sees facts and opaque bytes.

    generate --slots--> decode() --> queue --> one task per process --> Decoded

Bound: a response's body is read only once it has one of `SLOTS * workers` slots, which it keeps until it is decoded,
so at most that many bodies are in memory, and in each process the one that it works on. Bodies that wait stay in the
sockets' buffers (128 KiB each in this process), and the engines' servers wait with them. `decode` fills the queue and
the tasks empty it; it is never longer than the number of slots. `close` fails what is outstanding.

A process that dies or does not answer within TIMEOUT_S is replaced, and the body that it had is decoded again. A body
with which MAX_LOSSES processes ended is lost (CompletionLost, `decoder_lost`). Where MAX_LOST_IN_A_ROW bodies are
lost with none decoded in between, or no process starts in START_TRIES tries, the run ends (RuntimeError).

Not concurrent.futures: where its process is killed while it writes a result, the thread that reads results waits
forever, and with it the exit of the controller.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections import Counter
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from transformers import PreTrainedTokenizerBase

from megatron_scalerl.engine.answers import EngineError
from megatron_scalerl.engine.interruption import Plan
from megatron_scalerl.processes.child_process import ChildProcess, ProcessDied, log_end, within
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rewards.pool import default_workers
from megatron_scalerl.rollouts.decoder import SIZES, SOCKET_VARIABLE, Job, Reply, Setup, frame
from megatron_scalerl.rollouts.plans import Plans
from megatron_scalerl.types import Completion, CompletionLost

logger = logging.getLogger(__name__)

SLOTS = 4
"""Bodies in memory per decoder process."""
TIMEOUT_S = 60.0
"""Time limit of one body, which takes 10 ms at 14,000 tokens (s)."""
MAX_LOSSES = 2
"""Processes that may end with one body."""
MAX_LOST_IN_A_ROW = 16
START_TRIES = 4
START_PAUSE_S = 0.5
"""Pauses between the tries double."""
START_TIMEOUT_S = 300.0
END_TIMEOUT_S = 10.0
"""Seconds for a killed process to exit; after that it is left behind."""
MAX_DEFAULT_WORKERS = 4
"""Most decoder processes where the recipe does not set their number: one decodes over a million tokens a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """One completion as its decoder process returned it."""

    completion: Completion
    data: bytes
    """`batching.rollout_bytes.write` of the completion."""
    text: str | None
    """Text after thinking; None if thinking did not end or the completion is truncated."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Outstanding:
    job: Job
    body: bytes
    result: asyncio.Future[Decoded]
    losses: int = 0


class _Died(Exception):
    """The process exited or did not answer in time."""


class DecoderPool:
    """Decoder processes behind the interface that `EngineClient.generate` takes; `async with` starts and closes it.

    `counters`: decoded, engine_errors, lost (by the response), decoder_lost, restarts (processes replaced).
    """

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerBase,
        plans: Plans,
        *,
        logs: Path,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """logs: folder of the processes' logs, `decoder-N.log`."""
        fast: Any = getattr(tokenizer, "backend_tokenizer", None)
        text = fast.to_str() if hasattr(fast, "to_str") else None
        self._setup = Setup(answer=plans.answer_format(), tokenizer=text, policy=recipe.policy.path)
        self._timeout_s = timeout_s
        workers = recipe.rollouts.decoders or min(MAX_DEFAULT_WORKERS, default_workers())
        self._processes = [_DecoderProcess(f"decoder-{n}", self._setup, logs) for n in range(workers)]
        self._slots = asyncio.Semaphore(SLOTS * workers)
        self._queue: asyncio.Queue[_Outstanding] = asyncio.Queue()
        self._outstanding: set[_Outstanding] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._lost_in_a_row = 0
        self._end: Exception | None = RuntimeError("the decoder pool was not started")
        self.counters: Counter[str] = Counter()

    async def __aenter__(self) -> DecoderPool:
        """Start all processes. Raises ProcessDied or OSError if one does not start."""
        try:
            await asyncio.gather(*(process.start() for process in self._processes))
        except BaseException:
            await self.close()
            raise
        self._end = None
        self._tasks = [asyncio.create_task(self._work(p), name=p.name) for p in self._processes]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Kill all processes and fail what is outstanding; may be called twice."""
        self._finish(RuntimeError("the decoder pool is closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(process.kill() for process in self._processes))

    @property
    def pids(self) -> list[int]:
        """Process ids of the decoders that are running."""
        return [pid for process in self._processes if (pid := process.pid) is not None]

    def slot(self) -> AbstractAsyncContextManager[None]:
        """Held from before a body is read until it is decoded."""
        return self._slots

    async def decode(self, body: bytes, *, plan: Plan | None, seed: int, where: str) -> tuple[Decoded, int]:
        """(the completion in the response to a generation request, its tokens); the caller holds a slot.

        plan, seed: of the request. where: engine and path. Raises EngineError for a malformed response,
        CompletionLost if a token has no log-probability (`no_logprobs`) or the body ended two processes
        (`decoder_lost`), RuntimeError if the pool ended.
        """
        if self._end is not None:
            raise self._end
        job = Job(plan=plan, seed=seed, where=where)
        outstanding = _Outstanding(job=job, body=body, result=asyncio.get_running_loop().create_future())
        self._outstanding.add(outstanding)
        self._queue.put_nowait(outstanding)
        try:
            found = await outstanding.result
            return found, found.completion.tokens
        finally:
            self._outstanding.discard(outstanding)

    async def _work(self, process: _DecoderProcess) -> None:
        while True:
            outstanding = await self._queue.get()
            while not outstanding.result.done():  # its caller may have been cancelled
                try:
                    reply, data = await within(self._timeout_s, process.ask(outstanding.job, outstanding.body))
                except (TimeoutError, _Died) as problem:
                    reason = str(problem) or f"gave no answer within {self._timeout_s:g} s"
                    await self._replace(process, reason)
                    self._count_loss(outstanding, reason)
                    continue
                self._resolve(outstanding, reply, data)

    def _resolve(self, outstanding: _Outstanding, reply: Reply, data: bytes) -> None:
        self._lost_in_a_row = 0
        error: Exception
        if reply.completion is not None:
            self.counters["decoded"] += 1
            if not outstanding.result.done():
                found = Decoded(completion=reply.completion, data=data, text=reply.text)
                outstanding.result.set_result(found)
            return
        if reply.engine_error is not None:
            self.counters["engine_errors"] += 1
            error = EngineError(reply.engine_error)
        else:
            self.counters["lost"] += 1
            error = CompletionLost(reply.lost or "", reason=reply.lost_reason)
        if not outstanding.result.done():
            outstanding.result.set_exception(error)

    def _count_loss(self, outstanding: _Outstanding, reason: str) -> None:
        """A process ended with this body. Raises RuntimeError if many bodies in a row are lost."""
        outstanding.losses += 1
        if outstanding.losses < MAX_LOSSES or outstanding.result.done():
            return
        self.counters["decoder_lost"] += 1
        self._lost_in_a_row += 1
        what = f"{outstanding.job.where}: expected a decoded completion, found {MAX_LOSSES} decoder processes ended"
        if self._lost_in_a_row >= MAX_LOST_IN_A_ROW:
            raise RuntimeError(f"{what}, {self._lost_in_a_row} times in a row; the last one {reason}")
        lost = f"{what} with its {len(outstanding.body)} bytes; the last one {reason}"
        outstanding.result.set_exception(CompletionLost(lost, reason="decoder_lost"))

    async def _replace(self, process: _DecoderProcess, reason: str) -> None:
        """Start another process in place of this one. Raises RuntimeError after START_TRIES tries."""
        await process.kill()
        logger.warning("%s %s; it is replaced", process.name, reason)
        for attempt in range(START_TRIES):
            try:
                await process.start()
            except (OSError, ProcessDied) as problem:
                last = problem
            else:
                self.counters["restarts"] += 1
                return
            await asyncio.sleep(START_PAUSE_S * 2**attempt)
        raise RuntimeError(f"{process.name}: expected it to start again, found {START_TRIES} tries failing: {last}")

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (problem := task.exception()) is not None:
            assert isinstance(problem, Exception)
            self._finish(problem)

    def _finish(self, end: Exception) -> None:
        """Make every pending or later `decode` raise `end`."""
        if self._end is None or not self._tasks:
            self._end = end
        for outstanding in self._outstanding:
            if not outstanding.result.done():
                outstanding.result.set_exception(end)


class _DecoderProcess:
    """One process and the socket to it; `start` may be called again after `kill`."""

    def __init__(self, name: str, setup: Setup, logs: Path) -> None:
        self.name = name
        self._setup = frame(setup)
        self._log = logs / f"{name}.log"
        self._child: ChildProcess | None = None
        self._socket: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """Process id, None if it does not run."""
        return self._child.pid if self._child is not None else None

    async def start(self) -> None:
        """Start the process and wait until it is ready. Raises OSError and ProcessDied."""
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            env = os.environ | {
                SOCKET_VARIABLE: str(theirs.fileno()),
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
            }
            argv = [sys.executable, "-m", "megatron_scalerl.rollouts.decoder"]
            self._child = await ChildProcess.start(self.name, argv, env, self._log, pass_fds=(theirs.fileno(),))
        try:
            await within(START_TIMEOUT_S, self._exchange(self._setup, b""))
        except (TimeoutError, _Died) as problem:
            await self.kill()
            found = str(problem) or f"was not ready within {START_TIMEOUT_S:g} s"
            raise ProcessDied(f"{self.name} {found}{log_end(self._log)}") from None

    async def ask(self, job: Job, body: bytes) -> tuple[Reply, bytes]:
        """The reply to a job. Raises _Died. Cancelled, the process is of no use any more: kill it."""
        return await self._exchange(frame(job, len(body)), body)

    async def kill(self) -> None:
        """End the process at once; may be called twice."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            try:
                await asyncio.wait_for(child.wait(), END_TIMEOUT_S)
            except TimeoutError:
                logger.warning("%s is still running %g s after SIGKILL", self.name, END_TIMEOUT_S)

    async def _exchange(self, head: bytes, body: bytes) -> tuple[Reply, bytes]:
        loop, connection = asyncio.get_running_loop(), self._socket
        assert connection is not None, "started"
        try:
            await loop.sock_sendall(connection, head)
            await loop.sock_sendall(connection, body)
            sizes = SIZES.unpack(await _read(connection, SIZES.size))
            reply = msgspec.json.decode(await _read(connection, sizes[0]), type=Reply)
            return reply, await _read(connection, sizes[1])
        except (OSError, EOFError):
            assert self._child is not None
            code = await self._child.wait()
            raise _Died(f"exited with code {code}") from None


async def _read(connection: socket.socket, size: int) -> bytes:
    """The next `size` bytes. Raises EOFError if the socket was closed before."""
    buffer = bytearray(size)
    view, done = memoryview(buffer), 0
    while done < size:
        received = await asyncio.get_running_loop().sock_recv_into(connection, view[done:])
        if not received:
            raise EOFError
        done += received
    return bytes(buffer)
