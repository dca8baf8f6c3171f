"""Connections for the tests of weight updates, and the ways to compute a digest."""

import uuid
from dataclasses import replace

import pytest
from transfers import KINDS
from triton_interpreter import interpret

from megatron_scalerl.distributed.rendezvous import private_folder
from megatron_scalerl.weights import digest, sum_kernel
from megatron_scalerl.weights.plan import Connection


@pytest.fixture(params=list(KINDS))
def spec(monkeypatch, request):
    """Makes connections with a rendezvous in a private folder of the test."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")  # the group chooses for itself
    with private_folder() as rendezvous:

        def make(world_size=2, **changes):
            base = Connection(
                backend=request.param,
                rendezvous=rendezvous,
                group=uuid.uuid4().hex,
                world_sizes=(world_size,),
                bucket_mib=1,
                timeout_s=240,
                connect_timeout_s=240,
            )
            return replace(base, **changes)

        yield make


@pytest.fixture(params=["compiled", "device"])
def way(request, monkeypatch):
    """Both ways to compute a digest; `device` is the kernel for GPUs, in Triton's interpreter."""
    if request.param == "device":
        interpret(monkeypatch, sum_kernel)
        monkeypatch.setattr(digest, "weighted_sum", digest._on_device)
