"""Matrix products with exact operands: no TF32, no rounding of fp32, and tensor-core speed for bf16.

A product of two bf16 numbers has 16 significant bits and is exact in fp32. So a GEMM of fp32 operands with bf16
values may convert them back to bf16 for a CPU's matrix unit: only the order of the sum differs.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor


@contextmanager
def fp32_products(device: torch.device, *, of_bf16: bool = False) -> Iterator[None]:
    """Context in which GEMMs of fp32 operands on `device` do not round them, whatever the user has set.

    With `of_bf16` they may round operands to bf16 (a CPU does so where it is faster), which is exact for operands
    with bf16 values. The user's setting, which is the process's, is restored at the end.
    """
    on_cpu = device.type == "cpu"
    user = None
    if not on_cpu:
        # It raises where the user has set one backend separately. The two must not be mixed: with the older one at
        # "high" and an accelerator's own at "ieee", a query whether TF32 is allowed (the profiler makes one) raises.
        with suppress(RuntimeError):
            user = torch.get_float32_matmul_precision()
    switch = _switch(device)
    precision = "ieee"
    if of_bf16 and on_cpu:
        precision = "bf16"
    # The older setting covers all backends; a backend's own is changed only where the user has set one separately.
    if user is not None:
        torch.set_float32_matmul_precision("highest")
    elif switch is not None:
        before = switch.fp32_precision
        switch.fp32_precision = precision
    try:
        yield
    finally:
        if user is not None:
            torch.set_float32_matmul_precision(user)
        elif switch is not None:
            switch.fp32_precision = before


@cache
def bf16_may_be_faster() -> bool:
    """False where a CPU gains nothing from rounding operands to bf16: on Intel's without AMX.

    The setting selects oneDNN there, which computes in fp32, slower than MKL, which computes without it.
    """
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return not capabilities.get("cpu_name", "").startswith("Intel") or bool(capabilities.get("amx_bf16", True))


def _switch(device: torch.device) -> Any:
    """The setting of this device's backend; None if it has none."""
    name = {"cpu": "mkldnn"}.get(device.type, device.type)
    matmul = getattr(getattr(torch.backends, name, None), "matmul", None)
    if hasattr(matmul, "fp32_precision"):
        return matmul
    return None


def set_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out = a @ b in out's dtype, fp32 or fp64; bf16 operands are multiplied exactly and summed in fp32."""
    if a.is_cuda and a.dtype != out.dtype:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        # CPUs have no product of bf16 operands with an fp32 result.
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b, as `set_product`, within the GEMM."""
    if a.is_cuda and a.dtype != out.dtype:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype))
