"""A stand-in for torch's NCCL process group, which a CPU build has not."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import ClassVar


class NcclProcessGroup:
    """Notes how it was made and what was called, in order."""

    made: ClassVar[list[NcclProcessGroup]] = []
    fails = False
    """Whether it cannot connect."""

    class Options:
        def __init__(self):
            self.config = SimpleNamespace()
            self._timeout = None

    def __init__(self, store, rank, size, options):
        self.store, self.rank, self.size, self.options = store, rank, size, options
        self.blocking_wait = os.environ.get("TORCH_NCCL_BLOCKING_WAIT")  # as the C++ constructor reads it
        self.calls = []
        self.made.append(self)

    def eager_connect_single_device(self, device):
        self.calls.append(("connect", device))
        if self.fails:
            raise RuntimeError("NCCL error: remote process exited")

    def broadcast(self, tensors, options):
        self.calls.append(("broadcast", tensors))
        return SimpleNamespace(wait=lambda timeout: self.calls.append(("wait", timeout)))

    def abort(self):
        self.calls.append("abort")
