"""What a job asks Slurm for: nodes, and the GPUs or slots and the CPUs of each one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_scalerl.cluster.cluster import Partition
from megatron_scalerl.launch.placement import hosts_needed
from megatron_scalerl.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the user asks for; None for what follows from the recipe."""

    nodes: int
    gpus: int | None
    """GPUs of a node."""
    slots: int | None
    """Without GPUs: ranks and engine devices of a node."""
    cpus: int | None
    """CPUs of a node."""
    engine_nodes: int = 0
    """Nodes of a component of its own for the engines; 0: no heterogeneous job."""
    engine_gpus: int | None = None
    """GPUs of each of these."""
    engine_slots: int | None = None
    """Without GPUs: engine devices of each of these."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """One homogeneous allocation, or a component of a heterogeneous one. Produced by `allocate`, `components`."""

    nodes: int
    gpus: int
    """GPUs of a node, 0 for a run on CPUs."""
    slots: int | None
    """Ranks and engine devices of a node; None on one node, which has all of them."""
    cpus: int | None
    """CPUs of a node, None for whole nodes."""


def allocate(recipes: Sequence[Recipe], partition: Partition, asked: Asked) -> Allocation:
    """What the largest of the recipes needs. Raises ValueError."""
    if not 1 <= asked.nodes <= partition.nodes:
        raise ValueError(
            f"--nodes: expected 1 to {partition.nodes}, the nodes of {partition.name}, found {asked.nodes}"
        )
    gpus = max(_gpus(recipe, partition, asked) for recipe in recipes)
    slots = None
    if asked.nodes > 1:
        slots = gpus or asked.slots or max(_fewest_slots(recipe, asked.nodes) for recipe in recipes)
        needed = max(_checked_need(recipe, slots, asked.nodes) for recipe in recipes)
        if needed < asked.nodes:
            raise ValueError(
                f"--nodes: expected {needed}, which the fleet fills with {slots} devices each, found {asked.nodes}: "
                "the others would be idle"
            )
    elif asked.slots is not None:
        raise ValueError(f"--slots requires --nodes of at least 2: one node runs all, found {asked.slots}")
    cpus = [_cpus(recipe, partition, gpus, slots, asked.cpus) for recipe in recipes]
    whole = None in cpus
    return Allocation(
        nodes=asked.nodes,
        gpus=gpus,
        slots=slots,
        cpus=None if whole else max(count for count in cpus if count is not None),
    )


def default_gpus(recipe: Recipe, partition: Partition) -> bool:
    """Whether a run takes GPUs, if nothing else is said."""
    return bool(partition.gpus) and recipe.weights.transport not in ("gloo", "shm")


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


def _gpus(recipe: Recipe, partition: Partition, asked: Asked) -> int:
    """GPUs of a node: as given, else on one node one for each rank and engine device, on several all of a node's."""
    devices, given = recipe.devices, asked.gpus
    if given is None:
        given = (devices if asked.nodes == 1 else partition.gpus) if default_gpus(recipe, partition) else 0
        if asked.slots is not None and given and asked.nodes > 1:
            raise ValueError("--slots requires --gpus-per-node 0: on GPUs a node's devices are its GPUs")
        if given > partition.gpus:
            more = hosts_needed(recipe, partition.gpus)
            advice = f"; --nodes {more}" if more else f"; one engine takes {recipe.engine.devices_per_engine}"
            raise ValueError(
                f"{recipe.name}: expected trainer ranks and engines that fit on one node, found "
                f"{recipe.trainer.world_size} trainer and {devices - recipe.trainer.world_size} engine GPUs; a node "
                f"of {partition.name} has {partition.gpus}{advice}"
            )
    elif given and asked.slots is not None:
        raise ValueError(f"--slots: expected a run on CPUs (on GPUs set --gpus-per-node), found {given} GPUs a node")
    if not 0 <= given <= partition.gpus:
        raise ValueError(
            f"--gpus-per-node: expected 0 to {partition.gpus}, what a node of {partition.name} has, found {given}"
        )
    if asked.nodes == 1 and 0 < given < devices:
        raise ValueError(
            f"--gpus-per-node: expected at least {devices}, one for each rank and engine device, found {given}"
        )
    return given


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
            f"--nodes: expected at least {needed} with {slots} devices each for {recipe.trainer.world_size} trainer "
            f"ranks and {engines} ({recipe.name}), found {nodes}"
        )
    return needed


def _cpus(recipe: Recipe, partition: Partition, gpus: int, slots: int | None, given: int | None) -> int | None:
    """CPUs of a node: as given, else the GPUs' share of the node's; None for a whole node."""
    if given is not None:
        if not 0 < given <= partition.cpus:
            raise ValueError(
                f"--cpus: expected 1 to {partition.cpus}, what a node of {partition.name} has, found {given}"
            )
        return given
    if gpus:
        return None if gpus == partition.gpus else max(1, partition.cpus * gpus // partition.gpus)
    return min(partition.cpus, 2 + 2 * (slots or recipe.devices))
