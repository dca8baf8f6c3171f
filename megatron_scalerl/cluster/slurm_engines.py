"""`submit --add-engines RUN`: a job of its own whose engines join a run that another job trains."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.checkpoints.jsonl import JsonlWriter
from megatron_scalerl.cluster import cluster, slurm_checks
from megatron_scalerl.cluster.allocation import default_gpus
from megatron_scalerl.cluster.job import EXPORTED, escaped, nodes_options, program_of, rendered, site_options
from megatron_scalerl.cluster.site import Site, read_site
from megatron_scalerl.cluster.submission import Request, submitting
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
    script: Path
    partition: str
    time: str
    nodes: int
    gpus: int
    """GPUs of a node, 0 on CPUs."""
    cpus: int | None
    """CPUs of a node, None for whole nodes."""
    per_node: int
    """Engines of a node."""
    devices: int
    """Devices of an engine."""
    site: Site


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
        write_durably(plan.script, render(plan).encode())
        cluster.check_syntax(plan.script)
        yield f"job script: {plan.script}"
        yield f"sbatch --test-only: {cluster.test_only(plan.script)}"
        if dry_run:
            yield "dry run: nothing is submitted"
            return
        job = cluster.submit(plan.script)
        try:
            with contextlib.closing(JsonlWriter(run / SLURM / slurm_checks.ENGINE_JOBS)) as file:
                file.append(
                    {"jobs": [job], "script": str(plan.script), "nodes": plan.nodes, "unix_time": time.time()}
                )
                file.sync()
        except BaseException:
            cluster.cancel([job])
            raise
    yield f"submitted: job {job}; {plan.nodes * plan.per_node} engines join the run of job {main} when it starts"
    yield f"output: {run / SLURM}/engines-%j.out; logs: RUN/slurm/{job}.0"


def plan_engines(run: Path, recipe: Recipe, request: Request, partition: cluster.Partition) -> EnginesPlan:
    """As many engines on each node as fit. Raises ValueError."""
    if recipe.rollouts.deterministic:
        raise ValueError("rollouts.deterministic: expected false for engines that join, found true")
    asked, each = request.asked, recipe.engine.devices_per_engine
    site = read_site(request.site)
    if site.container != "none":
        raise ValueError(f"{request.site}: container: expected none with --add-engines, found {site.container}")
    if not 1 <= asked.nodes <= partition.nodes:
        raise ValueError(
            f"--nodes: expected 1 to {partition.nodes}, the nodes of {partition.name}, found {asked.nodes}"
        )
    gpus = asked.gpus
    if gpus is None:
        gpus = partition.gpus if default_gpus(recipe, partition) and asked.slots is None else 0
    if not 0 <= gpus <= partition.gpus:
        raise ValueError(
            f"--gpus-per-node: expected at most {partition.gpus}, what a node of {partition.name} has, found {gpus}"
        )
    if gpus and asked.slots is not None:
        raise ValueError(f"--slots: expected a run on CPUs (on GPUs set --gpus-per-node), found {gpus} GPUs a node")
    slots = gpus or asked.slots or each
    if slots < each:
        raise ValueError(
            f"--{'gpus-per-node' if gpus else 'slots'}: expected at least {each}, the devices of an engine "
            f"(engine.devices_per_engine), found {slots}"
        )
    cpus = asked.cpus
    if cpus is None and gpus != partition.gpus:
        cpus = max(1, partition.cpus * gpus // partition.gpus) if gpus else min(partition.cpus, 2 * slots)
    return EnginesPlan(
        run=run,
        script=run / SLURM / "engines.sbatch",
        partition=partition.name,
        time=request.time,
        nodes=asked.nodes,
        gpus=gpus,
        cpus=cpus,
        per_node=slots // each,
        devices=each,
        site=site,
    )


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
    return rendered(
        "engines.sbatch",
        plan.site,
        options=list(_options(plan)),
        run=plan.run,
        cwd=Path.cwd(),
        nodes=plan.nodes,
        cpus=plan.cpus,
        per_node=plan.per_node,
        devices=plan.devices,
        command=shlex.join([*program_of(plan.site), "engine", "--join"]),
    )


def _options(plan: EnginesPlan) -> Iterator[str]:
    yield f"--job-name={plan.run.name}-engines"
    yield f"--partition={plan.partition}"
    yield f"--time={plan.time}"
    yield from nodes_options(plan.nodes, plan.gpus, plan.cpus, several=plan.nodes > 1)
    yield "--requeue"
    yield "--open-mode=append"
    yield f"--output={escaped(str(plan.script.with_name('engines-%j.out')))}"
    yield f"--export={','.join(EXPORTED)}"
    yield from site_options(plan.site, plan.site.sbatch)
