"""What one rank does in the tests of the bandwidth between ranks: hosts and a slow link are stand-ins."""

from __future__ import annotations

import socket
import time

from parity_ranks import recipe

SLOW = (1, 2)
"""The link, from sender to receiver, that takes another 2 s."""


def measure(policy: str, hosts: list[str]) -> tuple[float, str]:
    """The bandwidth without a floor, and what is said below one that nothing reaches."""
    from megatron_scalerl.distributed import bandwidth
    from megatron_scalerl.distributed.parallel import init_parallel, shutdown_parallel

    parallel = init_parallel(recipe(policy, len(hosts), {}))
    stand_in_for_gethostname, send = hosts[parallel.rank], bandwidth._send

    def slow_send(where, data, sender, receiver):
        if (sender, receiver) == SLOW and where.rank == sender:
            time.sleep(2.0)
        send(where, data, sender, receiver)

    socket.gethostname = lambda: stand_in_for_gethostname
    bandwidth._send = slow_send
    found = bandwidth.check_bandwidth(parallel, 0.0)
    try:
        bandwidth.check_bandwidth(parallel, 1e6)
    except RuntimeError as error:
        said = str(error)
    shutdown_parallel()
    return found, said
