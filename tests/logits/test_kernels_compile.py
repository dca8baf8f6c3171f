"""The Triton kernels compiled for a Hopper GPU, which needs none: the compiler and assembler come with Triton."""

import re
from pathlib import Path

import pytest
import triton
from programs import printed
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_scalerl.logits import row_kernels
from megatron_scalerl.weights import sum_kernel

DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
INTEGERS = ("first", "columns", "width", "mask")
OPCODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_.]+)", re.MULTILINE)


@pytest.fixture
def opcodes(monkeypatch, tmp_path):
    """A function: the instructions of a kernel, without predicates and operands.

    Its arguments are pointers to fp32 unless `operands` has them; whatever may be aligned to 16 bytes is.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")

    def compiled(kernel, constants, *, warps=4, **operands):
        signature, aligned = {}, {}
        for place, name in enumerate(kernel.arg_names):
            if name in constants:
                signature[name] = "constexpr"
            elif name in INTEGERS or name.endswith("_stride"):
                signature[name] = "i32"
            else:
                signature[name] = operands.get(name, "*fp32")
            if signature[name] != "constexpr" and name != "first":
                aligned[(place,)] = [["tt.divisibility", 16]]
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        source = ASTSource(kernel, signature, places, aligned)
        options = {"num_warps": warps, "num_stages": 3}
        binary = tmp_path / "kernel.cubin"
        binary.write_bytes(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"])
        return OPCODE.findall(printed(DISASSEMBLER, "-sass", binary))

    return compiled


def spills(names):
    """Instructions that move a register to local memory or back."""
    return [name for name in names if name.startswith(("LDL", "STL"))]


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_gradient_kernel_moves_16_bytes_at_a_time(opcodes, entropy, split):
    constants = {"ENTROPY": entropy, "SPLIT": split, "BLOCK": row_kernels.GRADIENT_BLOCK}
    names = opcodes(
        row_kernels._logit_gradient_kernel, constants, targets="*i64", high_term="*bf16", low_term="*bf16"
    )
    assert "LDG.E.128" in names and "STG.E.128" in names and not spills(names)
    assert sum(name.startswith("STG") for name in names) == (4 if split else 2)


def test_statistics_kernel_stays_in_registers(opcodes):
    constants = {"BLOCK": row_kernels.STATISTICS_BLOCK}
    names = opcodes(row_kernels._row_statistics_kernel, constants, targets="*i64", warps=8)
    assert "LDG.E.128" in names and not spills(names)


@pytest.mark.parametrize("bits", ["i16", "i32", "i64"])
def test_sum_kernel_of_digests_stays_in_registers(opcodes, bits):
    integers = dict.fromkeys(("starts", "rows", "inner", "parts"), "*i64")
    constants = {"SPAN": sum_kernel.SPAN, "BLOCK": sum_kernel.BLOCK}
    names = opcodes(sum_kernel._weighted_sum_kernel, constants, bits=f"*{bits}", **integers)
    assert any(name.startswith("LDG.E") for name in names) and not spills(names)
