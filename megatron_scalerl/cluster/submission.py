"""Submits runs: checks, the job script in the run's folder, sbatch."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_scalerl.checkpoints.atomic_io import lock_file, write_durably
from megatron_scalerl.checkpoints.jsonl import append_row
from megatron_scalerl.cluster import cluster
from megatron_scalerl.cluster import slurm_checks as checks
from megatron_scalerl.cluster.allocation import Request, allocate, assumed, check_plan
from megatron_scalerl.cluster.job import JobPlan, render
from megatron_scalerl.cluster.site import Site, read_site
from megatron_scalerl.controller.run_folder import SLURM, check_recipe
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.collection import listed, resolve, resolve_seeds, same_recipes
from megatron_scalerl.recipe.file import dump_recipe, load_recipe


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
        raise ValueError(f"{source}: is not a folder with recipes (*.yaml)")
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
                    f"{item.file}: has the same run folder as {other} ({recipe.run_dir}); give it another name"
                )
        recipes += own
    return recipes, same


def array_name(folder: str, base: str | None) -> str:
    """Name of the array of a folder's recipes; those of several bases differ."""
    name = Path(folder).resolve().name
    return name if base is None else f"{name}_{Path(base).stem}"


def submit(
    recipes: Sequence[Recipe], name: str, request: Request, *, recipe_file: str | None, dry_run: bool
) -> Iterator[str]:
    """Check everything, write the job script, submit it; yields what to tell the user.

    More than one recipe, or a throttle: an array. name: of the job. recipe_file: of the only recipe. Raises
    ValueError for user errors, before which nothing is submitted, and RuntimeError where Slurm fails.
    """
    site, here = read_site(request.site), cluster.present()
    partition = (
        checks.check_partition(request.partition, cluster.partitions()) if here else assumed(request, site.gres)
    )
    plan = _plan(recipes, name, request, site, partition)
    if request.throttle is not None:
        checks.check_script(plan.script, plan.runs)
    resolved, lines = _resolved(recipes, plan, partition, recipe_file, here=here)
    yield from lines
    with contextlib.ExitStack() as stack:
        for run in dict.fromkeys([*plan.runs, plan.script.parent.parent]):
            (run / SLURM).mkdir(parents=True, exist_ok=True)
            stack.enter_context(submitting(run))
        queued = cluster.queued() if here else None
        for run in plan.runs:
            checks.check_free(run, queued)
        for recipe, run in zip(resolved, plan.runs, strict=True):
            write_durably(run / SLURM / "recipe.yaml", dump_recipe(recipe).encode())
        # last: end.json of a finished run is compared with it
        write_durably(plan.script, render(plan).encode())
        cluster.check_syntax(plan.script)
        yield f"job script: {plan.script}"
        if here:
            yield f"sbatch --test-only: {cluster.test_only(plan.script)}"
        else:
            nodes = f"{partition.gpus} GPUs and {partition.cpus} CPUs"
            yield (
                f"not checked, since this machine has no Slurm: that {partition.name} exists, with nodes of {nodes} "
                "(assumed), its time limit, that Slurm accepts the job, that the run has no other one, and that the "
                f"nodes see {plan.cwd} and {plan.runs[0]}"
            )
        if dry_run:
            yield "dry run: nothing is submitted"
            return
        jobs = _submit(plan)
    yield f"submitted: job {', '.join(jobs)}; asked to save {plan.lead_s} s before its time limit"
    yield f"output: {plan.outputs}; logs: RUN/slurm and RUN/logs"
    yield from (f"megatron-scalerl submit --status {run_dir}" for run_dir in plan.runs)


def _resolved(
    recipes: Sequence[Recipe], plan: JobPlan, partition: cluster.Partition, recipe_file: str | None, *, here: bool
) -> tuple[list[Recipe], list[str]]:
    """The recipes as their runs record them, and what to tell the user. Raises ValueError for user errors."""
    from megatron_scalerl.controller.preflight import check_inputs  # imports transformers

    resolved: list[Recipe] = []
    warnings: dict[str, None] = {}
    fits = ""
    for recipe, run in zip(recipes, plan.runs, strict=True):
        whole = recipe
        try:
            whole = check_inputs(recipe, on_this_host=False).resolved(recipe)
            check_recipe(whole)
            fits = check_plan(recipe, recipe_file, partition, plan.nodes.gpus)
        except ValueError as error:
            if here:
                raise
            fits = f"not finished here: {error}"
        resolved.append(whole)
        anywhere = plan.request.any_file_system or not here
        if line := checks.check_shared(run, several=plan.nodes.nodes > 1, anywhere=anywhere):
            warnings[f"warning: {line}"] = None
    return resolved, [*warnings, f"plan --check: {fits}"]


def _plan(
    recipes: Sequence[Recipe],
    name: str,
    request: Request,
    site: Site,
    partition: cluster.Partition,
) -> JobPlan:
    runs = tuple(Path(recipe.run_dir).absolute() for recipe in recipes)
    if request.nodes > 1 and any(recipe.engine.colocate for recipe in recipes):
        raise ValueError(f"--nodes: {request.nodes} is too many: engine.colocate runs on one node")
    times = [checks.times_of(run, startup_s=request.startup_seconds, save_s=request.save_seconds) for run in runs]
    for own_times in times:
        checks.check_time(request.time, partition, own_times)
    folder = runs[0] if request.throttle is None else runs[0].parent / f"{name}.array"
    return JobPlan(
        name=name,
        script=folder / SLURM / "job.sbatch",
        runs=runs,
        cwd=Path.cwd(),
        request=request,
        nodes=allocate(recipes, partition, request, exclusive=site.exclusive),
        lead_s=max(own.lead_s for own in times),
        startup_s=int(max(own.startup_s for own in times)),
        site=site,
    )


def _submit(plan: JobPlan) -> list[str]:
    """Submit the job, or the jobs of its chain; all of them are recorded, or canceled."""
    asked = plan.request
    jobs: list[str] = []
    try:
        for _ in range(1 + (asked.max_requeues if asked.chain else 0)):
            jobs.append(cluster.submit(plan.script, [f"--dependency=afterany:{jobs[-1]}"] if jobs else []))
        row = {
            "script": str(plan.script),
            "lead_s": plan.lead_s,
            "max_requeues": asked.max_requeues,
            "chain": asked.chain,
            "nodes": plan.nodes.nodes,
            "gpu_hours": asked.gpu_hours,
        }
        for index, run in enumerate(plan.runs):
            mine = [f"{job}_{index}" for job in jobs] if asked.throttle else jobs
            append_row(run / SLURM / checks.JOBS, {"jobs": mine, **row, "unix_time": time.time()})
    except BaseException:
        cluster.cancel(jobs)  # none remains that is not recorded
        raise
    return jobs


@contextlib.contextmanager
def submitting(run: Path) -> Iterator[None]:
    """One submission of a run at a time. Raises ValueError if another one is in progress."""
    try:
        handle = lock_file(run / SLURM / "lock")
    except BlockingIOError:
        raise ValueError(f"{run}: another submission of this run is in progress") from None
    try:
        yield
    finally:
        os.close(handle)
