"""Values and gradients of the losses in fp32 on a device, compared with fp64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_scalerl.check_gpu.findings import Distance
from megatron_scalerl.losses import LOSSES, LossInputs, LossOutput

CAP = 5.0
CLIPS: dict[str, tuple[float, float]] = {"dapo": (0.2, 0.26), "grpo": (0.2, 0.2), "gspo": (3e-3, 5e-3)}
"""Clip range below and above 1."""
BOUND = 64 * 2.0**-24
"""Relative bound of value and gradient. exp() of a log ratio within +-20 rounded to fp32 has an error of up to about
20 units of 2^-24; products and a tree sum of a few thousand terms add a few more."""
EDGE = 1e-4
"""Ratios this close to a clip may be on its other side in fp32 and have another gradient, which is not compared. At
most a hundredth of the tokens may be that close."""


def loss_inputs(tokens: int) -> LossInputs:
    """`tokens` random positions of 16 sequences in fp64: a tenth is masked and holds NaN and infinities.

    Log ratios have a standard deviation of 0.4, so that caps and clips take effect. The mean of each sequence is
    -0.02 to 0.02, on both sides of GSPO's clips and away from their edges; some in the last sequence are far below
    the clamp at -20 nats.
    """
    g = torch.Generator().manual_seed(11)

    def normal() -> Tensor:
        return torch.randn(tokens, generator=g, dtype=torch.float64)

    sequence_ids = torch.arange(tokens) * 16 // tokens
    mask = torch.rand(tokens, generator=g) < 0.9
    rollout = -normal().abs() * 3
    log_ratio = 0.4 * normal() * mask
    counts = torch.zeros(16, dtype=torch.float64).index_add(0, sequence_ids, mask.double())
    means = torch.zeros(16, dtype=torch.float64).index_add(0, sequence_ids, log_ratio) / counts
    log_ratio += (torch.linspace(-0.02, 0.02, 16, dtype=torch.float64) - means)[sequence_ids]
    log_ratio[(sequence_ids == 15) & (torch.arange(tokens) % 8 == 0)] = -30.0
    off = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0], dtype=torch.float64)
    off = off[torch.arange(tokens) % 4]

    def column(values: Tensor) -> Tensor:
        # rounded to fp32, so that fp64 and fp32 have the same inputs
        return values.where(mask, off).float().double()

    return LossInputs(
        trainer_logprobs=column(rollout.float().double() + log_ratio),
        rollout_logprobs=column(rollout),
        advantages=column(normal()),
        loss_mask=mask,
        token_weights=column(torch.rand(tokens, generator=g, dtype=torch.float64) / tokens),
        sequence_ids=sequence_ids,
    )


def compare(name: str, inputs: LossInputs, device: torch.device) -> list[Distance]:
    """Value and gradient of the loss `name` in fp32 on `device` and on the CPU, each compared with fp64.

    The value's error is relative to the sum of the magnitudes of its terms; a gradient's to itself plus a hundredth
    of the largest, because GSPO's gradient is a sum over a sequence that may cancel.
    """
    exact, gradient = _taken(name, inputs, torch.device("cpu"), torch.float64)
    comparable = inputs.loss_mask & ~_at_edge(name, exact.is_weights)
    skipped = 1.0 - float(comparable.sum() / inputs.loss_mask.sum())
    scale = float(gradient[comparable].abs().max())
    # magnitudes of the terms of the sum: rounding is relative to them
    terms = (inputs.token_weights * inputs.advantages)[inputs.loss_mask].abs()
    terms = terms * exact.is_weights[inputs.loss_mask].clamp(max=_largest(name))
    size = float((terms * _factor(name, inputs)).sum())
    found = [Distance(name=f"{name}: tokens at an edge", found=skipped, bound=0.01)]
    for place in dict.fromkeys((device, torch.device("cpu"))):
        value, grad = _taken(name, inputs, place, torch.float32)
        apart = (grad.double().cpu() - gradient)[comparable].abs()
        worst = float((apart / (gradient[comparable].abs() + 0.01 * scale)).max())
        off = float(grad.cpu()[~inputs.loss_mask].abs().sum())
        found += [
            Distance(
                name=f"{name}: value on {place.type}",
                found=abs(value.loss.item() - exact.loss.item()) / size,
                bound=BOUND,
            ),
            Distance(name=f"{name}: gradient on {place.type}", found=worst, bound=BOUND),
            Distance(name=f"{name}: gradient of masked tokens on {place.type}", found=off, bound=1e-30),
        ]
    return found


def _loss(name: str) -> Callable[[LossInputs], LossOutput]:
    if name == "cispo":
        return lambda inputs: LOSSES["cispo"](inputs, max_is_weight=CAP)
    low, high = CLIPS[name]
    return lambda inputs: LOSSES[name](inputs, clip_low=low, clip_high=high)


def _taken(name: str, inputs: LossInputs, device: torch.device, dtype: torch.dtype) -> tuple[LossOutput, Tensor]:
    def moved(values: Tensor) -> Tensor:
        return values.to(device, dtype, copy=True) if values.is_floating_point() else values.to(device)

    columns = {field: moved(getattr(inputs, field)) for field in LossInputs.__dataclass_fields__}
    logprobs = columns["trainer_logprobs"].requires_grad_()
    output = _loss(name)(LossInputs(**columns))
    output.loss.backward()
    assert logprobs.grad is not None
    return output, logprobs.grad


def _at_edge(name: str, ratio: Tensor) -> Tensor:
    if name == "cispo":  # its weight is continuous at the cap
        return torch.zeros_like(ratio, dtype=torch.bool)
    low, high = CLIPS[name]
    return ((ratio - (1 - low)).abs() < EDGE) | ((ratio - (1 + high)).abs() < EDGE)


def _largest(name: str) -> float:
    return CAP if name == "cispo" else float("inf")


def _factor(name: str, inputs: LossInputs) -> Tensor | float:
    return inputs.trainer_logprobs[inputs.loss_mask].abs() if name == "cispo" else 1.0
