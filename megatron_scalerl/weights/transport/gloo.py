"""The broadcast groups over gloo and NCCL; `transport.frames` describes the bytes on the wire.

Life of a group:

    create      a member opens the group's store and waits until all members have joined
    start       each member begins the next broadcast; rank 0 sends
    finish      the function that `start` returned waits for the end of the broadcast
    close       a member leaves; pending broadcasts of all members fail

Each group is a process group with a store; the default groups of trainer and engine are not involved. Over gloo,
buckets are in host memory, over NCCL in device memory.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_scalerl.distributed.rendezvous import gloo_device, open_store
from megatron_scalerl.weights.plan import MOST_CHANNELS, Connection

Read = Callable[[int], torch.Tensor]
"""A function from the number of a part to the part's values, in the rectangle's shape: a view of a parameter."""
Finish = Callable[[], None]
"""A function that waits for the end of a broadcast. Raises RuntimeError if the broadcast fails."""
WITHOUT_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"
"""Environment variable that makes torch create NCCL groups without a watchdog."""


class Group:
    """A broadcast group with a sending rank of the trainer as rank 0."""

    device = torch.device("cpu")
    _turns: torch.Tensor | None = None

    def __init__(self, connection: Connection, rank: int, sender: int = 0, shard: int = 0):
        """Join the group of a sender and a shard, and return when all members have joined.

        Raises RuntimeError if a member has not joined after connect_timeout_s.
        """
        self.timeout = timedelta(seconds=connection.timeout_s)
        self.bucket_mib = connection.bucket_mib
        join_timeout = timedelta(seconds=connection.connect_timeout_s)
        self._world_size = connection.world_sizes[shard]
        name = f"{connection.group}-{sender}-{shard}"
        self._store: dist.Store | None = open_store(connection.rendezvous, name, timeout=join_timeout)
        self._group: Any = self._make(connection, rank)

    def _make(self, connection: Connection, rank: int) -> Any:
        # The type is Any, since torch's type stubs lack the options of ProcessGroupGloo.
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo_device(connection.rendezvous)]
        options._timeout = timedelta(seconds=connection.connect_timeout_s)
        return gloo(self._store, rank, self._world_size, options)

    def start(self, tensor: torch.Tensor) -> Finish:
        """Start to broadcast rank 0's tensor; the returned function waits for the end. Errors as in `broadcast`."""
        if self._group is None:
            raise RuntimeError("the group of the weight update is closed")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = self.timeout
        work = self._group.broadcast([tensor], options)
        return lambda: work.wait(self.timeout)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Broadcast rank 0's tensor. Raises RuntimeError if the group is closed, fails or times out."""
        self.start(tensor)()

    def turns(self, nbytes: int) -> torch.Tensor:
        """[2, at least nbytes] uint8: memory for two buckets, used in turn.

        The group keeps host memory for later updates, because fresh pages cost more than a copy. The group does not
        keep device memory, because the model and the KV cache need the space.
        """
        if self._turns is not None and self._turns.shape[1] >= nbytes:
            return self._turns
        turns = torch.empty(2, nbytes, dtype=torch.uint8, device=self.device)
        if turns.device.type == "cpu":
            self._turns = turns
        return turns

    def close(self) -> None:
        """Leave the group; the other members' pending broadcasts fail at once."""
        if self._group is not None:
            self._group.abort()
        self._group = None
        self._store = None


class NcclGroup(Group):
    """A broadcast group on GPUs. Members use the current device, and connect before the first broadcast.

    NCCL listens on the interface NCCL_SOCKET_IFNAME, in the trainer's ranks and in the engines, and accepts a
    connection that presents the random number which rank 0 put into the store.
    """

    def __init__(self, connection: Connection, rank: int, sender: int = 0, shard: int = 0):
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None, "weights.transport nccl needs a GPU, but torch finds none in this process"
        self.device = torch.device(accelerator.type, torch.accelerator.current_device_index())
        super().__init__(connection, rank, sender, shard)

    def _make(self, connection: Connection, rank: int) -> Any:
        assert self._store is not None
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self.timeout
        # The number of channels is limited, because each takes device memory that the KV cache could use.
        options.config.max_ctas = MOST_CHANNELS
        with _without_watchdog():
            group: Any = dist.ProcessGroupNCCL(self._store, rank, self._world_size, options)
        try:
            # NCCL would wait without a limit for a member that never comes, so all members first report in the store.
            self._store.set(f"here-{rank}", "")
            keys = [f"here-{member}" for member in range(self._world_size)]
            self._store.wait(keys, timedelta(seconds=connection.connect_timeout_s))
            # Members connect now. Otherwise the first broadcast would connect them, within the time limit of one
            # broadcast.
            group.eager_connect_single_device(self.device)
        except BaseException:
            group.abort()
            raise
        return group

    def start(self, tensor: torch.Tensor) -> Finish:
        """Broadcast rank 0's tensor and wait for the arrival. Errors as in `broadcast`.

        Only one broadcast is in progress. With two communicators in progress on one device, two receivers might run
        the broadcasts in different orders, and wait for each other.
        """
        super().start(tensor)()
        return lambda: None


@contextlib.contextmanager
def _without_watchdog() -> Iterator[None]:
    """Context in which NCCL groups are made without torch's watchdog.

    The watchdog ends the process a minute after a failed collective. To switch off the watchdog's error handling
    alone (TORCH_NCCL_ASYNC_ERROR_HANDLING) is not enough: the watchdog also signals the default group's monitor, and
    the monitor ends the process (torch's ProcessGroupNCCL.cpp, Watchdog::runLoop and HeartbeatMonitor::runLoop).

    Without a watchdog, `wait` raises failures and time-outs. The variable is set for the whole process, so the block
    must make no other NCCL group.
    """
    previous_value = os.environ.get(WITHOUT_WATCHDOG)
    os.environ[WITHOUT_WATCHDOG] = "1"
    try:
        yield
    finally:
        del os.environ[WITHOUT_WATCHDOG]
        if previous_value is not None:
            os.environ[WITHOUT_WATCHDOG] = previous_value
