"""The workers of a `WorkerPool` as tests reach for them."""

import asyncio
import fcntl
import termios
from functools import partial

from waiting import until

from megatron_scalerl.processes.worker_pool import Worker


def shorten(monkeypatch, numbers, *, ready=lambda: True):
    """A worker's requests of these numbers, setups counted, have half a second, from `ready` on.

    So a test waits for the limit of a request that hangs, and a busy host does not take the others past theirs.
    """
    exchange = Worker._exchange

    async def shortened(worker, *request):
        if worker._number not in numbers:
            return await exchange(worker, *request)
        reply = asyncio.create_task(exchange(worker, *request))
        await until(ready)
        return await asyncio.wait_for(reply, 0.5)

    monkeypatch.setattr(Worker, "_exchange", shortened)


def count_restarts(pool):
    """The pool of verifiers or decoders; its `restarts` is the number of processes that were replaced from now on."""
    workers = pool._workers._workers
    pool.restarts = -len(workers)

    async def counted(start):
        refusal = await start()
        pool.restarts += 1
        return refusal

    for worker in workers:
        worker._start = partial(counted, worker._start)
    return pool


def starts(monkeypatch):
    """Names of the workers, one for each start from now on."""
    names = []
    start = Worker._start

    async def named(worker):
        names.append(worker.name)
        return await start(worker)

    monkeypatch.setattr(Worker, "_start", named)
    return names


def unread(file):
    """Bytes that wait in a pipe or a socket."""
    return int.from_bytes(fcntl.ioctl(file.fileno(), termios.FIONREAD, bytes(4)), "little")
