"""The controller's client of the trainer.

The client sends commands to all ranks, waits for all answers, and names the rank that failed."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence, Set
from functools import partial
from typing import Any

import msgspec

from megatron_scalerl.batching.assignment import ReadCompletions, StepPlan
from megatron_scalerl.distributed import sockets
from megatron_scalerl.distributed.rendezvous import FolderRendezvous, Rendezvous
from megatron_scalerl.processes.child_process import time_limit
from megatron_scalerl.trainer import messages
from megatron_scalerl.trainer.messages import TrainerInfo
from megatron_scalerl.types import StepReport
from megatron_scalerl.weights.plan import Connection, Manifest, Needs, SendReport, WeightPlan

STOP_TIMEOUT_S = 30.0
"""Time for all ranks to leave the process groups at the end (seconds).

The time is limited, because a hung rank must not block other ranks' devices."""
PROBE_INTERVAL_MS = 1_000
"""Time without a message after which the ranks' connections are checked (milliseconds)."""
BLAME_S = 2.0
"""Time after a failure in which the client looks for a rank that exited without a message (seconds).

Such a rank is the cause, although its peers' collectives fail first."""


class TrainerError(RuntimeError):
    """The trainer failed: a rank raised, exited or did not answer. The message names the rank."""

    full = ""
    """The file for which a rank found no space; empty for other failures."""


class WeightGroupFailed(RuntimeError):
    """The group of the weight broadcast failed. The trainer is intact, and can connect again."""


class TrainerClient:
    """All trainer ranks as one object; one command at a time. Create and use it inside a running event loop.

    After a TrainerError only `close` is valid. Every command has to end within `command_timeout_s`; `stop` has
    STOP_TIMEOUT_S. All ranks exit when the client is closed or the process ends. The socket queues at most
    `sockets.MAX_QUEUED` messages per rank, and at most one batch's bytes are in this process: the ranks' I/O threads
    drain the socket while the ranks compute, and each `prepare` waits until the ranks hold the previous batch.

    rendezvous: folder where ranks on one host meet. None for several hosts: the ranks meet at a store that rank 0
    binds (MSRL_BIND_HOST).
    """

    def __init__(
        self,
        *,
        world_size: int,
        run_id: str,
        incarnation: str,
        secret: str,
        rendezvous: FolderRendezvous | None,
        address: str = sockets.LOCAL,
        command_timeout_s: float = 3600.0,
    ):
        self.world_size = world_size
        self.info: TrainerInfo | None = None
        self._run_id = run_id
        self._incarnation = incarnation
        self._secret = secret
        self._command_timeout_s = command_timeout_s
        self._rendezvous: Rendezvous | None = rendezvous
        self._met_ranks: set[int] = set()
        self._ready_ranks: set[int] = set()
        # This maps a data-parallel rank to the rank that receives its batches.
        self._holders: dict[int, int] = {}
        # This is the step whose batch was sent, until `step` is called.
        self._prepared_step: int | None = None
        # A batch is sent only after every rank was sent the latest Step, and after the previous batch has arrived.
        self._step_sent = asyncio.Event()
        self._all_received = asyncio.Event()
        self._step_sent.set()
        self._all_received.set()
        # These are the ranks whose batch was sent and has not arrived yet.
        self._awaited_ranks: set[int] = set()
        self._identities: dict[int, bytes] = {}
        self._calls = 0
        self._command_lock = asyncio.Lock()
        self._batch_lock = asyncio.Lock()
        self._socket = sockets.ControllerSocket(secret, sockets.Purpose.TRAINER, address=address)
        self.endpoint = self._socket.endpoint

    @property
    def rendezvous(self) -> Rendezvous:
        """Where ranks meet each other, and rank 0 meets engines; known after `wait_ready`."""
        assert self._rendezvous is not None, "wait_ready first"
        return self._rendezvous

    def worker_env(self, rank: int) -> dict[str, str]:
        """Environment variables with which `python -m megatron_scalerl.trainer.worker` finds and joins this client.

        The launcher adds MSRL_RECIPE and, on several hosts, MSRL_BIND_HOST, which rank 0 reads.
        """
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "MSRL_CONTROLLER": self.endpoint,
            "MSRL_RUN_ID": self._run_id,
            "MSRL_INCARNATION": self._incarnation,
            "MSRL_SECRET": self._secret,
        }

    async def wait_ready(self, timeout_s: float) -> TrainerInfo:
        """Wait until every rank has built a trainer. Raises TrainerError after a failure or after `timeout_s`."""
        async with self._command_lock, self._deadline(timeout_s, "start", lambda: self._ready_ranks):
            while len(self._ready_ranks) < self.world_size:
                sender, message = await self._receive()
                await self._greet(sender, message)
        assert self.info is not None
        assert self._holders.keys() == set(range(self.info.dp_size)), self._holders
        return self.info

    async def prepare(self, plan: StepPlan, read: ReadCompletions) -> None:
        """Send each data-parallel rank's plan and completions to the rank's process that holds batches.

        The call may run while a command runs. The caller has to call `step` between two calls of `prepare`. `read` is
        called once for each data-parallel rank, with the rank's entry of `plan.numbers`. The bytes that `read`
        returns are not copied, and must not change.

        Raises TrainerError for a rank that is gone, and if the previous batch does not arrive within
        `command_timeout_s`. Raises RuntimeError if `read` does not return one completion for each number. After an
        error only `close` is valid. If a rank finds the batch invalid, the current or the next command raises.
        """
        assert self.info is not None, "wait_ready first"
        assert len(plan.ranks) == self.info.dp_size, (len(plan.ranks), self.info.dp_size)
        async with self._batch_lock:
            assert self._prepared_step is None, f"first call `step` for the prepared step {self._prepared_step}"
            async with self._deadline(self._command_timeout_s, "take a batch", self._without_batch):
                await self._step_sent.wait()
                await self._all_received.wait()
            for dp_rank, (part, numbers) in enumerate(zip(plan.ranks, plan.numbers, strict=True)):
                completions = await read(numbers)
                if len(completions) != len(numbers):
                    raise RuntimeError(
                        f"step {plan.step}: read() gave {len(completions)} completions for {len(numbers)} samples"
                    )
                rank = self._holders[dp_rank]
                self._awaited_ranks.add(rank)
                self._all_received.clear()
                async with self._deadline(self._command_timeout_s, "take a batch", self._without_batch):
                    await self._send(rank, *messages.batch_frames(part, completions))
            self._prepared_step = plan.step

    async def step(self, step: int) -> StepReport:
        """Make an optimizer step on the batch prepared for `step`. Raises TrainerError, as all commands do."""
        assert self._prepared_step == step, f"step {step}: the prepared batch is of step {self._prepared_step}"
        self._prepared_step = None
        self._step_sent.clear()
        return await self._call(partial(messages.Step, step=step), StepReport, when_sent=self._step_sent.set)

    async def manifest(self) -> Manifest:
        """Names, types and shapes of the weights, layer by layer."""
        return await self._call(messages.DescribeWeights, Manifest)

    async def plan_weights(self, needs: tuple[Needs, ...]) -> WeightPlan:
        """Plan weight updates for these needs, one entry for each shard. `connect_weights` then uses the plan."""
        return await self._call(partial(messages.PlanWeights, needs=needs), WeightPlan)

    async def connect_weights(self, connection: Connection) -> None:
        """Let the sending ranks form groups with the engines. Raises WeightGroupFailed if an engine does not join."""
        failure = await self._call(partial(messages.ConnectWeights, connection=connection), str)
        if failure:
            raise WeightGroupFailed(failure)

    async def send_weights(self, version: int) -> SendReport:
        """Send all weights as `version`. Raises WeightGroupFailed if an engine leaves during the update."""
        report = await self._call(partial(messages.SendWeights, version=version), SendReport)
        if report.failure:
            raise WeightGroupFailed(report.failure)
        return report

    async def logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """For each token list, the log-probabilities (nats) of all tokens but the first."""
        return (await self.token_scores(token_ids))[0]

    async def token_scores(self, token_ids: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Two lists: log-probabilities and entropies (nats) of each token list, for all tokens but the first."""
        tokens = [list(ids) for ids in token_ids]
        return await self._call(partial(messages.ScoreTokens, token_ids=tokens), list[list[list[float]]])

    async def save(self, path: str, extra: dict[str, Any], *, asynchronous: bool = False) -> None:
        """Write and commit a checkpoint; `extra` is the controller's state, as JSON data.

        `asynchronous`: the ranks copy the state, and write while the trainer goes on. `finish_save` has to be called
        before the next save.
        """
        await self._call(partial(messages.Save, path=str(path), extra=extra, copied=asynchronous), None)
        if not asynchronous:
            await self.finish_save(wait=True)

    async def finish_save(self, *, wait: bool) -> float | None:
        """Commit the checkpoint, and return the seconds for which the slowest rank wrote.

        Without `wait` the call returns None if a rank still writes.
        """
        return await self._call(partial(messages.FinishSave, wait=wait), float | None)

    async def load(self, path: str) -> dict[str, Any]:
        """Resume from a committed checkpoint, and return the `extra` that `save` wrote."""
        return await self._call(partial(messages.Load, path=str(path)), dict[str, Any])

    async def stop(self) -> None:
        """Let every rank exit with 0, and close the client.

        Raises TrainerError if a rank does not answer. The client is closed in any case.
        """
        try:
            await self._call(messages.Stop, None, leaves=True)
        finally:
            self.close()

    def close(self) -> None:
        """Close the sockets. Ranks that still run then exit."""
        self._socket.close()

    async def _call(
        self,
        make: Callable[..., messages.Command],
        kind: Any,
        *,
        leaves: bool = False,
        when_sent: Callable[[], None] = lambda: None,
    ) -> Any:
        """Send each rank the command, wait for all answers, and return rank 0's answer as `kind`.

        `make`: returns the command; called for each rank with the number of the call. `leaves`: True if ranks may
        disconnect after the answer. `when_sent`: function that is called once every rank was sent the command.
        """
        answers: dict[int, msgspec.Raw] = {}
        limit = self._command_timeout_s
        task = "answer a command"
        if leaves:
            limit = STOP_TIMEOUT_S
            task = "stop"
        async with self._deadline(limit, task, lambda: set(answers)), self._command_lock:
            self._calls += 1
            for rank in range(self.world_size):
                await self._send(rank, messages.encode(make(call=self._calls)))
            when_sent()
            while len(answers) < self.world_size:
                sender, message = await self._receive()
                if isinstance(message, messages.BatchReceived):
                    self._note_received(message.rank)
                elif not isinstance(message, messages.Done):
                    await self._greet(sender, message)
                # Answers to an earlier call, whose caller stopped waiting, are dropped.
                elif message.call == self._calls:
                    answers[message.rank] = message.value
                    if leaves:
                        del self._identities[message.rank]
        try:
            return messages.decode(msgspec.msgpack.Decoder(kind), [answers[0]])
        except messages.InvalidMessage as error:
            raise TrainerError(f"trainer rank 0: {error}") from error

    def _without_batch(self) -> set[int]:
        """The ranks of which no BatchReceived is awaited: the rank's batch has arrived, or the rank gets no batch."""
        return set(range(self.world_size)) - self._awaited_ranks

    def _note_received(self, rank: int) -> None:
        """Note that a rank's batch has arrived. Once all batches have arrived, the next batch may be sent."""
        self._awaited_ranks.discard(rank)
        if not self._awaited_ranks:
            self._all_received.set()

    async def _greet(self, sender: bytes, message: messages.ToController) -> None:
        """Answer a process that joins, and refuse one that is not a rank of this run."""
        if isinstance(message, messages.Hello):
            reason = self._objection(message)
            answer: messages.Welcome | messages.Refused = messages.Welcome()
            if reason is not None:
                answer = messages.Refused(reason=reason)
            else:
                self._identities[message.rank] = sender
                if message.rank == 0:
                    self._rendezvous = self._rendezvous or message.bound
            # The answer may fail: the next probe of the connections finds a rank that has disconnected.
            await self._socket.send(sender, messages.encode(answer))
            await self._send_rendezvous()
            return
        assert isinstance(message, messages.Ready), message
        if message.holds_batch:
            assert message.dp_rank not in self._holders, message
            self._holders[message.dp_rank] = message.rank
        self._ready_ranks.add(message.rank)
        if message.rank == 0:
            self.info = message.info

    async def _send_rendezvous(self) -> None:
        """Once the rendezvous is known, send Meet to the ranks that have joined and were not yet sent Meet."""
        if self._rendezvous is None:
            return
        for rank in sorted(self._identities.keys() - self._met_ranks):
            self._met_ranks.add(rank)
            await self._send(rank, messages.encode(messages.Meet(rendezvous=self._rendezvous)))

    def _objection(self, hello: messages.Hello) -> str | None:
        """The reason why the process that sent `hello` may not join, or None."""
        reason = hello.objection(self._run_id, self._incarnation)
        if reason:
            return reason
        if hello.world_size != self.world_size:
            return f"WORLD_SIZE: this process has {hello.world_size}, but the run has {self.world_size} ranks"
        if not 0 <= hello.rank < self.world_size:
            return f"RANK: this rank was started with {hello.rank}, but ranks are 0 to {self.world_size - 1}"
        if hello.rank == 0 and self._rendezvous is None and hello.bound is None:
            return "MSRL_BIND_HOST: set it to an address of rank 0's host, where the ranks of several hosts meet"
        if hello.rank in self._identities:
            return f"rank {hello.rank}: another process has already joined as this rank; start each rank once"
        return None

    async def _send(self, rank: int, *frames: messages.Buffer) -> None:
        """Send a message's frames without a copy. Raises TrainerError if the rank cannot be reached."""
        if rank not in self._identities:
            raise TrainerError(f"trainer rank {rank}: no process has joined as this rank")
        if not await self._socket.send(self._identities[rank], *frames):
            raise await self._last_words(rank)

    async def _last_words(self, rank: int) -> TrainerError:
        """The error for a disconnected rank, with the reason that the rank sent before it left, if any."""
        while await self._socket.poll(0):
            _, message = await self._read()
            if isinstance(message, messages.Failed):
                return await self._blame(message)
        return _exit_error(rank)

    async def _receive(self) -> tuple[bytes, messages.ToController]:
        """Wait for the next message of a process. Raises TrainerError if a rank has failed or disconnected.

        Connections are probed instead of watched by a socket monitor. A monitor would report closed connections at
        once, but also those of other processes. And ZeroMQ's I/O thread blocks while a monitor's events are not read.
        """
        while True:
            if not await self._socket.poll(PROBE_INTERVAL_MS):
                lost_rank = await self._lost()
                # The lost rank's last message may have arrived since the poll above, and is read first.
                if lost_rank is None or await self._socket.poll(0):
                    continue
                raise _exit_error(lost_rank)
            sender, message = await self._read()
            if isinstance(message, messages.Failed):
                raise await self._blame(message)
            if message is not None:
                return sender, message

    async def _read(self) -> tuple[bytes, messages.ToController | None]:
        """Read a message and the sender's identity; the message is None if the sender is no rank of this run.

        Raises TrainerError for an invalid message of a rank.
        """
        sender, frames = await self._socket.read()
        rank = next((rank for rank, identity in self._identities.items() if identity == sender), None)
        try:
            message = messages.decode_for_controller(frames)
        except messages.InvalidMessage as error:
            if rank is not None:
                raise TrainerError(f"trainer rank {rank}: {error}") from error
            await self._socket.send(sender, messages.encode(messages.Refused(reason=str(error))))
            return sender, None
        if isinstance(message, messages.Hello):
            return sender, message
        if rank is None:
            return sender, None
        if message.rank != rank:
            raise TrainerError(f"trainer rank {rank}: the process sent a message in the name of rank {message.rank}")
        return sender, message

    async def _blame(self, first: messages.Failed) -> TrainerError:
        """The error that names the cause: a rank that exited without a message, else the first that reported a
        failure."""
        failure = f"rank {first.rank}: {first.error}"
        failed_ranks = {first.rank}
        end = time.monotonic() + BLAME_S
        while time.monotonic() < end and self._identities.keys() - failed_ranks:
            lost_rank = await self._lost(except_for=failed_ranks)
            wait_ms = 50
            if lost_rank is not None:
                wait_ms = 0
            # A lost rank is blamed only after every rank's last message has been read.
            if await self._socket.poll(wait_ms):
                _, message = await self._read()
                if isinstance(message, messages.Failed):
                    failed_ranks.add(message.rank)
            elif lost_rank is not None:
                return _exit_error(lost_rank, f" ({failure})")
        error = TrainerError(f"trainer {failure}")
        error.full = first.full
        return error

    async def _lost(self, *, except_for: Set[int] = frozenset()) -> int | None:
        """The first rank that has joined but is no longer connected; None if there is none."""
        for rank in sorted(self._identities.keys() - except_for):
            if not await self._socket.connected(self._identities[rank]):
                return rank
        return None

    @contextlib.asynccontextmanager
    async def _deadline(self, seconds: float, task: str, answered: Callable[[], set[int]]) -> AsyncIterator[None]:
        """Context that raises TrainerError after `seconds`, and names the ranks that `answered` does not return."""
        try:
            async with time_limit(seconds):
                yield
        except TimeoutError:
            silent = ", ".join(str(r) for r in range(self.world_size) if r not in answered())
            raise TrainerError(f"trainer rank {silent}: it did not {task} within {seconds:g} s") from None


def _exit_error(rank: int, failure: str = "") -> TrainerError:
    return TrainerError(f"trainer rank {rank}: the process exited unexpectedly{failure}")
