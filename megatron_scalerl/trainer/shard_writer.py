"""Writes a checkpoint's shards in the training process itself.

Megatron-Core forks a process per file and collects their reports through a multiprocessing manager, a spawned
process of about 290 MB that runs as long as the rank and survives a killed one. A synchronous save gains nothing by
that, and forking a process with threads of collectives is a risk.
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
    """Context in which a synchronous `dist_checkpointing.save` starts no process."""
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
    """Replaces write_preloaded_data_multiproc: the same files and the same report, one file after another."""
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
