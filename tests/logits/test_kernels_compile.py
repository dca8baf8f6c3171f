"""The Triton kernels compiled for a Hopper GPU, which needs none: the compiler and assembler come with Triton."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_scalerl.logits.fused_kernel import BF16_TILES, FP32_TILES, GROUP, Tiles, _fused_statistics_kernel
from megatron_scalerl.logits.row_kernels import (
    GRADIENT_BLOCK,
    STATISTICS_BLOCK,
    _logit_gradient_kernel,
    _row_statistics_kernel,
)
from megatron_scalerl.weights import sum_kernel

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INTEGERS = ("first", "columns", "tokens", "width", "runs", "columns_per_run", "mask")


@pytest.fixture(autouse=True)
def nothing_from_an_earlier_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


def assembly(kernel: Any, folder: Path, operands: dict[str, str], constants: dict[str, Any], **options: int) -> str:
    """SASS for sm_90 of a kernel whose arguments are pointers (`operands`, else fp32), int32 or constants."""
    signature, aligned = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in INTEGERS or name.endswith("_stride"):
            signature[name] = "i32"
        else:
            signature[name] = "*i64" if name == "targets" else operands.get(name, "*fp32")
        if signature[name] != "constexpr" and name not in ("first", "runs"):
            aligned[(place,)] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(
        ASTSource(kernel, signature, places, aligned), target=GPUTarget("cuda", 90, 32), options=options
    )
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    command = [str(TOOLS / "cuobjdump"), "-sass", str(binary)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def opcodes(sass: str) -> list[str]:
    return re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_.]+)", sass, re.MULTILINE)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_gradient_kernel_moves_16_bytes_at_a_time(tmp_path: Path, entropy: bool, split: bool) -> None:
    constants = {"scale_stride": 1, "ENTROPY": entropy, "SPLIT": split, "BLOCK": GRADIENT_BLOCK}
    narrow = {"high": "*bf16", "low": "*bf16"}
    names = opcodes(assembly(_logit_gradient_kernel, tmp_path, narrow, constants, num_warps=4))
    assert "LDG.E.128" in names and "STG.E.128" in names and not spills(names)
    assert sum(name.startswith("STG") for name in names) == (4 if split else 2)


def test_statistics_kernel_stays_in_registers(tmp_path: Path) -> None:
    constants = {"scale_stride": 1, "BLOCK": STATISTICS_BLOCK}
    names = opcodes(assembly(_row_statistics_kernel, tmp_path, {}, constants, num_warps=8))
    assert "LDG.E.128" in names and not spills(names)


@pytest.mark.parametrize("bits", ["*i16", "*i32", "*i64"])
def test_sum_kernel_of_digests_stays_in_registers(tmp_path: Path, bits: str) -> None:
    operands = {"bits": bits, **dict.fromkeys(("starts", "rows", "inner", "parts"), "*i64")}
    constants = {"SPAN": sum_kernel.SPAN, "BLOCK": sum_kernel.BLOCK}
    names = opcodes(assembly(sum_kernel._weighted_sum_kernel, tmp_path, operands, constants, num_warps=4))
    assert any(name.startswith("LDG.E") for name in names) and not spills(names)


@pytest.mark.slow
@pytest.mark.parametrize(("tiles", "dtype"), [(BF16_TILES, "bf16"), (FP32_TILES, "fp32")])
def test_fused_kernel_runs_its_loop_without_spills(tmp_path: Path, tiles: Tiles, dtype: str) -> None:
    """bf16 on tensor cores (wgmma), fp32 on scalar units: nothing is rounded to TF32."""
    constants = {
        "scale_stride": 1,
        "ROUND": False,
        "ENTROPY": True,
        "WHOLE": True,
        "GROUP": GROUP,
        "BLOCK_T": tiles.tokens,
        "BLOCK_V": tiles.columns,
        "BLOCK_H": tiles.width,
    }
    operands = {"hidden": f"*{dtype}", "weight": f"*{dtype}"}
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    names = opcodes(assembly(_fused_statistics_kernel, tmp_path, operands, constants, **options))
    products = [place for place, name in enumerate(names) if name.startswith("HGMMA" if dtype == "bf16" else "FFMA")]
    assert not [name for name in names if "TF32" in name] and len(products) >= 4
    assert (dtype == "bf16") == any("HGMMA" in name for name in names)
    if dtype == "bf16":
        assert not spills(names[products[0] : products[-1]])
    else:
        assert not spills(names)


def spills(names: list[str]) -> list[str]:
    return [name for name in names if name.startswith(("LDL", "STL"))]
