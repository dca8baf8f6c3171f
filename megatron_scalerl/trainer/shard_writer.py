"""Writes a checkpoint's shards inside the training process, at once or in a thread from a copy.

Megatron-Core forks a process per file and collects the reports through a multiprocessing manager, a spawned process
of about 290 MB that runs as long as the rank and survives a killed rank. A synchronous save gains nothing from more
processes, and forking a process with threads of collectives is a risk. An asynchronous save (`ShardWriting`) takes a
thread: writing and syncing files release the interpreter's lock.
"""

import contextlib
import inspect
import queue
import threading
import time
from collections.abc import Iterator, Set
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

_WRITER = "write_preloaded_data_multithread"
"""Name of Megatron's method that writes all files of a rank."""


@contextlib.contextmanager
def writing_in_process() -> Iterator[None]:
    """Context in which `dist_checkpointing.save` and the returned request write files without starting processes."""
    kept_writer = getattr(FileSystemWriterAsync, _WRITER)
    kept_queue = filesystem_async._results_queue
    setattr(FileSystemWriterAsync, _WRITER, staticmethod(_write))
    filesystem_async._results_queue = queue.Queue()
    # This suppresses a warning that recommends processes for every save.
    torch_strategies._logged_mcore_async_deprecation = True
    try:
        yield
    finally:
        setattr(FileSystemWriterAsync, _WRITER, staticmethod(kept_writer))
        filesystem_async._results_queue = kept_queue


write_bucket_of_one_file: Any = inspect.unwrap(FileSystemWriterAsync.write_preloaded_data)
"""Megatron's function that writes a file, without the decorator that turns the process's garbage collection off."""


def _write(transforms: list[Any], use_msc: bool, rank: int, write_buckets: list[Any], results: Any) -> None:
    """Write a rank's files one after another, in place of Megatron's method. Files and report are as Megatron's."""
    reports = {}
    for index, bucket in enumerate(write_buckets):
        report: queue.Queue[Any] = queue.Queue()
        unfinished: queue.Queue[Any] = queue.Queue()
        unfinished.put(index)
        write_bucket_of_one_file(
            transforms,
            local_proc_idx=index,
            write_bucket=bucket,
            results_queue=report,
            count_queue=unfinished,
            use_fsync=True,
            use_msc=use_msc,
        )
        _, outcome = report.get_nowait()
        if isinstance(outcome, Exception):
            results.put(_disk_error(outcome) or outcome)
            return
        reports[index] = outcome
    results.put(reports)


def _disk_error(error: BaseException) -> OSError | None:
    """The OSError that caused `error`, such as a full disk; None if no OSError did.

    torch reports a full disk as an archive that cannot be closed.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause


class ShardWriting:
    """This rank's files of a checkpoint, written by a thread from a copy in host memory."""

    def __init__(self, request: AsyncRequest, live: Set[int]):
        """Copy the tensors that steps change, and start the thread that writes.

        request: the result of `dist_checkpointing.save` inside `writing_in_process`. live: addresses of the memory
        that steps change. Steps may follow once the constructor returns.
        """
        self.seconds = 0.0
        """Seconds for which the thread wrote, once the thread is done."""
        self._finalize = list(request.finalize_fns)
        self._thread: threading.Thread | None = None
        if request.async_fn is not None:
            rank, buckets, results = request.async_fn_args
            arguments = (rank, _copied_buckets(request, buckets, live), results)
            self._thread = threading.Thread(
                target=self._run, args=(request.async_fn, arguments), name="checkpoint", daemon=True
            )
            self._thread.start()

    def _run(self, write: Any, arguments: tuple[Any, ...]) -> None:
        begin = time.perf_counter()
        write(*arguments)
        self.seconds = time.perf_counter() - begin

    @property
    def done(self) -> bool:
        """True once the thread has ended."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until `done`."""
        if self._thread is not None:
            self._thread.join()

    def complete(self) -> None:
        """Write the index once all ranks are `done`. Collective. Raises CheckpointException if a rank failed."""
        for finalize in self._finalize:
            finalize()


def _copied_buckets(request: AsyncRequest, buckets: list[Any], live: Set[int]) -> list[Any]:
    """Megatron's write buckets, with copies in host memory of the tensors that steps change.

    The tensor lists in `buckets` are emptied. live: addresses of the memory that steps change.
    """
    # `preload_fn` returns once the copies from a device are complete.
    copies: list[Any] = request.preload_fn()
    for (_, _, (_, tensors)), (_, _, (_, copied_tensors)) in zip(buckets, copies, strict=True):
        tensors.clear()
        for number, (item, tensor) in enumerate(copied_tensors):
            # `preload_fn` copies device tensors, and parts of host tensors. Live host tensors are copied here.
            if tensor.untyped_storage().data_ptr() in live:
                copied_tensors[number] = (item, tensor.clone())
    return copies
