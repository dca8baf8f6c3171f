"""TF32 is off inside and the user's setting back outside, whichever of PyTorch's two ways it was set by."""

import subprocess
import sys

import pytest

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


@pytest.mark.parametrize(
    ("setting", "readable"),
    [
        ("pass", True),
        ("torch.set_float32_matmul_precision('high')", True),
        ("torch.set_float32_matmul_precision('medium')", True),
        ("matmul.allow_tf32 = True", True),
        ("matmul.fp32_precision = 'tf32'", False),
    ],
)
def test_tf32_is_off_inside_and_the_setting_is_back_outside(setting, readable):
    program = PROGRAM.format(setting=setting)
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    outside, inside, after = found.stdout.strip().split("|")
    precision, allowed, _ = inside.strip("()").split(", ")
    assert precision == "'ieee'" and allowed in (("False",) if readable else ("False", "'mixed'"))
    assert after == outside or (setting == "pass" and after == outside.replace("none", "ieee"))
