"""Each family's log-probs and one step on each device compared with transformers in fp32 on the CPU.

Plain layers run in fp32, with a tight tolerance, and in bf16; Transformer Engine's layers in bf16 only, which their
packed sequences require.
"""

import functools
from dataclasses import replace

import pytest
from gpu_cases import FP32, KINDS, ONE_BF16, TWO_BF16, bf16_distances, fp32_distances, judge, typical

pytestmark = pytest.mark.full  # test_family_parity.py has the same on a CPU


@pytest.fixture(scope="module")
def made(ranks, prepared):
    """(device, layers) -> the trainer's step by (family, dtype); one process for all families."""

    @functools.cache
    def make(device, layers):
        dtypes = ("bfloat16",) if layers == "te" else ("float32", "bfloat16")
        cases = [replace(prepared(kind, device).case, dtype=dtype) for kind in KINDS for dtype in dtypes]
        [steps] = ranks(1, "gpu_ranks:steps", cases, device=device, layers=layers)
        return {(case.kind, case.dtype): step for case, step in zip(cases, steps)}

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_that_of_transformers(kind, where, made, prepared, record_property):
    reference, steps = prepared(kind, where[0]), made(*where)
    distances = bf16_distances(kind, steps[kind, "bfloat16"], reference.exact, ONE_BF16 * reference.own)
    if where[1] == "plain":
        distances = {**distances, **fp32_distances(steps[kind, "float32"], reference.exact)}
    judge(record_property, distances)


@pytest.mark.gpu
@pytest.mark.te
@pytest.mark.parametrize("kind", KINDS)
def test_both_kinds_of_layers_make_the_same_step(kind, made, prepared, record_property):
    te, plain = (made("gpu", layers)[kind, "bfloat16"] for layers in ("te", "plain"))
    judge(record_property, bf16_distances(kind, te, plain, TWO_BF16 * prepared(kind, "gpu").own))


@pytest.mark.parametrize("layout", ["", *(pytest.param(name, marks=pytest.mark.gpus(2)) for name in ("TP2", "EP2"))])
def test_adapters_after_a_step_are_those_that_are_merged(layout, where, ranks, prepared, tmp_path, record_property):
    kind = "qwen3_moe" if layout == "EP2" else "llama"
    reference = prepared(kind, where[0])
    case = replace(reference.case, lora=True, lr=0.05, layout=layout, world_size=1 + bool(layout))
    bound = FP32
    if where[1] == "te":
        case = replace(case, dtype="bfloat16")
        bound = TWO_BF16 * reference.own
    options = dict(device=where[0], layers=where[1])
    before, after, merged = ranks(case.world_size, "gpu_ranks:merged", case, tmp_path, **options)[0]
    assert typical(kind, before, after) > 2 * bound
    judge(record_property, {"log-probs": (typical(kind, after, merged), bound)})
