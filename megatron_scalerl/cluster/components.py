"""What a heterogeneous job asks Slurm for: nodes for the controller and the trainer, and others for the engines.

Both components take whole nodes, so that no node is in both. Such jobs are a chain (`--chain`): Slurm 22.05 queues
the first component of a heterogeneous job alone again, which then waits for the other one without end. It ends such a
job that loses a node, also with --no-kill, where the trainer has one node; else the component runs on without it.
"""

from __future__ import annotations

from megatron_scalerl.cluster.allocation import Allocation, Asked, default_gpus
from megatron_scalerl.cluster.cluster import Partition
from megatron_scalerl.recipe import Recipe


def components(
    recipe: Recipe, partition: Partition, engine_partition: Partition, asked: Asked
) -> tuple[Allocation, Allocation]:
    """The nodes of the trainer and those of the engines. Raises ValueError for fewer or more than the fleet fills."""
    if asked.cpus is not None:
        raise ValueError(f"--cpus: expected none with --engine-nodes, which takes whole nodes, found {asked.cpus}")
    gpus = _gpus(recipe, partition, asked.gpus, asked.slots, "")
    engine_gpus = _gpus(recipe, engine_partition, asked.engine_gpus, asked.engine_slots, "engine-")
    if bool(gpus) != bool(engine_gpus):
        raise ValueError(
            f"--engine-gpus-per-node: expected {'GPUs' if gpus else '0'}, as for the trainer, found {engine_gpus}"
        )
    ranks, each, count = recipe.trainer.world_size, recipe.engine.devices_per_engine, recipe.engine.count
    slots = gpus or asked.slots or -(-ranks // asked.nodes)
    engine_slots = engine_gpus or asked.engine_slots or each * -(-count // asked.engine_nodes)
    if engine_slots < each:
        raise ValueError(
            f"--engine-{'gpus-per-node' if engine_gpus else 'slots'}: expected at least {each}, the devices of an "
            f"engine (engine.devices_per_engine), found {engine_slots}"
        )
    _check_nodes("--nodes", asked.nodes, -(-ranks // slots), partition, f"{ranks} trainer ranks with {slots}")
    if asked.nodes > 1 and 0 < gpus < partition.gpus:
        raise ValueError(
            f"--gpus-per-node: expected 0 or {partition.gpus}, all of a node, which the first of several whole nodes "
            f"sees, found {gpus}"
        )
    _check_nodes(
        "--engine-nodes",
        asked.engine_nodes,
        -(-count // (engine_slots // each)),
        engine_partition,
        f"{count} engines of {each} with {engine_slots}",
    )
    if partition.name == engine_partition.name and asked.nodes + asked.engine_nodes > partition.nodes:
        raise ValueError(
            f"--engine-nodes: expected at most {partition.nodes - asked.nodes}, what --nodes leaves of "
            f"{partition.name}, found {asked.engine_nodes}"
        )
    return (
        Allocation(nodes=asked.nodes, gpus=gpus, slots=slots, cpus=None),
        Allocation(nodes=asked.engine_nodes, gpus=engine_gpus, slots=engine_slots, cpus=None),
    )


def _gpus(recipe: Recipe, partition: Partition, given: int | None, slots: int | None, prefix: str) -> int:
    """GPUs of a node: as given, else all, without GPUs 0."""
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


def _check_nodes(option: str, nodes: int, needed: int, partition: Partition, what: str) -> None:
    if not 1 <= nodes <= partition.nodes:
        raise ValueError(f"{option}: expected 1 to {partition.nodes}, the nodes of {partition.name}, found {nodes}")
    if nodes != needed:
        raise ValueError(f"{option}: expected {needed} for {what} devices each, found {nodes}")
