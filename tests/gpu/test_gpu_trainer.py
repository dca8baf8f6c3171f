"""One trainer step with plain layers on each device compared with the CPU's; packing, checkpoint, memory.

Plain layers, but for checkpoint and memory: Transformer Engine supports packed sequences in bf16 only;
test_gpu_families.py compares the two. On a CPU a step is compared with itself, which tries the code only.
"""

from dataclasses import replace

import numpy as np
import pytest
from gpu_cases import judge, relative

pytestmark = pytest.mark.slow

NATS = 1e-4
"""Of log-probs. The error of fp32 is up to 1.2e-5 on these policies (on a CPU); that of TF32 would be 1e-2."""
GRADIENT = 1e-4
"""Relative L2. The error of fp32 is 3e-6 to 7e-6 (on a CPU)."""
WEIGHTS = 1e-5
"""Relative L2. The step changes the weights by 6 to 14 percent, so this is 1e-4 of the update."""
SCALAR = 1e-5
"""Relative, for loss and gradient norm: rounding averages out in these sums (4e-7 on a CPU)."""
BF16_FACTOR = 1.5
"""Bound of a device's bf16 error relative to the CPU's. Both round every layer's output once and accumulate in fp32;
accumulating a product or a softmax in bf16 exceeds it."""
BF16_NORM = 0.03
"""Relative (0.1 to 0.7 percent on a CPU)."""
GROWTH_BYTES = 10_000
"""Less than a leak of one column of a micro-batch in each of four steps."""


@pytest.fixture(scope="module")
def case(prepared, device):
    """With a learning rate at which one step changes the weights by a few percent."""
    return replace(prepared("llama", device).case, capped=True, lr=0.05)


@pytest.fixture(scope="module")
def made(ranks, case, device):
    """The steps in fp32 and bf16: here, and on the CPU."""
    cases = [replace(case, dtype=dtype) for dtype in ("float32", "bfloat16")]
    [here] = ranks(1, "gpu_ranks:steps", cases, device=device)
    [cpu] = ranks(1, "gpu_ranks:steps", cases, device="cpu") if device == "gpu" else [here]
    return {"fp32": here[0], "bf16": here[1], "cpu fp32": cpu[0], "cpu bf16": cpu[1]}


def test_fp32_is_the_cpus(made, record_property):
    found, expected = made["fp32"], made["cpu fp32"]
    judge(
        record_property,
        {
            "log-probs": (float(np.abs(found.logprobs - expected.logprobs).max()), NATS),
            "loss": (relative(found.loss, expected.loss), SCALAR),
            "gradient norm": (relative(found.grad_norm, expected.grad_norm), SCALAR),
            "gradient": (relative(found.gradient, expected.gradient), GRADIENT),
            "weights": (relative(found.weights, expected.weights), WEIGHTS),
        },
    )


def test_bf16_errs_as_the_cpus(made, record_property):
    found, rounded, exact = made["bf16"], made["cpu bf16"], made["cpu fp32"]
    distances = {
        name: (
            relative(getattr(found, name), getattr(exact, name)),
            BF16_FACTOR * relative(getattr(rounded, name), getattr(exact, name)),
        )
        for name in ("logprobs", "gradient", "weights")
    }
    loss = BF16_FACTOR * float(np.abs(rounded.logprobs - exact.logprobs).mean())
    distances["loss"] = abs(found.loss - exact.loss), loss
    distances["gradient norm"] = relative(found.grad_norm, exact.grad_norm), BF16_NORM
    judge(record_property, distances)


def test_packed_sequences_are_those_alone(ranks, case, device, record_property):
    [(packed, gradient, alone, other)] = ranks(1, "gpu_ranks:packing", case, device=device)
    apart = float(np.abs(packed - alone).max())
    judge(record_property, {"log-probs": (apart, NATS), "gradient": (relative(gradient, other), GRADIENT)})


def test_a_checkpoint_restores_every_bit(ranks, prepared, where, tmp_path):
    device, layers = where
    bf16 = replace(prepared("llama", device).case, capped=True, lr=0.05, dtype="bfloat16")
    [found] = ranks(1, "gpu_ranks:saved_and_loaded", bf16, tmp_path / "checkpoint", device=device, layers=layers)
    assert found["extra"] == {"written_by": "tests"}
    assert found["names"][0] == found["names"][1] and found["different"] == []
    assert any(name.startswith("weight") for name in found["changed"]), "else loading has done nothing"
    assert found["devices"] == set() and found["counters"] == ({1}, {2})


def test_a_deterministic_step_has_the_same_bits_twice(ranks, prepared, where):
    device, layers = where
    case = replace(prepared("llama", device).case, capped=True, dtype="bfloat16", deterministic=True)
    [(first, second)] = ranks(1, "gpu_ranks:steps", [case, case], device=device, layers=layers)
    assert np.array_equal(first.gradient, second.gradient) and np.array_equal(first.after, second.after)


def test_steps_leave_no_memory_behind(ranks, prepared, where, record_property):
    """Step 2 to step 6; a CPU's resident set has no bound."""
    device, layers = where
    bf16 = replace(prepared("llama", device).case, capped=True, lr=0.05, dtype="bfloat16")
    [found] = ranks(1, "gpu_ranks:memory_after_steps", bf16, device=device, layers=layers)
    bound = GROWTH_BYTES if device == "gpu" else 2**40
    judge(record_property, {"growth in bytes": (found[-1] - found[0], bound)})
