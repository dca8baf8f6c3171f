"""Runs jobs in several processes and collects their results.

One pipe per worker carries its progress and results to the first process, the only reader; a worker that is ahead
blocks on its pipe. The first failure ends all workers. They exit with the process that started them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

from megatron_scalerl.checkpoints.jobs import Context, Job, JobResult, Setting
from megatron_scalerl.processes.parent_death import die_with_parent

OnBytes = Callable[[int], None]
OnDone = Callable[[Job, JobResult], None]


def run_jobs(jobs: Sequence[Job], setting: Setting, *, processes: int, on_bytes: OnBytes, on_done: OnDone) -> None:
    """Runs every job once; `on_done` is called in this process as each is finished.

    Raises ValueError for invalid data and for files that cannot be written, RuntimeError if a worker was killed.
    """
    shares = [share for share in _balanced(jobs, processes) if share]
    if len(shares) <= 1:
        for job, result in _run_share(shares[0] if shares else [], setting, on_bytes):
            on_done(job, result)
        return
    by_name = {job.name: job for job in jobs}
    with _started(shares, setting) as pipes:
        while pipes:
            for pipe in wait(list(pipes)):
                assert isinstance(pipe, Connection)
                kind, *content = _message(pipe, pipes[pipe])
                if kind == "bytes":
                    on_bytes(content[0])
                elif kind == "done":
                    on_done(by_name[content[0]], content[1])
                elif kind == "error":
                    raise ValueError(content[0])
                else:
                    del pipes[pipe]


def _message(pipe: Connection, worker: int) -> tuple[Any, ...]:
    try:
        message: tuple[Any, ...] = pipe.recv()
    except EOFError:
        raise RuntimeError(f"conversion: worker {worker} exited before its work was done") from None
    return message


def _balanced(jobs: Sequence[Job], processes: int) -> list[list[Job]]:
    """Largest first to the least loaded worker; each share then in the given order, which is that of the files."""
    shares: list[list[Job]] = [[] for _ in range(max(1, processes))]
    loads = [0] * len(shares)
    for job in sorted(jobs, key=lambda job: -job.nbytes):
        least = loads.index(min(loads))
        shares[least].append(job)
        loads[least] += job.nbytes
    order = {job.name: number for number, job in enumerate(jobs)}
    return [sorted(share, key=lambda job: order[job.name]) for share in shares]


@contextmanager
def _started(shares: Sequence[Sequence[Job]], setting: Setting) -> Iterator[dict[Connection, int]]:
    # Spawned, not forked: a fork would inherit the first process's threads and memory.
    context = multiprocessing.get_context("spawn")
    pipes: dict[Connection, int] = {}
    processes = []
    try:
        for number, share in enumerate(shares):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_worker, args=(theirs, os.getpid(), share, setting), daemon=True)
            process.start()
            theirs.close()
            pipes[ours] = number
            processes.append(process)
        yield pipes
    finally:
        for process in processes:
            if pipes:  # some have not finished: there was a failure
                process.kill()
            process.join()


def _worker(pipe: Connection, parent: int, share: Sequence[Job], setting: Setting) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends its workers
    try:
        for job, result in _run_share(share, setting, lambda n: pipe.send(("bytes", n))):
            pipe.send(("done", job.name, result))
    except ValueError as error:
        pipe.send(("error", str(error)))
    else:
        pipe.send(("end",))


def _run_share(share: Sequence[Job], setting: Setting, report: OnBytes) -> Iterator[tuple[Job, JobResult]]:
    context = Context(setting, report)
    for job in share:
        try:
            result = job.run(context)
        except OSError as error:  # a full disk, a limit on the size of files, a failing disk
            raise ValueError(f"{job.name}: expected to be written in full, found: {error.strerror}") from None
        yield job, result
