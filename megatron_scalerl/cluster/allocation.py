"""The resources that a job requests from Slurm: nodes, and the GPUs or slots and the CPUs of each node."""

import re
from collections.abc import Sequence
from pathlib import Path

from megatron_scalerl.cluster.cluster import Partition, gpus_of
from megatron_scalerl.launch.placement import hosts_needed
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.record import record

ASSUMED_GPUS = 8
"""Assumed number of GPUs of a node, where Slurm cannot be asked."""
ASSUMED_CPUS = 12
"""Assumed number of CPUs of a node for each GPU, where Slurm cannot be asked."""


@record
class Request:
    """The options of `submit`. The recipe or the run's records decide about an option that is None."""

    partition: str
    time: str
    """Time limit of one job, in Slurm's notation."""
    nodes: int
    gpus_per_node: int | None
    slots: int | None
    """Number of ranks and engine devices of a node, for a run without GPUs."""
    cpus: int | None
    """CPUs of a node."""
    gpu_hours: float | None
    """Device-hours of all attempts after which the job is not queued again; None without a budget."""
    check_seconds: float
    """Seconds within which each node has to report its check (`doctor`), in a job of several nodes."""
    site: Path | None
    """Path of the site file."""
    max_requeues: int
    """How often one job is queued again at most. With `chain`: the number of jobs after the first job."""
    max_failures: int
    """Most restarts within one job after failures, without a new checkpoint in between."""
    chain: bool
    throttle: int | None
    """Number of an array's tasks that run at the same time; None without an array."""
    startup_seconds: float | None
    save_seconds: float | None


@record
class Allocation:
    """The nodes of a job. Produced by `allocate`."""

    nodes: int
    gpus: int
    """Number of GPUs of a node, 0 for a run on CPUs."""
    slots: int | None
    """Number of ranks and engine devices of a node; None on one node, which runs all ranks and engines."""
    cpus: int | None
    """Number of CPUs that the job requests of a node; None for whole nodes."""


def allocate(
    recipes: Sequence[Recipe], partition: Partition, request: Request, *, exclusive: bool = True
) -> Allocation:
    """The nodes that the largest of the recipes needs. exclusive: whether the job may take whole nodes.

    Raises ValueError if the options do not fit the partition, or do not fit one of the recipes.
    """
    if not 1 <= request.nodes <= partition.nodes:
        raise ValueError(
            f"--nodes: {request.nodes} is out of range: partition {partition.name} has {partition.nodes} nodes"
        )
    if request.nodes == 1 and request.slots is not None:
        raise ValueError("--slots requires --nodes of at least 2; leave --slots out for a single node")
    gpus = max(_gpus(recipe, partition, request) for recipe in recipes)
    slots = None
    if request.nodes > 1:
        slots = gpus or request.slots
        if slots is None:
            raise ValueError("--slots is missing; give the number of ranks and engine devices of a node")
        needed_nodes = max(_checked_need(recipe, slots, request.nodes) for recipe in recipes)
        if needed_nodes < request.nodes:
            raise ValueError(
                f"--nodes: {request.nodes} is too many: trainer and engines fill {needed_nodes} nodes of {slots} "
                f"devices; use --nodes {needed_nodes}"
            )
    cpus = request.cpus
    # a job on all GPUs of a node takes the whole node, and so requests no number of CPUs
    if cpus is None and not (exclusive and gpus and gpus == partition.gpus):
        share = 2 + 2 * (slots or max(recipe.devices for recipe in recipes))
        if gpus:
            share = partition.cpus * gpus // partition.gpus
        cpus = max(1, min(partition.cpus, share))
    elif cpus is not None and not 0 < cpus <= partition.cpus:
        raise ValueError(f"--cpus: {cpus} is out of range: a node of {partition.name} has {partition.cpus} CPUs")
    return Allocation(nodes=request.nodes, gpus=gpus, slots=slots, cpus=cpus)


def assumed_partition(request: Request, gres: str) -> Partition:
    """A partition with assumed nodes, for a machine without Slurm. gres: the GPUs of a node that the site file
    requests."""
    number = request.gpus_per_node or gpus_of(gres) or ASSUMED_GPUS
    types = re.findall(r"(?:^|,)gpu:([A-Za-z][^:,]*)", gres)
    return Partition(
        name=request.partition,
        gpus=number,
        cpus=request.cpus or ASSUMED_CPUS * number,
        # Slurm cannot be asked for the number of nodes, so the number has no bound
        nodes=1 << 20,
        gpu_type=next(iter(types), None),
        limit_s=None,
    )


def check_plan(recipe: Recipe, recipe_file: str | None, partition: Partition, gpus: int) -> str:
    """The verdict of `plan --check` about a run on GPUs, or the reason why there is no verdict.

    gpus: GPUs of a node; 0 for a run on CPUs. Raises ValueError for a recipe that does not fit.
    """
    from megatron_scalerl.plan.hardware import GPUS

    if not gpus:
        return "skipped without GPUs"
    kind = (partition.gpu_type or "").lower()
    models = [key for key in GPUS if key == kind or key.split("-")[0] == kind]
    if len(models) != 1:
        names = ", ".join(GPUS)
        return f"skipped: Slurm's GPU type of {partition.name} is {kind or '(none)'}, but the planner knows {names}"
    from megatron_scalerl.plan.assumptions import Assumptions
    from megatron_scalerl.plan.command import config_folder
    from megatron_scalerl.plan.planner import make_plan
    from megatron_scalerl.plan.text import verdict

    folder = config_folder(recipe.policy.path, recipe_file or Path.cwd() / "recipe.yaml")
    plan = make_plan(recipe, folder, recipe.devices, GPUS[models[0]], Assumptions())
    if problems := plan.problems():
        raise ValueError(f"{recipe.name}: plan --check: {problems[0]}")
    return verdict(plan)


def _gpus(recipe: Recipe, partition: Partition, request: Request) -> int:
    """Number of GPUs that the run takes of each node: --gpus-per-node if given. Else a run on one node takes a GPU
    for each rank and engine device, and a run on several nodes takes all GPUs of each node.

    In a partition with GPUs the run takes GPUs, unless --gpus-per-node is 0. Raises ValueError for --slots with GPUs,
    for more GPUs than a node has, and for fewer than a run on one node takes.
    """
    devices = recipe.devices
    gpus = request.gpus_per_node
    if gpus is None:
        gpus = partition.gpus
        if gpus and request.nodes == 1:
            gpus = devices
    if gpus and request.slots is not None:
        raise ValueError(
            f"--slots is for a run on CPUs, but this run takes {gpus} GPUs of a node; leave --slots out, or add "
            "--gpus-per-node 0"
        )
    if not 0 <= gpus <= partition.gpus:
        advice = ""
        if not recipe.engine.colocate and (node_count := hosts_needed(recipe, partition.gpus)):
            advice = f"; --nodes {node_count} would be enough"
        raise ValueError(
            f"--gpus-per-node: {gpus} is out of range: a node of {partition.name} has {partition.gpus} GPUs, and "
            f"ranks and engines of {recipe.name} take {devices}{advice}"
        )
    if request.nodes == 1 and 0 < gpus < devices:
        raise ValueError(f"--gpus-per-node: {gpus} is too few: ranks and engines take {devices} GPUs of one node")
    return gpus


def _checked_need(recipe: Recipe, slots: int, nodes: int) -> int:
    """Nodes that a run needs. Raises ValueError if `nodes` are too few, or if a node has too few devices for one
    engine."""
    needed_nodes = hosts_needed(recipe, slots)
    engines = f"{recipe.engine.count} engines of {recipe.engine.devices_per_engine}"
    if recipe.algorithm.teachers:
        engines += f" and {recipe.teacher_devices} devices of teachers"
    if needed_nodes is None:
        raise ValueError(
            f"{recipe.name}: engine.devices_per_engine: {max(recipe.engine_devices.values())} is more than the "
            f"{slots} devices of a node, and no engine or teacher spans two nodes"
        )
    if needed_nodes > nodes:
        raise ValueError(
            f"--nodes: {nodes} is too few: {recipe.trainer.world_size} trainer ranks and {engines} ({recipe.name}) "
            f"take at least {needed_nodes} nodes of {slots} devices"
        )
    return needed_nodes
