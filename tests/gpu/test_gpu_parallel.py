"""The same step on two devices under each kind of parallelism and on one, over NCCL or gloo.

With plain layers in fp32 only the order of sums differs. With Transformer Engine in bf16 partial sums are rounded
before ranks add them, so two layouts are two bf16 results.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest
from gpu_cases import FP32, MIXTURES, TWO_BF16, bf16_distances, fp32_distances, judge, typical

pytestmark = [pytest.mark.full, pytest.mark.gpus(2)]  # test_parity.py has the same on a CPU

LAYOUTS = ("TP2", "EP2", "PP2", "CP2", "DP2")
LAUNCH_S = 120.0


@pytest.fixture(scope="module")
def made(ranks, prepared):
    """(device, layers, layout or "alone" and a family) -> the step of rank 0.

    On GPUs each layout has processes of its own, in case one hangs.
    """

    def case(device, layers, layout, kind):
        dtype, world = "bfloat16" if layers == "te" else "float32", 1 if layout == "alone" else 2
        return replace(prepared(kind, device).case, dtype=dtype, layout=layout, world_size=world)

    @functools.cache
    def launched(device, layers, layouts):
        cases = [case(device, layers, layout, kind_of(layout)) for layout in layouts]
        if layouts == ("alone",):
            cases.append(case(device, layers, "alone", "qwen3_moe"))
        options = dict(device=device, layers=layers, timeout_s=LAUNCH_S if device == "gpu" else 300.0)
        steps = ranks(cases[0].world_size, "gpu_ranks:steps", cases, **options)[0]
        return {(case.kind if case.layout == "alone" else case.layout): step for case, step in zip(cases, steps)}

    def make(device, layers, name):
        group = ("alone",) if name not in LAYOUTS else (name,) if device == "gpu" else LAYOUTS
        return launched(device, layers, group)[name]

    return make


def kind_of(layout):
    return "qwen3_moe" if layout == "EP2" else "llama"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_devices_make_the_step_of_one(layout, where, made, prepared, record_property):
    """Log-probs before and after it, loss, gradient norm."""
    kind = kind_of(layout)
    found, alone = made(*where, layout), made(*where, kind)
    after = typical(kind, found.after, alone.after)
    if where[1] == "te":
        bound = TWO_BF16 * prepared(kind, where[0]).own
        distances = {**bf16_distances(kind, found, alone, bound), "after the step": (after, bound)}
    else:
        # after the step router logits may have ties again
        after = after if kind in MIXTURES else float(np.abs(found.after - alone.after).max())
        distances = {**fp32_distances(found, alone), "after the step": (after, FP32)}
    judge(record_property, distances)
