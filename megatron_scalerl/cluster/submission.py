"""Submits runs to Slurm: checks recipes and options, writes the job script to the run's folder and calls sbatch.

A failed check raises ValueError with a message of one line.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.checkpoints.jsonl import append_row, read_jsonl
from megatron_scalerl.cluster import cluster
from megatron_scalerl.cluster.allocation import Request, allocate, assumed_partition, check_plan
from megatron_scalerl.cluster.cluster import Job, Partition, seconds_of, smallest_partition
from megatron_scalerl.cluster.job import MARGIN_S, JobPlan, render
from megatron_scalerl.cluster.site import Site, read_site
from megatron_scalerl.controller.run_folder import SAVES, SLURM, check_recipe
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.collection import listed, resolve, resolve_seeds, same_recipes
from megatron_scalerl.recipe.file import dump_recipe, load_recipe
from megatron_scalerl.recipe.other_names import unknown_key
from megatron_scalerl.record import record

STARTUP_S = 600.0
"""Assumed seconds from a job's start to the first step, for a run whose ledger has no earlier start."""
SAVE_S = 300.0
"""Assumed seconds to finish a step and write a checkpoint, for a run that has not recorded the time of a save."""
_RECENT = 100
"""Number of latest steps, of which the slowest is the estimate for the step that a run finishes before a save."""
JOBS = "jobs.jsonl"
"""File in RUN/slurm: one line per submission with the ids of the jobs."""


def recipes_of(
    source: str, overrides: Sequence[str], *, array: bool, base: str | None = None, seeds: int | None = None
) -> tuple[list[Recipe], dict[str, str]]:
    """(recipes, left-out overlay -> the equal overlay).

    source: a recipe file, or a folder, whose files *.yaml are read in the order of the names. base: the recipe that
    the folder's overlays change; an overlay that makes the same recipe as an earlier overlay is left out. seeds:
    number of runs of each recipe, with the seeds 1, 2 ...; None: one run, with the recipe's own seed. Raises
    ValueError for a wrong recipe, and for two recipes with one run folder.
    """
    if not array:
        return [load_recipe(source, overrides)], {}
    if not Path(source).is_dir():
        raise ValueError(f"--array: {source} is not a folder; give a folder of recipes (*.yaml)")
    recipes = []
    folders: dict[Path, Path] = {}
    items = listed([source])
    duplicates = same_recipes({item.name: resolve(item, base, overrides) for item in items if item.overlay})
    for item in items:
        if item.name in duplicates:
            continue
        if seeds:
            variants = resolve_seeds(item, base, overrides, range(1, seeds + 1))
        else:
            variants = [resolve(item, base, overrides)]
        for recipe in variants:
            earlier_file = folders.setdefault(recipe.run_dir.absolute(), item.file)
            if earlier_file != item.file:
                raise ValueError(
                    f"{item.file}: the run folder {recipe.run_dir} also belongs to {earlier_file}; change name"
                )
        recipes += variants
    return recipes, duplicates


def array_name(folder: str, base: str | None) -> str:
    """Name of the job array of a folder's recipes. The base is part of the name, so two bases have different
    arrays."""
    name = Path(folder).resolve().name
    return name if base is None else f"{name}_{Path(base).stem}"


def submit(
    recipes: Sequence[Recipe], name: str, request: Request, *, recipe_file: str | None, dry_run: bool
) -> Iterator[str]:
    """Check the recipes, write the job script and submit the job; yields lines for the user.

    Several recipes, or a throttle, make an array. name: name of the job. recipe_file: path of the only recipe. Raises
    ValueError for wrong options or recipes, before any submission, and RuntimeError where Slurm fails.
    """
    site = read_site(request.site)
    partition = assumed_partition(request, site.gres)
    obstacle = "this machine has no Slurm"
    try:
        if cluster.slurm_is_present():
            partition = check_partition(request.partition, cluster.partitions())
            obstacle = ""
    except RuntimeError as error:
        if not dry_run:
            raise
        obstacle = str(error)
    has_slurm = not obstacle
    plan = _plan(recipes, name, request, site, partition)
    resolved, lines = _resolved(recipes, plan, partition, recipe_file, has_slurm=has_slurm)
    yield from lines
    queued = cluster.queued() if has_slurm else None
    for run in plan.runs:
        check_free(run, queued)
    for recipe, run in zip(resolved, plan.runs, strict=True):
        (run / SLURM).mkdir(parents=True, exist_ok=True)
        write_durably(run / SLURM / "recipe.yaml", dump_recipe(recipe).encode())
    plan.script.parent.mkdir(parents=True, exist_ok=True)
    # the script is written last: the job compares the script's time with the time of a finished run's end.json
    write_durably(plan.script, render(plan).encode())
    cluster.check_syntax(plan.script)
    yield f"job script: {plan.script}"
    if has_slurm:
        yield f"sbatch --test-only: {cluster.test_only(plan.script)}"
    else:
        nodes = f"{partition.gpus} GPUs and {partition.cpus} CPUs"
        yield (
            f"not checked, since {obstacle}: whether partition {partition.name} has nodes of {nodes} (assumed) "
            "and allows the time limit, whether Slurm accepts the job, and whether the run already has a job"
        )
    if dry_run:
        yield "dry run: nothing is submitted"
        return
    jobs = _submit(plan)
    yield f"submitted: job {', '.join(jobs)}; the run is asked to save {plan.lead_s} s before the time limit"
    yield f"output: {plan.outputs}; logs: RUN/slurm and RUN/logs"
    yield from (f"megatron-scalerl submit --status {run_dir}" for run_dir in plan.runs)


def _resolved(
    recipes: Sequence[Recipe], plan: JobPlan, partition: Partition, recipe_file: str | None, *, has_slurm: bool
) -> tuple[list[Recipe], list[str]]:
    """(recipes with the values that `check_inputs` filled in, lines for the user). Raises ValueError for wrong
    settings, policies or prompts."""
    from megatron_scalerl.controller.preflight import check_inputs  # imported here, since transformers is slow

    resolved = []
    checks = "passed"
    fits = "not reached"
    for recipe in recipes:
        resolved_recipe = recipe
        try:
            resolved_recipe = check_inputs(recipe, on_this_host=False).resolved(recipe)
            check_recipe(resolved_recipe)
            fits = check_plan(recipe, recipe_file, partition, plan.nodes.gpus)
        except ValueError as error:
            # a dry run writes the script even on a machine without the policy and the prompts
            if has_slurm:
                raise
            checks = f"not finished on this machine: {error}"
        resolved.append(resolved_recipe)
    return resolved, [f"checks of settings, policy and prompts: {checks}", f"plan --check: {fits}"]


def _plan(
    recipes: Sequence[Recipe],
    name: str,
    request: Request,
    site: Site,
    partition: Partition,
) -> JobPlan:
    runs = tuple(recipe.run_dir.absolute() for recipe in recipes)
    if request.nodes > 1 and any(recipe.engine.colocate for recipe in recipes):
        raise ValueError(f"--nodes: {request.nodes} is too many: a run with engine.colocate takes one node")
    times = [times_of(run, startup_s=request.startup_seconds, save_s=request.save_seconds) for run in runs]
    for times_of_run in times:
        check_time(request.time, partition, times_of_run)
    folder = runs[0]
    if request.throttle is not None:
        folder = folder.parent / f"{name}.array"
    return JobPlan(
        name=name,
        script=folder / SLURM / "job.sbatch",
        runs=runs,
        cwd=Path.cwd(),
        request=request,
        nodes=allocate(recipes, partition, request, exclusive=site.exclusive),
        lead_s=max(times_of_run.lead_s for times_of_run in times),
        startup_s=int(max(times_of_run.startup_s for times_of_run in times)),
        site=site,
    )


def _submit(plan: JobPlan) -> list[str]:
    """Submit the job, or all jobs of a chain, and return the ids.

    The ids are recorded in the folder of each run. After a failure all submitted jobs are canceled.
    """
    request = plan.request
    jobs = []
    try:
        jobs.append(cluster.submit(plan.script))
        if request.chain:
            # with afterany the next job starts however the job before ended, and goes on from the newest checkpoint
            for _ in range(request.max_requeues):
                jobs.append(cluster.submit(plan.script, [f"--dependency=afterany:{jobs[-1]}"]))
        row = {"max_requeues": request.max_requeues, "gpu_hours": request.gpu_hours}
        for index, run in enumerate(plan.runs):
            run_jobs = [f"{job}_{index}" for job in jobs] if request.throttle else jobs
            append_row(run / SLURM / JOBS, {"jobs": run_jobs, **row, "unix_time": time.time()})
    except BaseException:
        cluster.cancel(jobs)  # a job whose id was not recorded must not run
        raise
    return jobs


@record
class Times:
    """Seconds that a run takes to start and to save."""

    startup_s: float
    """Seconds from the job's start to the first step."""
    save_s: float
    """Seconds to finish the step in progress, with its weight update, and to write a checkpoint."""

    @property
    def lead_s(self) -> int:
        """Seconds before the time limit at which the run has to be asked to save."""
        return int(self.save_s + 0.999) + MARGIN_S


def times_of(run: Path, *, startup_s: float | None, save_s: float | None) -> Times:
    """The given times, else the slowest start, step and checkpoint in the run's records, else the assumed times."""
    if startup_s is None:
        starts = [row["seconds"] for row in read_jsonl(run / "ledger.jsonl") if row.get("phase") == "startup"]
        startup_s = max(starts, default=STARTUP_S)
    saves = read_jsonl(run / SAVES)
    if save_s is None and not saves:
        save_s = SAVE_S
    if save_s is None:
        # the last checkpoint begins after the end of an asynchronous checkpoint that is being written
        pending = max(row["seconds"] - row.get("stopped_seconds", row["seconds"]) for row in saves)
        keys = ("train_seconds", "pinned_seconds", "publish_seconds")
        rows = read_jsonl(run / "metrics.jsonl")[-_RECENT:]
        step = max((sum(row.get(key, 0.0) for key in keys) for row in rows), default=0.0)
        save_s = step + max(row["seconds"] for row in saves) + pending
    return Times(startup_s=startup_s, save_s=save_s)


def check_partition(names: str, partitions: Mapping[str, Partition]) -> Partition:
    """The partition called `names`; for several names, separated by commas, the result of `smallest_partition`.

    Raises ValueError for an unknown name.
    """
    for name in names.split(","):
        if not partitions:
            raise ValueError(f"--partition: there is no partition {name}; Slurm lists no partitions at all")
        if name not in partitions:
            text = unknown_key(name, partitions, expected="a partition of this cluster", kind="partitions")
            raise ValueError(f"--partition: {text}")
    return smallest_partition([partitions[name] for name in names.split(",")])


def check_time(limit: str, partition: Partition, times: Times) -> None:
    """Raise ValueError for a time limit that is too short to start and save, or longer than the partition's limit."""
    seconds = seconds_of(limit)
    shortest = times.startup_s + times.lead_s
    if seconds < shortest:
        raise ValueError(
            f"--time: {seconds} s is too short for start-up ({times.startup_s:.0f} s), a step and its checkpoint "
            f"({times.save_s:.0f} s) and a margin ({MARGIN_S} s); use at least {shortest:.0f} s, or state "
            "other times with --startup-seconds and --save-seconds"
        )
    if partition.limit_s is not None and seconds > partition.limit_s:
        raise ValueError(
            f"--time: {seconds} s is more than the limit of partition {partition.name}, {partition.limit_s} s"
        )


def job_ids(run: Path) -> list[str]:
    """Ids of the run's submitted jobs, the oldest first."""
    return [str(job) for row in read_jsonl(run / SLURM / JOBS) for job in row["jobs"]]


def jobs_of(run: Path, jobs: Iterable[Job]) -> list[Job]:
    """The run's jobs among `jobs`, submitted by the command or by hand; running jobs come first."""
    # a job that was submitted by hand has no line in jobs.jsonl, and is found by the script
    submitted = set(job_ids(run))
    script = str(run / SLURM / "job.sbatch")
    run_jobs = [job for job in jobs if job.job_id in submitted or job.script == script]
    return sorted(run_jobs, key=lambda job: job.state != "RUNNING")


def check_free(run: Path, jobs: Iterable[Job] | None) -> None:
    """Raise ValueError for a run with a queued or running job.

    jobs: this user's jobs. None in a dry run where Slurm is absent or fails; a run with any recorded job is refused
    then.
    """
    if jobs is None and job_ids(run):
        raise ValueError(f"{run}: only Slurm knows whether the last job is over; use a login node, or rename the run")
    for job in jobs_of(run, jobs or ()):
        raise ValueError(f"{run}: the run has job {job.job_id} already, {job.state}; cancel by scancel {job.job_id}")
