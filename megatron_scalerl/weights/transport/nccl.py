"""The broadcast group over NCCL: the framing of `transport.frames` with buckets in device memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_scalerl.weights.connection import Connection
from megatron_scalerl.weights.transport.gloo import Finish, Group


class NcclGroup(Group):
    """A broadcast group on GPUs; each member uses its current device.

    NCCL listens on the interface NCCL_SOCKET_IFNAME, in the trainer's ranks and in the engines, and accepts a
    connection that presents the random number which rank 0 put into the store.
    """

    def __init__(self, connection: Connection, rank: int, sender: int = 0, shard: int = 0) -> None:
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None, "NCCL needs an accelerator"
        self.device = torch.device(accelerator.type, torch.accelerator.current_device_index())
        super().__init__(connection, rank, sender, shard)

    def _make(self, connection: Connection, rank: int) -> Any:
        assert self._store is not None
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self.timeout
        return dist.ProcessGroupNCCL(self._store, rank, self._world_size, options)

    def start(self, tensor: torch.Tensor) -> Finish:
        """Broadcast rank 0's tensor and wait until it has arrived. Raises RuntimeError.

        One at a time: with two communicators in progress on one device, two receivers may run them in different
        orders, and wait for each other.
        """
        super().start(tensor)()
        torch.accelerator.synchronize(self.device)
        return lambda: None
