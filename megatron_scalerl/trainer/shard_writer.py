"""Writes a checkpoint's shards in the training process itself.

Megatron-Core forks a process for every file and collects their reports through a multiprocessing manager, a
spawned process of some 290 MB that lives as long as the rank and outlives one that is killed. A synchronous save
gains nothing by that, and a fork of a process with collectives' threads in it is a risk.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync


@contextlib.contextmanager
def writing_in_process() -> Iterator[None]:
    """Inside the block a synchronous `dist_checkpointing.save` starts no process."""
    kept_writer = FileSystemWriterAsync.write_preloaded_data_multiproc
    kept_queue = filesystem_async._results_queue
    FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(_write)
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(kept_writer)
        filesystem_async._results_queue = kept_queue


def _write(transforms: list[Any], use_msc: bool, rank: int, write_buckets: list[Any], results: Any) -> None:
    """Stands in for write_preloaded_data_multiproc: the same files and the same report, one after another."""
    written: dict[int, Any] = {}
    for index, bucket in enumerate(write_buckets):
        report: queue.Queue[Any] = queue.Queue()
        unfinished: queue.Queue[Any] = queue.Queue()
        unfinished.put(index)
        FileSystemWriterAsync.write_preloaded_data(
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
            results.put(outcome)
            return
        written[index] = outcome
    results.put(written)
