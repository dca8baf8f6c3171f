"""Matrix products with exact operands: no TF32, no rounding of fp32, and tensor-core speed for bf16.

A product of two bf16 numbers has 16 significant bits and is exact in fp32. So a GEMM of fp32 operands with bf16
values may convert the operands back to bf16 for a CPU's matrix unit: only the order of the sum differs.
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

    With `of_bf16` a GEMM may round operands to bf16 (CPUs do where bf16 is faster), which is exact for operands with
    bf16 values. The user's setting, which belongs to the process, is restored at the end.
    """
    on_cpu = device.type == "cpu"
    user = None
    if not on_cpu:
        # torch raises where the user has set one backend separately. Old and new setting must not be mixed: with the
        # old setting at "high" and an accelerator's at "ieee", torch's query whether TF32 is allowed, which the
        # profiler makes, raises.
        with suppress(RuntimeError):
            user = torch.get_float32_matmul_precision()
    switch = _switch(device)
    precision = "ieee"
    if of_bf16 and on_cpu:
        precision = "bf16"
    # The old setting covers all backends; a backend's setting changes only where the user has set one separately.
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
    """False where a CPU gains nothing from rounding operands to bf16: on Intel CPUs without AMX.

    There the setting selects oneDNN, which computes in fp32, slower than MKL, torch's choice without the setting.
    """
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return not capabilities.get("cpu_name", "").startswith("Intel") or bool(capabilities.get("amx_bf16", True))


def _switch(device: torch.device) -> Any:
    """The setting of this device's backend; None for a backend without a setting."""
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
