"""Submits runs: checks, the job script in the run's folder, sbatch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.checkpoints.jsonl import JsonlWriter
from megatron_scalerl.cluster import cluster
from megatron_scalerl.cluster import slurm_checks as checks
from megatron_scalerl.cluster.allocation import Allocation, Asked, allocate, check_plan
from megatron_scalerl.cluster.components import components
from megatron_scalerl.cluster.job import EngineNodes, JobPlan, render
from megatron_scalerl.cluster.site import Site, read_site
from megatron_scalerl.controller.preflight import check_inputs
from megatron_scalerl.controller.run_folder import SLURM, check_recipe
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.collection import listed, resolve, resolve_seeds, same_recipes
from megatron_scalerl.recipe.file import dump_recipe, load_recipe


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asks for."""

    partition: str
    engine_partition: str | None
    """Of the engines' nodes in a heterogeneous job; None for `partition`."""
    time: str
    asked: Asked
    gpu_hours: float | None
    """Device-hours that the run may take in all, None without a budget."""
    check_s: float
    """Seconds within which each of several nodes has to report."""
    any_file_system: bool
    """Also where other nodes seem not to see the output folder."""
    site: str | None
    """Path of the site file."""
    max_requeues: int
    max_failures: int
    chain: bool
    throttle: int | None
    """For an array: how many of its runs may run at a time."""
    startup_s: float | None
    save_s: float | None


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A job whose script is written and was accepted by `sbatch --test-only`."""

    plan: JobPlan
    expected: str
    """What Slurm says about its start."""
    fits: str
    """What `plan --check` says, or why it was skipped."""
    warnings: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    """Ids of the submitted jobs; none after a dry run."""


def recipes_of(
    source: str, overrides: Sequence[str], *, array: bool, base: str | None = None, seeds: int | None = None
) -> tuple[list[Recipe], dict[str, str]]:
    """The recipe in a file, or those in the files *.yaml of a folder, by name, and what is left out.

    base: what the folder's overlays are laid over; one that makes the same recipe of it as an earlier one is left
    out, and named with that. seeds: runs of each recipe, with seeds from 1 on; None: one, with the recipe's own seed.
    Raises ValueError.
    """
    if not array:
        return [load_recipe(source, overrides)], {}
    if not Path(source).is_dir():
        raise ValueError(f"{source}: expected a folder with recipes (*.yaml), found none")
    recipes: list[Recipe] = []
    folders: dict[Path, Path] = {}
    items = listed([source])
    same = same_recipes({item.name: resolve(item, base, overrides) for item in items if item.overlay})
    for item in (each for each in items if each.name not in same):
        own = resolve_seeds(item, base, overrides, range(1, seeds + 1)) if seeds else [resolve(item, base, overrides)]
        for recipe in own:
            other = folders.setdefault(Path(recipe.run_dir).absolute(), item.file)
            if other != item.file:
                raise ValueError(
                    f"{item.file}: expected a run of its own, found the folder of {other} ({recipe.run_dir})"
                )
        recipes += own
    return recipes, same


def array_name(folder: str, base: str | None) -> str:
    """Name of the array of a folder's recipes; those of several bases differ."""
    name = Path(folder).resolve().name
    return name if base is None else f"{name}_{Path(base).stem}"


def submit(
    recipes: Sequence[Recipe], name: str, request: Request, *, recipe_file: str | None, dry_run: bool
) -> Submission:
    """Check everything, write the job script, submit it. More than one recipe, or a throttle: an array.

    name: of the job. recipe_file: of the only recipe. Raises ValueError for user errors, before which nothing is
    submitted, and RuntimeError where Slurm fails.
    """
    cluster.require()
    site = read_site(request.site)
    partitions = cluster.partitions()
    partition = checks.check_partition(request.partition, partitions)
    plan = _plan(recipes, name, request, site, partitions)
    if request.throttle is not None:
        checks.check_script(plan.script, plan.runs)
    resolved: list[Recipe] = []
    warnings, fits = [], ""
    for recipe, run in zip(recipes, plan.runs, strict=True):
        resolved.append(check_inputs(recipe, on_this_host=False).resolved(recipe))  # as the run itself records it
        check_recipe(resolved[-1])
        warnings.append(checks.check_shared(run, several=plan.several, anywhere=request.any_file_system))
        others = partitions[plan.engines.partition] if plan.engines is not None else None
        fits = check_plan(recipe, recipe_file, partition, plan.gpus, others)
    with contextlib.ExitStack() as stack:
        for run in dict.fromkeys([*plan.runs, plan.script.parent.parent]):
            (run / SLURM).mkdir(parents=True, exist_ok=True)
            stack.enter_context(submitting(run))
        queued = cluster.queued()
        for run in plan.runs:
            checks.check_free(run, queued)
        for recipe, run in zip(resolved, plan.runs, strict=True):
            write_durably(run / SLURM / "recipe.yaml", dump_recipe(recipe).encode())
        # last: end.json of a finished run is compared with it
        write_durably(plan.script, render(plan).encode())
        cluster.check_syntax(plan.script)
        expected = cluster.test_only(plan.script)
        jobs = () if dry_run else _submit(plan)
    said = tuple(dict.fromkeys(line for line in warnings if line is not None))
    return Submission(plan=plan, expected=expected, fits=fits, warnings=said, jobs=jobs)


def _plan(
    recipes: Sequence[Recipe],
    name: str,
    request: Request,
    site: Site,
    partitions: Mapping[str, cluster.Partition],
) -> JobPlan:
    partition = partitions[request.partition]
    runs = tuple(Path(recipe.run_dir).absolute() for recipe in recipes)
    array = request.throttle is not None
    asked = request.asked
    if (asked.nodes > 1 or asked.engine_nodes) and site.container != "none":
        raise ValueError(f"{request.site}: container: expected none with several nodes, found {site.container}")
    if (asked.nodes > 1 or asked.engine_nodes) and any(recipe.engine.colocate for recipe in recipes):
        raise ValueError(f"--nodes: expected 1 with engine.colocate, found {asked.nodes + asked.engine_nodes}")
    allocation, engines = _allocated(recipes, request, partitions)
    times = [checks.times_of(run, startup_s=request.startup_s, save_s=request.save_s) for run in runs]
    for each in times:
        checks.check_time(request.time, partition, each)
        if engines is not None:
            checks.check_time(request.time, partitions[engines.partition], each)
    folder = runs[0].parent / f"{name}.array" if array else runs[0]
    return JobPlan(
        name=name,
        script=folder / SLURM / "job.sbatch",
        runs=runs,
        cwd=Path.cwd(),
        partition=partition.name,
        time=request.time,
        nodes=allocation.nodes,
        gpus=allocation.gpus,
        slots=allocation.slots,
        cpus=allocation.cpus,
        lead_s=max(each.lead_s for each in times),
        max_requeues=request.max_requeues,
        chain=request.chain,
        throttle=request.throttle,
        max_failures=request.max_failures,
        gpu_hours=request.gpu_hours,
        check_s=request.check_s,
        startup_s=int(max(each.startup_s for each in times)),
        engines=engines,
        site=site,
    )


def _allocated(
    recipes: Sequence[Recipe], request: Request, partitions: Mapping[str, cluster.Partition]
) -> tuple[Allocation, EngineNodes | None]:
    """The nodes of the job, and those of its engines if these are a component of their own."""
    partition, asked = partitions[request.partition], request.asked
    if not asked.engine_nodes:
        return allocate(recipes, partition, asked), None
    if request.throttle is not None:
        raise ValueError("--engine-nodes: expected no --array with it: Slurm has no arrays of heterogeneous jobs")
    others = checks.check_partition(request.engine_partition or partition.name, partitions, "--engine-partition")
    allocation, mine = components(recipes[0], partition, others, asked)
    assert mine.slots is not None
    return allocation, EngineNodes(partition=others.name, nodes=mine.nodes, gpus=mine.gpus, slots=mine.slots)


def _submit(plan: JobPlan) -> tuple[str, ...]:
    """Submit the job, or the jobs of its chain; all of them are recorded, or canceled."""
    jobs: list[str] = []
    try:
        for _ in range(1 + (plan.max_requeues if plan.chain else 0)):
            jobs.append(cluster.submit(plan.script, [f"--dependency=afterany:{jobs[-1]}"] if jobs else []))
        for index, run in enumerate(plan.runs):
            mine = [f"{job}_{index}" for job in jobs] if plan.throttle else jobs
            with contextlib.closing(JsonlWriter(run / SLURM / checks.JOBS)) as file:
                file.append(
                    {
                        "jobs": mine,
                        "script": str(plan.script),
                        "lead_s": plan.lead_s,
                        "max_requeues": plan.max_requeues,
                        "chain": plan.chain,
                        "nodes": plan.nodes,
                        "engine_nodes": plan.engines.nodes if plan.engines is not None else 0,
                        "gpu_hours": plan.gpu_hours,
                        "unix_time": time.time(),
                    }
                )
                file.sync()
    except BaseException:
        cluster.cancel(jobs)
        raise
    return tuple(jobs)


@contextlib.contextmanager
def submitting(run: Path) -> Iterator[None]:
    """One submission of a run at a time. Raises ValueError if another one is in progress."""
    handle = os.open(run / SLURM / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{run}: expected one submission at a time, found another one in progress") from None
        yield
    finally:
        os.close(handle)
