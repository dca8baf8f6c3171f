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
    found = [module.name.removesuffix("_backend") for module in pkgutil.iter_modules(package.__path__)
             if module.name.endswith("_backend")]  # fmt: skip
    return sorted(found, key=lambda name: (name == "torch", name))


def load_backend(name: str, device: torch.device, dtype: torch.dtype) -> Backend:
    """The backend `name`. Raises ValueError for an unknown one, and for one that cannot run here."""
    if name not in backend_names():
        raise ValueError(f"backend: expected auto or one of {', '.join(sorted(backend_names()))}, found {name!r}")
    backend = _load(name)
    lacking = backend.needs(device, dtype)
    if lacking is not None:
        raise ValueError(f"backend {name}: expected {lacking}, found a projection of {dtype} on {device.type}")
    return backend


def choose_backend(name: str, device: torch.device, dtype: torch.dtype) -> Backend:
    """`load_backend`, with "auto": the first of `backend_names` that can run here; logs each choice once."""
    if name != "auto":
        chosen = load_backend(name, device, dtype)
    elif device.type == "cpu":
        chosen = _load("torch")
    else:
        able = (_load(candidate) for candidate in backend_names())
        chosen = next(backend for backend in able if backend.needs(device, dtype) is None)
    said = (chosen.name, device.type)
    if said not in _said:
        _said.add(said)
        logger.info("logit projection: backend %s on %s%s", chosen.name, device.type, " (auto)" * (name == "auto"))
    return chosen


def chosen_backend(device: torch.device | str, dtype: torch.dtype = torch.bfloat16, backend: str = "auto") -> str:
    """Name of the backend that a projection with `dtype` operands on `device` gets. ValueError as `load_backend`."""
    return choose_backend(backend, torch.device(device), dtype).name


def _load(name: str) -> Backend:
    return importlib.import_module(f"{package.__name__}.{name}_backend").BACKEND
