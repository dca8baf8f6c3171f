"""TF32 is off inside and the user's setting back outside, whichever of PyTorch's two ways it was set by."""

import sys

import pytest
from programs import printed

from megatron_scalerl.logits.exact import bf16_may_be_faster

PROGRAM = """
import torch
from megatron_scalerl.logits.exact import fp32_products

matmul = torch.backends.cuda.matmul

def state():
    def ask(question):
        try:
            return question()
        except RuntimeError:
            return "mixed"
    allowed = ask(lambda: matmul.allow_tf32)
    return matmul.fp32_precision, allowed, ask(torch.get_float32_matmul_precision)

{setting}
outside = state()
with fp32_products(torch.device("cuda")):
    inside = state()
print(outside, inside, state(), sep="|")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting, readable",
    [("pass", True), ("torch.set_float32_matmul_precision('high')", True), ("matmul.fp32_precision = 'tf32'", False)],
)
def test_tf32_is_off_inside_and_the_setting_is_back_outside(setting, readable):
    found = printed(sys.executable, "-c", PROGRAM.format(setting=setting))
    outside, inside, after = found.strip().split("|")
    precision, allowed, _ = inside.strip("()").split(", ")
    assert precision == "'ieee'" and allowed in (("False",) if readable else ("False", "'mixed'"))
    assert after == outside or (setting == "pass" and after == outside.replace("none", "ieee"))


@pytest.mark.parametrize(
    "capabilities, faster",
    [
        ({"cpu_name": "Intel Xeon", "amx_bf16": True}, True),
        ({"cpu_name": "Intel Xeon", "amx_bf16": False}, False),
        ({"cpu_name": "AMD EPYC", "amx_bf16": False}, True),
        ({"cpu_name": "unknown", "architecture": "aarch64"}, True),
        (None, True),
    ],
)
def test_only_intel_s_cpus_without_amx_multiply_bf16_values_as_fp32(capabilities, faster, monkeypatch):
    """An older PyTorch does not tell."""
    if capabilities is None:
        monkeypatch.delattr("torch.cpu.get_capabilities", raising=False)
    else:
        monkeypatch.setattr("torch.cpu.get_capabilities", lambda: capabilities, raising=False)
    assert bf16_may_be_faster.__wrapped__() is faster
