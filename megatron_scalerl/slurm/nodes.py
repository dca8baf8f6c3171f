"""The nodes of a run's job: which were found unfit, and which are down."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_scalerl.controller.run_folder import SLURM
from megatron_scalerl.doctor.nodes import BAD
from megatron_scalerl.slurm import cluster

HOSTS = "hosts"
"""In the folder of an attempt: the nodes that the job had at its start, one a line."""
FIRST_NODE = "first-node.log"
"""There, too: what the other nodes noted when the first one was lost."""
_LONGEST = 500
"""Characters of a reason that are shown."""


def node_lines(run: Path, newest: Mapping[str, Any] | None, jobs: Iterable[cluster.Job]) -> Iterator[str]:
    """Lines of the status. newest: the last submission. jobs: of the run, queued or running. Raises RuntimeError."""
    ids = {job.job_id for job in jobs} | set(newest["jobs"] if newest else ())
    for attempt in attempts(run, ids):
        for node, why in unfit(attempt).items():
            yield f"attempt {attempt.name}: {node} was unfit: {why[:_LONGEST]}"
        yield from (f"attempt {attempt.name}: {line}" for line in _lines(attempt / FIRST_NODE))
    for job in jobs:
        if job.state != "RUNNING" or not (mine := attempts(run, {job.job_id})):
            continue
        had = _lines(mine[-1] / HOSTS)
        holds = cluster.nodes_of(job.job_id)
        yield from lost(had, had if holds is None else holds, cluster.node_states(had))


def attempts(run: Path, jobs: Iterable[str]) -> list[Path]:
    """Folders of the attempts of these jobs, by job and restart."""
    found = [(job, folder) for job in jobs for folder in (run / SLURM).glob(f"{job}.*") if folder.is_dir()]
    numbered = [(job, int(folder.name.rpartition(".")[2]), folder) for job, folder in found if _is_attempt(folder)]
    return [folder for _, _, folder in sorted(numbered)]


def unfit(attempt: Path) -> dict[str, str]:
    """Why, for each node that the attempt's check found unfit and excluded."""
    return dict(line.split("\t", 1) for line in _lines(attempt / "nodes" / BAD) if "\t" in line)


def lost(had: Iterable[str], holds: Iterable[str], states: Mapping[str, str]) -> Iterator[str]:
    """A line for each node of the attempt that failed: it left the job, or it is down or silent in it.

    had: nodes at the start. holds: nodes of the job now. states: as `cluster.node_states`.
    """
    still = set(holds)
    for node in had:
        state = states.get(node, "unknown")
        if node not in still:
            yield f"{node} failed and has left the job; it is {state} now"
        elif state.endswith("*") or state.startswith(("down", "fail")):
            yield f"{node} is {state}" + (": Slurm gets no answer from it" if state.endswith("*") else "")


def _is_attempt(folder: Path) -> bool:
    return folder.name.rpartition(".")[2].isdigit()


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf8", errors="replace").splitlines() if file.is_file() else []
