"""All checks of this node, and the facts in which the nodes of a run have to agree."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from megatron_scalerl.cluster.check import Check, failed, guarded, ok, skipped
from megatron_scalerl.cluster.digests import code_digest, names_digest, recipe_digest
from megatron_scalerl.cluster.gpus import cuda_text, gpu_checks, names, visible_gpus
from megatron_scalerl.cluster.head import head_checks
from megatron_scalerl.cluster.host import host_checks
from megatron_scalerl.cluster.limits import limit_checks
from megatron_scalerl.cluster.mounts import mount_of
from megatron_scalerl.cluster.nvml import NvmlReading, read_in_process
from megatron_scalerl.cluster.output import output_checks, place_of
from megatron_scalerl.cluster.probe import Machine, probe_machine
from megatron_scalerl.cluster.space import DiskNeed, disk_need, node_space, output_space
from megatron_scalerl.cluster.versions import is_gpu_environment, version_checks
from megatron_scalerl.distributed.installed import COMPARED
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import check_policy, check_prompts

FORMAT = 1
"""Version of the JSON file."""
GPUS = "GPUs"
"""The fact in which only nodes of the same kind have to agree."""


class NodeReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `doctor` found on one node. Produced by `examine`; `--json` writes it."""

    format: int
    """`FORMAT`."""
    host: str
    time: str
    """UTC, ISO 8601."""
    facts: dict[str, str]
    """In which the nodes of a run have to agree; "" for what a node does not have."""
    checks: list[Check]

    @property
    def failed(self) -> bool:
        """Whether a check failed."""
        return any(check.status == "failed" for check in self.checks)


def examine(recipe: Recipe | None, recipe_file: str | None, gpus: int | None, head: Path | None = None) -> NodeReport:
    """Check this node. gpus: those that a run takes here; None: all of the recipe's. head: the file of `doctor.head`,
    for one of several nodes.

    Raises nothing for what a node lacks: that is a failed check.
    """
    reading, machine = read_in_process(), _machine()
    on_gpus = isinstance(machine, Machine) and is_gpu_environment(machine)
    needed = gpus_needed(recipe, gpus, gpu_environment=on_gpus)
    parameters = _parameters(recipe, recipe_file)
    number = parameters if isinstance(parameters, int) else None
    checks = gpu_checks(reading, needed=needed, visible=os.environ.get("CUDA_VISIBLE_DEVICES"))
    checks += version_checks(machine, reading) if isinstance(machine, Machine) else [machine]
    checks += limit_checks(recipe)
    checks += node_space()
    if recipe is not None:
        run_dir = Path(recipe.run_dir)
        need: DiskNeed | str = parameters if isinstance(parameters, str) else disk_need(recipe, parameters)
        space = guarded("output folder: space", lambda: output_space(place_of(run_dir), run_dir, need))
        checks += [_inputs(recipe), *output_checks(run_dir), space]
    else:
        checks.append(skipped("output folder", "no recipe was given"))
    checks += host_checks(recipe, number, gpus=needed or 0)
    checks += head_checks(head) if head is not None else []
    facts = _facts(reading, machine, recipe, needed=needed)
    checks.append(ok("code and recipe", f"digests {facts['code']} and {facts['recipe'] or '(no recipe)'}"))
    return NodeReport(
        format=FORMAT,
        host=socket.gethostname(),
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        facts=facts,
        checks=checks,
    )


def gpus_needed(recipe: Recipe | None, given: int | None, *, gpu_environment: bool) -> int | None:
    """GPUs that a run takes on this node; None if nothing says.

    `weights.transport: auto` is nccl wherever GPUs are found, so a node whose driver is broken would silently be one
    without GPUs. Here it depends on the environment: one for GPUs needs them.
    """
    if given is not None or recipe is None:
        return given
    transport = recipe.weights.transport
    if transport in ("gloo", "shm") or (transport == "auto" and not gpu_environment):
        return 0
    return recipe.devices


def _machine() -> Machine | Check:
    """Packages and what torch was built for; GPUs are NVML's matter, so CUDA is not initialized on them."""
    try:
        return probe_machine(hide_gpus=True)
    except RuntimeError as error:
        return failed(
            "packages",
            expected="a Python that imports torch",
            found=str(error).partition(": ")[2],
            remedy="enter the environment of tools/install.sh",
        )


def _parameters(recipe: Recipe | None, recipe_file: str | None) -> int | str:
    """Parameters of the policy, or why they are unknown."""
    if recipe is None or recipe_file is None:
        return "no recipe"
    from megatron_scalerl.plan.command import config_folder

    try:
        folder = config_folder(recipe.policy.path, recipe_file)

        from megatron_scalerl.plan.counting import count, load_family  # these imports take seconds

        return count(*load_family(folder)[:1]).total
    except (ValueError, OSError) as error:
        return str(error)


def _inputs(recipe: Recipe) -> Check:
    """Whether this node sees what the recipe names."""
    checks: tuple[Callable[[Recipe], None], ...] = (check_policy, check_prompts)
    for check in checks:
        try:
            check(recipe)
        except (ValueError, OSError) as error:
            expected, found = "policy and prompts that this node can read", str(error)
            remedy = "put them on a file system that all nodes see, or copy them to each"
            return failed("inputs", expected=expected, found=found, remedy=remedy)
    return ok("inputs", f"policy {recipe.policy.path} and its prompts")


def _facts(
    reading: NvmlReading, machine: Machine | Check, recipe: Recipe | None, *, needed: int | None
) -> dict[str, str]:
    gpus, _ = visible_gpus(reading.gpus if needed != 0 else [], os.environ.get("CUDA_VISIBLE_DEVICES"))
    details = machine.details if isinstance(machine, Machine) else {}
    packages = details.get("packages", {})
    return {
        GPUS: names(gpus),
        "driver": reading.driver if isinstance(reading.driver, str) else "",
        "driver's CUDA": cuda_text(reading.cuda_version),
        "torch's CUDA": details.get("cuda_version") or "",
        "NCCL": details.get("nccl") or "",
        "Python": platform.python_version(),
        **{package: packages.get(package, "") for package in COMPARED},
        "code": _read(code_digest),
        "recipe": recipe_digest(recipe) if recipe is not None else "",
        "policy's files": _read(lambda: names_digest(Path(recipe.policy.path))) if recipe is not None else "",
        "output folder": _read(lambda: _output_mount(Path(recipe.run_dir))) if recipe is not None else "",
    }


def _read(fact: Callable[[], str]) -> str:
    """The fact, or why this node cannot read it."""
    try:
        return fact()
    except OSError as error:
        return f"unreadable: {error.strerror}"


def _output_mount(run_dir: Path) -> str:
    mount = mount_of(place_of(run_dir))
    return f"{mount.kind} at {mount.point}" if mount is not None else ""
