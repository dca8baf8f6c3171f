"""The logit projection over a tensor-parallel group: equal to one process, bitwise equal on all ranks.

Why this matters: ranks whose log-probabilities differ in one bit take different steps. Not exercised: NCCL, groups of
more than four ranks, GPU backends.
"""

import logits_ranks
import pytest
import torch
from logits_ranks import Case
from runner import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BOTH = (torch.float64, torch.float32)
CASES = [
    *(
        Case(level=level, padded=padded, dtype=dtype)
        for dtype in BOTH
        for level, padded in ((0.0, 12), (-500.0, 16), (500.0, 16), (0.0, 48))
    ),
    *(Case(dtype=dtype, sequence_parallel=True, masked=masked) for dtype in BOTH for masked in (False, True)),
    *(
        Case(dtype=dtype, in_chunks=True, sequence_parallel=parallel, masked=parallel)
        for dtype in BOTH
        for parallel in (False, True)
    ),
    *(Case(in_chunks=True, padded=padded, workspace_mb=0.001) for padded in (16, 48)),
    Case(dtype=torch.bfloat16, masked=True),
]
"""48 rows over four ranks leave three of them nothing but padding; their chunks have to be those of the first."""
DIVERGENCES = [
    Case(direction=direction, dtype=dtype, padded=padded, in_chunks=True, **options)
    for direction in ("reverse", "forward")
    for dtype in BOTH
    for padded, options in (
        (12, {}),
        (48, {"masked": True}),
        (16, {"workspace_mb": 0.001}),
        (12, {"sequence_parallel": True, "masked": True}),
    )
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-6}
SIZES = (2, 4)


@pytest.fixture(scope="module")
def by_ranks():
    return {size: run_ranks(size, "logits_ranks:many", CASES + DIVERGENCES) for size in SIZES}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("index", range(len(CASES)))
def test_several_ranks_give_the_result_of_one(index, size, by_ranks):
    case = CASES[index]
    alone, found = logits_ranks.run(case), [ranks[index] for ranks in by_ranks[size]]
    tolerance = max(TOLERANCE[case.dtype], abs(case.level) * 2**-22 * (case.dtype is not torch.float64))
    for name in ("value", "logprob", "entropy"):
        assert (found[0][name] - alone[name]).abs().max() < tolerance * (10 if name == "value" else 1), name
    grad_h = torch.cat([f["grad_h"] for f in found]) if case.sequence_parallel else found[0]["grad_h"]
    grad_w = torch.cat([f["grad_w"] for f in found])
    # A level of 500 is a common factor of a column of the head, and cancels in that of hidden.
    share = 8e-3 if case.dtype is torch.bfloat16 else 20 * tolerance
    assert (grad_h - alone["grad_h"]).norm() <= share * alone["grad_h"].norm().clamp(min=1)
    assert (grad_w - alone["grad_w"]).norm() <= share * alone["grad_w"].norm()
    assert grad_w[logits_ranks.VOCAB :].abs().sum() == 0 and grad_w[: logits_ranks.VOCAB].abs().sum() > 1


@pytest.mark.parametrize("size", (1, *SIZES))
@pytest.mark.parametrize("index", range(len(DIVERGENCES)))
def test_the_divergence_and_its_gradients_are_those_of_float64(index, size, by_ranks):
    case = DIVERGENCES[index]
    expected = logits_ranks.exact_divergence(case)
    found = [logits_ranks.run(case)] if size == 1 else [ranks[len(CASES) + index] for ranks in by_ranks[size]]
    joined = {name: found[0][name] for name in ("value", "kl", "grad_h")}
    joined["grad_w"] = torch.cat([rank["grad_w"] for rank in found])[: logits_ranks.VOCAB]
    if case.sequence_parallel and size > 1:
        joined["grad_h"] = torch.cat([rank["grad_h"] for rank in found])
    for name, value in joined.items():
        # in fp32 gradients of the gap of two log-probabilities have 1.3e-6 by torch's own log_softmax
        tolerance = TOLERANCE[case.dtype] * (4 if name.startswith("grad") else 1)
        assert (value.double() - expected[name]).norm() <= tolerance * expected[name].norm(), name
    for other in found[1:]:
        assert torch.equal(found[0]["kl"], other["kl"])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("index", range(len(CASES)))
def test_ranks_agree_bit_for_bit(index, size, by_ranks):
    names = ("value", "logprob", "entropy", *(() if CASES[index].sequence_parallel else ("grad_h",)))
    first, *others = (ranks[index] for ranks in by_ranks[size])
    for other in others:
        assert [name for name in names if not torch.equal(first[name], other[name])] == []
