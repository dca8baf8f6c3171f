"""Connections for the tests of weight updates."""

import uuid
from dataclasses import replace

import pytest
from transfers import KINDS

from megatron_scalerl.distributed.rendezvous import private_folder
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
