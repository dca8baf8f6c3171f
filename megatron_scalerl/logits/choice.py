"""Which backend computes a projection."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from megatron_scalerl.logits.projection import Backend

logger = logging.getLogger(__name__)
_logged: set[tuple[str, str]] = set()


LARGE_GPU = 64 * 2**30
"""Bytes of a GPU from which the trainer's workspace is larger where the recipe states none."""


def workspace_mb(stated: float | None, *, large_gpu: bool, shared: bool) -> float:
    """The trainer's workspace (MiB). stated: by the recipe. shared: with engines on the same device."""
    return stated or (2048.0 if large_gpu and not shared else 512.0)


def _cuda() -> Backend:
    from megatron_scalerl.logits.cuda_backend import CudaBackend

    return CudaBackend()


def _triton() -> Backend:
    from megatron_scalerl.logits.fused_kernel import TritonBackend

    return TritonBackend()


def _in_place() -> Backend:
    from megatron_scalerl.logits.in_place import InPlaceBackend

    return InPlaceBackend()


def _torch() -> Backend:
    from megatron_scalerl.logits.torch_backend import TorchBackend

    return TorchBackend()


BACKENDS: dict[str, Callable[[], Backend]] = {
    "cuda": _cuda,
    "triton": _triton,
    "in_place": _in_place,
    "torch": _torch,
}
"""Backends by name, in the order in which "auto" tries them. Imported on use: some need packages of their own."""


def load_backend(name: str, device: torch.device, dtype: torch.dtype) -> Backend:
    """The backend `name` for operands of `dtype` on `device`.

    Raises ValueError for an unknown name, and for a backend that cannot run here, with what it requires.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend: expected auto or one of {', '.join(sorted(BACKENDS))}, found {name!r}")
    found = _load(name, device, dtype)
    if isinstance(found, str):
        raise ValueError(f"backend {name}: expected {found}, found a projection of {dtype} on {device.type}")
    return found


def choose_backend(name: str, device: torch.device, dtype: torch.dtype) -> Backend:
    """`load_backend`; "auto" is `torch` on a CPU and elsewhere the first that can run. Logs each choice once."""
    if name != "auto":
        chosen = load_backend(name, device, dtype)
    else:
        names = ["torch"] if device.type == "cpu" else list(BACKENDS)
        candidates = (_load(candidate, device, dtype) for candidate in names)
        chosen = next(found for found in candidates if not isinstance(found, str))
    choice = (chosen.name, device.type)
    if choice not in _logged:
        _logged.add(choice)
        logger.info("logit projection: backend %s on %s%s", chosen.name, device.type, " (auto)" * (name == "auto"))
    return chosen


def chosen_backend(device: torch.device | str, dtype: torch.dtype = torch.bfloat16, backend: str = "auto") -> str:
    """Name of the backend for `dtype` operands on `device`. Raises ValueError as `load_backend` does."""
    return choose_backend(backend, torch.device(device), dtype).name


def _load(name: str, device: torch.device, dtype: torch.dtype) -> Backend | str:
    """The backend, or what it requires and does not find here."""
    try:
        backend = BACKENDS[name]()
    except ImportError as error:
        return f"{error.name} to be installed"
    lacking = backend.needs(device, dtype)
    return backend if lacking is None else lacking
