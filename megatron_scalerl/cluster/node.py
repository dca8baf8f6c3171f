"""All checks of this node, and the facts in which the nodes of a run have to agree."""

from __future__ import annotations

import hashlib
import platform
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

import megatron_scalerl
from megatron_scalerl.cluster.check import Check, failed, guarded, ok, skipped
from megatron_scalerl.cluster.gpus import GpuReport, gpus_in_process
from megatron_scalerl.cluster.host import adapters, fastest, host_checks
from megatron_scalerl.cluster.mounts import mount_of
from megatron_scalerl.cluster.output import output_checks, place_of
from megatron_scalerl.cluster.probe import Machine, probe_machine
from megatron_scalerl.cluster.space import DiskNeed, disk_need, node_space, output_space
from megatron_scalerl.cluster.versions import is_gpu_environment, version_checks
from megatron_scalerl.distributed.installed import COMPARED
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import check_policy, check_prompts, dump_recipe

PACKAGE = Path(megatron_scalerl.__file__).parent
_DIGITS = 16
"""Of a digest, hexadecimal."""
GPUS, ADAPTERS = "GPUs", "NCCL_IB_HCA"
"""The facts in which only nodes of the same kind have to agree."""


class NodeReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `doctor` found on one node. Produced by `examine`; `--json` writes it."""

    format: Literal[1] = 1
    """Version of the JSON file."""
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


def examine(recipe: Recipe | None, recipe_file: str | None, gpus: int | None) -> NodeReport:
    """Check this node. gpus: those that a run takes here; None: all of the recipe's.

    Raises nothing for what a node lacks: that is a failed check.
    """
    machine = _machine()
    on_gpus = isinstance(machine, Machine) and is_gpu_environment(machine)
    needed = gpus_needed(recipe, gpus, gpu_environment=on_gpus)
    reading = GpuReport(checks=[skipped(GPUS, "the run takes none here")]) if needed == 0 else gpus_in_process(needed)
    parameters = _parameters(recipe, recipe_file)
    number = parameters if isinstance(parameters, int) else None
    checks = list(reading.checks)
    checks += version_checks(machine, reading.cuda_version) if isinstance(machine, Machine) else [machine]
    checks += node_space()
    if recipe is not None:
        run_dir = Path(recipe.run_dir)
        need: DiskNeed | str = parameters if isinstance(parameters, str) else disk_need(recipe, parameters)
        space = guarded("output folder: space", lambda: output_space(place_of(run_dir), run_dir, need))
        checks += [_inputs(recipe), *output_checks(run_dir), space]
    else:
        checks.append(skipped("output folder", "no recipe was given"))
    checks += host_checks(recipe, number, gpus=needed or 0)
    facts = _facts(reading, machine, recipe)
    checks.append(ok("code and recipe", f"digests {facts['code']} and {facts['recipe'] or '(no recipe)'}"))
    return NodeReport(
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


def _facts(reading: GpuReport, machine: Machine | Check, recipe: Recipe | None) -> dict[str, str]:
    details = machine.details if isinstance(machine, Machine) else {}
    packages = details.get("packages", {})
    return {
        GPUS: reading.names,
        ADAPTERS: _read(lambda: fastest(adapters())),
        "driver": reading.driver,
        "driver's CUDA": reading.cuda_version,
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
    return f"{mount.kind} at {mount.point}"


def code_digest(package: Path = PACKAGE) -> str:
    """SHA-256 of all files of the package with their names, without compiled ones; 16 hexadecimal digits.

    Raises OSError.
    """
    total = hashlib.sha256()
    files = {path.relative_to(package).as_posix(): path for path in package.rglob("*") if path.is_file()}
    for name in sorted(files):
        if "__pycache__" not in name and not name.endswith(".pyc"):
            content = hashlib.sha256(files[name].read_bytes()).hexdigest()
            total.update(f"{len(name)} {name} {content}\n".encode())
    return total.hexdigest()[:_DIGITS]


def names_digest(folder: Path) -> str:
    """SHA-256 of the names and sizes of all files of a folder; 16 hexadecimal digits, "" if there is no folder.

    Copies of a policy on the nodes' own disks are compared by it: reading the weights would take minutes. Raises
    OSError.
    """
    if not folder.is_dir():
        return ""
    files = sorted((path.relative_to(folder).as_posix(), path.stat().st_size) for path in folder.rglob("*"))
    return hashlib.sha256(repr(files).encode()).hexdigest()[:_DIGITS]


def recipe_digest(recipe: Recipe) -> str:
    """SHA-256 of the resolved recipe; 16 hexadecimal digits."""
    return hashlib.sha256(dump_recipe(recipe).encode()).hexdigest()[:_DIGITS]
