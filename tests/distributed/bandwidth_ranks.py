"""What one rank does in the tests of the bandwidth between ranks: hosts and a slow link are stand-ins."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace

from parity_ranks import recipe

SLOW, SECONDS = (1, 2), 1000.0
"""The link, from sender to receiver, that takes so much longer by the receiver's clock."""


def measure(policy: str, hosts: list[str]) -> tuple[float, str]:
    """The bandwidth without a floor, and what is said below one that nothing reaches."""
    from megatron_scalerl.distributed import bandwidth
    from megatron_scalerl.distributed.parallel import shutdown_parallel
    from megatron_scalerl.trainer.ranks import init_parallel

    parallel = init_parallel(recipe(policy, len(hosts), {}))
    stand_in_for_gethostname, send, ahead_s = hosts[parallel.rank], bandwidth._send, 0.0

    def slow_send(where, data, sender, receiver):
        nonlocal ahead_s
        send(where, data, sender, receiver)
        if (sender, receiver) == SLOW and where.rank == receiver:
            ahead_s += SECONDS

    socket.gethostname = lambda: stand_in_for_gethostname
    bandwidth._send = slow_send
    bandwidth.time = SimpleNamespace(perf_counter=lambda: time.perf_counter() + ahead_s)
    found = bandwidth.check_bandwidth(parallel, 0.0)
    try:
        bandwidth.check_bandwidth(parallel, 1e6)
    except RuntimeError as error:
        said = str(error)
    shutdown_parallel()
    return found, said
