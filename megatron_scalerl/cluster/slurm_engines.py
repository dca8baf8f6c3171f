"""`submit --add-engines RUN`: a job of its own whose engines join a run that another job trains."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_scalerl.cluster import cluster, slurm_checks
from megatron_scalerl.cluster.allocation import Allocation, Request, joining
from megatron_scalerl.cluster.job import job_options, output_options, program_of, rendered
from megatron_scalerl.cluster.site import Site, read_site
from megatron_scalerl.cluster.submission import record, submitted_whole, submitting, write_script
from megatron_scalerl.controller.run_folder import END, SLURM
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import load_recipe

CONTROLLER = Path("control") / "controller.json"
"""In RUN: where engines find the controller; written by it."""


@dataclass(frozen=True, kw_only=True)
class EnginesPlan:
    """Everything that the script of a job of engines says."""

    run: Path
    """Absolute."""
    request: Request
    nodes: Allocation
    """With `slots`."""
    devices: int
    """Devices of an engine."""
    site: Site

    @property
    def script(self) -> Path:
        """Where the script is written; its output goes to the same folder."""
        return self.run / SLURM / "engines.sbatch"

    @property
    def per_node(self) -> int:
        """Engines of a node."""
        return (self.nodes.slots or 0) // self.devices


def add_engines(run_dir: Path, request: Request, *, dry_run: bool) -> Iterator[str]:
    """Submit the job; yields what to tell the user.

    Raises ValueError for user errors, before which nothing is submitted, and RuntimeError where Slurm fails.
    """
    cluster.require()
    run = run_dir.absolute()
    recipe = load_recipe(run / "recipe.yaml")
    partition = slurm_checks.check_partition(request.partition, cluster.partitions())
    plan = plan_engines(run, recipe, request, partition)
    with submitting(run):
        main = check_joinable(run)
        yield from write_script(plan.script, render(plan), dry_run=dry_run)
        if dry_run:
            return
        with submitted_whole() as jobs:
            jobs.append(cluster.submit(plan.script))
            row = {"script": str(plan.script), "nodes": plan.nodes.nodes}
            record(run / SLURM / slurm_checks.ENGINE_JOBS, jobs, row)
    count = plan.nodes.nodes * plan.per_node
    yield f"submitted: job {jobs[0]}; {count} engines join the run of job {main} when it starts"
    yield f"output: {run / SLURM}/engines-%j.out; logs: RUN/slurm/{jobs[0]}.0"


def plan_engines(run: Path, recipe: Recipe, request: Request, partition: cluster.Partition) -> EnginesPlan:
    """As many engines on each node as fit. Raises ValueError."""
    if recipe.rollouts.deterministic:
        raise ValueError("rollouts.deterministic: expected false for engines that join, found true")
    site = read_site(request.site)
    if site.container != "none":
        raise ValueError(f"{request.site}: container: expected none with --add-engines, found {site.container}")
    nodes = joining(recipe, partition, request)
    return EnginesPlan(run=run, request=request, nodes=nodes, devices=recipe.engine.devices_per_engine, site=site)


def check_joinable(run: Path) -> str:
    """The id of the job that trains the run. Raises ValueError for a run that no engine can join."""
    if not (jobs := slurm_checks.jobs_of(run, cluster.queued())):
        ended = "it is finished" if (run / END).exists() else "it has none that is queued or running"
        raise ValueError(f"{run}: expected a run with a job, found that {ended}")
    if jobs[0].state != "RUNNING":
        raise ValueError(f"{run}: expected a run whose job is running, found job {jobs[0].job_id} {jobs[0].state}")
    if not (run / CONTROLLER).is_file():
        raise ValueError(
            f"{run / CONTROLLER}: expected the file of a controller that engines can join (a run with --nodes), "
            "found none"
        )
    return jobs[0].job_id


def render(plan: EnginesPlan) -> str:
    """The text of the job script."""
    asked, nodes = plan.request, plan.nodes
    more = ["--requeue", *output_options(str(plan.script.with_name("engines-%j.out")))]
    more += plan.site.options(plan.site.sbatch)
    several = nodes.nodes > 1
    options = job_options(f"{plan.run.name}-engines", asked.partition, asked.time, nodes, more, several=several)
    return rendered(
        "engines.sbatch",
        plan.site,
        options=list(options),
        run=plan.run,
        cwd=Path.cwd(),
        nodes=nodes.nodes,
        cpus=nodes.cpus,
        per_node=plan.per_node,
        devices=plan.devices,
        command=shlex.join([*program_of(plan.site), "engine", "--join"]),
    )
