"""Several trainer ranks on this machine for one job: each is a process, with a GPU of its own if there are GPUs."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_scalerl.check_gpu.programs import cause, last_line, read_log, stop
from megatron_scalerl.distributed.rendezvous import FolderRendezvous, private_folder
from megatron_scalerl.processes.child_process import ChildProcess, end_with

_GRACE_S = 1.0


def run_ranks(
    world_size: int, target: str, job: Mapping[str, Any], *, folder: Path, timeout_s: float, env: Mapping[str, str]
) -> list[Any]:
    """Call `target` ("module:function") with (job, rendezvous) on each rank; returns the results, by rank.

    job, results: JSON types. folder: for results and logs. env: added to this process's environment. When a rank
    fails, all are stopped with everything they started. Raises RuntimeError naming the rank, with the cause from its
    log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = [folder / f"rank-{rank}.json" for rank in range(world_size)]
    logs = [folder / f"rank-{rank}.log" for rank in range(world_size)]
    for path in (*results, *logs):
        path.unlink(missing_ok=True)
    with private_folder() as rendezvous:
        commands = []
        for rank, result in enumerate(results):
            content = {"target": target, "job": job, "folder": rendezvous.folder, "result": str(result)}
            argv = [sys.executable, "-m", "megatron_scalerl.check_gpu.ranks", json.dumps(content)]
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
            commands.append((f"rank {rank} of {world_size}", argv, {**os.environ, **env, **place}, logs[rank]))
        asyncio.run(_run_all(commands, timeout_s))
    return [json.loads(result.read_text()) for result in results]


async def _run_all(commands: Sequence[tuple[str, list[str], dict[str, str], Path]], timeout_s: float) -> None:
    """Run the processes (name, argv, environment, log). Raises RuntimeError for the first that fails."""
    processes: list[ChildProcess] = []
    try:
        async with asyncio.timeout(timeout_s):
            for command in commands:
                processes.append(await ChildProcess.start(*command))
            await asyncio.gather(*map(_succeed, processes))
    except TimeoutError:
        late = next(process for process in processes if process.running)
        last = last_line(read_log(late.log))
        raise RuntimeError(f"{late.name} was still running at the time limit: {last}") from None
    finally:
        await asyncio.gather(*(stop(process, _GRACE_S) for process in processes))


async def _succeed(process: ChildProcess) -> None:
    code = await process.wait()
    if code:
        raise RuntimeError(f"{process.name} ended with exit code {code}: {cause(read_log(process.log))}")


def main() -> None:
    """One rank: run the job and write its result. Any exception ends the process with a traceback."""
    content = json.loads(sys.argv[1])
    module, function = content["target"].split(":")
    rendezvous = FolderRendezvous(folder=content["folder"])
    result = getattr(importlib.import_module(module), function)(content["job"], rendezvous)
    draft = Path(content["result"] + ".draft")
    draft.write_text(json.dumps(result))
    draft.replace(content["result"])


if __name__ == "__main__":
    end_with(main)
