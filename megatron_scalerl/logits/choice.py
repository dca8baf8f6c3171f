"""Which backend computes a projection. A backend is a file <name>_backend.py beside this one, with BACKEND in it."""

from __future__ import annotations

import importlib
import logging
import pkgutil

import torch

import megatron_scalerl.logits as package
from megatron_scalerl.logits.projection import Backend

logger = logging.getLogger(__name__)
_said: set[tuple[str, str]] = set()


def backend_names() -> list[str]:
    """All backends, those for accelerators first, the plain one last."""
    found = [
        module.name.removesuffix("_backend")
        for module in pkgutil.iter_modules(package.__path__)
        if module.name.endswith("_backend")
    ]
    return sorted(found, key=lambda name: (name == "torch", name))


def load_backend(name: str, device: torch.device, dtype: torch.dtype) -> Backend:
    """The backend `name` for operands of `dtype` on `device`.

    Raises ValueError for an unknown one, and for one that cannot run here, with what it needs.
    """
    if name not in backend_names():
        raise ValueError(f"backend: expected auto or one of {', '.join(sorted(backend_names()))}, found {name!r}")
    found = _found(name, device, dtype)
    if isinstance(found, str):
        raise ValueError(f"backend {name}: expected {found}, found a projection of {dtype} on {device.type}")
    return found


def choose_backend(name: str, device: torch.device, dtype: torch.dtype) -> Backend:
    """`load_backend`, and "auto": on a CPU the plain one, elsewhere the first that can run. Logs a choice once."""
    if name != "auto":
        chosen = load_backend(name, device, dtype)
    else:
        names = ["torch"] if device.type == "cpu" else backend_names()
        able = (_found(candidate, device, dtype) for candidate in names)
        chosen = next(found for found in able if not isinstance(found, str))
    said = (chosen.name, device.type)
    if said not in _said:
        _said.add(said)
        logger.info("logit projection: backend %s on %s%s", chosen.name, device.type, " (auto)" * (name == "auto"))
    return chosen


def chosen_backend(device: torch.device | str, dtype: torch.dtype = torch.bfloat16, backend: str = "auto") -> str:
    """Name of the backend that a projection with `dtype` operands on `device` gets. ValueError as `load_backend`."""
    return choose_backend(backend, torch.device(device), dtype).name


def _found(name: str, device: torch.device, dtype: torch.dtype) -> Backend | str:
    """The backend, or what it needs and has not here."""
    try:
        backend = _load(name)
    except ImportError as error:
        return f"{error.name} to be installed"
    lacking = backend.needs(device, dtype)
    return backend if lacking is None else lacking


def _load(name: str) -> Backend:
    return importlib.import_module(f"{package.__name__}.{name}_backend").BACKEND
