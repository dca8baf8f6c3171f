"""Values and gradients of the losses in fp32 on each device compared with fp64; test_losses.py has them by hand."""

import pytest
import torch
from gpu_cases import judge

from megatron_scalerl.losses import LOSSES, LossInputs

CAP = 5.0
CLIPS = {"dapo": (0.2, 0.26), "grpo": (0.2, 0.2), "gspo": (3e-3, 5e-3)}
"""Clip range below and above 1."""
BOUND = 64 * 2.0**-24
"""Relative bound of value and gradient. exp() of a log ratio within +-20 rounded to fp32 has an error of up to about
20 units of 2^-24; products and a tree sum of a few thousand terms add a few more."""
EDGE = 1e-4
"""Ratios this close to a clip may be on its other side in fp32 and have another gradient, which is not compared."""


def loss_inputs(tokens):
    """`tokens` random positions of 16 sequences in fp64: a tenth is masked and holds NaN and infinities.

    Log ratios have a standard deviation of 0.4, so that caps and clips take effect. The mean of each sequence is
    -0.02 to 0.02, on both sides of GSPO's clips and away from their edges; some in the last sequence are far below
    the clamp at -20 nats.
    """
    g = torch.Generator().manual_seed(11)
    double = dict(generator=g, dtype=torch.float64)
    sequence_ids = torch.arange(tokens) * 16 // tokens
    mask = torch.rand(tokens, generator=g) < 0.9
    rollout = -torch.randn(tokens, **double).abs() * 3
    log_ratio = 0.4 * torch.randn(tokens, **double) * mask
    zeros = torch.zeros(16, dtype=torch.float64)
    means = zeros.index_add(0, sequence_ids, log_ratio) / zeros.index_add(0, sequence_ids, mask.double())
    log_ratio += (torch.linspace(-0.02, 0.02, 16, dtype=torch.float64) - means)[sequence_ids]
    log_ratio[(sequence_ids == 15) & (torch.arange(tokens) % 8 == 0)] = -30.0
    off = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0], dtype=torch.float64)[
        torch.arange(tokens) % 4
    ]

    def column(values):
        return values.where(mask, off).float().double()  # rounded, so that fp64 and fp32 have the same inputs

    return LossInputs(
        trainer_logprobs=column(rollout.float().double() + log_ratio),
        rollout_logprobs=column(rollout),
        advantages=column(torch.randn(tokens, **double)),
        loss_mask=mask,
        token_weights=column(torch.rand(tokens, **double) / tokens),
        sequence_ids=sequence_ids,
    )


FIELDS = [name for name in LossInputs.__dataclass_fields__ if name not in ("staleness", "columns")]


def taken(name, inputs, device, dtype):
    """(output of the loss, gradient of the trainer's log-probs)."""
    columns = {field: getattr(inputs, field).to(device, copy=True) for field in FIELDS}
    columns = {field: v.to(dtype) if v.is_floating_point() else v for field, v in columns.items()}
    logprobs = columns["trainer_logprobs"].requires_grad_()
    clips = dict(zip(("clip_low", "clip_high"), CLIPS.get(name, ()))) or dict(max_is_weight=CAP)
    output = LOSSES[name](LossInputs(**columns), **clips)
    output.loss.backward()
    return output, logprobs.grad


@pytest.mark.parametrize("name", LOSSES)
def test_fp32_on_a_device_is_fp64(name, device, record_property):
    """The value's error is relative to the magnitudes of its terms; a gradient's to itself plus a hundredth of the
    largest, because GSPO's gradient is a sum over a sequence that may cancel."""
    inputs = loss_inputs(512 if device == "cpu" else 4096)
    place = "cpu" if device == "cpu" else torch.accelerator.current_accelerator()
    mask, cispo = inputs.loss_mask, name == "cispo"
    exact, gradient = taken(name, inputs, "cpu", torch.float64)
    ratio, (low, high) = exact.is_weights, CLIPS.get(name, (2.0, 1e9))  # CISPO's weight is continuous at its cap
    at_edge = ((ratio - (1 - low)).abs() < EDGE) | ((ratio - (1 + high)).abs() < EDGE)
    comparable = mask & ~at_edge
    terms = (inputs.token_weights * inputs.advantages).abs() * ratio.clamp(max=CAP if cispo else torch.inf)
    size = (terms * (inputs.trainer_logprobs.abs() if cispo else 1.0))[mask].sum().item()
    value, found = taken(name, inputs, place, torch.float32)
    found = found.double().cpu()
    apart = (found - gradient).abs() / (gradient.abs() + 0.01 * gradient[comparable].abs().max())
    judge(
        record_property,
        {
            "tokens at an edge": (1.0 - (comparable.sum() / mask.sum()).item(), 0.01),
            "value": (abs(value.loss.item() - exact.loss.item()) / size, BOUND),
            "gradient": (apart[comparable].max().item(), BOUND),
            "gradient of masked tokens": (found[~mask].abs().sum().item(), 1e-30),
        },
    )
