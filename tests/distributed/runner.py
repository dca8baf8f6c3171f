"""Runs a function in several processes that form one world, and brings back what each returned.

The ranks are forked from a server that has imported torch, Megatron-Core and transformers' configurations, which
takes seconds. It has run nothing and holds none of our modules: in all else a rank is a fresh process.
"""

import faulthandler
import importlib
import multiprocessing as mp
import os
import pickle
import socket
import sys
import time
import traceback
from multiprocessing.connection import wait

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
IMPORTED_ONCE = [
    "torch",
    "megatron.core.dist_checkpointing",
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "transformers.models.auto.configuration_auto",
]
"""Modules that every rank shares with the server."""


def run_ranks(world_size, target, *args, timeout_s=480.0, env=None, spawn=False):
    """Results, by rank, of `target` ("module:function", importable here) called with `args` in every process.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, one thread each. The first rank that fails ends all
    and its traceback is raised as AssertionError; so does running past `timeout_s`. env: further variables.
    spawn: the ranks share no server, which on a GPU machine may hold a driver that a fork does not survive.
    """
    context = mp.get_context("spawn" if spawn else "forkserver")
    if not spawn:
        context.set_forkserver_preload(IMPORTED_ONCE)
    port = _reserved_port()
    pipes = {}
    processes = []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        settings = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")}  # as of now: the server's is older
        settings |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        settings |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port.getsockname()[1])) | dict(env or {})
        process = context.Process(target=_child, args=(theirs, settings, timeout_s, target, args), daemon=True)
        process.start()
        theirs.close()
        pipes[ours] = rank
        processes.append(process)
    try:
        return _collect(pipes, time.monotonic() + timeout_s)
    except BaseException:
        # The others wait in a collective for the one that failed.
        for process in processes:
            process.kill()
        raise
    finally:
        for process in processes:
            process.join()
        port.close()


def _collect(pipes, deadline):
    results = [None] * len(pipes)
    waiting = dict(pipes)
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        assert ready, f"ranks {sorted(waiting.values())} were still running at the time limit"
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                error, results[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                error = "process ended without an answer"
            assert error is None, f"rank {rank}:\n{error}"
    return results


def _child(pipe, settings, timeout_s, target, args):
    faulthandler.dump_traceback_later(0.9 * timeout_s, exit=False)  # shows where a rank hangs
    os.environ.clear()
    os.environ.update(settings)
    module, function = target.split(":")
    try:
        result = getattr(importlib.import_module(module), function)(*args)
        # Plain pickle: multiprocessing's own would share tensors' memory with a process that is about to end.
        pipe.send_bytes(pickle.dumps((None, result)))
    except BaseException:
        pipe.send_bytes(pickle.dumps((traceback.format_exc(), None)))
    finally:
        sys.stdout.flush()
        # Without this a rank that failed waits in the destructor of the process group for those that hang.
        os._exit(0)


def _reserved_port():
    """A socket at the port for the store of rank 0, which listens there seconds later.

    On Linux, the store may have the port as well while this socket does not listen, as both have SO_REUSEADDR, but a
    process that asks for any free port does not get it.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved
