"""The broadcast group over NCCL: the framing of `transport.gloo` with buckets in device memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_scalerl.weights.connection import Connection
from megatron_scalerl.weights.transport.gloo import GlooSender, Group


class NcclGroup(Group):
    """A broadcast group on GPUs; each member uses its current device.

    NCCL listens at the interface that NCCL_SOCKET_IFNAME names, in the trainer's ranks and in the engines, and takes
    a connection that names the number which rank 0 drew at random and left in the store.
    """

    def __init__(self, connection: Connection, rank: int) -> None:
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None, "NCCL needs an accelerator"
        self.device = torch.device(accelerator.type, torch.accelerator.current_device_index())
        super().__init__(connection, rank)

    def _make(self, connection: Connection, rank: int) -> Any:
        assert self._store is not None
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self.timeout
        return dist.ProcessGroupNCCL(self._store, rank, connection.world_size, options)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Rank 0's tensor to all, and wait until it is there. Raises RuntimeError."""
        super().broadcast(tensor)
        torch.accelerator.synchronize(self.device)


class NcclSender(GlooSender):
    """The trainer's end over NCCL; see `transport.Sender`."""

    group_cls = NcclGroup
