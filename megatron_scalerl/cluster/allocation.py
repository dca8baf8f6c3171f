"""What a job asks Slurm for: nodes, and the GPUs or slots and the CPUs of each one.

A heterogeneous job has nodes for the controller and the trainer, and others for the engines. Both components take
whole nodes, so that no node is in both. Such jobs are a chain (`--chain`): Slurm 22.05 queues the first component of
a heterogeneous job alone again, which then waits for the other one without end. It ends such a job that loses a node,
also with --no-kill, where the trainer has one node; else the component runs on without it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_scalerl.cluster.cluster import Partition, gpus_of
from megatron_scalerl.launch.placement import hosts_needed
from megatron_scalerl.recipe import Recipe

ASSUMED_GPUS, ASSUMED_CPUS = 8, 12
"""Without Slurm: GPUs of a node, and CPUs beside each. An assumption."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asks for: the options of `submit`. None for what follows from the recipe or the run's records."""

    partition: str
    time: str
    """Time limit of one job, in Slurm's notation."""
    nodes: int
    gpus_per_node: int | None
    slots: int | None
    """Without GPUs: ranks and engine devices of a node."""
    cpus: int | None
    """CPUs of a node."""
    engine_nodes: int
    """Nodes of a component of its own for the engines; 0: no heterogeneous job."""
    engine_partition: str | None
    """Of the engines' nodes in a heterogeneous job; None for `partition`."""
    engine_gpus_per_node: int | None
    engine_slots: int | None
    """Without GPUs: engine devices of each of these."""
    gpu_hours: float | None
    """Device-hours that the run may take in all, after which its job is not queued again; None without a budget."""
    check_seconds: float
    """Within which each of several nodes has to report."""
    any_file_system: bool
    """Also where other nodes seem not to see the output folder."""
    site: str | None
    """Path of the site file."""
    max_requeues: int
    """How often one job is queued again; with `chain`, jobs after the first."""
    max_failures: int
    """Starts after a failure without a new checkpoint, within one job."""
    chain: bool
    throttle: int | None
    """Tasks of an array that run at a time; None: no array."""
    startup_seconds: float | None
    save_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """A homogeneous job, or a component of a heterogeneous one. Produced by `allocate`, `components`."""

    nodes: int
    gpus: int
    """GPUs of a node, 0 for a run on CPUs."""
    slots: int | None
    """Ranks and engine devices of a node; None on one node, which has all of them."""
    cpus: int | None
    """CPUs of a node, None for whole nodes."""


def allocate(
    recipes: Sequence[Recipe], partition: Partition, asked: Request, *, exclusive: bool = True
) -> Allocation:
    """What the largest of the recipes needs. exclusive: whether whole nodes may be said to be. Raises ValueError."""
    check_nodes("--nodes", asked.nodes, partition)
    if asked.nodes == 1 and asked.slots is not None:
        raise ValueError(f"--slots requires --nodes of at least 2: one node runs all, found {asked.slots}")
    gpus = max(_gpus(recipe, partition, asked) for recipe in recipes)
    slots = None
    if asked.nodes > 1:
        slots = gpus or asked.slots or max(_fewest_slots(recipe, asked.nodes) for recipe in recipes)
        needed = max(_checked_need(recipe, slots, asked.nodes) for recipe in recipes)
        if needed < asked.nodes:
            raise ValueError(
                f"--nodes: {asked.nodes} is too many: the fleet fills {needed} with {slots} devices "
                "each, and the others would be idle"
            )
    cpus = asked.cpus
    if cpus is None and not (exclusive and gpus and gpus == partition.gpus):  # else whole nodes
        devices = max(recipe.devices for recipe in recipes)
        share = partition.cpus * gpus // partition.gpus if gpus else 2 + 2 * (slots or devices)
        cpus = max(1, min(partition.cpus, share))
    elif cpus is not None and not 0 < cpus <= partition.cpus:
        raise ValueError(f"--cpus: expected 1 to {partition.cpus}, what a node of {partition.name} has, found {cpus}")
    return Allocation(nodes=asked.nodes, gpus=gpus, slots=slots, cpus=cpus)


def components(
    recipe: Recipe, partition: Partition, engine_partition: Partition, asked: Request, *, exclusive: Sequence[bool]
) -> tuple[Allocation, Allocation]:
    """The nodes of the trainer and those of the engines. Raises ValueError for fewer or more than the fleet fills.

    exclusive: as for `allocate`, of both; without it all GPUs or all CPUs of a node keep others away.
    """
    if asked.cpus is not None:
        raise ValueError(f"--cpus: expected none with --engine-nodes, which takes whole nodes, found {asked.cpus}")
    gpus = gpus_of_node(recipe, partition, asked.gpus_per_node, asked.slots)
    engine_gpus = gpus_of_node(recipe, engine_partition, asked.engine_gpus_per_node, asked.engine_slots, "engine-")
    if bool(gpus) != bool(engine_gpus):
        raise ValueError(
            f"--engine-gpus-per-node: expected {'GPUs' if gpus else '0'}, as for the trainer, found {engine_gpus}"
        )
    ranks, devices, count = recipe.trainer.world_size, recipe.engine.devices_per_engine, recipe.engine.count
    slots = gpus or asked.slots or -(-ranks // asked.nodes)
    engine_slots = engine_gpus or asked.engine_slots or devices * -(-count // asked.engine_nodes)
    if engine_slots < devices:
        raise ValueError(
            f"--engine-{'gpus-per-node' if engine_gpus else 'slots'}: expected at least {devices}, the devices of an "
            f"engine (engine.devices_per_engine), found {engine_slots}"
        )
    what = f"{ranks} trainer ranks with {slots}"
    check_nodes("--nodes", asked.nodes, partition, -(-ranks // slots), what)
    if asked.nodes > 1 and 0 < gpus < partition.gpus:
        raise ValueError(
            f"--gpus-per-node: expected 0 or {partition.gpus}, all of a node, which the first of several whole nodes "
            f"sees, found {gpus}"
        )
    needed, what = -(-count // (engine_slots // devices)), f"{count} engines of {devices} with {engine_slots}"
    check_nodes("--engine-nodes", asked.engine_nodes, engine_partition, needed, what)
    if partition.name == engine_partition.name and asked.nodes + asked.engine_nodes > partition.nodes:
        raise ValueError(
            f"--engine-nodes: expected at most {partition.nodes - asked.nodes}, what --nodes leaves of "
            f"{partition.name}, found {asked.engine_nodes}"
        )
    cpus, engine_cpus = None if exclusive[0] else partition.cpus, None if exclusive[1] else engine_partition.cpus
    return (
        Allocation(nodes=asked.nodes, gpus=gpus, slots=slots, cpus=cpus),
        Allocation(nodes=asked.engine_nodes, gpus=engine_gpus, slots=engine_slots, cpus=engine_cpus),
    )


def default_gpus(recipe: Recipe, partition: Partition) -> bool:
    """Whether a run takes GPUs, if nothing else is said."""
    return bool(partition.gpus) and recipe.weights.transport not in ("gloo", "shm")


def assumed(name: str, gres: str, gpus: int | None, cpus: int | None) -> Partition:
    """A partition that Slurm cannot be asked about. gres: a node's GPUs by the site file. gpus, cpus: as given."""
    number = gpus or gpus_of(gres) or ASSUMED_GPUS
    kind = re.search(r"(?:^|,)gpu:([A-Za-z][^:,]*)", gres)
    return Partition(
        name=name,
        gpus=number,
        cpus=cpus or ASSUMED_CPUS * number,
        nodes=1 << 20,
        gpu_type=kind[1] if kind else None,
        limit_s=None,
    )


def check_plan(
    recipe: Recipe, recipe_file: str | None, partition: Partition, gpus: int, others: Partition | None = None
) -> str:
    """What `plan --check` says about a run on GPUs. gpus: of a node; 0 for a run on CPUs. others: of the engines.

    Returns its verdict, or why it has none. Raises ValueError for a recipe that does not fit.
    """
    from megatron_scalerl.plan.hardware import GPUS

    if not gpus:
        return "skipped without GPUs"
    if others is not None and others.gpu_type != partition.gpu_type:
        return f"skipped: the GPUs of {partition.name} and {others.name} are of two types"
    kind = (partition.gpu_type or "").lower()
    models = [key for key in GPUS if key == kind or key.split("-")[0] == kind]
    if len(models) != 1:
        known = ", ".join(GPUS)
        return f"skipped: Slurm calls the GPUs of {partition.name} {kind or 'nothing'}, which is none of {known}"
    from megatron_scalerl.plan.assumptions import Assumptions
    from megatron_scalerl.plan.command import config_folder
    from megatron_scalerl.plan.planner import make_plan
    from megatron_scalerl.plan.text import verdict

    folder = config_folder(recipe.policy.path, recipe_file or Path.cwd() / "recipe.yaml")
    plan = make_plan(recipe, folder, recipe.devices, GPUS[models[0]], Assumptions())
    if problems := plan.problems():
        raise ValueError(f"{recipe.name}: plan --check: {problems[0]}")
    return verdict(plan)


def check_nodes(option: str, nodes: int, partition: Partition, needed: int | None = None, what: str = "") -> None:
    """Raises ValueError for more nodes than the partition has, or for others than are needed for `what` on each."""
    if not 1 <= nodes <= partition.nodes:
        raise ValueError(f"{option}: {nodes} is out of range: partition {partition.name} has {partition.nodes} nodes")
    if needed is not None and nodes != needed:
        raise ValueError(f"{option}: expected {needed} for {what} devices each, found {nodes}")


def gpus_of_node(recipe: Recipe, partition: Partition, given: int | None, slots: int | None, prefix: str = "") -> int:
    """GPUs of a node: as given, else all, without GPUs 0. prefix: of the options' names. Raises ValueError."""
    default = partition.gpus if slots is None and default_gpus(recipe, partition) else 0
    gpus = default if given is None else given
    if gpus and slots is not None:
        raise ValueError(
            f"--{prefix}slots: expected a run on CPUs (on GPUs set --{prefix}gpus-per-node), found {gpus} GPUs a node"
        )
    if not 0 <= gpus <= partition.gpus:
        raise ValueError(
            f"--{prefix}gpus-per-node: expected 0 to {partition.gpus}, what a node of {partition.name} has, "
            f"found {gpus}"
        )
    return gpus


def _gpus(recipe: Recipe, partition: Partition, asked: Request) -> int:
    """GPUs of a node: as given, else on one node one for each rank and engine device, on several all of a node's."""
    devices, given = recipe.devices, asked.gpus_per_node
    takes_gpus = given is None and default_gpus(recipe, partition)
    if takes_gpus and asked.slots is not None:
        raise ValueError("--slots requires --gpus-per-node 0: on GPUs a node's devices are its GPUs")
    if takes_gpus and asked.nodes == 1:
        if devices > partition.gpus:
            if recipe.engine.colocate:
                raise ValueError(
                    f"{recipe.name}: expected {devices} GPUs on one node (engine.colocate); a node of "
                    f"{partition.name} has {partition.gpus}"
                )
            more = hosts_needed(recipe, partition.gpus)
            advice = f"; --nodes {more}" if more else f"; one engine takes {recipe.engine.devices_per_engine}"
            raise ValueError(
                f"{recipe.name}: {recipe.trainer.world_size} trainer and "
                f"{devices - recipe.trainer.world_size} engine GPUs "
                f"do not fit on one node: a node of {partition.name} has {partition.gpus}{advice}"
            )
        return devices
    gpus = gpus_of_node(recipe, partition, given, asked.slots)
    if asked.nodes == 1 and 0 < gpus < devices:
        raise ValueError(f"--gpus-per-node: {gpus} is too few: ranks and engines take {devices} on one node")
    return gpus


def _fewest_slots(recipe: Recipe, nodes: int) -> int:
    """The fewest devices of a node with which a run fits on so many nodes."""
    for slots in range(recipe.engine.devices_per_engine, recipe.devices):
        if (needed := hosts_needed(recipe, slots)) is not None and needed <= nodes:
            return slots
    return recipe.devices


def _checked_need(recipe: Recipe, slots: int, nodes: int) -> int:
    """Nodes that a run needs. Raises ValueError if these are too few, or too small."""
    needed = hosts_needed(recipe, slots)
    engines = f"{recipe.engine.count} engines of {recipe.engine.devices_per_engine}"
    if needed is None:
        raise ValueError(
            f"{recipe.name}: engine.devices_per_engine: expected at most {slots}, the devices of a node, which no "
            f"engine leaves, found {recipe.engine.devices_per_engine}"
        )
    if needed > nodes:
        raise ValueError(
            f"--nodes: {nodes} is too few: {recipe.trainer.world_size} trainer ranks and {engines} ({recipe.name}) "
            f"take at least {needed} nodes of {slots} devices"
        )
    return needed
