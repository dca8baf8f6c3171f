"""Several trainer ranks on this machine, for one job: each a process, on a GPU of its own where there are GPUs."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_scalerl.check_gpu.logs import cause, last_line, read_log
from megatron_scalerl.check_gpu.own_group import Process, own_group
from megatron_scalerl.distributed.rendezvous import FolderRendezvous, private_folder

_TICK_S = 0.2


def run_ranks(
    world_size: int, target: str, job: Mapping[str, Any], *, folder: Path, timeout_s: float, env: Mapping[str, str]
) -> list[Any]:
    """What `target` ("module:function") returned on each rank, called with (job, rendezvous).

    job and answers: JSON types. folder: for answers and logs. env: added to this process's environment. The first
    rank that fails ends all, with whatever they started. Raises RuntimeError naming the rank, with the last line of
    its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    answers = [folder / f"rank-{rank}.json" for rank in range(world_size)]
    logs = [folder / f"rank-{rank}.log" for rank in range(world_size)]
    for answer in answers:
        answer.unlink(missing_ok=True)
    with private_folder() as rendezvous, contextlib.ExitStack() as started:
        processes = []
        for rank in range(world_size):
            content = {"target": target, "job": job, "folder": rendezvous.folder, "answer": str(answers[rank])}
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
            argv = [sys.executable, "-m", "megatron_scalerl.check_gpu.ranks", json.dumps(content)]
            processes.append(started.enter_context(own_group(argv, logs[rank], {**env, **place})))
        _wait(processes, logs, time.monotonic() + timeout_s)
    return [json.loads(answer.read_text()) for answer in answers]


def _wait(processes: list[Process], logs: list[Path], deadline: float) -> None:
    """Until all have ended well. Raises RuntimeError for the first that has not."""
    running = dict(enumerate(processes))
    while running:
        for rank, process in list(running.items()):
            code = process.poll()
            if code:
                where = f"rank {rank} of {len(processes)}"
                raise RuntimeError(f"{where} ended with exit code {code}: {cause(read_log(logs[rank]))}")
            if code == 0:
                del running[rank]
        if running and time.monotonic() > deadline:
            late = min(running)
            raise RuntimeError(
                f"rank {late} of {len(processes)} was still running at the limit: {last_line(read_log(logs[late]))}"
            )
        time.sleep(_TICK_S)


def main() -> None:
    """One rank: run the job and write its answer. Any exception ends the process with a traceback."""
    content = json.loads(sys.argv[1])
    module, function = content["target"].split(":")
    answer = getattr(importlib.import_module(module), function)(
        content["job"], FolderRendezvous(folder=content["folder"])
    )
    draft = Path(content["answer"] + ".draft")
    draft.write_text(json.dumps(answer))
    draft.replace(content["answer"])
    sys.stdout.flush()
    os._exit(0)  # the destructor of a process group may wait for a peer that has gone


if __name__ == "__main__":
    main()
