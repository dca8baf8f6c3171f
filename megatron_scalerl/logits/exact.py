"""Matrix products with exact operands: no TF32, no rounding of fp32, and tensor-core speed for bf16.

A product of two bf16 numbers has 16 significant bits and is exact in fp32. So where fp32 operands hold bf16 values, a
GEMM may convert the operands back to bf16 for a CPU's matrix unit. Only the order of the additions differs.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor


@contextmanager
def fp32_products(device: torch.device, *, of_bf16: bool = False) -> Iterator[None]:
    """Context in which GEMMs on `device` do not round fp32 operands, whatever the user has set.

    `of_bf16` says that the operands hold bf16 values. Rounding to bf16 is then exact, and a CPU may do it where bf16
    is faster. The setting is global to the process; the user's value is restored at the end.
    """
    on_cpu = device.type == "cpu"
    user = None
    if not on_cpu:
        # torch has an old setting for all backends and a new setting for each backend. The query of the old setting
        # raises if the user has changed a new setting; `user` then stays None. Old and new settings must not be
        # mixed: with the old setting at "high" and an accelerator's at "ieee", torch raises in the profiler, which
        # asks whether TF32 is allowed.
        with suppress(RuntimeError):
            user = torch.get_float32_matmul_precision()
    switch = _switch(device)
    precision = "ieee"
    if of_bf16 and on_cpu:
        precision = "bf16"
    # The old setting is changed on an accelerator, unless the user has changed a new setting. In all other cases the
    # backend's new setting is changed.
    if user is not None:
        torch.set_float32_matmul_precision("highest")
    elif switch is not None:
        previous_precision = switch.fp32_precision
        switch.fp32_precision = precision
    try:
        yield
    finally:
        if user is not None:
            torch.set_float32_matmul_precision(user)
        elif switch is not None:
            switch.fp32_precision = previous_precision


@cache
def bf16_may_be_faster() -> bool:
    """Whether this CPU may gain from rounding operands to bf16. Intel CPUs without AMX do not.

    On such a CPU, allowing bf16 makes torch use oneDNN, which computes in fp32 more slowly than MKL. Without bf16
    torch uses MKL.
    """
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return not capabilities.get("cpu_name", "").startswith("Intel") or bool(capabilities.get("amx_bf16", True))


def _switch(device: torch.device) -> Any:
    """The object with the device backend's `fp32_precision`; None for a backend without this setting."""
    name = {"cpu": "mkldnn"}.get(device.type, device.type)
    matmul = getattr(getattr(torch.backends, name, None), "matmul", None)
    if hasattr(matmul, "fp32_precision"):
        return matmul
    return None


def set_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Writes a @ b into `out`, which is fp32 or fp64. bf16 operands are multiplied exactly and summed in fp32."""
    if a.is_cuda and a.dtype != out.dtype:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        # On CPUs torch has no GEMM of bf16 operands with an fp32 result.
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds a @ b to `out` within the GEMM, with the numerics of `set_product`."""
    if a.is_cuda and a.dtype != out.dtype:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype))
