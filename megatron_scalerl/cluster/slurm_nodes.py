"""The nodes of a run's job: which were found unfit, and which are down."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from megatron_scalerl.cluster import cluster
from megatron_scalerl.cluster.doctor_nodes import BAD
from megatron_scalerl.controller.run_folder import SLURM

HOSTS = "hosts"
"""In the folder of an attempt: the nodes that the job had at its start, one a line."""
FIRST_NODE = "first-node.log"
"""There, too: what the other nodes noted when the first one was lost."""
_LONGEST = 500
"""Characters of a reason that are shown."""


def node_lines(run: Path, jobs: Iterable[cluster.Job]) -> Iterator[str]:
    """Lines of the status. jobs: of the run, queued or running. Raises RuntimeError."""
    since = attempts(run)
    for attempt in since:
        for node, why in unfit(attempt).items():
            yield f"attempt {attempt.name}: {node} was unfit: {why[:_LONGEST]}"
        yield from (f"attempt {attempt.name}: {line}" for line in _lines(attempt / FIRST_NODE))
    had = _lines(since[-1] / HOSTS) if since else []
    for job in jobs:
        if job.state == "RUNNING" and had:
            holds = cluster.nodes_of(job.job_id)
            yield from lost(had, had if holds is None else holds, cluster.node_states(had))


def attempts(run: Path) -> list[Path]:
    """Folders of the attempts since the last submission, in the order of their starts.

    Their names are no help: the jobs of an array have other numbers inside than outside.
    """
    script = run / SLURM / "job.sbatch"
    submitted = os.path.getmtime(script) if script.exists() else 0.0
    started = sorted((os.path.getmtime(file), file.parent) for file in (run / SLURM).glob("*/started"))
    return [folder for when, folder in started if when >= submitted]


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


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf8", errors="replace").splitlines() if file.is_file() else []
