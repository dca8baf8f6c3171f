"""The logit projection's backends compared with fp64 and with the torch backend on the CPU, on each device."""

from dataclasses import replace

import pytest
import torch
from gpu_cases import judge, relative
from logits.logit_problems import as_megatron_parameter, by_log_softmax

from megatron_scalerl.logits import token_logprobs
from megatron_scalerl.logits.choice import choose_backend
from megatron_scalerl.logits.projection import Projection, merged_statistics, results

CPU = torch.device("cpu")
TOKENS, WIDTH, VOCAB = 700, 320, 5003
NATS = 5e-5
"""Bound on log-probs and entropies, documented in `logits.api`."""
BF16, FP32 = torch.bfloat16, torch.float32
HEAD = {"bf16": 3e-3, "bf16x2": 1e-5, "fp32": 1e-5}
"""Relative bound on the head's gradient by `grad_logits`, documented there too."""
HIDDEN = {BF16: 4e-3, FP32: 1e-5}
"""Relative bound on the gradient of hidden states, which is rounded to their type."""
ALLOCATOR_BYTES = 4 * 2**20
"""PyTorch's allocator does not split a free block if less than 1 MiB would remain; up to four are in use."""
BACKENDS = [
    pytest.param(("cpu", "torch"), marks=pytest.mark.full),  # tests/logits has the same cases
    *(pytest.param(("gpu", name), marks=pytest.mark.gpu) for name in ("torch", "cuda")),
]


@pytest.fixture(params=BACKENDS, ids=lambda pair: "-".join(pair))
def place(request):
    """(device, backend)."""
    return at(request.param[0]), request.param[1]


def at(device):
    return CPU if device == "cpu" else torch.accelerator.current_accelerator()


def problem(dtype):
    """hidden [T, H], head [V, H], targets [T]; targets at block and vocabulary boundaries."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)
    weight = (0.2 * torch.randn(VOCAB, WIDTH, generator=generator)).to(dtype)
    return hidden, weight, torch.tensor([0, 255, 256, 511, 512, 4095, 4096, VOCAB - 1]).repeat(TOKENS)[:TOKENS]


def total(logprob, entropy):
    g = torch.linspace(-1.0, 2.0, TOKENS, device=logprob.device, dtype=logprob.dtype)
    return (logprob * g).sum() + (entropy * g.flip(0)).sum()


def computed(place, dtype, **options):
    """Log-probabilities, entropies [T], gradients of hidden [T, H] and of the head [V, H] (fp32), on the CPU."""
    device, backend = place
    hidden, weight, targets = (t.to(device) for t in problem(dtype))
    hidden.requires_grad_()
    weight = as_megatron_parameter(weight, FP32)
    options = {"entropy": "grad", "temperature": 0.7, "backend": backend, **options}
    pair = token_logprobs(hidden, weight, targets, **options)
    total(*pair).backward()
    return tuple(t.detach().cpu() for t in (*pair, hidden.grad, weight.main_grad))


def exact(dtype):
    """The same in fp64."""
    hidden, weight, targets = problem(dtype)
    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    pair = by_log_softmax(h, w, targets, 0.7)
    total(*pair).backward()
    return tuple(t.detach() for t in (*pair, h.grad, w.grad))


def compare(record, found, expected, head, hidden):
    judge(
        record,
        {
            "log-probs": ((found[0] - expected[0]).abs().max().item(), NATS),
            "entropies": ((found[1] - expected[1]).abs().max().item(), NATS),
            "head's gradient": (relative(found[3].double(), expected[3].double()), head),
            "hidden gradient": (relative(found[2].double(), expected[2].double()), hidden),
        },
    )


@pytest.mark.parametrize("workspace", [512.0, 2.0])
@pytest.mark.parametrize("mode", HEAD)
def test_bf16_operands_are_as_exact_as_documented(mode, workspace, place, record_property):
    found = computed(place, BF16, grad_logits=mode, workspace_mb=workspace)
    compare(record_property, found, exact(BF16), HEAD[mode], HIDDEN[BF16])


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_a_device_computes_what_the_cpu_does(dtype, place, record_property):
    found = computed(place, dtype, grad_logits="fp32")
    compare(record_property, found, computed((CPU, "torch"), dtype, grad_logits="fp32"), 1e-5, HIDDEN[dtype])


def test_fp32_operands_meet_no_tf32(place, record_property):
    """The user allows TF32, and still does afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        found = computed(place, FP32)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    compare(record_property, found, exact(FP32), 1e-5, 1e-5)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_two_shards_are_one_vocabulary(dtype, place):
    device, backend = place
    hidden, weight, targets = (t.to(device) for t in problem(dtype))
    scale, kept = torch.tensor(1.0, device=device), dict(round_logits=False, entropy=True, entropy_grad=False)
    kept |= dict(grad_logits="bf16", workspace_bytes=2**24, first=0)
    whole = Projection(hidden=hidden, weight=weight, targets=targets, scale=scale, **kept)
    half = replace(whole, weight=weight[:2500]), replace(whole, weight=weight[2500:], first=2500)
    chosen = choose_backend(backend, device, dtype)
    one = results(chosen.statistics(whole))
    two = results(merged_statistics(torch.stack([chosen.statistics(shard) for shard in half])))
    assert max((a - b).abs().max().item() for a, b in zip(one, two)) <= NATS


@pytest.mark.parametrize("level", [-1e4, 1e4])
def test_logits_far_from_zero_stay_finite(level, place):
    device, backend = place
    hidden, weight, targets = (t.to(device) for t in problem(FP32))
    hidden[:, 0], weight[:, 0] = 1.0, level
    weight.requires_grad_()
    logprob, entropy = token_logprobs(hidden, weight, targets, entropy="grad", backend=backend)
    (logprob.sum() + entropy.sum()).backward()
    assert logprob.isfinite().all() and weight.grad.isfinite().all()
    assert (logprob <= 0).all() and (entropy >= 0).all()


def test_the_backend_of_a_device(device):
    chosen = [choose_backend("auto", at(device), dtype).name for dtype in (BF16, torch.float64)]
    assert chosen == ["torch" if device == "cpu" else "cuda", "torch"]


@pytest.mark.gpu
def test_the_workspace_bounds_the_allocator(record_property):
    """One pass of 8,192 tokens, whose logits would take 1,002 MiB; a first pass allocates what libraries keep."""
    device = at("gpu")
    hidden = torch.randn(8192, WIDTH, device=device, dtype=BF16, requires_grad=True)
    weight = torch.randn(32064, WIDTH, device=device, dtype=BF16, requires_grad=True)
    targets = torch.randint(0, 32064, (8192,), device=device)
    for _ in range(2):
        hidden.grad = weight.grad = None
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        token_logprobs(hidden, weight, targets, workspace_mb=64, backend="cuda")[0].sum().backward()
    extra = torch.accelerator.max_memory_allocated() - before
    beside = 6 * weight.numel() + 6 * hidden.numel() + 100 * 4 * 8192  # the head's gradient in fp32 and in bf16
    judge(record_property, {"extra bytes": (extra, 64 * 2**20 + beside + ALLOCATOR_BYTES)})
