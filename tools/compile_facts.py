"""Registers, spills and shared memory of every Triton kernel, compiled for an H100.

    python tools/compile_facts.py

Needs no GPU: the compiler, the assembler and the disassembler come with Triton. Prints a table for sm_90. A figure of
one version of Triton need not hold for another. `16 bytes`: whether global memory is loaded (LDG) and
stored (STG) so much at a time.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
from checkout import explained

parser = harness.options(__doc__)

if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

with explained():
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron_scalerl.logits import row_kernels
    from megatron_scalerl.weights import sum_kernel

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INTEGERS = ("first", "columns", "width", "mask")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kernel with the arguments that it is compiled for: pointers to fp32 unless `operands` has them."""

    kernel: Any
    constants: Mapping[str, Any]
    operands: Mapping[str, str] = field(default_factory=dict)
    warps: int
    stages: int = 3

    def compiled(self) -> Any:
        """The kernel for sm_90; whatever may be aligned to 16 bytes is."""
        signature = {}
        aligned = {}
        for place, name in enumerate(self.kernel.arg_names):
            if name in self.constants:
                signature[name] = "constexpr"
            elif name in INTEGERS or name.endswith("_stride"):
                signature[name] = "i32"
            else:
                signature[name] = "*i64" if name == "targets" else self.operands.get(name, "*fp32")
            if signature[name] != "constexpr" and name != "first":
                aligned[(place,)] = [["tt.divisibility", 16]]
        places = {(self.kernel.arg_names.index(name),): value for name, value in self.constants.items()}
        source = ASTSource(self.kernel, signature, places, aligned)
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def _gradient(*, entropy: bool, split: bool) -> Case:
    constants = {"scale_stride": 1, "ENTROPY": entropy, "SPLIT": split, "BLOCK": row_kernels.GRADIENT_BLOCK}
    narrow = {"high": "*bf16", "low": "*bf16"}
    return Case(kernel=row_kernels._logit_gradient_kernel, constants=constants, operands=narrow, warps=4)


def _weighted_sum(bits: str) -> Case:
    operands = {"bits": bits, **dict.fromkeys(("starts", "rows", "inner", "parts"), "*i64")}
    constants = {"SPAN": sum_kernel.SPAN, "BLOCK": sum_kernel.BLOCK}
    return Case(kernel=sum_kernel._weighted_sum_kernel, constants=constants, operands=operands, warps=4)


CASES = {
    "row_statistics": Case(
        kernel=row_kernels._row_statistics_kernel,
        constants={"scale_stride": 1, "BLOCK": row_kernels.STATISTICS_BLOCK},
        warps=8,
    ),
    **{
        f"logit_gradient{' entropy' * entropy}{' bf16x2' * split}": _gradient(entropy=entropy, split=split)
        for entropy in (False, True)
        for split in (False, True)
    },
    **{f"weighted_sum {bits[1:]}": _weighted_sum(bits) for bits in ("*i16", "*i32", "*i64")},
}


def disassembled(compiled: Any, what: str) -> str:
    """The output of cuobjdump for a compiled kernel: -sass its machine code, -res-usage its registers and stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(compiled.asm["cubin"])
        binary.flush()
        command = [str(TOOLS / "cuobjdump"), what, binary.name]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def opcodes(compiled: Any) -> list[str]:
    """The instructions in their order, without predicates and operands."""
    found = r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_.]+)"
    return re.findall(found, disassembled(compiled, "-sass"), re.MULTILINE)


def spills(names: list[str]) -> list[str]:
    """Instructions that move a register to local memory or back."""
    return [name for name in names if name.startswith(("LDL", "STL"))]


def facts(case: Case) -> dict[str, int | str]:
    """A row of the table."""
    compiled = case.compiled()
    names = opcodes(compiled)
    usage = disassembled(compiled, "-res-usage")
    found = {word: re.findall(rf"\b{word}:(\d+)", usage)[-1] for word in ("REG", "STACK")}
    widest = {name[:3] for name in names if re.fullmatch(r"(LDG|STG|LDGSTS)\.E\S*\.128\S*", name)}
    return {
        "warps": case.warps,
        "registers": found["REG"],
        "stack": found["STACK"],
        "spills": len(spills(names)),
        "shared": compiled.metadata.shared,
        "16 bytes": " ".join(sorted(widest)) or "-",
        "instructions": len(names),
    }


def main() -> None:
    rows = {name: facts(case) for name, case in CASES.items()}
    heads = list(next(iter(rows.values())))
    print(f"Triton {triton.__version__}, sm_90\n")
    print(f"| kernel | {' | '.join(heads)} |\n|---{'|---' * len(heads)}|")
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(str(value) for value in row.values())} |")


if __name__ == "__main__":
    main()
