"""The step of transformers on a case, and tolerances for the trainer's step and for those of parallel layouts.

If bf16 rounding makes a router select another expert, the log-prob of a token changes a lot. Therefore mixtures of
experts are compared by the median.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from megatron_scalerl.check_gpu.cases import Case, samples
from megatron_scalerl.check_gpu.findings import Distance, relative

FP32_BOUND = 1e-4
"""Nats, maximum over log-probs."""
FP32_SCALAR_BOUND = 1e-4
"""Relative, for loss and gradient norm."""
BF16_FACTOR = 1.5
"""Bound of our bf16 error relative to that of transformers."""
BF16_SCALAR_BOUNDS = (0.01, 0.02)
"""Of the loss in nats (its weights add up to 1), and of the gradient norm, relative; twice that with experts. On a
CPU up to 0.004 and 0.006, with experts 0.01 and 0.02, at toy size, several times less at full size."""
TWO_ROUNDINGS = 2.0
"""Two independent bf16 results, each within `BF16_FACTOR` of transformers' error: about sqrt(2) x 1.5."""
TIE = 3e-5
"""Smallest gap between router logits of the last selected expert and the next one. With smaller gaps fp32 rounding
(about 2e-6) may change the selection; such sequences are redrawn."""
_THREADS = 8
"""Threads of transformers on the CPU."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Log-probs and the report of the first step."""

    logprobs: np.ndarray
    """[T] nats"""
    loss: float
    grad_norm: float
    narrowest: float = math.inf
    """Smallest gap between router logits of selected and other experts; known for transformers only."""


def bound_threads() -> None:
    """Limit PyTorch's threads: it counts the host's cores, of which a container may have few."""
    torch.set_num_threads(min(torch.get_num_threads(), _THREADS))


def in_transformers(case: Case, path: Path, dtype: torch.dtype) -> Step:
    """Log-probs of transformers, and loss and gradient of a step whose ratios are all 1.

    On the CPU with its eager implementations. The model is loaded in `dtype`, because converting a built model to
    bf16 would round its rotary frequencies.
    """
    from transformers import AutoModelForCausalLM

    plain = {"attn_implementation": "eager"} | ({"experts_implementation": "eager"} if is_mixture(case.kind) else {})
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=False, **plain)
    model.eval()
    ids = case.token_ids()
    found, loss = [], 0.0
    gaps = _watch_routers(model)
    for row, sample in zip(ids, samples(ids, [[0.0] * (len(row) - 1) for row in ids])):
        tokens = torch.tensor([row])
        logits = model(input_ids=tokens[:, :-1]).logits[0].float()
        logprobs = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        term = -sample.token_weight * sample.advantage * logprobs.sum()
        term.backward()  # type: ignore[no-untyped-call]
        loss += term.item()
        found.append(logprobs.detach().double())
    norms = [p.grad.double().norm() for p in model.parameters() if p.grad is not None]
    return Step(
        logprobs=torch.cat(found).numpy(),
        loss=loss,
        grad_norm=math.sqrt(sum(float(norm) ** 2 for norm in norms)),
        narrowest=min(gaps, default=math.inf),
    )


def without_ties(case: Case, path: Path) -> tuple[Case, Step]:
    """(the case with sequences without ties of router logits, its step in fp32)."""
    for seed in range(case.seed, case.seed + 20):
        case = replace(case, seed=seed)
        exact = in_transformers(case, path, torch.float32)
        if exact.narrowest > TIE:
            return case, exact
    raise RuntimeError(f"{path}: expected sequences without ties of router logits, found none in 20 draws")


def _watch_routers(model: Any) -> list[float]:
    """Hook the routers; returns a list that receives the smallest gap of each router call."""
    gaps: list[float] = []
    chosen = getattr(model.config, "num_experts_per_tok", 0)

    def watch(router: Any, inputs: tuple[torch.Tensor, ...], _: Any) -> None:
        logits = torch.nn.functional.linear(inputs[0].detach().flatten(0, -2), router.weight.detach())
        ranked = logits.sort(dim=-1, descending=True).values
        gaps.append(float((ranked[:, chosen - 1] - ranked[:, chosen]).min()))

    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("router", "gate"):
            module.register_forward_hook(watch)
    return gaps


def fp32_distances(found: Step, exact: Step) -> list[Distance]:
    """Two steps in fp32."""
    apart = float(np.abs(found.logprobs - exact.logprobs).max())
    return [
        Distance(name="fp32 log-probs, max", found=apart, bound=FP32_BOUND),
        relative("fp32 loss", found.loss, exact.loss, FP32_SCALAR_BOUND),
        relative("fp32 gradient norm", found.grad_norm, exact.grad_norm, FP32_SCALAR_BOUND),
    ]


def bf16_distances(kind: str, found: Step, exact: Step, own: float) -> list[Distance]:
    """Our bf16 compared with fp32. own: bf16 error of transformers, nats (`typical`)."""
    return [_logprobs(kind, found, exact, BF16_FACTOR * own), *_scalars(kind, found, exact)]


def two_bf16_distances(kind: str, found: Step, other: Step, own: float) -> list[Distance]:
    """Two steps in bf16 with different layers or layouts. own: as in `bf16_distances`."""
    return [_logprobs(kind, found, other, TWO_ROUNDINGS * own), *_scalars(kind, found, other)]


def _logprobs(kind: str, found: Step, other: Step, bound: float) -> Distance:
    name = f"bf16 log-probs, {'median' if is_mixture(kind) else 'mean'}"
    return Distance(name=name, found=typical(kind, found.logprobs, other.logprobs), bound=bound)


def _scalars(kind: str, found: Step, other: Step) -> list[Distance]:
    loss_bound, norm_bound = ((1 + is_mixture(kind)) * bound for bound in BF16_SCALAR_BOUNDS)
    return [
        Distance(name="bf16 loss", found=abs(found.loss - other.loss), bound=loss_bound),
        relative("bf16 gradient norm", found.grad_norm, other.grad_norm, norm_bound),
    ]


def typical(kind: str, found: ArrayLike, other: ArrayLike) -> float:
    """Mean absolute difference; the median for a mixture of experts."""
    apart = np.abs(np.asarray(found) - np.asarray(other))
    return float((np.median if is_mixture(kind) else np.mean)(apart))


def is_mixture(kind: str) -> bool:
    """True for families with experts."""
    return kind in ("qwen3_moe", "llama4")
