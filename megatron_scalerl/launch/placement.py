"""Chooses the host and the devices of every trainer rank and every engine.

The trainer's ranks fill host after host, from each host's first device on. The engines follow, and no engine spans
two hosts. With engine.colocate the engines are on the trainer's devices.

The module also has the records `Devices`, `Attempt` and `Fleet`, which the launcher gives to the controller.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_scalerl.launch.hosts import Host, Hosts, HostsLeft, takes_gpus
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.record import record
from megatron_scalerl.types import ComputeUnit

# Only types are needed. Without imports at run time, `submit` checks a recipe quickly.
if TYPE_CHECKING:
    from megatron_scalerl.engine.membership import Membership
    from megatron_scalerl.trainer.client import TrainerClient
    from megatron_scalerl.trainer.messages import TrainerInfo

logger = logging.getLogger(__name__)


@record
class HostRanks:
    """The trainer's ranks on one host, which use the host's first devices in rank order."""

    host: Host
    first: int
    """The lowest rank on the host."""
    count: int


@record
class EnginePlace:
    """The host and the devices of an engine."""

    host: Host
    positions: tuple[int, ...] | None
    """The engine's devices, as indices into the host's visible GPUs; None without GPUs."""


@record
class Placement:
    """The hosts and devices of all processes of a run."""

    trainer: tuple[HostRanks, ...]
    engines: tuple[EnginePlace, ...]
    teachers: tuple[EnginePlace, ...] = ()

    @classmethod
    def of(cls, recipe: Recipe, hosts: Hosts, *, trainer: bool = True) -> Placement:
        """Place the processes of a recipe on these hosts. trainer: False to place engines only.

        Raises ValueError if the hosts have too few devices, if an engine needs more devices than a host has, or if
        weights.transport: shm or engine.colocate is used with several hosts.
        """
        world_size = recipe.trainer.world_size if trainer else 0
        if recipe.weights.transport == "shm" and len(hosts.hosts) > 1:
            raise ValueError(f"weights.transport: shm works on one host, but the run has {len(hosts.hosts)} hosts")
        if recipe.engine.colocate and len(hosts.hosts) > 1:
            raise ValueError(f"engine.colocate works on one host, but the run has {len(hosts.hosts)} hosts")
        gpus = takes_gpus(recipe.weights.transport)
        if not gpus and not any(host.here for host in hosts.hosts):
            logger.warning(
                "the run uses CPUs, because this host has no GPU; if the hosts of the run have GPUs, set "
                "weights.transport: nccl"
            )
        slots = hosts.slots or recipe.devices
        if gpus and any(host.here for host in hosts.hosts):
            visible = len(visible_gpus())
            slots = hosts.slots or visible
            if slots > visible:
                raise ValueError(f"--slots: {slots} is more than the {visible} GPUs visible on this host")
        # Each host gets `slots` ranks until all ranks are placed. Further hosts have no rank.
        ranks = tuple(
            HostRanks(host=host, first=first, count=min(slots, world_size - first))
            for host, first in zip(hosts.hosts, range(0, world_size, max(1, slots)))
        )
        in_use = () if recipe.engine.colocate else ranks
        engines = _engines(recipe, hosts, in_use, slots, gpus=gpus)
        if sum(part.count for part in ranks) < world_size or len(engines) < len(recipe.engine_devices):
            raise ValueError(_shortage(recipe, hosts, slots, gpus=gpus, trainer=trainer))
        count = recipe.engine.count
        return cls(trainer=ranks, engines=tuple(engines[:count]), teachers=tuple(engines[count:]))

    def check_present(self, hosts: Hosts, *, engines: int = 0) -> None:
        """Check that the hosts that the run needs are still in the Slurm job. Blocks.

        engines: least number of engines whose hosts must remain. Raises HostsLeft if a host with trainer ranks or a
        teacher has left the job, or if fewer engines remain.
        """
        departed_hosts = hosts.have_left()
        for role, names in (
            ("trainer ranks", {ranks.host.name for ranks in self.trainer}),
            ("a teacher", {place.host.name for place in self.teachers}),
            ("engines", {place.host.name for place in self.engines}),
        ):
            remaining = [place for place in self.engines if place.host.name not in departed_hosts]
            if departed_hosts & names and (role != "engines" or len(remaining) < engines):
                nodes = ", ".join(sorted(departed_hosts & names))
                raise HostsLeft(f"{nodes}: Slurm removed this node, which had {role}, from the job")


def visible_gpus() -> list[str]:
    """Names of the GPUs that a process on this host sees: numbers or UUIDs, as in CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        return visible.split(",")
    # Imported here, because `distributed.device` imports torch, which takes seconds.
    from megatron_scalerl.distributed.device import gpu_count

    return [str(number) for number in range(gpu_count())]


def _engines(
    recipe: Recipe, hosts: Hosts, trainer: Sequence[HostRanks], slots: int, *, gpus: bool
) -> list[EnginePlace]:
    """Places of the engines, then of the teachers, after the ranks of `trainer`; fewer if the hosts lack devices."""
    sizes = [*recipe.engine_devices.values()]
    places: list[EnginePlace] = []
    for host in hosts.hosts:
        first = sum(ranks.count for ranks in trainer if ranks.host == host)
        while len(places) < len(sizes) and first + sizes[len(places)] <= slots:
            end = first + sizes[len(places)]
            places.append(EnginePlace(host=host, positions=tuple(range(first, end)) if gpus else None))
            first = end
    return places


def _shortage(recipe: Recipe, hosts: Hosts, slots: int, *, gpus: bool, trainer: bool) -> str:
    fleet = (
        f"{recipe.trainer.world_size} trainer ranks and {recipe.engine.count} engines of "
        f"{recipe.engine.devices_per_engine} devices each"
    )
    if recipe.algorithm.teachers:
        fleet += f", and {len(recipe.algorithm.teachers)} teachers of {recipe.teacher_devices} devices in all,"
    engines = sum(recipe.engine_devices.values())
    if hosts.slots is None:
        too_few = f"engine.count: {slots} visible GPUs are too few: the engines take {engines}"
        if recipe.engine.colocate or recipe.algorithm.teachers or not trainer:
            return f"{too_few}, including the teachers" if recipe.algorithm.teachers else too_few
        return (
            f"{too_few}, the trainer {recipe.trainer.world_size} more; engine.colocate: true puts engines on the "
            "trainer's GPUs, and needs engine.vllm.gpu_memory_utilization and engine.vllm.kv_cache_memory_bytes"
        )
    kind = "GPUs" if gpus else "devices"
    if recipe.engine.colocate:
        return f"--slots: {slots} {kind} are too few: with engine.colocate the host needs {recipe.devices}"
    host_count = hosts_needed(recipe, slots)
    if host_count is None:
        return (
            f"--slots: {slots} {kind} of a host are too few for one engine, which takes "
            f"{max(recipe.engine_devices.values())} (engine.devices_per_engine, or devices of a teacher)"
        )
    return (
        f"--hosts: {len(hosts.hosts)} hosts with {slots} {kind} each are too few: {fleet} take at least "
        f"{host_count} hosts"
    )


@record
class Devices:
    """The numbers of devices that a run holds, from the recipe alone."""

    unit: ComputeUnit
    """Unit of the run's compute: gpu_hours for GPUs, device_hours for processes on CPUs."""
    trainer: float
    """Number of the trainer's devices. A device shared with an engine counts half."""
    engine: float
    """Number of devices of all engines. A device shared with the trainer counts half."""
    teacher: float = 0
    """Number of devices of all teachers."""

    @classmethod
    def of(cls, recipe: Recipe) -> Devices:
        """The devices that a run of the recipe would hold; GPUs or CPUs according to this machine."""
        return cls(
            unit="gpu_hours" if takes_gpus(recipe.weights.transport) else "device_hours",
            trainer=recipe.trainer.world_size / (2 if recipe.engine.colocate else 1),
            engine=recipe.engine.count * recipe.engine.charged_devices,
            teacher=recipe.teacher_devices,
        )


@record
class Attempt:
    """One start of a run. Processes that connect must have the same ids. Produced by `controller.run_folder`."""

    run_id: str
    """Id of the run, shared by all attempts."""
    incarnation: str
    """Name of the attempt: `JOB_ID.RESTART_COUNT` on Slurm, else `local.N`. The controller refuses processes of
    another incarnation."""
    folder: Path
    """The folder RUN/. The processes write logs to the subfolder `logs`."""
    recipe_file: Path
    """File with the resolved recipe, which every process reads."""


@record
class Fleet:
    """Clients of the trainer's ranks and of the engines, all ready for requests. Produced by a launcher."""

    trainer: TrainerClient
    info: TrainerInfo
    engines: Membership
    devices: Devices


def hosts_needed(recipe: Recipe, slots: int) -> int | None:
    """Number of hosts that a run needs; None if an engine needs more devices than a host has.

    slots: devices of a host.
    """
    ranks = recipe.trainer.world_size
    hosts = -(-ranks // slots)
    # The first engines take the devices that are left free on the last host of the trainer's ranks.
    free = -ranks % slots
    for size in recipe.engine_devices.values():
        if size > slots:
            return None
        if size > free:
            hosts += 1
            free = slots
        free -= size
    return hosts
